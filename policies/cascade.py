"""Layers in order, cheapest first, until the request is small enough; then the rungs below them.

What the client marked as dispensable goes before any layer. A layer runs only while the draft is above its
target. What it did is kept if it achieved what the layer asks for (``min_savings``, ``must_reach``), else
dropped, so that the next layer starts from where it started. If the layers do not get the request under what
may be forwarded, the rungs do: the same compaction once more with a quarter of the room, the oldest units
dropped with a note, the middle of the newest message clipped.
"""

from collections.abc import Callable
from dataclasses import dataclass

from policies.bounds import Bounds
from policies.draft import Draft
from policies.effects import Flow
from policies.settings import Layer
from policies.strategies.clip import clip
from policies.strategies.compact import compact
from policies.strategies.dedupe import dedupe
from policies.strategies.drop_oldest import drop_oldest
from policies.strategies.evict import evict, evict_marked
from policies.strategies.ingest_cap import ingest_cap

STRATEGIES: dict[str, Callable[[Draft, Bounds], Draft]] = {
    "ingest_cap": ingest_cap,
    "dedupe": dedupe,
    "evict": evict,
}
FLOWS: dict[str, Callable[[Draft, Bounds], Flow[Draft]]] = {"compact": compact}
HARDER_SHARE = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerReport:
    """What one layer did: uncalibrated tokens before and after, pieces changed, whether it was kept."""

    layer: str
    before: int
    after: int
    units: int
    kept: bool
    ref: str | None = None


def run_layers(draft: Draft, bounds: Bounds) -> Flow[tuple[Draft, tuple[LayerReport, ...]]]:
    """The draft after every layer that was needed, and what each did."""
    reports: list[LayerReport] = []
    done = evict_marked(draft, bounds)
    if done is not draft:
        reports.append(_report("evict", draft, done, kept=True))
        draft = done
    for layer in bounds.settings.layers:
        if draft.tokens <= _target(layer, bounds):
            continue
        done = yield from _run(layer, draft, bounds)
        kept = _pays(layer, draft, done, bounds)
        reports.append(_report(layer.strategy, draft, done, kept=kept))
        if not kept:
            continue
        draft = done
        if layer.must_reach is not None and bounds.soft_fits(draft.tokens):
            break
    return draft, tuple(reports)


def run_rungs(draft: Draft, bounds: Bounds) -> Flow[tuple[Draft, tuple[LayerReport, ...]]]:
    """The draft after as many rungs as it took to get under the hard limit, and what each did."""
    reports: list[LayerReport] = []
    target = bounds.hard_limit
    if draft.tokens > target:
        done = yield from compact(draft, bounds, share=HARDER_SHARE)
        reports.append(_report("compact", draft, done, kept=done.tokens < draft.tokens))
        draft = done if done.tokens < draft.tokens else draft
    if draft.tokens > target:
        done = drop_oldest(draft, bounds, target=target)
        reports.append(_report("drop_oldest", draft, done, kept=done.tokens < draft.tokens))
        draft = done
    if draft.tokens > target:
        done = clip(draft, bounds, target=min(target, bounds.budget.soft_limit))
        reports.append(_report("clip", draft, done, kept=done.tokens < draft.tokens))
        draft = done
    return draft, tuple(reports)


def _run(layer: Layer, draft: Draft, bounds: Bounds) -> Flow[Draft]:
    if layer.strategy in FLOWS:
        return (yield from FLOWS[layer.strategy](draft, bounds))
    return STRATEGIES[layer.strategy](draft, bounds)


def _target(layer: Layer, bounds: Bounds) -> int:
    if layer.stop_at is not None:
        return bounds.budget.room_for(layer.stop_at * bounds.budget.base(bounds.settings))
    return bounds.low_water


def _pays(layer: Layer, before: Draft, after: Draft, bounds: Bounds) -> bool:
    saved = before.tokens - after.tokens
    if saved <= 0 or saved < layer.min_savings * bounds.budget.window / bounds.budget.ratio:
        return False
    if layer.must_reach is None:
        return True
    return after.tokens <= bounds.low_water + layer.must_reach * (bounds.trigger - bounds.low_water)


def _report(name: str, before: Draft, after: Draft, *, kept: bool) -> LayerReport:
    return LayerReport(
        layer=name,
        before=before.tokens,
        after=after.tokens,
        units=max(len(before.pieces) - len(after.pieces), len(after.edits) - len(before.edits)),
        kept=kept,
        ref=after.cut.ref if after.cut is not None and after.cut is not before.cut else None,
    )
