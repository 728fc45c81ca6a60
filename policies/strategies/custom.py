"""``custom``: an operator's own function decides which messages stay."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from policies.draft import Bounds, Draft, Strategy, broken_rules, cut_at, number, word
from policies.effects import Flow, Kept, Trim, Trimmed
from policies.ledger import Edit, EditKind, PlannedMessage

# without thinking or media a message still says what it said
OWN_WORDS = frozenset({EditKind.REASONING, EditKind.MEDIA})


@dataclass(frozen=True, slots=True, kw_only=True)
class Custom(Strategy):
    """The function at ``path`` (``module:function``) has ``seconds`` to choose what stays in the
    array.

    What is protected stays; an answer that an upstream would reject, or that saves nothing, changes
    nothing.
    """

    name = "custom"
    path: str = word()
    seconds: float = number(0.5)

    def run(self, draft: Draft, bounds: Bounds) -> Flow[Draft]:
        if not self.path or draft.tokens <= bounds.target:
            return draft
        given = [p for p in draft.pieces if p.index is not None]
        others = draft.tokens - sum(p.tokens for p in given)
        guarded = bounds.protection.all
        reply = yield Trim(
            path=self.path,
            indices=tuple(p.index for p in given if p.index is not None),
            max_tokens=max(0, bounds.target - others),
            seconds=self.seconds,
            texts=tuple(None if p.kind in OWN_WORDS else p.text for p in given),
            tokens=tuple(p.tokens for p in given),
            protected=tuple(p.index in guarded for p in given),
        )
        if not isinstance(reply, Trimmed) or not _is_selection(reply.messages, given):
            return draft
        trimmed = _without_dropped(
            _with_texts(draft, bounds, reply.messages), bounds, reply.messages
        )
        return trimmed if trimmed.tokens < draft.tokens and not broken_rules(trimmed) else draft


def _is_selection(messages: Sequence[Kept], given: Sequence[PlannedMessage]) -> bool:
    known = {p.index for p in given}
    return all(m.index in known for m in messages) and all(
        a.index < b.index for a, b in pairwise(messages)
    )


def _with_texts(draft: Draft, bounds: Bounds, messages: Sequence[Kept]) -> Draft:
    guarded = bounds.protection.all
    texts = {p.index: p.text for p in draft.pieces}
    edits: dict[int, Edit] = {}
    for message in messages:
        if (
            message.text is not None
            and message.index not in guarded
            and message.text != texts[message.index]
        ):
            edits[message.index] = bounds.edited(message.index, message.text, EditKind.CUSTOM)
    return draft.with_edits(edits)


def _without_dropped(draft: Draft, bounds: Bounds, messages: Sequence[Kept]) -> Draft:
    head = draft.transcript.head
    active = draft.active_cut
    kept = bounds.protection.all | {m.index for m in messages}
    present = [p.index for p in draft.pieces if p.index is not None]
    dropped = [i for i in present if i not in kept]
    if not dropped:
        return draft
    start = max(
        max(dropped) + 1, draft.transcript.after(active.covers) if active is not None else 0
    )
    text, narrative = (active.text, active.narrative) if active is not None else ("", "")
    stays = [i for i in present if head <= i < start and i in kept]
    cut = cut_at(draft, bounds, start, stays=stays, text=text, origin="custom", narrative=narrative)
    return draft.with_cut(cut, checkpoint=draft.checkpoint if draft.cut is not None else None)
