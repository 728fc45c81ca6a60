"""Every token is in one bucket, every bucket has its cap, and what a policy says about a full one happens."""

from dataclasses import replace

import pytest

from policies.draft import untouched
from policies.ledger import Action, Decision, Event
from policies.limits import BUCKETS, BucketExceeded, divide, is_over, is_soft
from policies.pressure import raw_buckets
from policies.settings import Bucket, ContextSettings, Layer
from tests.policies.play import assistant, decide, step, system, talk, user, words

FIVE = {
    "system": Bucket(cap=8_000, on_overflow="reject"),
    "tools": Bucket(cap=16_000, on_overflow="prune-unused"),
    "history": Bucket(cap=48_000, on_overflow="summarize"),
    "tool_outputs": Bucket(cap=32_000, on_overflow="truncate"),
    "memory": Bucket(charge_to="tool_outputs"),
    "summary": Bucket(charge_to="history"),
}
PLAIN = ContextSettings(
    window=128_000,
    margin=0.0,
    headroom=8_000,
    reserve=16_000,
    reserve_mode="fixed",
    layers=(),
    buckets=FIVE,
    rot_soft_tokens=None,
)


def results(count: int, tokens: int) -> list[object]:
    return [step(f"{n} {words(tokens - 5)}"[: 4 * (tokens - 4)], arguments=f'{{"n": {n}}}') for n in range(count)]


def decided(settings: ContextSettings, *said: object, tools: int = 0) -> Decision:
    budget = divide(settings, window=settings.window or 128_000)
    return decide(talk(*said, tools=tools), settings=settings, budget=budget)  # type: ignore[arg-type]


def events(decision: Decision, kind: str) -> list[Event]:
    return [e for e in decision.events if e.kind == kind]


@pytest.mark.requirement("D3", "A0.151")
def test_every_message_is_in_one_bucket_and_the_buckets_sum_to_the_whole() -> None:
    transcript = talk(
        system("rules"), user(words(50)), *[step(words(30)) for _ in range(3)], assistant("done"), tools=99
    )
    buckets = raw_buckets(transcript)
    assert list(buckets) == list(BUCKETS)
    assert sum(buckets.values()) == transcript.tokens
    assert buckets == untouched(transcript).buckets()
    calls = sum(m.tokens for m in transcript.messages if m.call_ids)
    assert buckets["tool_outputs"] == sum(m.tokens for m in transcript.messages if m.is_result)
    assert buckets["history"] > calls  # what a call says is history, what it returns a tool output


@pytest.mark.requirement("A0.98")
def test_an_exact_fit_is_allowed_and_one_token_more_is_not() -> None:
    budget = divide(PLAIN, window=128_000)
    assert budget.caps == {"system": 8_000, "tools": 16_000, "history": 48_000, "tool_outputs": 32_000}
    assert not is_over("tool_outputs", 32_000, budget)
    assert is_over("tool_outputs", 32_001, budget)
    assert not is_soft("tool_outputs", 25_599, FIVE, budget)
    assert is_soft("tool_outputs", 25_600, FIVE, budget)


@pytest.mark.requirement("D16", "A0.88", "A4.8")
def test_where_buckets_are_enforced_a_full_one_shrinks_to_its_watermark_and_the_others_stay() -> None:
    said = [user("x"), *results(12, 4_000), user("and now?")]
    assert decided(replace(PLAIN, enforce="global"), *said).action is Action.PASS
    enforced = decided(replace(PLAIN, enforce="bucket"), *said)
    assert enforced.action is Action.EDIT
    assert enforced.buckets["tool_outputs"] <= 32_000 * 0.8
    assert enforced.buckets["tool_outputs"] > 32_000 * 0.8 - 4_000
    assert enforced.buckets["history"] == decided(replace(PLAIN, enforce="global"), *said).buckets["history"]
    assert [r.scope for r in enforced.trail] == ["tool_outputs"]


@pytest.mark.requirement("A4.6", "A0.83")
def test_a_bucket_that_is_refused_names_itself_its_tokens_and_its_cap() -> None:
    settings = replace(PLAIN, enforce="bucket")
    assert decided(settings, system(words(7_996)), user("x")).action is Action.PASS
    with pytest.raises(BucketExceeded) as caught:
        decided(settings, system(words(7_997)), user("x"))
    assert (caught.value.bucket, caught.value.used, caught.value.cap) == ("system", 8_001, 8_000)
    assert "system holds 8001 tokens, 1 more than its cap of 8000" in str(caught.value)
    assert decided(replace(settings, enforce="global"), system(words(7_997)), user("x")).action is Action.PASS


@pytest.mark.requirement("A4.4")
def test_touching_the_headroom_is_an_alarm_and_starts_management_but_refuses_nothing() -> None:
    said = [user("task"), *results(8, 13_200), user("and now?")]
    settings = replace(PLAIN, buckets={}, layers=(Layer(strategy="evict", at=1.0, stop_at=0.6),))
    acted = decided(settings, *said)
    assert acted.before > 104_000
    assert acted.action is Action.EDIT
    assert acted.after <= 0.6 * 104_000
    stuck = decided(replace(settings, layers=()), *said)
    assert stuck.action is Action.PASS
    assert [e.facts["limit"] for e in events(stuck, "headroom_hit")] == [104_000]
    assert stuck.pressure.zone == "critical"
