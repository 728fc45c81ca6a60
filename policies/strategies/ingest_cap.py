"""Cap on a single tool result: its beginning and its end stay, the middle goes to the archive.

Fields that the policy calls dispensable are left out first where a result is a JSON document. What was sent in
full before is shortened only in a batch of edits, so that between two batches the sent prefix stays as it was.
"""

import json
from collections.abc import Mapping
from dataclasses import replace

from policies.bounds import Bounds, ingest_cap_for
from policies.clipping import cap_text
from policies.draft import Draft
from policies.edits import MESSAGE_OVERHEAD, replace_content
from policies.ledger import Edit, EditKind
from policies.messages import ToolCall
from policies.pieces import Piece
from policies.settings import Ingest
from policies.trimming import without_fields
from policies.turns import answered_calls

ANY_TOOL = "*"


def ingest_cap(draft: Draft, bounds: Bounds, *, new_only: bool = False) -> Draft:
    """The draft with every tool result above the cap shortened to it.

    ``new_only`` leaves results alone that an earlier request has sent: shortening those is a batch of edits. A layer
    that is always due (``at`` 0) does that only in a batch, too.
    """
    transcript, ingest = draft.transcript, bounds.settings.ingest
    first_new = transcript.head + bounds.known.length if new_only or _between_batches(draft, bounds) else 0
    calls = _calls(bounds, first_new) if ingest.is_particular else {}
    edits: dict[int, Edit] = {}
    for piece in draft.pieces:
        index = piece.index
        if index is None or index < first_new or piece.text is not None:
            continue
        message = transcript.messages[index]
        if not message.is_result or index in bounds.protection.pinned or message.media:
            continue
        tool = calls[index].name if index in calls else ""
        edit = _edit(bounds, piece, index, tool)
        if edit is not None:
            edits[index] = edit
    return draft.with_edits(edits)


def _between_batches(draft: Draft, bounds: Bounds) -> bool:
    """Whether the layer runs because it always does, and nothing else is due that would change what was sent."""
    return bounds.layer.at == 0 and not bounds.free_only and draft.tokens <= bounds.trigger * bounds.early


def _calls(bounds: Bounds, first_new: int) -> Mapping[int, ToolCall]:
    return answered_calls(bounds.transcript, [step for step in bounds.steps if step.stop > first_new])


def _edit(bounds: Bounds, piece: Piece, index: int, tool: str) -> Edit | None:
    """The edit that brings one result to its cap, None for a result that may stay as it is."""
    ingest, message = bounds.settings.ingest, bounds.transcript.messages[index]
    cap, names = _cap(bounds, tool), _dropped(ingest, tool)
    if piece.tokens <= cap and not names:
        return None
    text = bounds.transcript.read(index).text
    trimmed, found = without_fields(text, names)
    for line in _lines(found, message.ref):
        room = cap - MESSAGE_OVERHEAD
        shown = f"{trimmed}{line}"
        if bounds.counter.count(shown) > room:
            shown = cap_text(
                trimmed, room, counter=bounds.counter, ref=message.ref, method=ingest.method, whole=not found
            )
        edit = replace_content(bounds.transcript, index, shown, kind=EditKind.INGEST_CAP, counter=bounds.counter)
        if edit.tokens < piece.tokens:
            return edit
    return None


def _lines(found: tuple[str, ...], ref: str) -> tuple[str, ...]:
    """What to write under a result: which fields are missing where that is worth its tokens, else nothing."""
    return ("\n" + json.dumps({"left_out": list(found), "ref": ref}, ensure_ascii=False), "") if found else ("",)


def _cap(bounds: Bounds, tool: str) -> int:
    """The largest result of a tool in tokens, framing included: its own cap within what its share and bucket allow."""
    ingest = bounds.settings.ingest
    own = ingest.tools.get(tool)
    if own is None and tool in ingest.sub_agent_tools:
        own = min(ingest.sub_agent_cap, ingest.cap)
    if own is None:
        return bounds.ingest_cap
    return ingest_cap_for(replace(bounds.settings, ingest=replace(ingest, cap=own)), bounds.budget)


def _dropped(ingest: Ingest, tool: str) -> frozenset[str]:
    """Names of the fields to leave out of a tool's results."""
    wanted = {*ingest.include.get(ANY_TOOL, ()), *ingest.include.get(tool, ())}
    return frozenset({*ingest.drop_fields.get(ANY_TOOL, ()), *ingest.drop_fields.get(tool, ())} - wanted)
