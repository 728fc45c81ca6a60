"""How a conversation's growth is folded into what its pressure says.

A :class:`Trend` is one conversation after its last request. It grows with every request by :meth:`Trend.advance`,
is stored as JSON, and is all that the reading needs from the past.

::

    growth    raw(n) - raw(n - 1), raw being the tokens as the client sent them: what Weir removed never counts
    velocity  mean of the newest 5 growths, tokens per request; the single one after two requests
    baseline  exponential mean (alpha 0.3) of all growths, the first one being its start
    spike     growth > 3 * the baseline before it; without a baseline there is none

The same array again is a retry and no growth. An array that is shorter, in messages or in tokens, was rewound:
it is the new start for the next growth, and the growths before it stay.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from policies.burn import MOST_TOKENS, Burn, bounded, fold, one_decimal, turns_remaining

ROT_SOFT_TOKENS = 64_000
"""Where accuracy begins to fall even in windows of 128,000 tokens and more: the requirement's number."""

LOW_BELOW, HIGH_FROM = 750, 4_000
"""Ours: the middles of the gaps between 200-500 (low), 1,000-3,000 (medium) and 5,000-20,000 (high) tokens."""

SMALL_WINDOW, LARGE_WINDOW = 32_768, 200_000
SMALL_ZONES = (0.40, 0.65, 0.85, 0.92)
LARGE_ZONES = (0.60, 0.80, 0.90, 0.95)
"""Ours: starts of yellow, orange, red and critical in windows up to the small one, and from the large one on."""

_VERSION = 1
_ENCODER = json.JSONEncoder(separators=(",", ":"))

Source = Literal["model_reported", "client_estimated"]
VelocityClass = Literal["low", "medium", "high"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrendRules:
    """What a policy says about growth.

    Attributes:
        window: newest growths in the velocity's mean.
        spike_multiplier: a growth above so many times the baseline is a spike.
        ema_alpha: weight of the newest growth in the baseline.
        burn_window: newest growths by bucket in the mean of its burn rate.
        urgent_turns: requests left under a bucket's cap below which it is critical, and ``warning_turns`` below
            which it warns.
    """

    window: int = 5
    spike_multiplier: float = 3.0
    ema_alpha: float = 0.3
    burn_window: int = 20
    urgent_turns: float = 3.0
    warning_turns: float = 10.0


@dataclass(frozen=True, slots=True)
class Trend:
    """One conversation after its last request; without arguments, one before its first.

    Attributes:
        raw: tokens of the array as the client sent it, None before the first request.
        length: messages in it.
        deltas: newest growths in tokens, oldest first.
        baseline: exponential mean of all growths, None before the second request.
        zone: the zone that was read.
        at: when, in seconds of the caller's clock.
        burn: tokens and growths by bucket.
        spike: whether the last request grew by far more than the baseline before it.
    """

    raw: int | None = None
    length: int = 0
    deltas: tuple[int, ...] = ()
    baseline: float | None = None
    zone: str = "green"
    at: float | None = None
    burn: tuple[Burn, ...] = ()
    spike: bool = False

    def advance(
        self, *, raw: int, length: int, buckets: Mapping[str, int] | None, zone: str, at: float, rules: TrendRules
    ) -> "Trend":
        """The trend after a request of ``raw`` tokens in ``length`` messages, as the client sent it.

        ``buckets`` are tokens by bucket of the same array, None where nobody asks how fast they fill: then what was
        known of that is forgotten. All counts are uncalibrated, or a new calibration would look like growth.
        ``zone`` is the one that is reported, lifted by :func:`lift`; where it is not known yet, :meth:`in_zone` sets
        it later.
        """
        raw, length = bounded(raw), bounded(length)
        if raw == self.raw and length == self.length:
            return Trend(raw, length, self.deltas, self.baseline, zone, at, self.burn if buckets is not None else ())
        if self.raw is None or raw < self.raw or length < self.length:
            burn = () if buckets is None else fold(self.burn, buckets, window=rules.burn_window, grew=False)
            return Trend(raw, length, self.deltas, self.baseline, zone, at, burn)
        growth, before = raw - self.raw, self.baseline
        deltas = (*self.deltas, growth)[-max(1, rules.window) :]
        baseline = growth if before is None else rules.ema_alpha * growth + (1 - rules.ema_alpha) * before
        burn = () if buckets is None else fold(self.burn, buckets, window=rules.burn_window)
        spike = before is not None and growth > rules.spike_multiplier * before
        return Trend(raw, length, deltas, float(baseline), zone, at, burn, spike)

    def in_zone(self, zone: str) -> "Trend":
        """The same trend with the zone that was read once the request was managed."""
        if zone == self.zone:
            return self
        return Trend(self.raw, self.length, self.deltas, self.baseline, zone, self.at, self.burn, self.spike)

    def to_json(self) -> str:
        """The trend as one line of ASCII JSON, about 1 KB once twenty growths of six buckets are known."""
        state = {
            "v": _VERSION,
            "raw": self.raw,
            "length": self.length,
            "deltas": self.deltas,
            "baseline": self.baseline,
            "zone": self.zone,
            "at": self.at,
            "burn": {burn.bucket: [burn.tokens, *burn.deltas] for burn in self.burn},
            "spike": self.spike,
        }
        return _ENCODER.encode(state)

    @classmethod
    def from_json(cls, text: str | None) -> "Trend":
        """The trend that :meth:`to_json` wrote; a fresh one for any other text."""
        try:
            state = json.loads(text or "")
            if state["v"] != _VERSION:
                return cls()
            raw, length = state["raw"], state["length"]
            _counts((length,) if raw is None else (raw, length))
            return cls(
                raw=raw,
                length=length,
                deltas=_counts(state["deltas"]),
                baseline=_finite(state["baseline"]),
                zone=_text(state["zone"]),
                at=_finite(state["at"]),
                burn=tuple(_burn(name, values) for name, values in state["burn"].items()),
                spike=state["spike"] is True,
            )
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
            return cls()


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """What a policy holds tokens against, the same for every request in one budget.

    ``base`` is the denominator of pressure and ``red`` where its red zone begins, both in calibrated tokens; ``source``
    is whose count they are compared with. ``rot_soft_tokens`` is what models read reliably, None for no such guard.
    ``ratio`` makes uncalibrated growth what the upstream would report.
    """

    base: int
    red: int
    source: Source = "client_estimated"
    rot_soft_tokens: int | None = ROT_SOFT_TOKENS
    ratio: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PressureReading:
    """What one request's pressure says.

    Attributes:
        current_tokens: tokens of the forwarded request.
        max_tokens: the policy's base.
        utilization_pct: the first over the second in percent, one decimal.
        zone: green, yellow, orange, red or critical, lifted by the rot guard.
        velocity_tokens_per_turn: mean growth per request, one decimal; None on the first.
        turns_until_red: requests until red at that velocity, one decimal; None where nothing grows, 0 past it.
        source: whose count ``current_tokens`` is.
        last_delta: tokens of the newest growth.
        velocity_class: low, medium or high.
        spike: whether this request grew by far more than usual.
        rot_guard: whether the tokens are above what models read reliably.
    """

    current_tokens: int
    max_tokens: int
    utilization_pct: float
    zone: str
    velocity_tokens_per_turn: float | None
    turns_until_red: float | None
    source: Source
    last_delta: int | None
    velocity_class: VelocityClass | None
    spike: bool
    rot_guard: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PressureEvent:
    """A transition: ``zone_change`` has old and new, ``velocity_spike`` velocity, baseline and last_delta."""

    kind: Literal["zone_change", "velocity_spike"]
    old: str | None = None
    new: str | None = None
    velocity: float | None = None
    baseline: float | None = None
    last_delta: int | None = None


def read_trend(
    trend: Trend,
    *,
    tokens: int,
    base: int,
    red_at: float,
    source: Source = "client_estimated",
    rot_soft_tokens: int | None = ROT_SOFT_TOKENS,
    ratio: float = 1.0,
) -> PressureReading:
    """What ``tokens`` of ``base`` say in a conversation of this trend, its zone lifted by the rot guard.

    ``tokens`` and ``base`` are calibrated; ``ratio`` is what makes the trend's uncalibrated growth the same.
    """
    red = tokens_at(base, red_at)
    scale = Scale(base=base, red=red, source=source, rot_soft_tokens=rot_soft_tokens, ratio=ratio)
    return read_on(scale, trend, tokens)


def read_on(scale: Scale, trend: Trend, tokens: int) -> PressureReading:
    """The same on a scale that was made before."""
    zone, rot_guard = lift(trend.zone, tokens, scale.rot_soft_tokens)
    speed, delta = velocity(trend), last_delta(trend)
    if scale.ratio != 1.0 and speed is not None and delta is not None:
        speed, delta = speed * scale.ratio, round(delta * scale.ratio)
    return PressureReading(
        current_tokens=tokens,
        max_tokens=scale.base,
        utilization_pct=_percentage(tokens, scale.base),
        zone=zone,
        velocity_tokens_per_turn=one_decimal(speed),
        turns_until_red=one_decimal(turns_until_red(tokens, speed, scale.red)),
        source=scale.source,
        last_delta=delta,
        velocity_class=velocity_class(speed),
        spike=trend.spike,
        rot_guard=rot_guard,
    )


def velocity(trend: Trend) -> float | None:
    """Mean of the newest growths, tokens per request; None before the second request."""
    return sum(trend.deltas) / len(trend.deltas) if trend.deltas else None


def last_delta(trend: Trend) -> int | None:
    """The newest growth in tokens; None before the second request."""
    return trend.deltas[-1] if trend.deltas else None


def is_spike(trend: Trend) -> bool:
    """Whether the last request grew by more than the policy's multiple of the baseline before it."""
    return trend.spike


def velocity_class(speed: float | None) -> VelocityClass | None:
    """The class of a velocity: low under 750 tokens per request, high from 4,000 on; None for None."""
    if speed is None:
        return None
    if speed < LOW_BELOW:
        return "low"
    return "medium" if speed < HIGH_FROM else "high"


def turns_until_red(tokens: int, speed: float | None, red_tokens: int) -> float | None:
    """Requests until ``red_tokens`` at ``speed``: (red - tokens) / speed, 0 when past; None if nothing grows."""
    return turns_remaining(tokens, red_tokens, speed)


def tokens_at(base: int, share: float) -> int:
    """The tokens at a share of ``base``, rounded down as if shares were exact decimals: 142,800 is .85 of 168,000."""
    return math.floor(round(bounded(base) * share, 6))


def lift(zone: str, tokens: int, soft: int | None = ROT_SOFT_TOKENS) -> tuple[str, bool]:
    """The zone, at least yellow above ``soft`` tokens, and whether they are above it; None for no such guard."""
    rot_guard = soft is not None and tokens > soft
    return ("yellow" if rot_guard and zone == "green" else zone), rot_guard


def scaled_zones(window: int) -> tuple[float, float, float, float] | None:
    """Starts of yellow, orange, red and critical in a small or in a large window; None for the policy's own."""
    if window <= SMALL_WINDOW:
        return SMALL_ZONES
    return LARGE_ZONES if window >= LARGE_WINDOW else None


def percent(tokens: int, base: int) -> str:
    """``tokens`` of ``base`` as people read it, e.g. ``88.0%``."""
    return f"{_percentage(tokens, base):.1f}%"


def events(before: Trend, reading: PressureReading, *, ratio: float = 1.0) -> tuple[PressureEvent, ...]:
    """What changed since the trend before this request: at most one change of zone and one spike.

    ``ratio`` is the reading's.
    """
    found: list[PressureEvent] = []
    if reading.zone != before.zone:
        found.append(PressureEvent(kind="zone_change", old=before.zone, new=reading.zone))
    if reading.spike:
        found.append(
            PressureEvent(
                kind="velocity_spike",
                velocity=reading.velocity_tokens_per_turn,
                baseline=one_decimal((before.baseline or 0.0) * ratio),
                last_delta=reading.last_delta,
            )
        )
    return tuple(found)


def should_preempt(reading: PressureReading, *, base: int, orange_at: float, fits: int) -> bool:
    """Whether layers that need no model should run before their trigger, ``fits`` being the most that may be forwarded.

    True if growth spiked, as much again would reach orange, and once more would not fit: with less than that the layers
    come in time by themselves.
    """
    if not reading.spike:
        return False
    now, growth = bounded(reading.current_tokens), bounded(reading.last_delta or 0)
    return (now + growth) / max(1, bounded(base)) >= orange_at and now + 2 * growth > fits


def _percentage(tokens: int, base: int) -> float:
    return round(100 * bounded(tokens) / max(1, bounded(base)), 1)


def _burn(name: str, values: Sequence[int]) -> Burn:
    tokens, *deltas = _counts(values)
    return Burn(name, tokens, tuple(deltas))


def _counts(values: Sequence[int]) -> tuple[int, ...]:
    if values and (set(map(type, values)) != {int} or min(values) < 0 or max(values) > MOST_TOKENS):
        raise ValueError("not counts of tokens")
    return tuple(values)


def _finite(value: float | None) -> float | None:
    if value is None:
        return None
    if type(value) not in (int, float) or not math.isfinite(value):
        raise ValueError("not a finite number")
    return float(value)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError("not a text")
    return value
