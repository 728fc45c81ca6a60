"""``prune``: results beyond a protected amount are cleared together, if that frees enough."""

from dataclasses import dataclass

from policies.draft import Bounds, Draft, Strategy, cleared, whole, word
from policies.ledger import EditKind, PlannedMessage
from policies.messages import parse_turn_boundaries

CLEARED = frozenset(
    {EditKind.PRUNE, EditKind.EVICT, EditKind.DEDUPE, EditKind.MERGE, EditKind.CUSTOM}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prune(Strategy):
    """Results beyond the newest ``protect`` tokens are cleared together, if that frees more than
    ``minimum``.

    The latest ``skip_turns`` turns are not counted. ``straddle`` says what becomes of the result in
    which ``protect`` ends.
    """

    name = "prune"
    protect: int = whole(40_000)
    minimum: int = whole(20_000)
    skip_turns: int = whole(2)
    straddle: str = word("keep", "clear", default="keep")

    def apply(self, draft: Draft, bounds: Bounds) -> Draft:
        old = self._beyond(draft, bounds)
        if sum(piece.tokens for _, piece in old) <= self.minimum:
            return draft
        made = ((index, piece, cleared(bounds, index, EditKind.PRUNE)) for index, piece in old)
        pruned = draft.with_edits(
            {index: edit for index, piece, edit in made if edit.tokens < piece.tokens}
        )
        return pruned if draft.tokens - pruned.tokens > self.minimum else draft

    def scan(self, draft: Draft, bounds: Bounds) -> int:
        return sum(piece.tokens for _, piece in self._beyond(draft, bounds))

    def _beyond(self, draft: Draft, bounds: Bounds) -> list[tuple[int, PlannedMessage]]:
        messages = draft.transcript.messages
        guarded = bounds.protection.all
        turns = parse_turn_boundaries(messages)
        stop = turns[-self.skip_turns] if 0 < self.skip_turns < len(turns) else len(messages)
        found: list[tuple[int, PlannedMessage]] = []
        total = 0
        for piece in reversed(draft.pieces):
            index = piece.index
            if (
                index is None
                or index >= stop
                or not messages[index].is_result
                or not bounds.in_scope(draft, piece)
            ):
                continue
            newer = total
            total = total + piece.tokens
            if not (total > self.protect if self.straddle == "clear" else newer >= self.protect):
                continue
            if index not in guarded and piece.kind not in CLEARED:
                found.append((index, piece))
        return found[::-1]
