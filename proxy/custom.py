"""An operator's own code: a function that decides which messages stay, and plugins that are told what happens.

Each function's path has one process of its own, ended when its function does not come back in time: a thread could not
be ended. After a time-out or a crash the path is switched off, for 30 seconds first and up to ten minutes. The function
is called as ``function(messages, budget)``: messages are copies in OpenAI's form, each with ``"weir": {"index",
"tokens", "protected"}``; ``budget`` has ``max_tokens`` for all of them, their ``tokens`` now, and the number of
``messages``. It gives back some of them, in their order, with another text where it likes.

A plugin's four hooks are called in the order of ``CALLBACKS`` for each request, away from it (requirement A0.132): a
request only fills a queue, and one task per plugin empties it. One that is slow loses what comes while its queue is
full, one that raises is logged.
"""

import asyncio
import contextlib
import inspect
import json
import logging
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol, get_args

import msgspec

from policies.effects import Failed, Kept, Reply, Trim, Trimmed
from policies.messages import Transcript
from proxy.child import SHAPE, ChildProcess, python

log = logging.getLogger("weir.custom")

START_PATIENCE = 10.0
SWITCHED_OFF_FIRST = 30.0
MAX_SWITCHED_OFF = 600.0
MAX_ANSWER = 64 * 1024 * 1024
MARK = "weir"
HERE = ("",)  # modules are looked for in the working directory, too: an operator's may lie beside the config

_BEGIN = "from proxy import child as p; "
_WORK = _BEGIN + "p.work(sys.argv[2])"
_CHECK = _BEGIN + "e = p.problem_with(sys.argv[2]); sys.stdout.flush(); sys.stderr.write(chr(0) + (e or '') + chr(0))"


def check_custom(path: str, *, patience: float = START_PATIENCE) -> str | None:
    """What is wrong with the import path of a function, None if it can be called with messages and a budget.

    It is imported in a process of its own, so that what its module does at import cannot harm this one.
    """
    if path.count(":") != 1:
        return f"{path}: {SHAPE}"
    command = python(_CHECK, path, path=HERE)
    try:
        done = subprocess.run(command, capture_output=True, timeout=patience, check=False)  # noqa: S603 - own code
    except subprocess.TimeoutExpired:
        return f"{path}: its module is not imported within {patience:g} seconds"
    parts = done.stderr.decode("utf-8", "replace").split("\0")
    if len(parts) < 3:
        return f"{path}: importing its module ended the process with status {done.returncode}"
    return f"{path}: {parts[-2]}" if parts[-2] else None


class CustomFunctions:
    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._workers: dict[str, _Worker] = {}

    async def trim(self, effect: Trim, messages: Sequence[Mapping[str, Any]]) -> Reply:
        given = _given(effect, messages)
        budget = {"max_tokens": effect.max_tokens, "tokens": sum(effect.tokens), "messages": len(given)}
        worker = self._workers.get(effect.path)
        if worker is None:
            worker = self._workers[effect.path] = _Worker(effect.path, self._clock)
        answer = await worker.ask({"messages": given, "budget": budget}, effect.seconds)
        if isinstance(answer, _Fault):
            log.warning("custom function %s: %s", effect.path, answer.text)
            return Failed(answer.code)
        try:
            return Trimmed(_selection(answer, given, effect.indices))
        except ValueError as error:
            log.warning("custom function %s: what it gave back is rejected: %s", effect.path, error)
            return Failed("rejected")

    async def close(self) -> None:
        workers, self._workers = self._workers, {}
        for worker in workers.values():
            await worker.end()


class _Fault(msgspec.Struct, frozen=True):
    code: str
    detail: str = ""

    @property
    def text(self) -> str:
        return f"{self.code}: {self.detail}" if self.detail else self.code


_OFF = _Fault("switched_off", "it failed a moment ago")


class _Worker:
    def __init__(self, path: str, clock: Callable[[], float]) -> None:
        self._path = path
        self._clock = clock
        self._lock = asyncio.Lock()
        self._process: ChildProcess | None = None
        self._off_until = 0.0
        self._troubles = 0

    async def ask(self, question: dict[str, Any], seconds: float) -> "list[Any] | _Fault":
        """Waits as long as the limit for other requests' questions, too."""
        if self._is_off():
            return _OFF
        try:
            async with asyncio.timeout(seconds):
                await self._lock.acquire()
        except TimeoutError:
            return _Fault("busy", "other requests wait for it")
        try:
            return _OFF if self._is_off() else await self._ask(question, seconds)
        except asyncio.CancelledError:
            await self.end()  # its answer would be taken for that of the next question
            raise
        finally:
            self._lock.release()

    def _is_off(self) -> bool:
        return self._clock() < self._off_until

    async def end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            await process.end()

    async def _ask(self, question: dict[str, Any], seconds: float) -> "list[Any] | _Fault":
        try:
            async with asyncio.timeout(START_PATIENCE):
                fault = await self._start()
            if fault is not None:
                return await self._switch_off(fault)
            body = await asyncio.to_thread(lambda: json.dumps(question).encode())
            async with asyncio.timeout(seconds):
                answer = await self._asked(body)
        except TimeoutError:
            why = f"no answer within {seconds:g} seconds; switched off for a while"
            return await self._switch_off(_Fault("timeout", why))
        except (OSError, asyncio.IncompleteReadError, ValueError) as error:
            return await self._switch_off(_Fault("crashed", type(error).__name__))
        if "failed" in answer:
            return _Fault(str(answer["failed"]), str(answer.get("detail", "")))
        self._troubles = 0
        found = answer.get("messages")
        return found if isinstance(found, list) else _Fault("rejected", "what it gave back is no list")

    async def _start(self) -> _Fault | None:
        if self._process is not None and self._process.is_running:
            return None
        self._process = await ChildProcess.start(python(_WORK, self._path, path=HERE))
        first = await self._asked()
        return None if first.get("ready") else _Fault(str(first.get("failed")), str(first.get("detail", "")))

    async def _asked(self, *frames: bytes) -> dict[str, Any]:
        process = self._process
        assert process is not None  # noqa: S101 - started by the caller
        if frames:
            await process.send(*frames)
        answer = await asyncio.to_thread(json.loads, await process.receive(limit=MAX_ANSWER))
        if not isinstance(answer, dict):
            raise ValueError("the answer is no object")  # noqa: TRY004 - not a wrong type in a call
        return answer

    async def _switch_off(self, fault: _Fault) -> _Fault:
        await self.end()
        pause = min(MAX_SWITCHED_OFF, SWITCHED_OFF_FIRST * 2**self._troubles)
        self._troubles = min(self._troubles + 1, 16)
        self._off_until = self._clock() + pause
        return fault


def _given(effect: Trim, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    columns = zip(effect.indices, messages, effect.texts, effect.tokens, effect.protected, strict=True)
    return [
        {
            **message,
            **({} if text is None else {"content": text}),
            MARK: {"index": index, "tokens": tokens, "protected": protected},
        }
        for index, message, text, tokens, protected in columns
    ]


def _selection(returned: list[Any], given: Sequence[dict[str, Any]], indices: Sequence[int]) -> tuple[Kept, ...]:
    """Raises ValueError for anything but some of the messages in their order."""
    places = {index: place for place, index in enumerate(indices)}
    kept: list[Kept] = []
    after = 0
    for number, message in enumerate(returned):
        if not isinstance(message, dict):
            raise ValueError(f"item {number} is no message")  # noqa: TRY004 - one kind of refusal for all
        place = _place(message, given, places, after)
        if place is None:
            raise ValueError(f"item {number} was not given, or not at that place")
        after = place + 1
        content, before = message.get("content"), given[place].get("content")
        if _rest(message) != _rest(given[place]):
            raise ValueError(f"item {number} has more changed than its content")
        if content != before and not isinstance(content, str):
            raise ValueError(f"item {number} has a content that is no string")
        kept.append(Kept(indices[place], content if content != before else None))
    if _is_paired(given) and not _is_paired(returned):
        raise ValueError("a tool call and its result were parted")
    return tuple(kept)


def _place(message: dict[str, Any], given: Sequence[dict[str, Any]], places: dict[int, int], after: int) -> int | None:
    mark = message.get(MARK)
    if isinstance(mark, dict) and isinstance(mark.get("index"), int):
        place = places.get(mark["index"])
        return place if place is not None and place >= after else None
    own = {k: v for k, v in message.items() if k != MARK}
    return next((p for p in range(after, len(given)) if {**given[p], MARK: None} == {**own, MARK: None}), None)


def _rest(message: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in message.items() if k not in (MARK, "content")}


def _is_paired(messages: Sequence[dict[str, Any]]) -> bool:
    waiting: list[str] = []
    for message in messages:
        if message.get("role") in ("tool", "function"):
            answers = message.get("tool_call_id")
            if answers in waiting:
                waiting.remove(answers)
            elif answers is None and waiting:
                waiting.pop(0)
            else:
                return False
            continue
        if waiting:
            return False
        calls = message.get("tool_calls")
        waiting = [str(c.get("id", "")) for c in calls if isinstance(c, dict)] if isinstance(calls, list) else []
        if isinstance(message.get("function_call"), dict):
            waiting.append("")
    return True


hooks_logger = logging.getLogger("weir.hooks")

SECONDS = 1.0
MAX_WAITING = 1_000
Callback = Literal["turn_start", "tool_result", "overflow", "turn_end"]
CALLBACKS: tuple[Callback, ...] = get_args(Callback)


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    request: str
    tenant: str
    model: str
    policy: str
    conversation: str | None = None

    @property
    def about(self) -> dict[str, str | None]:
        return {"request": self.request, "conversation": self.conversation}


class NewResult(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    call_id: str | None
    tokens: int
    ref: str
    text: str


class Overflow(msgspec.Struct, frozen=True, kw_only=True):
    source: Literal["planned", "upstream"]
    tokens: int | None = None
    limit: int | None = None


class TurnEnd(msgspec.Struct, frozen=True, kw_only=True):
    status: int | None
    outcome: str
    tokens_before: int | None
    tokens_after: int | None
    zone: str
    actions: str


def new_results(transcript: Transcript, length: int) -> Iterator[NewResult]:
    for index in range(transcript.head + length, len(transcript.messages)):
        message = transcript.messages[index]
        if message.is_result:
            text = transcript.read(index).text
            yield NewResult(index=index, call_id=message.answers, tokens=message.tokens, ref=message.ref, text=text)


class Plugin(Protocol):
    async def turn_start(self, turn: Turn) -> None: ...

    async def tool_result(self, turn: Turn, result: NewResult) -> None: ...

    async def overflow(self, turn: Turn, overflow: Overflow) -> None: ...

    async def turn_end(self, turn: Turn, end: TurnEnd) -> None: ...


Call = tuple[Callback, Turn, tuple[NewResult | Overflow | TurnEnd, ...]]


class Hooks:
    def __init__(self, plugins: Sequence[Plugin] = (), *, seconds: float = SECONDS, most: int = MAX_WAITING) -> None:
        """Raises TypeError for a plugin that lacks a callback, or has one that is no coroutine function."""
        for plugin in plugins:
            wrong = [name for name in CALLBACKS if not inspect.iscoroutinefunction(getattr(plugin, name, None))]
            if wrong:
                raise TypeError(f"the plugin {_named(plugin)} has no async {', '.join(wrong)}")
        self._seconds = seconds
        self.plugins = tuple(plugins)
        self._queues: list[tuple[Plugin, asyncio.Queue[Call]]] = [(p, asyncio.Queue(most)) for p in plugins]
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        if not self._tasks:
            self._tasks = [asyncio.create_task(self._run(*each), name="weir-hooks") for each in self._queues]

    async def close(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._seconds):
                await asyncio.gather(*(queue.join() for _, queue in self._queues))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []

    def tell(self, name: Callback, turn: Turn, *facts: NewResult | Overflow | TurnEnd) -> None:
        for plugin, queue in self._queues:
            try:
                queue.put_nowait((name, turn, facts))
            except asyncio.QueueFull:
                hooks_logger.warning(
                    "the plugin %s is too slow: it misses a %s", _named(plugin), name, extra=turn.about
                )

    async def _run(self, plugin: Plugin, queue: "asyncio.Queue[Call]") -> None:
        while True:
            name, turn, facts = await queue.get()
            try:
                async with asyncio.timeout(self._seconds):
                    await getattr(plugin, name)(turn, *facts)
            except TimeoutError:
                text = "the plugin %s took more than %g s for a %s"
                hooks_logger.warning(text, _named(plugin), self._seconds, name, extra=turn.about)
            except Exception:  # whatever a plugin raises is its own affair
                hooks_logger.exception("the plugin %s failed in %s", _named(plugin), name, extra=turn.about)
            finally:
                queue.task_done()


def _named(plugin: object) -> str:
    return type(plugin).__qualname__
