"""How well a conversation is kept: six metrics folded over its requests, and the alerts that follow
from them.

::

    utilization        forwarded tokens over the policy's base                      healthy under 60 %
    eviction_rate      messages evicted or shortened a request, mean of the newest 5       under 2
    compression_ratio  tokens before over tokens after, mean of the newest 3 condensings   3 to 15
    burn_rate          tokens that a request adds, as the trend's velocity has it          steady
    fidelity_score     None: what summaries still answer is measured by ``weir evaluate``
    tool_bloat         tool results' share of the forwarded tokens                         10 to 15 %

A request that only repeats the one before is no request here. An alert is one *episode*, from the
request at which its rule begins to hold to the first at which it does not, by a limit that is
easier by a tenth; what is not critical does not begin again within twenty requests of its end. What
has to be *sustained* holds for several requests: a single large batch is how Weir works, not a sign
that the window is too small. ``critical`` is an overflow within a request or two, ``warning``
something that gets worse (``degradation``) or is unusual (``anomaly``), ``info`` no problem yet.
"""

import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

Level = Literal["critical", "warning", "info"]
Category = Literal["overflow", "degradation", "anomaly", "notice"]

KEPT = 100
VERSION = 2
EVICTION_WINDOW = 5
CONDENSINGS = 3
COMPACTIONS = 3
COMPACTION_WINDOW = 20
"""This many compactions within this many requests count as thrashing if each freed less than
``THRASH_ROOM`` of the base.
"""
THRASH_ROOM = 0.15
REPEATED = 2
"""If this many of the newest twenty requests fitted only by a rung, the window is too small.
"""
EASED = 0.1
COOLDOWN = 20
OVERFLOW_REQUESTS = 2.0
"""An overflow within this many requests is critical, where no layer acts before.
"""
SPIKE_SHARE = 0.05
"""Share of the base below which growth is no spike."""
LOOP = 3
"""The same call this many times in a row is a loop."""
HEALTHY_EVICTION_RATE = 2.0
HEALTHY_RATIO = 15.0
"""Requirements A0.119 and A0.120: beyond these a metric is worth a look, not an alert."""
TREND_OF = 10
TREND_NEEDS = 5
STABLE = 0.05
LATE = 60.0
"""Seconds. A larger step back means that a clock was set back, and the sample is accepted."""
SHARE: Mapping[str, float] = {"ge": 0, "le": 1}
AMOUNT: Mapping[str, float] = {"ge": 0, "lt": math.inf}
"""Bounds that a configuration may set a limit in (see policies.settings)."""
_ENCODER = json.JSONEncoder(separators=(",", ":"))


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthRules:
    """Limits beyond which a conversation is unhealthy.

    ``tool_bloat`` is lifted to 1.25 times the share of the bucket's cap.
    """

    enabled: bool = True
    utilization: float = field(default=0.90, metadata=SHARE)
    utilization_requests: int = field(default=3, metadata={"ge": 1, "le": 100})
    eviction_rate: float = field(default=5.0, metadata=AMOUNT)
    compression_ratio: float = field(default=2.0, metadata=AMOUNT)
    tool_bloat: float = field(default=0.30, metadata=SHARE)


class Sample(NamedTuple):
    """The health sample of one request.

    ``utilization`` is forwarded tokens over the base, ``spike`` the growth as a multiple of the
    baseline where it is a spike, ``repeats`` how often in a row its newest call was made.
    ``bloat_limit`` is None while there is much room, ``requests_left`` where nothing grows or
    layers keep it in its window. ``due`` is the utilization before any layer acted, ``rung`` says
    that what the layers did was not enough.
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
    due: float = 0.0
    rung: bool = False


class Snapshot(NamedTuple):
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

    ``above`` counts the requests in a row above the utilization that is too much; ``compactions``
    are the numbers of the requests that compacted though little had come since the last time,
    ``rungs`` of those that needed a rung. ``left`` is the utilization after the last compaction;
    ``ended`` has when, as a request's number, episodes of a kind ended lately.
    """

    requests: int = 0
    at: float = 0.0
    above: int = 0
    evicted: tuple[int, ...] = ()
    ratios: tuple[float, ...] = ()
    compactions: tuple[int, ...] = ()
    window_id: int = 1
    episodes: tuple[Episode, ...] = ()
    rungs: tuple[int, ...] = ()
    left: float = 0.0
    ended: tuple[tuple[str, int], ...] = ()

    @property
    def is_too_small(self) -> bool:
        """Whether a larger window would help: rungs were needed repeatedly."""
        return len(self.rungs) >= REPEATED

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
        try:
            version, *fields = json.loads(text)
            if version != VERSION:
                return None
            (
                requests,
                at,
                above,
                evicted,
                ratios,
                compactions,
                window_id,
                episodes,
                rungs,
                left,
                ended,
            ) = fields
            return cls(
                requests=int(requests),
                at=_finite(at),
                above=int(above),
                evicted=tuple(map(int, evicted)),
                ratios=tuple(map(_finite, ratios)),
                compactions=tuple(map(int, compactions)),
                window_id=int(window_id),
                episodes=tuple(Episode(str(kind), _finite(since)) for kind, since in episodes),
                rungs=tuple(map(int, rungs)),
                left=_finite(left),
                ended=tuple((str(kind), int(number)) for kind, number in ended),
            )
        except (ValueError, TypeError, OverflowError, RecursionError):
            return None


def _finite(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError("not a finite number")
    return float(value)


class Checkup(NamedTuple):
    """``opened`` alerts begin with the request, ``closed`` episodes end with it; ``is_first``:
    nothing was known before.

    With ``sample`` and ``rules`` it can be recomputed from what other processes know of the
    conversation.
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


class Rule(NamedTuple):
    kind: str
    level: Level
    category: Category
    said: str


RULES: tuple[Rule, ...] = (
    Rule("overflow", "critical", "overflow", "{value:.1f} requests until the window overflows"),
    Rule(
        "utilization", "critical", "overflow", "above {limit:.0%} for several requests: {value:.0%}"
    ),
    Rule(
        "eviction_rate", "warning", "degradation", "{value:.1f} evictions a request, over {limit:g}"
    ),
    Rule(
        "compression_ratio",
        "warning",
        "degradation",
        "condensing makes it {value:.2g} times shorter",
    ),
    Rule("tool_bloat", "warning", "degradation", "{value:.0%} are tool results, over {limit:.0%}"),
    Rule("thrash", "warning", "degradation", "{value:.0f} compactions within a few requests"),
    Rule("burn_rate", "warning", "anomaly", "it grew by {value:.1f} times what is usual for it"),
    Rule("loop", "warning", "anomaly", "the same call {value:.0f} times in a row"),
    Rule("eviction_raised", "info", "notice", "{value:.1f} evictions a request, over {limit:g}"),
    Rule("compression_deep", "info", "notice", "condensing makes it {value:.0f} times shorter"),
)
"""Every kind of alert, the most severe first; :func:`_findings` has their conditions."""


def _findings(health: Health, sample: Sample, rules: HealthRules) -> dict[str, tuple[float, float]]:
    """The value of each rule that holds, and the limit that it is beyond, by the rule's kind."""
    found: dict[str, tuple[float, float]] = {}
    is_open = {episode.kind for episode in health.episodes}
    for kind, tried, shown, limit in _above(health, sample, rules, is_open):
        if tried > (limit * (1 - EASED) if kind in is_open else limit):
            found[kind] = shown, limit
    for kind, tried, shown, limit in _below(health, rules):
        if tried < (limit * (1 + EASED) if kind in is_open else limit):
            found[kind] = shown, limit
    if "eviction_rate" in found:
        found.pop("eviction_raised", None)
    left = sample.requests_left
    if left is not None and left <= OVERFLOW_REQUESTS * (1 + EASED if "overflow" in is_open else 1):
        found["overflow"] = left, OVERFLOW_REQUESTS
    if len(health.compactions) >= COMPACTIONS:
        found["thrash"] = len(health.compactions), COMPACTIONS
    if sample.spike is not None:
        found["burn_rate"] = sample.spike, 1.0
    if sample.repeats >= LOOP:
        found["loop"] = sample.repeats, LOOP
    return found


Measured = Iterator[tuple[str, float, float, float]]
"""Kinds, each with the value that is compared with a limit, the value that is shown, and the limit.
"""


def _above(
    health: Health, sample: Sample, rules: HealthRules, is_open: Collection[str]
) -> Measured:
    if health.above >= rules.utilization_requests or "utilization" in is_open:
        yield "utilization", sample.utilization, sample.utilization, rules.utilization
    steady = _steady_evictions(health)
    yield "eviction_rate", steady, health.eviction_rate, rules.eviction_rate
    yield "eviction_raised", steady, health.eviction_rate, HEALTHY_EVICTION_RATE
    if len(health.ratios) >= CONDENSINGS:
        yield "compression_deep", min(health.ratios), health.compression_ratio or 0.0, HEALTHY_RATIO
    if sample.bloat_limit is not None:
        yield "tool_bloat", sample.bloat, sample.bloat, sample.bloat_limit


def _below(health: Health, rules: HealthRules) -> Measured:
    if len(health.ratios) >= CONDENSINGS:
        yield (
            "compression_ratio",
            max(health.ratios),
            health.compression_ratio or 0.0,
            rules.compression_ratio,
        )


def _steady_evictions(health: Health) -> float:
    """Evictions a request over a whole window; at most what remains without the largest batch."""
    if len(health.evicted) < EVICTION_WINDOW or not any(health.evicted):
        return 0.0
    return min(health.eviction_rate, sum(health.evicted) - max(health.evicted))


def check(health: Health | None, sample: Sample, rules: HealthRules) -> Checkup:
    """A sample a little older than what is known is counted and raises no alert: replicas may write
    out of order.
    """
    known = health if health is not None else Health()
    is_late = 0 < known.at - sample.at < LATE
    number = known.requests + 1
    is_thrash = sample.compacted and sample.due - known.left < THRASH_ROOM
    above = known.above + 1 if sample.utilization > rules.utilization else 0
    after = Health(
        requests=number,
        at=known.at if is_late else sample.at,
        above=known.above if is_late else above,
        evicted=(*known.evicted, sample.evicted)[-EVICTION_WINDOW:],
        ratios=(*known.ratios, *sample.ratios)[-CONDENSINGS:] if sample.ratios else known.ratios,
        compactions=_lately(known.compactions, number, more=is_thrash),
        window_id=known.window_id if sample.window_id is None else sample.window_id,
        episodes=known.episodes,
        rungs=_lately(known.rungs, number, more=sample.rung),
        left=sample.utilization if sample.compacted else known.left,
        ended=(
            tuple(each for each in known.ended if each[1] > number - COOLDOWN)
            if known.ended
            else ()
        ),
    )
    opened, episodes = ((), known.episodes) if is_late else _judge(after, sample, rules)
    closed = (
        tuple(each for each in known.episodes if each not in episodes) if known.episodes else ()
    )
    if episodes != known.episodes:
        ended = (*after.ended, *((each.kind, number) for each in closed))
        after = after._replace(episodes=episodes, ended=ended)
    snapshot = Snapshot(
        at=sample.at,
        utilization=sample.utilization,
        eviction_rate=after.eviction_rate,
        compression_ratio=after.compression_ratio,
        burn_rate=sample.burn_rate,
        fidelity_score=None,
        tool_result_bloat=sample.bloat,
        window_id=after.window_id,
    )
    return Checkup(after, snapshot, opened, closed, health is None, sample, rules)


def _lately(numbers: tuple[int, ...], number: int, *, more: bool) -> tuple[int, ...]:
    """Numbers of requests within the newest ``COMPACTION_WINDOW``, with that of this one where it
    is one ``more``.
    """
    if more:
        numbers = (*numbers, number)
    if numbers and numbers[0] <= number - COMPACTION_WINDOW:
        return tuple(each for each in numbers if each > number - COMPACTION_WINDOW)
    return numbers


def _judge(
    health: Health, sample: Sample, rules: HealthRules
) -> tuple[tuple[HealthAlert, ...], tuple[Episode, ...]]:
    found = _findings(health, sample, rules)
    if not found:
        return (), ()
    before = dict(health.episodes)
    ended = dict(health.ended)
    opened = list[HealthAlert]()
    episodes = list[Episode]()
    for kind, level, category, said in RULES:
        if kind not in found:
            continue
        value, limit = found[kind]
        since = before.get(kind)
        if since is None:
            if kind in ended and level != "critical":
                continue
            since = sample.at
            words = said.format(value=value, limit=limit)
            opened.append(HealthAlert(kind, level, category, since, value, limit, words))
        episodes.append(Episode(kind, since))
    return tuple(opened), tuple(episodes)


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthTrend:
    """Where a conversation is heading (requirement A0.128), by the newest 10 samples; None where
    under 5 say nothing.

    Deltas are between their ends: of utilization with three decimals, of the burn rate in tokens
    with one.
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
    direction: Literal["rising", "falling"] = "rising" if moved > 0 else "falling"
    return HealthTrend(
        trend="stable" if abs(moved) < STABLE else direction,
        samples=len(newest),
        utilization_delta=moved,
        burn_rate_delta=round(rates[-1] - rates[0], 1) if rates else None,
        avg_fidelity=round(sum(scores) / len(scores), 3) if scores else None,
    )
