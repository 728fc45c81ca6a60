"""Old images, recordings and files leave a line that says what they were and where the original is.

Their text stays. A picture that is not sent any more cannot be looked at again, so the newest ones stay as they came.
"""

from dataclasses import replace

from policies.bounds import Bounds
from policies.draft import Draft
from policies.edits import MESSAGE_OVERHEAD, replace_content
from policies.ledger import Edit, EditKind
from policies.messages import Body

KEEP = 1
NAME_OVERHEAD = 1


def retire_media(draft: Draft, bounds: Bounds) -> Draft:
    """The draft with the oldest media replaced by text until it is at its target or only the ``keep`` newest are left.

    ``keep`` (a param) counts messages that carry any, protected ones included.
    """
    messages, guarded = draft.transcript.messages, bounds.protection.all
    stated = bounds.layer.params.get("keep", KEEP)
    keep = max(0, int(stated)) if isinstance(stated, int | float) else KEEP
    carrying = [p for p in draft.pieces if p.index is not None and p.text is None and messages[p.index].media]
    excess = draft.tokens - bounds.target
    edits: dict[int, Edit] = {}
    for piece in carrying[: max(0, len(carrying) - keep)]:
        index = piece.index
        if excess <= 0:
            break
        if index is None or index in guarded or not bounds.in_scope(draft, piece):
            continue
        edit = _edit(draft, bounds, index)
        if edit is not None and edit.tokens < piece.tokens:
            edits[index] = edit
            excess -= piece.tokens - edit.tokens
    return draft.with_edits(edits)


def _edit(draft: Draft, bounds: Bounds, index: int) -> Edit | None:
    """The edit for one message; None where not every part beside its text is known to be media."""
    body, message = draft.transcript.read(index), draft.transcript.messages[index]
    if not body.attached or len(body.attached) != body.media or body.calls:
        return None
    lines = [f"[weir: {what} left out; archived as {message.ref}]" for what in body.attached]
    edit = replace_content(draft.transcript, index, "\n".join(lines), kind=EditKind.MEDIA, counter=bounds.counter)
    return replace(edit, tokens=_tokens(body, lines, bounds))


def _tokens(body: Body, lines: list[str], bounds: Bounds) -> int:
    count = bounds.counter.count
    name = NAME_OVERHEAD + count(body.name) if body.name else 0
    return MESSAGE_OVERHEAD + name + count(body.text) + sum(map(count, lines))
