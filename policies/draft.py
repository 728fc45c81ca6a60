"""The array that is being planned: pieces that point at the client's messages or replace them.

Layers turn one draft into the next; nothing is ever changed in place, and the client's array is never
touched, so a layer whose work did not pay is dropped by keeping the draft from before it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from policies.condensed import Condensed
from policies.ledger import Cut, Edit, EditKind
from policies.limits import BUCKETS
from policies.messages import ToolDefinition, Transcript
from policies.pieces import Piece


@dataclass(frozen=True, slots=True)
class Draft:
    """A planned array with what led to it.

    ``edits`` (by the message's index) and ``cut`` are new in this request; ``active_cut`` is the cut in the
    array, new or replayed. ``checkpoint`` is the structured state of a new cut as JSON text. ``pruned`` are the
    definitions of tools that are left out, ``tool_edits`` the new edits that leave them out. ``condensed`` is what
    became of every message that was to be put in shorter words, ``reason`` why the layer at work did less than asked.
    """

    transcript: Transcript
    pieces: tuple[Piece, ...]
    edits: Mapping[int, Edit] = field(default_factory=dict)
    cut: Cut | None = None
    active_cut: Cut | None = None
    checkpoint: str | None = None
    pruned: tuple[ToolDefinition, ...] = ()
    tool_edits: tuple[Edit, ...] = ()
    condensed: tuple[Condensed, ...] = ()
    reason: str = ""

    @property
    def tools(self) -> int:
        """Uncalibrated tokens of the tool definitions that are sent."""
        return max(0, self.transcript.tools - sum(d.tokens for d in self.pruned))

    @property
    def tokens(self) -> int:
        """Uncalibrated tokens of the planned request, tools and priming included."""
        return sum(p.tokens for p in self.pieces) + self.tools + self.transcript.priming

    def tokens_by_index(self) -> dict[int, int]:
        """Uncalibrated tokens of the client's messages in the array, by their index."""
        return {p.index: p.tokens for p in self.pieces if p.index is not None}

    @property
    def changed(self) -> bool:
        """Whether the array differs from the client's."""
        if self.pruned or len(self.pieces) != len(self.transcript.messages):
            return True
        return any(p.text is not None or p.index != i for i, p in enumerate(self.pieces))

    @property
    def applied(self) -> dict[str, int]:
        """How many edits of each kind are in the array, replayed ones included."""
        counts: dict[str, int] = {}
        for piece in self.pieces:
            if piece.kind is not None:
                counts[piece.kind.value] = counts.get(piece.kind.value, 0) + 1
        if self.active_cut is not None:
            counts[self.active_cut.layer] = 1
        if self.pruned:
            counts[EditKind.PRUNE_TOOLS.value] = len(self.pruned)
        return counts

    def with_edits(self, edits: Mapping[int, Edit], *, new: bool = True) -> "Draft":
        """The draft with the content of messages (by index) replaced; ``new`` ones are to be stored."""
        if not edits:
            return self
        pieces = tuple(each for p in self.pieces for each in _edited(p, edits))
        return replace(self, pieces=pieces, edits={**self.edits, **edits} if new else self.edits)

    def with_cut(self, cut: Cut, *, checkpoint: str | None = None) -> "Draft":
        """The draft with a new cut in place; edits outside what it covers stay. ``checkpoint`` is JSON text."""
        pieces = {p.index: p for p in self.pieces if p.index is not None}
        recalled = self._recalled()
        order = cut_order(self.transcript, cut)
        messages = self.transcript.messages
        placed = tuple(
            piece
            for i in order
            if i is not None or cut.text
            for piece in (
                *recalled.get(i, ()),
                Piece(None, cut.tokens, cut.text) if i is None else pieces.get(i) or Piece(i, messages[i].tokens),
            )
        )
        alive = set(order)
        edits = {i: e for i, e in self.edits.items() if i in alive}
        return replace(self, pieces=placed, edits=edits, cut=cut, active_cut=cut, checkpoint=checkpoint)

    def _recalled(self) -> dict[int | None, tuple[Piece, ...]]:
        """What was put in front of messages, by the index of the message that it belongs to."""
        pairs = pairwise(self.pieces)
        return {after.index: (piece,) for piece, after in pairs if piece.kind is EditKind.RECALL}

    def buckets(self) -> dict[str, int]:
        """Tokens by bucket; every token of the request is in exactly one."""
        result = dict.fromkeys(BUCKETS, 0)
        result["tools"] = self.tools
        result["history"] = self.transcript.priming
        for piece in self.pieces:
            result[self.bucket(piece)] += piece.tokens
        return result

    def bucket(self, piece: Piece) -> str:
        """The one bucket that a piece belongs to: what a call says is history, what it returns a tool output."""
        if piece.index is None:
            return "memory" if piece.kind is EditKind.RECALL else "summary"
        if piece.index in self.transcript.memory:
            return "memory"
        message = self.transcript.messages[piece.index]
        if message.is_head:
            return "system"
        return "tool_outputs" if message.is_result else "history"

    def with_tools_pruned(self, definitions: Sequence[ToolDefinition], edits: Sequence[Edit] = ()) -> "Draft":
        """The draft without these definitions; ``edits`` are the new ones among what leaves them out."""
        if not definitions:
            return self
        return replace(self, pruned=(*self.pruned, *definitions), tool_edits=(*self.tool_edits, *edits))

    def with_condensed(self, condensed: Sequence[Condensed]) -> "Draft":
        """The draft with what became of further messages that were to be put in shorter words."""
        return replace(self, condensed=(*self.condensed, *condensed)) if condensed else self

    def because(self, reason: str) -> "Draft":
        """The draft of a layer that did less than it was asked to, with the code of why."""
        return replace(self, reason=reason) if reason else self


def _edited(piece: Piece, edits: Mapping[int, Edit]) -> tuple[Piece, ...]:
    edit = edits.get(piece.index) if piece.index is not None else None
    if edit is None or edit.kind is EditKind.PIN:
        return (piece,)
    if edit.kind is EditKind.RECALL:
        return (Piece(None, edit.tokens, edit.text, edit.kind), piece)
    return (Piece(piece.index, edit.tokens, edit.text, edit.kind),)


def cut_order(transcript: Transcript, cut: Cut) -> list[int | None]:
    """The indices of an array with a cut in place: head, what stays before the summary, None for the summary,
    what stays after it, the tail."""
    head = transcript.head
    order: list[int | None] = [*range(head), *(head + p for p in cut.before), None, *(head + p for p in cut.after)]
    order.extend(range(head + cut.covers, len(transcript.messages)))
    return order


def untouched(transcript: Transcript) -> Draft:
    """The client's array as a draft."""
    return Draft(transcript, tuple(Piece(i, m.tokens) for i, m in enumerate(transcript.messages)))
