"""Streams of ``/v1/responses`` and ``/v1/messages``: what the upstream has said is with the client at once."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from tests.functional.harness import COUNTER, RunningWeir, weir
from tests.functional.scripted import Asked, Reply, one_by_one, scripted
from tests.functional.test_compactions import CLAUDE_TOOL, TOOL, items, messages
from tests.upstream import Dialect, RunningSimulator, SimulatedAnswer, SimulatedCall, SimulatorSettings
from tests.upstream.app import serve_simulator

WINDOW = 8_192
PATIENCE = 30.0
HEADERS = {"authorization": "Bearer sk-test"}
ANSWER = SimulatedAnswer(
    text="I look at both files and say what stands in them.",
    reasoning="Two files are named.",
    calls=(SimulatedCall("read", '{"n": 1}'), SimulatedCall("read", '{"n": 2}')),
)
ENDPOINTS = {"responses": Dialect.OPENAI, "messages": Dialect.ANTHROPIC}


def body(endpoint: str, steps: int) -> dict[str, Any]:
    """A streamed request after so many steps of a loop."""
    asked: dict[str, Any] = {"model": "sim", "stream": True}
    if endpoint == "responses":
        return {**asked, "input": items(steps), "tools": [TOOL], "max_output_tokens": 512, "store": False}
    return {**asked, "messages": messages(steps), "tools": [CLAUDE_TOOL], "max_tokens": 512}


async def events(response: httpx.Response) -> AsyncIterator[bytes]:
    """The events of a stream, each as soon as it is whole."""
    held = b""
    async for part in response.aiter_raw():
        *whole, held = (held + part).split(b"\n\n")
        for each in whole:
            yield each + b"\n\n"


async def written(endpoint: str) -> list[bytes]:
    """The events with which a model answers."""
    settings = SimulatorSettings(dialect=ENDPOINTS[endpoint], window=WINDOW, answer=lambda _: ANSWER)
    async with (
        serve_simulator(settings, counter=COUNTER) as simulator,
        httpx.AsyncClient(headers=HEADERS, timeout=PATIENCE) as client,
    ):
        url = f"{simulator.origin}/v1/{endpoint}"
        async with client.stream("POST", url, json=body(endpoint, 2)) as response:
            return [event async for event in events(response)]


@pytest.mark.requirement("P5")
@pytest.mark.parametrize("steps", [2, 40], ids=["as it came", "edited"])
@pytest.mark.parametrize("endpoint", ENDPOINTS)
async def test_every_event_is_with_the_client_before_the_next_is_made(endpoint: str, steps: int) -> None:
    given = await written(endpoint)
    assert len(given) > 15
    seen, got = asyncio.Semaphore(1), list[bytes]()
    async with (
        asyncio.timeout(PATIENCE),
        one_by_one(given, seen) as (url, asked),
        weir(url, window=WINDOW) as target,
        httpx.AsyncClient(headers=HEADERS, timeout=PATIENCE) as client,
        client.stream("POST", f"{target.root}/v1/{endpoint}", json=body(endpoint, steps)) as response,
    ):
        assert (response.headers["x-weir-actions"] != "none") is (steps > 2)
        async for event in events(response):
            got.append(event)
            seen.release()
    assert got == given
    assert len(asked) == 1


async def broken_off(given: bytes, endpoint: str, cuts: list[int]) -> list[tuple[bytes, bool]]:
    """What the client has of a stream that breaks off behind so many bytes, and whether its end was a proper one."""

    def say(asked: Asked) -> Reply:
        return Reply(kind="text/event-stream", chunks=(given[: int(asked.headers["x-cut"])],), cut=True, between=0.05)

    async with (
        scripted(say) as upstream,
        weir(upstream.base_url, window=WINDOW) as target,
        httpx.AsyncClient(headers=HEADERS, timeout=PATIENCE) as client,
    ):

        async def read(cut: int) -> tuple[bytes, bool]:
            url, got = f"{target.root}/v1/{endpoint}", b""
            async with client.stream("POST", url, json=body(endpoint, 2), headers={"x-cut": str(cut)}) as response:
                try:
                    async for part in response.aiter_raw():
                        got += part
                except httpx.RemoteProtocolError:
                    return got, False
                return got, True

        return await asyncio.gather(*map(read, cuts))


@pytest.mark.requirement("R.34")
@pytest.mark.parametrize("endpoint", ENDPOINTS)
async def test_wherever_a_stream_breaks_off_the_client_gets_whole_events_and_then_the_error(endpoint: str) -> None:
    """OpenAI's SDKs read an event that has a name and no data as JSON, and raise that in the error's place."""
    each = await written(endpoint)
    starts = [len(b"".join(each[:number])) for number in range(len(each) // 2, len(each) - 1)]
    cuts = [start + behind for start in starts for behind in (3, len(b"event: response.o"), 60)]
    given = b"".join(each)
    for (got, ended), cut in zip(await broken_off(given, endpoint, cuts), cuts, strict=True):
        *whole, last = [event for event in got.split(b"\n\n") if event]
        assert not ended
        assert given.startswith(b"".join(event + b"\n\n" for event in whole)), given[:cut][-60:]
        assert last.startswith(b"event: error" if endpoint == "messages" else b"event: response.failed")
        if endpoint == "responses":  # openai 3.54 raises "Lifecycle response identity changed." at another one
            begun, failed = (json.loads(event.partition(b"data: ")[2])["response"] for event in (whole[0], last))
            assert failed["id"] == begun["id"] != ""


@asynccontextmanager
async def truncating(window: int, believed: int) -> AsyncIterator[tuple[RunningSimulator, RunningWeir]]:
    """Weir before a provider that drops the beginning of what is too long, where it is asked to."""
    settings = SimulatorSettings(window=window, answer=lambda _: SimulatedAnswer(text="Going on."))
    async with serve_simulator(settings, counter=COUNTER) as simulator, weir(simulator.base_url, window=believed) as w:
        yield simulator, w


async def ask(client: httpx.AsyncClient, target: RunningWeir, steps: int, **more: object) -> httpx.Response:
    asked = {**body("responses", steps), "stream": False, **more}
    return await client.post(f"{target.base_url}/responses", content=json.dumps(asked, indent=1).encode())


@pytest.mark.requirement("P4")
@pytest.mark.parametrize("more", [{}, {"store": False}, {"store": False, "truncation": "disabled"}], ids=str)
async def test_an_input_that_is_a_string_is_a_list_of_one_message(more: dict[str, Any]) -> None:
    text = "Say what stands in the files."
    async with (
        truncating(WINDOW, WINDOW) as (simulator, target),
        httpx.AsyncClient(headers=HEADERS, timeout=PATIENCE) as client,
    ):
        asked = {"model": "sim", **more}
        answers = []
        for given in (text, [{"role": "user", "content": text}]):
            answers.append(await client.post(f"{target.base_url}/responses", json={**asked, "input": given}))
        seen = [each.json()["input"] for each in simulator.ledger]
        await target.stored()
    assert seen[0] == text  # what needs no edit goes up as it came
    for name in ("x-weir-tokens", "x-weir-actions", "x-weir-conversation"):
        assert answers[0].headers[name] == answers[1].headers[name], name


@pytest.mark.requirement("P4", "P1")
async def test_what_may_be_truncated_is_managed_first_so_that_the_provider_drops_nothing() -> None:
    async with (
        truncating(WINDOW, WINDOW) as (simulator, target),
        httpx.AsyncClient(headers=HEADERS, timeout=PATIENCE) as client,
    ):
        answers = [await ask(client, target, steps, truncation="auto") for steps in (3, *range(8, 40, 4))]
        seen = list(simulator.ledger)
        for each in seen:
            said = {name: value for name, value in each.json().items() if name != "truncation"}
            assert (await client.post(f"{simulator.base_url}/responses", json=said)).status_code == 200
    assert {each.status_code for each in answers} == {200}
    assert answers[0].headers["x-weir-actions"] == "none"
    assert "compact=" in answers[-1].headers["x-weir-actions"]
    assert all(each.json()["truncation"] == "auto" for each in seen)
    assert [each.prompt_tokens for each in seen] == [each.prompt_tokens for each in simulator.ledger[len(seen) :]]


@pytest.mark.requirement("P4", "P16")
async def test_a_provider_that_drops_the_beginning_without_a_word_teaches_its_window_and_no_other_count() -> None:
    """Its usage is that of what it has read: taken for a count of what was sent, every later estimate would be short."""
    async with (
        truncating(WINDOW, 2 * WINDOW) as (simulator, target),
        httpx.AsyncClient(headers=HEADERS, timeout=PATIENCE) as client,
    ):
        answers = [await ask(client, target, steps, truncation="auto") for steps in range(4, 60, 4)]
        await target.stored()
        metrics = (await client.get(f"{target.root}/metrics")).text
        sent = json.loads(simulator.ledger[-1].body)
        del sent["truncation"]
        assert (await client.post(f"{simulator.base_url}/responses", json=sent)).status_code == 200
    assert {each.status_code for each in answers} == {200}
    before = [int(each.headers["x-weir-tokens"].partition("=")[2].partition(";")[0].lstrip("~")) for each in answers]
    assert before == sorted(before)
    assert before[-1] > 7 * before[1]
    assert [n for n, each in enumerate(answers) if each.headers["x-weir-actions"] == "none"] == [
        0,
        1,
        2,
        3,
        4,
    ]  # twice the same usage tells
    assert re.search(r"^weir_overflows_total\S* 1(\.0)?$", metrics, re.MULTILINE)
