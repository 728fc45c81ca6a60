"""What is asked about a conversation: four questions in any case, and more that code makes of what was said in it.

A question that code makes leaves out what it asks for: the value of a rule is a gap, the values of a tool's argument
are asked for by the argument's name. Coverage is how much of that stands in the compacted context, looked up without a
model; the contexts are what the client sent and what went up in its place, both without the head.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import chain, zip_longest

from policies.ledger import EditKind, PlannedMessage
from policies.memory.checkpoint import Checkpoint
from policies.memory.state import read_state
from policies.messages import ToolCall, Transcript
from policies.settings import NoteTaking
from policies.summary.ask import lines_of
from policies.summary.material import MaterialLine, harmless
from policies.summary.provenance import normal_text, places
from policies.text.segments import Source, literals, parse, sentences, sources_of, structured
from policies.tokens import shorten

MIN_QUESTIONS, MAX_QUESTIONS = 4, 20
MAX_QUOTE_LEN = 240
MAX_VALUE_LEN = 120
MIN_VALUE_LEN = 4
MAX_VALUES = 4
MAX_CALLS = 400
BEGINNING = 12
GAP = "____"
MAX_MISSING = 40
MAX_LOOKED = 200
MAX_READ = 20_000
NOTES = "notes on earlier messages"
RECALLED = "recalled earlier message"


class Dimension(StrEnum):
    FACTS = "key_facts"
    STATE = "state"
    DECISIONS = "decisions"


@dataclass(frozen=True, slots=True)
class Question:
    text: str
    dimension: Dimension
    origin: str
    expected: tuple[str, ...] = ()


MINIMUM = (
    Question("What is the goal of this conversation: what does the user want done?", Dimension.STATE, "minimum"),
    Question("Which step is being worked on at the end, and what is to be done next?", Dimension.STATE, "minimum"),
    Question("Which decisions were made, and why?", Dimension.DECISIONS, "minimum"),
    Question("What blocks the work or is unsolved at the end: errors, open problems, missing answers?",
             Dimension.STATE, "minimum"),
)  # fmt: skip


def questions_for(
    sources: Sequence[Source],
    *,
    count: int,
    later: Sequence[ToolCall] = (),
    recorded: Sequence[str] = (),
    tools: NoteTaking,
) -> tuple[Question, ...]:
    """At most ``count`` questions (4 to 20), the most telling of each kind first.

    ``later`` are calls that the conversation goes on to make, ``recorded`` values that it is known to need.
    """
    state = read_state(sources, goal="", tools=tools)
    kinds = (
        _recorded(sources, recorded),
        _arguments(sources, later),
        _rules(state),
        _decisions(state),
        _statuses(state),
        _issues(state),
    )
    found = {question.text.lower(): question for question in MINIMUM}
    for question in chain.from_iterable(zip_longest(*kinds)):
        if len(found) >= min(max(count, MIN_QUESTIONS), MAX_QUESTIONS):
            break
        if question is not None:
            found.setdefault(question.text.lower(), question)
    return tuple(found.values())


def proposed(text: str) -> Iterator[Question]:
    for line in text.splitlines():
        said = harmless(line).strip().lstrip("-*0123456789.) \t")
        if said.endswith("?") and 10 < len(said) <= MAX_QUOTE_LEN:
            yield Question(said, _dimension(said), "model")


def _dimension(text: str) -> Dimension:
    low = text.lower()
    if any(word in low for word in ("decid", "decision", "chosen", "choose", "why ")):
        return Dimension.DECISIONS
    if any(word in low for word in ("status", "done", "step", "progress", "next", "open", "blocked")):
        return Dimension.STATE
    return Dimension.FACTS


def _recorded(sources: Sequence[Source], values: Sequence[str]) -> Iterator[Question]:
    for value in dict.fromkeys(values):
        sentence = next((s for source in sources for s in _sentences(source) if value in s), None)
        if sentence is not None and len(sentence) > len(value) + 8:
            yield _gap(sentence, value, Dimension.FACTS, "recorded")


def _sentences(source: Source) -> tuple[str, ...]:
    if source.is_result or source.role not in {"user", "assistant"}:
        return ()
    return tuple(s for s in sentences(source.text) if len(s) <= MAX_QUOTE_LEN)


def used_values(sources: Sequence[Source], later: Sequence[ToolCall] = ()) -> dict[tuple[str, str], list[str]]:
    found: dict[tuple[str, str], dict[str, None]] = {}
    end = max((s.position for s in sources), default=0) + 1
    made = [(s.position, call) for s in sources for call in s.calls]
    said = [(s.position, s.text) for s in sources]
    for position, call in reversed([*made, *((end, call) for call in later)][-MAX_CALLS:]):
        document = parse(call.arguments)
        for value, _, key, _ in structured(document) if document is not None else ():
            if not key.strip() or not MIN_VALUE_LEN <= len(value) <= MAX_VALUE_LEN or not _names(value):
                continue
            if any(value in text for at, text in said if at < position):
                found.setdefault((call.name, key), {})[value] = None
    return {name: list(values) for name, values in found.items()}


def _names(value: str) -> bool:
    return 2 * max(map(len, literals(value)), default=0) >= len(value)


def _arguments(sources: Sequence[Source], later: Sequence[ToolCall]) -> Iterator[Question]:
    for (tool, key), values in used_values(sources, later).items():
        text = f"Which {_quoted(key)} did the conversation name that the tool {_quoted(tool)} needs? Name each of them."
        yield Question(text, Dimension.FACTS, "identifier", tuple(values[:MAX_VALUES]))


def _rules(state: Checkpoint) -> Iterator[Question]:
    for rule in reversed(state.constraints):
        yield _about(rule, Dimension.FACTS, "constraint", "What did the user say in full in the words that begin with")


def _decisions(state: Checkpoint) -> Iterator[Question]:
    for decision in reversed(state.decisions):
        if decision.rationale:
            text = f"Why was this decided: {_quoted(decision.text)}?"
            yield Question(text, Dimension.DECISIONS, "decision", literals(decision.rationale)[:MAX_VALUES])
        else:
            yield _about(
                decision.text, Dimension.DECISIONS, "decision", "What was decided in the words that begin with"
            )


def _about(said: str, dimension: Dimension, origin: str, asking: str) -> Question:
    value = max(literals(said), key=len, default="")
    if value and len(said) <= MAX_QUOTE_LEN and value != said:
        return _gap(said, value, dimension, origin)
    return Question(f"{asking} {_quoted(shorten(said, max(BEGINNING, len(said) // 3)))}?", dimension, origin)


def _statuses(state: Checkpoint) -> Iterator[Question]:
    for task in reversed(state.subtasks):
        text = f"How far is this: {_quoted(task.text)}? Done, in progress, or still to do?"
        yield Question(text, Dimension.STATE, "status")


def _issues(state: Checkpoint) -> Iterator[Question]:
    for issue in reversed(state.open_issues):
        yield Question(f"Is this solved or still open: {_quoted(issue)}?", Dimension.STATE, "issue")


def _gap(sentence: str, value: str, dimension: Dimension, origin: str) -> Question:
    shown = sentence.replace(value, GAP)
    return Question(f"What stands in the gap: {_quoted(shown)}?", dimension, origin, (value,))


def _quoted(text: str) -> str:
    return f"\u00ab{shorten(' '.join(harmless(text).split()), MAX_QUOTE_LEN)}\u00bb"


@dataclass(frozen=True, slots=True)
class Contexts:
    sources: tuple[Source, ...]
    compacted: tuple[MaterialLine, ...]
    tokens_before: int = 0
    tokens_after: int = 0

    @property
    def original(self) -> tuple[MaterialLine, ...]:
        return tuple(lines_of(self.sources))

    @property
    def ratio(self) -> float | None:
        return self.tokens_before / self.tokens_after if self.tokens_before and self.tokens_after else None


def contexts_of(transcript: Transcript, pieces: Sequence[PlannedMessage]) -> Contexts:
    head = transcript.head
    indices = range(head, len(transcript.messages))
    whole = sources_of(transcript, indices, transcript.calls)
    by_index = dict(zip(indices, whole, strict=True))
    sent = [piece for piece in pieces if piece.index is None or piece.index >= head]
    lines = tuple(line for piece in sent for line in _lines_of(piece, by_index))
    before = sum(transcript.messages[i].tokens for i in indices)
    return Contexts(tuple(whole), lines, before, sum(piece.tokens for piece in sent))


def _lines_of(piece: PlannedMessage, by_index: Mapping[int, Source]) -> list[MaterialLine]:
    if piece.index is None:
        return [MaterialLine(RECALLED if piece.kind is EditKind.RECALL else NOTES, piece.text or "")]
    source = by_index[piece.index]
    return lines_of([source if piece.text is None else replace(source, text=piece.text)])


@dataclass(frozen=True, slots=True)
class Share:
    wanted: int = 0
    kept: int = 0
    reachable: int = 0

    def __add__(self, other: "Share") -> "Share":
        return Share(self.wanted + other.wanted, self.kept + other.kept, self.reachable + other.reachable)

    @property
    def value(self) -> float | None:
        return self.kept / self.wanted if self.wanted else None

    @property
    def recoverable(self) -> float | None:
        return self.reachable / self.wanted if self.wanted else None


@dataclass(frozen=True, slots=True)
class Coverage:
    """``facts`` are values that the conversation is known to need later, ``identifiers`` what its calls used and its
    user named, ``rules`` what the user stated; nothing is counted twice. ``missing`` are the first that are not kept.
    """

    facts: Share = Share()
    identifiers: Share = Share()
    rules: Share = Share()
    missing: tuple[str, ...] = ()

    def __add__(self, other: "Coverage") -> "Coverage":
        return Coverage(
            self.facts + other.facts,
            self.identifiers + other.identifiers,
            self.rules + other.rules,
            (*self.missing, *other.missing)[:MAX_MISSING],
        )

    @property
    def whole(self) -> Share:
        return self.facts + self.identifiers + self.rules

    @property
    def score(self) -> float | None:
        return self.whole.value


def coverage_of(
    contexts: Contexts,
    *,
    facts: Iterable[Sequence[str]] = (),
    later: Sequence[ToolCall] = (),
    archived: str = "",
    tools: NoteTaking,
) -> Coverage:
    """Each of ``facts`` is kept if all of its values are; only what stands in the whole context is wanted.

    ``archived`` is the text of originals that can be fetched back.
    """
    kept = _text_of(contexts.compacted)
    whole = _text_of(contexts.original)
    archive = f"{kept}\n{normal_text(archived)}"
    missing: list[str] = []

    def share(wanted: Sequence[tuple[str, ...]]) -> Share:
        gone = [values for values in wanted if not _stand(values, kept)]
        missing.extend(" ".join(values) for values in gone)
        there = len(wanted) - len(gone)
        return Share(len(wanted), there, there + sum(_stand(values, archive) for values in gone))

    wanted = [tuple(v) for v in dict.fromkeys(tuple(each) for each in facts if each) if _stand(v, whole)]
    known = {value.lower() for values in wanted for value in values}
    named = _identifiers(contexts.sources, later)
    others = [(v,) for v in named if v.lower() not in known and _stand((v,), whole)]
    rules = [(rule,) for rule in read_state(contexts.sources, goal="", tools=tools).constraints]
    shares = share(wanted), share(others), share(rules)
    return Coverage(*shares, missing=tuple(missing[:MAX_MISSING]))


def _identifiers(sources: Sequence[Source], later: Sequence[ToolCall]) -> list[str]:
    found = dict.fromkeys(v for values in used_values(sources, later).values() for v in values)
    for source in sources:
        if source.is_users:
            named = literals(source.text[:MAX_READ])
            found.update(dict.fromkeys(v for v in named if MIN_VALUE_LEN <= len(v) <= MAX_VALUE_LEN))
    return list(found)


def _text_of(lines: Sequence[MaterialLine]) -> str:
    return normal_text("\n".join(line.text for line in lines))


def _stand(values: Sequence[str], text: str) -> bool:
    return all(_stands(" ".join(normal_text(value).split()), text) for value in values)


def _stands(value: str, text: str) -> bool:
    def is_whole(at: int) -> bool:
        end = at + len(value)
        before = at > 0 and value[0].isalnum() and text[at - 1].isalnum()
        return not before and not (end < len(text) and value[-1].isalnum() and text[end].isalnum())

    return not value or any(map(is_whole, places(text, value, most=MAX_LOOKED)))
