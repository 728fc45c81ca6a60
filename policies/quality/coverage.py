"""What a compaction keeps of a conversation, looked up without a model, and questions that a model is asked about it.

The contexts are what the client sent and what went up instead, both without the head. A question that code makes leaves
out what it asks for: the value is a gap, or is asked for by the name of a tool's argument.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import chain, zip_longest

from policies.ledger import EditKind, PlannedMessage
from policies.memory.state import read_state
from policies.messages import ToolCall, Transcript
from policies.settings import NoteTaking
from policies.summary.ask import lines_of
from policies.summary.material import MaterialLine, harmless
from policies.summary.provenance import normal_text
from policies.text.segments import Source, literals, parse, sentences, sources_of, structured
from policies.tokens import shorten

MAX_QUOTE_LEN = 240
VALUE_LEN = range(4, 121)
MAX_VALUES = 4
MAX_MISSING = 40
MAX_READ = 20_000


class Dimension(StrEnum):
    FACTS = "key_facts"
    STATE = "state"
    DECISIONS = "decisions"


@dataclass(frozen=True, slots=True)
class Question:
    """``expected`` are values that the answer has to have, where the whole conversation's answer has them."""

    text: str
    dimension: Dimension
    expected: tuple[str, ...] = ()


MINIMUM = (
    Question("What is the goal of this conversation: what does the user want done?", Dimension.STATE),
    Question("Which step is being worked on at the end, and what is to be done next?", Dimension.STATE),
    Question("Which decisions were made, and why?", Dimension.DECISIONS),
    Question(
        "What blocks the work or is unsolved at the end: errors, open problems, missing answers?", Dimension.STATE
    ),
)


@dataclass(frozen=True, slots=True)
class Contexts:
    """``later`` are calls that the conversation goes on to make."""

    sources: tuple[Source, ...]
    compacted: tuple[MaterialLine, ...]
    tokens_before: int = 0
    tokens_after: int = 0
    later: tuple[ToolCall, ...] = ()

    @property
    def original(self) -> tuple[MaterialLine, ...]:
        return tuple(lines_of(self.sources))


def contexts_of(
    transcript: Transcript, pieces: Sequence[PlannedMessage], *, later: tuple[ToolCall, ...] = ()
) -> Contexts:
    head = transcript.head
    indices = range(head, len(transcript.messages))
    sources = tuple(sources_of(transcript, indices, transcript.calls))
    by_index = dict(zip(indices, sources, strict=True))
    sent = [piece for piece in pieces if piece.index is None or piece.index >= head]
    lines = tuple(line for piece in sent for line in _lines_of(piece, by_index))
    before = sum(transcript.messages[i].tokens for i in indices)
    return Contexts(sources, lines, before, sum(piece.tokens for piece in sent), later)


def _lines_of(piece: PlannedMessage, by_index: Mapping[int, Source]) -> list[MaterialLine]:
    if piece.index is None:
        origin = "recalled earlier message" if piece.kind is EditKind.RECALL else "notes on earlier messages"
        return [MaterialLine(origin, piece.text or "")]
    source = by_index[piece.index]
    return lines_of([source if piece.text is None else replace(source, text=piece.text)])


def questions_for(
    contexts: Contexts, *, count: int, recorded: Iterable[str] = (), tools: NoteTaking
) -> tuple[Question, ...]:
    """At most ``count`` questions, the four that suit any conversation first; ``recorded`` are values it needs."""
    state = read_state(contexts.sources, goal="", tools=tools)
    kinds = (
        _recorded(contexts.sources, recorded),
        _arguments(contexts),
        (_about(rule, Dimension.FACTS) for rule in reversed(state.constraints)),
        (_about(each.text, Dimension.DECISIONS) for each in reversed(state.decisions)),
    )
    made = (question for each in zip_longest(*kinds) for question in each if question is not None)
    found = {question.text.lower(): question for question in chain(MINIMUM, made)}
    return tuple(found.values())[:count]


def _recorded(sources: Sequence[Source], values: Iterable[str]) -> Iterator[Question]:
    said = [s for s in sources if not s.is_result and s.role in ("user", "assistant")]
    short = [text for each in said for text in sentences(each.text) if len(text) <= MAX_QUOTE_LEN]
    for value in dict.fromkeys(values):
        sentence = next((text for text in short if value in text and len(text) > len(value) + 8), None)
        if sentence is not None:
            yield _gap(sentence, value, Dimension.FACTS)


def _arguments(contexts: Contexts) -> Iterator[Question]:
    for (tool, key), values in _used(contexts).items():
        text = f"Which {_quoted(key)} did the conversation name that the tool {_quoted(tool)} needs? Name each of them."
        yield Question(text, Dimension.FACTS, tuple(values[:MAX_VALUES]))


def _about(said: str, dimension: Dimension) -> Question:
    value = max(literals(said), key=len, default="")
    if value and len(said) <= MAX_QUOTE_LEN and value != said:
        return _gap(said, value, dimension)
    begin = _quoted(shorten(said, max(12, len(said) // 3)))
    return Question(f"What was said in full in the words that begin with {begin}?", dimension)


def _gap(sentence: str, value: str, dimension: Dimension) -> Question:
    return Question(f"What stands in the gap: {_quoted(sentence.replace(value, '____'))}?", dimension, (value,))


def _quoted(text: str) -> str:
    return f"\u00ab{shorten(' '.join(harmless(text).split()), MAX_QUOTE_LEN)}\u00bb"


def _used(contexts: Contexts) -> dict[tuple[str, str], list[str]]:
    """By tool and argument the identifiers that calls took from what was said before them, the newest call first."""
    end = max((source.position for source in contexts.sources), default=0) + 1
    made = [(source.position, call) for source in contexts.sources for call in source.calls]
    found: dict[tuple[str, str], dict[str, None]] = {}
    for position, call in reversed([*made, *((end, call) for call in contexts.later)]):
        document = parse(call.arguments)
        for value, _, key, _ in structured(document) if document is not None else ():
            is_identifier = 2 * max(map(len, literals(value)), default=0) >= len(value)
            if not key.strip() or len(value) not in VALUE_LEN or not is_identifier:
                continue
            if any(value in source.text for source in contexts.sources if source.position < position):
                found.setdefault((call.name, key), {})[value] = None
    return {name: list(values) for name, values in found.items()}


@dataclass(frozen=True, slots=True)
class Share:
    """``reachable`` are those that are kept or can be fetched back."""

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


def coverage_of(
    contexts: Contexts, *, facts: Iterable[Sequence[str]] = (), archived: str = "", tools: NoteTaking
) -> Coverage:
    """Each of ``facts`` is kept if all of its values are; only what stands in the whole context is wanted.

    ``archived`` is the text of originals that can be fetched back.
    """
    kept = normal_text("\n".join(line.text for line in contexts.compacted))
    whole = normal_text("\n".join(line.text for line in contexts.original))
    archive = f"{kept}\n{normal_text(archived)}"
    missing: list[str] = []

    def share(wanted: Sequence[tuple[str, ...]]) -> Share:
        gone = [values for values in wanted if not _stand(values, kept)]
        missing.extend(" ".join(values) for values in gone)
        there = len(wanted) - len(gone)
        return Share(len(wanted), there, there + sum(_stand(values, archive) for values in gone))

    needed = [values for values in dict.fromkeys(tuple(each) for each in facts if each) if _stand(values, whole)]
    known = {value.lower() for values in needed for value in values}
    named = [(value,) for value in _identifiers(contexts) if value.lower() not in known and _stand((value,), whole)]
    rules = [(rule,) for rule in read_state(contexts.sources, goal="", tools=tools).constraints]
    return Coverage(share(needed), share(named), share(rules), tuple(missing[:MAX_MISSING]))


def _identifiers(contexts: Contexts) -> dict[str, None]:
    users = (literals(source.text[:MAX_READ]) for source in contexts.sources if source.is_users)
    named = (value for values in users for value in values if len(value) in VALUE_LEN)
    return dict.fromkeys(chain(chain.from_iterable(_used(contexts).values()), named))


def _stand(values: Sequence[str], text: str) -> bool:
    return all(_stands(" ".join(normal_text(value).split()), text) for value in values)


def _stands(value: str, text: str) -> bool:
    """Whether the text has the value, and not as a part of a longer word or number."""
    if value not in text:
        return False
    before = r"(?<![^\W_])" if value[:1].isalnum() else ""
    after = r"(?![^\W_])" if value[-1:].isalnum() else ""
    return re.search(f"{before}{re.escape(value)}{after}", text) is not None
