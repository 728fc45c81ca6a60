"""How many requests of one key are inside at once, and how many bytes of their bodies; of one process."""

import asyncio
import math
from collections import deque
from dataclasses import dataclass
from typing import Self

from proxy.access.caller import Caller
from proxy.config.values import LimitSettings
from proxy.errors import Busy, RateLimited

PATIENCE = 5.0  # seconds that a body waits for others to go


class Admission:
    """Requests and bytes of bodies that are inside, by tenant."""

    def __init__(self, limits: LimitSettings) -> None:
        self._most = limits.concurrency_per_key or max(1, limits.concurrency // 2)
        self._bytes = limits.bytes_in_flight
        self._bytes_of_one = limits.bytes_in_flight_per_key or max(1, limits.bytes_in_flight // 2)
        self._inside: dict[str, _Inside] = {}
        self._held = 0
        self._waiting: deque[tuple[Stay, int, asyncio.Future[None]]] = deque()

    def enter(self, caller: Caller) -> "Stay":
        """A request of this caller's is inside until its stay is over. Raises RateLimited for one too many."""
        inside = self._inside.setdefault(caller.tenant, _Inside())
        if inside.requests >= self._most:
            text = f"This key has {inside.requests} requests open, as many as it may have (limits.concurrency_per_key)."
            raise RateLimited(f"{text} Please try again.")
        inside.requests += 1
        return Stay(self, caller.tenant, inside)

    def leave(self, stay: "Stay") -> None:
        """The stay is over: what it held is free, and who waits for that goes on."""
        stay.inside.requests -= 1
        stay.inside.held -= stay.held
        self._held -= stay.held
        stay.held = 0
        if not stay.inside.requests:
            self._inside.pop(stay.tenant, None)
        for waiting in tuple(self._waiting):
            other, size, turn = waiting
            if not turn.done() and self.take(other, size):
                turn.set_result(None)

    def take(self, stay: "Stay", size: int) -> bool:
        """Count the bytes if there is room for them; what is alone always has room, it has limits of its own."""
        inside = stay.inside
        if inside.held + size > self._bytes_of_one and inside.held > stay.held:
            return False
        if self._held + size > self._bytes and self._held > stay.held:
            return False
        stay.held += size
        inside.held += size
        self._held += size
        return True

    async def wait(self, stay: "Stay", size: int) -> None:
        """Wait a moment for room, and count the bytes then."""
        waiting = (stay, size, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        try:
            await asyncio.wait_for(waiting[2], PATIENCE)
        except TimeoutError:
            retry = math.ceil(PATIENCE)
            if stay.inside.held + size > self._bytes_of_one:
                text = f"The requests of this key that are being answered hold {stay.inside.held} bytes, and this one "
                text += f"has {size} more (limits.bytes_in_flight_per_key is {self._bytes_of_one}). Please try again."
                raise RateLimited(text, retry_after=retry) from None
            raise Busy("Weir holds as many requests as it can. Please try again.", retry_after=retry) from None
        finally:
            self._waiting.remove(waiting)


@dataclass(slots=True)
class _Inside:
    """What one tenant has inside: requests, and bytes of their bodies."""

    requests: int = 0
    held: int = 0


@dataclass(slots=True, eq=False)
class Stay:
    """One request that is inside; a context manager, at whose end it has left."""

    admission: Admission
    tenant: str
    inside: _Inside
    held: int = 0

    async def hold(self, size: int) -> None:
        """Count so many more bytes of the body; waits a moment for room. Raises RateLimited, Busy for all keys'."""
        if not self.admission.take(self, size):
            await self.admission.wait(self, size)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.admission.leave(self)
