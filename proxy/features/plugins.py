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

log = logging.getLogger("weir.plugins")

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
        """The fields of a line in the log."""
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


class Hooks:
    def __init__(self, plugins: Sequence[Plugin] = (), *, most: int = MAX_WAITING) -> None:
        """Raises TypeError for a plugin that lacks a callback, or has one that is no coroutine
        function.
        """
        self.plugins = tuple(plugins)
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

    def tell(self, callback: Callback, turn: Turn, *facts: NewResult | Overflow | TurnEnd) -> None:
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
            except Exception:  # whatever a plugin raises is its own affair
                log.exception("the plugin %s failed in %s", name, callback, extra=turn.about)
            finally:
                queue.task_done()
