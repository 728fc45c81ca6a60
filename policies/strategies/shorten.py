"""A part of a message's content stays.

``ingest_cap``        a single tool result above its cap keeps its beginning and its end
``truncate_largest``  the largest results lose their middle, the largest first, until the rest fits
:func:`clip`          the last rung: the middle of the newest messages, because the newest is never removed
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from policies.draft import MESSAGE_OVERHEAD, Bounds, Draft
from policies.ledger import SHORTENED, Edit, EditKind, PlannedMessage
from policies.limits import ingest_cap_for
from policies.messages import ToolCall, answered_calls
from policies.settings import Ingest
from policies.strategies.base import (
    NO_SUMMARIZER,
    Strategy,
    clipped,
    flag,
    is_condensed,
    is_original,
    results,
    whole,
)
from policies.text.gist import without_fields
from policies.tokens import cap_text

ANY_TOOL = "*"
MIN_CLIPPED_TOKENS = 64
SLACK = 8
RESULT_WEIGHT = 2
MIN_CLIPPED_SHARE = 0.5
MAX_STANDING = 0.6  # of what may be used: a protected message above it leaves no room to work in
STANDING_KEPT = 0.45
MIN_CUT_AGAIN = 0.2
NOT_SUMMARISED = "not_summarised"


class IngestCap(Strategy):
    """A large result keeps its beginning and end, without the fields that the policy calls dispensable.

    What was sent in full before is shortened only in a batch, so that the sent prefix stays.
    """

    name = "ingest_cap"

    def apply(self, draft: Draft, bounds: Bounds) -> Draft:
        quiet = bounds.layer.at == 0 and not bounds.free_only and draft.tokens <= bounds.trigger * bounds.early
        return cap_results(draft, bounds, new_only=quiet)


def cap_results(draft: Draft, bounds: Bounds, *, new_only: bool) -> Draft:
    transcript, ingest = draft.transcript, bounds.settings.ingest
    first_new = transcript.head + bounds.known.length if new_only else 0
    calls: Mapping[int, ToolCall] = {}
    if ingest.is_particular:
        calls = answered_calls(bounds.transcript, [step for step in bounds.steps if step.stop > first_new])
    edits: dict[int, Edit] = {}
    for piece in draft.pieces:
        index = piece.index
        if index is None or index < first_new or piece.text is not None:
            continue
        message = transcript.messages[index]
        if message.is_result and index not in bounds.protection.pinned and not message.media:
            edit = _capped(bounds, piece, index, calls[index].name if index in calls else "")
            edits |= {index: edit} if edit is not None else {}
    return draft.with_edits(edits)


def _capped(bounds: Bounds, piece: PlannedMessage, index: int, tool: str) -> Edit | None:
    """The edit that brings one result to its cap, None for a result that may stay as it is."""
    ingest, ref = bounds.settings.ingest, bounds.transcript.messages[index].ref
    cap, names = _cap(bounds, tool), _dropped(ingest, tool)
    if piece.tokens <= cap and not names:
        return None
    counter = bounds.counter
    trimmed, found = without_fields(bounds.transcript.read(index).text, names)
    # which fields are missing is said where that is worth its tokens
    named = "\n" + json.dumps({"left_out": list(found), "ref": ref}, ensure_ascii=False)
    for line in (named, "") if found else ("",):
        shown = f"{trimmed}{line}"
        if counter.count(shown) > cap - MESSAGE_OVERHEAD:
            shown = cap_text(
                trimmed, cap - MESSAGE_OVERHEAD, counter=counter, ref=ref, method=ingest.method, whole=not found
            )
        edit = bounds.edited(index, shown, EditKind.INGEST_CAP)
        if edit.tokens < piece.tokens:
            return edit
    return None


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
    wanted = {*ingest.include.get(ANY_TOOL, ()), *ingest.include.get(tool, ())}
    return frozenset({*ingest.drop_fields.get(ANY_TOOL, ()), *ingest.drop_fields.get(tool, ())} - wanted)


@dataclass(frozen=True, slots=True, kw_only=True)
class TruncateLargest(Strategy):
    """The largest results lose their middle, down to ``floor`` tokens, until the rest fits.

    With ``truncate_after_summary`` what was put in shorter words is cut first: its finding was read out of the whole
    before.
    """

    name = "truncate_largest"
    floor: int = whole(200, least=1)
    truncate_after_summary: bool = flag()

    def apply(self, draft: Draft, bounds: Bounds) -> Draft:
        if not self.truncate_after_summary:
            return self._shrunk(draft, bounds, lambda piece: piece.text is None or piece.kind in SHORTENED)
        shrunk = self._shrunk(draft, bounds, is_condensed)
        if shrunk.tokens <= bounds.target or bounds.free_only:
            return shrunk
        rest = self._shrunk(shrunk, bounds, is_original)
        if rest is shrunk:
            return shrunk
        return rest.with_reason(NO_SUMMARIZER if bounds.settings.summarizer is None else NOT_SUMMARISED)

    def _shrunk(self, draft: Draft, bounds: Bounds, may: Callable[[PlannedMessage], bool]) -> Draft:
        floor, excess = max(1, self.floor), draft.tokens - bounds.target
        found = [(i, p) for i, p, _ in results(draft, bounds) if p.tokens > floor and may(p)]
        edits: dict[int, Edit] = {}
        for index, piece in sorted(found, key=lambda f: (-f[1].tokens, f[0])):
            if excess <= 0:
                break
            edit = _cut(bounds, index, piece, allowed=max(floor, piece.tokens - excess), floor=floor)
            if edit is not None:
                edits[index] = edit
                excess -= piece.tokens - edit.tokens
        return draft.with_edits({index: edits[index] for index in sorted(edits)})


def _cut(bounds: Bounds, index: int, piece: PlannedMessage, *, allowed: int, floor: int) -> Edit | None:
    """The edit that brings one result down to ``allowed`` tokens; None where it does not pay.

    An original is cut anew from all of it, a text in shorter words as it is.
    """
    most = piece.tokens - 1 if piece.text is None else int(piece.tokens * (1 - MIN_CUT_AGAIN))
    if most < floor:
        return None
    text = piece.text if piece.text is not None and is_condensed(piece) else bounds.transcript.read(index).text
    edit = clipped(bounds, index, min(allowed, most), EditKind.TRUNCATE, text=text)
    return edit if edit.tokens <= most and edit.text != text else None


def clip(draft: Draft, bounds: Bounds, *, target: int) -> Draft:
    """The draft with the largest of its newest results, the newest user message or the task cut to fit ``target``.

    A result counts twice its size in the order, since it can be asked for again.
    """
    for piece in _clippable(draft, bounds):
        index, excess = piece.index or 0, draft.tokens - target
        if excess <= 0:
            break
        allowed = piece.tokens - excess - SLACK
        if (
            index not in bounds.protection.active
        ):  # it stays for good: without room for what follows it is cut every time
            allowed = min(allowed, int(piece.tokens * (1 - MIN_CLIPPED_SHARE)))
        draft = _with_clipped(draft, bounds, piece, max(MIN_CLIPPED_TOKENS, allowed))
    return draft


def shorten_standing(draft: Draft, bounds: Bounds) -> Draft:
    """The draft with a user message that takes most of the window cut to less than half of it.

    Protected word for word it leaves no room for the steps that follow: every one of them would be a batch.
    """
    usable, protection = bounds.budget.soft_limit, bounds.protection
    for piece in draft.pieces:
        index = piece.index
        if index is None or index not in (protection.task, protection.current) or index in protection.active:
            continue
        if piece.tokens > MAX_STANDING * usable and not draft.transcript.messages[index].keep:
            draft = _with_clipped(draft, bounds, piece, int(STANDING_KEPT * usable))
    return draft


def _with_clipped(draft: Draft, bounds: Bounds, piece: PlannedMessage, allowed: int) -> Draft:
    index = piece.index or 0
    if draft.transcript.messages[index].media or allowed >= piece.tokens:
        return draft
    edit = clipped(bounds, index, allowed, EditKind.CLIP)
    return draft.with_edits({index: edit}) if edit.tokens < piece.tokens else draft


def _clippable(draft: Draft, bounds: Bounds) -> Iterator[PlannedMessage]:
    messages, protection = draft.transcript.messages, bounds.protection
    newest = {i for i in protection.active if messages[i].is_result or messages[i].role == "user"}
    newest |= {protection.current} if protection.current is not None else set()
    newest |= {protection.task} if protection.task is not None and protection.task not in protection.pinned else set()
    pieces = [(p.index, p) for p in draft.pieces if p.index is not None and p.index in newest]
    weights = {i: p.tokens * (RESULT_WEIGHT if messages[i].is_result else 1) for i, p in pieces}
    return (p for i, p in sorted(pieces, key=lambda each: (-weights[each[0]], each[0])))
