"""A request is brought within its upstream's limits other than tokens: images, entries of the
array, bytes.

The oldest images and files become references first, then old messages are compacted, or dropped
where a policy does not compact. Each is a batch: it ends at low water, so that not every request
makes one. Where none of that is enough nothing is changed, and the upstream refuses the request.
"""

from dataclasses import replace

from policies.draft import Bounds, Draft, touchable
from policies.effects import Flow, Offload
from policies.ledger import Edit
from policies.loads import Load
from policies.strategies.compact import Compact
from policies.strategies.drop_oldest import DropOldest
from policies.strategies.layers import PlanWork
from policies.strategies.media import without_media

WITHOUT_MEDIA = 0.75
COMPACTED = 0.5
"""Shares of the limit at which a batch ends."""
SUMMARY_SHARE = 0.1
"""The share of the limit that is kept free for a summary."""


def lighten(work: PlanWork, bounds: Bounds, loads: tuple[Load, ...]) -> Flow[None]:
    for load in loads:
        if load.is_too_much(work.draft.pieces):
            yield Offload()
            within = yield from _lighten(work, bounds, load)
            if not within and load.instead is not None:
                yield from _lighten(work, bounds, load.instead)


def _lighten(work: PlanWork, bounds: Bounds, load: Load) -> Flow[bool]:
    """Whether the draft is within the load now."""
    guarded = bounds.protection.all
    if load.total(piece for piece in work.draft.pieces if piece.index in guarded) > load.most:
        return False
    done = _without_media(work.draft, bounds, load, aim=int(WITHOUT_MEDIA * load.most))
    if load.total(done.pieces) <= load.most:
        work.take_if_changed("media", done)
        return True
    start = _tail_start(done, bounds, load, aim=int(COMPACTED * load.most))
    layer = next((each for each in bounds.settings.layers if each.strategy == Compact.name), None)
    if layer is not None and bounds.settings.compaction == "proxy":
        compact = replace(
            Compact.of(layer.params), keep_messages=len(done.transcript.messages) - start
        )
        now = replace(bounds, layer=layer, trigger=min(bounds.trigger, done.tokens))
        compacted = yield from compact.run(done, now)
        if load.total(compacted.pieces) <= load.most:
            work.take_if_changed("media", done)
            work.take_if_changed(layer, compacted)
            return True
    older = sum(p.tokens for p in done.pieces if p.index is not None and p.index < start)
    dropped = DropOldest().apply(done, replace(bounds, aim=done.tokens - older))
    if load.total(dropped.pieces) > load.most:
        return False
    work.take_if_changed("media", done)
    work.take_if_changed(DropOldest.name, dropped)
    return True


def _without_media(draft: Draft, bounds: Bounds, load: Load, *, aim: int) -> Draft:
    excess = load.total(draft.pieces) - aim
    edits: dict[int, Edit] = {}
    for index, piece, message in touchable(draft, bounds):
        if excess <= 0:
            break
        saved = load.each[index] - load.bare[index]
        if piece.text is not None or not message.media or saved <= 0:
            continue
        edit = without_media(bounds, index)
        if edit is not None:
            edits[index] = edit
            excess -= saved
    return draft.with_edits(edits)


def _tail_start(draft: Draft, bounds: Bounds, load: Load, *, aim: int) -> int:
    """Index of the first message of the newest units that may stay, at a unit's start; the newest
    unit always does.
    """
    stays = bounds.protection.verbatim
    weights = {
        p.index: load.weight(p)
        for p in draft.pieces
        if p.index is not None and p.index not in stays
    }
    kept = sum(load.weight(p) for p in draft.pieces if p.index in stays)
    room = aim - load.fixed - load.own - kept - load.letter * int(SUMMARY_SHARE * aim)
    start = len(draft.transcript.messages)
    for unit in reversed(bounds.transcript.steps):
        room -= sum(weights.get(i, 0) for i in unit.indices)
        if room < 0 and start < len(draft.transcript.messages):
            break
        start = unit.start
    return start
