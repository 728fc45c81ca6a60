"""A summary that is written after an answer, so that the request which needs it does not wait for a model.

It covers what the next batch will cover. Nothing in the conversation changes until then: what was prepared is used
where the history that it covers is still there, and forgotten where it is not.
"""

import math
from collections.abc import Mapping
from dataclasses import replace

from policies.decision import LayerReport
from policies.draft import NO_LAYER, Bounds, Draft, bounds_for, replay
from policies.effects import Done, Failed, Flow, Offload, Reply
from policies.ledger import ConversationState, Prepared
from policies.limits import TokenBudget, asks_from, charged, compaction_layer, layers_of, limit_for
from policies.messages import Transcript
from policies.pressure import UNKNOWN, Trend
from policies.settings import ContextSettings
from policies.strategies.compact import Compact, known_summary, may_summarize, summarize
from policies.strategies.layers import STRATEGIES, PlanWork, run_layers
from policies.text.segments import Readings
from policies.tokens import TokenCounter

MIN_NEW = 0.5
"""What was prepared is prepared anew once it lacks this share of what a batch would summarise anew."""
SOON = 3
"""Requests before a batch from which on it is prepared: what it will do is not known long before."""
ASKING = frozenset(name for name, strategy in STRATEGIES.items() if strategy.asks_model)


def prepare(
    transcript: Transcript,
    *,
    settings: ContextSettings,
    budget: TokenBudget,
    known: ConversationState,
    counter: TokenCounter,
    summarizer_input: int | None = None,
    readings: Readings | None = None,
) -> Flow[Prepared | None]:
    """What the next batch will need of a model, without a text if the model gave none; None if nothing is needed.

    What single messages need is asked as well: the answers are kept by what they are about.
    """
    layer = compaction_layer(settings)
    if layer is None:
        return None
    bounds = bounds_for(
        transcript, settings, budget, known, counter, summarizer_input=summarizer_input, readings=readings
    )
    draft = replay(bounds.transcript, known, bounds.protection)
    bounds = replace(bounds, layer=layer, warm=True, standing=draft.pieces)
    if layer.params.get("prepared") is not True:
        batch = _next_batch(draft, bounds)
        if batch is None:
            return None
        early, compacts = batch
        if not compacts:  # what it asks is asked now: the answers are kept by what they are about
            yield from run_layers(PlanWork(draft), replace(bounds, early=early))
            return None
    start = Compact.of(layer.params).tail_start(draft, bounds)
    head = transcript.head
    gone = [i for i in range(head, start) if i not in bounds.protection.verbatim]
    before = known_summary(bounds, most=start - head)
    settled = known_summary(replace(bounds, known=replace(known, prepared=None)), most=start - head).covers
    new, whole = (
        sum(transcript.messages[i].tokens for i in gone if i - head >= covers) for covers in (before.covers, settled)
    )
    if not new or not may_summarize(bounds) or (before.origin == "prepared" and new < MIN_NEW * whole):
        return None
    told = yield from summarize(bounds, gone, before=before, key=transcript.chain[start - head - 1].hex())
    if told.origin != "model":
        return Prepared(start - head, transcript.chain[start - head - 1], "")
    proposal = told.proposal.to_json() if told.proposal is not None else ""
    calls = told.calls + before.calls  # what was prepared before and never used is in it too
    return Prepared(start - head, transcript.chain[start - head - 1], told.text, proposal, told.purpose, calls)


def _next_batch(draft: Draft, bounds: Bounds) -> tuple[float, bool] | None:
    """The share of the layers' triggers that is reached now where the next batch may ask a model, and whether that
    compacts; None where what costs nothing will be enough.

    Each trigger up to that of compaction is tried in turn, as if it were reached now and no model answered.
    """
    layers = [layer for layer in layers_of(bounds.settings) if layer.at != 0]
    scopes = {bounds.layer.scope, "total", *(layer.scope for layer in layers if layer.strategy in ASKING)}
    due = {(limit_for(layer, bounds.settings, bounds.budget), layer.scope) for layer in layers if layer.scope in scopes}
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
    reply: Reply | None = None
    try:
        while True:
            asked = next(flow) if reply is None else flow.send(reply)
            reply = Done() if isinstance(asked, Offload) else Failed("not_now")
    except StopIteration:
        return work.trail


def is_soft(
    tokens: int,
    length: int,
    *,
    settings: ContextSettings,
    budget: TokenBudget,
    known: ConversationState,
    buckets: Mapping[str, int] | None = None,
    trend: Trend = UNKNOWN,
) -> bool:
    rules = settings.summaries
    if settings.summarizer is None or settings.compaction != "proxy" or settings.when_full != "manage":
        return False
    if rules.prepare_messages is not None:
        covered = max((cut.covers for cut in known.cuts), default=0)
        if length - covered > rules.prepare_messages:
            return True
    if rules.prepare_at is None:
        return False
    used = charged(buckets or {}, settings.buckets)
    for layer in layers_of(settings):
        if layer.strategy not in ASKING:
            continue
        limit = asks_from(layer, settings, budget)
        inside = tokens if layer.scope == "total" else int(used.get(layer.scope, 0) / budget.ratio)
        soon = layer.at == 0 or inside + SOON * _growth(trend, layer.scope) > limit
        if inside > rules.prepare_at * limit and soon:
            return True
    return False


def _growth(trend: Trend, scope: str) -> float:
    burns = {burn.bucket: burn.deltas for burn in trend.burn}
    deltas = trend.deltas if scope == "total" else burns.get(scope, ())
    return max(sum(deltas) / len(deltas), deltas[-1]) if deltas else math.inf
