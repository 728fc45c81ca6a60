"""Requesting a summary from a model: the flow behind every summary in words.

Send the fenced transcript, in parts that the summariser can read and whose notes are merged. Judge
every reply and take out what it invented. A useless reply is requested once more, with the reason;
a failure is a value with its code.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b

from policies.effects import Failed, Flow, Reply, Summarize, together
from policies.lines import DATA
from policies.summary.check import judge
from policies.summary.identifiers import grounded
from policies.summary.material import (
    ARCHIVE,
    FENCE_TOKENS,
    MaterialLine,
    clipped,
    divide,
    enclosed,
    harmless,
    harmless_lines,
    render_transcript,
    sized,
)
from policies.summary.prompts import HEADINGS, PROMPTS, REASONS, Prompt
from policies.text.segments import Source
from policies.tokens import TokenCounter, clip_middle

MAX_ANSWERS = 2
MAX_DEPTH = 4
MIN_ROOM = 100
CHECK_TOKENS = 320
MAX_ANSWER_SHARE = 0.4
"""Share of the summariser's window that an answer may take."""
MAX_PREVIOUS_SHARE = 0.5
MAX_TASK_TOKENS = 400
MAX_NAMED = 12
MAX_NAMED_LEN = 80
MAX_LOST = 0.34
"""Share of its lines that an answer may lose for what they invent."""
LOST_IN_FORM = frozenset({"empty", "too_short", "loop"})
"""The answer of small models that copy the headings and fill in nothing; in plain prose the same
models say something useful.
"""


@dataclass(frozen=True, slots=True)
class Written:
    """A summary and what it cost; empty with a ``failure`` where there is none.

    ``calls`` counts questions, ``dropped`` are identifiers that the model invented. While it is
    made, ``answers`` counts those to its newest part.
    """

    text: str = ""
    calls: int = 0
    failure: str = ""
    purpose: str = ""
    dropped: tuple[str, ...] = ()
    answers: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _SummaryRequest:
    prompt: Prompt
    max_tokens: int
    max_input: int
    counter: TokenCounter
    key: str
    task: str
    by_schema: bool
    lines: tuple[MaterialLine, ...]
    previous: str
    tokens: int
    beside: tuple[MaterialLine, ...]

    @property
    def room(self) -> int:
        count = self.counter.count
        p = self.prompt
        asked = max(
            count(p.ask(max_tokens=self.max_tokens, merge=m, task=self.task)) for m in (False, True)
        )
        again = count(p.ask_again("invented", max_tokens=self.max_tokens)) + CHECK_TOKENS
        schema = count(repr(dict(p.schema))) if p.schema else 0
        return self.max_input - (
            count(p.system) + asked + again + schema + FENCE_TOKENS + self.max_tokens
        )

    @property
    def aim(self) -> int:
        return min(self.max_tokens, max(self.tokens // 2, self.prompt.shortest * 2))

    @property
    def said(self) -> str:
        return "\n".join(line.text for line in self.lines)

    @property
    def material(self) -> str:
        return "\n".join((self.previous, *map(str, (*self.beside, *self.lines))))

    def instruction(self, *, merge: bool = False) -> str:
        return self.prompt.ask(max_tokens=self.aim, merge=merge, task=self.task)

    def question(self, asked: str) -> Summarize:
        prompt = self.prompt
        schema = dict(prompt.schema) if self.by_schema else {}
        return Summarize(
            prompt.system,
            asked,
            self.max_tokens,
            prompt.purpose,
            schema=schema,
            key=self._address(asked),
        )

    def _address(self, asked: str) -> str:
        if not self.key:
            return ""
        said = "\0".join((self.prompt.digest, str(self.max_tokens), asked))
        digest = blake2b(said.encode(errors="replace"), digest_size=16).hexdigest()
        return f"{self.key}:{self.prompt.purpose}:{digest}"


def condense(
    lines: Sequence[MaterialLine],
    *,
    prompt: str,
    max_tokens: int,
    max_input: int,
    counter: TokenCounter,
    previous: str = "",
    key: str = "",
    by_schema: bool = False,
    most_chunks: int = 32,
    task: str = "",
    beside: Sequence[MaterialLine] = (),
) -> Flow[Written]:
    """A summary of ``lines`` that goes on from ``previous``, of about ``max_tokens`` (half more at
    the most).

    No question with its answer takes more than ``max_input``. ``task`` is what a reading is for;
    ``beside`` the notes may name, though it is not to be summarised.
    """
    asked = PROMPTS[prompt]
    said = sized(harmless_lines(lines), counter)
    if not said:
        return Written(failure="nothing", purpose=asked.purpose)
    earlier = harmless(previous)
    task = harmless(task)
    if asked.prefix:
        earlier = earlier.replace(asked.prefix, "").strip()
    shown = (
        clip_middle(task, min(MAX_TASK_TOKENS, max_input // 8), counter=counter, ref=ARCHIVE)
        if task
        else ""
    )
    request = _SummaryRequest(
        prompt=asked,
        max_tokens=max(1, min(max_tokens, int(max_input * MAX_ANSWER_SHARE))),
        max_input=max_input,
        counter=counter,
        key=key,
        task=enclosed("task", shown) if shown else "",
        by_schema=by_schema and bool(asked.schema),
        lines=tuple(said),
        previous=earlier,
        tokens=sum(line.tokens for line in said) + counter.count(earlier),
        beside=tuple(harmless_lines(beside)),
    )
    return _finished(request, (yield from _in_transcript(request, most_chunks=most_chunks)))


def _in_transcript(request: _SummaryRequest, *, most_chunks: int) -> Flow[Written]:
    room = request.room
    notes = request.previous
    counter = request.counter
    if notes and counter.count(notes) > room * MAX_PREVIOUS_SHARE:
        notes = clip_middle(notes, int(room * MAX_PREVIOUS_SHARE), counter=counter, ref=ARCHIVE)
    room -= counter.count(notes) + (FENCE_TOKENS if notes else 0)
    if room < MIN_ROOM:
        return Written(failure="no_room")
    chunks = divide(request.lines, room, most=max(1, most_chunks), counter=counter)
    if len(chunks) == 1:
        material = render_transcript(chunks[0], previous=notes)
        return (yield from _ask(request, material))
    sizes = [sum(line.tokens for line in chunk) for chunk in chunks]
    size = min(request.max_tokens, max(max(sizes) // 3, request.prompt.shortest * 2))
    parts = [
        (
            replace(
                request,
                max_tokens=size,
                by_schema=False,
                lines=tuple(chunk),
                tokens=tokens,
                previous="" if n else request.previous,
            ),
            render_transcript(chunk, previous="" if n else notes),
        )
        for n, (chunk, tokens) in enumerate(zip(chunks, sizes, strict=True))
    ]
    return (yield from _in_chunks(request, parts))


def _in_chunks(
    request: _SummaryRequest, parts: Sequence[tuple[_SummaryRequest, str]]
) -> Flow[Written]:
    """The notes on every part, merged; a part that failed is requested again, then left out if half
    are there.
    """
    takes = yield from together([_ask(part, material) for part, material in parts])
    calls = sum(t.calls for t in takes)
    again = [n for n, t in enumerate(takes) if not t.text and t.calls < MAX_ANSWERS]
    if again and any(t.text for t in takes):
        more = yield from together([_ask(*parts[n], answers=MAX_ANSWERS - 1) for n in again])
        calls += sum(t.calls for t in more)
        for n, take in zip(again, more, strict=True):
            takes[n] = take
    merged = yield from _merge_takes(request, takes, depth=1)
    return replace(merged, calls=merged.calls + calls)


def _merge_takes(
    request: _SummaryRequest, takes: Sequence[Written], *, depth: int
) -> Flow[Written]:
    told = [t.text for t in takes if t.text]
    if len(told) * 2 < len(takes) or not told:
        return Written(failure=next(t.failure for t in takes if not t.text))
    return (yield from _merge(request, told, depth=depth))


def _merge(request: _SummaryRequest, texts: Sequence[str], *, depth: int) -> Flow[Written]:
    if len(texts) == 1:
        return _judged(request, texts[0])
    counter = request.counter
    lines = sized(
        [MaterialLine(f"notes on part {n}", text) for n, text in enumerate(texts, 1)], counter
    )
    groups = _merge_groups(lines, request.room, last=depth >= MAX_DEPTH, counter=counter)
    if len(groups) == 1:
        taken = yield from _ask(request, render_transcript(groups[0]), merge=True)
        if taken.failure and counter.count("\n".join(texts)) <= request.max_tokens:
            taken = replace(_judged(request, "\n".join(texts)), calls=taken.calls)
        return taken
    takes = yield from together(
        [_merge_group(replace(request, by_schema=False), group) for group in groups]
    )
    merged = yield from _merge_takes(request, takes, depth=depth + 1)
    return replace(merged, calls=merged.calls + sum(t.calls for t in takes))


def _merge_group(request: _SummaryRequest, group: Sequence[MaterialLine]) -> Flow[Written]:
    if len(group) == 1:
        return Written(group[0].text)
    return (yield from _ask(request, render_transcript(group), merge=True))


def _merge_groups(
    lines: Sequence[MaterialLine], room: int, *, last: bool, counter: TokenCounter
) -> list[list[MaterialLine]]:
    """Consecutive notes in groups that fit one question, two at the least; all in one, clipped, at
    the last level.
    """
    groups: list[list[MaterialLine]] = [[]]
    used = 0
    most = room // len(lines) if last else room // 2
    for line in lines:
        if line.tokens > most:
            line = clipped(line, max(1, most - FENCE_TOKENS), counter)
        if used + line.tokens > room and not last:
            groups.append([])
            used = 0
        groups[-1].append(line)
        used += line.tokens
    return groups


def _ask(
    request: _SummaryRequest, material: str, *, merge: bool = False, answers: int = 0
) -> Flow[Written]:
    asked = f"{material}\n\n{request.instruction(merge=merge)}"
    reply = yield request.question(asked)
    calls = 1
    if request.by_schema and isinstance(reply, Failed) and reply.reason == "no_schema":
        reply = yield replace(request, by_schema=False).question(asked)
        calls += 1
    first = _read(request, reply, calls=calls, answers=answers)
    reason = first.failure
    if reason not in REASONS or first.answers >= MAX_ANSWERS:
        return first
    plainly = replace(request, by_schema=False)
    if request.prompt.schema and reason in LOST_IN_FORM:
        plainly = replace(plainly, prompt=PROMPTS["plain"])
    again = plainly.prompt.ask_again(reason, max_tokens=request.aim)
    instruction = plainly.prompt.ask(max_tokens=request.aim, merge=merge, task=request.task)
    shown = "\n".join(filter(None, (material, _check(first))))
    reply = yield plainly.question(f"{shown}\n\n{again}\n\n{instruction}")
    second = _read(plainly, reply, calls=first.calls + 1, answers=first.answers)
    return second if second.text else replace(first, calls=second.calls, answers=second.answers)


def _check(take: Written) -> str:
    if not take.dropped:
        return ""
    named = ", ".join(f"`{harmless(name[:MAX_NAMED_LEN])}`" for name in take.dropped[:MAX_NAMED])
    return enclosed("check", f"does not occur: {named}")


def _read(request: _SummaryRequest, reply: Reply, *, calls: int, answers: int = 0) -> Written:
    text, failure = judge(
        reply,
        material=request.material,
        prompt=request.prompt,
        max_tokens=request.max_tokens,
        counter=request.counter,
        original=request.tokens,
    )
    taken = Written(failure=failure) if failure else _judged(request, text)
    return replace(taken, calls=calls, answers=answers + (not isinstance(reply, Failed)))


def _judged(request: _SummaryRequest, text: str) -> Written:
    kept, dropped = grounded(text, "\n".join((request.material, request.task, *HEADINGS.values())))
    lines = _count_lines(text)
    if dropped and (
        len(kept) < len(text) * (1 - MAX_LOST)
        or lines - _count_lines(kept) > lines * MAX_LOST
        or request.counter.count(kept) < request.prompt.shortest
    ):
        return Written(failure="invented", dropped=dropped)
    return Written(kept, dropped=dropped)


def _count_lines(text: str) -> int:
    return sum(bool(line.strip()) for line in text.split("\n"))


def _finished(request: _SummaryRequest, take: Written) -> Written:
    prompt = request.prompt
    if not take.text:
        return Written(
            calls=take.calls,
            failure=take.failure or "failed",
            purpose=prompt.purpose,
            dropped=take.dropped,
        )
    text = harmless(take.text.replace(prompt.prefix, "") if prompt.prefix else take.text).strip()
    return replace(
        take,
        text=f"{prompt.prefix}\n{text}" if prompt.prefix else text,
        purpose=prompt.purpose,
        answers=0,
    )


def lines_of(sources: Sequence[Source]) -> list[MaterialLine]:
    lines: list[MaterialLine] = []
    for source in sources:
        if source.role == DATA:
            lines.append(MaterialLine(DATA, source.text))
            continue
        if source.is_result:
            lines.append(
                MaterialLine(
                    f"result of {source.tool}" if source.tool else "tool result", source.text
                )
            )
            continue
        if source.text.strip():
            lines.append(MaterialLine(source.role, source.text))
        lines += [
            MaterialLine(f"{source.role} calls {call.name}", call.arguments)
            for call in source.calls
        ]
    return lines
