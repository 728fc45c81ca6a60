"""The usage that a client sees is that of the request that went up, whole or streamed, and adds up.

Clients compact their own history by it: a number that is too high destroys work, one that changes with the way of
asking makes them thrash.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.functional.harness import COUNTER, EVICTING, TOOLS, RunningWeir, Talk, answered, opening, weir
from tests.functional.scripted import Reply, scripted
from tests.upstream import SimulatorSettings
from tests.upstream.app import RunningSimulator, serve_simulator

pytestmark = pytest.mark.slow

WINDOW = 8_192


@dataclass(frozen=True, slots=True)
class Used:
    """A usage object's sums."""

    prompt: int
    completion: int
    total: int


def used(found: Any) -> Used:
    """The sums of the SDK's usage object."""
    assert found is not None
    return Used(found.prompt_tokens, found.completion_tokens, found.total_tokens)


async def ask(target: RunningWeir, body: dict[str, Any], *, stream: bool, key: str = "sk-test") -> Used:
    """The usage of one answer, as the real client reads it."""
    chat = target.client(key).chat.completions
    if not stream:
        return used((await chat.create(**body)).usage)
    found = await chat.create(stream=True, stream_options={"include_usage": True}, **body)
    said = [chunk.usage async for chunk in found if chunk.usage is not None]
    assert len(said) == 1
    return used(said[0])


def counted(simulator: RunningSimulator) -> int:
    """What the upstream counted in the last request that it answered."""
    seen = [s for s in answered(simulator) if s.status == 200][-1]
    body = json.loads(seen.body)
    return int(httpx.post(f"{simulator.base_url}/chat/completions/input_tokens", json=body).json()["input_tokens"])


@pytest.fixture
async def simulator() -> AsyncIterator[RunningSimulator]:
    async with serve_simulator(SimulatorSettings(window=WINDOW), counter=COUNTER) as running:
        yield running


def history(turns: int, *, kind: str = "agent", seed: int = 0) -> list[dict[str, Any]]:
    """The messages of a conversation that Weir has not seen."""
    talk = Talk(None, opening(seed=100 + seed), seed=seed)
    talk.grow(turns, kind=kind)
    if kind == "chat":
        talk.add_question()
    return talk.messages


CASES = {
    "pass": (history(2), 32_768, {}),
    "evicted": (history(26), WINDOW, {}),
    "compacted": (history(40, kind="chat"), WINDOW, {}),
    "overflow": (history(22), 32_768, {}),
    "clamped": (history(9), 32_768, {"max_tokens": 6_000}),
}


@pytest.mark.requirement("A1.12", "A4.16", "P5")
@pytest.mark.parametrize("case", CASES)
async def test_whole_and_streamed_usage_are_the_same_and_those_of_the_managed_request(
    case: str, simulator: RunningSimulator, tmp_path: Path
) -> None:
    messages, believed, options = CASES[case]
    body: dict[str, Any] = {"model": "sim", "messages": messages, "max_tokens": 256, **options}
    if case != "compacted":
        body["tools"] = TOOLS
    found = []
    acted = {"pass": "none", "evicted": "evict=", "compacted": "compact=", "overflow": "retry=", "clamped": "clamp="}
    summarizer = "same" if case == "compacted" else None
    for stream in (False, True):
        # A summary holds a fence of its own in every Weir: there the second way of asking is the first one's replay.
        key, store = ("sk-one", tmp_path / "one.db") if case == "compacted" else ("sk-other", None)
        rules = {} if case == "compacted" else EVICTING
        async with weir(simulator.base_url, store, window=believed, balanced=rules, summarizer=summarizer) as target:
            raw = await target.client().chat.completions.with_raw_response.create(**body)
            assert acted[case] in raw.headers["x-weir-actions"] or (stream and store)
            found.append(await ask(target, body, stream=stream, key=key))
            assert found[-1].prompt == await asyncio.to_thread(counted, simulator)
    assert found[0] == found[1]
    assert found[0].total == found[0].prompt + found[0].completion
    assert found[0].total <= WINDOW


@pytest.mark.requirement("A4.16", "P5")
@pytest.mark.parametrize("usage", [False, True])
async def test_a_managed_stream_reaches_the_client_byte_for_byte(usage: bool) -> None:
    """Odd spacing, comments and fields that nobody knows included."""
    parts = (
        b": hello\n\n",
        b'data: {"id":"x", "choices":[{"index":0,"delta":{"role":"assistant","content":"a"}}],"new":1e3}\r\n\r\n',
        b'data:{"id":"x","choices":[{"index":0,"delta":{},"finish_reason" : "stop"}]}\n\n',
        b'data: {"id":"x","choices":[],"usage":{"prompt_tokens":7000,"completion_tokens":1,"total_tokens":7001,"cost":0.10}}\n\n',
        b"data: [DONE]\n\n",
    )
    said = parts if usage else (*parts[:3], parts[4])
    body = {"model": "m", "messages": history(26), "stream": True, "stream_options": {"include_usage": usage}}
    async with (
        scripted(lambda _: Reply(kind="text/event-stream", chunks=said, between=0.002)) as upstream,
        weir(upstream.base_url, window=WINDOW) as target,
        httpx.AsyncClient() as http,
    ):
        answer = await http.post(
            f"{target.base_url}/chat/completions", json=body, headers={"authorization": "Bearer sk-a"}
        )
    assert "compact=" in answer.headers["x-weir-actions"]
    assert answer.content == b"".join(said)
