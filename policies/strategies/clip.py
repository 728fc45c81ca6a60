"""Cutting the middle of what is newest, as the last rung: the newest message is never removed."""

from policies.bounds import Bounds
from policies.clipping import clip_middle
from policies.draft import Draft
from policies.edits import MESSAGE_OVERHEAD, replace_content
from policies.ledger import Edit, EditKind

SMALLEST = 64
SLACK = 8


def clip(draft: Draft, bounds: Bounds, *, target: int) -> Draft:
    """The draft with the largest of its newest messages shortened until it is at ``target`` tokens.

    Only text is shortened, first tool results of the newest unit, then the newest user message; system
    messages and tool definitions never.
    """
    for index in _candidates(draft, bounds):
        excess = draft.tokens - target
        if excess <= 0:
            break
        draft = draft.with_edits(_shortened(draft, bounds, index, excess))
    return draft


def _candidates(draft: Draft, bounds: Bounds) -> list[int]:
    """Newest tool results, largest first, then user messages that may be clipped, largest first."""
    messages = draft.transcript.messages
    present = {p.index: p.tokens for p in draft.pieces if p.index is not None}
    newest = [i for i in bounds.protection.active if i in present and not messages[i].is_head]
    results = sorted((i for i in newest if messages[i].is_result), key=lambda i: -present[i])
    others = {i for i in newest if messages[i].role == "user"}
    if bounds.protection.current is not None:
        others.add(bounds.protection.current)
    return results + sorted((i for i in others if i in present), key=lambda i: -present[i])


def _shortened(draft: Draft, bounds: Bounds, index: int, excess: int) -> dict[int, Edit]:
    transcript = draft.transcript
    piece = next(p for p in draft.pieces if p.index == index)
    if transcript.messages[index].media:
        return {}
    allowed = max(SMALLEST, piece.tokens - excess - SLACK)
    if allowed >= piece.tokens:
        return {}
    text = transcript.read(index).text
    shortened = clip_middle(
        text, allowed - MESSAGE_OVERHEAD, counter=bounds.counter, ref=transcript.messages[index].ref
    )
    edit = replace_content(transcript, index, shortened, kind=EditKind.CLIP, counter=bounds.counter)
    return {index: edit} if edit.tokens < piece.tokens else {}
