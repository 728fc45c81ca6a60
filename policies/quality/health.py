"""How well a conversation is kept: six metrics folded over its requests, and the alerts that follow from them.

::

    utilization        forwarded tokens over the policy's base                      healthy under 60 %
    eviction_rate      messages evicted or shortened a request, mean of the newest 5       under 2
    compression_ratio  tokens before over tokens after, mean of the newest 3 condensings   3 to 15
    burn_rate          tokens that a request adds, as the trend's velocity has it          steady
    fidelity           share of questions that a summary still answers; None until asked   over .85
    tool_bloat         tool results' share of the forwarded tokens                         10 to 15 %

A request that only repeats the one before is no request here. An alert is one *episode*: it opens with the request at
which its rule begins to hold and closes with the first at which it does not. What has to be *sustained* holds for
several requests, so that neither a single one nor a single large batch raises it: a batch is how Weir works, not a sign
that the window is too small. ``critical`` is an overflow within a request or two, ``warning`` something that gets worse
(``degradation``) or is unusual (``anomaly``), ``info`` a metric outside its healthy range that is no problem yet.

The rules are the table :data:`RULES`; their thresholds are a policy's :class:`HealthRules`.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from policies.settings import HealthRules

Level = Literal["critical", "warning", "info"]
Category = Literal["overflow", "degradation", "anomaly", "notice"]

KEPT = 100
VERSION = 1
HEALTHY_EVICTION_RATE = 2.0
HEALTHY_RATIO = 15.0
HEALTHY_FIDELITY = 0.85
"""Requirements A0.119, A0.120 and A0.122: beyond these a metric is worth a look, and no more."""
TREND_OF, TREND_NEEDS = 10, 5
STABLE = 0.05
"""Ours: utilization that moved by less between the ends of a trend is stable."""
_ENCODER = json.JSONEncoder(separators=(",", ":"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What one request says.

    Attributes:
        utilization: forwarded tokens over the base.
        evicted: messages that it newly evicted or shortened.
        ratios: of what it newly condensed, tokens before over tokens after.
        compacted: whether it replaced history by a summary.
        burn_rate: tokens that a request adds, None on the first.
        spike: how many times the baseline this request's growth is, None where that is no spike.
        repeats: how many times in a row its newest call was made.
        bloat: tool results' share of it, ``bloat_limit`` the share that is too much; None while there is much room.
        requests_left: requests until the window overflows, None where nothing grows or a layer acts before.
        window_id: the number of its window where it began one.
    """

    at: float
    utilization: float
    evicted: int = 0
    ratios: tuple[float, ...] = ()
    compacted: bool = False
    burn_rate: float | None = None
    spike: float | None = None
    repeats: int = 0
    bloat: float = 0.0
    bloat_limit: float | None = None
    requests_left: float | None = None
    window_id: int | None = None


class Snapshot(NamedTuple):
    """The six metrics after one request (requirement A0.127)."""

    at: float
    utilization: float
    eviction_rate: float
    compression_ratio: float | None
    burn_rate: float | None
    fidelity_score: float | None
    tool_result_bloat: float
    window_id: int


class Episode(NamedTuple):
    kind: str
    at: float


class HealthAlert(NamedTuple):
    kind: str
    level: Level
    category: Category
    at: float
    value: float
    limit: float
    said: str


class Health(NamedTuple):
    """A conversation after its last request; without arguments, one before its first.

    ``above`` counts the requests in a row above the utilization that is too much; ``evicted`` and ``ratios`` are the
    newest ones, oldest first; ``compactions`` are the numbers of the requests that compacted.
    """

    requests: int = 0
    at: float = 0.0
    above: int = 0
    evicted: tuple[int, ...] = ()
    ratios: tuple[float, ...] = ()
    compactions: tuple[int, ...] = ()
    fidelity: float | None = None
    window_id: int = 1
    episodes: tuple[Episode, ...] = ()

    @property
    def eviction_rate(self) -> float:
        return sum(self.evicted) / len(self.evicted) if self.evicted else 0.0

    @property
    def compression_ratio(self) -> float | None:
        return sum(self.ratios) / len(self.ratios) if self.ratios else None

    def to_json(self) -> str:
        return _ENCODER.encode([VERSION, *self])

    @classmethod
    def from_json(cls, text: str) -> "Health | None":
        """The state that :meth:`to_json` wrote, None for any other text."""
        try:
            version, requests, at, above, evicted, ratios, compactions, fidelity, window_id, episodes = json.loads(text)
            if version != VERSION:
                return None
            return cls(
                requests=int(requests),
                at=_finite(at),
                above=int(above),
                evicted=tuple(map(int, evicted)),
                ratios=tuple(map(_finite, ratios)),
                compactions=tuple(map(int, compactions)),
                fidelity=None if fidelity is None else _finite(fidelity),
                window_id=int(window_id),
                episodes=tuple(Episode(str(kind), _finite(since)) for kind, since in episodes),
            )
        except (ValueError, TypeError, OverflowError, RecursionError):
            return None


def _finite(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError("not a finite number")
    return float(value)


class Checkup(NamedTuple):
    """What one request made of a conversation's health.

    ``opened`` are the alerts that begin with it, ``closed`` the episodes that end with it. ``is_first`` says that
    nothing was known of the conversation before. ``sample`` and ``rules`` are what it was made from, so that it can be
    made again from what others know of the conversation.
    """

    health: Health
    snapshot: Snapshot
    opened: tuple[HealthAlert, ...] = ()
    closed: tuple[Episode, ...] = ()
    is_first: bool = False
    sample: Sample | None = None
    rules: HealthRules | None = None

    @property
    def is_critical(self) -> bool:
        return any(alert.level == "critical" for alert in self.opened)


class Finding(NamedTuple):
    value: float
    limit: float


@dataclass(frozen=True, slots=True)
class Rule:
    kind: str
    level: Level
    category: Category
    holds: Callable[[Health, Sample, HealthRules], Finding | None]
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
    holds = len(ratios) >= rules.compressions and max(ratios) < limit
    return Finding(sum(ratios) / len(ratios), limit) if holds else None


def _compression_deep(health: Health, _: Sample, rules: HealthRules) -> Finding | None:
    ratios = health.ratios
    holds = len(ratios) >= rules.compressions and min(ratios) > HEALTHY_RATIO
    return Finding(sum(ratios) / len(ratios), HEALTHY_RATIO) if holds else None


def _fidelity(health: Health, _: Sample, rules: HealthRules) -> Finding | None:
    score = health.fidelity
    return Finding(score, rules.fidelity) if score is not None and score < rules.fidelity else None


def _fidelity_low(health: Health, _: Sample, rules: HealthRules) -> Finding | None:
    score = health.fidelity
    holds = score is not None and rules.fidelity <= score <= HEALTHY_FIDELITY
    return Finding(score, HEALTHY_FIDELITY) if score is not None and holds else None


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

KINDS: tuple[str, ...] = tuple(rule.kind for rule in RULES)


def check(health: Health | None, sample: Sample, rules: HealthRules) -> Checkup:
    known = health if health is not None else Health()
    number = known.requests + 1
    compactions = (*known.compactions, number) if sample.compacted else known.compactions
    if compactions and compactions[0] <= number - rules.compaction_window:
        compactions = tuple(each for each in compactions if each > number - rules.compaction_window)
    after = Health(
        requests=number,
        at=sample.at,
        above=known.above + 1 if sample.utilization > rules.utilization else 0,
        evicted=(*known.evicted, sample.evicted)[-rules.eviction_window :],
        ratios=(*known.ratios, *sample.ratios)[-rules.compressions :] if sample.ratios else known.ratios,
        compactions=compactions,
        fidelity=known.fidelity,
        window_id=known.window_id if sample.window_id is None else sample.window_id,
        episodes=known.episodes,
    )
    opened, episodes = _judge(after, sample, rules)
    if episodes != known.episodes:
        after = after._replace(episodes=episodes)
    closed = tuple(each for each in known.episodes if each not in episodes) if known.episodes else ()
    return Checkup(after, _snapshot(after, sample), opened, closed, health is None, sample, rules)


def _judge(health: Health, sample: Sample, rules: HealthRules) -> tuple[tuple[HealthAlert, ...], tuple[Episode, ...]]:
    if not health.episodes and _is_quiet(health, sample, rules):
        return (), ()
    before, opened, episodes = dict(health.episodes), list[HealthAlert](), list[Episode]()
    for rule in RULES:
        finding = rule.holds(health, sample, rules)
        if finding is None:
            continue
        since = before.get(rule.kind)
        if since is None:
            since = sample.at
            said = rule.said.format(value=finding.value, limit=finding.limit)
            opened.append(HealthAlert(rule.kind, rule.level, rule.category, since, finding.value, finding.limit, said))
        episodes.append(Episode(rule.kind, since))
    return tuple(opened), tuple(episodes)


def _is_quiet(health: Health, sample: Sample, rules: HealthRules) -> bool:
    """Whether no rule can hold, seen at a glance: most requests are of this kind."""
    if health.above or health.ratios or health.compactions or health.fidelity is not None or any(health.evicted):
        return False
    if sample.spike is not None or sample.requests_left is not None or sample.repeats >= rules.loop:
        return False
    return sample.bloat_limit is None or sample.bloat <= sample.bloat_limit


def _snapshot(health: Health, sample: Sample) -> Snapshot:
    return Snapshot(
        sample.at,
        sample.utilization,
        health.eviction_rate,
        health.compression_ratio,
        sample.burn_rate,
        health.fidelity,
        sample.bloat,
        health.window_id,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthTrend:
    """Where a conversation is heading (requirement A0.128), None where fewer than 5 samples say nothing.

    ``trend`` is rising, falling, stable or insufficient_data; the deltas are between the ends of the newest 10
    samples, ``utilization_delta`` with three decimals, ``burn_rate_delta`` in tokens with one.
    """

    trend: Literal["rising", "falling", "stable", "insufficient_data"]
    samples: int
    utilization_delta: float | None = None
    burn_rate_delta: float | None = None
    avg_fidelity: float | None = None


def trend_of(snapshots: Sequence[Snapshot]) -> HealthTrend:
    newest = snapshots[-TREND_OF:]
    if len(newest) < TREND_NEEDS:
        return HealthTrend(trend="insufficient_data", samples=len(newest))
    moved = round(newest[-1].utilization - newest[0].utilization, 3)
    rates = [each.burn_rate for each in newest if each.burn_rate is not None]
    scores = [each.fidelity_score for each in newest if each.fidelity_score is not None]
    return HealthTrend(
        trend="stable" if abs(moved) < STABLE else "rising" if moved > 0 else "falling",
        samples=len(newest),
        utilization_delta=moved,
        burn_rate_delta=round(rates[-1] - rates[0], 1) if rates else None,
        avg_fidelity=round(sum(scores) / len(scores), 3) if scores else None,
    )
