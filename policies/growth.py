"""What a request says about its conversation before anything is decided, and what is reported afterwards.

Growth is measured on what the client sent: what management took out was not growth, and what it leaves in
says nothing about how fast the window fills.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from policies.buckets import bloat_limit, charged, is_over, is_soft, raw_buckets
from policies.budget import Budget
from policies.burn import BucketReport, bucket_report
from policies.messages import Transcript
from policies.pressure import Pressure, read_pressure
from policies.settings import ContextSettings, Zones
from policies.trend import PressureEvent, PressureReading, Trend, read_trend, scaled_zones, should_preempt
from policies.trend import events as changes

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

    ``charged`` are uncalibrated tokens by the bucket whose cap they count against; ``cold`` says that the provider's
    cache has nothing left of the conversation.
    """

    raw: int
    buckets: dict[str, int]
    charged: Mapping[str, int]
    before: Trend
    trend: Trend
    cold: bool = False


@dataclass(frozen=True, slots=True)
class Seen:
    """What is reported of a request when it is decided."""

    pressure: Pressure
    reading: PressureReading
    trend: Trend
    events: tuple[Event, ...]


def measure(
    transcript: Transcript, *, settings: ContextSettings, budget: Budget, trend: Trend, at: float | None
) -> Growth:
    """The growth that a request shows; ``at`` is its time in seconds."""
    uncalibrated = raw_buckets(transcript)
    counted = charged(uncalibrated, settings.buckets)
    idle = None if at is None or trend.at is None else at - trend.at
    return Growth(
        raw=budget.estimate(transcript.tokens),
        buckets=budget.estimate_each(uncalibrated),
        charged=counted,
        before=trend,
        trend=trend.advance(
            raw=transcript.tokens,
            length=len(transcript.messages),
            buckets=counted,
            zone=trend.zone,
            at=trend.at or 0.0 if at is None else at,
            rules=settings.trend,
        ),
        cold=idle is not None and idle > settings.cache_ttl and settings.cold_at is not None,
    )


def is_urgent(grown: Growth, *, settings: ContextSettings, budget: Budget, tokens: int) -> bool:
    """Whether free layers should run before their trigger on a request of so many uncalibrated tokens.

    That is if growth spiked and as much again would reach orange, or if a bucket overflows within a few requests.
    """
    if not settings.preempt:
        return False
    zones = zones_for(settings, budget.window)
    base = budget.base(settings)
    reading = _read(grown.trend, settings=settings, budget=budget, tokens=budget.estimate(tokens), red_at=zones.red_at)
    return should_preempt(
        reading,
        base=base,
        orange_at=zones.orange_at,
        critical_bucket_urgency=bool(report_buckets(grown, settings=settings, budget=budget).critical),
    )


def conclude(
    grown: Growth,
    *,
    settings: ContextSettings,
    budget: Budget,
    tokens: int,
    buckets: Mapping[str, int],
    acted: bool = False,
    emergency: bool = False,
) -> Seen:
    """What is reported of a request forwarded with so many uncalibrated ``tokens``; ``buckets`` are calibrated."""
    zones, base, used = zones_for(settings, budget.window), budget.base(settings), budget.estimate(tokens)
    fits = budget.fits(tokens)
    pressure = read_pressure(used, base, zones, fits=fits, acted=acted, emergency=emergency)
    trend = grown.trend.in_zone(pressure.zone)
    reading = _read(trend, settings=settings, budget=budget, tokens=used, red_at=zones.red_at)
    events = [
        *(Event(e.kind, _facts(e)) for e in changes(grown.before, reading, ratio=budget.ratio)),
        *_bucket_events(charged(buckets, settings.buckets), settings, budget),
        *_burn_events(grown, settings=settings, budget=budget),
    ]
    share = buckets.get("tool_outputs", 0) / max(1, used)
    if share > bloat_limit(budget) and reading.zone != "green":
        events.append(Event("tool_bloat", {"share": round(share, 2), "limit": round(bloat_limit(budget), 2)}))
    if reading.rot_guard and not acted:
        events.append(Event("rot_guard", {"tokens": used, "soft": settings.rot_soft_tokens or 0}))
    if not fits and budget.hard_fits(tokens):
        events.append(Event("headroom_hit", {"used": used, "limit": budget.usable}))
    return Seen(replace(pressure, zone=reading.zone), reading, grown.trend.in_zone(reading.zone), tuple(events))


def zones_for(settings: ContextSettings, window: int) -> Zones:
    """The starts of the zones in a window: the policy's, or others in a small or large one where it says so."""
    starts = scaled_zones(window) if settings.auto_scale else None
    if starts is None:
        return settings.zones
    yellow, orange, red, critical = starts
    return Zones(yellow_at=yellow, orange_at=orange, red_at=red, critical_at=critical)


def report_buckets(grown: Growth, *, settings: ContextSettings, budget: Budget) -> BucketReport:
    """Every bucket of a request as it came, against its cap, and how long it will last."""
    used = charged(grown.buckets, settings.buckets)
    return bucket_report(
        used,
        budget.caps,
        grown.trend.burn,
        limit=budget.usable,
        soft={name: bucket.soft for name, bucket in settings.buckets.items()},
        ratio=budget.ratio,
        urgent_turns=settings.trend.urgent_turns,
        warning_turns=settings.trend.warning_turns,
    )


def _read(trend: Trend, *, settings: ContextSettings, budget: Budget, tokens: int, red_at: float) -> PressureReading:
    return read_trend(
        trend,
        tokens=tokens,
        base=budget.base(settings),
        red_at=red_at,
        source="model_reported" if budget.reported else "client_estimated",
        rot_soft_tokens=settings.rot_soft_tokens,
        ratio=budget.ratio,
    )


def _facts(change: PressureEvent) -> dict[str, str | int | float | bool]:
    named = ("old", "new", "velocity", "baseline", "last_delta")
    return {name: value for name in named if (value := getattr(change, name)) is not None}


def _bucket_events(buckets: Mapping[str, int], settings: ContextSettings, budget: Budget) -> Iterator[Event]:
    """A warning for each bucket at its soft limit, a violation for each above its cap (requirements A0.87)."""
    for name, cap in budget.caps.items():
        used = buckets.get(name, 0)
        if is_over(name, used, budget):
            facts: dict[str, str | int | float | bool] = {"reason": "over its cap", "component": name}
            yield Event("hard_violation", facts | {"current": used, "limit": cap, "excess": used - cap})
        elif is_soft(name, used, settings.buckets, budget):
            yield Event("soft_warning", {"component": name, "utilization_after": round(used / max(1, cap), 2)})


def _burn_events(grown: Growth, *, settings: ContextSettings, budget: Budget) -> Iterator[Event]:
    """One event for each bucket that will overflow within a few requests (requirements A0.90)."""
    if not budget.caps:
        return
    for line in report_buckets(grown, settings=settings, budget=budget).buckets:
        if line.urgency != "normal" and line.turns_remaining is not None:
            facts: dict[str, str | int | float | bool] = {"component": line.bucket, "urgency": line.urgency}
            yield Event("burn_rate", facts | {"turns_remaining": line.turns_remaining})
