"""``window``: the newest messages or turns stay, what is older goes without a summary.

Units go whole, so that no result loses its call. Head, task, pinned messages and the newest step
stay wherever they are. A summary within the removed part stays before what is left: nothing else is
left of what it replaced.
"""

from bisect import bisect_right
from dataclasses import dataclass

from policies.draft import NOTE_BEGINS, Bounds, Draft, Strategy, cut_at, flag, ref_at, whole
from policies.messages import parse_turn_boundaries

OUTSIDE = NOTE_BEGINS + "{count} earlier messages are outside the window; archived as {ref}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Window(Strategy):
    """A window that slides: the newest ``messages`` or ``turns`` stay; ``note`` leaves a line about
    what is missing.

    A model's notes are not carried on, so that the next ones also cover what was removed without
    them.
    """

    name = "window"
    messages: int = whole(20, least=1)
    turns: int = whole(0, least=1)
    note: bool = flag()

    def apply(self, draft: Draft, bounds: Bounds) -> Draft:
        start = self._start(draft, bounds)
        head = draft.transcript.head
        active = draft.active_cut
        if start <= (head if active is None else draft.transcript.after(active.covers)):
            return draft
        stays = _stays(draft, bounds, start)
        if all(
            p.index in stays
            for p in draft.pieces
            if p.index is not None and head <= p.index < start
        ):
            return draft
        text = active.text if active is not None and not active.text.startswith(NOTE_BEGINS) else ""
        if not text and self.note:
            text = OUTSIDE.format(count=start - head - len(stays), ref=ref_at(draft, start))
        cut = cut_at(draft, bounds, start, stays=sorted(stays), text=text, origin="sliding_window")
        carried = draft.checkpoint if draft.cut is not None and cut.text == draft.cut.text else None
        slid = draft.with_cut(cut, checkpoint=carried)
        return slid if slid.tokens < draft.tokens else draft

    def _start(self, draft: Draft, bounds: Bounds) -> int:
        messages = draft.transcript.messages
        head = draft.transcript.head
        units = tuple(unit.start for unit in bounds.transcript.steps)
        if self.turns > 0:
            turns = parse_turn_boundaries(messages)
            edges = turns if len(turns) > 1 else units
            return edges[-self.turns] if len(edges) > self.turns else head
        given = ((p.index, p) for p in draft.pieces if p.index is not None)
        inside = [i for i, p in given if not messages[i].is_head and bounds.in_scope(draft, p)]
        newest = max(1, self.messages)
        return head if len(inside) <= newest else units[bisect_right(units, inside[-newest]) - 1]


def _stays(draft: Draft, bounds: Bounds, start: int) -> set[int]:
    stays = {i for i in bounds.protection.all if draft.transcript.head <= i < start}
    if bounds.layer.scope == "total":
        return stays
    pieces = {p.index: p for p in draft.pieces if p.index is not None}
    for unit in bounds.transcript.steps:
        present = [i for i in unit.indices if i in pieces]
        if unit.start < start and not any(bounds.in_scope(draft, pieces[i]) for i in present):
            stays.update(present)
    return stays
