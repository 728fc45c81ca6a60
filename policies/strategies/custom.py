"""An operator's own function decides which messages stay.

It is given the whole array that would be sent, and gives back fewer messages, some of them perhaps with another
text. What is protected stays whatever comes back. An answer that an upstream would reject, or that saves nothing,
changes nothing: the next layer goes on from there.
"""

from collections.abc import Sequence
from itertools import pairwise

from policies.bounds import Bounds
from policies.draft import Draft
from policies.edits import MESSAGE_OVERHEAD, replace_content
from policies.effects import Flow, Kept, Trim, Trimmed
from policies.invariants import broken_rules
from policies.ledger import Cut, EditKind
from policies.pieces import Piece

SECONDS = 0.5


def custom(draft: Draft, bounds: Bounds) -> Flow[Draft]:
    """The draft as the function at ``path`` (a param, ``module:function``) leaves it within ``seconds`` (a param)."""
    path, seconds = bounds.layer.params.get("path"), bounds.layer.params.get("seconds", SECONDS)
    if not isinstance(path, str) or draft.tokens <= bounds.target:
        return draft
    given = [p for p in draft.pieces if p.index is not None]
    others = draft.tokens - sum(p.tokens for p in given)
    guarded = bounds.protection.all
    reply = yield Trim(
        path=path,
        indices=tuple(p.index for p in given if p.index is not None),
        max_tokens=max(0, bounds.target - others),
        seconds=float(seconds) if isinstance(seconds, int | float) else SECONDS,
        texts=tuple(p.text if _is_replaced(p) else None for p in given),
        tokens=tuple(p.tokens for p in given),
        protected=tuple(p.index in guarded for p in given),
    )
    if not isinstance(reply, Trimmed) or not _is_selection(reply.messages, given):
        return draft
    trimmed = _without_dropped(_with_texts(draft, bounds, reply.messages), bounds, reply.messages)
    return trimmed if trimmed.tokens < draft.tokens and not broken_rules(trimmed) else draft


def _is_replaced(piece: Piece) -> bool:
    """Whether a message's content is another already; without its thinking or its media it is still its own."""
    return piece.text is not None and piece.kind not in (EditKind.REASONING, EditKind.MEDIA)


def _is_selection(messages: Sequence[Kept], given: Sequence[Piece]) -> bool:
    """Whether these are some of the messages that were given, each once, in their order."""
    known = {p.index for p in given}
    return all(m.index in known for m in messages) and all(a.index < b.index for a, b in pairwise(messages))


def _with_texts(draft: Draft, bounds: Bounds, messages: Sequence[Kept]) -> Draft:
    guarded, pieces = bounds.protection.all, {p.index: p for p in draft.pieces}
    return draft.with_edits(
        {
            m.index: replace_content(draft.transcript, m.index, m.text, kind=EditKind.CUSTOM, counter=bounds.counter)
            for m in messages
            if m.text is not None and m.index not in guarded and m.text != pieces[m.index].text
        }
    )


def _without_dropped(draft: Draft, bounds: Bounds, messages: Sequence[Kept]) -> Draft:
    """The draft without what did not come back; a summary in it stays, with what it stands for."""
    head, active = draft.transcript.head, draft.active_cut
    kept = bounds.protection.all | {m.index for m in messages}
    present = [p.index for p in draft.pieces if p.index is not None]
    dropped = [i for i in present if i not in kept]
    if not dropped:
        return draft
    covers = max(max(dropped) + 1 - head, active.covers if active is not None else 0)
    before, after = bounds.sides([i for i in present if head <= i < head + covers and i in kept])
    prefix = draft.transcript.chain[covers - 1]
    text = active.text if active is not None else ""
    cut = Cut(
        covers=covers,
        prefix=prefix,
        text=text,
        tokens=MESSAGE_OVERHEAD + bounds.counter.count(text) if text else 0,
        version=bounds.known.next_version,
        ref=prefix.hex()[:12],
        before=before,
        after=after,
        origin="custom",
        narrative=active.narrative if active is not None else "",
    )
    return draft.with_cut(cut, checkpoint=draft.checkpoint if draft.cut is not None else None)
