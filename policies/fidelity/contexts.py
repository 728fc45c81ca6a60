"""The two contexts that are compared: what the client sent, and what went up in its place; both without the head."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from policies.ledger import EditKind, Piece
from policies.messages import Transcript
from policies.sources import lines_of, sources_of
from policies.summaries import Line
from policies.text.segments import Source
from policies.turns import answered_calls, units

NOTES = "notes on earlier messages"
RECALLED = "recalled earlier message"


@dataclass(frozen=True, slots=True)
class Contexts:
    """A conversation whole and compacted, as who said what.

    ``sources`` are the messages of the whole one, ``tokens_before`` and ``tokens_after`` what the two contexts take.
    """

    sources: tuple[Source, ...]
    compacted: tuple[Line, ...]
    tokens_before: int = 0
    tokens_after: int = 0

    @property
    def original(self) -> tuple[Line, ...]:
        """The whole conversation."""
        return tuple(lines_of(self.sources))

    @property
    def ratio(self) -> float | None:
        """How many times smaller the compacted context is; None where either is empty."""
        return self.tokens_before / self.tokens_after if self.tokens_before and self.tokens_after else None


def contexts_of(transcript: Transcript, pieces: Sequence[Piece]) -> Contexts:
    """The contexts of a request as it came and as it was planned."""
    head = transcript.head
    calls = answered_calls(transcript, units(transcript.messages, head))
    indices = range(head, len(transcript.messages))
    whole = sources_of(transcript, indices, calls)
    by_index = dict(zip(indices, whole, strict=True))
    lines: list[Line] = []
    tokens = 0
    for piece in pieces:
        if piece.index is not None and piece.index < head:
            continue
        tokens += piece.tokens
        lines += _lines(piece, by_index)
    before = sum(transcript.messages[i].tokens for i in indices)
    return Contexts(tuple(whole), tuple(lines), before, tokens)


def compacted_text(contexts: Contexts) -> str:
    """All of the compacted context in one text."""
    return "\n".join(line.text for line in contexts.compacted)


def _lines(piece: Piece, by_index: Mapping[int, Source]) -> list[Line]:
    if piece.index is None:
        return [Line(RECALLED if piece.kind is EditKind.RECALL else NOTES, piece.text or "")]
    source = by_index[piece.index]
    return lines_of([source if piece.text is None else replace(source, text=piece.text)])
