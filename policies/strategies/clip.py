"""The last rung: the middle of the newest messages is cut, because the newest is never removed."""

from collections.abc import Iterator

from policies.draft import MESSAGE_OVERHEAD, Bounds, Draft, clipped
from policies.ledger import Edit, EditKind, PlannedMessage
from policies.tokens import clip_growing

MIN_CLIPPED_TOKENS = 64


SLACK = 8


RESULT_WEIGHT = 2


MOST_THAT_STAYS = 0.5


GRID = 64
"""Parts of the window in which the room of a user's message is counted: a slightly other estimate
moves no cut.
"""


MOST_LEFT = 0.75
"""The highest low water for a user's message: a batch has to be worth the prefix that it costs."""


def clip(draft: Draft, bounds: Bounds, *, target: int) -> Draft:
    """The draft with the largest of its newest results, or a user's message that no window could
    hold, cut to fit ``target``.

    A result counts twice its size in the order, since it can be requested again. A user's message
    may be one that its client sends again with more appended: its cut moves in batches, down to low
    water.
    """
    edits = dict[int, Edit]()
    tokens = draft.tokens
    for piece in _clippable(draft, bounds):
        index = piece.index or 0
        excess = tokens - target
        crowds = _crowds(piece, bounds)
        if excess <= 0 and not crowds:
            continue
        allowed = piece.tokens - excess - SLACK
        if crowds:
            allowed = min(allowed, int(MOST_THAT_STAYS * bounds.safe_limit))
        edit = _clipped(draft, bounds, piece, max(MIN_CLIPPED_TOKENS, allowed))
        if edit is not None:
            edits[index] = edit
            tokens -= piece.tokens - edit.tokens
    return draft.with_edits(edits)


def is_clip_due(draft: Draft, bounds: Bounds) -> bool:
    """Whether the draft is too large, or a message that had to be cut leaves no room for what
    follows it.
    """
    return draft.tokens > bounds.hard_limit or any(
        _crowds(piece, bounds) for piece in _clippable(draft, bounds)
    )


def _crowds(piece: PlannedMessage, bounds: Bounds) -> bool:
    """Whether a message stays that takes most of the window: every later step would be a batch."""
    return (
        piece.index not in bounds.protection.active
        and piece.tokens > MOST_THAT_STAYS * bounds.safe_limit
    )


def _clipped(draft: Draft, bounds: Bounds, piece: PlannedMessage, allowed: int) -> Edit | None:
    index = piece.index or 0
    messages = draft.transcript.messages
    if allowed >= piece.tokens or (messages[index].media and not messages[index].is_result):
        return None
    body = bounds.transcript.read(index)
    if messages[index].is_result or body.data or body.attached:
        edit = clipped(bounds, index, allowed, EditKind.CLIP)
    else:
        most = allowed - allowed % max(1, bounds.budget.window // GRID)
        batch = 1 - min(bounds.shape.low_water, MOST_LEFT)
        own = clip_growing(body.text, most - MESSAGE_OVERHEAD, batch=batch, counter=bounds.counter)
        edit = bounds.edited(index, own, EditKind.CLIP)
    return edit if edit.tokens < piece.tokens else None


def _clippable(draft: Draft, bounds: Bounds) -> Iterator[PlannedMessage]:
    messages = draft.transcript.messages
    newest = clippable(draft, bounds)
    pieces = [(p.index, p) for p in draft.pieces if p.index is not None and p.index in newest]
    weights = {i: p.tokens * (RESULT_WEIGHT if messages[i].is_result else 1) for i, p in pieces}
    return (p for i, p in sorted(pieces, key=lambda each: (-weights[each[0]], each[0])))


def clippable(draft: Draft, bounds: Bounds) -> set[int]:
    """The indices of what may be cut before a request is refused: results that no model has read,
    and what a user says only where the one message is larger than all that fits.
    """
    messages = draft.transcript.messages
    protection = bounds.protection
    users = {i for i in protection.active if messages[i].role == "user"}
    users |= {
        i for i in protection.standing if i == protection.current or i not in protection.pinned
    }
    too_large = {i for i in users if messages[i].tokens > bounds.refused_above}
    return {i for i in protection.active if messages[i].is_result} | too_large
