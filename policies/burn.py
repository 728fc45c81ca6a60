"""How fast each bucket fills, how many requests are left under its cap, and the report that says so.

::

    rate            = mean growth of the bucket per request, over the newest 20 requests in which it did not shrink
    turns_remaining = (cap - used) / rate
    urgency         = critical under 3, warning under 10, else normal

What is counted is growth: a bucket that shrank (the client left something out) gives no sample, one that stayed
gives 0. ``used`` is recomputed from the array of every request, so what was removed is released at once.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from policies.errors import PolicyError

MOST_TOKENS = 1_000_000_000
"""Counts are taken as 0 to this: far above any window, and small enough for exact arithmetic."""

SOFT = 0.80
URGENT_TURNS, WARNING_TURNS = 3.0, 10.0

Urgency = Literal["critical", "warning", "normal"]


@dataclass(frozen=True, slots=True)
class Burn:
    """One bucket after a request: its tokens, and its growth in the newest requests, oldest first."""

    bucket: str
    tokens: int
    deltas: tuple[int, ...] = ()

    @property
    def rate(self) -> float | None:
        """Mean growth in tokens per request; None before the second request."""
        return sum(self.deltas) / len(self.deltas) if self.deltas else None


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketLine:
    """One bucket in the report.

    ``limit`` and what follows from it are None where the bucket has no cap. ``utilization`` is a share with two
    decimals, ``turns_remaining`` has one; the flags and ``urgency`` are taken before rounding.
    """

    bucket: str
    used: int
    limit: int | None
    remaining: int | None
    utilization: float | None
    soft_exceeded: bool
    hard_exceeded: bool
    turns_remaining: float | None
    urgency: Urgency


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketReport:
    """Every bucket against its cap, and all of them together against the limit of the whole, in tokens."""

    buckets: tuple[BucketLine, ...]
    total_used: int
    total_utilization: float
    burn_rate_tokens_per_turn: float | None
    turns_until_exhausted: float | None

    @property
    def critical(self) -> tuple[str, ...]:
        """Names of the buckets that overflow within three requests at their rate."""
        return tuple(line.bucket for line in self.buckets if line.urgency == "critical")


def bounded(tokens: int) -> int:
    """``tokens`` as a count that arithmetic is safe with: at least 0, at most :data:`MOST_TOKENS`."""
    if 0 <= tokens <= MOST_TOKENS:
        return tokens
    return 0 if tokens < 0 else MOST_TOKENS


def fold(burns: tuple[Burn, ...], buckets: Mapping[str, int], *, window: int, grew: bool = True) -> tuple[Burn, ...]:
    """The buckets after one more request, in the order in which they were first seen.

    A bucket that is missing has 0 tokens. The first request gives no growth; nor does one that did not continue
    the last one (``grew`` false), of which only the tokens are taken. The oldest of more than ``window`` deltas
    goes first.
    """
    newest = max(1, window)
    found = [_next(burn, bounded(buckets.get(burn.bucket, 0)), newest if grew else 0) for burn in burns]
    known = {burn.bucket for burn in burns}
    if not buckets.keys() <= known:
        began = newest if grew and burns else 0
        found += [_next(Burn(n, 0), bounded(tokens), began) for n, tokens in buckets.items() if n not in known]
    return tuple(found)


def _next(burn: Burn, tokens: int, newest: int) -> Burn:
    growth, deltas = tokens - burn.tokens, burn.deltas
    if newest and growth >= 0:
        deltas = (*deltas[1 - newest :], growth) if newest > 1 else (growth,)
    return Burn(burn.bucket, tokens, deltas)


def turns_remaining(used: int, cap: int, rate: float | None) -> float | None:
    """Requests until ``cap`` tokens are used at ``rate`` tokens per request: 0 when past it, None without growth."""
    if rate is None or rate <= 0:
        return None
    return max(0, bounded(cap) - bounded(used)) / rate


def urgency(turns: float | None, *, urgent: float = URGENT_TURNS, warning: float = WARNING_TURNS) -> Urgency:
    """What ``turns`` remaining requests call for: ``critical`` under ``urgent``, ``warning`` under ``warning``."""
    if turns is None or turns >= warning:
        return "normal"
    return "critical" if turns < urgent else "warning"


def bucket_report(
    used: Mapping[str, int],
    caps: Mapping[str, int],
    burns: tuple[Burn, ...],
    *,
    limit: int,
    soft: Mapping[str, float] | None = None,
    ratio: float = 1.0,
    urgent_turns: float = URGENT_TURNS,
    warning_turns: float = WARNING_TURNS,
) -> BucketReport:
    """The report about ``used`` tokens by bucket under ``caps``, in the order of ``used``.

    ``limit`` is what all of them share, tokens. ``soft`` has shares of the cap that warn, 0.80 where it names
    none. ``ratio`` makes the uncalibrated growth of ``burns`` what the upstream would report. Raises PolicyError
    for a cap on a bucket that is not in ``used``.
    """
    for name in caps:
        if name not in used:
            raise PolicyError(f"there is no bucket {name!r} to put a cap on; there are {', '.join(used)}")
    rates = {burn.bucket: rate * ratio for burn in burns if (rate := burn.rate) is not None}
    lines = []
    for name, tokens in used.items():
        cap, turns = caps.get(name), None
        if cap is not None:
            turns = turns_remaining(tokens, cap, rates.get(name))
        level = urgency(turns, urgent=urgent_turns, warning=warning_turns)
        share = SOFT if soft is None else soft.get(name, SOFT)
        lines.append(_line(name, bounded(tokens), cap, soft=share, turns=turns, level=level))
    total = sum(line.used for line in lines)
    rate = sum(rates.values()) if rates else None
    return BucketReport(
        buckets=tuple(lines),
        total_used=total,
        total_utilization=round(total / max(1, bounded(limit)), 2),
        burn_rate_tokens_per_turn=one_decimal(rate),
        turns_until_exhausted=one_decimal(turns_remaining(total, limit, rate)),
    )


def _line(name: str, used: int, cap: int | None, *, soft: float, turns: float | None, level: Urgency) -> BucketLine:
    limit = None if cap is None else bounded(cap)
    share = None if limit is None else used / max(1, limit)
    return BucketLine(
        bucket=name,
        used=used,
        limit=limit,
        remaining=None if limit is None else max(0, limit - used),
        utilization=None if share is None else round(share, 2),
        soft_exceeded=share is not None and share >= soft,
        hard_exceeded=limit is not None and used > limit,
        turns_remaining=one_decimal(turns),
        urgency=level,
    )


def one_decimal(value: float | None) -> float | None:
    """``value`` with one decimal, None for None."""
    return None if value is None else round(value, 1)
