"""The flow of an evaluation: every question is answered from both contexts, then a third call compares the answers.

A context that is larger than the model's window is read in chunks, all of it, and the answers from its parts are
merged. The judge sees a question and two answers as fenced data and never the conversation. Code stands above the
judge where it knows better: who does not say what was said is inconsistent, and so is an answer without the value
that is known to belong in it.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from policies.effects import Failed, Flow, Reply, Summarize, Summary, together
from policies.fidelity.prompts import ANSWER, JUDGE, NOT_STATED, PROPOSE
from policies.fidelity.questions import MOST, Question, proposed
from policies.fidelity.verdicts import Fidelity, Judged, Verdict, read_verdict
from policies.summaries import Line, Prompt, enclosed, harmless, normal_text, render_transcript
from policies.summaries.chunks import Sized, divide, sized, split_text
from policies.summaries.transcript import harmless_lines
from policies.tokens import TokenCounter

AT_A_TIME = 5
"""Questions that one call answers."""
ANSWER_TOKENS = 120
VERDICT_TOKENS = 16
PROPOSAL_TOKENS = 600
FENCE_TOKENS = 40
SMALLEST_ROOM = 100
EVERY_CHUNK = 1_000_000
LARGEST_ANSWER = 0.25
"""Share of the judge's window that one answer may take."""
_NUMBERED = re.compile(r"^[\s*>#-]{0,8}(?:question |answer |q|a)?(\d{1,2})\s{0,2}[:.)\u2013-]\s{0,9}", re.IGNORECASE)
_NOT_STATED = re.compile(r"\W{0,6}not[ _]stated\W{0,6}\Z", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What the models can read, tokens of prompt and answer together, and how a verdict is asked for.

    ``most_chunks`` is how many parts a context may be read in; one that needs more is not evaluated. ``key`` is where
    the shell may keep answers, empty for nowhere. ``propose`` has the model write the questions that are still missing.
    """

    counter: TokenCounter
    max_input: int
    judge_input: int | None = None
    most_chunks: int = EVERY_CHUNK
    by_schema: bool = True
    propose: int = 0
    key: str = ""


@dataclass(frozen=True, slots=True)
class _Answers:
    """Answers by the number of their question, of a context or a part of it; a question that failed has its code."""

    texts: Mapping[int, str]
    failures: Mapping[int, str]
    calls: int


def evaluate(
    original: Sequence[Line], compacted: Sequence[Line], *, questions: Sequence[Question], terms: Terms
) -> Flow[Fidelity]:
    """The verdicts on every question; without any where a context cannot be read, with the reason."""
    whole, less = (sized(harmless_lines(lines), terms.counter) for lines in (original, compacted))
    if not whole or not less or not questions:
        return Fidelity(failure="nothing")
    calls = 0
    if terms.propose:
        more = yield from _propose(whole, terms)
        calls += 1
        questions = _joined(questions, more)
    groups = [tuple(questions[at : at + AT_A_TIME]) for at in range(0, len(questions), AT_A_TIME)]
    chunked = [[_chunks(lines, group, terms) for group in groups] for lines in (whole, less)]
    if any(not chunks for side in chunked for chunks in side):
        return Fidelity(calls=calls, failure="no_room")
    if any(len(chunks) > terms.most_chunks for side in chunked for chunks in side):
        return Fidelity(calls=calls, failure="too_long")
    flows = [_answer(group, chunks, terms) for side in chunked for group, chunks in zip(groups, side, strict=True)]
    told = yield from together(flows)
    calls += sum(each.calls for each in told)
    sides = [_renumbered(told[: len(groups)]), _renumbered(told[len(groups) :])]
    judged = yield from together([_judge(n, q, sides[0], sides[1], terms) for n, q in enumerate(questions)])
    failed = {j.why for j, _ in judged}
    failure = failed.pop() if len(failed) == 1 and all(j.verdict is Verdict.UNKNOWN for j, _ in judged) else ""
    return Fidelity(tuple(j for j, _ in judged), calls + sum(asked for _, asked in judged), failure)


def _joined(questions: Sequence[Question], more: Sequence[Question]) -> list[Question]:
    known = {q.text.lower() for q in questions}
    return [*questions, *(q for q in more if q.text.lower() not in known)][:MOST]


def _propose(lines: Sequence[Sized], terms: Terms) -> Flow[tuple[Question, ...]]:
    """Questions that the model writes about the newest part of the conversation that it can read."""
    instruction = PROPOSE.instruction.replace("{words}", str(terms.propose))
    room = terms.max_input - _size(PROPOSE, instruction, terms) - PROPOSAL_TOKENS
    if room < SMALLEST_ROOM:
        return ()
    newest = divide(lines, room, most=EVERY_CHUNK, counter=terms.counter)[-1]
    material = render_transcript([s.line for s in newest])
    reply = yield _ask(PROPOSE, f"{material}\n\n{instruction}", PROPOSAL_TOKENS, terms)
    return tuple(proposed(reply.text))[: terms.propose] if isinstance(reply, Summary) else ()


def _chunks(lines: Sequence[Sized], group: Sequence[Question], terms: Terms) -> list[list[Sized]]:
    """The context in parts that a question with its answer can hold; empty where not even one line has room."""
    room = _room(group, terms)
    return divide(lines, room, most=EVERY_CHUNK, counter=terms.counter) if room >= SMALLEST_ROOM else []


def _room(group: Sequence[Question], terms: Terms) -> int:
    """Tokens that are left for material beside the questions and their answers."""
    longest = max((ANSWER.ask(max_tokens=_tokens(group), merge=m) for m in (False, True)), key=terms.counter.count)
    fixed = _size(ANSWER, longest, terms) + terms.counter.count(_listed(group))
    return terms.max_input - fixed - _tokens(group) - FENCE_TOKENS


def _size(prompt: Prompt, instruction: str, terms: Terms) -> int:
    return terms.counter.count(prompt.system) + terms.counter.count(instruction) + FENCE_TOKENS


def _tokens(group: Sequence[Question]) -> int:
    return ANSWER_TOKENS * len(group)


def _listed(group: Sequence[Question]) -> str:
    return enclosed("questions", "\n".join(f"{n}: {q.text}" for n, q in enumerate(group, 1)))


def _answer(group: Sequence[Question], chunks: Sequence[Sequence[Sized]], terms: Terms) -> Flow[_Answers]:
    """The answers to a group of questions from a whole context, read in one part or in several that are merged."""
    parts = yield from together([_from_part(group, chunk, terms) for chunk in chunks])
    calls = sum(part.calls for part in parts)
    failures = {n: code for part in parts for n, code in part.failures.items()}
    texts: dict[int, str] = {}
    open_: dict[int, list[str]] = {}
    for n in range(len(group)):
        stated = [part.texts[n] for part in parts if n in part.texts and not _NOT_STATED.match(part.texts[n])]
        if len({normal_text(text) for text in stated}) > 1:
            open_[n] = stated
        elif stated or any(n in part.texts for part in parts):
            texts[n] = stated[-1] if stated else NOT_STATED
    if open_:
        merged = yield from _merge(group, open_, terms)
        calls += merged.calls
        failures |= merged.failures
        texts |= merged.texts
    return _Answers({n: t for n, t in texts.items() if n not in failures}, failures, calls)


def _from_part(group: Sequence[Question], chunk: Sequence[Sized], terms: Terms) -> Flow[_Answers]:
    material = render_transcript([s.line for s in chunk])
    asked = f"{material}\n\n{_listed(group)}\n\n{ANSWER.ask(max_tokens=_tokens(group))}"
    reply = yield _ask(ANSWER, asked, _tokens(group), terms)
    return _read(reply, range(len(group)))


def _merge(group: Sequence[Question], open_: Mapping[int, Sequence[str]], terms: Terms) -> Flow[_Answers]:
    """One answer to each question of the answers from its parts; in halves where they cannot be read at once."""
    numbers = list(open_)
    asked = [group[n] for n in numbers]
    found = [_said(n, q, open_[i]) for n, (i, q) in enumerate(zip(numbers, asked, strict=True), 1)]
    material = enclosed("answers from consecutive parts", "\n".join(found))
    if terms.counter.count(material) > _room(asked, terms):
        return (yield from _merge_halves(group, open_, terms))
    prompt = f"{material}\n\n{ANSWER.ask(max_tokens=_tokens(asked), merge=True)}"
    reply = yield _ask(ANSWER, prompt, _tokens(asked), terms)
    return _read(reply, numbers)


def _merge_halves(group: Sequence[Question], open_: Mapping[int, Sequence[str]], terms: Terms) -> Flow[_Answers]:
    numbers = list(open_)
    if len(numbers) > 1:
        half = len(numbers) // 2
        parts = [{n: open_[n] for n in some} for some in (numbers[:half], numbers[half:])]
        told = yield from together([_merge(group, part, terms) for part in parts])
        return _Answers(
            told[0].texts | dict(told[1].texts),  # type: ignore[operator] # both are dicts
            {**told[0].failures, **told[1].failures},
            told[0].calls + told[1].calls,
        )
    (number,), answers = numbers, open_[numbers[0]]
    if len(answers) <= 2:
        return _Answers({}, {number: "no_room"}, 0)
    half = len(answers) // 2
    told = yield from together([_merge(group, {number: some}, terms) for some in (answers[:half], answers[half:])])
    calls = sum(each.calls for each in told)
    failures = {n: code for each in told for n, code in each.failures.items()}
    if failures:
        return _Answers({}, failures, calls)
    last = yield from _merge(group, {number: [each.texts[number] for each in told]}, terms)
    return _Answers(last.texts, last.failures, calls + last.calls)


def _said(number: int, question: Question, answers: Sequence[str]) -> str:
    parts = "\n".join(f"   part {n}: {' '.join(answer.split())}" for n, answer in enumerate(answers, 1))
    return f"{number}: {question.text}\n{parts}"


def _read(reply: Reply, numbers: Sequence[int]) -> _Answers:
    """The numbered answers of a reply; what it does not answer has failed."""
    if not isinstance(reply, Summary):
        code = reply.reason if isinstance(reply, Failed) else "no_reply"
        return _Answers({}, dict.fromkeys(numbers, code), 1)
    said: dict[int, list[str]] = {}
    at = 0
    for line in harmless(reply.text).splitlines():
        head = _NUMBERED.match(line)
        if head is not None and 0 < int(head.group(1)) <= len(numbers) and int(head.group(1)) not in said:
            at = int(head.group(1))
            line = line[head.end() :]
        if at and line.strip():
            said.setdefault(at, []).append(line.strip())
    if not said and len(numbers) == 1 and reply.text.strip():
        said[1] = [harmless(reply.text).strip()]
    texts = {numbers[n - 1]: "\n".join(lines) for n, lines in said.items()}
    return _Answers(texts, {n: "no_answer" for n in numbers if n not in texts}, 1)


def _renumbered(answers: Sequence[_Answers]) -> _Answers:
    """The answers of all groups under the numbers that the questions have together."""
    texts = {g * AT_A_TIME + n: t for g, each in enumerate(answers) for n, t in each.texts.items()}
    failures = {g * AT_A_TIME + n: c for g, each in enumerate(answers) for n, c in each.failures.items()}
    return _Answers(texts, failures, 0)


def _judge(number: int, question: Question, whole: _Answers, less: _Answers, terms: Terms) -> Flow[tuple[Judged, int]]:
    """The verdict on one question, and how many calls it took: a model that takes no schema is mostly known for it."""
    a, b = whole.texts.get(number, ""), less.texts.get(number, "")
    failure = whole.failures.get(number) or less.failures.get(number)
    if failure or not a or not b:
        return Judged(question, a, b, Verdict.UNKNOWN, failure or "no_answer"), 0
    if _NOT_STATED.match(a):
        return Judged(question, a, b, Verdict.UNKNOWN, "not_stated"), 0
    if _NOT_STATED.match(b):
        return Judged(question, a, b, Verdict.NO, "lost"), 0
    if _lacks(question, a, b):
        return Judged(question, a, b, Verdict.NO, "value"), 0
    if normal_text(a) == normal_text(b):
        return Judged(question, a, b, Verdict.YES, "same"), 0
    most = int((terms.judge_input or terms.max_input) * LARGEST_ANSWER)
    shown = [enclosed(name, text) for name, text in
             (("question", question.text), ("answer A", a), ("answer B", b))]  # fmt: skip
    if any(len(split_text(text, most, counter=terms.counter)) > 1 for text in shown):
        return Judged(question, a, b, Verdict.UNKNOWN, "too_long"), 0
    asked = "\n\n".join((*shown, JUDGE.instruction))
    reply = yield _ask(JUDGE, asked, VERDICT_TOKENS, terms, schema=JUDGE.schema if terms.by_schema else {})
    if isinstance(reply, Failed) and reply.reason == "no_schema":
        reply = yield _ask(JUDGE, asked, VERDICT_TOKENS, terms)
    verdict, why = read_verdict(reply)
    return Judged(question, a, b, verdict, why), 1


def _lacks(question: Question, a: str, b: str) -> bool:
    """Whether answer B misses a value that is known to belong in it and that answer A gives."""
    whole, less = normal_text(a), normal_text(b)
    return any(v in whole and v not in less for v in map(normal_text, question.expected))


def _ask(
    prompt: Prompt, asked: str, max_tokens: int, terms: Terms, *, schema: Mapping[str, object] | None = None
) -> Summarize:
    key = f"{terms.key}:{prompt.digest}" if terms.key else ""
    return Summarize(prompt.system, asked, max_tokens, prompt.purpose, schema=dict(schema or {}), key=key)
