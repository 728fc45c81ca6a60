"""``truncate_largest``: the largest results lose their middle, all down to one size at which the
rest fits.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from policies.draft import (
    NO_SUMMARIZER,
    Bounds,
    Draft,
    Strategy,
    clipped,
    flag,
    is_condensed,
    is_original,
    results,
    text_at,
    whole,
)
from policies.ledger import SHORTENED, Edit, EditKind, PlannedMessage

MIN_CUT_AGAIN = 0.2


NOT_SUMMARISED = "not_summarised"


@dataclass(frozen=True, slots=True, kw_only=True)
class TruncateLargest(Strategy):
    """The largest results lose their middle, all down to one size at which the rest fits, ``floor``
    tokens at least.

    With ``truncate_after_summary`` shortened results are cut first: their finding was taken from
    the whole before.
    """

    name = "truncate_largest"
    floor: int = whole(200, least=1)
    truncate_after_summary: bool = flag()

    def apply(self, draft: Draft, bounds: Bounds) -> Draft:
        if not self.truncate_after_summary:
            return self._shrunk(
                draft, bounds, lambda piece: piece.text is None or piece.kind in SHORTENED
            )
        shrunk = self._shrunk(draft, bounds, is_condensed)
        if shrunk.tokens <= bounds.target or bounds.free_only:
            return shrunk
        rest = self._shrunk(shrunk, bounds, is_original)
        if rest is shrunk:
            return shrunk
        return replace(
            rest, reason=NO_SUMMARIZER if bounds.settings.summarizer is None else NOT_SUMMARISED
        )

    def _shrunk(self, draft: Draft, bounds: Bounds, may: Callable[[PlannedMessage], bool]) -> Draft:
        floor = max(1, self.floor)
        excess = draft.tokens - bounds.target
        found = [(i, p) for i, p, _ in results(draft, bounds) if p.tokens > floor and may(p)]
        found.sort(key=lambda each: (-each[1].tokens, each[0]))
        edits: dict[int, Edit] = {}
        while excess > 0 and found:  # again where some that are larger could not be cut
            size = max(floor, _level([piece.tokens for _, piece in found], excess))
            larger = [each for each in found if each[1].tokens > size]
            found = found[len(larger) :]
            for index, piece in larger:
                edit = _cut(bounds, index, piece, allowed=size, floor=floor) if excess > 0 else None
                if edit is not None:
                    edits[index] = edit
                    excess -= piece.tokens - edit.tokens
        return draft.with_edits({index: edits[index] for index in sorted(edits)})


def _level(sizes: Sequence[int], excess: int) -> int:
    """The size down to which the largest of ``sizes``, in falling order, have to come to save
    ``excess`` together.
    """
    saved = 0
    for count, (size, following) in enumerate(zip(sizes, (*sizes[1:], 0), strict=True), start=1):
        more = count * (size - following)
        if saved + more >= excess:
            return size - math.ceil((excess - saved) / count)
        saved += more
    return 0


def _cut(
    bounds: Bounds, index: int, piece: PlannedMessage, *, allowed: int, floor: int
) -> Edit | None:
    """The edit that brings one result down to ``allowed`` tokens; None where it does not pay.

    An original is cut anew from all of it, a shortened text as it is.
    """
    most = piece.tokens - 1 if piece.text is None else int(piece.tokens * (1 - MIN_CUT_AGAIN))
    if most < floor:
        return None
    text = piece.text if piece.text is not None and is_condensed(piece) else text_at(bounds, index)
    edit = clipped(bounds, index, min(allowed, most), EditKind.TRUNCATE, text=text)
    return edit if edit.tokens <= most and edit.text != text else None
