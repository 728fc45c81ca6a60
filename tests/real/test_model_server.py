"""Weir in front of a real model server: a real tokenizer, a real refusal, a real prefix cache, a real summary."""

import asyncio
import json
import statistics
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import openai
import pytest

from policies.summary.prompts import PROMPTS
from proxy.cli.demo import load_recording
from proxy.effects.summarizer import Summarizer
from tests.functional.harness import RunningWeir, begins_with, tcp_tap, weir
from tests.profile import soak
from tests.real.environments import Unavailable
from tests.real.llama import MODEL, Llama, model_server

pytestmark = [pytest.mark.real, pytest.mark.timeout(600), soak]

Array = list[dict[str, Any]]
MAX_TOKENS = 8
REQUESTS = 12
HEADROOM = 0.05
ENOUGH_SAMPLES = 5
RECORDING = load_recording()
ROOMY = {
    "shapes": [{"window": None, "trigger": 0.97, "low_water": 0.46, "extract": 0.10, "tail": 0.12}],
    "recall": {"auto_tokens": 0},
}
"""A policy whose batches leave room for a few requests, also where the system message fills most of the window."""


@dataclass(slots=True)
class Wire:
    """What arrives at the model server: the chat bodies that were posted since the last look."""

    port: int
    connections: list[bytearray]
    read: dict[int, int] = field(default_factory=dict)

    @property
    def base_url(self) -> str:
        """The way to the server that is watched."""
        return f"http://127.0.0.1:{self.port}/v1"

    def news(self) -> list[dict[str, Any]]:
        """Bodies of complete requests, oldest first within a connection."""
        found = []
        for number, data in enumerate(self.connections):
            position = self.read.get(number, 0)
            while (end := data.find(b"\r\n\r\n", position)) >= 0:
                head = bytes(data[position:end]).lower()
                size = int(head.partition(b"content-length:")[2].split(b"\r\n")[0] or 0)
                position = end + 4 + size
                if size:
                    found.append(json.loads(data[end + 4 : position]))
            self.read[number] = position
        return found


@dataclass(frozen=True, slots=True)
class Step:
    """One request through Weir as the server saw and counted it.

    ``tokens`` is the header ``x-weir-tokens``; ``notes`` are the requests that Weir made for itself before.
    """

    sent: Array
    notes: list[dict[str, Any]]
    prompt: int
    cached: int
    tokens: dict[str, int]
    actions: str


@asynccontextmanager
async def watched(llama: Llama) -> AsyncIterator[Wire]:
    async with tcp_tap(llama.port) as (port, connections):
        yield Wire(port, connections)


def recorded(index: int) -> Array:
    """The messages that the recorded message ``index`` answered."""
    return list(RECORDING.values[:index])


def tokens_of(header: str) -> dict[str, int]:
    return {name: int(value) for name, _, value in (part.partition("=") for part in header.split(";"))}


def pairs_are_whole(array: Array) -> bool:
    """Whether every tool result follows the call it answers, and every call has its result."""
    waiting: list[str] = []
    for message in array:
        if message["role"] == "tool":
            if message["tool_call_id"] not in waiting:
                return False
            waiting.remove(message["tool_call_id"])
        elif waiting:
            return False
        else:
            waiting = [call["id"] for call in message.get("tool_calls") or ()]
    return not waiting


async def step(target: RunningWeir, wire: Wire, messages: Any) -> Step:
    """Ask with the given messages."""
    raw = await target.client().chat.completions.with_raw_response.create(
        model=MODEL, messages=messages, max_tokens=MAX_TOKENS, temperature=0, timeout=300
    )
    usage = raw.parse().usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    *notes, forwarded = wire.news()
    return Step(
        sent=forwarded["messages"],
        notes=notes,
        prompt=usage.prompt_tokens,
        cached=usage.prompt_tokens_details.cached_tokens or 0,
        tokens=tokens_of(raw.headers["x-weir-tokens"]),
        actions=raw.headers["x-weir-actions"],
    )


async def play(llama: Llama) -> list[Step]:
    """The beginning of the recorded run, through a Weir that was told nothing of the window."""
    async with watched(llama) as wire, weir(wire.base_url, window=None, balanced=ROOMY) as target:
        return [await step(target, wire, recorded(i)) for i in RECORDING.requests[:REQUESTS]]


@pytest.fixture(scope="module")
def session(llama: Llama) -> list[Step]:
    return asyncio.run(play(llama))


@pytest.mark.requirement("A0.3", "P3")
def test_a_real_run_that_overflows_directly_is_answered_to_its_end_through_weir(
    session: list[Step], llama: Llama
) -> None:
    with openai.OpenAI(base_url=llama.base_url, api_key="none", max_retries=0, timeout=300) as direct:
        for index in RECORDING.requests[REQUESTS // 2 : REQUESTS]:
            given: Any = {"messages": recorded(index), "max_tokens": MAX_TOKENS, "temperature": 0}
            with pytest.raises(openai.BadRequestError, match="exceeds the available context size"):
                direct.chat.completions.create(model=MODEL, **given)
    assert len(session) == REQUESTS
    assert max(taken.prompt for taken in session) <= llama.window - MAX_TOKENS
    assert all(pairs_are_whole(taken.sent) for taken in session)
    assert all(taken.sent[0] == RECORDING.values[0] for taken in session)


@pytest.mark.requirement("P10")
def test_the_window_of_a_slot_is_found_by_asking_the_server(session: list[Step], llama: Llama) -> None:
    limit = llama.window - MAX_TOKENS - int(HEADROOM * llama.window)
    assert {taken.tokens["limit"] for taken in session} == {limit}
    assert "retry" not in "".join(taken.actions for taken in session)


@pytest.mark.requirement("P4")
def test_requests_with_room_arrive_as_the_client_sent_them(session: list[Step]) -> None:
    unchanged = [taken.sent == recorded(i) for taken, i in zip(session, RECORDING.requests, strict=False)]
    assert unchanged[:2] == [True, True]
    assert [taken.actions == "none" for taken in session] == unchanged


@pytest.mark.requirement("P2", "D25")
def test_the_servers_prefix_cache_serves_what_was_sent_before_until_the_next_batch(
    session: list[Step], record_property: Any
) -> None:
    later = list(pairwise(session))
    steady = [(old, new) for old, new in later if begins_with(new.sent, old.sent)]
    assert len(steady) >= 4
    for old, new in steady:
        assert new.cached >= 0.9 * old.prompt
    system = min(new.cached for _, new in later)
    assert system > 1_000, "the system message was read again"
    share = sum(new.cached for _, new in later) / sum(new.prompt for _, new in later)
    record_property("cached share of prompt tokens", f"{share:.3f}")
    record_property("batches", str(len(later) - len(steady)))
    assert share > 0.7


@pytest.mark.requirement("D10")
def test_the_estimate_is_within_five_percent_of_the_servers_own_count_once_it_has_counted_a_few(
    session: list[Step], record_property: Any
) -> None:
    errors = [taken.tokens["after"] / taken.prompt - 1 for taken in session[ENOUGH_SAMPLES:]]
    record_property("estimate / count - 1", " ".join(f"{error:+.3f}" for error in errors))
    assert statistics.median(map(abs, errors)) <= 0.05
    assert min(errors) >= -0.05, "an estimate that is short leads to a refusal"
    assert max(errors) <= 0.15


@pytest.mark.requirement("P5")
async def test_a_real_stream_arrives_as_it_is_made(llama: Llama) -> None:
    async with weir(llama.base_url, window=None) as target:
        stream = await target.client().chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Name the months of the year."}],
            max_tokens=24,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        arrivals, text, usage = [], "", None
        async for chunk in stream:
            arrivals.append(time.perf_counter())
            text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
            usage = chunk.usage or usage
    assert text.strip()
    assert usage is not None
    assert usage.completion_tokens <= 24
    gaps = [new - old for old, new in pairwise(arrivals)]
    assert sum(gap > 0.001 for gap in gaps) >= 8, "the answer came in one piece"


@pytest.mark.requirement("P4")
async def test_a_blocking_client_gets_the_same_answer_as_an_asynchronous_one(llama: Llama) -> None:
    question: Any = [{"role": "user", "content": "What is the capital of France?"}]

    def ask(base_url: str, *, stream: bool) -> str:
        with openai.OpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
            given: Any = {"model": MODEL, "messages": question, "max_tokens": MAX_TOKENS, "temperature": 0}
            if stream:
                chunks = client.chat.completions.create(stream=True, **given)
                return "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
            return client.chat.completions.create(**given).choices[0].message.content or ""

    async with weir(llama.base_url, window=None) as target:
        whole = await asyncio.to_thread(ask, target.base_url, stream=False)
        streamed = await asyncio.to_thread(ask, target.base_url, stream=True)
        answer = await target.client().chat.completions.create(
            model=MODEL, messages=question, max_tokens=MAX_TOKENS, temperature=0
        )
    assert whole
    assert whole == streamed == answer.choices[0].message.content


@pytest.mark.requirement("P16", "A0.3", "D15", "R.46")
@pytest.mark.parametrize("stream", [False, True])
async def test_the_real_refusal_is_recognised_its_limit_learned_and_the_request_answered(
    stream: bool, llama: Llama, tmp_path: Path
) -> None:
    first, second = RECORDING.requests[10:12]
    async with watched(llama) as wire, weir(wire.base_url, tmp_path / "w.db", window=32_768) as target:
        given: Any = {"model": MODEL, "max_tokens": MAX_TOKENS, "temperature": 0, "stream": stream, "timeout": 300}
        messages: Any = recorded(first)
        raw = await target.client().chat.completions.with_raw_response.create(messages=messages, **given)
        if stream:
            answer: Any = raw.parse()
            assert [chunk async for chunk in answer]
        refused, answered = wire.news()
        again = await step(target, wire, recorded(second))
        await target.stored()
        store = target.runtime.store
        assert store is not None
        learned = [row.limit for row in target.runtime.limits_resolver.unsaved()[1]] or [
            r.limit for r in await store.limits()
        ]
    assert refused["messages"] == recorded(first)
    assert len(answered["messages"]) < len(refused["messages"])
    assert pairs_are_whole(answered["messages"])
    assert "retry=1" in raw.headers["x-weir-actions"]
    assert learned == [llama.window]
    assert "retry" not in again.actions
    assert again.tokens["limit"] < llama.window


@pytest.fixture
def wider(tmp_path: Path) -> Iterator[Llama]:
    """A server with one slot that is large enough for Weir to ask for notes."""
    try:
        with model_server(tmp_path, slots=1, window=3_072) as server:
            yield server
    except Unavailable as reason:
        pytest.skip(str(reason))


NOTES = """
upstreams:
  llama: {{base_url: "{base_url}"}}
policies:
  notes:
    preset: balanced
    summarizer: same
    summaries: {{prepare_at: null, wait: 240, seconds: 240}}
    shapes: [{{window: null, trigger: 0.9, low_water: 0.45, extract: 0.2, tail: 0.25}}]
    cascade: [{{layer: compact}}]
default_policy: notes
store: {{url: "sqlite+aiosqlite:///{store}"}}
"""


@pytest.mark.requirement("P13", "A0.3")
async def test_notes_by_the_model_itself_are_used_or_refused_and_the_session_goes_on(
    wider: Llama, tmp_path: Path, record_property: Any
) -> None:
    steps = RECORDING.requests[12:14]
    head = {"role": "system", "content": "You are an airline agent. Answer in one sentence."}
    async with watched(wider) as wire:
        yaml = NOTES.format(base_url=wire.base_url, store=tmp_path / "w.db")
        patient = Summarizer(patience=240)
        async with weir("", yaml=yaml, folder=tmp_path, window=None, asking=patient) as target:
            taken = [await step(target, wire, [head, *recorded(index)[1:]]) for index in steps]
            await target.stored()
            store = target.runtime.store
            assert store is not None
            (conversation,) = await store.conversations(None)
            checkpoints = await store.checkpoints(conversation)
    asked = [body["messages"] for each in taken for body in each.notes]
    assert asked
    systems = [messages[0]["content"] for messages in asked]
    assert systems[0] == PROMPTS["structured"].system
    assert set(systems) <= {PROMPTS[name].system for name in ("structured", "plain")}
    assert all(each.prompt <= wider.window - MAX_TOKENS for each in taken)
    assert all(pairs_are_whole(each.sent) for each in taken)
    cuts = [row.cut for row in checkpoints if row.cut is not None]
    for cut in cuts:
        record_property("notes", f"{cut.origin}: {cut.narrative}")
        assert (cut.origin == "extract") == (not cut.narrative)
        assert cut.narrative[:40] in cut.text
    assert any(cuts[-1].text in str(message["content"]) for message in taken[-1].sent)
