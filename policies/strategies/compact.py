"""Replacing older history by a summary: what code extracts, and beside it the notes of a model if one is set.

The result is head, task, pinned messages, summary, newest user message where it was covered, kept tail. The
tail is whole units from the end, worth a share of room; the newest step always stays, and stays whole unless it does
not fit beside the summary: then its tool results are cut in the middle to two thirds of what is left. The extract is
made anew from the originals at every batch, so nothing drifts; the summary's bytes are stored and never change between
batches.
"""

from dataclasses import replace

from policies.bounds import Bounds
from policies.checkpoint import Checkpoint
from policies.clipping import clip_middle
from policies.condensed import Condensed
from policies.draft import Draft
from policies.edits import MESSAGE_OVERHEAD, replace_content
from policies.effects import BEFORE_MODEL, Flow, Save, Saved
from policies.ledger import Cut, Edit, EditKind
from policies.messages import Body
from policies.narration import Told, may_ask, origin_of, tell, told_before
from policies.saving import occurs_in, previous_state, standing_lists
from policies.sources import sources_of
from policies.state import merge_states, read_state
from policies.summary import render_summary
from policies.tails import tail_start
from policies.text.extract import extract

SLACK = 8
LISTS = 0.25
"""Share of the extract that lists of what is to do, and notes, may take."""
CUT_STEP = 2 / 3
"""What a newest step that has to be cut may take of the room beside the summary, or low water: the rest is for the
next one."""
SMALLEST_STEP = 200
LEAST_EXTRACT = 0.4
"""What of its share the summary has where the newest step alone fills what a batch should leave."""


def compact(draft: Draft, bounds: Bounds, *, share: float = 1.0) -> Flow[Draft]:
    """The draft with everything before the kept tail replaced by a summary; unchanged if nothing can go.

    ``share`` scales what the summary and the tail may take, for a second, harder try, which asks no model.
    """
    head = draft.transcript.head
    start = tail_start(draft, bounds, int(share * bounds.shape.tail * bounds.room))
    covered = [i for i in range(head, start) if i not in bounds.protection.head]
    gone = [i for i in covered if i not in bounds.protection.verbatim]
    if not gone:
        return draft
    budget = _extract_budget(draft, bounds, start, share)
    newest = _too_large_results(draft, bounds, room=_room_beside(bounds, budget))
    read, end = {*gone, *newest}, len(draft.transcript.messages)
    sources = sources_of(bounds.transcript, sorted(read), bounds.calls())
    current = bounds.protection.current
    asked = "" if current is None or current == bounds.protection.task else _read(bounds, current).text
    visible = [_read(bounds, i).text for i in range(head, end) if i not in read and (not asked or i != current)]
    state = read_state(
        sources,
        goal=_goal(bounds),
        previous=previous_state(bounds.known),
        tools=bounds.settings.notes,
        readings=bounds.readings,
    )
    lists = standing_lists(state, bounds, most=int(budget * LISTS), visible=visible)
    before = told_before(bounds, most=start - head)
    beside = _summary_overhead(draft, bounds) + _cost(lists, bounds) + _cost(before.text, bounds)
    made = extract(
        sources,
        max_tokens=max(0, budget - beside),
        counter=bounds.counter,
        goal=_goal(bounds),
        asked=asked,
        visible=visible,
        readings=bounds.readings,
    )
    state = replace(state, identifiers=made.identifiers)
    told, version = yield from _told(gone, bounds, state, before, covers=start - head, share=share)
    text = "\n".join(part for part in (lists, made.text) if part)
    cut = _cut(draft, bounds, start=start, gone=gone, extracted=text, told=told, version=version)
    checkpoint = merge_states(state, told.proposal, material=occurs_in(sources))
    checkpoint = replace(checkpoint, narrative=told.text, version=version)
    compacted = draft.with_cut(cut, checkpoint=checkpoint.to_json())
    compacted = compacted.with_condensed([_condensed(draft, gone, cut, told)])
    allowed = max(SMALLEST_STEP, int(_room_beside(bounds, cut.tokens) * max(CUT_STEP, bounds.shape.low_water)))
    return _cut_newest_step(compacted, bounds, newest, allowed=allowed)


def _told(
    gone: list[int], bounds: Bounds, checkpoint: Checkpoint, before: Told, *, covers: int, share: float
) -> Flow[tuple[Told, int]]:
    """The model's summary, and the version of the batch; the state is saved before a model is asked.

    Where nobody may wait for a model it is the note that was there before; the next one is taken in at the next batch.
    """
    version = bounds.known.next_version
    waits = bounds.settings.summaries.wait > 0
    if share < 1 or not waits or not may_ask(bounds) or before.origin == "prepared":
        return before, version
    saved = yield Save(checkpoint.to_json(), BEFORE_MODEL)
    version = saved.version + 1 if isinstance(saved, Saved) else version
    told = yield from tell(bounds, gone, before=before, key=bounds.transcript.chain[covers - 1].hex())
    return told, version


def _extract_budget(draft: Draft, bounds: Bounds, start: int, share: float) -> int:
    """Tokens of the summary: what the tail leaves of low water, within the shape's share of room."""
    most = share * bounds.shape.extract * bounds.room
    kept = bounds.protection.verbatim
    tail = sum(p.tokens for p in draft.pieces if p.index is not None and p.index >= start and p.index not in kept)
    left = share * bounds.shape.low_water * bounds.room - tail
    return min(int(min(most, max(left, LEAST_EXTRACT * most))), bounds.shape.extract_max)


def _summary_overhead(draft: Draft, bounds: Bounds) -> int:
    """Tokens of a summary message around its extract."""
    empty = render_summary("", version=10, ref="0" * 12, removed=len(draft.transcript.messages))
    return MESSAGE_OVERHEAD + bounds.counter.count(empty) + SLACK


def _room_beside(bounds: Bounds, summary: int) -> int:
    return bounds.trigger - bounds.fixed - summary


def _too_large_results(draft: Draft, bounds: Bounds, *, room: int) -> list[int]:
    """The newest step's tool results if together they take more than there is room: they will be cut in the middle."""
    tokens = {p.index: p.tokens for p in draft.pieces if p.index is not None}
    pinned, messages = bounds.protection.pinned, draft.transcript.messages
    results = [i for i in bounds.protection.active if messages[i].is_result and i not in pinned]
    return sorted(results) if sum(tokens[i] for i in results) > room else []


def _read(bounds: Bounds, index: int) -> Body:
    return bounds.transcript.read(index)


def _goal(bounds: Bounds) -> str:
    task = bounds.protection.task
    return "" if task is None else _read(bounds, task).text


def _condensed(draft: Draft, gone: list[int], cut: Cut, told: Told) -> Condensed:
    """What became of the summary before and what is newly taken out: tokens, the prompt, how many questions."""
    transcript, earlier = draft.transcript, draft.active_cut
    first = transcript.head + earlier.covers if earlier is not None else 0
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


def _cost(text: str, bounds: Bounds) -> int:
    return bounds.counter.count(text) + 1 if text else 0


def _cut(draft: Draft, bounds: Bounds, *, start: int, gone: list[int], extracted: str, told: Told, version: int) -> Cut:
    transcript, head = draft.transcript, draft.transcript.head
    prefix = transcript.chain[start - head - 1]
    hidden = set(gone)
    before, after = bounds.sides([i for i in range(head, start) if i not in hidden])
    ref = prefix.hex()[:12]
    text = render_summary(extracted, narrative=told.text, version=version, ref=ref, removed=len(gone))
    return Cut(
        covers=start - head,
        prefix=prefix,
        text=text,
        tokens=MESSAGE_OVERHEAD + bounds.counter.count(text),
        version=version,
        ref=ref,
        before=before,
        after=after,
        origin=origin_of(told, earlier=draft.cut),
        narrative=told.text,
        noted=told.covers,
    )


def _cut_newest_step(draft: Draft, bounds: Bounds, results: list[int], *, allowed: int) -> Draft:
    """The draft with these tool results cut in the middle; what small ones leave over, larger ones may take."""
    tokens = {p.index: p.tokens for p in draft.pieces if p.index is not None}
    messages = draft.transcript.messages
    edits: dict[int, Edit] = {}
    for number, index in enumerate(sorted(results, key=lambda i: (tokens[i], i))):
        each = allowed // (len(results) - number)
        allowed -= min(tokens[index], each)
        if tokens[index] <= each or messages[index].media:
            continue
        ref = messages[index].ref
        text = clip_middle(_read(bounds, index).text, each - MESSAGE_OVERHEAD, counter=bounds.counter, ref=ref)
        edit = replace_content(draft.transcript, index, text, kind=EditKind.INGEST_CAP, counter=bounds.counter)
        if edit.tokens < tokens[index]:
            edits[index] = edit
    return draft.with_edits(edits)
