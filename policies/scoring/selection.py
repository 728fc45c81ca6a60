"""Which blocks go: the lowest scores first, no more of them than it takes.

Scores are estimates, so blocks within one band count as equal: where the last band holds more than is
needed, the fewest blocks that free enough go. What turns out not to be needed afterwards is given back, the
most valuable first. Blocks of score 0 are worth nothing to anybody: they go before every band and do not come
back.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from policies.scoring.blocks import Block
from policies.scoring.scorers import BAND


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """What goes and what that frees, in tokens.

    Attributes:
        chosen: the blocks that go, lowest score first, the older of two equals first.
        freed: tokens less what their placeholders cost.
        shortfall: tokens that were to be freed and are not; 0 unless everything that pays is chosen.
        overshoot: tokens freed beyond what was to be.
        free: tokens that were to be freed.
    """

    chosen: tuple[Block, ...] = ()
    freed: int = 0
    shortfall: int = 0
    overshoot: int = 0
    free: int = 0

    @property
    def overshoot_ratio(self) -> float:
        """Freed over what was to be freed: 1.0 is exact; 0.0 where nothing was to be freed."""
        return self.freed / self.free if self.free > 0 else 0.0


@dataclass(frozen=True, slots=True)
class _Ranked:
    score: float
    net: int
    block: Block

    @property
    def order(self) -> tuple[float, int]:
        return self.score, self.block.index


def select(
    scored: Sequence[tuple[Block, float]],
    *,
    free: int,
    cost: Callable[[Block], int],
    band: float = BAND,
) -> Selection:
    """The blocks that have to go to free ``free`` tokens, net of their placeholders.

    ``cost`` is what a block's placeholder takes, in tokens; it is asked at most once for a block, and only
    up to the band that is reached. Blocks that free nothing and blocks marked ``keep: true`` are never chosen.
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
    return Selection(
        chosen=tuple(ranked.block for ranked in sorted(kept, key=lambda r: r.order)),
        freed=freed,
        shortfall=max(0, free - freed),
        overshoot=max(0, freed - max(0, free)),
        free=free,
    )


def _fewest(equals: Sequence[_Ranked], needed: int) -> list[_Ranked]:
    """The fewest of ``equals`` that free ``needed`` together, all of them if that is not enough.

    The largest are taken until one more suffices; that one is the smallest that does, the
    oldest of several.
    """
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
    """What stays chosen when everything that can be spared is given back, highest score first, and what that frees."""
    kept: list[_Ranked] = []
    for ranked in sorted(chosen, key=lambda r: r.order, reverse=True):
        if ranked.score > 0.0 and freed - ranked.net >= free:
            freed -= ranked.net
        else:
            kept.append(ranked)
    return kept, freed
