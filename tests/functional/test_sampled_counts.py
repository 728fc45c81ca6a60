"""A long history that nobody has seen is counted in part while nothing depends on it, and whole where something does."""

import random
import re
from pathlib import Path
from typing import Any

import pytest

from proxy.wire.counting import MAX_ERROR, count_all, message_texts, sample_all
from tests.functional.harness import COUNTER, weir
from tests.policies.sessions import shared_conversations
from tests.upstream.app import serve_simulator
from tests.upstream.model import SimulatorSettings

TOKENS = re.compile(r"before=(~?)(\d+);after=(~?)(\d+);limit=(\d+)")
WORDS = (Path(__file__).parents[2] / "README.md").read_text().split()
MODEL = "gpt-4o-mini"
RECORDED = ("longmemeval_windows", "side_constraints", "swe_agent", "tau_airline_long")


def history(chars: int) -> list[dict[str, Any]]:
    """A talk of about so many characters that ends with a question."""
    rng, messages = random.Random(1), list[dict[str, Any]]()
    while sum(len(m["content"]) for m in messages) < chars:
        for role in ("user", "assistant"):
            messages.append({"role": role, "content": " ".join(rng.choices(WORDS, k=300))})
    return [*messages, {"role": "user", "content": "Go on."}]


async def exactly(messages: list[dict[str, Any]]) -> int:
    return sum(await count_all([message_texts(m, model=MODEL) for m in messages], COUNTER))


async def about_right(messages: list[dict[str, Any]]) -> int:
    return sum(await sample_all([message_texts(m, model=MODEL) for m in messages], COUNTER))


async def sent(client: Any, messages: list[dict[str, Any]]) -> tuple[bool, int, str]:
    """Whether the tokens were said to be about right, how many, and what was done."""
    answer = await client.chat.completions.with_raw_response.create(model=MODEL, messages=messages, max_tokens=100)
    found = TOKENS.fullmatch(answer.headers["x-weir-tokens"])
    assert found is not None, answer.headers["x-weir-tokens"]
    assert found[1] == found[3]
    return found[1] == "~", int(found[2]), answer.headers["x-weir-actions"]


async def test_far_from_the_trigger_tokens_are_about_right_and_the_next_request_says_so_too(tmp_path: Path) -> None:
    messages = history(150_000)
    exact = await exactly(messages)
    async with (
        serve_simulator(SimulatorSettings(window=200_000), counter=COUNTER) as simulator,
        weir(simulator.base_url, tmp_path / "w.db", window=200_000) as proxy,
    ):
        client = proxy.client()
        is_about, tokens, actions = await sent(client, messages)
        assert (is_about, actions) == (True, "none")
        assert abs(tokens / exact - 1) <= MAX_ERROR
        more = [*messages, {"role": "assistant", "content": "Yes."}, {"role": "user", "content": "And then?"}]
        again, grown, _ = await sent(client, more)
        assert again
        assert 0 < grown - tokens < 30
        assert not proxy.runtime.limits_resolver._calibrations


async def test_near_the_trigger_tokens_are_exact(tmp_path: Path) -> None:
    messages = history(150_000)
    exact = await exactly(messages)
    async with (
        serve_simulator(SimulatorSettings(window=200_000), counter=COUNTER) as simulator,
        weir(simulator.base_url, tmp_path / "w.db", window=int(exact * 1.25)) as proxy,
    ):
        client = proxy.client()
        is_about, tokens, _ = await sent(client, messages)
        assert not is_about
        assert abs(tokens - exact) < 20
        await sent(client, [*messages, {"role": "assistant", "content": "Yes."}, {"role": "user", "content": "More."}])


async def test_what_was_counted_in_part_is_counted_whole_once_it_grows_near_the_trigger(tmp_path: Path) -> None:
    messages = history(120_000)
    window = int(await exactly(messages) * 1.6)
    async with (
        serve_simulator(SimulatorSettings(window=window), counter=COUNTER) as simulator,
        weir(simulator.base_url, tmp_path / "w.db", window=window) as proxy,
    ):
        client = proxy.client()
        was_about, _, _ = await sent(client, messages)
        assert was_about
        seen = list[tuple[bool, str]]()
        for step in range(30):
            text = " ".join(random.Random(step).choices(WORDS, k=700))
            messages += [{"role": "assistant", "content": f"Step {step}."}, {"role": "user", "content": text}]
            is_about, tokens, actions = await sent(client, messages)
            seen.append((is_about, actions))
            assert is_about or abs(tokens / await exactly(messages) - 1) < 0.03 or actions != "none"
            if actions != "none":
                break
        assert actions != "none"
        assert not is_about
        assert [about for about, _ in seen] == sorted((about for about, _ in seen), reverse=True)


async def test_an_upstream_with_less_room_than_was_said_gets_a_request_planned_with_exact_tokens(
    tmp_path: Path,
) -> None:
    messages = history(150_000)
    async with (
        serve_simulator(SimulatorSettings(window=20_000), counter=COUNTER) as simulator,
        weir(simulator.base_url, tmp_path / "w.db", window=200_000) as proxy,
    ):
        is_about, _, actions = await sent(proxy.client(), messages)
        assert "retry=" in actions
        assert not is_about


@pytest.mark.parametrize("name", RECORDED)
async def test_the_sum_over_recorded_text_is_right_within_the_error(name: str) -> None:
    texts = list[dict[str, Any]]()
    for sources, _ in shared_conversations(name):
        texts += [{"role": "user", "content": source.text} for source in sources]
        if sum(len(m["content"]) for m in texts) < 64_000:
            continue
        about = await about_right(texts)
        assert abs(about / await exactly(texts) - 1) <= MAX_ERROR
        texts.clear()


@pytest.mark.parametrize("chars", [130_000, 400_000, 900_000])
async def test_the_sum_over_a_long_history_of_everything_is_right_within_the_error(chars: int) -> None:
    sessions = [[source.text for source in sources] for name in RECORDED for sources, _ in shared_conversations(name)]
    texts = {text for session in sessions for text in session}
    exact = dict(zip(texts, await COUNTER.count_many([*texts]), strict=True))
    for seed in range(12):
        said = list[str]()
        for session in random.Random(seed).sample(sessions, len(sessions)):
            said += session
            if sum(map(len, said)) > chars:
                break
        about = await about_right([{"role": "user", "content": text} for text in said])
        assert abs(about / sum(exact[text] + 4 for text in said) - 1) <= MAX_ERROR


@pytest.mark.parametrize(
    "text", ["一二三四五六七八九十。" * 9_000, "x" * 70_000, "\n" * 70_000, "0123456789abcdef" * 5_000]
)
async def test_the_sum_over_any_text_is_right_within_the_error(text: str) -> None:
    messages = [{"role": "user", "content": text}]
    about = await about_right(messages)
    assert abs(about / await exactly(messages) - 1) <= MAX_ERROR


async def test_what_one_role_says_is_not_counted_by_what_another_says() -> None:
    said = {
        "user": "一二三四五六七八九十。" * 400,
        "assistant": " ".join(WORDS[:700]),
        "tool": "0123456789abcdef" * 250,
    }
    messages = [{"role": role, "content": text} for _ in range(10) for role, text in said.items()]
    items = [message_texts(m, model=MODEL) for m in messages]
    about, exact = await sample_all(items, COUNTER), await count_all(items, COUNTER)
    for n in range(len(said)):
        assert abs(sum(about[n :: len(said)]) / sum(exact[n :: len(said)]) - 1) <= MAX_ERROR


@pytest.mark.parametrize(
    "own", [{"buckets": {"history": {"cap": 0.5, "on_overflow": "summarize"}}, "enforce": "bucket"}]
)
async def test_a_policy_that_counts_parts_counts_them_exactly(own: dict[str, Any], tmp_path: Path) -> None:
    messages = history(150_000)
    async with (
        serve_simulator(SimulatorSettings(window=200_000), counter=COUNTER) as simulator,
        weir(simulator.base_url, tmp_path / "w.db", window=200_000, balanced=own) as proxy,
    ):
        assert not (await sent(proxy.client(), messages))[0]
