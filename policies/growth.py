"""What a request says about its conversation before anything is decided, and what is reported afterwards.

Growth is measured on what the client sent: what management took out was not growth, and what it leaves in
says nothing about how fast the window fills.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from policies.buckets import charged, is_over, is_soft, raw_buckets
from policies.budget import Budget
from policies.messages import Transcript
from policies.pressure import Pressure, read_pressure
from policies.settings import ContextSettings
from policies.trend import PressureReading, Trend

UNKNOWN = Trend()
"""The trend of a conversation of which nothing is known."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something that an operator may want to hear of; ``facts`` are plain values for a log line or a span."""

    kind: str
    facts: Mapping[str, str | int | float | bool] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """One request measured as it came: calibrated tokens, in all and by bucket.

    ``charged`` are uncalibrated tokens by the bucket whose cap they count against; ``preempt`` says that free
    layers should run before their trigger, ``cold`` that the provider's cache has nothing left of the conversation.
    """

    raw: int
    buckets: dict[str, int]
    charged: Mapping[str, int]
    before: Trend
    trend: Trend
    preempt: bool = False
    cold: bool = False


@dataclass(frozen=True, slots=True)
class Seen:
    """What is reported of a request when it is decided."""

    pressure: Pressure
    reading: PressureReading | None
    trend: Trend
    events: tuple[Event, ...]


def measure(
    transcript: Transcript, *, settings: ContextSettings, budget: Budget, trend: Trend, at: float | None
) -> Growth:
    """The growth that a request shows; ``at`` is its time in seconds."""
    uncalibrated = raw_buckets(transcript)
    buckets = budget.estimate_each(uncalibrated)
    raw = budget.estimate(transcript.tokens)
    idle = None if at is None or trend.at is None else at - trend.at
    return Growth(
        raw=raw,
        buckets=buckets,
        charged=charged(uncalibrated, settings.buckets),
        before=trend,
        trend=trend,
        cold=idle is not None and idle > settings.cache_ttl and settings.cold_at is not None,
    )


def conclude(
    grown: Growth,
    *,
    settings: ContextSettings,
    budget: Budget,
    used: int,
    buckets: Mapping[str, int],
    fits: bool,
    hard_fits: bool,
    acted: bool,
    emergency: bool,
) -> Seen:
    """What is reported of a request that is forwarded with ``used`` calibrated tokens."""
    base = budget.base(settings)
    pressure = read_pressure(used, base, settings.zones, fits=fits, acted=acted, emergency=emergency)
    events = (*_bucket_events(charged(buckets, settings.buckets), settings, budget),)
    if hard_fits and not fits:
        events = (*events, Event("headroom_hit", {"used": used, "limit": budget.usable}))
    return Seen(pressure, None, grown.trend, events)


def _bucket_events(buckets: Mapping[str, int], settings: ContextSettings, budget: Budget) -> Iterator[Event]:
    """A warning for each bucket at its soft limit, a violation for each above its cap (requirements A0.87)."""
    for name, used in buckets.items():
        cap = budget.caps.get(name)
        if cap is None or settings.buckets[name].on_overflow == "track":
            continue
        if is_over(name, used, budget):
            facts: dict[str, str | int | float | bool] = {"reason": "over its cap", "component": name}
            facts |= {"current": used, "limit": cap, "excess": used - cap}
            yield Event("hard_violation", facts)
        elif is_soft(name, used, settings.buckets, budget):
            yield Event("soft_warning", {"component": name, "utilization_after": round(used / max(1, cap), 2)})
