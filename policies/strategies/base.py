"""What every layer is made of: its parameters with their bounds, what it may touch, and the cut that it may make."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, ClassVar, Self

from policies.draft import MESSAGE_OVERHEAD, Bounds, Draft
from policies.effects import Flow
from policies.ledger import CONDENSED, SHORTENED, Cut, Edit, EditKind, PlannedMessage
from policies.messages import Message
from policies.settings import Param
from policies.text.gist import placeholder
from policies.tokens import clip_middle

EMPTIED = "-"
NO_SUMMARIZER = "no_summarizer"
_TAIL = re.compile(r"\[weir: (?:summary of|level [123],|[\d,]{1,20} tokens were read apart)[^\[\]]{1,80}\]\Z")
"""What stands behind every text in shorter words."""


def whole(default: int | None, *, least: int = 0) -> Any:
    return field(default=default, metadata={"kind": "whole", "least": least})


def number(default: float | None, *, most: float | None = None) -> Any:
    """A parameter that is a number from 0 to ``most``."""
    return field(default=default, metadata={"kind": "number"} | ({} if most is None else {"most": most}))


def flag() -> Any:
    return field(default=False, metadata={"kind": "flag"})


def word(*allowed: str, default: str = "") -> Any:
    return field(default=default, metadata={"kind": "word", "words": allowed})


def words(*allowed: str, default: tuple[str, ...]) -> Any:
    return field(default=default, metadata={"kind": "words", "words": allowed})


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """A layer's work; its fields are the parameters that a policy may give it.

    ``asks_model`` says that it may ask a model, ``costs`` that it does not run where only free layers may.
    """

    name: ClassVar[str]
    asks_model: ClassVar[bool] = False
    costs: ClassVar[bool] = False

    @classmethod
    def of(cls, params: Mapping[str, Param]) -> Self:
        values = {each.name: _value(params[each.name], each) for each in fields(cls) if each.name in params}
        return cls(**{name: value for name, value in values.items() if value is not None})

    @classmethod
    def parameters(cls) -> dict[str, Mapping[str, Any]]:
        """What each parameter may be: its ``kind``, and perhaps ``least``, ``most`` and ``words``."""
        return {each.name: dict(each.metadata) for each in fields(cls) if each.default is not MISSING}

    def run(self, draft: Draft, bounds: Bounds) -> Flow[Draft]:
        yield from ()
        return self.apply(draft, bounds)

    def apply(self, draft: Draft, bounds: Bounds) -> Draft:
        raise NotImplementedError

    def scan(self, draft: Draft, bounds: Bounds) -> int | None:  # noqa: ARG002 - of those that look at results
        """The tokens of the results that it could take; None for a strategy that looks at something else."""
        return None


def _value(given: Param, of: Field[Any]) -> Param | None:
    kind, is_number = of.metadata["kind"], isinstance(given, int | float)
    if kind == "words":
        return given if isinstance(given, tuple) else (str(given),)
    if kind in {"whole", "number"}:
        return (int(given) if kind == "whole" else float(given)) if is_number else None  # type: ignore[arg-type]
    return given if isinstance(given, bool if kind == "flag" else str) else None


def touchable(draft: Draft, bounds: Bounds) -> Iterator[tuple[int, PlannedMessage, Message]]:
    guarded, messages = bounds.protection.all, draft.transcript.messages
    for piece in draft.pieces:
        if piece.index is not None and piece.index not in guarded and bounds.in_scope(draft, piece):
            yield piece.index, piece, messages[piece.index]


def results(draft: Draft, bounds: Bounds) -> Iterator[tuple[int, PlannedMessage, Message]]:
    return (each for each in touchable(draft, bounds) if each[2].is_result and not each[2].media)


def clipped(bounds: Bounds, index: int, tokens: int, kind: EditKind, *, text: str | None = None) -> Edit:
    own = bounds.transcript.read(index).text if text is None else text
    ref = bounds.transcript.messages[index].ref
    return bounds.edited(index, clip_middle(own, tokens - MESSAGE_OVERHEAD, counter=bounds.counter, ref=ref), kind)


def placeholder_for(bounds: Bounds, index: int) -> str:
    """What stands where the content of message ``index`` was, as the policy's ``placeholder`` says.

    ``none`` is the shortest text that every upstream accepts.
    """
    settings, message = bounds.settings, bounds.transcript.messages[index]
    if settings.placeholder != "finding":
        return settings.marker if settings.placeholder == "marker" else EMPTIED
    if not message.is_result:
        return f"[weir: {message.role} message of {message.tokens} tokens removed; archived as {message.ref}]"
    call = bounds.transcript.calls.get(index)
    return placeholder(
        bounds.transcript.read(index).text,
        tool=call.name if call else "tool",
        arguments=call.arguments if call else "",
        ref=message.ref,
        max_tokens=settings.placeholder_tokens,
        counter=bounds.counter,
    )


def down_to_target(draft: Draft, bounds: Bounds, edits: Iterable[tuple[PlannedMessage, Edit]]) -> Draft:
    excess = draft.tokens - bounds.target
    taken: dict[int, Edit] = {}
    if excess > 0:
        for piece, edit in edits:
            assert piece.index is not None  # noqa: S101 - edits are of the client's messages
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
    covers = start - draft.transcript.head
    before, after = bounds.sides(stays)
    return Cut(
        covers=covers,
        prefix=draft.transcript.chain[covers - 1],
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
    return piece.kind in SHORTENED and piece.text is not None and _TAIL.search(piece.text) is not None


def is_original(piece: PlannedMessage) -> bool:
    """Whether a message says what the client sent, or a part of that: a layer may put it in shorter words."""
    return piece.text is None or (piece.kind in SHORTENED and not is_condensed(piece))
