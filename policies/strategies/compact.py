"""Replacing older history by a summary: what code extracts, and beside it the notes of a model if one is set.

The result is head, task, pinned messages, summary, newest user message where it was covered, kept tail. The
tail is whole units from the end, worth a share of room; the newest step always stays, its tool results cut in
the middle where they would take more than a third of what is left. The extract is made anew from the
originals at every batch, so nothing drifts; the summary's bytes are stored and never change between batches.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

from policies.bounds import Bounds
from policies.clipping import clip_middle
from policies.draft import Draft
from policies.edits import MESSAGE_OVERHEAD, replace_content
from policies.effects import Flow
from policies.extract import Source, extract
from policies.ledger import Cut, Edit, EditKind
from policies.messages import Body, ToolCall
from policies.narrative import Line, Notes, take_notes
from policies.summary import render_summary
from policies.tails import tail_by_messages, tail_by_share, tail_by_tokens, tail_by_turns

TAILS: Mapping[str, Callable[[Draft, Bounds, int | float], int]] = {
    "keep_messages": lambda draft, bounds, value: tail_by_messages(draft, bounds, int(value)),
    "keep_turns": lambda draft, bounds, value: tail_by_turns(draft, bounds, int(value)),
    "evict_pct": lambda draft, bounds, value: tail_by_share(draft, bounds, value / 100),
}
"""Parameters that say what stays, the first one that is given: messages, turns, or the percentage that goes."""

SLACK = 8
SMALLEST_ROOM_FOR_NOTES = 2_000
LARGEST_STEP = 1 / 3
SMALLEST_STEP = 200


def compact(draft: Draft, bounds: Bounds, *, share: float = 1.0) -> Flow[Draft]:
    """The draft with everything before the kept tail replaced by a summary; unchanged if nothing can go.

    ``share`` scales what the summary and the tail may take, for a second, harder try, which asks no model.
    """
    start = _tail_start(draft, bounds, int(share * bounds.shape.tail * bounds.room))
    covered = [i for i in range(draft.transcript.head, start) if i not in bounds.protection.head]
    gone = [i for i in covered if i not in bounds.protection.verbatim]
    if not gone:
        return draft
    budget = min(int(share * bounds.shape.extract * bounds.room), bounds.shape.extract_max)
    newest = _too_large_results(draft, bounds, allowed=_newest_allowance(bounds, budget))
    read = {*gone, *newest}
    end = len(draft.transcript.messages)
    made = extract(
        _sources(sorted(read), bounds),
        max_tokens=max(0, budget - _summary_overhead(draft, bounds)),
        counter=bounds.counter,
        goal=_goal(bounds),
        visible=[_read(bounds, i).text for i in range(draft.transcript.head, end) if i not in read],
        readings=bounds.readings,
        later=[_read(bounds, i).text for i in range(start, end) if draft.transcript.messages[i].role == "user"],
    )
    notes = yield from _notes(draft, gone, bounds, share=share)
    cut = _cut(draft, bounds, start=start, gone=gone, extracted=made.text, notes=notes)
    checkpoint = replace(made.checkpoint, narrative=notes.text, version=cut.version)
    compacted = draft.with_cut(cut, checkpoint=checkpoint.to_json())
    return _cut_newest_step(compacted, bounds, newest, allowed=_newest_allowance(bounds, cut.tokens))


def _summary_overhead(draft: Draft, bounds: Bounds) -> int:
    """Tokens of a summary message around its extract."""
    empty = render_summary("", version=10, ref="0" * 12, removed=len(draft.transcript.messages))
    return MESSAGE_OVERHEAD + bounds.counter.count(empty) + SLACK


def _newest_allowance(bounds: Bounds, summary: int) -> int:
    """What the newest step's tool results may take beside a summary of so many tokens."""
    return max(SMALLEST_STEP, int((bounds.trigger - bounds.fixed - summary) * LARGEST_STEP))


def _too_large_results(draft: Draft, bounds: Bounds, *, allowed: int) -> list[int]:
    """The newest step's tool results if together they take more than is allowed: they will be cut in the middle."""
    tokens = {p.index: p.tokens for p in draft.pieces if p.index is not None}
    pinned, messages = bounds.protection.pinned, draft.transcript.messages
    results = [i for i in bounds.protection.active if messages[i].is_result and i not in pinned]
    return sorted(results) if sum(tokens[i] for i in results) > allowed else []


def _tail_start(draft: Draft, bounds: Bounds, budget: int) -> int:
    """Index of the first message of the kept tail, as the layer's parameters say; else by ``budget`` tokens."""
    params = bounds.layer.params
    for name, start in TAILS.items():
        value = params.get(name)
        if isinstance(value, int | float):
            return start(draft, bounds, value)
    return tail_by_tokens(draft, bounds, budget)


def _read(bounds: Bounds, index: int) -> Body:
    return bounds.transcript.read(index)


def _goal(bounds: Bounds) -> str:
    task = bounds.protection.task
    return "" if task is None else _read(bounds, task).text


def _sources(gone: list[int], bounds: Bounds) -> list[Source]:
    calls = bounds.calls()
    messages = bounds.transcript.messages
    found: list[Source] = []
    for index in gone:
        body, call, message = _read(bounds, index), calls.get(index), messages[index]
        found.append(
            Source(
                position=index,
                role="tool" if message.is_result else message.role,
                text=body.text,
                tool=call.name if call else "",
                arguments=call.arguments if call else "",
                tokens=message.tokens,
                ref=message.ref,
                calls=body.calls,
            )
        )
    return found


def _notes(draft: Draft, gone: list[int], bounds: Bounds, *, share: float) -> Flow[Notes]:
    """The model's notes on what goes, extending those of the last cut; empty without a summariser."""
    settings, shape = bounds.settings, bounds.shape
    previous = draft.active_cut.narrative if draft.active_cut else ""
    if settings.summarizer is None or not shape.note or bounds.room < SMALLEST_ROOM_FOR_NOTES or share < 1:
        return Notes(previous)
    covered = draft.active_cut.covers if draft.active_cut else 0
    fresh = [i for i in gone if i - draft.transcript.head >= covered] if previous else gone
    calls = bounds.calls()
    lines = [line for i in fresh for line in _lines(_read(bounds, i), bounds.transcript.messages[i].role, calls.get(i))]
    if not lines:
        return Notes(previous)
    size = min(max(int(shape.note * bounds.room), settings.note_min), settings.note_max)
    window = bounds.summarizer_input or bounds.budget.hard_limit
    notes = yield from take_notes(lines, previous=previous, max_tokens=size, max_input=window, counter=bounds.counter)
    return notes if notes.text else replace(notes, text=previous)


def _lines(body: Body, role: str, call: ToolCall | None) -> list[Line]:
    if role in ("tool", "function"):
        return [Line(f"result of {call.name}" if call else "tool result", body.text)]
    lines = [Line(role, body.text)] if body.text.strip() else []
    return lines + [Line(f"{role} calls {c.name}", c.arguments) for c in body.calls]


def _cut(draft: Draft, bounds: Bounds, *, start: int, gone: list[int], extracted: str, notes: Notes) -> Cut:
    transcript, head = draft.transcript, draft.transcript.head
    prefix = transcript.chain[start - head - 1]
    hidden = set(gone)
    before, after = bounds.sides([i for i in range(head, start) if i not in hidden])
    version = (bounds.known.cuts[-1].version if bounds.known.cuts else 0) + 1
    ref = prefix.hex()[:12]
    text = render_summary(extracted, narrative=notes.text, version=version, ref=ref, removed=len(gone))
    return Cut(
        covers=start - head,
        prefix=prefix,
        text=text,
        tokens=MESSAGE_OVERHEAD + bounds.counter.count(text),
        version=version,
        ref=ref,
        before=before,
        after=after,
        origin=_origin(draft, notes),
        narrative=notes.text,
    )


def _origin(draft: Draft, notes: Notes) -> str:
    """How the summary's text was made."""
    if not notes.text:
        return "extract"
    if notes.calls and not notes.failure:
        return "model+extract"
    return draft.cut.origin if draft.cut is not None else "previous+extract"


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
