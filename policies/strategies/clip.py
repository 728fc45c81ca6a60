"""Cutting the middle of what is newest, as the last rung: the newest message is never removed."""

from policies.bounds import Bounds
from policies.clipping import clip_middle
from policies.draft import Draft
from policies.edits import MESSAGE_OVERHEAD, replace_content
from policies.ledger import Edit, EditKind

SMALLEST = 64
SLACK = 8
RESULT_WEIGHT = 2
LEAST_CLIPPED = 0.5
LARGEST_STANDING = 0.6  # of what may be used: a protected message above it leaves no room to work in
STANDING_KEPT = 0.45


def clip(draft: Draft, bounds: Bounds, *, target: int) -> Draft:
    """The draft with the largest of its newest messages shortened until it is at ``target`` tokens.

    Only text is shortened: tool results of the newest unit, the newest user message, the task; system messages
    and tool definitions never. A result counts twice its size in the order, since it can be asked for again.
    """
    for index in _candidates(draft, bounds):
        excess = draft.tokens - target
        if excess <= 0:
            break
        draft = draft.with_edits(_shortened(draft, bounds, index, excess))
    return draft


def shorten_standing(draft: Draft, bounds: Bounds) -> Draft:
    """The draft with a user message that takes most of the window cut to less than half of it.

    A task or a question that is protected word for word leaves no room for the steps that follow it: every
    one of them would be a batch. So once something follows it, its middle goes to the archive.
    """
    usable, protection = bounds.budget.soft_limit, bounds.protection
    edits: dict[int, Edit] = {}
    for piece in draft.pieces:
        index = piece.index
        if index is None or index not in (protection.task, protection.current) or index in protection.active:
            continue
        message = draft.transcript.messages[index]
        if piece.tokens <= LARGEST_STANDING * usable or message.keep or message.media:
            continue
        allowed = int(STANDING_KEPT * usable) - MESSAGE_OVERHEAD
        text = clip_middle(draft.transcript.read(index).text, allowed, counter=bounds.counter, ref=message.ref)
        edit = replace_content(draft.transcript, index, text, kind=EditKind.CLIP, counter=bounds.counter)
        if edit.tokens < piece.tokens:
            edits[index] = edit
    return draft.with_edits(edits)


def _candidates(draft: Draft, bounds: Bounds) -> list[int]:
    """Indices of the messages that may be clipped, the weightiest first."""
    messages, protection = draft.transcript.messages, bounds.protection
    newest = {i for i in protection.active if messages[i].is_result or messages[i].role == "user"}
    if protection.current is not None:
        newest.add(protection.current)
    if protection.task is not None and protection.task not in protection.pinned:
        newest.add(protection.task)
    weights = {
        p.index: p.tokens * (RESULT_WEIGHT if messages[p.index].is_result else 1)
        for p in draft.pieces
        if p.index in newest
    }
    return sorted(weights, key=lambda i: (-weights[i], i))


def _shortened(draft: Draft, bounds: Bounds, index: int, excess: int) -> dict[int, Edit]:
    transcript = draft.transcript
    piece = next(p for p in draft.pieces if p.index == index)
    if transcript.messages[index].media:
        return {}
    allowed = piece.tokens - excess - SLACK
    if index not in bounds.protection.active:  # it stays for good: leave room for what follows, or it is cut every time
        allowed = min(allowed, int(piece.tokens * (1 - LEAST_CLIPPED)))
    allowed = max(SMALLEST, allowed)
    if allowed >= piece.tokens:
        return {}
    text = transcript.read(index).text
    shortened = clip_middle(
        text, allowed - MESSAGE_OVERHEAD, counter=bounds.counter, ref=transcript.messages[index].ref
    )
    edit = replace_content(transcript, index, shortened, kind=EditKind.CLIP, counter=bounds.counter)
    return {index: edit} if edit.tokens < piece.tokens else {}
