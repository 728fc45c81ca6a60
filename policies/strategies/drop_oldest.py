"""Dropping the oldest units with a note: what is left when nothing cleverer fits, and a layer of its own.

As the last rung it drops a summary with what that stands for. As a layer it keeps one and adds the note to it,
because a note that stood in the history would break the order of roles and be dropped in its turn.
"""

import math

from policies.bounds import Bounds
from policies.draft import Draft
from policies.edits import MESSAGE_OVERHEAD
from policies.ledger import Cut
from policies.turns import parse_turn_boundaries

NOTE_BEGINS = "[weir: "
NOTE = NOTE_BEGINS + "{count} earlier messages were removed to fit the context window; archived as {ref}]"


def drop_oldest(draft: Draft, bounds: Bounds) -> Draft:
    """The draft with as many of the oldest units dropped as it takes to reach the layer's target.

    Params: ``fraction`` of the turns (of the units where there is no second turn) that goes at the least, rounded
    up; ``recent``, how many of the newest messages stay. System messages stay, whatever ``keep_system`` says. The
    draft comes back as it is where the note would not pay.
    """
    head, active = draft.transcript.head, draft.active_cut
    carried = _summary(draft) if bounds.layer.strategy else ""
    excess = draft.tokens - bounds.target
    if excess <= 0:
        return draft
    excess += _cost_of_note(draft, bounds, carried)
    start = begin = head
    if active is not None:
        excess -= active.tokens
        start = begin = head + active.covers
    least, last, worth = _least(bounds, begin), _last(bounds), _worth(draft, bounds)
    spared = set(bounds.protection.all)
    for unit in bounds.steps[:-1]:
        if unit.start < begin:
            continue
        if unit.stop > last or (excess <= 0 and unit.start >= least):
            break
        if not any(i in worth for i in unit.indices):
            spared.update(unit.indices)
        excess -= sum(worth.get(i, 0) for i in unit.indices if i not in spared)
        start = unit.stop
    if start == head or (carried and start == begin):
        return draft
    dropped = draft.with_cut(
        _note(draft, bounds, start, stays=[i for i in range(head, start) if i in spared], text=carried)
    )
    return dropped if dropped.tokens < draft.tokens else draft


def _summary(draft: Draft) -> str:
    """The text of the summary in the array, without the note of an earlier drop; empty for none."""
    text = "" if draft.active_cut is None else draft.active_cut.text
    before, _, line = text.rpartition("\n")
    return before if line.startswith(NOTE_BEGINS) else text


def _cost_of_note(draft: Draft, bounds: Bounds, carried: str) -> int:
    longest = NOTE.format(count=len(draft.transcript.messages), ref="0" * 12)
    return MESSAGE_OVERHEAD + bounds.counter.count(_under(carried, longest))


def _under(summary: str, note: str) -> str:
    return f"{summary}\n{note}" if summary else note


def _least(bounds: Bounds, begin: int) -> int:
    """The index up to which the layer's ``fraction`` of what begins at ``begin`` reaches; ``begin`` without one."""
    fraction = bounds.layer.params.get("fraction", 0)
    turns = [start for start in parse_turn_boundaries(bounds.transcript.messages) if start >= begin]
    edges = turns if len(turns) > 1 else [unit.start for unit in bounds.steps if unit.start >= begin]
    if not edges or not isinstance(fraction, int | float) or fraction <= 0:
        return begin
    return edges[min(math.ceil(round(fraction * len(edges), 6)), len(edges) - 1)]


def _last(bounds: Bounds) -> int:
    """The index up to which units may go: the newest ``recent`` messages stay."""
    return len(bounds.transcript.messages) - max(0, bounds.layer.whole("recent", 0))


def _worth(draft: Draft, bounds: Bounds) -> dict[int, int]:
    """The tokens of each message in the layer's scope, by its index."""
    return {p.index: p.tokens for p in draft.pieces if p.index is not None and bounds.in_scope(draft, p)}


def _note(draft: Draft, bounds: Bounds, start: int, *, stays: list[int], text: str) -> Cut:
    transcript, head = draft.transcript, draft.transcript.head
    before, after = bounds.sides(stays)
    prefix = transcript.chain[start - head - 1]
    text = _under(text, NOTE.format(count=start - head - len(stays), ref=prefix.hex()[:12]))
    return Cut(
        covers=start - head,
        prefix=prefix,
        text=text,
        tokens=MESSAGE_OVERHEAD + bounds.counter.count(text),
        version=bounds.known.next_version,
        ref=prefix.hex()[:12],
        before=before,
        after=after,
        origin="drop_oldest",
        narrative=_narrative(draft, bounds),
    )


def _narrative(draft: Draft, bounds: Bounds) -> str:
    """The model's notes that the next ones extend; none from a layer, so that they tell of what it drops too."""
    return "" if draft.active_cut is None or bounds.layer.strategy else draft.active_cut.narrative
