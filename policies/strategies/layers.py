"""A policy's layers at work on one request, and the rungs below them.

A layer runs only while the draft is above its target. What it did is kept if it achieved what the
layer requires (``min_savings``, ``must_reach``), else dropped, so that the next layer starts from
where it started. If the layers do not get the request under what may be forwarded, the rungs do:
the same compaction once more with a quarter of the room, a new window, the oldest units dropped
with a note, the middle of the newest message clipped.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from policies.draft import NO_LAYER, Bounds, Draft, Strategy
from policies.effects import Announce, Done, Failed, Flow, Offload, Returned, step, unheard
from policies.ledger import LayerReport
from policies.limits import acts_always, amount, charged, layers_of, limit_for, target_for
from policies.settings import ClientEdits, Layer
from policies.strategies.clip import clip, is_clip_due
from policies.strategies.compact import Compact
from policies.strategies.custom import Custom
from policies.strategies.dedupe import Dedupe
from policies.strategies.delegate import Delegate
from policies.strategies.drop_oldest import DropOldest
from policies.strategies.evict import Evict, clear_results, evict_marked
from policies.strategies.ingest_cap import IngestCap
from policies.strategies.media import RetireMedia
from policies.strategies.progressive import Progressive
from policies.strategies.prune import Prune
from policies.strategies.prune_tools import PruneTools
from policies.strategies.reasoning import Reasoning
from policies.strategies.rollover import Rollover, resume
from policies.strategies.semantic_merge import SemanticMerge
from policies.strategies.summarize_tool_result import SummarizeToolResult
from policies.strategies.truncate_largest import TruncateLargest
from policies.strategies.window import Window

HARDER_SHARE = 0.25
MIN_EARLY = 0.05
MIN_STUCK = 0.20


STRATEGIES: Mapping[str, type[Strategy]] = MappingProxyType(
    {
        strategy.name: strategy
        for strategy in (
            IngestCap,
            Dedupe,
            Evict,
            Prune,
            PruneTools,
            Reasoning,
            RetireMedia,
            TruncateLargest,
            SemanticMerge,
            Window,
            DropOldest,
            Custom,
            SummarizeToolResult,
            Progressive,
            Compact,
            Delegate,
            Rollover,
        )
    }
)
ASKING = frozenset(name for name, strategy in STRATEGIES.items() if strategy.asks_model)


@dataclass(slots=True)
class PlanWork:
    draft: Draft
    trail: tuple[LayerReport, ...] = ()
    announce: Announce = unheard

    def take(
        self,
        layer: Layer | str,
        done: Draft,
        *,
        kept: bool,
        reason: str = "",
        rung: bool = False,
        prunable: int | None = None,
    ) -> None:
        """Note what a layer did, and go on from there if it is ``kept``."""
        before = self.draft
        layer = Layer(strategy=layer) if isinstance(layer, str) else layer
        gone = len(before.pieces) - len(done.pieces)
        messages = before.transcript.messages
        self.trail += (
            LayerReport(
                layer=layer.strategy,
                before=before.tokens,
                after=done.tokens,
                units=max(
                    gone, len(done.edits) - len(before.edits), len(done.pruned) - len(before.pruned)
                ),
                kept=kept,
                ref=done.cut.ref if done.cut is not None and done.cut is not before.cut else None,
                scope=layer.scope,
                reason=reason,
                rung=rung,
                condensed=done.condensed[len(before.condensed) :],
                scanned=None
                if prunable is None
                else sum(t for i, t in before.tokens_by_index().items() if messages[i].is_result),
                prunable=prunable,
            ),
        )
        self.draft = done if kept else before
        self.announce("layer")

    def take_if_changed(self, layer: Layer | str, done: Draft) -> None:
        if done is not self.draft:
            self.take(layer, done, kept=True)


def run_asked(work: PlanWork, bounds: Bounds) -> Flow[None]:
    if bounds.known.resumed is not None and not bounds.known.cuts:
        resumed = resume(work.draft, bounds)
        work.take("resume", resumed, kept=resumed is not work.draft)
    else:
        yield from run_wanted(work, bounds)


def is_due(draft: Draft, bounds: Bounds) -> bool:
    if draft.tokens > bounds.trigger * bounds.early or acts_always(bounds.settings):
        return True
    scoped = [layer for layer in layers_of(bounds.settings) if layer.scope != "total"]
    if not scoped:
        return False
    inside = charged(draft.buckets(), bounds.settings.buckets)
    return any(inside.get(layer.scope, 0) > _limit(layer, bounds) for layer in scoped)


def run_layers(work: PlanWork, bounds: Bounds) -> Flow[None]:
    fired = work.draft.tokens > bounds.trigger * bounds.early
    if fired:
        work.take_if_changed("evict", evict_marked(work.draft, bounds))
    for layer in layers_of(bounds.settings):
        kind = STRATEGIES.get(layer.strategy)
        if (
            kind is not None
            and kind.costs
            and (bounds.free_only or bounds.settings.compaction == "off")
        ):
            continue
        aim = _aim(layer, work.draft, bounds, fired=fired)
        if aim is None:
            continue
        draft = work.draft
        at_work = replace(bounds, layer=layer, aim=aim)
        if kind is None:
            work.take(layer, draft, kept=False, reason="unavailable")
            continue
        strategy = kind.of(layer.params)
        prunable = strategy.scan(draft, at_work)
        if prunable and not _pays(layer, draft.tokens, draft.tokens - prunable, at_work):
            # not even by removing everything that it may take
            work.take(layer, draft, kept=False, prunable=prunable)
            continue
        done = yield from strategy.run(draft, at_work)
        reason = done.reason
        if reason:
            done = replace(done, reason="")
        if done is draft and layer.at == 0 and not reason:
            continue  # it examines every request, and had nothing to do
        kept = _pays(layer, draft.tokens, done.tokens, at_work)
        work.take(layer, done, kept=kept, reason=reason, prunable=prunable)
        if kept and layer.must_reach is not None and bounds.soft_fits(done.tokens):
            break


def _limit(layer: Layer, bounds: Bounds) -> float:
    return limit_for(layer, bounds.settings, bounds.budget) * bounds.early


def _aim(layer: Layer, draft: Draft, bounds: Bounds, *, fired: bool) -> int | None:
    budget = bounds.budget
    tokens = draft.tokens
    if layer.params.get("prepared") is True:
        return None
    allowed = min(budget.soft_limit, bounds.hard_limit)
    end = target_for(layer, bounds.settings, budget, low_water=bounds.low_water)
    if layer.at == 0:
        return end
    if layer.scope == "total":
        due = fired if layer.at is None else tokens > _limit(layer, bounds)
        if layer.at is None or tokens <= allowed:
            return end if due and tokens > end else None
        return min(end, allowed)
    inside = bounds.inside(draft, layer.scope)
    if inside <= _limit(layer, bounds) and tokens <= allowed:
        return None
    return tokens - max(inside - end, tokens - allowed, 0)


def run_wanted(work: PlanWork, bounds: Bounds) -> Flow[None]:
    layer = next(
        (each for each in bounds.settings.layers if each.strategy == "compact"),
        Layer(strategy="compact"),
    )
    trigger = min(bounds.trigger, work.draft.tokens)
    done = yield from Compact.of(layer.params).run(
        work.draft, replace(bounds, layer=layer, trigger=trigger)
    )
    work.take(layer, done, kept=done.tokens < work.draft.tokens)


def run_anew(work: PlanWork, bounds: Bounds) -> Flow[None]:
    layer = next((each for each in bounds.settings.layers if each.strategy == "compact"), None)
    if layer is not None and work.draft.active_cut is not None:
        done = yield from Compact.of(layer.params).run(work.draft, replace(bounds, layer=layer))
        work.take(
            layer, done, kept=done.tokens < work.draft.tokens and done.tokens <= bounds.trigger
        )


def run_client_edits(work: PlanWork, bounds: Bounds, edits: ClientEdits) -> Flow[None]:
    if edits.thinking is not None:
        done = Reasoning(ttl=edits.thinking).apply(work.draft, bounds)
        if done.tokens < work.draft.tokens:
            work.take("reasoning", done, kept=True)
    work.take_if_changed("evict", clear_results(work.draft, bounds, edits))
    if edits.compact_at is not None and work.draft.tokens > bounds.budget.room_for(
        edits.compact_at
    ):
        yield from run_wanted(work, bounds)


def run_rungs(work: PlanWork, bounds: Bounds) -> Flow[None]:
    target = bounds.hard_limit
    compacts = bounds.settings.compaction == "proxy"
    at_target = replace(bounds, aim=bounds.safe_limit)
    if work.draft.tokens > target and compacts:
        done = yield from Compact().run(work.draft, bounds, share=HARDER_SHARE)
        work.take("compact", done, kept=done.tokens < work.draft.tokens, rung=True)
    if work.draft.tokens > target and compacts:
        done = Rollover().apply(work.draft, at_target)
        if done.tokens <= target:
            work.take("rollover", done, kept=True, rung=True)
    if work.draft.tokens > target:
        done = DropOldest().apply(work.draft, at_target)
        work.take("drop_oldest", done, kept=done.tokens < work.draft.tokens, rung=True)
    if is_clip_due(work.draft, bounds):
        done = clip(work.draft, bounds, target=bounds.safe_limit)
        work.take("clip", done, kept=done.tokens < work.draft.tokens, rung=True)


def _pays(layer: Layer, before: int, after: int, bounds: Bounds) -> bool:
    saved = before - after
    reached = after <= bounds.target
    if saved <= 0 or saved < _least_savings(
        layer, bounds, fits=bounds.soft_fits(before), reached=reached
    ):
        return False
    if layer.must_reach is None:
        return True
    holds = bounds.shape.evict if layer.strategy == "evict" and layer.at is None else 1.0
    reach = bounds.low_water + holds * layer.must_reach * (bounds.trigger - bounds.low_water)
    return holds > 0 and after <= reach


def _least_savings(layer: Layer, bounds: Bounds, *, fits: bool, reached: bool) -> float:
    least = layer.min_savings
    if least is None:
        least = MIN_EARLY if fits and (layer.at or bounds.early < 1) else 0
        if least and layer.scope != "total" and not reached:
            least = MIN_STUCK
    whole = (
        bounds.budget.window if layer.scope == "total" else bounds.budget.caps.get(layer.scope, 0)
    )
    return amount(least, whole) / bounds.budget.ratio


def next_batch(draft: Draft, bounds: Bounds) -> tuple[float, bool] | None:
    """The share of the layers' triggers that is reached now where the next batch may ask a model,
    and whether that compacts; None where what costs nothing will be enough.

    Each trigger up to that of compaction is tried in turn, as if it were reached now and no model
    answered.
    """
    layers = [layer for layer in layers_of(bounds.settings) if layer.at != 0]
    scopes = {
        bounds.layer.scope,
        "total",
        *(layer.scope for layer in layers if layer.strategy in ASKING),
    }
    due = {
        (limit_for(layer, bounds.settings, bounds.budget), layer.scope)
        for layer in layers
        if layer.scope in scopes
    }
    for limit, scope in sorted(due):
        inside = bounds.inside(draft, scope)
        if limit <= 0 or inside <= 0:
            continue
        early = min(1.0, inside / (limit + 1))
        trail = _tried(draft, replace(bounds, layer=NO_LAYER, early=early))
        kept = [report for report in trail if report.kept and report.scope == scope]
        if any(report.layer == "compact" for report in trail if report.scope == scope):
            return early, True
        if kept:
            return (early, False) if any(report.layer in ASKING for report in kept) else None
    return None


def _tried(draft: Draft, bounds: Bounds) -> tuple[LayerReport, ...]:
    layers = tuple(replace(layer, min_savings=0) for layer in bounds.settings.layers)
    work = PlanWork(draft)
    flow = run_layers(work, replace(bounds, settings=replace(bounds.settings, layers=layers)))
    now = step(flow)
    while not isinstance(now, Returned):
        now = step(flow, Done() if isinstance(now, Offload) else Failed("not_now"))
    return work.trail
