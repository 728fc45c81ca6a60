"""Something goes with a note about it at the most: a part of a message's content, or whole units of messages.

``ingest_cap``        a single tool result above its cap keeps its beginning and its end
``truncate_largest``  the largest results lose their middle, all down to one size at which the rest fits
``window``            the newest messages or turns stay, what is older goes without a summary
``drop_oldest``       the oldest units go with a note: a layer of its own, and the rung where nothing cleverer fits
``custom``            an operator's own function decides which messages stay
:func:`clip`          the last rung: the middle of the newest messages, because the newest is never removed

Units go whole, so that no result loses its call. Head, task, pinned messages and the newest step stay wherever they
stand. A summary that is passed over stays in front of what is left: it is all that is left of what it replaced.
"""

import json
import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from policies.draft import (
    MESSAGE_OVERHEAD,
    NO_SUMMARIZER,
    Bounds,
    Draft,
    Strategy,
    broken_rules,
    clipped,
    cut_at,
    flag,
    is_condensed,
    is_original,
    number,
    ref_at,
    results,
    text_at,
    whole,
    word,
)
from policies.effects import Flow, Kept, Trim, Trimmed
from policies.ledger import SHORTENED, Edit, EditKind, PlannedMessage
from policies.limits import ingest_cap_for
from policies.messages import answered_calls, parse_turn_boundaries
from policies.text.gist import without_fields
from policies.tokens import cap_text, clip_growing

ANY_TOOL = "*"
MIN_CLIPPED_TOKENS = 64
SLACK = 8
RESULT_WEIGHT = 2
MOST_THAT_STAYS = 0.5
MIN_CUT_AGAIN = 0.2
GRID = 64
"""Parts of the window in which the room of a user's message is counted: a slightly other estimate moves no cut."""
MOST_LEFT = 0.75
"""Low water for a user's message at the most: a batch is worth the prefix that it costs."""
NOT_SUMMARISED = "not_summarised"


class IngestCap(Strategy):
    """A large result keeps its beginning and end, without the fields that the policy calls dispensable.

    What was sent in full before is shortened only in a batch, so that the sent prefix stays. What nobody has read may
    take more than its share where it can be left whole: there is room, or there is beside a summary of what is older.
    """

    name = "ingest_cap"

    def apply(self, draft: Draft, bounds: Bounds) -> Draft:
        quiet = bounds.layer.at == 0 and not bounds.free_only and draft.tokens <= bounds.trigger * bounds.early
        return cap_results(draft, bounds, new_only=quiet)


def cap_results(draft: Draft, bounds: Bounds, *, new_only: bool) -> Draft:
    transcript, ingest = draft.transcript, bounds.settings.ingest
    first_new = transcript.head + bounds.known.length if new_only else 0
    steps = [step for step in transcript.steps if step.stop > first_new] if ingest.is_particular else []
    calls = answered_calls(transcript, steps)
    found = [
        (p.index, p)
        for p in draft.pieces
        if p.index is not None and p.index >= first_new and transcript.messages[p.index].is_result
    ]
    unread = {i: p.tokens for i, p in found if new_only or i in bounds.protection.active}
    # where what is unread fits beside what stays, what is older makes way
    has_room = draft.tokens <= bounds.trigger or bounds.fixed + sum(unread.values()) <= bounds.hard_limit
    edits: dict[int, Edit] = {}
    for index, piece in found:
        if piece.text is None and index not in bounds.protection.pinned and not transcript.messages[index].media:
            whole = has_room and index in unread and not ingest.from_start
            edit = _capped(bounds, piece, index, calls[index].name if index in calls else "", whole=whole)
            edits |= {index: edit} if edit is not None else {}
    return draft.with_edits(edits)


def _capped(bounds: Bounds, piece: PlannedMessage, index: int, tool: str, *, whole: bool) -> Edit | None:
    """The edit that brings one result to its cap, None for a result that may stay as it is."""
    ingest, ref = bounds.settings.ingest, bounds.transcript.messages[index].ref
    cap, wanted = _cap(bounds, tool, whole=whole), {*ingest.include.get(ANY_TOOL, ()), *ingest.include.get(tool, ())}
    names = {*ingest.drop_fields.get(ANY_TOOL, ()), *ingest.drop_fields.get(tool, ())} - wanted
    if piece.tokens <= cap and not names:
        return None
    counter = bounds.counter
    trimmed, found = without_fields(text_at(bounds, index), names)
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


def _cap(bounds: Bounds, tool: str, *, whole: bool) -> int:
    """The largest result of a tool in tokens, framing included: its own cap within what its share and bucket allow."""
    ingest = bounds.settings.ingest
    own = ingest.tools.get(tool)
    if own is None and tool in ingest.sub_agents:
        own = min(ingest.sub_agents[tool], ingest.cap)
    return ingest_cap_for(bounds.settings, bounds.budget, whole=whole, own=own)


@dataclass(frozen=True, slots=True, kw_only=True)
class TruncateLargest(Strategy):
    """The largest results lose their middle, all down to one size at which the rest fits, ``floor`` tokens at least.

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
        return replace(rest, reason=NO_SUMMARIZER if bounds.settings.summarizer is None else NOT_SUMMARISED)

    def _shrunk(self, draft: Draft, bounds: Bounds, may: Callable[[PlannedMessage], bool]) -> Draft:
        floor = max(1, self.floor)
        excess = draft.tokens - bounds.target
        found = [(i, p) for i, p, _ in results(draft, bounds) if p.tokens > floor and may(p)]
        found.sort(key=lambda each: (-each[1].tokens, each[0]))
        edits: dict[int, Edit] = {}
        while excess > 0 and found:  # again where some that are larger could not be cut
            size = max(floor, _level([piece.tokens for _, piece in found], excess))
            larger = [each for each in found if each[1].tokens > size]
            found = found[len(larger) :]
            for index, piece in larger:
                edit = _cut(bounds, index, piece, allowed=size, floor=floor) if excess > 0 else None
                if edit is not None:
                    edits[index] = edit
                    excess -= piece.tokens - edit.tokens
        return draft.with_edits({index: edits[index] for index in sorted(edits)})


def _level(sizes: Sequence[int], excess: int) -> int:
    """The size down to which the largest of ``sizes``, in falling order, have to come to save ``excess`` together."""
    saved = 0
    for count, (size, following) in enumerate(zip(sizes, (*sizes[1:], 0), strict=True), start=1):
        more = count * (size - following)
        if saved + more >= excess:
            return size - math.ceil((excess - saved) / count)
        saved += more
    return 0


def _cut(bounds: Bounds, index: int, piece: PlannedMessage, *, allowed: int, floor: int) -> Edit | None:
    """The edit that brings one result down to ``allowed`` tokens; None where it does not pay.

    An original is cut anew from all of it, a text in shorter words as it is.
    """
    most = piece.tokens - 1 if piece.text is None else int(piece.tokens * (1 - MIN_CUT_AGAIN))
    if most < floor:
        return None
    text = piece.text if piece.text is not None and is_condensed(piece) else text_at(bounds, index)
    edit = clipped(bounds, index, min(allowed, most), EditKind.TRUNCATE, text=text)
    return edit if edit.tokens <= most and edit.text != text else None


def clip(draft: Draft, bounds: Bounds, *, target: int) -> Draft:
    """The draft with the largest of its newest results, or a user's message that no window could hold, cut to fit
    ``target``.

    A result counts twice its size in the order, since it can be asked for again. A user's message may be one that its
    client sends again with more behind it: its cut moves in batches, down to low water.
    """
    edits = dict[int, Edit]()
    tokens = draft.tokens
    for piece in _clippable(draft, bounds):
        index = piece.index or 0
        excess = tokens - target
        crowds = _crowds(piece, bounds)
        if excess <= 0 and not crowds:
            continue
        allowed = piece.tokens - excess - SLACK
        if crowds:
            allowed = min(allowed, int(MOST_THAT_STAYS * bounds.safe_limit))
        edit = _clipped(draft, bounds, piece, max(MIN_CLIPPED_TOKENS, allowed))
        if edit is not None:
            edits[index] = edit
            tokens -= piece.tokens - edit.tokens
    return draft.with_edits(edits)


def is_clip_due(draft: Draft, bounds: Bounds) -> bool:
    """Whether the draft is too large, or a message that had to be cut leaves no room for what follows it."""
    return draft.tokens > bounds.hard_limit or any(_crowds(piece, bounds) for piece in _clippable(draft, bounds))


def _crowds(piece: PlannedMessage, bounds: Bounds) -> bool:
    """Whether a message stays that takes most of the window: every later step would be a batch."""
    return piece.index not in bounds.protection.active and piece.tokens > MOST_THAT_STAYS * bounds.safe_limit


def _clipped(draft: Draft, bounds: Bounds, piece: PlannedMessage, allowed: int) -> Edit | None:
    index, messages = piece.index or 0, draft.transcript.messages
    if allowed >= piece.tokens or (messages[index].media and not messages[index].is_result):
        return None
    body = bounds.transcript.read(index)
    if messages[index].is_result or body.data or body.attached:
        edit = clipped(bounds, index, allowed, EditKind.CLIP)
    else:
        most = allowed - allowed % max(1, bounds.budget.window // GRID)
        batch = 1 - min(bounds.shape.low_water, MOST_LEFT)
        own = clip_growing(body.text, most - MESSAGE_OVERHEAD, batch=batch, counter=bounds.counter)
        edit = bounds.edited(index, own, EditKind.CLIP)
    return edit if edit.tokens < piece.tokens else None


def _clippable(draft: Draft, bounds: Bounds) -> Iterator[PlannedMessage]:
    messages = draft.transcript.messages
    newest = clippable(draft, bounds)
    pieces = [(p.index, p) for p in draft.pieces if p.index is not None and p.index in newest]
    weights = {i: p.tokens * (RESULT_WEIGHT if messages[i].is_result else 1) for i, p in pieces}
    return (p for i, p in sorted(pieces, key=lambda each: (-weights[each[0]], each[0])))


def clippable(draft: Draft, bounds: Bounds) -> set[int]:
    """The indices of what may be cut before a request is refused: results that no model has read, and what a user says
    only where the one message is larger than all that fits."""
    messages = draft.transcript.messages
    protection = bounds.protection
    users = {i for i in protection.active if messages[i].role == "user"}
    users |= {i for i in protection.standing if i == protection.current or i not in protection.pinned}
    too_large = {i for i in users if messages[i].tokens > bounds.refused_above}
    return {i for i in protection.active if messages[i].is_result} | too_large


NOTE_BEGINS = "[weir: "
OUTSIDE = NOTE_BEGINS + "{count} earlier messages are outside the window; archived as {ref}]"
REMOVED = NOTE_BEGINS + "{count} earlier messages were removed to fit the context window; archived as {ref}]"
OWN_WORDS = frozenset(
    {EditKind.REASONING, EditKind.MEDIA}
)  # without thinking or media a message still says what it said


@dataclass(frozen=True, slots=True, kw_only=True)
class Window(Strategy):
    """A window that slides: the newest ``messages`` or ``turns`` stay; ``note`` leaves a line about what is missing.

    A model's notes are not carried on, so that the next ones tell of what went without them too.
    """

    name = "window"
    messages: int = whole(20, least=1)
    turns: int = whole(0, least=1)
    note: bool = flag()

    def apply(self, draft: Draft, bounds: Bounds) -> Draft:
        start, head, active = self._start(draft, bounds), draft.transcript.head, draft.active_cut
        if start <= (head if active is None else draft.transcript.after(active.covers)):
            return draft
        stays = _stays(draft, bounds, start)
        if all(p.index in stays for p in draft.pieces if p.index is not None and head <= p.index < start):
            return draft
        text = active.text if active is not None and not active.text.startswith(NOTE_BEGINS) else ""
        if not text and self.note:
            text = OUTSIDE.format(count=start - head - len(stays), ref=ref_at(draft, start))
        cut = cut_at(draft, bounds, start, stays=sorted(stays), text=text, origin="sliding_window")
        carried = draft.checkpoint if draft.cut is not None and cut.text == draft.cut.text else None
        slid = draft.with_cut(cut, checkpoint=carried)
        return slid if slid.tokens < draft.tokens else draft

    def _start(self, draft: Draft, bounds: Bounds) -> int:
        messages, head = draft.transcript.messages, draft.transcript.head
        units = tuple(unit.start for unit in bounds.transcript.steps)
        if self.turns > 0:
            turns = parse_turn_boundaries(messages)
            edges = turns if len(turns) > 1 else units
            return edges[-self.turns] if len(edges) > self.turns else head
        given = ((p.index, p) for p in draft.pieces if p.index is not None)
        inside = [i for i, p in given if not messages[i].is_head and bounds.in_scope(draft, p)]
        newest = max(1, self.messages)
        return head if len(inside) <= newest else units[bisect_right(units, inside[-newest]) - 1]


def _stays(draft: Draft, bounds: Bounds, start: int) -> set[int]:
    stays = {i for i in bounds.protection.all if draft.transcript.head <= i < start}
    if bounds.layer.scope == "total":
        return stays
    pieces = {p.index: p for p in draft.pieces if p.index is not None}
    for unit in bounds.transcript.steps:
        present = [i for i in unit.indices if i in pieces]
        if unit.start < start and not any(bounds.in_scope(draft, pieces[i]) for i in present):
            stays.update(present)
    return stays


@dataclass(frozen=True, slots=True, kw_only=True)
class DropOldest(Strategy):
    """The oldest units go with a note, as many as it takes to reach the layer's target.

    At the least ``fraction`` of the turns goes, rounded up; the ``recent`` newest messages and system messages stay. As
    the last rung it drops a summary with what that stands for; as a layer it keeps one and adds the note to it.
    """

    name = "drop_oldest"
    fraction: float = number(0.0, most=1)
    recent: int = whole(0)
    keep_system: bool = flag()

    def apply(self, draft: Draft, bounds: Bounds) -> Draft:
        head, active, is_layer = draft.transcript.head, draft.active_cut, bool(bounds.layer.strategy)
        excess = draft.tokens - bounds.target
        if excess <= 0:
            return draft
        carried = _summary(draft) if is_layer else ""
        longest = REMOVED.format(count=len(draft.transcript.messages), ref="0" * 12)
        excess += MESSAGE_OVERHEAD + bounds.counter.count(_under(carried, longest))
        begin = head
        if active is not None:
            excess -= active.tokens
            begin = draft.transcript.after(active.covers)
        start, spared = self._reach(draft, bounds, begin, excess)
        if start == head or (carried and start == begin):
            return draft
        stays = [i for i in range(head, start) if i in spared]
        note = REMOVED.format(count=start - head - len(stays), ref=ref_at(draft, start))
        # a layer carries no notes of a model on, so that the next ones tell of what it drops too
        narrative = active.narrative if active is not None and not is_layer else ""
        text = _under(carried, note)
        cut = cut_at(draft, bounds, start, stays=stays, text=text, origin="drop_oldest", narrative=narrative)
        dropped = draft.with_cut(cut)
        return dropped if dropped.tokens < draft.tokens else draft

    def _reach(self, draft: Draft, bounds: Bounds, begin: int, excess: int) -> tuple[int, set[int]]:
        worth = {p.index: p.tokens for p in draft.pieces if p.index is not None and bounds.in_scope(draft, p)}
        least, start, spared = self._least(bounds, begin), begin, set(bounds.protection.all)
        last = len(bounds.transcript.messages) - max(0, self.recent)
        for unit in bounds.transcript.steps[:-1]:
            if unit.start < begin:
                continue
            if unit.stop > last or (excess <= 0 and unit.start >= least):
                break
            if not any(i in worth for i in unit.indices):
                spared.update(unit.indices)
            excess -= sum(worth.get(i, 0) for i in unit.indices if i not in spared)
            start = unit.stop
        return start, spared

    def _least(self, bounds: Bounds, begin: int) -> int:
        """The index up to which ``fraction`` of what begins at ``begin`` reaches; ``begin`` without one."""
        turns = [start for start in parse_turn_boundaries(bounds.transcript.messages) if start >= begin]
        edges = turns if len(turns) > 1 else [unit.start for unit in bounds.transcript.steps if unit.start >= begin]
        if not edges or self.fraction <= 0:
            return begin
        return edges[min(math.ceil(round(self.fraction * len(edges), 6)), len(edges) - 1)]


def _summary(draft: Draft) -> str:
    text = "" if draft.active_cut is None else draft.active_cut.text
    before, _, line = text.rpartition("\n")
    return before if line.startswith(NOTE_BEGINS) else text


def _under(summary: str, note: str) -> str:
    return f"{summary}\n{note}" if summary else note


@dataclass(frozen=True, slots=True, kw_only=True)
class Custom(Strategy):
    """The function at ``path`` (``module:function``) has ``seconds`` to say what of the array stays.

    What is protected stays; an answer that an upstream would reject, or that saves nothing, changes nothing.
    """

    name = "custom"
    path: str = word()
    seconds: float = number(0.5)

    def run(self, draft: Draft, bounds: Bounds) -> Flow[Draft]:
        if not self.path or draft.tokens <= bounds.target:
            return draft
        given = [p for p in draft.pieces if p.index is not None]
        others, guarded = draft.tokens - sum(p.tokens for p in given), bounds.protection.all
        reply = yield Trim(
            path=self.path,
            indices=tuple(p.index for p in given if p.index is not None),
            max_tokens=max(0, bounds.target - others),
            seconds=self.seconds,
            texts=tuple(None if p.kind in OWN_WORDS else p.text for p in given),
            tokens=tuple(p.tokens for p in given),
            protected=tuple(p.index in guarded for p in given),
        )
        if not isinstance(reply, Trimmed) or not _is_selection(reply.messages, given):
            return draft
        trimmed = _without_dropped(_with_texts(draft, bounds, reply.messages), bounds, reply.messages)
        return trimmed if trimmed.tokens < draft.tokens and not broken_rules(trimmed) else draft


def _is_selection(messages: Sequence[Kept], given: Sequence[PlannedMessage]) -> bool:
    known = {p.index for p in given}
    return all(m.index in known for m in messages) and all(a.index < b.index for a, b in pairwise(messages))


def _with_texts(draft: Draft, bounds: Bounds, messages: Sequence[Kept]) -> Draft:
    guarded, texts = bounds.protection.all, {p.index: p.text for p in draft.pieces}
    edits: dict[int, Edit] = {}
    for message in messages:
        if message.text is not None and message.index not in guarded and message.text != texts[message.index]:
            edits[message.index] = bounds.edited(message.index, message.text, EditKind.CUSTOM)
    return draft.with_edits(edits)


def _without_dropped(draft: Draft, bounds: Bounds, messages: Sequence[Kept]) -> Draft:
    head, active = draft.transcript.head, draft.active_cut
    kept = bounds.protection.all | {m.index for m in messages}
    present = [p.index for p in draft.pieces if p.index is not None]
    dropped = [i for i in present if i not in kept]
    if not dropped:
        return draft
    start = max(max(dropped) + 1, draft.transcript.after(active.covers) if active is not None else 0)
    text, narrative = (active.text, active.narrative) if active is not None else ("", "")
    stays = [i for i in present if head <= i < start and i in kept]
    cut = cut_at(draft, bounds, start, stays=stays, text=text, origin="custom", narrative=narrative)
    return draft.with_cut(cut, checkpoint=draft.checkpoint if draft.cut is not None else None)
