"""Plans in processes of their own: the same as here, in turns by key, and nobody's request for a process that dies."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import uvloop

from policies.effects import Effect, Failed, Reply
from policies.ledger import ConversationState, Decision
from policies.messages import Transcript
from policies.planner import plan
from policies.settings import ContextSettings
from proxy.child import ChildProcess
from proxy.config.loading import load_config
from proxy.effects.perform import SharedReadings
from proxy.errors import Busy
from proxy.planning import workers
from proxy.planning.workers import BACKGROUND, HUGE, TookTooLong, Turns, WorkerDied, Workers
from proxy.wire import transcripts
from proxy.wire.anthropic import MESSAGES
from proxy.wire.codec import CHAT, Codec
from proxy.wire.counting import Tokenizer
from proxy.wire.raw import write_value
from proxy.wire.responses import RESPONSES
from proxy.wire.transcripts import Transcripts, skimmed
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


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)


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
async def test_where_no_process_can_be_started_a_thread_plans(pool: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "python", lambda code: ("/does/not/exist",))
    decision = await pool.run(planning(await transcript_of()), key="a", branch="b", ask=nobody)
    assert decision.cut is not None
    assert pids(pool) == []


@pytest.mark.requirement("S.26")
async def test_what_cannot_be_given_away_is_planned_by_a_thread(pool: Workers) -> None:
    class Own:
        def count(self, text: str) -> int:
            return len(text) // 3

    work = planning(await transcript_of())
    decision = await pool.run(partial(work, counter=Own()), key="a", branch="b", ask=nobody)
    assert decision.cut is not None
    assert pids(pool) == []


@pytest.mark.requirement("S.26")
async def test_what_an_answer_raises_leaves_the_process_to_the_next_plan(pool: Workers) -> None:
    transcript, asked = await transcript_of(), list[Effect]()

    async def ask(effect: Effect) -> Reply:
        asked.append(effect)
        raise LookupError("meanwhile")

    with pytest.raises(LookupError, match="meanwhile"):
        await pool.run(with_summary(transcript), key="a", branch="b", ask=ask)
    (process,) = pids(pool)
    assert len(asked) == 1
    assert (await pool.run(planning(transcript), key="a", branch="b", ask=nobody)).cut is not None
    assert pids(pool) == [process]


@pytest.mark.requirement("S.26")
async def test_a_process_that_plans_loads_neither_database_nor_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transcripts, "MAX_READ", 4_000)
    whole = await transcript_of()
    asked = skimmed(whole, window=1_000)
    assert asked is not whole
    frame, count, *_ = workers.packed(planning(asked))
    code = f"""
import pickle, sys
from proxy.planning import workers
pickle.loads(sys.stdin.buffer.read(), buffers=[b"[]"] * {int(count)})
print(sorted({{"sqlalchemy", "pydantic", "aiohttp"}} & sys.modules.keys()))"""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    said, _ = await process.communicate(bytes(frame))
    assert (process.returncode, said) == (0, b"[]\n")


@pytest.mark.requirement("S.26")
async def test_processes_without_work_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "VERY_LONG", workers.LONG)
    pool = Workers(2, idle=0.01)
    await pool.run(planning(await transcript_of()), key="a", branch="b", ask=nobody)
    await until(lambda: not pids(pool))
    await pool.close()


@pytest.mark.requirement("S.26")
async def test_a_long_plan_beside_a_longer_one_is_not_made_here(pool: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "VERY_LONG", 2 * workers.LONG)
    longer, long = await transcript_of(messages=60), await transcript_of()
    assert long.tokens < workers.VERY_LONG <= longer.tokens
    other = asyncio.create_task(pool.run(planning(longer), key="a", branch="b", ask=nobody))
    await until(lambda: bool(pool._working))
    await pool.run(planning(long), key="other", branch="other", ask=nobody)
    await other
    assert len(pids(pool)) == 2


@pytest.mark.requirement("S.26")
async def test_a_conversation_goes_to_the_process_that_has_read_it(pool: Workers) -> None:
    first, second = await transcript_of(), await transcript_of(seed=1)
    runs = (pool.run(planning(t), key=key, branch=key, ask=nobody) for t, key in ((first, "a"), (second, "b")))
    await asyncio.gather(*runs)
    assert len(pids(pool)) == 2
    knows = {each.knows[0]: each.process.pid for each in pool._resting}
    for _ in range(2):
        for key, transcript in (("a", first), ("b", second)):
            await pool.run(planning(transcript), key=key, branch=key, ask=nobody)
            assert pool._resting[-1].process.pid == knows[key]


async def order_of(turns: Turns, keys: str) -> list[str]:
    """In which order keys that ask in this one are given places, which they leave at once."""
    given: list[str] = []

    async def ask(key: str) -> None:
        await turns.enter(key)
        given.append(key)
        await asyncio.sleep(0)
        turns.leave(key)

    for holder in ("x", "y"):
        await turns.enter(holder)
    asking = [asyncio.create_task(ask(key)) for key in keys]
    await asyncio.sleep(0)
    turns.leave("x")
    await asyncio.gather(*asking)
    turns.leave("y")
    return given


@pytest.mark.requirement("S.26")
async def test_each_key_has_its_turn_whoever_has_asked_oftener() -> None:
    assert await order_of(Turns(2), "aaaabbc") == [*"abcabaa"]


@pytest.mark.requirement("S.26", "P5")
async def test_what_no_request_waits_for_comes_last_and_leaves_a_place() -> None:
    turns = Turns(2)
    await turns.enter("a")
    behind = asyncio.create_task(turns.enter(BACKGROUND))
    await asyncio.sleep(0)
    second = asyncio.create_task(turns.enter("a"))
    await asyncio.sleep(0)
    assert turns.waiting == 2
    turns.leave("a")
    await second
    assert not behind.done()
    turns.leave("a")
    await behind
    await turns.enter("a")
    assert turns.waiting == 0


@pytest.mark.requirement("S.26")
async def test_no_key_has_all_places_and_the_last_one_is_free_for_another() -> None:
    turns = Turns(2)
    await turns.enter("a")
    second = asyncio.create_task(turns.enter("a"))
    await asyncio.sleep(0)
    assert turns.waiting == 1
    await turns.enter("b")
    turns.leave("b")
    await asyncio.sleep(0)
    assert not second.done()
    turns.leave("a")
    await second


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


@pytest.mark.requirement("S.26", "R.22")
async def test_what_is_huge_is_planned_alone_and_told_to_come_again(
    pool: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "ENORMOUS", workers.LONG)
    monkeypatch.setattr(workers, "PATIENCE", 0.05)
    transcript = await transcript_of()
    await pool._turns.enter(HUGE)
    with pytest.raises(Busy) as busy:
        await pool.run(planning(transcript), key="b", branch="b", ask=nobody)
    assert busy.value.retry_after == 1
    pool._turns.leave(HUGE)
    assert (await pool.run(planning(transcript), key="b", branch="b", ask=nobody)).cut is not None


async def test_what_is_huge_and_has_waited_elsewhere_is_not_begun_any_more(
    pool: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "ENORMOUS", workers.LONG)
    transcript = await transcript_of()

    async def planned(*, waited: float | None) -> Decision:
        since = None if waited is None else time.monotonic() - waited
        made: Decision = await pool.run(planning(transcript), key="b", branch="b", ask=nobody, since=since)
        return made

    with pytest.raises(Busy) as busy:
        await planned(waited=workers.PLANNED_WITHIN)
    assert busy.value.retry_after == 3
    assert pool._turns.waiting == 0
    assert (await planned(waited=workers.PLANNED_WITHIN - 1)).cut is not None
    pool._pace = workers.PLANNED_WITHIN / transcript.tokens  # the last one was that slow
    with pytest.raises(Busy):
        await planned(waited=1)
    assert (await planned(waited=None)).cut is not None
    assert pool._pace < workers.PLANNED_WITHIN / transcript.tokens / 2
    assert (await planned(waited=1)).cut is not None


@pytest.mark.requirement("S.26", "A0.3")
def test_a_question_that_is_left_in_a_cycle_takes_nobody_down() -> None:
    """As after a request that failed while it was being asked: its traceback holds what it asked, and the reverse."""
    story = """if True:
        import gc, pickle
        from msgspec import Raw
        from proxy.planning.workers import written
        from proxy.wire.codec import Segments

        class Asked: ...

        gc.disable()
        for _ in range(50):
            segments, buffers = Segments(Raw(b'[{"role":"user","content":"Go on."}]')), []
            written(segments, buffers)
            asked = Asked()
            asked.all = asked, segments, [buffer.raw() for buffer in buffers]
        del segments, buffers, asked
        gc.collect()
    """
    ended = subprocess.run((sys.executable, "-c", story), capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.requirement("R.73", "R.74")
def test_a_process_that_is_given_up_while_it_starts_is_gone_and_nothing_else_is_said_of_it() -> None:
    """A request that is cut off just then is answered so, and not planned after all."""

    async def given_up_after(turns: int) -> ChildProcess | None:
        starting = asyncio.create_task(ChildProcess.start((sys.executable, "-c", "input()")))
        for _ in range(turns):
            await asyncio.sleep(0)
        starting.cancel()
        await asyncio.wait({starting})
        return None if starting.cancelled() else starting.result()

    async def given_up() -> list[ChildProcess | None]:
        found = [await given_up_after(turns) for turns in range(1, 9)]
        for process in found:
            if process is not None:
                await process.end()
        return found

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        found = runner.run(given_up())
    assert found[1] is None
    assert found[-1] is not None


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
