"""Running a flow: what the pure half asks for is done here, and the reply is sent back in."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from threading import Lock
from typing import Generic, TypeVar

from policies import Done, Effect, Failed, Flow, Offload, Reply, Summarize, Summary
from policies.effects import Answers, Compare, Embed, Together, Trim
from policies.text.segments import Readings, TextReading
from proxy.effects.likeness import by_shingles


class SharedReadings(Readings):
    """Readings that any thread may use; what is read is read outside the lock."""

    def __init__(self, *, most: int = 30_000) -> None:
        super().__init__(most=most)
        self._lock = Lock()

    def find(self, key: bytes) -> TextReading | None:
        """What is kept under a key."""
        with self._lock:
            return super().find(key)

    def keep(self, key: bytes, made: TextReading) -> None:
        """Keep what was read."""
        with self._lock:
            super().keep(key, made)


T = TypeVar("T")
Ask = Callable[[Effect], Awaitable[Reply]]


class EffectHandler(ABC):
    """Answers what a flow asks for, by the kind of question; what nobody here does is done."""

    async def __call__(self, effect: Effect) -> Reply:
        """The reply to one effect."""
        if isinstance(effect, Summarize):
            return await self.summarize(effect)
        if isinstance(effect, Together):
            return Answers(tuple(await asyncio.gather(*map(self.summarize, effect.effects))))
        if isinstance(effect, Compare):
            return await self.compare(effect)
        if isinstance(effect, Embed):
            return await self.embed(effect)
        if isinstance(effect, Trim):
            return await self.trim(effect)
        return Done()

    @abstractmethod
    async def summarize(self, effect: Summarize) -> Summary | Failed:
        """What a model writes."""

    async def compare(self, effect: Compare) -> Reply:
        """How alike texts are."""
        return await asyncio.to_thread(by_shingles, effect)

    async def embed(self, effect: Embed) -> Reply:
        """The vectors of texts."""
        del effect
        return Done()

    async def trim(self, effect: Trim) -> Reply:
        """What an operator's function leaves of messages."""
        del effect
        return Failed("replay")


@dataclass(frozen=True, slots=True)
class Returned(Generic[T]):
    """A flow came to its end with this value."""

    value: T


def step(flow: Flow[T], reply: Reply | None = None) -> Effect | Returned[T]:
    """What a flow asks next, or what it returned; without a reply the flow is started."""
    try:
        return next(flow) if reply is None else flow.send(reply)
    except StopIteration as end:  # must not leave a thread or a coroutine as it is
        return Returned(end.value)


async def drive(flow: Flow[T], now: Effect | Returned[T], ask: Ask) -> T:
    """The result of a started flow, of which ``now`` is what its first step gave.

    From the first :class:`Offload` on its steps run on a worker thread, so that the event loop never waits for
    a long history.
    """
    off_loop = False
    while not isinstance(now, Returned):
        if isinstance(now, Offload):
            off_loop, reply = True, Done()
            now = await asyncio.to_thread(step, flow, reply)
        elif off_loop:
            now = await asyncio.to_thread(step, flow, await ask(now))
        else:
            now = step(flow, await ask(now))
    return now.value
