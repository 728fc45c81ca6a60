"""``drop_oldest``: the oldest units go with a note: a layer of its own, and the rung where nothing
cleverer fits.
"""

import math
from dataclasses import dataclass

from policies.draft import (
    MESSAGE_OVERHEAD,
    NOTE_BEGINS,
    Bounds,
    Draft,
    Strategy,
    cut_at,
    flag,
    number,
    ref_at,
    whole,
)
from policies.messages import parse_turn_boundaries

REMOVED = (
    NOTE_BEGINS
    + "{count} earlier messages were removed to fit the context window; archived as {ref}]"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DropOldest(Strategy):
    """The oldest units go with a note, as many as it takes to reach the layer's target.

    At the least ``fraction`` of the turns goes, rounded up; the ``recent`` newest messages and
    system messages stay. As the last rung it drops a summary with what that covers; as a layer it
    keeps one and adds the note to it.
    """

    name = "drop_oldest"
    fraction: float = number(0.0, most=1)
    recent: int = whole(0)
    keep_system: bool = flag()

    def apply(self, draft: Draft, bounds: Bounds) -> Draft:
        head = draft.transcript.head
        active = draft.active_cut
        is_layer = bool(bounds.layer.strategy)
        excess = draft.tokens - bounds.target
        if excess <= 0:
            return draft
        carried = _summary(draft) if is_layer else ""
        longest = REMOVED.format(count=len(draft.transcript.messages), ref="0" * 12)
        excess += MESSAGE_OVERHEAD + bounds.counter.count(_under(carried, longest))
        begin = head
        if active is not None:
            excess -= active.tokens
            begin = draft.transcript.after(active.covers)
        start, spared = self._reach(draft, bounds, begin, excess)
        if start == head or (carried and start == begin):
            return draft
        stays = [i for i in range(head, start) if i in spared]
        note = REMOVED.format(count=start - head - len(stays), ref=ref_at(draft, start))
        # a layer carries no model notes on, so that the next ones cover what it drops too
        narrative = active.narrative if active is not None and not is_layer else ""
        text = _under(carried, note)
        cut = cut_at(
            draft, bounds, start, stays=stays, text=text, origin="drop_oldest", narrative=narrative
        )
        dropped = draft.with_cut(cut)
        return dropped if dropped.tokens < draft.tokens else draft

    def _reach(self, draft: Draft, bounds: Bounds, begin: int, excess: int) -> tuple[int, set[int]]:
        worth = {
            p.index: p.tokens
            for p in draft.pieces
            if p.index is not None and bounds.in_scope(draft, p)
        }
        least = self._least(bounds, begin)
        start = begin
        spared = set(bounds.protection.all)
        last = len(bounds.transcript.messages) - max(0, self.recent)
        for unit in bounds.transcript.steps[:-1]:
            if unit.start < begin:
                continue
            if unit.stop > last or (excess <= 0 and unit.start >= least):
                break
            if not any(i in worth for i in unit.indices):
                spared.update(unit.indices)
            excess -= sum(worth.get(i, 0) for i in unit.indices if i not in spared)
            start = unit.stop
        return start, spared

    def _least(self, bounds: Bounds, begin: int) -> int:
        """The index up to which ``fraction`` of what begins at ``begin`` reaches; ``begin`` without
        one.
        """
        turns = [
            start for start in parse_turn_boundaries(bounds.transcript.messages) if start >= begin
        ]
        edges = (
            turns
            if len(turns) > 1
            else [unit.start for unit in bounds.transcript.steps if unit.start >= begin]
        )
        if not edges or self.fraction <= 0:
            return begin
        return edges[min(math.ceil(round(self.fraction * len(edges), 6)), len(edges) - 1)]


def _summary(draft: Draft) -> str:
    text = "" if draft.active_cut is None else draft.active_cut.text
    before, _, line = text.rpartition("\n")
    return before if line.startswith(NOTE_BEGINS) else text


def _under(summary: str, note: str) -> str:
    return f"{summary}\n{note}" if summary else note
