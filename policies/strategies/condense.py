"""Putting single messages in shorter words: what the layers that do it have in common.

A layer says which messages (:class:`RewriteTask`), in which order, and how short. The tasks are done in that order
until the draft is at the layer's target, those that a model is asked about side by side. The text is always made from
the original, never from a shorter wording, so nothing drifts; what does not save a tenth of what stands there now is
not taken. The archive's key of the original stands behind the text.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import NamedTuple

from policies.draft import MESSAGE_OVERHEAD, Bounds, Draft, replace_content
from policies.effects import Flow, together
from policies.ledger import CONDENSED, SHORTENED, Condensed, Edit, EditKind, PlannedMessage
from policies.messages import ToolCall
from policies.summary.ask import condense
from policies.summary.material import MaterialLine
from policies.summary.prompts import REASONS
from policies.tokens import clip, clip_middle, shorten

MAX_SHARE = 0.9
MAX_ASKED = 32
MAX_TASK = 400
MAX_CALL_LEN = 1_000
MAX_ROUNDS = 4
FAULTS = REASONS.keys() | {"refusal", "reasoning_only", "tool_call", "unsupported", "no_room", "nothing"}
"""Failures of one answer; any other is one of whoever is asked, who is then asked no more."""
NO_SUMMARIZER = "no_summarizer"
TOO_LITTLE = "not_smaller"
EXTRACT = "extract"
_TAIL = re.compile(r"\[weir: (?:summary of|level [123],|[\d,]{1,20} tokens were read apart)[^\[\]]{1,80}\]\Z")
"""What stands behind every text in shorter words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewriteTask:
    """One message to be put in shorter words.

    Attributes:
        index: its index in the array.
        kind: the kind of the edit.
        allowed: most tokens of the text, what stands behind it not counted.
        tail: what stands behind the text.
        key: address of the question, by content.
        prompt: which question a model is asked.
        lines: what it is asked about.
        task: what for.
        asks: whether a model may be asked; else code writes the text.
        hard: whether a longer text is cut to ``allowed`` rather than taken as it is.
        share: the share of what stands there now that the message has to stay under.
    """

    index: int
    kind: EditKind
    allowed: int
    tail: str
    key: str
    prompt: str = ""
    lines: tuple[MaterialLine, ...] = ()
    task: str = ""
    asks: bool = True
    hard: bool = False
    share: float = MAX_SHARE


class _Text(NamedTuple):
    text: str
    calls: int = 0
    purpose: str = EXTRACT
    failure: str = ""


def may_ask(bounds: Bounds) -> bool:
    settings = bounds.settings
    return settings.summarizer is not None and not bounds.free_only and settings.compaction != "off"


def largest_input(bounds: Bounds) -> int:
    return bounds.summarizer_input or bounds.budget.hard_limit


def condense_each(
    draft: Draft, bounds: Bounds, jobs: Sequence[RewriteTask], *, plain: Callable[[RewriteTask], str]
) -> Flow[Draft]:
    """The draft with the jobs done in their order until it is at the layer's target.

    ``plain`` writes where no model is asked or gave none: an empty text where it has none that is good enough.
    """
    asking, asked, rounds = may_ask(bounds), 0, 0
    waiting = [*jobs]
    failures: list[str] = []
    while not asking or rounds < MAX_ROUNDS:
        rounds += 1
        batch, waiting = _enough(draft, bounds, waiting, most=MAX_ASKED - asked if asking else len(waiting))
        if not batch:
            break
        texts = yield from _texts(bounds, batch, plain, asking=asking)
        asked += sum(job.asks for job in batch)
        draft, refused = _placed(draft, bounds, batch, texts)
        failures += refused
        told = [text.failure for job, text in zip(batch, texts, strict=True) if job.asks]
        if told and all(told) and FAULTS.isdisjoint(told):
            asking = False  # nobody answers: code does the rest
    return draft.with_reason(failures[0]) if failures and draft.tokens > bounds.target else draft


def _enough(
    draft: Draft, bounds: Bounds, waiting: list[RewriteTask], *, most: int
) -> tuple[list[RewriteTask], list[RewriteTask]]:
    tokens = _tokens(draft)
    excess, left, chosen = draft.tokens - bounds.target, most, 0
    for job in waiting:
        if excess <= 0 or (job.asks and not left):
            break
        chosen += 1
        left -= job.asks
        excess -= max(0, tokens[job.index] - job.allowed - bounds.counter.count(job.tail) - MESSAGE_OVERHEAD)
    return waiting[:chosen], waiting[chosen:]


def _tokens(draft: Draft) -> dict[int, int]:
    return {p.index: p.tokens for p in draft.pieces if p.index is not None}


def _texts(
    bounds: Bounds, jobs: Sequence[RewriteTask], plain: Callable[[RewriteTask], str], *, asking: bool
) -> Flow[list[_Text]]:
    first = {job.key: job for job in reversed(jobs)}
    found = yield from together([_write(job, bounds, plain, asking=asking) for job in first.values()])
    texts = dict(zip(first, found, strict=True))
    return [texts[job.key] if job is first[job.key] else texts[job.key]._replace(calls=0) for job in jobs]


def _write(job: RewriteTask, bounds: Bounds, plain: Callable[[RewriteTask], str], *, asking: bool) -> Flow[_Text]:
    if not job.asks or not asking:
        text = plain(job)
        return _Text(text, failure="" if text else NO_SUMMARIZER)
    written = yield from condense(
        job.lines,
        prompt=job.prompt,
        max_tokens=job.allowed,
        max_input=largest_input(bounds),
        counter=bounds.counter,
        key=job.key,
        most_chunks=bounds.settings.summaries.most_chunks,
        task=job.task,
    )
    text = written.text.strip()
    if not text:
        return _Text(plain(job), written.calls, EXTRACT, written.failure or "empty")
    if job.hard:
        ref = bounds.transcript.messages[job.index].ref
        text = clip_middle(text, job.allowed, counter=bounds.counter, ref=ref)
    return _Text(text, written.calls, written.purpose)


def _placed(
    draft: Draft, bounds: Bounds, jobs: Sequence[RewriteTask], texts: Sequence[_Text]
) -> tuple[Draft, list[str]]:
    pieces = {p.index: p for p in draft.pieces}
    edits: dict[int, Edit] = {}
    records: list[Condensed] = []
    for job, found in zip(jobs, texts, strict=True):
        piece, failure = pieces[job.index], found.failure
        edit = reworded(bounds, job.index, f"{found.text}\n{job.tail}", kind=job.kind) if found.text else None
        if edit is not None and edit.tokens >= job.share * piece.tokens:
            edit, failure = None, failure or TOO_LITTLE
        if edit is not None:
            edits[job.index] = edit
        records.append(_record(bounds, job, edit, found._replace(failure=failure)))
    return draft.with_edits(edits).with_condensed(records), [r.failure for r in records if r.failure]


def _record(bounds: Bounds, job: RewriteTask, edit: Edit | None, found: _Text) -> Condensed:
    message = bounds.transcript.messages[job.index]
    return Condensed(
        strategy=str(job.kind),
        original_tokens=message.tokens,
        compressed_tokens=message.tokens if edit is None else edit.tokens,
        calls=found.calls,
        purpose=found.purpose,
        ref=message.ref,
        key=job.key,
        failure=found.failure,
    )


def reworded(bounds: Bounds, index: int, text: str, *, kind: EditKind) -> Edit:
    """The edit that puts ``text`` in place of what a message says; its calls and its thinking stay and are counted."""
    counter, message = bounds.counter, bounds.transcript.messages[index]
    edit = replace_content(bounds.transcript, index, text, kind=kind, counter=counter)
    beside = message.tokens - counter.count(bounds.transcript.read(index).text)
    return replace(edit, tokens=max(edit.tokens, beside + counter.count(text)))


def is_condensed(piece: PlannedMessage) -> bool:
    if piece.kind in CONDENSED:
        return True
    return piece.kind in SHORTENED and piece.text is not None and _TAIL.search(piece.text) is not None


def is_original(piece: PlannedMessage) -> bool:
    """Whether a message says what the client sent, or a part of that: a layer may put it in shorter words."""
    return piece.text is None or (piece.kind in SHORTENED and not is_condensed(piece))


def reading_of(bounds: Bounds, index: int, call: ToolCall | None, *, kind: EditKind, most: int) -> RewriteTask:
    """A result to be read for its task by a model that sees nothing else, in a message of at most ``most`` tokens."""
    message, counter = bounds.transcript.messages[index], bounds.counter
    tail = f"[weir: {message.tokens:,} tokens were read apart for this, archived as {message.ref}]"
    text, task = bounds.transcript.read(index).text, _task(bounds, call)
    asked = blake2b(task.encode(errors="replace"), digest_size=8).hexdigest()
    return RewriteTask(
        index=index,
        kind=kind,
        allowed=max(1, most - MESSAGE_OVERHEAD - counter.count(tail) - 1),
        tail=tail,
        key=f"{message.digest.hex()}:{asked}",
        prompt="reading",
        lines=(MaterialLine(f"result of {call.name}" if call else "tool result", text),),
        task=task,
        hard=True,
        share=1.0,
    )


def _task(bounds: Bounds, call: ToolCall | None) -> str:
    current = bounds.protection.current
    asked = "" if current is None else bounds.transcript.read(current).text
    asked = clip(asked, max_tokens=MAX_TASK, counter=bounds.counter)
    called = f"{call.name} {call.arguments}" if call else ""
    return "\n".join(part for part in (asked, shorten(called, MAX_CALL_LEN)) if part.strip())
