"""How many requests of a key are inside at once, with how many bytes, and how often an address may guess at keys."""

import asyncio
import math
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from ipaddress import IPv6Address, ip_address
from typing import Self

from proxy.access.destination import Caller
from proxy.config.values import LimitSettings
from proxy.errors import Busy, ProxyError, RateLimited

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


MAX_WRONG = 10
MINUTE = 60.0
FORGET = 600.0
MIN_SECONDS, MAX_SECONDS = 2.0, 300.0
MAX_ADDRESSES = 4_096
SITE = 64  # bits of an IPv6 address: what lies behind them is one customer's
REASONS = (("missing",), ("unknown",), ("held_off",))


@dataclass(slots=True)
class _Guesser:
    """An address that has sent wrong keys: how many since when, and until when it is held off."""

    since: float
    last: float
    wrong: int = 0
    seconds: float = 0.0
    until: float = 0.0


@dataclass(slots=True)
class Guesses:
    """Wrong keys by address. Only a wrong key is ever refused: others may be behind the same address."""

    clock: Callable[[], float] = time.monotonic
    counted: dict[tuple[str, ...], float] = field(default_factory=lambda: dict.fromkeys(REASONS, 0.0))
    _guessers: OrderedDict[str, _Guesser] = field(default_factory=OrderedDict)

    def read(self) -> Mapping[tuple[str, ...], float]:
        """How many requests had no right key, by reason."""
        return dict(self.counted)

    def answer(self, address: str, error: ProxyError, *, guessed: bool) -> ProxyError:
        """What to answer to a request without a right key: the error, or RateLimited after too many guesses."""
        if not guessed:
            self.counted["missing",] += 1
            return error
        held_off = self._held_off(_site(address))
        if not held_off:
            self.counted["unknown",] += 1
            return error
        self.counted["held_off",] += 1
        text = f"Too many wrong API keys came from this address, and this one is wrong too. Try again in {held_off} s."
        return RateLimited(text, retry_after=held_off)

    def _held_off(self, site: str) -> int:
        """Seconds to wait for who has sent one more wrong key, twice as long each time; 0 for the first few."""
        now = self.clock()
        guesser = self._guessers.pop(site, None)
        if guesser is None or now - guesser.last > FORGET:
            guesser = _Guesser(since=now, last=now)
        self._guessers[site] = guesser
        if len(self._guessers) > MAX_ADDRESSES:
            self._guessers.popitem(last=False)
        guesser.last = now
        if now >= guesser.until:
            if not guesser.seconds and now - guesser.since > MINUTE:
                guesser.since, guesser.wrong = now, 0
            guesser.wrong += 1
            if guesser.wrong <= MAX_WRONG:
                return 0
            guesser.seconds = min(MAX_SECONDS, max(MIN_SECONDS, 2 * guesser.seconds))
            guesser.until = now + guesser.seconds
        return math.ceil(guesser.until - now)


def _site(address: str) -> str:
    try:
        parsed = ip_address(address)
    except ValueError:
        return address
    if not isinstance(parsed, IPv6Address):
        return address
    # A socket that listens on :: has IPv4 clients too.
    return str(parsed.ipv4_mapped) if parsed.ipv4_mapped else str(int(parsed) >> (128 - SITE))
