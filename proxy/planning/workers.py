"""Long plans in processes of their own, so that no other request waits for the interpreter
meanwhile.

Waiting requests take turns by key, and no key has all processes. What may wait is bounded by
admission, which counts the bodies. Abandoned work ends at once, with its process. A process that
dies costs no client its request: its work is started again, by a thread where no process is
available. Work that takes more of a core's time than any plan needs is ended with its process, and
not begun again.

Such a process is given a function of the pure half and its arguments, and answers. A frame each way
is a pickle: only Weir writes them, to a pipe that nobody else has. The history's bytes go
separately, uncopied. What was read is kept there, from one request of a conversation to the next.
Answers are pairs: what a flow asks for (``asks``), what it has just done (``did``), whether the
definitions of the tools are needed (``tools``), and one that ends the work: what came of it
(``done``), what it refuses by (``refuses``), or where it failed (``failed``).
"""

import asyncio
import copyreg
import io
import logging
import os
import pickle
import resource
import signal
import time
import traceback
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Generator, Hashable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from inspect import isgeneratorfunction
from types import MappingProxyType
from typing import Any, BinaryIO, NamedTuple, TypeVar, cast

from policies.effects import Compare, Done, Effect, Flow, Offload, Returned, step
from policies.messages import PolicyError, Tools, Transcript
from policies.strategies.recall import Pages
from policies.text.segments import Readings
from policies.tokens import TokenCounter
from proxy.child import ChildProcess, Frames, answering, python, write_frame
from proxy.effects.perform import Ask, SharedReadings, by_shingles, drive
from proxy.errors import Busy
from proxy.telemetry.process import collect_seldom, give_back, keep_little, resident
from proxy.telemetry.trace import NULL_SPAN, Span
from proxy.wire import CODECS
from proxy.wire.codec import Codec
from proxy.wire.counting import TextCounter, Vocabulary

NICENESS = 1
"""Other requests take precedence over plans."""
COLLECT_AFTER = 100_000
"""Objects: a long history is read into very many, none of which goes before the plan is made."""


class _Side(NamedTuple):
    output: BinaryIO
    frames: Frames

    def answer(self, kind: str, value: object = None) -> None:
        write_frame(self.output, written((kind, value)))

    def ask(self, kind: str, value: object = None) -> Any:
        self.answer(kind, value)
        reply = pickle.loads(self.frames.get())  # noqa: S301 - from the Weir that started this process
        if reply is None:
            raise _Abandoned
        return reply


class _Abandoned(BaseException): ...


@cache
def _side() -> _Side:
    return _Side(*answering())


def work() -> None:
    side = _side()
    os.nice(NICENESS)
    keep_little()
    collect_seldom(COLLECT_AFTER)
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    side.answer("ready")
    while True:
        seconds = int(side.frames.get())
        asked = side.frames.get()
        buffers = [side.frames.get() for _ in range(int(side.frames.get()))]
        _take_at_most(seconds)
        try:
            answer = ("done", _run(pickle.loads(asked, buffers=buffers), side))  # noqa: S301 - as above
        except PolicyError as error:
            answer = ("refuses", (type(error), error.args, vars(error)))
        except BaseException:  # noqa: BLE001 - a fault of one request must not affect the next
            answer = ("failed", traceback.format_exc())
        del asked, buffers
        side.answer(*answer)
        give_back()


def _take_at_most(seconds: int) -> None:
    """Let the system end this process, whatever it is doing, after so many more seconds of CPU
    time.
    """
    used = time.process_time()
    most = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (int(used) + 1 + seconds, most))


def _run(asked: Callable[[], Any], side: _Side) -> Any:
    made = asked()
    if not isinstance(made, Generator):
        return made
    now = step(made)
    while not isinstance(now, Returned):
        if isinstance(now, Offload):
            now = step(made, Done())
        elif isinstance(now, Compare) and now.model is None:
            now = step(made, by_shingles(now))
        else:
            now = step(made, side.ask("asks", now))
    return now.value


def _read_tools() -> Tools:
    return cast("Tools", _side().ask("tools"))


def _announce(what: str) -> None:
    _side().answer("did", what)


@cache
def _codec(name: str) -> Codec:
    return CODECS[name]


@cache
def _readings() -> Readings:
    return Readings(most=30_000)


@cache
def _own(kind: Callable[..., Any], *given: Hashable) -> Any:
    """This process's own instance of an object that is never sent to it; the same arguments give
    the same instance.
    """
    return kind(*given)


def _counter(name: str, source: TokenCounter) -> TextCounter:
    return TextCounter(name, source, _own(ThreadPoolExecutor, 1))


def refusal(
    kind: type[PolicyError], args: tuple[object, ...], facts: dict[str, object]
) -> PolicyError:
    error = kind.__new__(kind, *args)
    error.args = args
    vars(error).update(facts)
    return error


class Unmovable(Exception): ...


def packed(work: "partial[Any]") -> list[bytes | memoryview]:
    """The frames that ask for a function of the pure half, bound to a transcript and more. Raises
    Unmovable.
    """
    moved = replace(work.args[0], read_tools=_read_tools)
    named = dict(work.keywords)
    if "announce" in named:
        named["announce"] = _announce
    buffers = list[pickle.PickleBuffer]()
    try:
        frame = written(partial(work.func, moved, *work.args[1:], **named), buffers)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise Unmovable(str(error)) from None
    return [frame, b"%d" % len(buffers), *(buffer.raw() for buffer in buffers)]


def written(value: object, buffers: list[pickle.PickleBuffer] | None = None) -> bytes:
    target = io.BytesIO()
    beside = None if buffers is None else buffers.append
    pickler = pickle.Pickler(target, pickle.HIGHEST_PROTOCOL, buffer_callback=beside)
    pickler.dispatch_table = _INSTEAD
    pickler.dump(value)
    return target.getvalue()


_INSTEAD: dict[type, Callable[[Any], Any]] = {
    **copyreg.dispatch_table,
    MappingProxyType: lambda found: (dict, (dict(found),)),
    **{type(codec): lambda codec: (_codec, (codec.name,)) for codec in CODECS.values()},
    SharedReadings: lambda _: (_readings, ()),
    Pages: lambda _: (_own, (Pages,)),
    Vocabulary: lambda found: (_own, (Vocabulary, found.name, found._directories)),  # noqa: SLF001 - to be made again there
    TextCounter: lambda counter: (_counter, (counter.name, counter._source)),  # noqa: SLF001
}


log = logging.getLogger("weir.workers")

LONG = 16_000
VERY_LONG = 64_000
"""Tokens of a history from which on another process plans it, and from which on one is started for
it alone.
"""
BYTES_A_TOKEN = 6
"""Bytes that are read in the time of a token: a long text of few tokens is as long."""
ENORMOUS = 2_000_000
"""Tokens from which on one plan is made at a time, and a client that would have to wait long for
that must retry.
"""
PATIENCE = 3.0
PLANNED_WITHIN = 8.0
"""Seconds in which an enormous request that had to wait is planned, or refused for now: ten
until it is answered.
"""
DEADLINE = 10
DEADLINE_A_TOKEN = 4e-6
"""Seconds of a core that a plan may take, and how many more for each token."""
SECONDS_A_TOKEN = 1e-6
"""The assumed duration of such a plan before the first one."""
HUGE = "huge"
START_WITHIN = 30.0
IDLE = 300.0
LARGE = 192 * 2**20
"""Bytes that a process may keep from one plan to the next; after an enormous one it ends."""
MAX_FRAME = 2**32
MAX_WORKERS = 8
TRIES = 2
REMEMBERED = 256
BACKGROUND = ""
"""The key of all work that no request waits for: it begins when no request waits, and leaves a
place for one.
"""
GONE = (OSError, EOFError, pickle.UnpicklingError)
T = TypeVar("T")


def processes_for_plans() -> int:
    """How many a server may have: a core is left for what it does itself, two is the least."""
    return min(MAX_WORKERS, max(2, (os.cpu_count() or 1) - 1))


class WorkerDied(Exception): ...


class TookTooLong(Exception):
    """A plan has used more CPU time than it may; it is not started again."""


class _CannotStart(Exception): ...


class Turns:
    """Slots, and the requests that wait for one: each key in its turn, and no key has all of them.

    Huge plans, from any caller, have one, to limit memory; what is done in the background comes
    last.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._taken = Counter[str]()
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    @property
    def waiting(self) -> int:
        return sum(not turn.done() for turns in self._waiting.values() for turn in turns)

    async def enter(self, key: str) -> None:
        if self._has_place(key):
            self._taken[key] += 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(key, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # its turn had come
                self.leave(key)
            raise

    def leave(self, key: str) -> None:
        self._taken[key] -= 1
        for other in sorted(self._waiting, key=BACKGROUND.__eq__):
            waiting = self._waiting[other]
            while waiting and waiting[0].done():  # it was cancelled
                waiting.popleft()
            given = bool(waiting) and self._has_place(other)
            if given:
                self._taken[other] += 1
                waiting.popleft().set_result(None)
                self._waiting.move_to_end(other)
            if not waiting:
                del self._waiting[other]
            if given:
                return

    def _has_place(self, key: str) -> bool:
        taken = self._taken.total()
        if key == BACKGROUND and taken:
            return taken < self._most - 1
        return taken < self._most and self._taken[key] < (
            1 if key == HUGE else max(1, self._most - 1)
        )


@dataclass(slots=True, eq=False)
class _Worker:
    process: ChildProcess
    knows: deque[str] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    rests: bool = True
    leaving: asyncio.TimerHandle | None = None


class Workers:
    def __init__(self, most: int = 0, *, idle: float = IDLE, deadline: int = DEADLINE) -> None:
        self._most = most
        self._idle = idle
        self._deadline = deadline
        self._turns = Turns(most)
        self._resting: list[_Worker] = []
        self._working: set[_Worker] = set()
        self._here = 0
        self._pace = SECONDS_A_TOKEN
        self._ending: set[asyncio.Task[None]] = set()

    @property
    def waiting(self) -> int:
        return self._turns.waiting

    @property
    def processes(self) -> dict[str, int]:
        return {"busy": len(self._working), "idle": len(self._resting)}

    async def run(
        self,
        work: "partial[Flow[T]] | partial[T]",
        *,
        key: str,
        branch: str,
        ask: Ask,
        span: Span = NULL_SPAN,
        begun: tuple[Flow[T], Effect] | None = None,
        since: float | None = None,
    ) -> T:
        """The result of a function of the pure half whose first argument is a transcript; flows use
        ``ask``.

        ``begun`` is the flow where it was begun here, with its first effect. A process that has
        read the conversation's ``branch`` before is preferred; ``since`` is when a request that
        waited for room could have begun (``time.monotonic``). Raises PolicyError as the function
        does, WorkerDied, TookTooLong, Busy for an enormous one.
        """
        is_whole = begun is None or isinstance(begun[1], Offload)
        if is_whole and self._is_long(work.args[0]):
            try:
                moved: T = await self._elsewhere(work, key, branch, ask, span, since)
            except (Unmovable, _CannotStart) as error:
                log.warning("a thread does what a process should do: %s", error)
            else:
                return moved
        self._here += 1
        try:
            if begun is not None:
                return await drive(*begun, ask, span)
            if isgeneratorfunction(work.func):
                flow = cast("Flow[T]", work())
                return await drive(flow, await asyncio.to_thread(step, flow), ask, span)
            return await asyncio.to_thread(cast("partial[T]", work))
        finally:
            self._here -= 1

    def _is_long(self, transcript: Transcript) -> bool:
        length = _length_of(transcript)
        if not self._most or length < LONG:
            return False
        return length >= VERY_LONG or self._here > 0 or bool(self._resting or self._working)

    async def close(self) -> None:
        self._most = 0
        for found in (*self._resting, *self._working):
            self._end(found)
        self._resting.clear()
        await asyncio.gather(*self._ending, return_exceptions=True)

    async def _elsewhere(
        self, work: "partial[Any]", key: str, branch: str, ask: Ask, span: Span, since: float | None
    ) -> Any:
        tokens = work.args[0].tokens
        patience = None
        seconds = self._deadline + int(DEADLINE_A_TOKEN * _length_of(work.args[0]))
        frames = [b"%d" % seconds, *await asyncio.to_thread(packed, work)]
        if tokens >= ENORMOUS:
            key = HUGE
            patience = self._patience(tokens, since)
        for _ in range(TRIES):
            at = span.now()
            async with self._turn(key, branch, patience) as found:
                span.since(at, "wait", "worker")
                span.begin()
                begun = time.monotonic()
                try:
                    returned = await _Talk(found, ask, span, work).work(frames)
                except GONE as error:
                    if found.rests:  # another request's fault
                        raise
                    if await found.process.ended_by() == signal.SIGXCPU:
                        raise TookTooLong(f"a plan took more than {seconds} s of a core") from None
                    log.warning(
                        "the process that planned a request has ended: %s", type(error).__name__
                    )
                    continue
            if key == HUGE:
                self._pace = (time.monotonic() - begun) / tokens
            return returned.value
        raise WorkerDied

    @asynccontextmanager
    async def _turn(self, key: str, branch: str, patience: float | None) -> AsyncIterator[_Worker]:
        await self._enter(key, patience)
        try:
            if not self._most:
                raise _CannotStart("the server stops")
            found = self._rested(branch) or await _started()
            self._working.add(found)
            try:
                yield found
            finally:
                self._working.discard(found)
                if found.rests and key != HUGE and resident(found.process.pid) <= LARGE:
                    found.knows.append(branch)
                    found.leaving = asyncio.get_running_loop().call_later(
                        self._idle, self._leave, found
                    )
                    self._resting.append(found)
                else:
                    await found.process.end()
        finally:
            self._turns.leave(key)

    def _patience(self, tokens: int, since: float | None) -> float:
        """Seconds that an enormous plan may wait; raises Busy where it is too late for one that has
        waited already.
        """
        now = time.monotonic()
        left = (now if since is None else since) + PLANNED_WITHIN - self._pace * tokens - now
        if since is not None and left <= 0:
            raise Busy.after(PATIENCE)
        return min(PATIENCE, max(0.0, left))

    async def _enter(self, key: str, patience: float | None) -> None:
        try:
            async with asyncio.timeout(patience):
                await self._turns.enter(key)
        except TimeoutError:
            raise Busy.after(PATIENCE) from None

    def _rested(self, branch: str) -> _Worker | None:
        self._resting = [found for found in self._resting if found.process.is_running]
        if not self._resting:
            return None
        chosen = next(
            (found for found in self._resting if branch in found.knows), self._resting[-1]
        )
        self._resting.remove(chosen)
        if chosen.leaving is not None:
            chosen.leaving.cancel()
        return chosen

    def _leave(self, found: _Worker) -> None:
        if found in self._resting:
            self._resting.remove(found)
            self._end(found)

    def _end(self, found: _Worker) -> None:
        if found.leaving is not None:
            found.leaving.cancel()
        task = asyncio.get_running_loop().create_task(found.process.end(), name="weir-worker-ends")
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)


def _length_of(transcript: Transcript) -> int:
    """The tokens that it takes as long to read as the transcript."""
    return max(transcript.tokens, transcript.size // BYTES_A_TOKEN)


async def _started() -> _Worker:
    process: ChildProcess | None = None
    try:
        async with asyncio.timeout(START_WITHIN):
            process = await ChildProcess.start(
                python("from proxy.planning.workers import work; work()")
            )
            await process.receive(limit=MAX_FRAME)
    except BaseException as error:
        if process is not None:
            await process.end()
        if isinstance(error, (*GONE, TimeoutError)):
            raise _CannotStart(type(error).__name__) from None
        raise
    return _Worker(process)


@dataclass(slots=True)
class _Talk:
    found: _Worker
    ask: Ask
    span: Span
    asked: "partial[Any]"

    async def work(self, frames: "list[bytes | memoryview]") -> Returned[Any]:
        """The result of the work. Raises PolicyError as the function does, RuntimeError where it
        fails, one of GONE for the process.
        """
        self.found.rests = False
        process = self.found.process
        trouble = None
        read_tools = self.asked.args[0].read_tools
        await process.send(*frames)
        while True:
            kind, value = pickle.loads(await process.receive(limit=MAX_FRAME))  # noqa: S301 - of a process of Weir's own
            if kind == "did":
                self.span.lap(value)
                continue
            if kind in ("asks", "tools"):
                try:
                    reply = await (
                        asyncio.to_thread(read_tools) if kind == "tools" else self.ask(value)
                    )
                except Exception as error:  # noqa: BLE001 - it is raised again once the process rests
                    reply = None
                    trouble = error
                self.span.resume(between=False)
                await process.send(written(reply))
                continue
            self.found.rests = True
            if trouble is not None:
                raise trouble
            if kind == "refuses":
                raise refusal(*value)
            if kind == "failed":
                raise RuntimeError(f"planning failed in its process\n{value}")
            return Returned(value)
