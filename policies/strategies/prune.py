"""Old tool results beyond a protected amount are cleared together, if that frees enough to be worth it.

Results are added up from the newest to the oldest. The newest ``protect`` tokens stay, and so do the latest
``skip_turns`` turns, which are not added up at all; where there are no more turns than that, only the amount and
the newest step protect. Everything older is cleared at once, or nothing if the net gain is not above ``minimum``.
"""

from typing import Final

from policies.bounds import Bounds
from policies.draft import Draft
from policies.edits import replace_content
from policies.ledger import Edit, EditKind
from policies.standins import standin
from policies.turns import parse_turn_boundaries

PROTECT: Final = 40_000
MINIMUM: Final = 20_000
SKIP_TURNS: Final = 2
CLEARED = frozenset({EditKind.PRUNE, EditKind.EVICT, EditKind.DEDUPE, EditKind.MERGE, EditKind.CUSTOM})


def prune(draft: Draft, bounds: Bounds) -> Draft:
    """The draft with every result beyond the protected ones cleared; as it is where that frees too little.

    Params: ``protect`` and ``minimum`` (tokens; the gain has to be above the minimum), ``skip_turns``, and
    ``straddle``, which says what becomes of the result that the protected amount ends in: ``keep`` or ``clear``.
    """
    minimum = bounds.layer.whole("minimum", MINIMUM)
    old = _beyond(draft, bounds)
    if sum(tokens for _, tokens in old) <= minimum:
        return draft
    calls = bounds.calls()
    edits: dict[int, Edit] = {}
    gain = 0
    for index, tokens in old:
        text = standin(bounds, index, calls)
        edit = replace_content(draft.transcript, index, text, kind=EditKind.PRUNE, counter=bounds.counter)
        if edit.tokens < tokens:
            edits[index] = edit
            gain += tokens - edit.tokens
    return draft.with_edits(edits) if gain > minimum else draft


def prunable(draft: Draft, bounds: Bounds) -> int:
    """The tokens of all results that may be cleared."""
    return sum(tokens for _, tokens in _beyond(draft, bounds))


def _beyond(draft: Draft, bounds: Bounds) -> list[tuple[int, int]]:
    """Indices and tokens of the results that may be cleared, oldest first."""
    messages, guarded = draft.transcript.messages, bounds.protection.all
    protect, clears = bounds.layer.whole("protect", PROTECT), bounds.layer.params.get("straddle") == "clear"
    stop, total = _scanned_until(bounds), 0
    found: list[tuple[int, int]] = []
    for piece in reversed(draft.pieces):
        index = piece.index
        if index is None or index >= stop or not messages[index].is_result or not bounds.in_scope(draft, piece):
            continue
        newer, total = total, total + piece.tokens
        if not (total > protect if clears else newer >= protect):
            continue
        if index not in guarded and piece.kind not in CLEARED:
            found.append((index, piece.tokens))
    return found[::-1]


def _scanned_until(bounds: Bounds) -> int:
    """The index at which the skipped turns begin; the number of messages where there are too few turns to skip."""
    skipped, messages = bounds.layer.whole("skip_turns", SKIP_TURNS), bounds.transcript.messages
    turns = parse_turn_boundaries(messages)
    return turns[-skipped] if 0 < skipped < len(turns) else len(messages)
