"""Tool results that a newer one repeats or supersedes become one line.

Exact duplicates have the same digest. A result is superseded by a later one of the same tool with the same
arguments: what it said about the world is stale.
"""

from policies.bounds import Bounds
from policies.draft import Draft
from policies.edits import replace_content
from policies.ledger import Edit, EditKind
from policies.messages import same_call

SMALLEST = 40


def dedupe(draft: Draft, bounds: Bounds) -> Draft:
    """The draft with repeated and superseded tool results replaced by a pointer to the newer one."""
    transcript = draft.transcript
    calls = bounds.calls()
    newest: dict[bytes, int] = {}
    latest: dict[tuple[str, str], int] = {}
    edits: dict[int, Edit] = {}
    for piece in reversed(draft.pieces):
        index = piece.index
        if index is None or not transcript.messages[index].is_result:
            continue
        message, call = transcript.messages[index], calls.get(index)
        duplicate = newest.setdefault(message.digest, index) != index
        superseded = call is not None and latest.setdefault(same_call(call), index) != index
        if not (duplicate or superseded) or piece.text is not None or piece.tokens < SMALLEST:
            continue
        if message.keep or index in bounds.protection.all:
            continue
        why = "the same result comes again later" if duplicate else "a later call of the same tool replaced it"
        text = f"[weir: removed, {why}; archived as {message.ref}]"
        edit = replace_content(transcript, index, text, kind=EditKind.DEDUPE, counter=bounds.counter)
        if edit.tokens < piece.tokens:
            edits[index] = edit
    return draft.with_edits(edits)
