"""How often an address may guess at keys."""

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from ipaddress import IPv6Address, ip_address

from proxy.errors import ProxyError, RateLimited

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
