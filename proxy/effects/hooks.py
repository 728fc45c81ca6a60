"""Four hooks for an operator's own code: turn start, tool result, overflow, turn end (requirement A0.132).

They are called in this order for each request, away from it: a request only puts what happened into a queue, and
one task per plugin calls the plugin. So no plugin can delay a request or fail it. One that is slow loses what comes
while its queue is full, one that raises is logged.
"""

import asyncio
import contextlib
import inspect
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from policies.messages import Transcript

log = logging.getLogger("weir.hooks")

SECONDS = 1.0
MAX_WAITING = 1_000
CALLBACKS = ("turn_start", "tool_result", "overflow", "turn_end")


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One request: ``conversation`` is its name, None while it is not recognised, ``tenant`` a hash, never a key."""

    request: str
    tenant: str
    model: str
    policy: str
    conversation: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NewResult:
    """A tool result that no earlier request of the conversation has sent; ``text`` is what the tool returned."""

    index: int
    call_id: str | None
    tokens: int
    ref: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Overflow:
    """A request that does not fit, by Weir's own count (``planned``) or by the upstream's word; tokens if known."""

    source: Literal["planned", "upstream"]
    tokens: int | None = None
    limit: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnEnd:
    """How a request ended: the client's status, the outcome's label, tokens as sent and forwarded, what was done."""

    status: int | None
    outcome: str
    tokens_before: int | None
    tokens_after: int | None
    zone: str
    actions: str


def new_results(transcript: Transcript, length: int) -> Iterator[NewResult]:
    """The tool results behind the first ``length`` messages after the head, in order."""
    for index in range(transcript.head + length, len(transcript.messages)):
        message = transcript.messages[index]
        if message.is_result:
            yield NewResult(
                index=index,
                call_id=message.answers,
                tokens=message.tokens,
                ref=message.ref,
                text=transcript.read(index).text,
            )


class Plugin(Protocol):
    """What an operator's object has to have; a subclass of this need only write the callbacks that it wants."""

    async def turn_start(self, turn: Turn) -> None:
        """A request came in."""

    async def tool_result(self, turn: Turn, result: NewResult) -> None:
        """A request brought a new tool result."""

    async def overflow(self, turn: Turn, overflow: Overflow) -> None:
        """A request does not fit."""

    async def turn_end(self, turn: Turn, end: TurnEnd) -> None:
        """The answer has ended, or the client has left."""


Call = tuple[str, Turn, tuple[NewResult | Overflow | TurnEnd, ...]]


class Hooks:
    """Calls plugins in the background; empty, and free, without any."""

    def __init__(self, plugins: Sequence[Plugin] = (), *, seconds: float = SECONDS, most: int = MAX_WAITING) -> None:
        """Raises TypeError for a plugin that lacks a callback, or has one that is no coroutine function."""
        for plugin in plugins:
            wrong = [name for name in CALLBACKS if not inspect.iscoroutinefunction(getattr(plugin, name, None))]
            if wrong:
                raise TypeError(f"the plugin {_named(plugin)} has no async {', '.join(wrong)}")
        self._seconds = seconds
        self._queues: list[tuple[Plugin, asyncio.Queue[Call]]] = [(p, asyncio.Queue(most)) for p in plugins]
        self._tasks: list[asyncio.Task[None]] = []

    def __bool__(self) -> bool:
        return bool(self._queues)

    def start(self) -> None:
        """Begin calling."""
        if not self._tasks:
            self._tasks = [asyncio.create_task(self._run(*each), name="weir-hooks") for each in self._queues]

    async def close(self) -> None:
        """Stop, having given every plugin its time for what still waits."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._seconds):
                await asyncio.gather(*(queue.join() for _, queue in self._queues))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []

    def turn_start(self, turn: Turn) -> None:
        """A request came in."""
        self._put("turn_start", turn)

    def tool_result(self, turn: Turn, result: NewResult) -> None:
        """A request brought a new tool result."""
        self._put("tool_result", turn, result)

    def overflow(self, turn: Turn, overflow: Overflow) -> None:
        """A request does not fit."""
        self._put("overflow", turn, overflow)

    def turn_end(self, turn: Turn, end: TurnEnd) -> None:
        """A request ended."""
        self._put("turn_end", turn, end)

    def _put(self, name: str, turn: Turn, *facts: NewResult | Overflow | TurnEnd) -> None:
        for plugin, queue in self._queues:
            try:
                queue.put_nowait((name, turn, facts))
            except asyncio.QueueFull:
                log.warning("the plugin %s is too slow: it misses a %s", _named(plugin), name, extra=_about(turn))

    async def _run(self, plugin: Plugin, queue: "asyncio.Queue[Call]") -> None:
        while True:
            name, turn, facts = await queue.get()
            try:
                async with asyncio.timeout(self._seconds):
                    await getattr(plugin, name)(turn, *facts)
            except TimeoutError:
                log.warning(
                    "the plugin %s took more than %g s for a %s",
                    _named(plugin),
                    self._seconds,
                    name,
                    extra=_about(turn),
                )
            except Exception:  # whatever a plugin raises is its own affair
                log.exception("the plugin %s failed in %s", _named(plugin), name, extra=_about(turn))
            finally:
                queue.task_done()


def _about(turn: Turn) -> dict[str, str | None]:
    """What the log says of the request beside the message."""
    return {"request": turn.request, "conversation": turn.conversation}


def _named(plugin: object) -> str:
    return type(plugin).__qualname__
