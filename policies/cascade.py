"""Layers in order, cheapest first, until the request is small enough; then the rungs below them.

What the client marked as dispensable goes before any layer. A layer runs only while the draft is above its
target. What it did is kept if it achieved what the layer asks for (``min_savings``, ``must_reach``), else
dropped, so that the next layer starts from where it started. If the layers do not get the request under what
may be forwarded, the rungs do: the same compaction once more with a quarter of the room, the oldest units
dropped with a note, the middle of the newest message clipped.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from policies.bounds import Bounds
from policies.buckets import charged
from policies.condensed import Condensed
from policies.draft import Draft
from policies.effects import Flow
from policies.settings import ClientEdits, Layer, amount
from policies.strategies.clip import clip
from policies.strategies.compact import compact
from policies.strategies.custom import custom
from policies.strategies.dedupe import dedupe
from policies.strategies.delegate import delegate
from policies.strategies.drop_oldest import drop_oldest
from policies.strategies.evict import clear_results, evict, evict_marked, evictable
from policies.strategies.ingest_cap import ingest_cap
from policies.strategies.progressive import progressive
from policies.strategies.prune import prunable, prune
from policies.strategies.prune_tools import prune_tools
from policies.strategies.reasoning import reasoning
from policies.strategies.retire_media import retire_media
from policies.strategies.rollover import rollover
from policies.strategies.semantic_merge import semantic_merge
from policies.strategies.summarize_tool_result import summarize_tool_result
from policies.strategies.truncate_largest import truncate_largest
from policies.strategies.window import window
from policies.triggers import layers_of, limit_for, target_for

STRATEGIES: dict[str, Callable[[Draft, Bounds], Draft]] = {
    "ingest_cap": ingest_cap,
    "dedupe": dedupe,
    "evict": evict,
    "prune": prune,
    "prune_tools": prune_tools,
    "truncate_largest": truncate_largest,
    "window": window,
    "drop_oldest": drop_oldest,
    "reasoning": reasoning,
    "media": retire_media,
    "rollover": rollover,
}
FLOWS: dict[str, Callable[[Draft, Bounds], Flow[Draft]]] = {
    "compact": compact,
    "semantic_merge": semantic_merge,
    "summarize_tool_result": summarize_tool_result,
    "progressive": progressive,
    "delegate": delegate,
    "custom": custom,
}
SCANNED: dict[str, Callable[[Draft, Bounds], int]] = {"evict": evictable, "prune": prunable}
"""The strategies that look at results, and what of them each could take."""
HARDER_SHARE = 0.25
LEAST_EARLY = 0.05
LEAST_STUCK = 0.20
PAID = frozenset({"compact", "summarize_tool_result", "progressive", "delegate", "rollover"})
"""Strategies that may ask a model; all others are free."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerReport:
    """What one layer did: uncalibrated tokens before and after, pieces changed, whether it was kept.

    ``scope`` is the bucket that it was about, ``total`` for the whole request; ``reason`` says why a layer did
    nothing, or less than asked, although it was due; a ``rung`` is what helped where the layers did not. ``condensed``
    is what became of each message that was to be put in shorter words, also where the layer's work was not kept.
    ``scanned`` are the tokens of all tool results that a layer looked at, ``prunable`` those that it could take; None
    for one that looks at something else.
    """

    layer: str
    before: int
    after: int
    units: int
    kept: bool
    ref: str | None = None
    scope: str = "total"
    reason: str = ""
    rung: bool = False
    condensed: tuple[Condensed, ...] = ()
    scanned: int | None = None
    prunable: int | None = None


def is_due(draft: Draft, bounds: Bounds) -> bool:
    """Whether any layer that does more than cap new results has work to do."""
    if draft.tokens > bounds.trigger * bounds.early:
        return True
    scoped = [layer for layer in layers_of(bounds.settings) if layer.scope != "total"]
    if not scoped:
        return False
    inside = charged(draft.buckets(), bounds.settings.buckets)
    return any(inside.get(layer.scope, 0) > _limit(layer, bounds) for layer in scoped)


def run_layers(draft: Draft, bounds: Bounds) -> Flow[tuple[Draft, tuple[LayerReport, ...]]]:
    """The draft after every layer that was needed, and what each did."""
    reports: list[LayerReport] = []
    fired = draft.tokens > bounds.trigger * bounds.early
    done = evict_marked(draft, bounds) if fired else draft
    if done is not draft:
        reports.append(report_on(Layer(strategy="evict"), draft, done, kept=True))
        draft = done
    for layer in layers_of(bounds.settings):
        if layer.strategy in PAID and (bounds.free_only or bounds.settings.compaction == "off"):
            continue
        aim = _aim(layer, draft, bounds, fired=fired)
        if aim is None:
            continue
        at_work = replace(bounds, layer=layer, aim=aim)
        done, reason = yield from _run(layer, draft, at_work)
        if done is draft and layer.at == 0 and not reason:
            continue  # it looks at every request, and had nothing to do
        kept = _pays(layer, draft, done, at_work)
        report = report_on(layer, draft, done, kept=kept, reason=reason)
        if layer.strategy in SCANNED:
            could = SCANNED[layer.strategy](draft, at_work)
            report = replace(report, scanned=_result_tokens(draft), prunable=could)
        reports.append(report)
        if not kept:
            continue
        draft = done
        if layer.must_reach is not None and bounds.soft_fits(draft.tokens):
            break
    return draft, tuple(reports)


def _result_tokens(draft: Draft) -> int:
    messages = draft.transcript.messages
    return sum(p.tokens for p in draft.pieces if p.index is not None and messages[p.index].is_result)


def _limit(layer: Layer, bounds: Bounds) -> float:
    return limit_for(layer, bounds.settings, bounds.budget) * bounds.early


def _aim(layer: Layer, draft: Draft, bounds: Bounds, *, fired: bool) -> int | None:
    """The total tokens that a layer should end at; None if it is not due."""
    budget, tokens = bounds.budget, draft.tokens
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
    inside = charged(draft.buckets(), bounds.settings.buckets).get(layer.scope, 0)
    if inside <= _limit(layer, bounds) and tokens <= allowed:
        return None
    return tokens - max(inside - end, tokens - allowed, 0)


def run_wanted(draft: Draft, bounds: Bounds) -> Flow[tuple[Draft, tuple[LayerReport, ...]]]:
    """The draft with its history summarised whatever its size, and what that did.

    An operator asked for it, or what was prepared after an answer is to be used as soon as it is there.
    """
    layer = next((each for each in bounds.settings.layers if each.strategy == "compact"), Layer(strategy="compact"))
    done = yield from compact(draft, replace(bounds, layer=layer, trigger=min(bounds.trigger, draft.tokens)))
    kept = done.tokens < draft.tokens
    return done if kept else draft, (report_on(layer, draft, done, kept=kept),)


def run_client_edits(draft: Draft, bounds: Bounds, edits: ClientEdits) -> Flow[tuple[Draft, tuple[LayerReport, ...]]]:
    """The draft after what its client asked to have taken out of it, and what each part of that did."""
    reports: list[LayerReport] = []
    if edits.thinking is not None:
        layer = Layer(strategy="reasoning", params={"ttl": edits.thinking})
        done = reasoning(draft, replace(bounds, layer=layer))
        if done.tokens < draft.tokens:
            reports.append(report_on(layer, draft, done, kept=True))
            draft = done
    done = clear_results(draft, bounds, edits)
    if done is not draft:
        reports.append(report_on(Layer(strategy="evict"), draft, done, kept=True))
        draft = done
    if edits.compact_at is not None and draft.tokens > bounds.budget.room_for(edits.compact_at):
        draft, wanted = yield from run_wanted(draft, bounds)
        reports += wanted
    return draft, tuple(reports)


def run_rungs(draft: Draft, bounds: Bounds) -> Flow[tuple[Draft, tuple[LayerReport, ...]]]:
    """The draft after as many rungs as it took to get under the hard limit, and what each did."""
    reports: list[LayerReport] = []
    target = bounds.hard_limit
    if draft.tokens > target and bounds.settings.compaction == "proxy":
        done = yield from compact(draft, bounds, share=HARDER_SHARE)
        reports.append(report_on(Layer(strategy="compact"), draft, done, kept=done.tokens < draft.tokens, rung=True))
        draft = done if done.tokens < draft.tokens else draft
    if draft.tokens > target and bounds.settings.compaction == "proxy":
        done = rollover(draft, replace(bounds, aim=target))
        if done.tokens <= target:
            reports.append(report_on(Layer(strategy="rollover"), draft, done, kept=True, rung=True))
            draft = done
    if draft.tokens > target:
        done = drop_oldest(draft, replace(bounds, aim=target))
        reports.append(
            report_on(Layer(strategy="drop_oldest"), draft, done, kept=done.tokens < draft.tokens, rung=True)
        )
        draft = done
    if draft.tokens > target:
        done = clip(draft, bounds, target=min(target, bounds.budget.soft_limit))
        reports.append(report_on(Layer(strategy="clip"), draft, done, kept=done.tokens < draft.tokens, rung=True))
        draft = done
    return draft, tuple(reports)


def _run(layer: Layer, draft: Draft, bounds: Bounds) -> Flow[tuple[Draft, str]]:
    """The draft after one layer, and why it did nothing or less than asked where it could not."""
    if layer.strategy in FLOWS:
        done = yield from FLOWS[layer.strategy](draft, bounds)
    elif layer.strategy in STRATEGIES:
        done = STRATEGIES[layer.strategy](draft, bounds)
    else:
        return draft, "unavailable"
    return (replace(done, reason="") if done.reason else done), done.reason


def _pays(layer: Layer, before: Draft, after: Draft, bounds: Bounds) -> bool:
    saved = before.tokens - after.tokens
    reached = after.tokens <= bounds.target
    if saved <= 0 or saved < _least_savings(layer, bounds, fits=bounds.soft_fits(before.tokens), reached=reached):
        return False
    if layer.must_reach is None:
        return True
    return after.tokens <= bounds.low_water + layer.must_reach * (bounds.trigger - bounds.low_water)


def _least_savings(layer: Layer, bounds: Bounds, *, fits: bool, reached: bool) -> float:
    """The uncalibrated tokens that a layer has to save, or an edit would not be worth the cache that it costs.

    What the policy does not say is nothing where the request has to get smaller. A bucket that cannot be brought down
    to where the layer should end waits until a fifth of its cap can be saved, or every request would be a batch.
    """
    least = layer.min_savings
    if least is None:
        least = LEAST_EARLY if fits and (layer.at or bounds.early < 1) else 0
        if least and layer.scope != "total" and not reached:
            least = LEAST_STUCK
    whole = bounds.budget.window if layer.scope == "total" else bounds.budget.caps.get(layer.scope, 0)
    return amount(least, whole) / bounds.budget.ratio


def report_on(
    layer: Layer, before: Draft, after: Draft, *, kept: bool, reason: str = "", rung: bool = False
) -> LayerReport:
    """What turned one draft into the other."""
    gone = len(before.pieces) - len(after.pieces)
    return LayerReport(
        layer=layer.strategy,
        before=before.tokens,
        after=after.tokens,
        units=max(gone, len(after.edits) - len(before.edits), len(after.pruned) - len(before.pruned)),
        kept=kept,
        ref=after.cut.ref if after.cut is not None and after.cut is not before.cut else None,
        scope=layer.scope,
        reason=reason,
        rung=rung,
        condensed=after.condensed[len(before.condensed) :],
    )
