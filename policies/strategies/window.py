"""A window that slides: the newest messages or turns stay, what is older goes without a summary.

Cuts fall between units, so that no result loses its call. Head, task, pinned messages and the newest step stay
wherever they stand. A summary that the window passes over stays in front of it: it is all that is left of what
it replaced. A model's notes are not carried on, so that the next ones tell of what went without them too.
"""

from bisect import bisect_right

from policies.bounds import Bounds
from policies.draft import Draft
from policies.edits import MESSAGE_OVERHEAD
from policies.ledger import Cut
from policies.turns import parse_turn_boundaries

MESSAGES = 20
NOTE_BEGINS = "[weir: "
NOTE = NOTE_BEGINS + "{count} earlier messages are outside the window; archived as {ref}]"


def window(draft: Draft, bounds: Bounds) -> Draft:
    """The draft with all but the newest messages or turns dropped; as it is where it is short enough or nothing is won.

    Params: ``messages`` (those in the layer's scope count) or ``turns`` (steps where there is no second turn), and
    ``note``, which leaves a line about what is missing.
    """
    start = _start(draft, bounds)
    covered = draft.active_cut.covers if draft.active_cut is not None else 0
    if start <= draft.transcript.head + covered:
        return draft
    stays = _stays(draft, bounds, start)
    if all(p.index in stays for p in draft.pieces if p.index is not None and draft.transcript.head <= p.index < start):
        return draft
    cut = _cut(draft, bounds, start, sorted(stays))
    carried = draft.checkpoint if draft.cut is not None and cut.text == draft.cut.text else None
    slid = draft.with_cut(cut, checkpoint=carried)
    return slid if slid.tokens < draft.tokens else draft


def _start(draft: Draft, bounds: Bounds) -> int:
    """Index of the first message inside the window; the end of the head where all of them are."""
    messages, head = draft.transcript.messages, draft.transcript.head
    turns = bounds.layer.whole("turns", 0)
    if turns > 0:
        starts = parse_turn_boundaries(messages)
        edges = starts if len(starts) > 1 else tuple(unit.start for unit in bounds.steps)
        return edges[-turns] if len(edges) > turns else head
    inside = [
        p.index
        for p in draft.pieces
        if p.index is not None and not messages[p.index].is_head and bounds.in_scope(draft, p)
    ]
    newest = max(1, bounds.layer.whole("messages", MESSAGES))
    if len(inside) <= newest:
        return head
    starts = tuple(unit.start for unit in bounds.steps)
    return starts[bisect_right(starts, inside[-newest]) - 1]


def _stays(draft: Draft, bounds: Bounds, start: int) -> set[int]:
    """Indices between the head and the window of what stays: protected messages, and units without a part in scope."""
    head = draft.transcript.head
    stays = {i for i in bounds.protection.all if head <= i < start}
    if bounds.layer.scope == "total":
        return stays
    pieces = {p.index: p for p in draft.pieces if p.index is not None}
    for unit in bounds.steps:
        present = [pieces[i] for i in unit.indices if i in pieces]
        if unit.start < start and not any(bounds.in_scope(draft, piece) for piece in present):
            stays.update(p.index for p in present if p.index is not None)
    return stays


def _cut(draft: Draft, bounds: Bounds, start: int, stays: list[int]) -> Cut:
    transcript, active = draft.transcript, draft.active_cut
    before, after = bounds.sides(stays)
    prefix = transcript.chain[start - transcript.head - 1]
    text = active.text if active is not None and not active.text.startswith(NOTE_BEGINS) else ""
    if not text and bounds.layer.params.get("note") is True:
        text = NOTE.format(count=start - transcript.head - len(stays), ref=prefix.hex()[:12])
    return Cut(
        covers=start - transcript.head,
        prefix=prefix,
        text=text,
        tokens=MESSAGE_OVERHEAD + bounds.counter.count(text) if text else 0,
        version=bounds.known.next_version,
        ref=prefix.hex()[:12],
        before=before,
        after=after,
        origin="sliding_window",
    )
