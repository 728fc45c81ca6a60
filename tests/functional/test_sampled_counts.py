"""A long history that nobody has seen is counted in part while nothing depends on it, and whole where something does."""

import random
import re
from pathlib import Path
from typing import Any

from proxy.wire.counting import count_all, message_texts
from tests.functional.harness import COUNTER, weir
from tests.upstream.app import serve_simulator
from tests.upstream.model import SimulatorSettings

TOKENS = re.compile(r"before=(~?)(\d+);after=(~?)(\d+);limit=(\d+)")
WORDS = (Path(__file__).parents[2] / "README.md").read_text().split()
MODEL = "gpt-4o-mini"


def history(chars: int) -> list[dict[str, Any]]:
    """A talk of about so many characters that ends with a question."""
    rng, messages = random.Random(1), list[dict[str, Any]]()
    while sum(len(m["content"]) for m in messages) < chars:
        for role in ("user", "assistant"):
            messages.append({"role": role, "content": " ".join(rng.choices(WORDS, k=300))})
    return [*messages, {"role": "user", "content": "Go on."}]


async def exactly(messages: list[dict[str, Any]]) -> int:
    return sum(await count_all([message_texts(m, model=MODEL) for m in messages], COUNTER))


async def sent(client: Any, messages: list[dict[str, Any]]) -> tuple[bool, int, str]:
    """Whether the tokens were said to be about right, how many, and what was done."""
    answer = await client.chat.completions.with_raw_response.create(model=MODEL, messages=messages, max_tokens=100)
    found = TOKENS.fullmatch(answer.headers["x-weir-tokens"])
    assert found is not None, answer.headers["x-weir-tokens"]
    assert found[1] == found[3]
    return found[1] == "~", int(found[2]), answer.headers["x-weir-actions"]


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
