"""The array that is being planned: pieces that point at the client's messages or replace them.

Nothing is changed in place, so a layer whose work did not pay is dropped by keeping the draft from
before it. :func:`replay` applies byte for byte what was decided before. A cut applies where its
exact prefix is in the chain and it would remove nothing protected. An edit applies to the message
with its digest and occurrence; to protected content only if it was made while that content was
protected and the chain up to it is the same. The same text may come back as the newest result, and
a rewound conversation reads again what was evicted later.

:class:`Bounds` say where a batch starts and ends, in uncalibrated tokens: from the trigger down to
``low_water`` = fixed + L * room. ``fixed`` is what no layer may shrink (head, tools, the task,
pinned messages, the newest user message), ``room`` = trigger - fixed.

A :class:`Strategy` is a layer's work on the draft within them, by the functions defined below it.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields, replace
from itertools import pairwise
from typing import Any, ClassVar, Self

from policies.effects import Announce, Flow, unheard
from policies.ledger import (
    ADDING,
    CONDENSED,
    SHORTENED,
    Condensed,
    ConversationState,
    Cut,
    Edit,
    EditKind,
    PlannedMessage,
)
from policies.limits import BUCKETS, TokenBudget, charged, first_trigger, is_by_shape, shape_for
from policies.lines import beside_data, in_one_line
from policies.messages import Message, Protection, ToolDefinition, Transcript, protect
from policies.settings import ContextSettings, ExtractShape, Layer, Param
from policies.text.gist import placeholder
from policies.text.segments import Readings
from policies.tokens import TokenCounter, clip_middle, left_out

NO_LAYER = Layer(strategy="")
Rule = Callable[[Sequence[Message | None]], bool]


@dataclass(frozen=True, slots=True)
class Draft:
    """A planned array with what led to it.

    ``edits`` (by the message's index), ``cut`` and ``tool_edits`` are new in this request,
    ``active_cut`` is new or replayed. ``checkpoint`` is the state of a new cut as JSON. ``reason``
    says why the layer at work did less than its target.
    """

    transcript: Transcript
    pieces: tuple[PlannedMessage, ...]
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
        return max(0, self.transcript.tools - sum(d.tokens for d in self.pruned))

    @property
    def tokens(self) -> int:
        return sum(p.tokens for p in self.pieces) + self.tools + self.transcript.priming

    def tokens_by_index(self) -> dict[int, int]:
        return {p.index: p.tokens for p in self.pieces if p.index is not None}

    @property
    def changed(self) -> bool:
        if self.pruned or len(self.pieces) != len(self.transcript.messages):
            return True
        return any(p.text is not None or p.index != i for i, p in enumerate(self.pieces))

    @property
    def has_removed(self) -> bool:
        edits = (*self.edits.values(), *self.tool_edits)
        return self.cut is not None or any(edit.kind not in ADDING for edit in edits)

    @property
    def applied(self) -> dict[str, int]:
        counts = dict(Counter(p.kind.value for p in self.pieces if p.kind is not None))
        if self.active_cut is not None:
            counts[self.active_cut.layer] = 1
        if self.pruned:
            counts[EditKind.PRUNE_TOOLS.value] = len(self.pruned)
        return counts

    def with_edits(self, edits: Mapping[int, Edit], *, new: bool = True) -> "Draft":
        if not edits:
            return self
        pieces = tuple(each for p in self.pieces for each in _edited(p, edits))
        return replace(self, pieces=pieces, edits={**self.edits, **edits} if new else self.edits)

    def with_cut(self, cut: Cut, *, checkpoint: str | None = None) -> "Draft":
        messages = self.transcript.messages
        pieces = {p.index: p for p in self.pieces if p.index is not None}
        recalled = {
            after.index: piece
            for piece, after in pairwise(self.pieces)
            if piece.kind is EditKind.RECALL
        }
        order = cut_order(self.transcript, cut)
        summary = PlannedMessage(None, cut.tokens, cut.text)
        placed = list[PlannedMessage]()
        for i in order:
            if i is None and not cut.text:
                continue
            if i in recalled:
                placed.append(recalled[i])
            placed.append(
                summary if i is None else pieces.get(i) or PlannedMessage(i, messages[i].tokens)
            )
        alive = set(order)
        edits = {i: e for i, e in self.edits.items() if i in alive}
        return replace(
            self, pieces=tuple(placed), edits=edits, cut=cut, active_cut=cut, checkpoint=checkpoint
        )

    def buckets(self) -> dict[str, int]:
        result = dict.fromkeys(BUCKETS, 0)
        result["tools"] = self.tools
        result["history"] = self.transcript.priming
        for piece in self.pieces:
            result[self.bucket(piece)] += piece.tokens
        return result

    def bucket(self, piece: PlannedMessage) -> str:
        if piece.index is None:
            return "memory" if piece.kind is EditKind.RECALL else "summary"
        if piece.index in self.transcript.memory:
            return "memory"
        return self.transcript.messages[piece.index].bucket

    def with_tools_pruned(
        self, definitions: Sequence[ToolDefinition], edits: Sequence[Edit] = ()
    ) -> "Draft":
        if not definitions:
            return self
        return replace(
            self, pruned=(*self.pruned, *definitions), tool_edits=(*self.tool_edits, *edits)
        )

    def with_condensed(self, condensed: Sequence[Condensed]) -> "Draft":
        return replace(self, condensed=(*self.condensed, *condensed)) if condensed else self


def _edited(piece: PlannedMessage, edits: Mapping[int, Edit]) -> tuple[PlannedMessage, ...]:
    edit = edits.get(piece.index) if piece.index is not None else None
    if edit is None or edit.kind is EditKind.PIN:
        return (piece,)
    if edit.kind is EditKind.RECALL:
        return (PlannedMessage(None, edit.tokens, edit.text, edit.kind), piece)
    return (PlannedMessage(piece.index, edit.tokens, edit.text, edit.kind),)


def cut_order(transcript: Transcript, cut: Cut) -> list[int | None]:
    head = transcript.head
    lasting = transcript.lasting
    behind = transcript.after(cut.covers)
    after = sorted(
        [*(lasting[p] for p in cut.after), *(i for i in transcript.floating if i < behind)]
    )
    order: list[int | None] = [*range(head), *(lasting[p] for p in cut.before), None, *after]
    order.extend(range(behind, len(transcript.messages)))
    return order


def untouched(transcript: Transcript) -> Draft:
    return Draft(
        transcript, tuple(PlannedMessage(i, m.tokens) for i, m in enumerate(transcript.messages))
    )


MESSAGE_OVERHEAD = 4


def _results_follow_their_calls(array: Sequence[Message | None]) -> bool:
    waiting: list[str] = []
    for message in array:
        if message is not None and message.is_result:
            if message.answers is None and waiting:
                waiting.pop(0)
            elif message.answers in waiting:
                waiting.remove(message.answers or "")
            else:
                return False
            continue
        if waiting:
            return False
        waiting = list(message.call_ids) if message is not None else []
    return True


def _starts_with_a_user(array: Sequence[Message | None]) -> bool:
    first = next((m for m in array if m is None or not m.is_head), None)
    return first is None or first.role == "user"  # None is the summary, which the user role carries


RULES: tuple[tuple[str, Rule], ...] = (
    ("every tool result follows the call it answers", _results_follow_their_calls),
    ("the array is not empty", bool),
    ("the first message after the head is from the user", _starts_with_a_user),
)


def broken_rules(draft: Draft) -> tuple[str, ...]:
    before: list[Message | None] = list(draft.transcript.messages)
    after = [None if p.index is None else before[p.index] for p in draft.pieces]
    return tuple(name for name, holds in RULES if holds(before) and not holds(after))


LASTING = frozenset({EditKind.INGEST_CAP, EditKind.CLIP, EditKind.UNBOUND, EditKind.RECALL})


def applicable_cut(
    transcript: Transcript, cuts: tuple[Cut, ...], protection: Protection
) -> Cut | None:
    """The newest cut whose prefix is in the chain and that hides nothing protected."""
    guarded = protection.all if cuts else frozenset()
    for cut in reversed(cuts):
        if transcript.begins_with(cut.covers, cut.prefix) and guarded.isdisjoint(
            cut.hidden(transcript.lasting)
        ):
            return cut
    return None


def replay(transcript: Transcript, known: ConversationState, protection: Protection) -> Draft:
    if not known.edits and not known.cuts:
        return untouched(transcript)
    cut = applicable_cut(transcript, known.cuts, protection)
    draft = _replayed(transcript, known, protection, cut=cut)
    added = sum(p.tokens for p in draft.pieces if p.kind is EditKind.RECALL)
    if cut is not None and cut.origin == "resume":
        added += cut.tokens
    # what the summary replaced was longer than what is there now
    if draft.tokens - added > transcript.tokens:
        return _replayed(transcript, known, protection, cut=None)
    return draft


def _replayed(
    transcript: Transcript, known: ConversationState, protection: Protection, *, cut: Cut | None
) -> Draft:
    draft = untouched(transcript)
    if cut is not None:
        draft = replace(draft.with_cut(cut), cut=None)  # it is not new
    return (
        _without_tools(_with_edits(draft, known.edits, protection), known) if known.edits else draft
    )


def _without_tools(draft: Draft, known: ConversationState) -> Draft:
    if not draft.transcript.tools or not any(
        e.kind is EditKind.PRUNE_TOOLS for e in known.edits.values()
    ):
        return draft
    tools = draft.transcript.read_tools()
    return draft.with_tools_pruned(
        [
            d
            for d in tools.definitions
            if (d.digest, 0) in known.edits and d.name not in tools.chosen
        ]
    )


def tokens_kept_verbatim(
    transcript: Transcript, known: ConversationState, protection: Protection
) -> int:
    total = 0
    for index in protection.verbatim:
        message = transcript.messages[index]
        edit = known.edits.get((message.digest, transcript.occurrences[index]))
        if edit is None or edit.kind in ADDING or not _holds(transcript, index, edit, protection):
            total += message.tokens
        else:
            total += edit.tokens
    return total


def _with_edits(
    draft: Draft, edits: Mapping[tuple[bytes, int], Edit], protection: Protection
) -> Draft:
    transcript = draft.transcript
    guarded = protection.all
    found: dict[int, Edit] = {}
    for piece in draft.pieces:
        index = piece.index
        if index is None:
            continue
        edit = edits.get((transcript.messages[index].digest, transcript.occurrences[index]))
        if (
            edit is not None
            and edit.kind is EditKind.RECALL
            and not _holds(transcript, index, edit, protection)
        ):
            edit = edits.get((transcript.chain[index - transcript.head], 0))
        if edit is None or edit.kind is EditKind.PIN:
            continue
        if index in guarded and not _holds(transcript, index, edit, protection):
            continue
        if edit.kind is EditKind.REASONING and index > (protection.current or 0):
            continue  # the turn is open again: the model's thinking in it must be sent again
        found[index] = edit
    return draft.with_edits(found, new=False)


def _holds(transcript: Transcript, index: int, edit: Edit, protection: Protection) -> bool:
    position = index - transcript.head
    if edit.kind is EditKind.RECALL and not edit.chain:
        return True  # it was stored when nothing was recorded about what comes before it
    if edit.kind not in LASTING or (
        edit.kind is EditKind.INGEST_CAP and index in protection.pinned
    ):
        return False
    return position >= 0 and bool(edit.chain) and transcript.chain[position] == edit.chain


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Everything that a strategy needs in addition to the draft.

    The result must stay under ``ceiling``, set when an upstream refused what the budget allowed.
    ``summarizer_input`` is None for the request's own limit. ``layer`` is the one at work and
    ``aim`` the total tokens it should end at. ``early`` is the share of its trigger from which on a
    layer is due; ``free_only`` leaves out those that may ask a model. ``standing`` is the array as
    known edits leave it.
    """

    transcript: Transcript
    settings: ContextSettings
    budget: TokenBudget
    shape: ExtractShape
    known: ConversationState
    counter: TokenCounter
    protection: Protection
    trigger: int
    fixed: int
    ceiling: int | None = None
    summarizer_input: int | None = None
    layer: Layer = NO_LAYER
    aim: int | None = None
    early: float = 1.0
    free_only: bool = False
    readings: Readings | None = None
    standing: tuple[PlannedMessage, ...] = ()
    announce: Announce = unheard

    @property
    def target(self) -> int:
        return self.low_water if self.aim is None else self.aim

    def in_scope(self, draft: Draft, piece: PlannedMessage) -> bool:
        scope = self.layer.scope
        if scope == "total":
            return True
        name = draft.bucket(piece)
        rule = self.settings.buckets.get(name)
        return (rule.charge_to if rule is not None and rule.charge_to else name) == scope

    def inside(self, draft: Draft, scope: str) -> int:
        return (
            draft.tokens
            if scope == "total"
            else charged(draft.buckets(), self.settings.buckets).get(scope, 0)
        )

    @property
    def room(self) -> int:
        return max(0, self.trigger - self.fixed)

    @property
    def low_water(self) -> int:
        return self.fixed + int(self.shape.low_water * self.room)

    def _within_ceiling(self, limit: int) -> int:
        return limit if self.ceiling is None else min(limit, self.ceiling)

    @property
    def refused_above(self) -> int:
        """A policy that refuses instead of managing keeps its whole reserve."""
        return self._within_ceiling(
            self.budget.send_limit if self.settings.manages else self.budget.reserved_limit
        )

    @property
    def hard_limit(self) -> int:
        return self._within_ceiling(self.budget.hard_limit)

    @property
    def safe_limit(self) -> int:
        return self._within_ceiling(self.budget.safe_limit)

    def soft_fits(self, tokens: int) -> bool:
        return tokens <= min(self.budget.soft_limit, self.hard_limit)

    def sides(self, stays: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Places of covered messages (``stays``: their indices) before a summary and after it.

        The newest user message comes after, with what follows it, so that the order does not
        change.
        """
        transcript = self.transcript
        current = self.protection.current
        late = (
            len(transcript.messages)
            if current is None or current == self.protection.task
            else current
        )
        lasting = [i for i in stays if i not in transcript.floating]
        before = tuple(transcript.place(i) for i in lasting if i < late)
        return before, tuple(transcript.place(i) for i in lasting if i >= late)

    def edited(self, index: int, text: str, kind: EditKind) -> Edit:
        """The edit that puts ``text`` in place of the content of message ``index``; its calls and
        their tokens stay.
        """
        transcript = self.transcript
        count = self.counter.count
        message = transcript.messages[index]
        position = index - transcript.head
        tokens = MESSAGE_OVERHEAD + count(text)
        if message.call_ids:
            tokens = message.tokens - count(transcript.read(index).text) + count(text)
        return Edit(
            digest=message.digest,
            occurrence=transcript.occurrences[index],
            kind=kind,
            text=text,
            ref=message.ref,
            tokens=tokens,
            chain=transcript.chain[position] if 0 <= position < len(transcript.chain) else b"",
        )


def bounds_for(
    transcript: Transcript,
    settings: ContextSettings,
    budget: TokenBudget,
    known: ConversationState,
    counter: TokenCounter,
    *,
    ceiling: int | None = None,
    summarizer_input: int | None = None,
    readings: Readings | None = None,
) -> Bounds:
    protection = protect(transcript, known.pins)
    fixed = (
        tokens_kept_verbatim(transcript, known, protection) + transcript.tools + transcript.priming
    )
    trigger = first_trigger(settings, budget)
    rest = budget.safe_limit - fixed
    if ceiling is not None:
        trigger = min(trigger, ceiling)
    elif trigger - fixed < LEAST_ROOM * rest and is_by_shape(settings):
        trigger = fixed + int(ROOM_IN_RESERVE * rest)
    return Bounds(
        transcript=transcript,
        settings=settings,
        budget=budget,
        shape=shape_for(settings, budget.window),
        known=known,
        counter=counter,
        protection=protection,
        trigger=trigger,
        fixed=fixed,
        ceiling=ceiling,
        summarizer_input=summarizer_input,
        readings=readings,
    )


LEAST_ROOM = 0.25
ROOM_IN_RESERVE = 0.5
"""Where what cannot be removed leaves less than a quarter of the rest of the window as room, half
of the rest is the room, taken from the reserve: otherwise every step would be a batch, and no
history could be kept.
"""
NOTE_BEGINS = "[weir: "
EMPTIED = "-"
CLEARED_MARKER = "[Old tool result content cleared]"
PLACEHOLDER_TOKENS = 50
MIN_DATA = 40
"""Minimum tokens for the data in a message where the message is cut."""
NO_SUMMARIZER = "no_summarizer"
_TAIL = re.compile(
    r"\[weir: (?:summary of|level [123],|[\d,]{1,20} tokens were read apart)[^\[\]]{1,80}\]\Z"
)
"""What is appended to every text in shorter words."""


def whole(default: int | None, *, least: int = 0) -> Any:
    return field(default=default, metadata={"kind": "whole", "least": least})


def number(default: float | None, *, least: float = 0, most: float = math.inf) -> Any:
    return field(default=default, metadata={"kind": "number", "least": least, "most": most})


def flag() -> Any:
    return field(default=False, metadata={"kind": "flag"})


def word(*allowed: str, default: str = "") -> Any:
    return field(default=default, metadata={"kind": "word", "words": allowed})


def words(*allowed: str, default: tuple[str, ...]) -> Any:
    return field(default=default, metadata={"kind": "words", "words": allowed})


class Options:
    """A frozen dataclass whose fields are the parameters that a policy may give it."""

    __slots__ = ()

    @classmethod
    def of(cls, params: Mapping[str, Param]) -> Self:
        known: tuple[Field[Any], ...] = fields(cls)  # type: ignore[arg-type]
        values = {
            each.name: _value(params[each.name], each) for each in known if each.name in params
        }
        return cls(**{name: value for name, value in values.items() if value is not None})

    @classmethod
    def parameters(cls) -> dict[str, Mapping[str, Any]]:
        """The values that each parameter accepts: its ``kind``, and perhaps ``least``, ``most`` and
        ``words``.
        """
        return {each.name: dict(each.metadata) for each in fields(cls) if each.metadata}  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy(Options):
    """A layer's work.

    ``asks_model`` says that it may ask a model, ``costs`` that it does not run where only free
    layers may.
    """

    name: ClassVar[str]
    asks_model: ClassVar[bool] = False
    costs: ClassVar[bool] = False

    def run(self, draft: Draft, bounds: Bounds) -> Flow[Draft]:
        yield from ()
        return self.apply(draft, bounds)

    def apply(self, draft: Draft, bounds: Bounds) -> Draft:
        raise NotImplementedError

    def scan(self, draft: Draft, bounds: Bounds) -> int | None:  # noqa: ARG002 - of those that look at results
        """The tokens of the results that it could take; None for a strategy that looks at something
        else.
        """
        return None


def _value(given: Param, of: Field[Any]) -> Param | None:
    kind = of.metadata["kind"]
    is_number = isinstance(given, int | float)
    if kind == "words":
        return given if isinstance(given, tuple) else (str(given),)
    if kind in {"whole", "number"}:
        if not is_number:
            return None
        return int(given) if kind == "whole" else float(given)  # type: ignore[arg-type]
    expected = bool if kind == "flag" else str
    return given if isinstance(given, expected) else None


def touchable(draft: Draft, bounds: Bounds) -> Iterator[tuple[int, PlannedMessage, Message]]:
    guarded = bounds.protection.all
    messages = draft.transcript.messages
    for piece in draft.pieces:
        if piece.index is not None and piece.index not in guarded and bounds.in_scope(draft, piece):
            yield piece.index, piece, messages[piece.index]


def results(draft: Draft, bounds: Bounds) -> Iterator[tuple[int, PlannedMessage, Message]]:
    return (each for each in touchable(draft, bounds) if each[2].is_result and not each[2].media)


def text_at(bounds: Bounds, index: int) -> str:
    """What a message says, preceded by the note on its other content; for a result beyond the part
    of the history that is read, where it is.
    """
    message = bounds.transcript.messages[index]
    body = bounds.transcript.read(index)
    told = body.whole or (
        left_out(message.tokens, message.ref) if message.is_result and not message.media else ""
    )
    return "\n".join(
        (*(f"[weir: {what} left out; archived as {message.ref}]" for what in body.attached), told)
    )


def clipped(
    bounds: Bounds, index: int, tokens: int, kind: EditKind, *, text: str | None = None
) -> Edit:
    counter = bounds.counter
    ref = bounds.transcript.messages[index].ref
    most = tokens - MESSAGE_OVERHEAD
    body = bounds.transcript.read(index)
    # cut separately, since one cut across both would let data begin a line
    if text is None and body.data:
        own = clip_middle(body.text, most - MIN_DATA, counter=counter, ref=ref)
        left = most - counter.count(own) - MESSAGE_OVERHEAD
        data = clip_middle(body.data, max(MIN_DATA // 2, left), counter=counter, ref=ref)
        return bounds.edited(index, beside_data(own, data), kind)
    own = text_at(bounds, index) if text is None else text
    return bounds.edited(index, clip_middle(own, most, counter=counter, ref=ref), kind)


def placeholder_for(bounds: Bounds, index: int) -> str:
    """What replaces the content of message ``index``, as the policy's ``placeholder`` says.

    ``none`` is the shortest text that every upstream accepts.
    """
    settings = bounds.settings
    message = bounds.transcript.messages[index]
    if settings.placeholder != "finding":
        return CLEARED_MARKER if settings.placeholder == "marker" else EMPTIED
    if not message.is_result:
        return (
            f"[weir: {in_one_line(message.role)} message of {message.tokens} tokens removed;"
            f" archived as {message.ref}]"
        )
    call = bounds.transcript.calls.get(index)
    return placeholder(
        bounds.transcript.read(index).text,
        tool=call.name if call else "tool",
        arguments=call.arguments if call else "",
        ref=message.ref,
        max_tokens=PLACEHOLDER_TOKENS,
        counter=bounds.counter,
        readings=bounds.readings,
    )


def cleared(bounds: Bounds, index: int, kind: EditKind) -> Edit:
    return bounds.edited(index, placeholder_for(bounds, index), kind)


def down_to_target(
    draft: Draft, bounds: Bounds, edits: Iterable[tuple[PlannedMessage, Edit]]
) -> Draft:
    excess = draft.tokens - bounds.target
    taken: dict[int, Edit] = {}
    if excess > 0:
        for piece, edit in edits:
            assert piece.index is not None  # noqa: S101 - edits apply to the client's messages
            taken[piece.index] = edit
            excess -= piece.tokens - edit.tokens
            if excess <= 0:
                break
    return draft.with_edits(taken)


def ref_at(draft: Draft, start: int) -> str:
    return draft.transcript.chain[start - draft.transcript.head - 1].hex()[:12]


def cut_at(
    draft: Draft,
    bounds: Bounds,
    start: int,
    *,
    stays: Sequence[int],
    text: str,
    origin: str,
    version: int | None = None,
    narrative: str = "",
    noted: int = 0,
) -> Cut:
    covers = draft.transcript.place(start)
    before, after = bounds.sides(stays)
    return Cut(
        covers=covers,
        prefix=draft.transcript.chain[start - draft.transcript.head - 1],
        text=text,
        tokens=MESSAGE_OVERHEAD + bounds.counter.count(text) if text else 0,
        version=bounds.known.next_version if version is None else version,
        ref=ref_at(draft, start),
        before=before,
        after=after,
        origin=origin,
        narrative=narrative,
        noted=noted,
    )


def is_condensed(piece: PlannedMessage) -> bool:
    if piece.kind in CONDENSED:
        return True
    return (
        piece.kind in SHORTENED and piece.text is not None and _TAIL.search(piece.text) is not None
    )


def is_original(piece: PlannedMessage) -> bool:
    """Whether a message says what the client sent, or a part of that: a layer may put it in shorter
    words.
    """
    return piece.text is None or (piece.kind in SHORTENED and not is_condensed(piece))
