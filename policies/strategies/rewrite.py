"""Content is put in shorter words, always made anew from what was said, so that nothing drifts.

A layer says which messages (:class:`RewriteTask`), in which order, and how short. The tasks are
done in that order until the draft is at the layer's target, those that need a model concurrently.
What does not save a tenth of the current text is not taken. The archive's key of the original
follows the text.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b

from policies.draft import MESSAGE_OVERHEAD, NO_SUMMARIZER, Bounds, Draft
from policies.effects import Flow, together
from policies.ledger import Condensed, Edit, EditKind
from policies.messages import ToolCall
from policies.summary.ask import Written, condense
from policies.summary.material import MaterialLine
from policies.summary.prompts import REASONS
from policies.tokens import clip, clip_middle, shorten

MAX_SHARE = 0.9


MAX_ASKED = 32


MAX_TASK = 400


MAX_CALL_LEN = 1_000


MAX_ROUNDS = 4


FAULTS = REASONS.keys() | {"refusal", "tool_call", "no_room", "nothing"}
"""Failures of one answer; any other is the model's, which is then not called again."""


TOO_LITTLE = "not_smaller"


EXTRACT = "extract"


@dataclass(frozen=True, slots=True, kw_only=True)
class RewriteTask:
    """One message to be put in shorter words.

    ``allowed`` is the most tokens of the text, ``tail`` is appended to it and is not counted. A
    model, if it ``asks`` one, receives ``prompt`` about ``lines`` for ``task``; ``key`` is the
    question's address, by content. ``plain`` writes it otherwise, or nothing where that would not
    be good enough. A longer text is cut to ``allowed`` if that is ``hard``, and then taken if it is
    shorter at all. ``original`` are the tokens of what was said and ``standing`` of what is left if
    the text is not taken, the message's own where they are None.
    """

    index: int
    kind: EditKind
    allowed: int
    tail: str
    key: str
    prompt: str = ""
    lines: tuple[MaterialLine, ...] = ()
    task: str = ""
    plain: Callable[[], str] = str
    asks: bool = True
    hard: bool = False
    original: int | None = None
    standing: int | None = None


def may_ask(bounds: Bounds) -> bool:
    settings = bounds.settings
    return settings.summarizer is not None and not bounds.free_only and settings.compaction != "off"


def condense_each(draft: Draft, bounds: Bounds, jobs: Sequence[RewriteTask]) -> Flow[Draft]:
    """The draft with the jobs done in their order until it is at the layer's target."""
    asking = may_ask(bounds)
    asked = 0
    rounds = 0
    waiting = [*jobs]
    failures: list[str] = []
    while not asking or rounds < MAX_ROUNDS:
        rounds += 1
        batch, waiting = _enough(
            draft, bounds, waiting, most=MAX_ASKED - asked if asking else len(waiting)
        )
        if not batch:
            break
        texts = yield from texts_of(bounds, batch, asking=asking)
        asked += sum(job.asks for job in batch)
        draft, refused = placed(draft, bounds, batch, texts)
        failures += refused
        told = [text.failure for job, text in zip(batch, texts, strict=True) if job.asks]
        if told and all(told) and FAULTS.isdisjoint(told):
            asking = False  # no model answers: code does the rest
    return (
        replace(draft, reason=failures[0]) if failures and draft.tokens > bounds.target else draft
    )


def _enough(
    draft: Draft, bounds: Bounds, waiting: list[RewriteTask], *, most: int
) -> tuple[list[RewriteTask], list[RewriteTask]]:
    tokens = draft.tokens_by_index()
    excess = draft.tokens - bounds.target
    left = most
    chosen = 0
    for job in waiting:
        if excess <= 0 or (job.asks and not left):
            break
        chosen += 1
        left -= job.asks
        excess -= max(
            0, tokens[job.index] - job.allowed - bounds.counter.count(job.tail) - MESSAGE_OVERHEAD
        )
    return waiting[:chosen], waiting[chosen:]


def texts_of(bounds: Bounds, jobs: Sequence[RewriteTask], *, asking: bool) -> Flow[list[Written]]:
    first = {job.key: job for job in reversed(jobs)}
    found = yield from together([_write(job, bounds, asking=asking) for job in first.values()])
    texts = dict(zip(first, found, strict=True))
    return [
        texts[job.key] if job is first[job.key] else replace(texts[job.key], calls=0)
        for job in jobs
    ]


def _write(job: RewriteTask, bounds: Bounds, *, asking: bool) -> Flow[Written]:
    if not job.asks or not asking:
        text = job.plain()
        return Written(text, purpose=EXTRACT, failure="" if text else NO_SUMMARIZER)
    written = yield from condense(
        job.lines,
        prompt=job.prompt,
        max_tokens=job.allowed,
        max_input=bounds.summarizer_input or bounds.budget.soft_limit,
        counter=bounds.counter,
        key=job.key,
        task=job.task,
    )
    text = written.text.strip()
    if not text:
        return replace(
            written, text=job.plain(), purpose=EXTRACT, failure=written.failure or "empty"
        )
    if job.hard:
        ref = bounds.transcript.messages[job.index].ref
        text = clip_middle(text, job.allowed, counter=bounds.counter, ref=ref)
    return replace(written, text=text)


def placed(
    draft: Draft, bounds: Bounds, jobs: Sequence[RewriteTask], texts: Sequence[Written]
) -> tuple[Draft, list[str]]:
    pieces = {p.index: p for p in draft.pieces}
    edits: dict[int, Edit] = {}
    records: list[Condensed] = []
    for job, found in zip(jobs, texts, strict=True):
        message = bounds.transcript.messages[job.index]
        failure = found.failure
        edit = (
            reworded(bounds, job.index, f"{found.text}\n{job.tail}", kind=job.kind)
            if found.text
            else None
        )
        if (
            edit is not None
            and edit.tokens >= (1.0 if job.hard else MAX_SHARE) * pieces[job.index].tokens
        ):
            edit = None
            failure = failure or TOO_LITTLE
        if edit is not None:
            edits[job.index] = edit
        standing = message.tokens if job.standing is None else job.standing
        records.append(
            Condensed(
                strategy=str(job.kind),
                original_tokens=message.tokens if job.original is None else job.original,
                compressed_tokens=standing if edit is None else edit.tokens,
                calls=found.calls,
                purpose=found.purpose,
                ref=message.ref,
                key=job.key,
                failure=failure,
            )
        )
    return draft.with_edits(edits).with_condensed(records), [
        r.failure for r in records if r.failure
    ]


def reworded(bounds: Bounds, index: int, text: str, *, kind: EditKind) -> Edit:
    """The edit that puts ``text`` in place of what a message says; its calls and its thinking stay
    and are counted.
    """
    counter = bounds.counter
    message = bounds.transcript.messages[index]
    edit = bounds.edited(index, text, kind)
    beside = message.tokens - counter.count(bounds.transcript.read(index).whole)
    return replace(edit, tokens=max(edit.tokens, beside + counter.count(text)))


def reading_of(
    bounds: Bounds, index: int, call: ToolCall | None, *, kind: EditKind, most: int
) -> RewriteTask:
    """A result to be read for its task by a model that sees nothing else, in a message of at most
    ``most`` tokens.
    """
    message = bounds.transcript.messages[index]
    counter = bounds.counter
    tail = f"[weir: {message.tokens:,} tokens were read apart for this, archived as {message.ref}]"
    text = bounds.transcript.read(index).text
    task = _task(bounds, call)
    asked = blake2b(task.encode(errors="replace"), digest_size=8).hexdigest()
    return RewriteTask(
        index=index,
        kind=kind,
        allowed=max(1, most - MESSAGE_OVERHEAD - counter.count(tail) - 1),
        tail=tail,
        key=f"{message.digest.hex()}:{asked}",
        prompt="reading",
        lines=(MaterialLine(result_origin(call), text),),
        task=task,
        hard=True,
    )


def _task(bounds: Bounds, call: ToolCall | None) -> str:
    current = bounds.protection.current
    asked = "" if current is None else bounds.transcript.read(current).text
    asked = clip(asked, max_tokens=MAX_TASK, counter=bounds.counter)
    return "\n".join(
        part for part in (asked, shorten(call_in_words(call), MAX_CALL_LEN)) if part.strip()
    )


def result_origin(call: ToolCall | None) -> str:
    return f"result of {call.name}" if call else "tool result"


def call_in_words(call: ToolCall | None) -> str:
    return f"{call.name} {call.arguments}" if call else ""
