"""Streams: every chunk goes on as it comes, byte for byte, and no stream that broke off looks complete."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest

from tests.functional.harness import COUNTER, EVICTING, TOOLS, RunningWeir, Talk, answered, opening, weir
from tests.functional.scripted import events, one_by_one, scripted
from tests.misbehaving import ALL_FAULTS
from tests.upstream.app import RunningSimulator, serve_simulator
from tests.upstream.model import SimulatorSettings

pytestmark = pytest.mark.slow

CHUNKS = 5
PATIENCE = 30.0


def chunk(number: int) -> bytes:
    delta = {"content": f"word{number} "} if number else {"role": "assistant", "content": ""}
    finish = "stop" if number == CHUNKS - 1 else None
    value = {"id": "c1", "object": "chat.completion.chunk", "created": 1, "model": "sim"}
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return b"data: " + json.dumps({**value, "choices": [choice]}).encode() + b"\n\n"


@pytest.mark.requirement("P5")
@pytest.mark.parametrize("large", [False, True])
async def test_every_chunk_of_a_stream_is_with_the_client_before_the_next_is_made(large: bool) -> None:
    """``large``: of a conversation that Weir has to edit."""
    step = asyncio.Semaphore(1)
    chunks = [*map(chunk, range(CHUNKS)), b"data: [DONE]\n\n"]
    async with asyncio.timeout(PATIENCE), one_by_one(chunks, step) as (url, _), weir(url) as target:
        talk = Talk(target.client(), opening())
        talk.grow(18 if large else 2, kind="agent")
        stream = await talk.client.chat.completions.create(
            model="sim", messages=talk.messages, max_tokens=512, tools=TOOLS, stream=True
        )
        assert (stream.response.headers["x-weir-actions"] != "none") is large
        got = []
        async for part in stream:
            got.append(part.choices[0].delta.content)
            step.release()
    assert got == ["", *(f"word{n} " for n in range(1, CHUNKS))]


@pytest.fixture
async def upstream() -> AsyncIterator[RunningSimulator]:
    async with serve_simulator(SimulatorSettings(window=8192, faults=ALL_FAULTS), counter=COUNTER) as simulator:
        yield simulator


async def raw_stream(base_url: str, talk: Talk, fault: str) -> tuple[int, bytes]:
    """Status and bytes of a streamed answer, as far as they came."""
    body = {"model": "sim", "messages": talk.messages, "max_tokens": 512, "tools": TOOLS, "stream": True}
    headers = (
        {"authorization": "Bearer sk-test", "x-sim-fault": fault} if fault else {"authorization": "Bearer sk-test"}
    )
    got = b""
    url = f"{base_url}/chat/completions"
    async with httpx.AsyncClient(timeout=30) as http, http.stream("POST", url, json=body, headers=headers) as response:
        async for part in response.aiter_raw():
            got += part
        return response.status_code, got


@pytest.mark.requirement("P5", "P4", "R.36", "R.37", "R.38", "R.39")
@pytest.mark.parametrize("fault", ["", "framing", "separators", "split_bytes", "huge_event:0.5", "no_done"])
async def test_the_bytes_of_a_stream_are_the_upstreams(fault: str) -> None:
    """Two upstreams with one seed answer alike; one is asked directly, one through Weir."""
    settings = SimulatorSettings(window=8192, faults=ALL_FAULTS)
    async with (
        serve_simulator(settings, counter=COUNTER) as direct,
        serve_simulator(settings, counter=COUNTER) as behind,
        weir(behind.base_url) as target,
    ):
        talk = Talk(target.client())
        talk.grow(3, kind="agent")
        first = await raw_stream(direct.base_url, talk, fault)
        second = await raw_stream(target.base_url, talk, fault)
    assert first[0] == second[0] == 200
    assert without_time(first[1]) == without_time(second[1])


def without_time(stream: bytes) -> bytes:
    """A stream in which the second of its making does not show."""
    start = stream.find(b'"created":') + len(b'"created":')
    return stream.replace(stream[start : start + 10], b"0000000000")


@pytest.mark.requirement("P5", "R.4")
async def test_a_client_that_reads_in_fits_and_starts_gets_every_byte_in_order() -> None:
    def said(number: int) -> dict[str, Any]:
        return {**json.loads(chunk(1)[6:]), "id": f"c{number}", "padding": "x" * 100_000}

    reply = events(*map(said, range(110)), json.loads(chunk(CHUNKS - 1)[6:]))
    got, pauses = b"", 0
    async with scripted(lambda _: reply) as behind, weir(behind.base_url) as target:
        body = {"model": "sim", "messages": opening(), "max_tokens": 512, "stream": True}
        async with (
            httpx.AsyncClient(timeout=30) as http,
            http.stream(
                "POST", f"{target.base_url}/chat/completions", json=body, headers={"authorization": "Bearer sk-test"}
            ) as response,
        ):
            async for part in response.aiter_raw():
                got += part
                if len(got) > 2_000_000 * (pauses + 1):
                    pauses += 1
                    await asyncio.sleep(0.2)
    assert got == b"".join(reply.chunks)
    assert pauses == 5


async def read_all(target: RunningWeir, fault: str) -> None:
    """Read a stream to its end."""
    stream = await target.client().chat.completions.create(
        model="sim", messages=opening(), stream=True, extra_headers={"x-sim-fault": fault}
    )
    async for _ in stream:
        pass


@pytest.mark.requirement("P5", "R.31", "R.34")
@pytest.mark.parametrize("fault", ["cut_stream:1", "cut_stream:3"])
async def test_a_stream_that_was_cut_never_looks_complete(fault: str, upstream: RunningSimulator) -> None:
    async with weir(upstream.base_url) as target:
        with pytest.raises((openai.APIError, httpx.HTTPError)):
            await read_all(target, fault)
    assert len(answered(upstream)) == 1


@pytest.mark.requirement("P5", "R.31")
async def test_a_stream_that_was_cut_before_its_first_event_is_a_clear_502(upstream: RunningSimulator) -> None:
    async with weir(upstream.base_url) as target:
        with pytest.raises(openai.InternalServerError) as caught:
            await target.client().chat.completions.create(
                model="sim", messages=opening(), stream=True, extra_headers={"x-sim-fault": "cut_stream:0"}
            )
    assert caught.value.status_code == 502
    assert caught.value.code == "upstream_unreachable"


@pytest.mark.requirement("A0.3", "P5")
@pytest.mark.parametrize("stream", [False, True])
async def test_the_blocking_client_goes_through_a_session_that_would_overflow(
    stream: bool, upstream: RunningSimulator
) -> None:
    async with weir(upstream.base_url, balanced=EVICTING) as target:
        texts = await asyncio.to_thread(blocking_session, target.base_url, stream=stream)
    assert len(texts) == 8
    assert all(text.startswith("Understood.") for text in texts)
    assert len(answered(upstream)) == 8
    assert len(answered(upstream)[-1].json()["messages"]) == 2 + 2 * 19
    assert answered(upstream)[-1].prompt_tokens < 8192 - 512


def blocking_session(base_url: str, *, stream: bool) -> list[str]:
    """What a blocking client reads in steps 12 to 19 of an agent loop."""
    texts: list[str] = []
    with openai.OpenAI(base_url=base_url, api_key="sk-test", max_retries=0) as client:
        any_client: Any = client
        talk = Talk(client)
        talk.grow(12, kind="agent")
        for _ in range(8):
            asked = {"model": "sim", "messages": talk.messages, "max_tokens": 512, "tools": TOOLS}
            answer = any_client.chat.completions.create(**asked, stream=stream)
            if stream:
                texts.append("".join(c.choices[0].delta.content or "" for c in answer if c.choices))
            else:
                texts.append(answer.choices[0].message.content)
            talk.add_step()
    return texts
