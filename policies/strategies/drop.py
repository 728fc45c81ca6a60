"""Messages go, whole units at a time, so that no result loses its call.

``window``       the newest messages or turns stay, what is older goes without a summary
``drop_oldest``  the oldest units go with a note: a layer of its own, and the rung where nothing cleverer fits
``custom``       an operator's own function decides which messages stay

Head, task, pinned messages and the newest step stay wherever they stand. A summary that is passed over stays in front
of what is left: it is all that is left of what it replaced.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from policies.draft import MESSAGE_OVERHEAD, Bounds, Draft, broken_rules
from policies.effects import Flow, Kept, Trim, Trimmed
from policies.ledger import Edit, EditKind, PlannedMessage
from policies.messages import parse_turn_boundaries
from policies.strategies.base import Strategy, cut_at, flag, number, ref_at, whole, word

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
        if start <= head + (active.covers if active is not None else 0):
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
        units = tuple(unit.start for unit in bounds.steps)
        if self.turns > 0:
            turns = parse_turn_boundaries(messages)
            edges = turns if len(turns) > 1 else units
            return edges[-self.turns] if len(edges) > self.turns else head
        given = ((p.index, p) for p in draft.pieces if p.index is not None)
        inside = [i for i, p in given if not messages[i].is_head and bounds.in_scope(draft, p)]
        newest = max(1, self.messages)
        return head if len(inside) <= newest else units[bisect_right(units, inside[-newest]) - 1]


def _stays(draft: Draft, bounds: Bounds, start: int) -> set[int]:
    head = draft.transcript.head
    stays = {i for i in bounds.protection.all if head <= i < start}
    if bounds.layer.scope == "total":
        return stays
    pieces = {p.index: p for p in draft.pieces if p.index is not None}
    for unit in bounds.steps:
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
            begin = head + active.covers
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
        for unit in bounds.steps[:-1]:
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
        edges = turns if len(turns) > 1 else [unit.start for unit in bounds.steps if unit.start >= begin]
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
    start = max(max(dropped) + 1, head + active.covers if active is not None else 0)
    text, narrative = (active.text, active.narrative) if active is not None else ("", "")
    stays = [i for i in present if head <= i < start and i in kept]
    cut = cut_at(draft, bounds, start, stays=stays, text=text, origin="custom", narrative=narrative)
    return draft.with_cut(cut, checkpoint=draft.checkpoint if draft.cut is not None else None)
