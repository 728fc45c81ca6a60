"""``dedupe``: a result that a newer one repeats or replaces refers to the newer one."""

from policies.draft import Bounds, Draft, Strategy
from policies.ledger import Edit, EditKind
from policies.text.segments import replaced_in

MIN_DUPLICATE = 40


class Dedupe(Strategy):
    """Results become one line where a newer one has the same digest or replaced them: they are
    stale.
    """

    name = "dedupe"

    def apply(self, draft: Draft, bounds: Bounds) -> Draft:
        messages = draft.transcript.messages
        calls = bounds.transcript.calls
        guarded = bounds.protection.all
        newest: dict[bytes, int] = {}
        replaced = replaced_in(calls, lambda index: draft.transcript.read(index).text)
        edits: dict[int, Edit] = {}
        for piece in reversed(draft.pieces):
            index = piece.index
            if index is None or not messages[index].is_result:
                continue
            message = messages[index]
            duplicate = newest.setdefault(message.digest, index) != index
            if (
                not (duplicate or index in replaced)
                or piece.text is not None
                or piece.tokens < MIN_DUPLICATE
            ):
                continue
            if message.keep or index in guarded:
                continue
            why = (
                "the same result comes again later"
                if duplicate
                else "a later call of the same tool replaced it"
            )
            edit = bounds.edited(
                index, f"[weir: removed, {why}; archived as {message.ref}]", EditKind.DEDUPE
            )
            if edit.tokens < piece.tokens:
                edits[index] = edit
        return draft.with_edits(edits)
