"""Running a flow: what the pure half asks for is done here, and the reply is sent back in."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from policies import Done, Effect, Failed, Flow, Offload, Reply, Summarize, Summary
from policies.effects import Answers, Compare, Together, Trim

T = TypeVar("T")
Ask = Callable[[Effect], Awaitable[Reply]]


@dataclass(frozen=True, slots=True)
class Performer:
    """Does what a flow asks for: one function for each kind of question."""

    summarize: Callable[[Summarize], Awaitable[Reply]]
    compare: Callable[[Compare], Awaitable[Reply]]
    trim: Callable[[Trim], Awaitable[Reply]]

    async def __call__(self, effect: Effect) -> Reply:
        """The reply to one effect."""
        if isinstance(effect, Summarize):
            return await self.summarize(effect)
        if isinstance(effect, Together):
            return Answers(tuple(await asyncio.gather(*map(self._ask, effect.effects))))
        if isinstance(effect, Compare):
            return await self.compare(effect)
        if isinstance(effect, Trim):
            return await self.trim(effect)
        return Done()

    async def _ask(self, effect: Summarize) -> Summary | Failed:
        reply = await self.summarize(effect)
        return reply if isinstance(reply, Summary | Failed) else Failed("no_reply")


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


async def drive(flow: Flow[T], asked: Effect, ask: Ask) -> T:
    """The result of a started flow that asked for ``asked``.

    From the first :class:`Offload` on its steps run on a worker thread, so that the event loop never waits for
    a long history.
    """
    off_loop = False
    now: Effect | Returned[T] = asked
    while not isinstance(now, Returned):
        if isinstance(now, Offload):
            off_loop, reply = True, Done()
            now = await asyncio.to_thread(step, flow, reply)
        elif off_loop:
            now = await asyncio.to_thread(step, flow, await ask(now))
        else:
            now = step(flow, await ask(now))
    return now.value
