"""Old tool results leave a placeholder: what was asked, the finding in a line, where the full text is.

The oldest and largest go first. The newest results, worth half of what low water holds, stay.
"""

from policies.bounds import Bounds
from policies.draft import Draft
from policies.edits import replace_content
from policies.findings import placeholder
from policies.ledger import Edit, EditKind

PROTECTED_SHARE = 0.5
WORTH_IT = 1.5


def evict(draft: Draft, bounds: Bounds) -> Draft:
    """The draft with tool results replaced by placeholders until it is at low water or none is left."""
    excess = draft.tokens - bounds.low_water
    if excess <= 0:
        return draft
    calls = bounds.calls()
    transcript = draft.transcript
    edits: dict[int, Edit] = {}
    for index, tokens in _candidates(draft, bounds):
        call = calls.get(index)
        text = placeholder(
            transcript.read(index).text,
            tool=call.name if call else "tool",
            arguments=call.arguments if call else "",
            ref=transcript.messages[index].ref,
            max_tokens=bounds.settings.placeholder_tokens,
            counter=bounds.counter,
        )
        edit = replace_content(transcript, index, text, kind=EditKind.EVICT, counter=bounds.counter)
        if edit.tokens * WORTH_IT > tokens:
            continue
        edits[index] = edit
        excess -= tokens - edit.tokens
        if excess <= 0:
            break
    return draft.with_edits(edits)


def _candidates(draft: Draft, bounds: Bounds) -> list[tuple[int, int]]:
    """Indices and tokens of the results that may go: marked ones first, then by age times size."""
    messages = draft.transcript.messages
    budget = int(PROTECTED_SHARE * (bounds.low_water - bounds.fixed))
    found: list[tuple[float, int, int]] = []
    newest = len(messages)
    guarded = bounds.protection.all
    for piece in reversed(draft.pieces):
        index = piece.index
        if index is None or index in guarded:
            continue
        message = messages[index]
        budget -= piece.tokens
        if budget >= 0 and message.keep is None:
            continue
        if message.is_result and message.keep is not True:
            first = float("inf") if message.keep is False else float((newest - index) * piece.tokens)
            found.append((first, index, piece.tokens))
    found.sort(key=lambda f: (-f[0], f[1]))
    return [(index, tokens) for _, index, tokens in found]
