"""What a compaction keeps of a conversation, looked up without a model, and questions about it for
a model.

The contexts are what the client sent and what went up instead, both without the head. A question
that code makes leaves a gap for the requested value.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import chain, zip_longest

from policies.ledger import EditKind, PlannedMessage
from policies.memory.state import read_state
from policies.messages import ToolCall, Transcript
from policies.summary.ask import lines_of
from policies.summary.identifiers import normal_text
from policies.summary.material import MaterialLine, harmless
from policies.text.segments import Source, literals, sources_of
from policies.tokens import shorten

MAX_QUOTE_LEN = 240
VALUE_LEN = range(4, 121)
MAX_VALUES = 4
MAX_READ = 20_000
_KEY = re.compile(r'"[^"]{0,200}"\s{0,9}:')


class Dimension(StrEnum):
    FACTS = "key_facts"
    STATE = "state"
    DECISIONS = "decisions"


@dataclass(frozen=True, slots=True)
class Question:
    """``expected`` are values that the answer has to have, where the whole conversation's answer
    has them.
    """

    text: str
    dimension: Dimension = Dimension.FACTS
    expected: tuple[str, ...] = ()


MINIMUM = (
    Question(
        "What is the goal of this conversation: what does the user want done?", Dimension.STATE
    ),
    Question(
        "Which step is being worked on at the end, and what is to be done next?", Dimension.STATE
    ),
    Question("Which decisions were made, and why?", Dimension.DECISIONS),
    Question(
        "What blocks the work or is unsolved: errors, open problems, missing answers?",
        Dimension.STATE,
    ),
)


@dataclass(frozen=True, slots=True)
class Contexts:
    """``later`` are calls that the conversation makes later."""

    sources: tuple[Source, ...]
    compacted: tuple[MaterialLine, ...]
    tokens_before: int = 0
    tokens_after: int = 0
    later: tuple[ToolCall, ...] = ()

    @property
    def original(self) -> tuple[MaterialLine, ...]:
        return tuple(lines_of(self.sources))


def contexts_of(
    transcript: Transcript, pieces: Sequence[PlannedMessage], later: tuple[ToolCall, ...]
) -> Contexts:
    indices = range(transcript.head, len(transcript.messages))
    sources = tuple(sources_of(transcript, indices, transcript.calls))
    before = sum(transcript.messages[i].tokens for i in indices)
    sent = [piece for piece in pieces if piece.index is None or piece.index >= transcript.head]
    lines: list[MaterialLine] = []
    for piece in sent:
        if piece.index is None:
            origin = (
                "recalled earlier message"
                if piece.kind is EditKind.RECALL
                else "notes on earlier messages"
            )
            lines.append(MaterialLine(origin, piece.text or ""))
        else:
            source = sources[piece.index - transcript.head]
            lines += lines_of([source if piece.text is None else replace(source, text=piece.text)])
    return Contexts(sources, tuple(lines), before, sum(piece.tokens for piece in sent), later)


def questions_for(contexts: Contexts, *, count: int) -> tuple[Question, ...]:
    """At most ``count`` questions: four that suit any conversation, and more about what was said in
    this one.
    """
    state = read_state(contexts.sources, goal="")
    kinds = (
        [_about_calls(tool, values) for tool, values in _used(contexts).items()],
        [_about(rule, Dimension.FACTS) for rule in reversed(state.constraints)],
        [_about(decision.text, Dimension.DECISIONS) for decision in reversed(state.decisions)],
    )
    made = (question for each in zip_longest(*kinds) for question in each if question is not None)
    found = {question.text.lower(): question for question in chain(MINIMUM, made)}
    return tuple(found.values())[:count]


def _about_calls(tool: str, values: Sequence[str]) -> Question:
    text = (
        f"Which identifiers did the conversation name that the tool {_quoted(tool)} needs? Name"
        " each of them."
    )
    return Question(text, Dimension.FACTS, tuple(values[:MAX_VALUES]))


def _about(said: str, dimension: Dimension) -> Question:
    value = max(literals(said), key=len, default="")
    if value and len(said) <= MAX_QUOTE_LEN and value != said:
        return Question(
            f"What stands in the gap: {_quoted(said.replace(value, '____'))}?", dimension, (value,)
        )
    begin = _quoted(shorten(said, max(12, len(said) // 3)))
    return Question(f"What was said in full in the words that begin with {begin}?", dimension)


def _quoted(text: str) -> str:
    return f"\u00ab{shorten(' '.join(harmless(text).split()), MAX_QUOTE_LEN)}\u00bb"


def _used(contexts: Contexts) -> dict[str, list[str]]:
    """By tool the identifiers that its calls took from what was said before them, those of the
    newest call first.
    """
    end = max((source.position for source in contexts.sources), default=0) + 1
    made = [(source.position, call) for source in contexts.sources for call in source.calls]
    found: dict[str, dict[str, None]] = {}
    for position, call in reversed([*made, *((end, call) for call in contexts.later)]):
        said = [source.text for source in contexts.sources if source.position < position]
        for value in literals(_KEY.sub(" ", call.arguments)):
            if len(value) in VALUE_LEN and any(value in text for text in said):
                found.setdefault(call.name, {})[value] = None
    return {tool: list(values) for tool, values in found.items()}


@dataclass(frozen=True, slots=True)
class Share:
    """``reachable`` are those that are kept or can be fetched back."""

    wanted: int = 0
    kept: int = 0
    reachable: int = 0

    def __add__(self, other: "Share") -> "Share":
        return Share(
            self.wanted + other.wanted, self.kept + other.kept, self.reachable + other.reachable
        )

    @property
    def value(self) -> float | None:
        return self.kept / self.wanted if self.wanted else None

    @property
    def recoverable(self) -> float | None:
        return self.reachable / self.wanted if self.wanted else None


@dataclass(frozen=True, slots=True)
class Coverage:
    """What is kept of each kind: ``facts`` are values that the conversation is known to need later,
    ``identifiers`` what its calls used and its user named, ``rules`` what the user stated; nothing
    is counted twice. ``missing`` are those that are not kept.
    """

    kinds: Mapping[str, Share] = field(default_factory=dict)
    missing: tuple[str, ...] = ()

    def __add__(self, other: "Coverage") -> "Coverage":
        kinds = {name: self.kinds.get(name, Share()) + share for name, share in other.kinds.items()}
        return Coverage(kinds, tuple(dict.fromkeys((*self.missing, *other.missing))))

    @property
    def whole(self) -> Share:
        return sum(self.kinds.values(), Share())


def coverage_of(
    contexts: Contexts, *, facts: Iterable[Sequence[str]] = (), archived: str = ""
) -> Coverage:
    """Each of ``facts`` is kept if all of its values are; only those in the whole context count.

    ``archived`` is the text of originals that can be fetched back.
    """
    kept = normal_text("\n".join(line.text for line in contexts.compacted))
    whole = normal_text("\n".join(line.text for line in contexts.original))
    archive = f"{kept}\n{normal_text(archived)}"
    missing: list[str] = []

    def share(wanted: Sequence[tuple[str, ...]]) -> Share:
        gone = [values for values in wanted if not _has(kept, values)]
        missing.extend(" ".join(values) for values in gone)
        there = len(wanted) - len(gone)
        return Share(len(wanted), there, there + sum(_has(archive, values) for values in gone))

    needed = [
        values
        for values in dict.fromkeys(tuple(each) for each in facts if each)
        if _has(whole, values)
    ]
    known = {value.lower() for values in needed for value in values}
    users = (literals(source.text[:MAX_READ]) for source in contexts.sources if source.is_users)
    named = dict.fromkeys(chain(*_used(contexts).values(), *users))
    others = [
        (v,) for v in named if v.lower() not in known and len(v) in VALUE_LEN and _has(whole, (v,))
    ]
    rules = [(rule,) for rule in read_state(contexts.sources, goal="").constraints]
    kinds = {"facts": share(needed), "identifiers": share(others), "rules": share(rules)}
    return Coverage(kinds, tuple(missing))


def _has(text: str, values: Sequence[str]) -> bool:
    """Whether the text has each value, and not as a part of a longer word or number."""
    for value in (" ".join(normal_text(each).split()) for each in values):
        before = r"(?<![^\W_])" if value[:1].isalnum() else ""
        after = r"(?![^\W_])" if value[-1:].isalnum() else ""
        if value not in text or re.search(f"{before}{re.escape(value)}{after}", text) is None:
            return False
    return True
