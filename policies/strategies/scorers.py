"""How much a message is worth keeping, from 0 (goes first) to 1, by one of six scorers; and the
choice among messages.

``fifo``        what is young: for linear chat, too blunt for agents
``lru``         what something referred to lately
``type_based``  what is within the time to live of its type
``priority``    five signals, weighed against one another
``hybrid``      all of these, by one of three sets of weights or weights of one's own
``largest``     what is young and small, whatever else is known

Times are in steps. Custom weights replace all others and sum to 1. A scorer is an estimate:
messages within one ``band`` count as equal, and where the last band holds more than is needed, the
fewest that free enough go. What turns out not to be needed is given back, the most valuable first.
A score of 0 means worthless: such a block goes before every band and is not given back.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import ClassVar

from policies.draft import Options, number, word

RECENCY_DECAY = 15.0
REUSE_FULL = 5
NEUTRAL = 0.5
"""The value of an unknown signal: there are no embeddings of blocks."""
SHORTEST = 0.1
PRIORITY_WEIGHTS: Mapping[str, float] = MappingProxyType(
    {"recency": 0.30, "semantic": 0.25, "source": 0.20, "reuse": 0.15, "explicit": 0.10}
)
HYBRID_WEIGHTS: Mapping[str, Mapping[str, float]] = MappingProxyType(
    {
        "article-yaml": {
            "recency": 0.30,
            "priority": 0.25,
            "type_ttl": 0.20,
            "reference_freq": 0.15,
            "semantic_duplication": 0.10,
        },
        "article-code": {"recency": 0.15, "lru": 0.15, "priority": 0.40, "type_ttl": 0.30},
        "equal": dict.fromkeys(
            ("recency", "priority", "type_ttl", "reference_freq", "semantic_duplication"), 0.2
        ),
    }
)


class ContentType(StrEnum):
    """What may be evicted."""

    USER = "user"
    TOOL_RESULT = "tool_result"
    MEMORY = "memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One message as a scorer sees it.

    ``age`` is steps since it was said, ``idle`` since something last referred to it, ``references``
    how many later assistant messages used what it says, ``behind`` how many messages there are from
    it on. ``worthless``: a newer result replaced it, or its client marked it as the first to go.
    """

    index: int
    kind: ContentType
    tokens: int
    age: int
    idle: int
    references: int
    behind: int
    worthless: bool = False
    important: bool = False


def weight() -> float | None:
    return number(None, most=1)  # type: ignore[no-any-return]


def steps(default: float) -> float:
    return number(default, least=SHORTEST)  # type: ignore[no-any-return]


@dataclass(frozen=True, kw_only=True)
class Scorer(Options):
    """A scorer with its parameters; differences of up to ``band`` are ignored."""

    name: ClassVar[str]
    band: float = number(0.02)

    def fault(self) -> str:
        """What is wrong with the parameters together; empty if nothing is."""
        given = self._given()
        total = math.fsum(given.values())
        return (
            f"the weights must sum to 1, not {total:.6g}"
            if given and abs(total - 1.0) > 1e-6
            else ""
        )

    def score(self, block: Block) -> float:
        return 0.0 if block.worthless else self.worth(block)

    def worth(self, block: Block) -> float:
        raise NotImplementedError

    def _given(self) -> dict[str, float]:
        """The custom weights, by signal."""
        names = [name for name in self.parameters() if name.startswith("weight_")]
        given = {name.removeprefix("weight_"): getattr(self, name) for name in names}
        return {signal: weight for signal, weight in given.items() if weight is not None}


@dataclass(frozen=True, kw_only=True)
class Fifo(Scorer):
    name = "fifo"
    decay: float = steps(10.0)

    def worth(self, block: Block) -> float:
        return math.exp(-block.age / self.decay)


@dataclass(frozen=True, kw_only=True)
class Lru(Scorer):
    name = "lru"
    half_life: float = steps(5.0)

    def worth(self, block: Block) -> float:
        # what was never referred to is as idle as it is old
        idle = block.idle if block.references > 0 else block.age
        return float(2.0 ** (-idle / self.half_life))


@dataclass(frozen=True, kw_only=True)
class TypeBased(Scorer):
    name = "type_based"
    ttl_tool_result: float = steps(8.0)
    ttl_memory: float = steps(20.0)
    ttl_user: float = steps(50.0)

    def worth(self, block: Block) -> float:
        lives: float = getattr(self, f"ttl_{block.kind}")
        return max(0.0, 1.0 - block.age / lives)


@dataclass(frozen=True, kw_only=True)
class _Valued(Scorer):
    source_user: float = number(1.0, most=1)
    source_memory: float = number(0.7, most=1)
    source_tool_result: float = number(0.3, most=1)

    def _value(self, block: Block, weights: Mapping[str, float]) -> float:
        signals: dict[str, float] = {
            "recency": math.exp(-block.age / RECENCY_DECAY),
            "semantic": NEUTRAL,
            "source": getattr(self, f"source_{block.kind}"),
            "reuse": _reuse(block),
            "explicit": 1.0 if block.important else NEUTRAL,
        }
        return _weighed(signals, weights)


@dataclass(frozen=True, kw_only=True)
class Priority(_Valued):
    name = "priority"
    weight_recency: float | None = weight()
    weight_semantic: float | None = weight()
    weight_source: float | None = weight()
    weight_reuse: float | None = weight()
    weight_explicit: float | None = weight()

    def worth(self, block: Block) -> float:
        return self._value(block, self._given() or PRIORITY_WEIGHTS)


@dataclass(frozen=True, kw_only=True)
class Hybrid(Fifo, Lru, TypeBased, _Valued):
    name = "hybrid"
    weights: str = word(*HYBRID_WEIGHTS, default="article-yaml")
    weight_recency: float | None = weight()
    weight_lru: float | None = weight()
    weight_priority: float | None = weight()
    weight_type_ttl: float | None = weight()
    weight_reference_freq: float | None = weight()
    weight_semantic_duplication: float | None = weight()

    def worth(self, block: Block) -> float:
        signals = {
            "recency": Fifo.worth(self, block),
            "lru": Lru.worth(self, block),
            "priority": self._value(block, PRIORITY_WEIGHTS),
            "type_ttl": TypeBased.worth(self, block),
            "reference_freq": _reuse(block),
            "semantic_duplication": 1.0,  # duplicates are the layers' dedupe and semantic_merge
        }
        return _weighed(signals, self._given() or HYBRID_WEIGHTS[self.weights])


@dataclass(frozen=True, kw_only=True)
class Largest(Scorer):
    name = "largest"
    band: float = number(0.0)

    def score(self, block: Block) -> float:
        return 1.0 / (1.0 + block.behind * block.tokens)


def _reuse(block: Block) -> float:
    return min(block.references / REUSE_FULL, 1.0)


def _weighed(signals: Mapping[str, float], weights: Mapping[str, float]) -> float:
    return min(1.0, math.fsum(weight * signals[signal] for signal, weight in weights.items()))


SCORERS: Mapping[str, type[Scorer]] = MappingProxyType(
    {scorer.name: scorer for scorer in (Fifo, Lru, Priority, TypeBased, Hybrid, Largest)}
)


@dataclass(frozen=True, slots=True)
class _Ranked:
    score: float
    net: int
    block: Block

    @property
    def order(self) -> tuple[float, int]:
        return self.score, self.block.index


def select(
    blocks: Sequence[Block], scorer: Scorer, *, free: int, cost: Callable[[Block], int]
) -> list[Block]:
    """The blocks that have to go to free ``free`` tokens, net of their placeholders.

    ``cost`` (a placeholder's tokens) is computed at most once for a block, and only up to the band
    that is reached. A block that frees nothing stays.
    """
    chosen: list[_Ranked] = []
    freed = 0
    waiting = sorted(
        ((scorer.score(block), block.index, block) for block in blocks), key=lambda each: each[:2]
    )
    start = 0
    while freed < free and start < len(waiting):
        lowest = waiting[start][0]
        width = scorer.band if lowest > 0.0 else 0.0
        stop = start + 1
        while stop < len(waiting) and waiting[stop][0] - lowest <= width:
            stop += 1
        nets = (
            _Ranked(score, block.tokens - cost(block), block)
            for score, _, block in waiting[start:stop]
        )
        taken = _fewest([ranked for ranked in nets if ranked.net > 0], free - freed)
        chosen.extend(taken)
        freed += sum(ranked.net for ranked in taken)
        start = stop
    return [ranked.block for ranked in _needed(chosen, excess=freed - free)]


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


def _needed(chosen: Sequence[_Ranked], *, excess: int) -> list[_Ranked]:
    """What was chosen without what was freed beyond need, the most valuable first."""
    kept: list[_Ranked] = []
    for ranked in sorted(chosen, key=lambda r: r.order, reverse=True):
        if ranked.score > 0.0 and excess >= ranked.net:
            excess -= ranked.net
        else:
            kept.append(ranked)
    return kept
