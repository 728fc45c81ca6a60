"""How much of what a conversation needs stands in its compacted context, looked up without a model.

The two contexts that are compared are what the client sent, and what went up in its place; both without the head.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from policies.fidelity.questions import MAX_VALUE_LEN, MIN_VALUE_LEN, used_values
from policies.ledger import EditKind, PlannedMessage
from policies.messages import ToolCall, Transcript
from policies.settings import NoteTaking
from policies.state import read_state
from policies.summary import MaterialLine, lines_of, normal_text
from policies.summary.check import places
from policies.text.literals import literals
from policies.text.segments import Source, sources_of
from policies.turns import answered_calls, units

MAX_MISSING = 40
MAX_LOOKED = 200
MAX_READ = 20_000
NOTES = "notes on earlier messages"
RECALLED = "recalled earlier message"


@dataclass(frozen=True, slots=True)
class Contexts:
    """A conversation whole and compacted, as who said what.

    ``sources`` are the messages of the whole one, ``tokens_before`` and ``tokens_after`` what the two contexts take.
    """

    sources: tuple[Source, ...]
    compacted: tuple[MaterialLine, ...]
    tokens_before: int = 0
    tokens_after: int = 0

    @property
    def original(self) -> tuple[MaterialLine, ...]:
        """The whole conversation."""
        return tuple(lines_of(self.sources))

    @property
    def ratio(self) -> float | None:
        """How many times smaller the compacted context is; None where either is empty."""
        return self.tokens_before / self.tokens_after if self.tokens_before and self.tokens_after else None


def contexts_of(transcript: Transcript, pieces: Sequence[PlannedMessage]) -> Contexts:
    """The contexts of a request as it came and as it was planned."""
    head = transcript.head
    calls = answered_calls(transcript, units(transcript.messages, head))
    indices = range(head, len(transcript.messages))
    whole = sources_of(transcript, indices, calls)
    by_index = dict(zip(indices, whole, strict=True))
    lines: list[MaterialLine] = []
    tokens = 0
    for piece in pieces:
        if piece.index is not None and piece.index < head:
            continue
        tokens += piece.tokens
        lines += _lines_of(piece, by_index)
    before = sum(transcript.messages[i].tokens for i in indices)
    return Contexts(tuple(whole), tuple(lines), before, tokens)


def _lines_of(piece: PlannedMessage, by_index: Mapping[int, Source]) -> list[MaterialLine]:
    if piece.index is None:
        return [MaterialLine(RECALLED if piece.kind is EditKind.RECALL else NOTES, piece.text or "")]
    source = by_index[piece.index]
    return lines_of([source if piece.text is None else replace(source, text=piece.text)])


@dataclass(frozen=True, slots=True)
class Share:
    """So many of one kind are wanted, and of these so many kept; ``reachable`` counts those kept or archived."""

    wanted: int = 0
    kept: int = 0
    reachable: int = 0

    def __add__(self, other: "Share") -> "Share":
        return Share(self.wanted + other.wanted, self.kept + other.kept, self.reachable + other.reachable)

    @property
    def value(self) -> float | None:
        """Kept over wanted, None where nothing is wanted."""
        return self.kept / self.wanted if self.wanted else None

    @property
    def recoverable(self) -> float | None:
        """Kept or in the archive over wanted, None where nothing is wanted."""
        return self.reachable / self.wanted if self.wanted else None


@dataclass(frozen=True, slots=True)
class Coverage:
    """What of a conversation is kept.

    ``facts`` are values that it is known to need later, ``identifiers`` what its calls used and its user named
    ``rules`` what the user stated; nothing is counted twice. ``missing`` are the first that are not kept.
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
        """All kinds together."""
        return self.facts + self.identifiers + self.rules

    @property
    def score(self) -> float | None:
        """The share of all that is wanted that is kept; None where nothing is wanted."""
        return self.whole.value


def coverage_of(
    contexts: Contexts,
    *,
    facts: Iterable[Sequence[str]] = (),
    later: Sequence[ToolCall] = (),
    archived: str = "",
    tools: NoteTaking,
) -> Coverage:
    """The coverage of a compacted context; each of ``facts`` is kept if all of its values are.

    Only what stands in the whole context is wanted. ``archived`` is the text of originals that can be fetched back.
    """
    kept = _text_of(contexts.compacted)
    whole = _text_of(contexts.original)
    archive = f"{kept}\n{normal_text(archived)}"
    missing: list[str] = []

    def share(wanted: Sequence[tuple[str, ...]]) -> Share:
        counts = [0, 0, 0]
        for values in wanted:
            there = _stand(values, kept)
            counts = [counts[0] + 1, counts[1] + there, counts[2] + (there or _stand(values, archive))]
            if not there:
                missing.append(" ".join(values))
        return Share(*counts)

    wanted = [tuple(v) for v in dict.fromkeys(tuple(each) for each in facts if each) if _stand(v, whole)]
    known = {value.lower() for values in wanted for value in values}
    named = _identifiers(contexts.sources, later)
    others = [(v,) for v in named if v.lower() not in known and _stand((v,), whole)]
    rules = [(rule,) for rule in read_state(contexts.sources, goal="", tools=tools).constraints]
    found = Coverage(share(wanted), share(others), share(rules))
    return Coverage(found.facts, found.identifiers, found.rules, tuple(missing[:MAX_MISSING]))


def _identifiers(sources: Sequence[Source], later: Sequence[ToolCall]) -> list[str]:
    """What calls took from earlier messages, and what the user named."""
    found = dict.fromkeys(v for values in used_values(sources, later).values() for v in values)
    for source in sources:
        if source.is_users:
            named = literals(source.text[:MAX_READ])
            found.update(dict.fromkeys(v for v in named if MIN_VALUE_LEN <= len(v) <= MAX_VALUE_LEN))
    return list(found)


def _text_of(lines: Sequence[MaterialLine]) -> str:
    return normal_text("\n".join(line.text for line in lines))


def _stand(values: Sequence[str], text: str) -> bool:
    """Whether all of the values stand in a normal text, each as whole words."""
    return all(_stands(" ".join(normal_text(value).split()), text) for value in values)


def _stands(value: str, text: str) -> bool:
    def is_whole(at: int) -> bool:
        end = at + len(value)
        before = at > 0 and value[0].isalnum() and text[at - 1].isalnum()
        return not before and not (end < len(text) and value[-1].isalnum() and text[end].isalnum())

    return not value or any(map(is_whole, places(text, value, most=MAX_LOOKED)))
