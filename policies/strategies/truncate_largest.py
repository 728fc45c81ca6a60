"""The largest tool results lose their middle, the largest first, until the rest fits.

Where a policy says so (``truncate_after_summary``), what was put in shorter words is cut first: its finding was read
out of the whole before. What could not be is cut only where that is not enough, and the layer says why.
"""

from collections.abc import Callable

from policies.bounds import Bounds
from policies.clipping import clip_middle
from policies.condensing import NO_SUMMARIZER, is_condensed, is_original
from policies.draft import Draft
from policies.edits import MESSAGE_OVERHEAD, replace_content
from policies.ledger import SHORTENED, Edit, EditKind
from policies.pieces import Piece

FLOOR = 200
LEAST_CUT_AGAIN = 0.2
"""The share of a shortened result that shortening it once more has to take: each time the cache behind it is lost."""
NOT_SUMMARISED = "not_summarised"


def truncate_largest(draft: Draft, bounds: Bounds) -> Draft:
    """The draft with the middle of its largest results cut until it is at the layer's target.

    A result is cut as far as that takes, to ``floor`` tokens (a param) at the least, before the next one is. What
    an edit has replaced by a line stays; results with pictures and protected ones do too. With
    ``truncate_after_summary`` (a param) what was condensed is cut before anything else is.
    """
    floor = max(1, bounds.layer.whole("floor", FLOOR))
    if bounds.layer.params.get("truncate_after_summary") is not True:
        return _shrunk(draft, bounds, floor=floor, may=_may_be_cut)
    shrunk = _shrunk(draft, bounds, floor=floor, may=is_condensed)
    if shrunk.tokens <= bounds.target or bounds.free_only:
        return shrunk
    rest = _shrunk(shrunk, bounds, floor=floor, may=is_original)
    if rest is shrunk:
        return shrunk
    return rest.because(NO_SUMMARIZER if bounds.settings.summarizer is None else NOT_SUMMARISED)


def _may_be_cut(piece: Piece) -> bool:
    return piece.text is None or piece.kind in SHORTENED


def _shrunk(draft: Draft, bounds: Bounds, *, floor: int, may: Callable[[Piece], bool]) -> Draft:
    """The draft with the results that ``may`` be cut, as far as its target takes."""
    excess = draft.tokens - bounds.target
    edits: dict[int, Edit] = {}
    for index, piece in _candidates(draft, bounds, floor=floor, may=may):
        if excess <= 0:
            break
        edit = _cut(draft, bounds, index, piece, allowed=max(floor, piece.tokens - excess), floor=floor)
        if edit is not None:
            edits[index] = edit
            excess -= piece.tokens - edit.tokens
    return draft.with_edits({index: edits[index] for index in sorted(edits)})


def _candidates(draft: Draft, bounds: Bounds, *, floor: int, may: Callable[[Piece], bool]) -> list[tuple[int, Piece]]:
    """The results that may be cut, with their indices: the largest first, of equals the oldest."""
    messages, guarded = draft.transcript.messages, bounds.protection.all
    found: list[tuple[int, Piece]] = []
    for piece in draft.pieces:
        index = piece.index
        if index is None or index in guarded or piece.tokens <= floor:
            continue
        message = messages[index]
        if not message.is_result or message.media or not bounds.in_scope(draft, piece):
            continue
        if may(piece):
            found.append((index, piece))
    return sorted(found, key=lambda f: (-f[1].tokens, f[0]))


def _cut(draft: Draft, bounds: Bounds, index: int, piece: Piece, *, allowed: int, floor: int) -> Edit | None:
    """The edit that brings one result down to ``allowed`` tokens; None where it does not pay.

    An original is cut anew from all of it, a text in shorter words as it is.
    """
    most = piece.tokens - 1
    if piece.text is not None:
        most = int(piece.tokens * (1 - LEAST_CUT_AGAIN))
    if most < floor:
        return None
    text, ref = draft.transcript.read(index).text, draft.transcript.messages[index].ref
    if piece.text is not None and is_condensed(piece):
        text = piece.text
    shorter = clip_middle(text, min(allowed, most) - MESSAGE_OVERHEAD, counter=bounds.counter, ref=ref)
    if shorter == text:
        return None
    edit = replace_content(draft.transcript, index, shorter, kind=EditKind.TRUNCATE, counter=bounds.counter)
    return edit if edit.tokens <= most else None
