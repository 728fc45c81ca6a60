"""An operator's plugins: four callbacks that a request calls, as entry points ``weir.hooks``.

They are called in the order of ``CALLBACKS`` for each request, away from it (requirement A0.132): a
request only fills a queue, and one task per plugin empties it. One that is slow loses what comes
while its queue is full, one that raises is logged.
"""

import asyncio
import contextlib
import inspect
import logging
from collections.abc import Iterator, Sequence
from typing import Literal, Protocol, get_args

import msgspec

from policies.messages import Transcript
from proxy.features.feature import Feature, Overflow, Turn, TurnEnd
from proxy.planning.values import Plan

log = logging.getLogger("weir.plugins")

SECONDS = 1.0
MAX_WAITING = 1_000
Callback = Literal["turn_start", "tool_result", "overflow", "turn_end"]
CALLBACKS: tuple[Callback, ...] = get_args(Callback)


class NewResult(msgspec.Struct, frozen=True, kw_only=True):
    """A tool result that no earlier request of the conversation had; ``index`` is its message."""

    index: int
    call_id: str | None
    tokens: int
    ref: str
    text: str


def new_results(transcript: Transcript, length: int) -> Iterator[NewResult]:
    for index in range(transcript.head + length, len(transcript.messages)):
        message = transcript.messages[index]
        if message.is_result:
            text = transcript.read(index).text
            yield NewResult(
                index=index,
                call_id=message.answers,
                tokens=message.tokens,
                ref=message.ref,
                text=text,
            )


class Plugin(Protocol):
    async def turn_start(self, turn: Turn) -> None: ...

    async def tool_result(self, turn: Turn, result: NewResult) -> None: ...

    async def overflow(self, turn: Turn, overflow: Overflow) -> None: ...

    async def turn_end(self, turn: Turn, end: TurnEnd) -> None: ...


Call = tuple[Callback, Turn, tuple[NewResult | Overflow | TurnEnd, ...]]


class Plugins(Feature):
    def __init__(self, plugins: Sequence[Plugin] = (), *, most: int = MAX_WAITING) -> None:
        """Raises TypeError for a plugin that lacks a callback, or has one that is no coroutine
        function.
        """
        self._queues: list[tuple[str, Plugin, asyncio.Queue[Call]]] = []
        self._tasks: list[asyncio.Task[None]] = []
        for plugin in plugins:
            name = type(plugin).__qualname__
            self._queues.append((name, plugin, asyncio.Queue(most)))
            wrong = [
                each
                for each in CALLBACKS
                if not inspect.iscoroutinefunction(getattr(plugin, each, None))
            ]
            if wrong:
                raise TypeError(f"the plugin {name} has no async {', '.join(wrong)}")

    def start(self) -> None:
        self._tasks = [
            asyncio.create_task(self._run(*each), name="weir-hooks") for each in self._queues
        ]

    async def close(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SECONDS):
                await asyncio.gather(*(queue.join() for _, _, queue in self._queues))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def on_read(self, turn: Turn) -> None:
        self._emit("turn_start", turn)

    def on_planned(self, turn: Turn, plan: Plan) -> None:
        recognized = plan.recognized
        if recognized is not None:
            for result in new_results(recognized.transcript, recognized.length):
                self._emit("tool_result", turn, result)

    def on_overflow(self, turn: Turn, overflow: Overflow) -> None:
        self._emit("overflow", turn, overflow)

    def on_answered(self, turn: Turn, end: TurnEnd) -> None:
        self._emit("turn_end", turn, end)

    def _emit(self, callback: Callback, turn: Turn, *facts: NewResult | Overflow | TurnEnd) -> None:
        for name, _, queue in self._queues:
            try:
                queue.put_nowait((callback, turn, facts))
            except asyncio.QueueFull:
                log.warning(
                    "the plugin %s is too slow: it misses a %s", name, callback, extra=turn.about
                )

    async def _run(self, name: str, plugin: Plugin, queue: "asyncio.Queue[Call]") -> None:
        while True:
            callback, turn, facts = await queue.get()
            try:
                async with asyncio.timeout(SECONDS):
                    await getattr(plugin, callback)(turn, *facts)
            except TimeoutError:
                log.warning(
                    "the plugin %s took more than %g s for a %s",
                    name,
                    SECONDS,
                    callback,
                    extra=turn.about,
                )
            except Exception:  # a failing plugin affects nothing else
                log.exception("the plugin %s failed in %s", name, callback, extra=turn.about)
            finally:
                queue.task_done()
