"""Content stands in shorter words, always made anew from what was said, so that nothing drifts.

``summarize_tool_result``  old results become their finding
``progressive``            what was said long ago is said in fewer words, by age
``delegate``               very large results that nothing refers to are read apart, for what they were asked for
``semantic_merge``         results of one tool that say nearly the same become one

A layer says which messages (:class:`RewriteTask`), in which order, and how short. The tasks are done in that order
until the draft is at the layer's target, those that a model is asked about side by side. What does not save a tenth of
what stands there now is not taken. The archive's key of the original stands behind the text.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b

from policies.draft import (
    MESSAGE_OVERHEAD,
    NO_SUMMARIZER,
    Bounds,
    Draft,
    Strategy,
    is_original,
    number,
    placeholder_for,
    results,
    touchable,
    whole,
)
from policies.effects import Alike, Compare, Flow, together
from policies.ledger import SHORTENED, Condensed, Edit, EditKind, PlannedMessage
from policies.limits import amount
from policies.lines import DATA, beside_data
from policies.messages import Body, ToolCall, step_numbers
from policies.strategies.redundancy import Candidates, Merge, Output, candidates, last_references, merge
from policies.summary.ask import Written, condense
from policies.summary.material import MaterialLine
from policies.summary.prompts import REASONS
from policies.text.gist import gist
from policies.tokens import TokenCounter, clip, clip_middle, shorten

MAX_SHARE = 0.9
MAX_ASKED = 32
MAX_TASK = 400
MAX_CALL_LEN = 1_000
MAX_ROUNDS = 4
FAULTS = REASONS.keys() | {"refusal", "tool_call", "no_room", "nothing"}
"""Failures of one answer; any other is one of whoever is asked, who is then asked no more."""
TOO_LITTLE = "not_smaller"
EXTRACT = "extract"


@dataclass(frozen=True, slots=True, kw_only=True)
class RewriteTask:
    """One message to be put in shorter words.

    ``allowed`` is the most tokens of the text, ``tail`` stands behind it and is not counted. A model, if it ``asks``
    one, is asked ``prompt`` about ``lines`` for ``task``; ``key`` is the question's address, by content. ``plain``
    writes otherwise: nothing where that would not be good enough. A longer text is cut to ``allowed`` if that is
    ``hard``, and then taken if it is shorter at all. ``original`` are the tokens of what was said and ``standing`` of
    what is left if the text is not taken, the message's own where they are None.
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
    asking, asked, rounds = may_ask(bounds), 0, 0
    waiting = [*jobs]
    failures: list[str] = []
    while not asking or rounds < MAX_ROUNDS:
        rounds += 1
        batch, waiting = _enough(draft, bounds, waiting, most=MAX_ASKED - asked if asking else len(waiting))
        if not batch:
            break
        texts = yield from _texts(bounds, batch, asking=asking)
        asked += sum(job.asks for job in batch)
        draft, refused = _placed(draft, bounds, batch, texts)
        failures += refused
        told = [text.failure for job, text in zip(batch, texts, strict=True) if job.asks]
        if told and all(told) and FAULTS.isdisjoint(told):
            asking = False  # nobody answers: code does the rest
    return replace(draft, reason=failures[0]) if failures and draft.tokens > bounds.target else draft


def _enough(
    draft: Draft, bounds: Bounds, waiting: list[RewriteTask], *, most: int
) -> tuple[list[RewriteTask], list[RewriteTask]]:
    tokens = draft.tokens_by_index()
    excess, left, chosen = draft.tokens - bounds.target, most, 0
    for job in waiting:
        if excess <= 0 or (job.asks and not left):
            break
        chosen += 1
        left -= job.asks
        excess -= max(0, tokens[job.index] - job.allowed - bounds.counter.count(job.tail) - MESSAGE_OVERHEAD)
    return waiting[:chosen], waiting[chosen:]


def _texts(bounds: Bounds, jobs: Sequence[RewriteTask], *, asking: bool) -> Flow[list[Written]]:
    first = {job.key: job for job in reversed(jobs)}
    found = yield from together([_write(job, bounds, asking=asking) for job in first.values()])
    texts = dict(zip(first, found, strict=True))
    return [texts[job.key] if job is first[job.key] else replace(texts[job.key], calls=0) for job in jobs]


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
        return replace(written, text=job.plain(), purpose=EXTRACT, failure=written.failure or "empty")
    if job.hard:
        ref = bounds.transcript.messages[job.index].ref
        text = clip_middle(text, job.allowed, counter=bounds.counter, ref=ref)
    return replace(written, text=text)


def _placed(
    draft: Draft, bounds: Bounds, jobs: Sequence[RewriteTask], texts: Sequence[Written]
) -> tuple[Draft, list[str]]:
    pieces = {p.index: p for p in draft.pieces}
    edits: dict[int, Edit] = {}
    records: list[Condensed] = []
    for job, found in zip(jobs, texts, strict=True):
        message, failure = bounds.transcript.messages[job.index], found.failure
        edit = reworded(bounds, job.index, f"{found.text}\n{job.tail}", kind=job.kind) if found.text else None
        if edit is not None and edit.tokens >= (1.0 if job.hard else MAX_SHARE) * pieces[job.index].tokens:
            edit, failure = None, failure or TOO_LITTLE
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
    return draft.with_edits(edits).with_condensed(records), [r.failure for r in records if r.failure]


def reworded(bounds: Bounds, index: int, text: str, *, kind: EditKind) -> Edit:
    """The edit that puts ``text`` in place of what a message says; its calls and its thinking stay and are counted."""
    counter, message = bounds.counter, bounds.transcript.messages[index]
    edit = bounds.edited(index, text, kind)
    beside = message.tokens - counter.count(bounds.transcript.read(index).whole)
    return replace(edit, tokens=max(edit.tokens, beside + counter.count(text)))


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
        lines=(MaterialLine(_origin(call), text),),
        task=task,
        hard=True,
    )


def _task(bounds: Bounds, call: ToolCall | None) -> str:
    current = bounds.protection.current
    asked = "" if current is None else bounds.transcript.read(current).text
    asked = clip(asked, max_tokens=MAX_TASK, counter=bounds.counter)
    return "\n".join(part for part in (asked, shorten(_known(call), MAX_CALL_LEN)) if part.strip())


MIN_FINDING = 32
"""Tokens of a finding's text at the least."""
MIN_WORDS = 48
"""Tokens that a model has for a group of results at the least."""
SHARES = (1.0, 0.30, 0.05, 0.01)
"""By level, the share of what was said that stays."""
MIN_TITLE = 10
MIN_ASKED = 16
"""Tokens that a model has for a title at the least: names are cut otherwise."""
WORTH_IT = 0.6
"""The share of what stands there now that a level must not be above: a short message says little without its words."""
LONG = 200
"""Tokens of a user's message that may be cut to its telling sentences."""
WORTH_ASKING = 200
"""Tokens of a message from which on a model is asked; of a shorter one code says as much."""
REPLACES = SHORTENED | {EditKind.SUMMARY, EditKind.DELEGATE, EditKind.PROGRESSIVE}
_LEVEL = re.compile(r"\[weir: level ([123]), [^\[\]]{1,80}\]\Z")


def _origin(call: ToolCall | None) -> str:
    return f"result of {call.name}" if call else "tool result"


def _known(call: ToolCall | None) -> str:
    return f"{call.name} {call.arguments}" if call else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SummarizeToolResult(Strategy):
    """Results over ``over`` tokens become about ``ratio`` of themselves: a model's words, or the telling lines.

    The largest saving goes first. A sub-agent's report above its cap is read for its task instead, whatever its size.
    """

    name = "summarize_tool_result"
    asks_model = costs = True
    over: int = whole(500)
    ratio: float = number(0.20, most=1)
    keep_newest: int = whole(0)

    def run(self, draft: Draft, bounds: Bounds) -> Flow[Draft]:
        return condense_each(draft, bounds, self._jobs(draft, bounds))

    def _jobs(self, draft: Draft, bounds: Bounds) -> list[RewriteTask]:
        ingest, calls, steps = bounds.settings.ingest, bounds.transcript.calls, step_numbers(draft.transcript.messages)
        reports = ingest.sub_agents if may_ask(bounds) else {}
        found: list[tuple[bool, int, RewriteTask]] = []
        for index, piece, message in results(draft, bounds):
            if not is_original(piece) or steps[-1] - steps[index] < self.keep_newest:
                continue
            call, text = calls.get(index), draft.transcript.read(index).text
            report = call is not None and call.name in reports
            if call is not None and message.tokens > reports.get(call.name, message.tokens):
                most = min(reports[call.name], int(piece.tokens * 0.9))
                job: RewriteTask | None = reading_of(bounds, index, call, kind=EditKind.SUMMARY, most=most)
            else:
                job = self._finding(bounds, piece, index, call)
            if job is not None:
                plain = partial(gist, known=_known(call), max_tokens=job.allowed, counter=bounds.counter, whole=True)
                found.append((report, piece.tokens - job.allowed, replace(job, plain=partial(plain, text))))
        found.sort(key=lambda f: (not f[0], -f[1], f[2].index))
        return [job for _, _, job in found]

    def _finding(self, bounds: Bounds, piece: PlannedMessage, index: int, call: ToolCall | None) -> RewriteTask | None:
        message, text = bounds.transcript.messages[index], bounds.transcript.read(index).text
        count = bounds.counter.count
        if piece.tokens <= self.over or count(text if piece.text is None else piece.text) <= self.over:
            return None
        tail = f"[weir: summary of {message.tokens:,} tokens, archived as {message.ref}]"
        return RewriteTask(
            index=index,
            kind=EditKind.SUMMARY,
            allowed=max(MIN_FINDING, int(self.ratio * piece.tokens) - count(tail)),
            tail=tail,
            key=message.digest.hex(),
            prompt="tool_result",
            lines=(MaterialLine(_origin(call), text),),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Delegate(Strategy):
    """Very large results that nothing refers to are read apart for their task, and a report takes their place.

    A result is delegated only if no later message uses it and it takes ``least`` (a share of W, or tokens from 1 on).
    """

    name = "delegate"
    asks_model = costs = True
    least: float = number(0.10)
    max_tokens: int = whole(2_000, least=1)

    def run(self, draft: Draft, bounds: Bounds) -> Flow[Draft]:
        if not may_ask(bounds):
            return replace(draft, reason=NO_SUMMARIZER)
        return (yield from condense_each(draft, bounds, self._jobs(draft, bounds)))

    def _jobs(self, draft: Draft, bounds: Bounds) -> list[RewriteTask]:
        least = amount(self.least, bounds.budget.window) / bounds.budget.ratio
        large = {i: p.tokens for i, p, _ in results(draft, bounds) if p.tokens >= least and is_original(p)}
        if not large:
            return []
        calls = bounds.transcript.calls
        used = last_references(draft.transcript, calls)
        return [
            reading_of(bounds, index, calls.get(index), kind=EditKind.DELEGATE, most=self.max_tokens)
            for index in sorted(large, key=lambda i: (-large[i], i))
            if used[index].count == 0
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Progressive(Strategy):
    """What was said long ago takes about 30 %, after ``l1_until`` steps 5 %, after ``l2_until`` a title.

    Levels move only when the layer runs, so that the sent prefix stays between two batches. Calls stay. What a
    user said is never put in other words: of a long message the telling sentences stay, at level 1 at the least.
    """

    name = "progressive"
    asks_model = costs = True
    l1_until: int = whole(5)
    l2_until: int = whole(20)

    def level_of(self, age: int) -> int:
        """The level of what was said ``age`` steps ago."""
        return (age > 0) + (age > 0 and age > self.l1_until) + (age > 0 and age > max(self.l1_until, self.l2_until))

    def run(self, draft: Draft, bounds: Bounds) -> Flow[Draft]:
        return condense_each(draft, bounds, self._jobs(draft, bounds))

    def _jobs(self, draft: Draft, bounds: Bounds) -> list[RewriteTask]:
        messages, calls = draft.transcript.messages, draft.transcript.calls
        steps = step_numbers(messages)
        jobs: list[RewriteTask] = []
        for index, piece, message in touchable(draft, bounds):
            if index in draft.transcript.memory or message.media:
                continue
            level = self.level_of(steps[-1] - steps[index])
            level = min(level, 1) if message.role == "user" else level
            job = _at_level(bounds, piece, index, level, calls.get(index)) if level > level_now(piece) else None
            jobs += [job] if job is not None else []
        asking = sorted((job for job in jobs if job.asks), key=lambda job: (-messages[job.index].tokens, job.index))
        spared = {job.index for job in asking[MAX_ASKED:]}
        return [replace(job, asks=False) if job.index in spared else job for job in jobs]


def level_now(piece: PlannedMessage) -> int:
    """The level at which a message stands in the array; 3 where something else stands in its place."""
    if piece.text is None:
        return 0
    if piece.kind not in REPLACES:
        return 3
    match = _LEVEL.search(piece.text) if piece.kind is EditKind.PROGRESSIVE else None
    return int(match.group(1)) if match else 0


def _at_level(
    bounds: Bounds, piece: PlannedMessage, index: int, level: int, call: ToolCall | None
) -> RewriteTask | None:
    message = bounds.transcript.messages[index]
    count = bounds.counter.count
    body = bounds.transcript.read(index)
    text = body.whole
    if message.role not in {"user", "assistant"} and not message.is_result:
        return None
    tokens = count(text)
    if message.role == "user" and tokens < LONG:
        return None
    asks = message.role != "user" and tokens >= WORTH_ASKING and may_ask(bounds)
    allowed = max(MIN_ASKED if asks else MIN_TITLE, int(SHARES[level] * tokens))
    tail = f"[weir: level {level}, archived as {message.ref}]"
    beside = piece.tokens - count(text if piece.text is None else piece.text)
    if beside + allowed + count(tail) > WORTH_IT * piece.tokens:
        return None
    role = "tool" if message.is_result else message.role
    return RewriteTask(
        index=index,
        kind=EditKind.PROGRESSIVE,
        allowed=allowed,
        tail=tail,
        key=f"{message.digest.hex()}:{level}",
        prompt=f"level_{level}",
        lines=(
            MaterialLine(_origin(call) if message.is_result else message.role, body.text),
            *((MaterialLine(DATA, body.data),) if body.data else ()),
        ),
        plain=partial(_telling, body, role=role, known=_known(call), most=allowed, counter=bounds.counter),
        asks=asks,
    )


def _telling(body: Body, *, role: str, known: str, most: int, counter: TokenCounter) -> str:
    said = gist(body.text, role=role, known=known, max_tokens=most, counter=counter)
    left = most - counter.count(said) - MESSAGE_OVERHEAD
    return beside_data(said, gist(body.data, known=known, max_tokens=left, counter=counter)) if body.data else said


@dataclass(frozen=True, slots=True, kw_only=True)
class SemanticMerge(Strategy):
    """Results of one tool that are more alike than ``threshold`` become one: the latest, which says what changed.

    Equal ones need no asking; where the answer does not come nothing else is merged.
    """

    name = "semantic_merge"
    threshold: float = number(0.85, most=1)

    def run(self, draft: Draft, bounds: Bounds) -> Flow[Draft]:
        calls = bounds.transcript.calls
        answers = ((i, piece) for i, piece, message in touchable(draft, bounds) if i in calls and not message.media)
        read = draft.transcript.read
        outputs = [Output(i, calls[i].name, read(i).text) for i, piece in answers if piece.text is None]
        found = candidates(outputs)
        similarities = yield from _compared(found, bounds.settings.embeddings)
        merges = merge(found, similarities, threshold=self.threshold)
        tokens, edits = draft.tokens_by_index(), dict[int, Edit]()
        for group in (_merged(bounds, each) for each in merges):
            if sum(edit.tokens for edit in group.values()) < sum(tokens[index] for index in group):
                edits |= group
        merged = draft.with_edits(edits)
        if merged.tokens <= bounds.target or not may_ask(bounds):
            return merged
        jobs = _in_words(bounds, merges, edits)
        texts = yield from _texts(bounds, jobs, asking=True)
        return _placed(merged, bounds, jobs, texts)[0]


def _compared(found: Candidates, model: str | None) -> Flow[dict[tuple[int, int], float]]:
    if not found.pairs:
        return {}
    asked = sorted({i for pair in found.pairs for i in pair})
    places = {index: place for place, index in enumerate(asked)}
    reply = yield Compare(
        texts=tuple(found.texts[i] for i in asked),
        pairs=tuple((places[one], places[other]) for one, other in found.pairs),
        model=model,
    )
    if not isinstance(reply, Alike) or len(reply.scores) != len(found.pairs):
        return {}
    return dict(zip(found.pairs, reply.scores, strict=True))


def _merged(bounds: Bounds, found: Merge) -> dict[int, Edit]:

    def gone(index: int) -> str:
        if bounds.settings.placeholder != "finding":
            return placeholder_for(bounds, index)
        return f"[weir: merged into a later result; archived as {bounds.transcript.messages[index].ref}]"

    texts = {**{index: gone(index) for index in found.earlier}, found.index: found.text}
    return {index: bounds.edited(index, text, EditKind.MERGE) for index, text in texts.items()}


def _in_words(bounds: Bounds, merges: Sequence[Merge], edits: Mapping[int, Edit]) -> list[RewriteTask]:
    """What a model may say in fewer words of merged results that differ, the largest first."""
    messages, found = bounds.transcript.messages, list[RewriteTask]()
    for merged in merges:
        members, tool = (*merged.earlier, merged.index), bounds.transcript.calls[merged.index].name
        texts = [bounds.transcript.read(i).text for i in members]
        if merged.index not in edits or len({*texts}) == 1:
            continue
        standing = edits[merged.index].tokens
        others = "1 earlier result" if len(texts) == 2 else f"{len(texts) - 1} earlier results"
        found.append(
            RewriteTask(
                index=merged.index,
                kind=EditKind.MERGE,
                allowed=max(MIN_WORDS, standing // 2),
                tail=f"[weir: summary of this and {others}, archived as {messages[merged.index].ref}]",
                key=blake2b(b"".join(messages[i].digest for i in members), digest_size=16).hexdigest(),
                prompt="tool_result",
                lines=tuple(
                    MaterialLine(f"result of {tool}, {n} of {len(texts)}", text) for n, text in enumerate(texts, 1)
                ),
                original=sum(messages[i].tokens for i in members),
                standing=standing,
            )
        )
    found.sort(key=lambda job: (-edits[job.index].tokens, job.index))
    return found[:MAX_ASKED]
