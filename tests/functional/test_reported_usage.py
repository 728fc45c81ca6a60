"""The usage that a client sees is that of the request that went up, whole or streamed, and adds up.

Clients compact their own history by it: a number that is too high destroys work, one that changes with the way of
asking makes them thrash.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.functional.harness import COUNTER, EVICTING, TOOLS, RunningWeir, Talk, answered, opening, prose, weir
from tests.functional.scripted import Asked, Reply, as_asked, completion, scripted
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


@pytest.mark.requirement("A4.16")
async def test_cached_tokens_are_part_of_the_prompt_and_are_passed_on() -> None:
    given = completion("yes", prompt=4_000, completed=9)
    given["usage"]["prompt_tokens_details"] = {"cached_tokens": 3_500, "audio_tokens": 0}
    given["usage"]["new_field"] = {"x": [1]}

    def say(asked: Asked) -> Reply:
        return as_asked(asked, given)

    async with scripted(say) as upstream, weir(upstream.base_url, window=WINDOW) as target:
        chat = target.client().chat.completions
        body: dict[str, Any] = {"model": "m", "messages": opening()}
        one = (await chat.create(**body)).usage.model_dump(exclude_unset=True)
        stream = await chat.create(stream=True, stream_options={"include_usage": True}, **body)
        (two,) = [c.usage.model_dump(exclude_unset=True) async for c in stream if c.usage]
    assert one == two == given["usage"]


OLLAMAS = 4_096
Reading = Callable[[list[dict[str, Any]]], tuple[int, dict[str, Any]]]


def size(messages: list[dict[str, Any]]) -> int:
    return sum(4 + COUNTER.count(message["content"]) for message in messages)


def as_ollama(messages: list[dict[str, Any]]) -> tuple[int, dict[str, Any]]:
    """The system and as many of the newest messages as there is room for, as Ollama's ``chatPrompt`` has it."""
    system, rest = messages[:1], messages[1:]
    while len(rest) > 1 and size(system) + size(rest) > OLLAMAS:
        rest = rest[1:]
    return min(OLLAMAS, size(system) + size(rest)), {}


async def talk_with(reading: Reading, target_window: int, *, first: int, words: int, turns: int) -> tuple[Any, ...]:
    """A conversation whose turns have so many words: the requests, and Weir's window, ratio and estimates after it."""
    asked: list[list[dict[str, Any]]] = []

    def say(request: Asked) -> Reply:
        asked.append(request.json["messages"])
        given = completion("Going on. " + prose(words // 2, seed=len(asked)))
        prompt, more = reading(asked[-1])
        given["usage"] = {**more, "prompt_tokens": prompt, "completion_tokens": 5, "total_tokens": prompt + 5}
        return as_asked(request, given)

    messages = [{"role": "system", "content": "You are careful."}]
    told = []
    async with scripted(say) as upstream, weir(upstream.base_url, window=target_window) as target:
        client = target.client()
        for turn in range(turns):
            messages.append({"role": "user", "content": prose(words if turn else first, seed=1_000 + turn)})
            raw = await client.chat.completions.with_raw_response.create(
                model="llama", messages=messages, max_tokens=64
            )
            messages.append({"role": "assistant", "content": raw.parse().choices[0].message.content})
            told.append(raw.headers["x-weir-tokens"])
        learned = [row.limit for row in target.runtime.windows.learned()]
        counts = list(target.runtime.windows._calibrations.values())
    return asked, learned, counts, told


@pytest.mark.requirement("P4", "P16")
async def test_a_server_that_cuts_in_silence_teaches_its_window(caplog: pytest.LogCaptureFixture) -> None:
    asked, learned, counts, told = await talk_with(as_ollama, 32_768, first=260, words=260, turns=24)
    assert learned == [OLLAMAS]
    assert [r.levelname for r in caplog.records if "said nothing" in r.getMessage()] == ["WARNING"]
    cut = [n for n, messages in enumerate(asked) if size(messages) > OLLAMAS]
    assert len(cut) > 0
    assert max(cut) < len(asked) - 6  # from then on nothing is cut any more
    assert 0.9 < counts[-1].ratio < 1.1
    assert all(int(each.rpartition("limit=")[2]) < OLLAMAS for each in told[-6:])
