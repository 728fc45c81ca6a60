"""Old tool results leave a placeholder: what was asked, the finding in a line, where the full text is.

The oldest and largest go first. The newest results, worth half of what low water holds, stay.
"""

from collections.abc import Mapping

from policies.bounds import Bounds
from policies.draft import Draft
from policies.edits import replace_content
from policies.findings import placeholder
from policies.ledger import Edit, EditKind
from policies.messages import ToolCall

PROTECTED_SHARE = 0.5
WORTH_IT = 1.5


def evict(draft: Draft, bounds: Bounds) -> Draft:
    """The draft with tool results replaced by placeholders until it is at low water or none is left."""
    return _evicted(draft, bounds, _candidates(draft, bounds))


def evict_marked(draft: Draft, bounds: Bounds) -> Draft:
    """The draft with what is marked ``keep: false`` replaced by placeholders, oldest first, down to low water."""
    messages, guarded = draft.transcript.messages, bounds.protection.all
    marked = [
        (p.index, p.tokens)
        for p in draft.pieces
        if p.index is not None and messages[p.index].keep is False and p.index not in guarded
    ]
    return _evicted(draft, bounds, [(i, tokens) for i, tokens in marked if not messages[i].call_ids])


def _evicted(draft: Draft, bounds: Bounds, candidates: list[tuple[int, int]]) -> Draft:
    excess = draft.tokens - bounds.target
    if excess <= 0 or not candidates:
        return draft
    calls = bounds.calls()
    edits: dict[int, Edit] = {}
    for index, tokens in candidates:
        edit = replace_content(
            draft.transcript, index, _placeholder(bounds, index, calls), kind=EditKind.EVICT, counter=bounds.counter
        )
        if edit.tokens * WORTH_IT > tokens:
            continue
        edits[index] = edit
        excess -= tokens - edit.tokens
        if excess <= 0:
            break
    return draft.with_edits(edits)


def _placeholder(bounds: Bounds, index: int, calls: Mapping[int, ToolCall]) -> str:
    message = bounds.transcript.messages[index]
    if not message.is_result:
        return f"[weir: {message.role} message of {message.tokens} tokens removed; full text: recall {message.ref}]"
    call = calls.get(index)
    return placeholder(
        bounds.transcript.read(index).text,
        tool=call.name if call else "tool",
        arguments=call.arguments if call else "",
        ref=message.ref,
        max_tokens=bounds.settings.placeholder_tokens,
        counter=bounds.counter,
    )


def _candidates(draft: Draft, bounds: Bounds) -> list[tuple[int, int]]:
    """Indices and tokens of the results that may go, by age times size."""
    messages = draft.transcript.messages
    budget = int(PROTECTED_SHARE * (bounds.target - bounds.fixed))
    found: list[tuple[int, int, int]] = []
    newest = len(messages)
    guarded = bounds.protection.all
    for piece in reversed(draft.pieces):
        index = piece.index
        if index is None or index in guarded:
            continue
        budget -= piece.tokens
        if budget < 0 and messages[index].is_result:
            found.append(((newest - index) * piece.tokens, index, piece.tokens))
    found.sort(key=lambda f: (-f[0], f[1]))
    return [(index, tokens) for _, index, tokens in found]
