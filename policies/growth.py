"""What a request says about its conversation before anything is decided, and what is reported afterwards.

Growth is measured on what the client sent: what management took out was not growth, and what it leaves in
says nothing about how fast the window fills.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from policies.buckets import bloat_limit, calibrated, charged, is_over, is_soft, raw_buckets, refuses
from policies.budget import Budget
from policies.burn import BucketReport, bucket_report
from policies.messages import Transcript
from policies.pressure import Pressure, read_pressure
from policies.settings import ContextSettings, Zones
from policies.trend import (
    PressureEvent,
    PressureReading,
    Scale,
    Trend,
    lift,
    read_on,
    scaled_zones,
    should_preempt,
    tokens_at,
)
from policies.trend import events as changes
from policies.triggers import first_trigger, layers_of, limit_for

STATUS = "context.status"
UNKNOWN = Trend()
"""The trend of a conversation of which nothing is known."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something that an operator may want to hear of; ``facts`` are plain values for a log line or a span."""

    kind: str
    facts: Mapping[str, str | int | float | bool] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a policy says in one budget, the same for every request: worked out once, by :func:`limits_for`.

    Attributes:
        scale: what tokens are held against; ``zones`` start at shares of its base.
        usable: W - R - H in tokens.
        trigger: the most uncalibrated tokens of a whole request at which no layer is due, ``fits`` those that leave
            reserve and headroom free.
        scoped: the same as the trigger for each layer about one bucket, as (bucket, tokens).
        refused: the caps of buckets above which a request is refused, as (bucket, tokens).
        bloat: the share of a request that tool results may take.
    """

    settings: ContextSettings
    budget: Budget
    zones: Zones
    scale: Scale
    usable: int
    trigger: int
    fits: int
    scoped: tuple[tuple[str, int], ...]
    refused: tuple[tuple[str, int], ...]
    bloat: float

    def has_room(self, buckets: Mapping[str, int]) -> bool:
        """Whether no bucket of so many uncalibrated tokens makes a layer due or the request refused."""
        for name, most in self.scoped:
            if buckets.get(name, 0) > most:
                return False
        return not any(buckets.get(name, 0) > cap for name, cap in self.refused)


def limits_for(settings: ContextSettings, budget: Budget) -> Limits:
    """The limits of every request that has this policy and this budget."""
    scoped = ((layer.scope, limit_for(layer, settings, budget)) for layer in layers_of(settings))
    zones, base = zones_for(settings, budget.window), budget.base(settings)
    return Limits(
        settings=settings,
        budget=budget,
        zones=zones,
        scale=Scale(
            base=base,
            red=tokens_at(base, zones.red_at),
            source="model_reported" if budget.reported else "client_estimated",
            rot_soft_tokens=settings.rot_soft_tokens,
            ratio=budget.ratio,
        ),
        usable=budget.usable,
        trigger=first_trigger(settings, budget),
        fits=budget.soft_limit,
        scoped=tuple((name, most) for name, most in scoped if name != "total"),
        refused=tuple((name, cap) for name, cap in budget.caps.items() if refuses(settings, name)),
        bloat=bloat_limit(budget, settings.health.tool_bloat),
    )


class Growth(NamedTuple):
    """One request measured as it came: calibrated tokens, in all and by bucket.

    ``tokens`` are uncalibrated, ``charged`` too, by the bucket whose cap they count against; ``cold`` says that the
    provider's cache has nothing left of the conversation.
    """

    tokens: int
    raw: int
    buckets: dict[str, int]
    charged: Mapping[str, int]
    before: Trend
    trend: Trend
    cold: bool = False


class Seen(NamedTuple):
    """What is reported of a request when it is decided."""

    pressure: Pressure
    reading: PressureReading
    trend: Trend
    events: tuple[Event, ...]


def measure(transcript: Transcript, *, limits: Limits, trend: Trend, at: float | None) -> Growth:
    """The growth that a request shows; ``at`` is its time in seconds."""
    settings, budget, tokens = limits.settings, limits.budget, transcript.tokens
    uncalibrated = raw_buckets(transcript)
    counted = charged(uncalibrated, settings.buckets)
    idle = None if at is None or trend.at is None else at - trend.at
    return Growth(
        tokens=tokens,
        raw=budget.estimate(tokens),
        buckets=calibrated(uncalibrated, budget),
        charged=counted,
        before=trend,
        trend=trend.advance(
            raw=tokens,
            length=len(transcript.messages),
            buckets=counted if budget.caps else None,
            zone=trend.zone,
            at=trend.at or 0.0 if at is None else at,
            rules=settings.trend,
        ),
        cold=idle is not None and idle > settings.cache_ttl and settings.cold_at is not None,
    )


def is_urgent(grown: Growth, *, limits: Limits, tokens: int) -> bool:
    """Whether free layers should run before their trigger on a request of so many uncalibrated tokens.

    That is if growth spiked and would soon be too much, or if a bucket overflows within a few requests. Where buckets
    only warn a full one is no reason to act: its share is full for as long as the whole has room.
    """
    if not limits.settings.preempt:
        return False
    if limits.settings.enforce == "bucket" and report_buckets(grown, limits=limits).critical:
        return True
    return should_preempt(
        read_on(limits.scale, grown.trend, limits.budget.estimate(tokens)),
        base=limits.scale.base,
        orange_at=limits.zones.orange_at,
        fits=limits.usable,
    )


def conclude(
    grown: Growth,
    *,
    limits: Limits,
    tokens: int,
    buckets: Mapping[str, int],
    acted: bool = False,
    emergency: bool = False,
) -> Seen:
    """What is reported of a request forwarded with so many uncalibrated ``tokens``; ``buckets`` are calibrated."""
    used = grown.raw if tokens == grown.tokens else limits.budget.estimate(tokens)
    fits = tokens <= limits.fits
    pressure = read_pressure(used, limits.scale.base, limits.zones, fits=fits, acted=acted, emergency=emergency)
    zone, rot_guard = lift(pressure.zone, used, limits.settings.rot_soft_tokens)
    if zone != pressure.zone:
        status = "preparing" if pressure.status == "healthy" else pressure.status
        pressure = Pressure(level=pressure.level, zone=zone, status=status)
    trend = grown.trend.in_zone(zone)
    reading = read_on(limits.scale, trend, used)
    events: tuple[Event, ...] = ()
    calm = zone == "green" == grown.before.zone and not _is_worth_a_word(grown, limits)
    quiet = fits and calm and not (rot_guard or reading.spike or limits.budget.caps)
    if not quiet:
        events = tuple(_events(grown, reading, limits=limits, tokens=tokens, buckets=buckets, acted=acted))
    return Seen(pressure, reading, trend, events)


def _events(
    grown: Growth, reading: PressureReading, *, limits: Limits, tokens: int, buckets: Mapping[str, int], acted: bool
) -> Iterator[Event]:
    """What an operator may want to hear of: changes, full buckets, too much of one thing."""
    settings, budget, used, zone = limits.settings, limits.budget, reading.current_tokens, reading.zone
    if _is_worth_a_word(grown, limits):
        percent = round(100 * grown.raw / limits.scale.base, 1)
        yield Event(STATUS, {"percent": percent, "used": grown.raw, "limit": limits.scale.base, "tokens": used})
    if zone != grown.before.zone or reading.spike:
        yield from (Event(e.kind, _facts(e)) for e in changes(grown.before, reading, ratio=budget.ratio))
    if budget.caps:
        yield from _bucket_events(charged(buckets, settings.buckets), settings, budget)
        yield from _burn_events(grown, limits=limits)
    share = buckets.get("tool_outputs", 0) / max(1, used)
    if share > limits.bloat and zone != "green":
        yield Event("tool_bloat", {"share": round(share, 2), "limit": round(limits.bloat, 2)})
    if reading.rot_guard and not acted:
        yield Event("rot_guard", {"tokens": used, "soft": settings.rot_soft_tokens or 0})
    if tokens > limits.fits and budget.hard_fits(tokens):
        yield Event("headroom_hit", {"used": used, "limit": limits.usable})


def _is_worth_a_word(grown: Growth, limits: Limits) -> bool:
    """Whether a request came with so much that its status is told, whatever is done about it (requirement A1.12)."""
    return grown.raw >= limits.zones.yellow_at * limits.scale.base


def zones_for(settings: ContextSettings, window: int) -> Zones:
    """The starts of the zones in a window: the policy's, or others in a small or large one where it says so."""
    starts = scaled_zones(window) if settings.auto_scale else None
    if starts is None:
        return settings.zones
    yellow, orange, red, critical = starts
    return Zones(yellow_at=yellow, orange_at=orange, red_at=red, critical_at=critical)


def report_buckets(grown: Growth, *, limits: Limits) -> BucketReport:
    """Every bucket of a request as it came, against its cap, and how long it will last."""
    settings, budget = limits.settings, limits.budget
    return bucket_report(
        charged(grown.buckets, settings.buckets),
        budget.caps,
        grown.trend.burn,
        limit=budget.usable,
        soft={name: bucket.soft for name, bucket in settings.buckets.items()},
        ratio=budget.ratio,
        urgent_turns=settings.trend.urgent_turns,
        warning_turns=settings.trend.warning_turns,
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


def _burn_events(grown: Growth, *, limits: Limits) -> Iterator[Event]:
    """One event for each bucket that will overflow within a few requests (requirements A0.90)."""
    for line in report_buckets(grown, limits=limits).buckets:
        if line.urgency != "normal" and line.turns_remaining is not None:
            facts: dict[str, str | int | float | bool] = {"component": line.bucket, "urgency": line.urgency}
            yield Event("burn_rate", facts | {"turns_remaining": line.turns_remaining})
