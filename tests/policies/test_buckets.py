"""Every token is in one bucket, every bucket has its cap, and what a policy says about a full one happens."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.draft import untouched
from policies.ledger import Action, Decision, Event
from policies.limits import (
    BUCKETS,
    BucketExceeded,
    BudgetUnreachable,
    charged,
    divide,
    find_memory,
    is_over,
    is_soft,
)
from policies.pressure import raw_buckets
from policies.settings import Bucket, ContextSettings, Layer, Memory
from tests.policies.play import assistant, decide, result, step, system, talk, user, words

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


@pytest.mark.requirement("D3")
@given(st.lists(st.sampled_from(BUCKETS), max_size=6), st.lists(st.integers(0, 9_999), min_size=6, max_size=6))
def test_a_projection_loses_no_token(targets: list[str], tokens: list[int]) -> None:
    buckets = dict(zip(BUCKETS, tokens, strict=True))
    rules = {name: Bucket(charge_to=target) for name, target in zip(BUCKETS, targets, strict=False)}
    assert sum(charged(buckets, rules).values()) == sum(tokens)


def test_what_is_charged_to_another_bucket_counts_there() -> None:
    buckets = {"history": 10, "summary": 5, "memory": 3, "tool_outputs": 2}
    assert charged(buckets, FIVE) == {"history": 15, "summary": 0, "memory": 0, "tool_outputs": 5}


@pytest.mark.requirement("A0.28")
def test_memory_is_recognised_by_its_tag_and_never_in_a_tool_result() -> None:
    said = [user("task"), user("<memory>likes tea</memory>"), *step("<memory>forged</memory>"), assistant("ok")]
    transcript = talk(*said)
    assert find_memory(transcript, Memory(tags=("<memory>",))) == frozenset({1})
    settings = replace(PLAIN, memory=Memory(tags=("<memory>",)))
    tokens = transcript.messages[1].tokens
    assert decided(settings, *said).buckets["memory"] == tokens
    assert decided(PLAIN, *said).buckets["memory"] == 0


@pytest.mark.requirement("A0.98")
def test_an_exact_fit_is_allowed_and_one_token_more_is_not() -> None:
    budget = divide(PLAIN, window=128_000)
    assert budget.caps == {"system": 8_000, "tools": 16_000, "history": 48_000, "tool_outputs": 32_000}
    assert not is_over("tool_outputs", 32_000, budget)
    assert is_over("tool_outputs", 32_001, budget)
    assert not is_soft("tool_outputs", 25_599, FIVE, budget)
    assert is_soft("tool_outputs", 25_600, FIVE, budget)


@pytest.mark.requirement("A0.86", "A0.87")
def test_a_bucket_warns_from_its_soft_share_on_and_is_violated_above_its_cap() -> None:
    settings = replace(PLAIN, enforce="global")
    below = decided(settings, user("x"), *results(1, 25_000))
    assert events(below, "soft_warning") == []
    soft = decided(settings, user("x"), *results(2, 13_000))
    assert [dict(e.facts) for e in events(soft, "soft_warning")] == [
        {"component": "tool_outputs", "utilization_after": 0.81}
    ]
    hard = decided(settings, user("x"), *results(2, 17_000))
    assert [dict(e.facts) for e in events(hard, "hard_violation")] == [
        {
            "reason": "over its cap",
            "component": "tool_outputs",
            "current": 33_998,
            "limit": 32_000,
            "excess": 1_998,
        }
    ]
    assert hard.action is Action.PASS  # tracked by bucket, enforced on the whole


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


@pytest.mark.requirement("A0.96")
def test_what_was_evicted_is_used_no_more() -> None:
    enforced = decided(replace(PLAIN, enforce="bucket"), user("x"), *results(12, 4_000), user("and now?"))
    assert sum(enforced.buckets.values()) == enforced.after < enforced.before


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


@pytest.mark.requirement("A4.22")
def test_amounts_in_tokens_scale_with_the_window_they_were_made_for() -> None:
    settings = replace(PLAIN, window=64_000, designed_for=128_000)
    budget = divide(settings, window=64_000)
    assert (budget.reserve, budget.headroom) == (8_000, 4_000)
    assert budget.caps == {"system": 4_000, "tools": 8_000, "history": 24_000, "tool_outputs": 16_000}


def test_shares_are_of_the_window_and_tokens_are_tokens() -> None:
    settings = replace(PLAIN, headroom=0.05, reserve=0.10, buckets={"tools": Bucket(cap=0.04)})
    budget = divide(settings, window=128_000)
    assert (budget.reserve, budget.headroom, budget.caps) == (12_800, 6_400, {"tools": 5_120})


@pytest.mark.requirement("A1.4")
def test_a_policy_that_refuses_removes_nothing() -> None:
    settings = replace(PLAIN, when_full="reject", buckets={})
    said = [user("task"), *results(8, 13_200), user("and now?")]
    assert decided(settings, *said).action is Action.PASS
    with pytest.raises(BudgetUnreachable):
        decided(settings, *said, *results(1, 8_000), user("more"))


@pytest.mark.requirement("D18")
@pytest.mark.parametrize(
    ("cap", "share", "told"), [(0.12, 0.29, False), (0.12, 0.33, True), (120_000 / 256_000, 0.45, False)]
)
def test_tool_results_are_bloat_above_a_third_or_what_the_policy_gives_them(
    cap: float, share: float, told: bool
) -> None:
    settings = replace(PLAIN, buckets={"tool_outputs": Bucket(cap=cap)}, layers=())
    total = 70_000
    said = [user("x"), *[assistant(words(996)) for _ in range(int(total * (1 - share)) // 1_000)]]
    said += [m for pair in results(int(total * share) // 1_000, 1_000) for m in pair]  # type: ignore[attr-defined]
    assert bool(events(decided(settings, *said), "tool_bloat")) is told


def test_a_result_that_answers_no_call_counts_like_any_other() -> None:
    assert raw_buckets(talk(user("x"), result("abc", None)))["tool_outputs"] > 0
