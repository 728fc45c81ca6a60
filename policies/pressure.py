"""A fold over a conversation's requests: how full the window is, how fast it fills, and what an
operator should learn.

Where none of that requires action, it also makes the decision on the request: it passes.

Growth is measured on what the client sent: what management took out was not growth, and what it
leaves in says nothing about how fast the window fills.

::

    growth     raw(n) - raw(n - 1), raw being the tokens as the client sent them
    velocity   mean of the newest 5 growths, tokens per request; the single one after two requests
    baseline   exponential mean (alpha 0.3) of all growths, the first one being its start
    spike      growth > 3 * the baseline before it; without a baseline there is none
    burn rate  mean growth of one bucket per request, over the newest 20 requests in which it did not shrink
    turns left (cap - used) / rate; under 3 is critical, under 10 a warning

The same array again is a retry and no growth. A shorter one, in messages or in tokens, was rewound:
it is the new start for the next growth, and the growths before it stay.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, NamedTuple

from policies.ledger import (
    MAX_TOKENS,
    REWRITTEN,
    Action,
    Burn,
    ConversationState,
    Decision,
    Event,
    Facts,
    PressureReading,
    Trend,
    VelocityClass,
    WindowPressure,
)
from policies.limits import BUCKETS, Limits, charged, ingest_cap_for, is_over, is_soft
from policies.messages import BUCKET_OF_ROLE, Transcript, protect, tokens_by_role
from policies.settings import CACHE_TTL, ContextSettings, Zones

LOW_BELOW = 750
HIGH_FROM = 4_000
"""Ours: the middles of the gaps between 200-500 (low), 1,000-3,000 (medium) and 5,000-20,000 (high)
tokens.
"""
SOFT = 0.80
MAX_NAMED = 5
VELOCITY_WINDOW = 5
SPIKE_MULTIPLIER = 3.0
EMA_ALPHA = 0.3
"""Weight of the newest growth in the baseline."""
BURN_WINDOW = 20
"""Newest growths in a bucket's burn rate."""
URGENT_TURNS = 3.0
WARNING_TURNS = 10.0
"""Requests left under a bucket's cap below which that is critical, and worth a warning."""
STATUS = "context.status"
STATUSES: Mapping[str, str] = MappingProxyType({"green": "healthy", "yellow": "preparing"})


Urgency = Literal["critical", "warning", "normal"]


def own_trend(trend: Trend, transcript: Transcript) -> Trend:
    """The trend that a request continues: from a run that begins alike, its growth, but not its
    starting point.
    """
    is_own = not trend.end or bytes.fromhex(trend.end) in transcript.chain
    return trend if is_own else trend._replace(raw=None, length=0, spike=False)


def advance(
    before: Trend, *, raw: int, length: int, buckets: Mapping[str, int] | None, zone: str, at: float
) -> Trend:
    """All counts are uncalibrated, or a new calibration would look like growth.

    Without ``buckets`` what was known of their growth is forgotten. ``zone`` is set later where it
    is not known yet.
    """
    raw = bounded(raw)
    length = bounded(length)
    if raw == before.raw and length == before.length:
        return Trend(
            raw,
            length,
            before.deltas,
            before.baseline,
            zone,
            at,
            before.burn if buckets is not None else (),
        )
    growth = (
        None
        if before.raw is None or raw < before.raw or length < before.length
        else raw - before.raw
    )
    burn = () if buckets is None else fold(before.burn, buckets, grew=growth is not None)
    if growth is None:
        return Trend(raw, length, before.deltas, before.baseline, zone, at, burn)
    known = before.baseline
    deltas = (*before.deltas, growth)[-VELOCITY_WINDOW:]
    baseline = growth if known is None else EMA_ALPHA * growth + (1 - EMA_ALPHA) * known
    spike = known is not None and growth > SPIKE_MULTIPLIER * known
    return Trend(raw, length, deltas, float(baseline), zone, at, burn, spike)


def fold(
    burns: tuple[Burn, ...], buckets: Mapping[str, int], *, grew: bool = True
) -> tuple[Burn, ...]:
    """The buckets after one more request, in the order in which they were first seen.

    There is no growth in the first request, in one that did not continue the last one (``grew``
    false), and in a bucket that shrank; a bucket that is missing has 0 tokens.
    """
    found = [_next(burn, bounded(buckets.get(burn.bucket, 0)), grew=grew) for burn in burns]
    known = {burn.bucket for burn in burns}
    if not buckets.keys() <= known:
        began = grew and bool(burns)
        found += [
            _next(Burn(n, 0), bounded(tokens), grew=began)
            for n, tokens in buckets.items()
            if n not in known
        ]
    return tuple(found)


def _next(burn: Burn, tokens: int, *, grew: bool) -> Burn:
    growth = tokens - burn.tokens
    deltas = (*burn.deltas[1 - BURN_WINDOW :], growth) if grew and growth >= 0 else burn.deltas
    return Burn(burn.bucket, tokens, deltas)


def zone_of(level: float, zones: Zones, *, fits: bool = True, rot_guard: bool = False) -> str:
    if not fits or level >= zones.critical_at:
        return "critical"
    if level >= zones.red_at:
        return "red"
    if level >= zones.orange_at:
        return "orange"
    return "yellow" if rot_guard or level >= zones.yellow_at else "green"


def reads_badly(tokens: int, soft: int | None) -> bool:
    """Whether there are more tokens than models read well, whatever their window."""
    return soft is not None and tokens > soft


def read_pressure(
    used: int,
    base: int,
    zones: Zones,
    *,
    fits: bool,
    soft: int | None = None,
    acted: bool = False,
    emergency: bool = False,
) -> WindowPressure:
    """How full a window is. ``fits``: the answer's reserve stays free; ``emergency``: a rung was
    needed.
    """
    level = used / base
    zone = zone_of(level, zones, fits=fits, rot_guard=reads_badly(used, soft))
    idle = "active" if acted else STATUSES.get(zone, "active")
    return WindowPressure(level=level, zone=zone, status="emergency" if emergency else idle)


def read_on(limits: Limits, trend: Trend, tokens: int) -> PressureReading:
    ratio = limits.budget.ratio
    used = bounded(tokens)
    speed = trend.velocity
    delta = trend.deltas[-1] if trend.deltas else None
    if ratio != 1.0 and speed is not None and delta is not None:
        speed = speed * ratio
        delta = round(delta * ratio)
    return PressureReading(
        current_tokens=tokens,
        max_tokens=limits.base,
        utilization_pct=round(100 * used / max(1, bounded(limits.base)), 1),
        zone=trend.zone,
        velocity_tokens_per_turn=_one_decimal(speed),
        turns_until_red=_one_decimal(turns_remaining(used, limits.red, speed)),
        source=limits.source,
        last_delta=delta,
        velocity_class=velocity_class(speed),
        spike=trend.spike,
        rot_guard=reads_badly(tokens, limits.settings.rot_soft_tokens),
    )


def velocity_class(speed: float | None) -> VelocityClass | None:
    if speed is None:
        return None
    if speed < LOW_BELOW:
        return "low"
    return "medium" if speed < HIGH_FROM else "high"


def turns_remaining(used: int, cap: int, rate: float | None) -> float | None:
    """Requests until ``cap`` at ``rate`` tokens per request: 0 when past it, None without
    growth.
    """
    if rate is None or rate <= 0:
        return None
    return max(0, bounded(cap) - bounded(used)) / rate


def should_preempt(reading: PressureReading, *, orange_at: float, fits: int) -> bool:
    """Whether growth spiked, the same again would reach orange, and once more would not fit: with
    less growth the layers act in time anyway.
    """
    if not reading.spike:
        return False
    now = bounded(reading.current_tokens)
    growth = bounded(reading.last_delta or 0)
    return (now + growth) / max(
        1, bounded(reading.max_tokens)
    ) >= orange_at and now + 2 * growth > fits


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketLine:
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
    buckets: tuple[BucketLine, ...]
    total_used: int
    total_utilization: float

    @property
    def critical(self) -> tuple[str, ...]:
        return tuple(line.bucket for line in self.buckets if line.urgency == "critical")


def urgency(turns: float | None) -> Urgency:
    if turns is None or turns >= WARNING_TURNS:
        return "normal"
    return "critical" if turns < URGENT_TURNS else "warning"


def bucket_report(
    used: Mapping[str, int],
    caps: Mapping[str, int],
    burns: tuple[Burn, ...],
    *,
    limit: int,
    soft: Mapping[str, float] = MappingProxyType({}),
    ratio: float = 1.0,
) -> BucketReport:
    """Every bucket against its cap, and all of them against ``limit``, what they share.

    ``soft`` has shares of the cap that warn, 0.80 where it names none. ``ratio`` makes the
    uncalibrated growth of ``burns`` what the upstream would report.
    """
    rates = {burn.bucket: rate * ratio for burn in burns if (rate := burn.rate) is not None}
    lines = []
    for name, tokens in used.items():
        cap = caps.get(name)
        turns = None if cap is None else turns_remaining(tokens, cap, rates.get(name))
        used_here = bounded(tokens)
        limit_here = None if cap is None else bounded(cap)
        share = None if limit_here is None else used_here / max(1, limit_here)
        lines.append(
            BucketLine(
                bucket=name,
                used=used_here,
                limit=limit_here,
                remaining=None if limit_here is None else max(0, limit_here - used_here),
                utilization=None if share is None else round(share, 2),
                soft_exceeded=share is not None and share >= soft.get(name, SOFT),
                hard_exceeded=limit_here is not None and used_here > limit_here,
                turns_remaining=_one_decimal(turns),
                urgency=urgency(turns),
            )
        )
    total = sum(line.used for line in lines)
    return BucketReport(
        buckets=tuple(lines),
        total_used=total,
        total_utilization=round(total / max(1, bounded(limit)), 2),
    )


class Growth(NamedTuple):
    """One request measured as it came: ``raw`` and ``buckets`` are calibrated, ``tokens`` and
    ``charged`` (by the bucket whose cap they count against) are not. ``cold``: the provider's cache
    has nothing left of the conversation.
    """

    tokens: int
    raw: int
    buckets: dict[str, int]
    charged: Mapping[str, int]
    before: Trend
    trend: Trend
    cold: bool = False


class PressureReport(NamedTuple):
    pressure: WindowPressure
    reading: PressureReading
    trend: Trend
    events: tuple[Event, ...]


def raw_buckets(transcript: Transcript) -> dict[str, int]:
    result = dict.fromkeys(BUCKETS, 0)
    result["tools"] = transcript.tools
    result["history"] = transcript.priming
    for role, tokens in (transcript.by_role or tokens_by_role(transcript.messages)).items():
        result[BUCKET_OF_ROLE.get(role, "history")] += tokens
    for index in transcript.memory:
        message = transcript.messages[index]
        result[message.bucket] -= message.tokens
        result["memory"] += message.tokens
    return result


def measure(transcript: Transcript, *, limits: Limits, trend: Trend, at: float | None) -> Growth:
    settings = limits.settings
    budget = limits.budget
    tokens = transcript.tokens
    uncalibrated = raw_buckets(transcript)
    calibrated = budget.estimate_each(uncalibrated)
    counted = charged(uncalibrated, settings.buckets) if settings.buckets else uncalibrated
    idle = None if at is None or trend.at is None else at - trend.at
    return Growth(
        tokens=tokens,
        raw=sum(calibrated.values()),
        buckets=calibrated,
        charged=counted,
        before=trend,
        trend=advance(
            trend,
            raw=tokens,
            length=len(transcript.messages),
            buckets=counted if budget.caps else None,
            zone=trend.zone,
            at=trend.at or 0.0 if at is None else at,
        )._replace(end=b"".join(transcript.chain[-1 - REWRITTEN : -REWRITTEN]).hex()),
        cold=idle is not None and idle > CACHE_TTL and settings.cold_at is not None,
    )


def is_urgent(grown: Growth, *, limits: Limits, tokens: int) -> bool:
    """Whether free layers should run before their trigger: growth spiked and would soon be too
    much, or a bucket that is enforced overflows within a few requests.

    Where buckets only warn, a full one is no reason to act: it may stay full as long as the whole
    has room.
    """
    if limits.settings.enforce == "bucket" and report_buckets(grown, limits=limits).critical:
        return True
    return should_preempt(
        read_on(limits, grown.trend, limits.budget.estimate(tokens)),
        orange_at=limits.zones.orange_at,
        fits=limits.budget.usable,
    )


def conclude(
    grown: Growth,
    *,
    limits: Limits,
    tokens: int,
    buckets: Mapping[str, int],
    acted: bool = False,
    emergency: bool = False,
) -> PressureReport:
    used = grown.raw if tokens == grown.tokens else limits.budget.estimate(tokens)
    fits = tokens <= limits.budget.soft_limit
    soft = limits.settings.rot_soft_tokens
    pressure = read_pressure(
        used, limits.base, limits.zones, fits=fits, soft=soft, acted=acted, emergency=emergency
    )
    trend = (
        grown.trend
        if grown.trend.zone == pressure.zone
        else grown.trend._replace(zone=pressure.zone)
    )
    reading = read_on(limits, trend, used)
    events: tuple[Event, ...] = ()
    calm = pressure.zone == "green" == grown.before.zone and not _is_worth_a_word(grown, limits)
    quiet = fits and calm and not (reading.rot_guard or reading.spike or limits.budget.caps)
    if not quiet:
        events = tuple(
            _events(grown, reading, limits=limits, tokens=tokens, buckets=buckets, acted=acted)
        )
    return PressureReport(pressure, reading, trend, events)


def _events(
    grown: Growth,
    reading: PressureReading,
    *,
    limits: Limits,
    tokens: int,
    buckets: Mapping[str, int],
    acted: bool,
) -> Iterator[Event]:
    settings = limits.settings
    budget = limits.budget
    used = reading.current_tokens
    zone = reading.zone
    if _is_worth_a_word(grown, limits):
        percent = round(100 * grown.raw / limits.base, 1)
        yield Event(
            STATUS, {"percent": percent, "used": grown.raw, "limit": limits.base, "tokens": used}
        )
    if zone != grown.before.zone or reading.spike:
        yield from changes(grown.before, reading, ratio=budget.ratio)
    if budget.caps:
        yield from _bucket_events(charged(buckets, settings.buckets), limits)
        yield from _burn_events(grown, limits=limits)
    share = buckets.get("tool_outputs", 0) / max(1, used)
    if share > limits.bloat and zone != "green":
        yield Event("tool_bloat", {"share": round(share, 2), "limit": round(limits.bloat, 2)})
    if reading.rot_guard and not acted:
        yield Event("rot_guard", {"tokens": used, "soft": settings.rot_soft_tokens or 0})
    if budget.soft_limit < tokens <= budget.hard_limit:
        yield Event("headroom_hit", {"used": used, "limit": budget.usable})


def changes(before: Trend, reading: PressureReading, *, ratio: float = 1.0) -> Iterator[Event]:
    if reading.zone != before.zone:
        yield Event("zone_change", {"old": before.zone, "new": reading.zone})
    if (
        reading.spike
        and reading.velocity_tokens_per_turn is not None
        and reading.last_delta is not None
    ):
        baseline = round((before.baseline or 0.0) * ratio, 1)
        facts: Facts = {"velocity": reading.velocity_tokens_per_turn, "baseline": baseline}
        yield Event("velocity_spike", {**facts, "last_delta": reading.last_delta})


def _is_worth_a_word(grown: Growth, limits: Limits) -> bool:
    return grown.raw >= limits.zones.yellow_at * limits.base


def report_buckets(grown: Growth, *, limits: Limits) -> BucketReport:
    settings = limits.settings
    budget = limits.budget
    return bucket_report(
        charged(grown.buckets, settings.buckets),
        budget.caps,
        grown.trend.burn,
        limit=budget.usable,
        soft={name: bucket.soft for name, bucket in settings.buckets.items()},
        ratio=budget.ratio,
    )


def _bucket_events(buckets: Mapping[str, int], limits: Limits) -> Iterator[Event]:
    budget = limits.budget
    settings = limits.settings
    for name, cap in budget.caps.items():
        used = buckets.get(name, 0)
        if is_over(name, used, budget):
            why: Facts = {"reason": "over its cap", "component": name}
            yield Event(
                "hard_violation", {**why, "current": used, "limit": cap, "excess": used - cap}
            )
        elif is_soft(name, used, settings.buckets, budget):
            yield Event(
                "soft_warning",
                {"component": name, "utilization_after": round(used / max(1, cap), 2)},
            )


def _burn_events(grown: Growth, *, limits: Limits) -> Iterator[Event]:
    for line in report_buckets(grown, limits=limits).buckets:
        if line.urgency != "normal" and line.turns_remaining is not None:
            facts: Facts = {"component": line.bucket, "urgency": line.urgency}
            yield Event("burn_rate", {**facts, "turns_remaining": line.turns_remaining})


def passed(
    transcript: Transcript, *, known: ConversationState, limits: Limits, trend: Trend, at: float
) -> Decision | None:
    """The decision on a request that was never edited and needs no edit; None where ``plan()`` has
    to look.

    What its client requests in addition is not examined.
    """
    settings = limits.settings
    if (
        known.triggered
        or known.resumed is not None
        or settings.memory
        or is_wanted(settings, known)
    ):
        return None
    grown = measure(transcript, limits=limits, trend=trend, at=at)
    return (
        pass_on(transcript, grown, limits=limits)
        if is_quiet(transcript, grown, limits=limits)
        else None
    )


def pass_on(transcript: Transcript, grown: Growth, *, limits: Limits) -> Decision:
    seen = conclude(grown, limits=limits, tokens=grown.tokens, buckets=grown.buckets)
    return Decision(
        action=Action.PASS,
        pieces=None,
        before=grown.raw,
        due=grown.raw,
        after=grown.raw,
        limit=limits.budget.usable,
        raw_after=grown.tokens,
        pressure=seen.pressure,
        buckets=grown.buckets,
        applied={},
        reading=seen.reading,
        trend=seen.trend,
        events=(
            (*seen.events, *candidates(seen, transcript, range(len(transcript.messages))))
            if seen.events
            else ()
        ),
    )


def candidates(
    seen: PressureReport, transcript: Transcript, stands: Iterable[int | None]
) -> Iterator[Event]:
    """What eviction would begin with among what ``stands`` as received, reported once when the zone
    changes (A0.10).
    """
    if not any(event.kind == "zone_change" for event in seen.events):
        return
    messages = transcript.messages
    guarded = protect(transcript).all
    found = [
        (i, messages[i])
        for i in stands
        if i is not None and messages[i].is_result and i not in guarded
    ]
    largest = sorted(found, key=lambda each: -each[1].tokens)[:MAX_NAMED]
    yield Event(
        "eviction_candidates",
        {
            "count": len(found),
            "tokens": sum(m.tokens for _, m in found),
            "largest": ", ".join(f"{i}: {m.ref} {m.tokens}" for i, m in largest),
        },
    )


def is_wanted(settings: ContextSettings, known: ConversationState) -> bool:
    if known.wanted is not None:
        return True
    return known.prepared is not None and any(
        layer.params.get("prepared") is True for layer in settings.layers
    )


def is_quiet(transcript: Transcript, grown: Growth, *, limits: Limits) -> bool:
    settings = limits.settings
    tokens = grown.tokens
    if limits.always or tokens > limits.trigger:
        return False
    if settings.preempt and is_urgent(grown, limits=limits, tokens=tokens):
        return False
    if settings.ingest.from_start:
        cap = ingest_cap_for(settings, limits.budget)
        if (
            any(m.is_result and m.tokens > cap for m in transcript.messages)
            or settings.ingest.is_particular
        ):
            return False
    capped = (*limits.scoped, *limits.refused)
    return not capped or all(grown.charged.get(name, 0) <= most for name, most in capped)


def bounded(tokens: int) -> int:
    return tokens if 0 <= tokens <= MAX_TOKENS else min(max(tokens, 0), MAX_TOKENS)


def _one_decimal(value: float | None) -> float | None:
    return None if value is None else round(value, 1)
