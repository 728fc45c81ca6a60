"""Dropping the oldest units with a note: what is left when nothing cleverer fits."""

from policies.bounds import Bounds
from policies.draft import Draft
from policies.edits import MESSAGE_OVERHEAD
from policies.ledger import Cut

NOTE = "[weir: {count} earlier messages were removed to fit the context window; full text: recall {ref}]"


def drop_oldest(draft: Draft, bounds: Bounds, *, target: int) -> Draft:
    """The draft with as many of the oldest units dropped as it takes to reach ``target`` tokens."""
    head = draft.transcript.head
    verbatim = bounds.protection.verbatim
    present = {p.index: p.tokens for p in draft.pieces if p.index is not None}
    covered = draft.active_cut.covers if draft.active_cut else 0
    excess = draft.tokens - target - (draft.active_cut.tokens if draft.active_cut else 0)
    start = head + covered
    for unit in bounds.steps[:-1]:
        if excess <= 0:
            break
        if unit.start < start:
            continue
        excess -= sum(present.get(i, 0) for i in unit.indices if i not in verbatim)
        start = unit.stop
    if start == head:
        return draft
    return draft.with_cut(_note(draft, bounds, start))


def _note(draft: Draft, bounds: Bounds, start: int) -> Cut:
    transcript, head = draft.transcript, draft.transcript.head
    protection = bounds.protection
    late = protection.current if protection.current != protection.task else None
    stays = [i for i in range(head, start) if i in protection.verbatim]
    prefix = transcript.chain[start - head - 1]
    text = NOTE.format(count=start - head - len(stays), ref=prefix.hex()[:12])
    return Cut(
        covers=start - head,
        prefix=prefix,
        text=text,
        tokens=MESSAGE_OVERHEAD + bounds.counter.count(text),
        version=(bounds.known.cuts[-1].version if bounds.known.cuts else 0) + 1,
        ref=prefix.hex()[:12],
        before=tuple(i - head for i in stays if i != late),
        after=tuple(i - head for i in stays if i == late),
        origin="drop_oldest",
        narrative=draft.active_cut.narrative if draft.active_cut else "",
    )
