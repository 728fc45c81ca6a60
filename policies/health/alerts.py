"""The rules by which alerts open: one table, gravest first."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from policies.health.metrics import Health, HealthRules, Sample

Level = Literal["critical", "warning", "info"]
Category = Literal["overflow", "degradation", "anomaly", "notice"]

HEALTHY_EVICTION_RATE = 2.0
HEALTHY_RATIO = 15.0
HEALTHY_FIDELITY = 0.85
"""Requirements A0.119, A0.120 and A0.122: beyond these a metric is worth a look, and no more."""


class Finding(NamedTuple):
    """That a rule holds: the value, and the limit that it is beyond."""

    value: float
    limit: float


class Alert(NamedTuple):
    """An alert that has opened; ``said`` is a sentence for people."""

    kind: str
    level: Level
    category: Category
    at: float
    value: float
    limit: float
    said: str


Holds = Callable[[Health, Sample, HealthRules], Finding | None]


@dataclass(frozen=True, slots=True)
class Rule:
    """One kind of alert: when it ``holds``, and what is ``said`` of a value and its limit."""

    kind: str
    level: Level
    category: Category
    holds: Holds
    said: str


def _overflow(_: Health, sample: Sample, rules: HealthRules) -> Finding | None:
    left = sample.requests_left
    return Finding(left, rules.overflow_requests) if left is not None and left <= rules.overflow_requests else None


def _utilization(health: Health, sample: Sample, rules: HealthRules) -> Finding | None:
    return Finding(sample.utilization, rules.utilization) if health.above >= rules.utilization_requests else None


def _eviction_rate(health: Health, _: Sample, rules: HealthRules) -> Finding | None:
    return _evicting(health, rules, rules.eviction_rate)


def _eviction_raised(health: Health, _: Sample, rules: HealthRules) -> Finding | None:
    if _evicting(health, rules, rules.eviction_rate) is not None:
        return None
    return _evicting(health, rules, min(HEALTHY_EVICTION_RATE, rules.eviction_rate))


def _evicting(health: Health, rules: HealthRules, limit: float) -> Finding | None:
    """The rate, if it is above ``limit`` over a whole window, and not by a single batch."""
    evicted, total = health.evicted, sum(health.evicted)
    if not total or len(evicted) < rules.eviction_window or total <= limit * len(evicted):
        return None
    return Finding(total / len(evicted), limit) if total - max(evicted) > limit else None


def _compression(health: Health, _: Sample, rules: HealthRules) -> Finding | None:
    ratios, limit = health.ratios, rules.compression_ratio
    if len(ratios) < rules.compressions or max(ratios) >= limit:
        return None
    return Finding(sum(ratios) / len(ratios), limit)


def _compression_deep(health: Health, _: Sample, rules: HealthRules) -> Finding | None:
    ratios = health.ratios
    if len(ratios) < rules.compressions or min(ratios) <= HEALTHY_RATIO:
        return None
    return Finding(sum(ratios) / len(ratios), HEALTHY_RATIO)


def _fidelity(health: Health, _: Sample, rules: HealthRules) -> Finding | None:
    score = health.fidelity
    return Finding(score, rules.fidelity) if score is not None and score < rules.fidelity else None


def _fidelity_low(health: Health, _: Sample, rules: HealthRules) -> Finding | None:
    score = health.fidelity
    if score is None or not rules.fidelity <= score <= HEALTHY_FIDELITY:
        return None
    return Finding(score, HEALTHY_FIDELITY)


def _tool_bloat(_: Health, sample: Sample, __: HealthRules) -> Finding | None:
    limit = sample.bloat_limit
    return Finding(sample.bloat, limit) if limit is not None and sample.bloat > limit else None


def _thrash(health: Health, _: Sample, rules: HealthRules) -> Finding | None:
    count = len(health.compactions)
    return Finding(count, rules.compactions) if count >= rules.compactions else None


def _burn_rate(_: Health, sample: Sample, __: HealthRules) -> Finding | None:
    return Finding(sample.spike, 1.0) if sample.spike is not None else None


def _loop(_: Health, sample: Sample, rules: HealthRules) -> Finding | None:
    return Finding(sample.repeats, rules.loop) if sample.repeats >= rules.loop else None


RULES: tuple[Rule, ...] = (
    Rule("overflow", "critical", "overflow", _overflow, "{value:.1f} requests until the window overflows"),
    Rule("utilization", "critical", "overflow", _utilization, "above {limit:.0%} for several requests: {value:.0%}"),
    Rule("eviction_rate", "warning", "degradation", _eviction_rate, "{value:.1f} evictions a request, over {limit:g}"),
    Rule("compression_ratio", "warning", "degradation", _compression, "condensing makes it {value:.2g} times shorter"),
    Rule("fidelity", "warning", "degradation", _fidelity, "summaries answer {value:.0%} of what they should"),
    Rule("tool_bloat", "warning", "degradation", _tool_bloat, "{value:.0%} are tool results, over {limit:.0%}"),
    Rule("thrash", "warning", "degradation", _thrash, "{value:.0f} compactions within a few requests"),
    Rule("burn_rate", "warning", "anomaly", _burn_rate, "it grew by {value:.1f} times what is usual for it"),
    Rule("loop", "warning", "anomaly", _loop, "the same call {value:.0f} times in a row"),
    Rule("eviction_raised", "info", "notice", _eviction_raised, "{value:.1f} evictions a request, over {limit:g}"),
    Rule("compression_deep", "info", "notice", _compression_deep, "condensing makes it {value:.0f} times shorter"),
    Rule("fidelity_low", "info", "notice", _fidelity_low, "summaries answer {value:.0%} of what they should"),
)
"""Every kind of alert, the gravest first."""

KINDS: tuple[str, ...] = tuple(rule.kind for rule in RULES)
