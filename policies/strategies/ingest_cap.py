"""Cap on a single tool result: head and tail stay, the middle goes to the archive."""

from policies.bounds import Bounds
from policies.clipping import clip_middle
from policies.draft import Draft
from policies.edits import replace_content
from policies.ledger import Edit, EditKind


def ingest_cap(draft: Draft, bounds: Bounds, *, new_only: bool = False) -> Draft:
    """The draft with every tool result above the cap shortened to it.

    ``new_only`` leaves results alone that an earlier request has sent: shortening those is a batch of edits.
    """
    transcript, cap = draft.transcript, bounds.ingest_cap
    first_new = transcript.head + bounds.known.length if new_only else 0
    edits: dict[int, Edit] = {}
    for piece in draft.pieces:
        index = piece.index
        if index is None or index < first_new or piece.text is not None or piece.tokens <= cap:
            continue
        message = transcript.messages[index]
        if not message.is_result or index in bounds.protection.pinned or message.media:
            continue
        text = transcript.read(index).text
        shortened = clip_middle(text, cap - 4, counter=bounds.counter, ref=message.ref)
        edit = replace_content(transcript, index, shortened, kind=EditKind.INGEST_CAP, counter=bounds.counter)
        if edit.tokens < piece.tokens:
            edits[index] = edit
    return draft.with_edits(edits)
