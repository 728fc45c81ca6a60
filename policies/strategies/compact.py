"""``compact``: older history becomes a summary: what code extracts, together with a model's notes
if one is set.

A model is called once a batch, or before one: what was prepared after an answer is valid wherever
the history that it covers is still there. :func:`stand_in` is the text of a compaction that the
client itself requested.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from policies.draft import (
    MESSAGE_OVERHEAD,
    Bounds,
    Draft,
    Strategy,
    clipped,
    cut_at,
    flag,
    number,
    whole,
    word,
)
from policies.effects import BEFORE_MODEL, Flow, Save, StateSaved
from policies.ledger import Condensed, Cut, Edit, EditKind, Status
from policies.limits import RECALL_TOOL
from policies.lines import indented
from policies.memory.checkpoint import Checkpoint
from policies.memory.notes import render_notes
from policies.memory.state import previous_state, read_state
from policies.messages import parse_turn_boundaries
from policies.summary.ask import condense, lines_of
from policies.summary.material import render_summary, way_back
from policies.text.extract import extract
from policies.text.segments import sources_of, voices

SLACK = 8
"""Additional tokens that a text may take within a fence."""


LISTS = 0.25
"""Share of the extract that to-do lists and notes may take."""


MIN_STEP = 200


MIN_EXTRACT = 0.5


MAX_EXTRACT = 64_000


NOTE_SHARE = 0.04


MIN_NOTE = 200
MAX_NOTE = 2_000


SMALL_WINDOW = 4_096
"""Tokens of a window up to which no model writes notes: all of its room is the extract's."""
"""The part of its share that the summary gets where the newest step alone fills what a batch should
leave.
"""


FEWEST_TURNS = 2  # fewer, and steps are counted instead: one user message may have sixty of them


STAND_IN = 0.25
MIN_STAND_IN = 500
"""The size of a whole conversation's summary: a share of the original, and the tokens that it may
always take.
"""


MIN_SUMMARY = 100
"""Minimum tokens of a useful summary, its heading included."""


MIN_ROOM = 2_000


MAX_LIST_LEN = 12


MAX_NOTES = 2_000
"""Tokens in a summary for the notes that tools and people took."""


@dataclass(frozen=True, slots=True)
class SummaryDraft:
    """A summary in words that covers the first ``covers`` messages after the head.

    ``origin`` says how it came about: ``previous``, ``prepared``, ``model``, or empty for none;
    ``failure`` why a model that was called gave nothing.
    """

    text: str = ""
    covers: int = 0
    origin: str = ""
    calls: int = 0
    failure: str = ""
    purpose: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compact(Strategy):
    """Everything before the kept tail becomes a summary.

    The tail is whole units from the end: ``keep_messages``, ``keep_turns``, what is left if
    ``evict_pct`` percent go, or else a share of room. The newest step always stays; only where it
    does not fit with the summary are its results cut. The extract is made anew from the originals
    at every batch, so that nothing drifts.
    """

    name = "compact"
    asks_model = costs = True
    keep_messages: int | None = whole(None)
    keep_turns: int | None = whole(None)
    evict_pct: float | None = number(None, most=100)
    prompt: str = word("structured", "handoff", "plain")
    prepared: bool = flag()

    def run(self, draft: Draft, bounds: Bounds, *, share: float = 1.0) -> Flow[Draft]:
        """The draft with a summary; ``share`` of the room is for what remains afterwards."""
        transcript = draft.transcript
        head = draft.transcript.head
        current = bounds.protection.current
        start = self.tail_start(draft, bounds, share=share)
        gone = [i for i in range(head, start) if i not in bounds.protection.verbatim]
        if not gone:
            return draft
        budget = _extract_budget(draft, bounds, start, share)
        newest = _too_large_results(draft, bounds, room=bounds.hard_limit - bounds.fixed - budget)
        cuts = _cuts(draft, bounds, newest, beside=budget)
        read = {*gone, *cuts}
        sources = sources_of(transcript, sorted(read), bounds.transcript.calls)
        goal = _own(bounds, bounds.protection.task)
        asked = "" if current == bounds.protection.task else _own(bounds, current)
        shown = [
            i
            for i in range(head, len(transcript.messages))
            if i not in read and (not asked or i != current)
        ]
        visible = [*(_text(bounds, i) for i in shown), *(edit.text for edit in cuts.values())]
        state = read_state(
            sources,
            goal=goal,
            previous=previous_state(bounds.known, sources),
            readings=bounds.readings,
        )
        bounds.announce("state")
        lists = standing_lists(state, bounds, most=int(budget * LISTS), visible=visible)
        before = known_summary(bounds, most=transcript.place(start))
        beside = (
            tokens_around(bounds, gone=len(gone))
            + _cost(lists, bounds)
            + _cost(before.text, bounds)
        )
        made = extract(
            sources,
            max_tokens=max(0, budget - beside),
            counter=bounds.counter,
            goal=goal,
            asked=asked,
            visible=visible,
            readings=bounds.readings,
        )
        bounds.announce("extract")
        state = replace(state, identifiers=made.identifiers)
        told, version = yield from _told(
            gone, bounds, state, before, covers=start - head, share=share
        )
        text = "\n".join(part for part in (lists, made.text) if part)
        cut = _summary_cut(
            draft, bounds, start=start, gone=gone, extracted=text, told=told, version=version
        )
        checkpoint = replace(state, narrative=told.text, version=version)
        bounds.announce("note")
        compacted = draft.with_cut(cut, checkpoint=checkpoint.to_json())
        compacted = compacted.with_condensed([_condensed(draft, gone, cut, told)])
        return compacted.with_edits(_cuts(compacted, bounds, newest, beside=cut.tokens))

    def tail_start(self, draft: Draft, bounds: Bounds, *, share: float = 1.0) -> int:
        """Index of the first message of the kept tail, always at a unit's start; the newest step is
        in it.
        """
        messages = draft.transcript.messages
        head = draft.transcript.head
        units = [unit.start for unit in bounds.transcript.steps]
        newest = min(bounds.protection.active, default=len(messages))
        if self.keep_messages is not None:  # rounded out to the unit that contains the first one
            wanted = len(messages) - self.keep_messages
            return min(newest, max((start for start in units if start <= wanted), default=head))
        if self.keep_turns is not None:
            turns = parse_turn_boundaries(messages)
            starts = turns if len(turns) >= FEWEST_TURNS else tuple(units)
            if self.keep_turns >= len(starts):
                return head
            return min(newest, starts[-self.keep_turns] if self.keep_turns else len(messages))
        if self.evict_pct is not None:  # rounded up to a unit
            wanted = head + math.ceil(round(self.evict_pct / 100 * (len(messages) - head), 6))
            return min(newest, *(start for start in units if start >= wanted), len(messages))
        return _tail_within(draft, bounds, newest, share)


def _tail_within(draft: Draft, bounds: Bounds, newest: int, share: float) -> int:
    """The shape's value; but all that fits of a user's turn that came after the known messages, as
    aider's files do.
    """
    tokens = draft.tokens_by_index()
    verbatim = bounds.protection.verbatim
    messages = draft.transcript.messages
    near = range(
        max(draft.transcript.head + (bounds.known.length or len(messages)), newest - 2), newest
    )
    came = max((i for i in near if messages[i].role == "user"), default=None)
    kept = 0
    start = newest
    for unit in reversed(bounds.transcript.steps):
        kept += sum(tokens.get(i, 0) for i in unit.indices if i not in verbatim)
        part = 1 - MIN_EXTRACT * bounds.shape.extract if unit.start == came else bounds.shape.tail
        too_much = kept > share * part * bounds.room or any(i not in tokens for i in unit.indices)
        if unit.start < newest and too_much:
            break
        start = min(start, unit.start)
    return start


def _told(
    gone: list[int],
    bounds: Bounds,
    checkpoint: Checkpoint,
    before: SummaryDraft,
    *,
    covers: int,
    share: float,
) -> Flow[tuple[SummaryDraft, int]]:
    """The model's summary and the version of the batch; the state is saved before a model is
    called.

    Where the request may not wait, it is the earlier note.
    """
    version = bounds.known.next_version
    waits = bounds.settings.summaries.wait > 0
    if share < 1 or not waits or not may_summarize(bounds) or before.origin == "prepared":
        return before, version
    saved = yield Save(checkpoint.to_json(), BEFORE_MODEL)
    version = saved.version + 1 if isinstance(saved, StateSaved) else version
    told = yield from summarize(
        bounds, gone, before=before, key=bounds.transcript.chain[covers - 1].hex()
    )
    return told, version


def _extract_budget(draft: Draft, bounds: Bounds, start: int, share: float) -> int:
    """Tokens of the summary: what the tail leaves of low water, within the shape's share of room.

    Where that is more than the limit leaves, what it leaves: a harder attempt would keep only a
    quarter.
    """
    most = share * bounds.shape.extract * bounds.room
    tail = sum(
        tokens
        for i, tokens in draft.tokens_by_index().items()
        if i >= start and i not in bounds.protection.verbatim
    )
    left = share * bounds.shape.low_water * bounds.room - tail
    wanted = min(int(min(most, max(left, MIN_EXTRACT * most))), MAX_EXTRACT)
    possible = bounds.safe_limit - bounds.fixed - tail
    return min(wanted, possible) if possible >= MIN_SUMMARY else wanted


def _cost(text: str, bounds: Bounds) -> int:
    return bounds.counter.count(text) + 1 if text else 0


def tokens_around(bounds: Bounds, *, gone: int) -> int:
    """Tokens of a summary in addition to its content."""
    least = render_summary("-", removed=gone, back=way_back_in(bounds))
    return MESSAGE_OVERHEAD + bounds.counter.count(least) + SLACK


def way_back_in(bounds: Bounds) -> str:
    tool = RECALL_TOOL if bounds.settings.recall.tool else ""
    return way_back(calls=bool(bounds.transcript.calls), tool=tool)


def _room_beside(bounds: Bounds, summary: int) -> int:
    return bounds.safe_limit - bounds.fixed - summary


def _too_large_results(draft: Draft, bounds: Bounds, *, room: int) -> list[int]:
    tokens = draft.tokens_by_index()
    pinned = bounds.protection.pinned
    messages = draft.transcript.messages
    found = [i for i in bounds.protection.active if messages[i].is_result and i not in pinned]
    return sorted(found) if sum(tokens[i] for i in found) > room else []


def _text(bounds: Bounds, index: int | None) -> str:
    return "" if index is None else bounds.transcript.read(index).whole


def _own(bounds: Bounds, index: int | None) -> str:
    return "" if index is None else voices(bounds.transcript.read(index), "user")[0]


def _condensed(draft: Draft, gone: Sequence[int], cut: Cut, told: SummaryDraft) -> Condensed:
    transcript = draft.transcript
    earlier = draft.active_cut
    first = transcript.after(earlier.covers) if earlier is not None else 0
    fresh = sum(transcript.messages[i].tokens for i in gone if i >= first)
    return Condensed(
        strategy="compact",
        original_tokens=fresh + (earlier.tokens if earlier is not None else 0),
        compressed_tokens=cut.tokens,
        calls=told.calls,
        purpose=told.purpose or "extract",
        ref=cut.ref,
        key=cut.prefix.hex(),
        failure=told.failure,
    )


def _summary_cut(
    draft: Draft,
    bounds: Bounds,
    *,
    start: int,
    gone: Sequence[int],
    extracted: str,
    told: SummaryDraft,
    version: int,
) -> Cut:
    hidden = set(gone)
    return cut_at(
        draft,
        bounds,
        start,
        stays=[i for i in range(draft.transcript.head, start) if i not in hidden],
        text=render_summary(
            extracted, narrative=told.text, removed=len(gone), back=way_back_in(bounds)
        ),
        origin=origin_of(told, earlier=draft.cut),
        version=version,
        narrative=told.text,
        noted=told.covers,
    )


def _cuts(draft: Draft, bounds: Bounds, found: list[int], *, beside: int) -> dict[int, Edit]:
    """The edits that cut these results next to a summary; what small ones leave over, larger ones
    may take.
    """
    tokens = draft.tokens_by_index()
    messages = draft.transcript.messages
    allowed = max(MIN_STEP, _room_beside(bounds, beside))
    edits: dict[int, Edit] = {}
    for place, index in enumerate(sorted(found, key=lambda i: (tokens[i], i))):
        each = allowed // (len(found) - place)
        allowed -= min(tokens[index], each)
        if tokens[index] > each and not messages[index].media:
            edit = clipped(bounds, index, each, EditKind.INGEST_CAP)
            edits |= {index: edit} if edit.tokens < tokens[index] else {}
    return edits


def stand_in(bounds: Bounds, shown: Sequence[int]) -> Flow[str]:
    transcript = bounds.transcript
    said = range(transcript.head, len(transcript.messages))
    gone = [i for i in said if i not in shown and transcript.messages[i].role != "system"]
    sources = sources_of(transcript, gone, bounds.transcript.calls)
    visible = [_text(bounds, i) for i in shown]
    task = bounds.protection.task
    newest = bounds.protection.current
    goal = _own(bounds, task)
    before = known_summary(bounds, most=len(transcript.chain))
    past = previous_state(bounds.known, sources)
    state = read_state(sources, goal=goal, previous=past, readings=bounds.readings)
    told = before
    if gone and may_summarize(bounds):
        told = yield from summarize(bounds, gone, before=before, key=transcript.chain[-1].hex())
    most = min(
        int(bounds.shape.extract * bounds.room), int(STAND_IN * sum(s.tokens for s in sources))
    )
    most = min(max(most, MIN_STAND_IN), MAX_EXTRACT)
    begins = (state.beside_goal() if task in shown else state).bootstrap(
        max_tokens=most // 2, counter=bounds.counter
    )
    made = extract(
        sources,
        max_tokens=max(0, most - _cost(begins, bounds)),
        counter=bounds.counter,
        goal=goal if task in shown else "",
        asked="" if newest == task else _own(bounds, newest),
        visible=(*visible, begins, told.text),
        readings=bounds.readings,
    )
    text = "\n".join(part for part in (begins, made.text) if part)
    return render_summary(text, narrative=told.text, removed=len(gone))


def known_summary(bounds: Bounds, *, most: int) -> SummaryDraft:
    """The newest summary in words that still holds and covers at most ``most`` messages; empty if
    there is none.
    """
    known = bounds.known
    is_there = bounds.transcript.begins_with
    best = SummaryDraft()
    for cut in known.cuts:
        if (
            cut.narrative
            and best.covers <= cut.noted
            and cut.covers <= most
            and is_there(cut.covers, cut.prefix)
        ):
            best = SummaryDraft(cut.narrative, cut.noted, "previous")
    ready = known.prepared
    if (
        ready is not None
        and best.covers < ready.covers <= most
        and is_there(ready.covers, ready.prefix)
    ):
        best = SummaryDraft(ready.text, ready.covers, "prepared", ready.calls, "", ready.purpose)
    return best


def may_summarize(bounds: Bounds) -> bool:
    settings = bounds.settings
    return (
        settings.summarizer is not None
        and bounds.budget.window > SMALL_WINDOW
        and bounds.room >= MIN_ROOM
    )


def summarize(
    bounds: Bounds, gone: Sequence[int], *, before: SummaryDraft, key: str
) -> Flow[SummaryDraft]:
    """A summary in words of ``gone`` that goes on from ``before``; ``before`` itself where the
    model gives none.
    """
    transcript = bounds.transcript
    fresh = [i for i in gone if transcript.place(i) >= before.covers] if before.text else list(gone)
    sources = sources_of(transcript, fresh, bounds.transcript.calls)
    lines = lines_of(sources)
    if not lines:
        return before
    named = bounds.layer.params.get("prompt")
    task = bounds.protection.task
    written = yield from condense(
        lines,
        prompt=named if isinstance(named, str) else "structured",
        previous=before.text,
        max_tokens=note_size(bounds),
        max_input=bounds.summarizer_input or bounds.budget.soft_limit,
        counter=bounds.counter,
        by_schema=True,
        key=key,
        beside=lines_of(sources_of(transcript, [task], {})) if task is not None else (),
    )
    if not written.text:
        return replace(before, calls=written.calls, failure=written.failure, purpose="")
    covers = transcript.place(max(gone)) + 1
    return SummaryDraft(written.text, covers, "model", written.calls, "", written.purpose)


def note_size(bounds: Bounds) -> int:
    return min(max(int(NOTE_SHARE * bounds.room), MIN_NOTE), MAX_NOTE)


def origin_of(told: SummaryDraft, *, earlier: Cut | None) -> str:
    if not told.text:
        return "extract"
    if told.origin == "model":
        return "model+extract"
    if told.origin == "prepared":
        return "prepared+extract"
    return (
        earlier.origin
        if earlier is not None and earlier.narrative == told.text
        else "previous+extract"
    )


def standing_lists(state: Checkpoint, bounds: Bounds, *, most: int, visible: Sequence[str]) -> str:
    """What is left to do and the notes that were taken, within ``most`` tokens, without what is
    visible anyway.
    """
    shown = "\n".join(visible)
    tasks = [
        f"- {'doing' if s.status is Status.IN_PROGRESS else 'TODO'}: {indented(s.text)}"
        for s in (*state.with_status(Status.IN_PROGRESS), *state.with_status(Status.PLANNED))
        if s.text not in shown
    ][:MAX_LIST_LEN]
    text = ""
    for line in ("Left to do:", *tasks) if tasks else ():
        grown = f"{text}\n{line}" if text else line
        if bounds.counter.count(grown) > most:
            break
        text = grown
    left = min(most - bounds.counter.count(text), MAX_NOTES)
    notes = [note for note in bounds.known.notes if note.text not in shown]
    said = (
        render_notes(notes, max_tokens=left, counter=bounds.counter) if notes and left > 0 else ""
    )
    return "\n".join(part for part in (text, said) if part)
