"""Dropping the oldest units with a note: what is left when nothing cleverer fits."""

from policies.bounds import Bounds
from policies.draft import Draft
from policies.edits import MESSAGE_OVERHEAD
from policies.ledger import Cut

NOTE = "[weir: {count} earlier messages were removed to fit the context window; full text: recall {ref}]"


def drop_oldest(draft: Draft, bounds: Bounds) -> Draft:
    """The draft with as many of the oldest units dropped as it takes to reach the layer's target.

    A summary goes with what it stands for. The draft comes back as it is where the note would not pay.
    """
    transcript, head = draft.transcript, draft.transcript.head
    kept = bounds.protection.all
    present = {p.index: p.tokens for p in draft.pieces if p.index is not None}
    longest = NOTE.format(count=len(transcript.messages), ref="0" * 12)
    excess = draft.tokens - bounds.target + MESSAGE_OVERHEAD + bounds.counter.count(longest)
    start = head
    if draft.active_cut is not None:
        excess -= draft.active_cut.tokens
        start += draft.active_cut.covers
    for unit in bounds.steps[:-1]:
        if excess <= 0:
            break
        if unit.start < start:
            continue
        excess -= sum(present.get(i, 0) for i in unit.indices if i not in kept)
        start = unit.stop
    if start == head:
        return draft
    dropped = draft.with_cut(_note(draft, bounds, start))
    return dropped if dropped.tokens < draft.tokens else draft


def _note(draft: Draft, bounds: Bounds, start: int) -> Cut:
    transcript, head = draft.transcript, draft.transcript.head
    kept = bounds.protection.all
    stays = [i for i in range(head, start) if i in kept]
    before, after = bounds.sides(stays)
    prefix = transcript.chain[start - head - 1]
    text = NOTE.format(count=start - head - len(stays), ref=prefix.hex()[:12])
    return Cut(
        covers=start - head,
        prefix=prefix,
        text=text,
        tokens=MESSAGE_OVERHEAD + bounds.counter.count(text),
        version=(bounds.known.cuts[-1].version if bounds.known.cuts else 0) + 1,
        ref=prefix.hex()[:12],
        before=before,
        after=after,
        origin="drop_oldest",
        narrative=draft.active_cut.narrative if draft.active_cut else "",
    )
