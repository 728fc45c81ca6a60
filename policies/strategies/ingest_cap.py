"""``ingest_cap``: a single tool result above its cap keeps its beginning and its end."""

import json

from policies.draft import MESSAGE_OVERHEAD, Bounds, Draft, Strategy, text_at
from policies.ledger import Edit, EditKind, PlannedMessage
from policies.limits import ingest_cap_for
from policies.messages import answered_calls
from policies.text.gist import without_fields
from policies.tokens import cap_text

ANY_TOOL = "*"


class IngestCap(Strategy):
    """A large result keeps its beginning and end, without the fields that the policy calls
    dispensable.

    What was sent in full before is shortened only in a batch, so that the sent prefix stays. What
    nobody has read may take more than its share where it can be left whole: there is room, or there
    would be after summarising what is older.
    """

    name = "ingest_cap"

    def apply(self, draft: Draft, bounds: Bounds) -> Draft:
        quiet = (
            bounds.layer.at == 0
            and not bounds.free_only
            and draft.tokens <= bounds.trigger * bounds.early
        )
        return cap_results(draft, bounds, new_only=quiet)


def cap_results(draft: Draft, bounds: Bounds, *, new_only: bool) -> Draft:
    transcript = draft.transcript
    ingest = bounds.settings.ingest
    first_new = transcript.head + bounds.known.length if new_only else 0
    steps = (
        [step for step in transcript.steps if step.stop > first_new] if ingest.is_particular else []
    )
    calls = answered_calls(transcript, steps)
    found = [
        (p.index, p)
        for p in draft.pieces
        if p.index is not None and p.index >= first_new and transcript.messages[p.index].is_result
    ]
    unread = {i: p.tokens for i, p in found if new_only or i in bounds.protection.active}
    # where the unread result fits next to what stays, older content makes room
    has_room = (
        draft.tokens <= bounds.trigger or bounds.fixed + sum(unread.values()) <= bounds.hard_limit
    )
    edits: dict[int, Edit] = {}
    for index, piece in found:
        if (
            piece.text is None
            and index not in bounds.protection.pinned
            and not transcript.messages[index].media
        ):
            whole = has_room and index in unread and not ingest.from_start
            edit = _capped(
                bounds, piece, index, calls[index].name if index in calls else "", whole=whole
            )
            edits |= {index: edit} if edit is not None else {}
    return draft.with_edits(edits)


def _capped(
    bounds: Bounds, piece: PlannedMessage, index: int, tool: str, *, whole: bool
) -> Edit | None:
    """The edit that brings one result to its cap, None for a result that may stay as it is."""
    ingest = bounds.settings.ingest
    ref = bounds.transcript.messages[index].ref
    cap = _cap(bounds, tool, whole=whole)
    wanted = {*ingest.include.get(ANY_TOOL, ()), *ingest.include.get(tool, ())}
    names = {*ingest.drop_fields.get(ANY_TOOL, ()), *ingest.drop_fields.get(tool, ())} - wanted
    if piece.tokens <= cap and not names:
        return None
    counter = bounds.counter
    trimmed, found = without_fields(text_at(bounds, index), names)
    # the missing fields are named where that is worth its tokens
    named = "\n" + json.dumps({"left_out": list(found), "ref": ref}, ensure_ascii=False)
    for line in (named, "") if found else ("",):
        shown = f"{trimmed}{line}"
        if counter.count(shown) > cap - MESSAGE_OVERHEAD:
            shown = cap_text(
                trimmed,
                cap - MESSAGE_OVERHEAD,
                counter=counter,
                ref=ref,
                method=ingest.method,
                whole=not found,
            )
        edit = bounds.edited(index, shown, EditKind.INGEST_CAP)
        if edit.tokens < piece.tokens:
            return edit
    return None


def _cap(bounds: Bounds, tool: str, *, whole: bool) -> int:
    """The largest result of a tool in tokens, framing included: its own cap within what its share
    and bucket allow.
    """
    ingest = bounds.settings.ingest
    own = ingest.tools.get(tool)
    if own is None and tool in ingest.sub_agents:
        own = min(ingest.sub_agents[tool], ingest.cap)
    return ingest_cap_for(bounds.settings, bounds.budget, whole=whole, own=own)
