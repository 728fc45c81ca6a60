"""Plans in processes of their own: the same as here, in turns by key, and nobody's request for a process that dies."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from policies.effects import Effect, Failed, Reply
from policies.ledger import ConversationState, Decision
from policies.messages import Transcript
from policies.planner import plan
from policies.settings import ContextSettings
from proxy.config.loading import load_config
from proxy.effects.perform import SharedReadings
from proxy.planning import workers
from proxy.planning.workers import TookTooLong, Turns, WorkerDied, Workers
from proxy.wire.anthropic import MESSAGES
from proxy.wire.codec import CHAT, Codec
from proxy.wire.counting import Tokenizer
from proxy.wire.raw import write_value
from proxy.wire.responses import RESPONSES
from proxy.wire.transcripts import Transcripts
from tests.functional.harness import TOOLS, prose

pytestmark = pytest.mark.slow

COUNTER = Tokenizer().counter("o200k_base")
SETTINGS = load_config(env={}).policy("balanced")


async def transcript_of(codec: Codec = CHAT, *, messages: int = 24, seed: int = 0) -> Transcript:
    """A history of about 20,000 tokens."""
    said = [
        {"role": ("user", "assistant")[n % 2], "content": prose(700, seed=1_000 * seed + n)} for n in range(messages)
    ]
    history = [*said, {"role": "user", "content": "Go on."}]
    fields: dict[str, Any] = {"model": "gpt-4o", codec.array: history}
    request = codec.parse(write_value(fields | ({"tools": TOOLS} if codec is CHAT else {})))
    read = await Transcripts().read(request, tenant="t", model="gpt-4o", counter=COUNTER)
    return read.transcript


def planning(transcript: Transcript, *, window: int = 16_384, settings: ContextSettings = SETTINGS) -> "partial[Any]":
    from policies.limits import divide

    return partial(
        plan,
        transcript,
        settings=settings,
        budget=divide(settings, window=window),
        known=ConversationState(),
        counter=COUNTER,
        readings=SharedReadings(),
    )


async def nobody(effect: Effect) -> Reply:
    return Failed("off")


@pytest.fixture
async def pool(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Workers]:
    monkeypatch.setattr(workers, "VERY_LONG", workers.LONG)
    made = Workers(2)
    yield made
    await made.close()


def pids(pool: Workers) -> list[int]:
    return [each.process.pid for each in (*pool._working, *pool._resting)]


@pytest.mark.requirement("S.26", "P5")
@pytest.mark.parametrize("codec", [CHAT, RESPONSES, MESSAGES], ids=lambda codec: codec.name)
async def test_a_process_decides_what_a_thread_does(codec: Codec, pool: Workers) -> None:
    transcript = await transcript_of(codec)
    here: Decision = await Workers().run(planning(transcript), key="a", branch="b", ask=nobody)
    there: Decision = await pool.run(planning(transcript), key="a", branch="b", ask=nobody)
    assert len(pids(pool)) == 1
    assert here.cut is not None
    assert there._replace(trend=here.trend) == here


def with_summary(transcript: Transcript) -> "partial[Any]":
    return planning(
        transcript, settings=replace(SETTINGS, summarizer="small", summaries=replace(SETTINGS.summaries, wait=20.0))
    )


@pytest.mark.requirement("S.26")
async def test_a_process_that_dies_each_time_is_given_up(pool: Workers) -> None:
    async def ask(effect: Effect) -> Reply:
        os.kill(pids(pool)[0], signal.SIGKILL)
        return Failed("off")

    with pytest.raises(WorkerDied):
        await pool.run(with_summary(await transcript_of()), key="a", branch="b", ask=ask)
    assert pids(pool) == []


@pytest.mark.requirement("S.26")
@pytest.mark.parametrize("given", [False, True])
async def test_who_stops_waiting_keeps_no_place(given: bool) -> None:
    turns = Turns(1)
    await turns.enter("a")
    waiting = asyncio.create_task(turns.enter("b"))
    await asyncio.sleep(0)
    if given:
        turns.leave("a")
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    if not given:
        turns.leave("a")
    assert turns.waiting == 0
    await asyncio.wait_for(turns.enter("c"), 5)


def endless(transcript: Transcript) -> None:
    while transcript:
        pass


@pytest.mark.requirement("S.26")
async def test_work_that_takes_too_long_is_ended_once_and_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "VERY_LONG", workers.LONG)
    transcript, pool = await transcript_of(), Workers(2, deadline=1)
    try:
        ending = asyncio.create_task(pool.run(partial(endless, transcript), key="a", branch="a", ask=nobody))
        other: Decision = await pool.run(planning(transcript), key="b", branch="b", ask=nobody)
        assert other.cut is not None
        with pytest.raises(TookTooLong):
            await ending
        assert pool.processes == {"busy": 0, "idle": 1}
    finally:
        await pool.close()
