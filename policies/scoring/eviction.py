"""Which messages go: blocks, how much each is worth keeping, and the choice among them.

A block is one message as eviction sees it. Its score is that of a scorer, found by name, with parameters:

==============  ============================================================================================
``fifo``        exp(-age / ``decay``): for linear chat, too blunt for agents
``lru``         2^(-idle / ``half_life``): what nobody has referred to for longest goes first
``priority``    five signals weighed against one another (``weight_<signal>``, all five or none; ``source_<type>``)
``type_based``  1 - age / time to live (``ttl_<type>``, ``ttl_other``), 0 from then on
``hybrid``      everything that is known, by one of three sets of ``weights`` or ``weight_<signal>``; ``decay``,
                ``half_life``, ``source_<type>``, ``ttl_<type>`` for the scorers behind it
``largest``     1 / (1 + age times tokens): the oldest and largest first, whatever else is known
==============  ============================================================================================

Times are in steps. Scores are estimates: blocks within one ``band`` count as equal, and where the last band holds more
than is needed, the fewest that free enough go. What turns out not to be needed is given back, the most valuable first.
Blocks of score 0 are worth nothing to anybody: they go before every band and do not come back.
"""

import difflib
import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import NamedTuple

from policies.messages import PolicyError

Params = Mapping[str, object]


class ContentType(StrEnum):
    SYSTEM = "system"
    TOOLS = "tools"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL_RESULT = "tool_result"
    MEMORY = "memory"


EVICTABLE = frozenset({ContentType.USER, ContentType.TOOL_RESULT, ContentType.MEMORY})
BAND = 0.02
FIFO_DECAY, HALF_LIFE, RECENCY_DECAY = 10.0, 5.0, 15.0
REUSE_FULL = 5
NEUTRAL = OTHER_SOURCE = 0.5
UNRELATED = 0.1
OTHER_TTL = 50.0
TTL: Mapping[ContentType, float] = MappingProxyType(
    {ContentType.TOOL_RESULT: 8.0, ContentType.MEMORY: 20.0, ContentType.ASSISTANT: 30.0}
)
SOURCES: Mapping[ContentType, float] = MappingProxyType(
    {
        ContentType.USER: 1.0,
        ContentType.SYSTEM: 1.0,
        ContentType.TOOLS: 0.9,
        ContentType.MEMORY: 0.7,
        ContentType.ASSISTANT: 0.5,
        ContentType.TOOL_RESULT: 0.3,
    }
)
PRIORITY_WEIGHTS: Mapping[str, float] = MappingProxyType(
    {"recency": 0.30, "semantic": 0.25, "source": 0.20, "reuse": 0.15, "explicit": 0.10}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """What scorers weigh about one message.

    ``age`` is steps since it was created, ``idle`` since something last referred to it, ``references`` how many later
    assistant messages used what it says. ``duplicate`` is the similarity to the most similar later block, ``semantic``
    the relevance to the newest user message (None without embeddings), both 0 to 1. ``keep`` is True for "never
    remove", False for "first to go". ``behind`` counts the messages from this one on.
    """

    index: int
    id: str
    kind: ContentType
    tokens: int
    age: int
    idle: int
    references: int
    superseded: bool = False
    duplicate: float = 0.0
    important: bool = False
    keep: bool | None = None
    semantic: float | None = None
    behind: int | None = None


def unit(value: float) -> float:
    return min(1.0, max(0.0, value))


SIGNALS = ("recency", "lru", "priority", "type_ttl", "reference_freq", "semantic_duplication")
_YAML, _CODE, _EQUAL = (0.30, 0.0, 0.25, 0.20, 0.15, 0.10), (0.15, 0.15, 0.40, 0.30, 0.0, 0.0), (0.2, 0.0, *[0.2] * 4)
HYBRID_WEIGHTS: Mapping[str, Mapping[str, float]] = MappingProxyType(
    {
        name: MappingProxyType({signal: weight for signal, weight in zip(SIGNALS, weights, strict=True) if weight})
        for name, weights in {"article-yaml": _YAML, "article-code": _CODE, "equal": _EQUAL}.items()
    }
)
DEFAULT_WEIGHTS = "article-yaml"


@dataclass(frozen=True, slots=True)
class Scorer:
    """``score`` gives 1 for keep to 0 for evict first and never raises; differences up to ``band`` say nothing."""

    name: str
    band: float
    score: Callable[[Block], float]


def scorer(name: str, params: Params = MappingProxyType({})) -> Scorer:
    """Raises PolicyError for an unknown name, parameter or value, with the nearest known name."""
    known = parameters(name)
    for key in params:
        if key not in known:
            raise PolicyError(f"{name}: no parameter {key}{_nearest(key, known)}")
    if name == "largest":
        return Scorer(name, _number(name, params, "band", 0.0), _largest)
    return Scorer(name, _number(name, params, "band", BAND), _unless_decided(_FORMULAS[name](_Stated(name, params))))


def parameters(name: str) -> tuple[str, ...]:
    if name not in _PARAMETERS:
        raise PolicyError(f"no scorer {name}{_nearest(name, SCORERS)}")
    return (*_PARAMETERS[name], "band")


def _unless_decided(formula: Callable[[Block], float]) -> Callable[[Block], float]:
    """What marks and supersession fix, and the formula for any other block."""

    def score(block: Block) -> float:
        if block.keep is not None:
            return 1.0 if block.keep else 0.0
        return 0.0 if block.superseded else formula(block)

    return score


def _largest(block: Block) -> float:
    age = block.age + 1 if block.behind is None else block.behind
    return 1.0 / (1.0 + max(0, age) * max(0, block.tokens))


@dataclass(frozen=True, slots=True)
class _Stated:
    name: str
    params: Params = field(default_factory=dict)

    def steps(self, key: str, default: float) -> float:
        value = _number(self.name, self.params, key, default)
        if not value > 0:
            raise PolicyError(f"{self.name}: {key} must be above 0 steps, not {value}")
        return value

    def by_type(self, prefix: str, default: Mapping[ContentType, float]) -> Mapping[ContentType, float]:
        given = {t: _number(self.name, self.params, prefix + t, 0.0) for t in ContentType if prefix + t in self.params}
        return {**default, **given}

    def weights(self, signals: Iterable[str], default: Mapping[str, float]) -> Mapping[str, float]:
        keys = {signal: f"weight_{signal}" for signal in signals}
        given = {s: _number(self.name, self.params, key, 0.0) for s, key in keys.items() if key in self.params}
        for signal, weight in given.items():
            if not weight <= 1.0:
                raise PolicyError(f"{self.name}: the weight of {signal} must be within 0 to 1, not {weight}")
        total = math.fsum((given or default).values())
        if abs(total - 1.0) > 1e-6:
            raise PolicyError(f"{self.name}: the weights must sum to 1, not {total:.6g}")
        return given or default

    def part(self, name: str) -> Callable[[Block], float]:
        own = {key: value for key, value in self.params.items() if key in _PARAMETERS[name] and key[:7] != "weight_"}
        return _unless_decided(_FORMULAS[name](_Stated(name, own)))


def _fifo(stated: _Stated) -> Callable[[Block], float]:
    decay = stated.steps("decay", FIFO_DECAY)
    return lambda block: math.exp(-block.age / decay)


def _lru(stated: _Stated) -> Callable[[Block], float]:
    half_life = stated.steps("half_life", HALF_LIFE)  # what was never referred to is as idle as it is old
    return lambda block: float(2.0 ** (-(block.idle if block.references > 0 else block.age) / half_life))


def _type_based(stated: _Stated) -> Callable[[Block], float]:
    ttl, other = stated.by_type("ttl_", TTL), _number(stated.name, stated.params, "ttl_other", OTHER_TTL)
    for kind, steps in (*ttl.items(), ("other", other)):
        if not steps > 0:
            raise PolicyError(f"type_based: the time to live of {kind} must be above 0 steps, not {steps}")
    return lambda block: unit(1.0 - block.age / ttl.get(block.kind, other))


def _priority(stated: _Stated) -> Callable[[Block], float]:
    """Recency exp(-age / 15), relevance, source, reuse, and what was said outright (.5 without it; ours)."""
    weights, sources = stated.weights(PRIORITY_WEIGHTS, PRIORITY_WEIGHTS), stated.by_type("source_", SOURCES)
    for kind, source in sources.items():
        if not 0.0 <= source <= 1.0:
            raise PolicyError(f"priority: the source score of {kind} must be within 0 to 1, not {source}")

    def value(block: Block) -> float:
        signals = {
            "recency": math.exp(-block.age / RECENCY_DECAY),
            "semantic": NEUTRAL if block.semantic is None else unit(block.semantic),
            "source": sources.get(block.kind, OTHER_SOURCE),
            "reuse": _reuse(block),
            "explicit": 1.0 if block.important else NEUTRAL,
        }
        return unit(math.fsum(weight * signals[signal] for signal, weight in weights.items()))

    return value


def _hybrid(stated: _Stated) -> Callable[[Block], float]:
    """Recency weighs much in all sets of weights, so that a result which is new and worthless would outlive an old
    finding: one of no known use scores 0 (ours).
    """
    named = stated.params.get("weights", DEFAULT_WEIGHTS)
    if not isinstance(named, str) or named not in HYBRID_WEIGHTS:
        raise PolicyError(f"hybrid: no weights {named}{_nearest(str(named), HYBRID_WEIGHTS)}")
    weights = stated.weights(SIGNALS, HYBRID_WEIGHTS[named])
    signals: Mapping[str, Callable[[Block], float]] = {
        "recency": stated.part("fifo"),
        "lru": stated.part("lru"),
        "priority": stated.part("priority"),
        "type_ttl": stated.part("type_based"),
        "reference_freq": _reuse,
        "semantic_duplication": lambda block: 1.0 - unit(block.duplicate),
    }

    def value(block: Block) -> float:
        if _is_of_no_use(block):
            return 0.0
        return unit(math.fsum(weight * signals[signal](block) for signal, weight in weights.items()))

    return value


def _reuse(block: Block) -> float:
    return min(max(0, block.references) / REUSE_FULL, 1.0)


def _is_of_no_use(block: Block) -> bool:
    return (
        block.kind is ContentType.TOOL_RESULT
        and not block.important
        and block.references == 0
        and block.age >= 1
        and block.semantic is not None
        and block.semantic <= UNRELATED
    )


def _number(scorer_name: str, params: Params, key: str, default: float) -> float:
    value = params.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise PolicyError(f"{scorer_name}: {key} must be a number from 0 on, not {value!r}")
    return float(value)


def _nearest(word: str, known: Iterable[str]) -> str:
    names = tuple(known)
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else f"; known: {', '.join(names)}"


_FORMULAS: Mapping[str, Callable[[_Stated], Callable[[Block], float]]] = MappingProxyType(
    {"fifo": _fifo, "lru": _lru, "priority": _priority, "type_based": _type_based, "hybrid": _hybrid}
)
SCORERS: tuple[str, ...] = (*_FORMULAS, "largest")
_TTLS, _SOURCES = (*(f"ttl_{t}" for t in ContentType), "ttl_other"), tuple(f"source_{t}" for t in ContentType)
_PARAMETERS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "fifo": ("decay",),
        "lru": ("half_life",),
        "priority": (*(f"weight_{s}" for s in PRIORITY_WEIGHTS), *_SOURCES),
        "type_based": _TTLS,
        "hybrid": ("weights", *(f"weight_{s}" for s in SIGNALS), "decay", "half_life", *_SOURCES, *_TTLS),
        "largest": (),
    }
)


class Selection(NamedTuple):
    chosen: tuple[Block, ...]
    freed: int


@dataclass(frozen=True, slots=True)
class _Ranked:
    score: float
    net: int
    block: Block

    @property
    def order(self) -> tuple[float, int]:
        return self.score, self.block.index


def select(
    scored: Sequence[tuple[Block, float]], *, free: int, cost: Callable[[Block], int], band: float = BAND
) -> Selection:
    """The blocks that have to go to free ``free`` tokens, net of their placeholders.

    ``cost`` (a placeholder's tokens) is asked at most once for a block, and only up to the band that is reached. Blocks
    that free nothing or are marked ``keep: true`` are never chosen.
    """
    chosen: list[_Ranked] = []
    freed = 0
    waiting = sorted((p for p in scored if p[0].keep is not True), key=lambda p: (p[1], p[0].index))
    start = 0
    while freed < free and start < len(waiting):
        lowest = waiting[start][1]
        width = band if lowest > 0.0 else 0.0
        stop = start + 1
        while stop < len(waiting) and waiting[stop][1] - lowest <= width:
            stop += 1
        nets = (_Ranked(score, block.tokens - cost(block), block) for block, score in waiting[start:stop])
        paying = [ranked for ranked in nets if ranked.net > 0]
        taken = _fewest(paying, free - freed)
        chosen.extend(taken)
        freed += sum(ranked.net for ranked in taken)
        start = stop
    kept, freed = _given_back(chosen, freed=freed, free=free)
    return Selection(tuple(ranked.block for ranked in sorted(kept, key=lambda r: r.order)), freed)


def _fewest(equals: Sequence[_Ranked], needed: int) -> list[_Ranked]:
    if sum(ranked.net for ranked in equals) <= needed:
        return list(equals)
    rising = sorted(equals, key=lambda r: (r.net, -r.block.index))
    nets = [ranked.net for ranked in rising]
    taken: list[_Ranked] = []
    while rising and nets[-1] < needed:
        needed -= nets.pop()
        taken.append(rising.pop())
    if needed > 0 and rising:
        smallest = nets[bisect_left(nets, needed)]
        taken.append(rising[bisect_right(nets, smallest) - 1])
    return taken


def _given_back(chosen: Sequence[_Ranked], *, freed: int, free: int) -> tuple[list[_Ranked], int]:
    kept: list[_Ranked] = []
    for ranked in sorted(chosen, key=lambda r: r.order, reverse=True):
        if ranked.score > 0.0 and freed - ranked.net >= free:
            freed -= ranked.net
        else:
            kept.append(ranked)
    return kept, freed
