"""What is told of an exchange after it: to the trace, metrics, log, alerts and hooks, and the row
that is stored.
"""

import logging
import time
from collections.abc import Mapping
from math import isfinite

import msgspec

from policies.ledger import Decision, TokenUsage, Trend
from policies.messages import results_by_tool
from policies.pressure import STATUS
from policies.settings import ContextSettings, Inspect
from proxy.access.destination import TENANT_SHOWN, Caller
from proxy.custom import TurnEnd
from proxy.effects.perform import NOTHING_SPENT
from proxy.exchange.record import (
    ExchangeProgress,
    ExchangeRecord,
    evicted_count,
    identify,
    record_of,
)
from proxy.models.facts import cost_of, prices_of
from proxy.monitor import Notice
from proxy.planning.values import Recognized, condensed_in, layers_in
from proxy.runtime import Runtime
from proxy.store.records import ExchangeRow, Inspection, RelayedRow
from proxy.tap import NO_USAGE, ReportedUsage
from proxy.telemetry.logs import ExchangeLine, log_exchange
from proxy.telemetry.metrics import Metrics, exemplar

log = logging.getLogger("weir.settlement")

PREPARED = "prepared+extract"
CRITICAL = "critical"
NO_POLICY = "none"
MAX_EVENTS = 8


def record_exchange(
    runtime: Runtime, progress: ExchangeProgress, *, ended: float | None = None
) -> None:
    begun = time.perf_counter()
    metrics = runtime.telemetry.metrics
    if progress.reserved:
        runtime.budgets.ended(progress.id)
    record = record_of(progress, runtime, ended=begun if ended is None else ended)
    _tell_alerts(runtime, record)
    if record.events and log.isEnabledFor(logging.DEBUG):
        for event in record.events:
            log.debug("%s: %s", event.kind, event.facts)
    end_trace(record)
    count(metrics, record)
    write_line(runtime.logger, record)
    if progress.turn is not None:
        runtime.hooks.tell("turn_end", progress.turn, _end(record))
    _store(runtime, record)
    metrics.settlement.observe(time.perf_counter() - begun)


def record_relayed(
    runtime: Runtime,
    caller: Caller,
    *,
    request: str,
    model: str,
    status: int,
    outcome: str,
    usage: ReportedUsage | None,
    policy: str = NO_POLICY,
    reserved: bool = False,
) -> None:
    used = usage or NO_USAGE
    metrics = runtime.telemetry.metrics
    cost = None
    if usage is not None:
        prices = (
            prices_of(model, runtime.registry.facts(model, settings=ContextSettings()))
            if model
            else None
        )
        cost = None if prices is None else cost_of(prices, usage)
        _count_key(metrics, caller, used.prompt or 0, 0, used)
        if cost is not None:
            _count_cost(metrics, caller, cost, 0.0)
    runtime.settler.put(
        RelayedRow(
            id=request,
            tenant=caller.tenant,
            at=runtime.planner.clock(),
            model=model,
            policy=policy,
            status=status,
            outcome=outcome,
            usage_prompt=used.prompt,
            usage_completion=used.completion,
            usage_cached=used.cached,
            cost=cost,
            key=caller.account,
            team=caller.team,
            reserved=reserved,
        )
    )


def _store(runtime: Runtime, record: ExchangeRecord) -> None:
    exchange = record.exchange
    if record.tokens is None or exchange.plan.recognized is None:
        if exchange.caller is not None:
            record_relayed(
                runtime,
                exchange.caller,
                request=exchange.id,
                model=exchange.model,
                status=exchange.status or 0,
                outcome=record.label,
                usage=record.billed,
                policy=exchange.settings.name if exchange.settings is not None else NO_POLICY,
                reserved=exchange.reserved,
            )
        return
    keep = record.policy.inspect
    inspection = None
    if keep.requests and runtime.store.keeps_content and not runtime.settler.is_full:
        inspection = _inspection(record, exchange.plan.recognized, keep)
    runtime.settler.put(row_of(record, record.tokens, exchange.plan.recognized, inspection))
    if exchange.asked is None or record.label != "ok":
        return
    checkup = record.checkup
    save = CRITICAL if checkup is not None and checkup.opened and checkup.is_critical else None
    runtime.preparation.after(exchange.asked, exchange.plan, save=save, trace=exchange.trace)


def _inspection(record: ExchangeRecord, recognized: Recognized, keep: Inspect) -> Inspection:
    """The two arrays of a request by reference; what was never given to the store before goes with
    them.
    """
    thread = recognized.thread
    transcript = recognized.transcript
    decision = record.carried_out
    count = len(transcript.messages)
    request = record.exchange.chat
    raws = recognized.new
    known = thread.inspected
    if known < count - len(raws) and request is not None and request.messages is not None:
        raws = request.messages
    thread.inspected = count
    return Inspection(
        keep=keep.requests,
        messages=transcript.messages,
        pieces=None if decision is None else decision.pieces,
        raws=raws,
        first=count - len(raws) if raws is recognized.new else 0,
        pruned=() if decision is None else decision.pruned,
        tools=transcript.tools,
    )


def _end(record: ExchangeRecord) -> TurnEnd:
    tokens = record.tokens
    return TurnEnd(
        status=record.exchange.status,
        outcome=record.label,
        tokens_before=None if tokens is None else tokens.before,
        tokens_after=None if tokens is None else tokens.after,
        zone="unknown" if tokens is None else tokens.pressure.zone,
        actions=record.actions,
    )


def _tell_alerts(runtime: Runtime, record: ExchangeRecord) -> None:
    """Tell what began with the request; where servers share a store, the one that stores its row
    does.
    """
    exchange = record.exchange
    checkup = record.checkup
    recognized = record.exchange.plan.recognized
    if checkup is None or not checkup.opened or recognized is None or runtime.store.shared:
        return
    branch = recognized.thread.branch
    whose = {"tenant": branch.tenant, "conversation": branch.name, "policy": record.policy.name}
    for alert in checkup.opened:
        runtime.alerts.tell(Notice(alert=alert, **whose, request=exchange.id))


def count(metrics: Metrics, record: ExchangeRecord) -> None:
    """Count one request that has ended."""
    exchange = record.exchange
    tokens = record.tokens
    trace = exchange.trace.trace_id if exchange.trace.recorded else None
    if record.call is not None:
        metrics.observe_call(record.call)
    metrics.requests.labels(record.label, record.policy.name).inc()
    metrics.observe_request(
        method="POST",
        route=f"/v1{exchange.route.path}",
        status=exchange.status,
        error="" if record.label == "ok" else record.label,
        seconds=record.duration,
        trace=trace,
    )
    overhead = metrics.overhead.labels("true" if record.spent.seconds > 0 else "")
    overhead.observe(max(0.0, exchange.overhead_ms / 1000), exemplar(trace))
    if tokens is not None and isfinite(tokens.pressure.level):
        metrics.pressure.labels(tokens.pressure.zone).observe(tokens.pressure.level)
    if record.attempt is not None:
        _count_sent(metrics, record)
    _count_unusual(metrics, record)


def _count_sent(metrics: Metrics, record: ExchangeRecord) -> None:
    """What a request that an upstream was given took, by Weir's count and as the upstream reported
    it.
    """
    caller = record.exchange.caller
    tokens = record.tokens
    cache = record.cache
    used = record.billed or NO_USAGE
    if cache is not None:
        metrics.cache_requests.labels(cache.prefix_changed, "true" if cache.cold else "false").inc()
    if caller is None:
        return
    if tokens is not None:
        saved = max(0, tokens.before - tokens.after)
        metrics.tokens.labels("before").inc(tokens.before)
        metrics.tokens.labels("after").inc(tokens.after)
        metrics.tokens.labels("saved").inc(saved)
        _count_key(metrics, caller, tokens.after, saved, used)
    if used.cached is not None and used.prompt:
        metrics.cache_tokens.labels("prompt").inc(used.prompt)
        metrics.cache_tokens.labels("read").inc(used.cached)
        metrics.cache_tokens.labels("written").inc(used.written or 0)
    if cache is not None and cache.cost is not None:
        _count_cost(metrics, caller, cache.cost, cache.cost_saved or 0.0)


def _count_key(
    metrics: Metrics, caller: Caller, forwarded: int, saved: int, used: ReportedUsage
) -> None:
    tenant = caller.tenant[:TENANT_SHOWN]
    key = caller.name or ""
    metrics.key_tokens.labels("forwarded", tenant, key).inc(forwarded)
    metrics.key_tokens.labels("saved", tenant, key).inc(saved)
    if used.cached is not None:
        metrics.key_tokens.labels("cached", tenant, key).inc(used.cached)
    if used.completion is not None:
        metrics.key_tokens.labels("answered", tenant, key).inc(used.completion)


def _count_cost(metrics: Metrics, caller: Caller, cost: float, saved: float) -> None:
    tenant = caller.tenant[:TENANT_SHOWN]
    key = caller.name or ""
    metrics.cost.labels("forwarded", tenant, key).inc(cost)
    metrics.cost.labels("unmanaged", tenant, key).inc(max(0.0, cost + saved))


def _count_unusual(metrics: Metrics, record: ExchangeRecord) -> None:
    exchange = record.exchange
    checkup = record.checkup
    decision = record.carried_out
    if record.overflows:
        metrics.overflows.inc(record.overflows)
    if exchange.retries:
        metrics.retries.labels("overflow").inc(exchange.retries)
    for event in record.events:
        metrics.events.labels(event.kind).inc()
    if exchange.recalls:
        metrics.events.labels("recall").inc(len(exchange.recalls))
    for reason in exchange.all_degraded():
        metrics.degraded.labels(reason).inc()
    if checkup is not None and checkup.sample is not None:
        for ratio in checkup.sample.ratios:
            metrics.compression.observe(ratio)
    if decision is None:
        return
    for report in decision.trail:
        if report.kept:
            metrics.actions.labels(report.layer).inc(max(1, report.units))
    if decision.cut is not None and decision.cut.origin == PREPARED:
        metrics.preparations.labels("used").inc()
    elif decision.cut is not None and exchange.plan.prepared:
        metrics.preparations.labels("wasted").inc()


def end_trace(record: ExchangeRecord) -> None:
    exchange = record.exchange
    trace = record.exchange.trace
    if not trace.recorded:
        return
    _note_events(record)
    if record.cache is not None:
        trace.cache(
            changed=record.cache.prefix_changed,
            is_cold=record.cache.cold,
            hit_ratio=record.cache.hit_ratio,
        )
    identify(exchange)
    _note_refusal(record)
    if record.ending is not None:
        trace.ending(record.ending)
    for reason in exchange.all_degraded():
        trace.event("degraded", reason=reason)
    if record.attempt is not None and exchange.status is not None:
        failed = exchange.error or ("error_in_stream" if exchange.seen.error is not None else None)
        record.attempt.end_call(seen=exchange.seen, usage=record.reported, error_type=failed)
    trace.end(exchange.status, exchange.error)


def _note_events(record: ExchangeRecord) -> None:
    exchange = record.exchange
    plan = record.exchange.plan
    note = record.exchange.trace.event
    for event in record.events:
        facts = {**event.facts, "actions": record.actions} if event.kind == STATUS else event.facts
        note(event.kind, **facts)
    if rows := plan.evictions:
        note(
            "eviction",
            count=evicted_count(plan),
            freed=sum(row.freed for row in rows),
            remaining=rows[-1].tokens_remaining,
            placeholders=sum(1 for row in rows if row.tokens_after),
            policy=rows[-1].policy,
        )
    for each in exchange.recalls:
        note("recall", count=each.hits, tokens=each.tokens)
    if exchange.observed and (plan.decision is not None or plan.refused is not None):
        note("observed", actions=exchange.actions(planned=True), reason=plan.refused or "")
    for alert in record.checkup.opened if record.checkup is not None else ():
        kinds = {"alert": alert.kind, "level": alert.level, "category": alert.category}
        note("alert", **kinds, value=round(alert.value, 4), threshold=alert.limit)


def _note_refusal(record: ExchangeRecord) -> None:
    exchange = record.exchange
    tokens = record.tokens
    plan = exchange.plan
    refusal = exchange.refusal
    root = exchange.trace.root
    if tokens is None or plan.recognized is None or not (refusal or plan.refused):
        return
    root.decide("refuse" if refusal else "observe", tokens, base=plan.recognized.policy_limits.base)
    buckets = refusal.get("buckets")
    root.buckets(buckets if isinstance(buckets, Mapping) else {})
    match refusal:
        case {"bucket": str(bucket), "used": int(used), "cap": int(cap)}:
            root.refused_by(bucket, used=used, cap=cap)


def write_line(logger: logging.Logger, record: ExchangeRecord) -> None:
    exchange = record.exchange
    tokens = record.tokens
    done = record.carried_out
    recognized = exchange.plan.recognized
    branch = None if recognized is None else recognized.thread.branch
    scanned, prunable = _scan(record)
    line = ExchangeLine(
        request=exchange.id,
        tokens_before=tokens.before if tokens is not None else 0,
        tokens_after=tokens.after if tokens is not None else 0,
        usable=tokens.limit if tokens is not None else 0,
        zone=tokens.pressure.zone if tokens is not None else "unknown",
        status=exchange.status,
        outcome=record.label,
        conversation=branch.name if branch is not None else None,
        trace=exchange.trace.trace_id,
        tenant=branch.tenant[:TENANT_SHOWN] if branch is not None else None,
        model=exchange.chat.model if exchange.chat is not None else None,
        policy=exchange.settings.name if exchange.settings is not None else None,
        actions=record.actions,
        overflow=record.overflows > 0,
        scanned=scanned,
        prunable=prunable,
        removed=len(done.removed) or None if done is not None else None,
        attempts=1 + exchange.retries,
        overhead_ms=round(exchange.overhead_ms, 2),
        duration_ms=round(1000 * record.duration, 1),
        ending=record.ending,
        error=exchange.error,
    )
    log_exchange(logger, line)


def _scan(record: ExchangeRecord) -> tuple[int | None, int | None]:
    decision = record.carried_out
    recognized = record.exchange.plan.recognized
    if decision is None or recognized is None or not decision.trail:
        return None, None
    ratio = recognized.limits.budget.ratio
    scans = (report for report in decision.trail if report.scanned is not None)
    return next(
        ((round((s.scanned or 0) * ratio), round((s.prunable or 0) * ratio)) for s in scans),
        (None, None),
    )


def row_of(
    record: ExchangeRecord,
    tokens: TokenUsage,
    recognized: Recognized,
    inspection: Inspection | None = None,
) -> ExchangeRow:
    exchange = record.exchange
    plan = record.exchange.plan
    decision = record.exchange.plan.decision
    thread = recognized.thread
    chain = recognized.transcript.chain
    branch = recognized.thread.branch
    used = record.billed or NO_USAGE
    pressure = decision.pressure if decision is not None else tokens.pressure
    base = max(1, recognized.policy_limits.base)
    reading = decision.reading if decision is not None else None
    return ExchangeRow(
        id=exchange.id,
        tenant=branch.tenant,
        conversation=branch.conversation,
        name=branch.name,
        branch=branch.branch,
        parent=thread.parent,
        at=record.at,
        model=exchange.model,
        policy=record.policy.name,
        chain_end=chain[-1] if chain else b"",
        length=len(chain),
        floating=thread.floating,
        status=exchange.status or 0,
        outcome=record.label,
        tokens_before=tokens.before,
        tokens_after=decision.after if decision is not None else tokens.after,
        limit=tokens.limit,
        pressure=pressure.level,
        zone=pressure.zone,
        actions=exchange.actions(planned=True) if exchange.observed else record.actions,
        usage_prompt=used.prompt,
        usage_completion=used.completion,
        usage_cached=used.cached,
        usage_estimated=used.estimated,
        overhead_ms=exchange.overhead_ms,
        duration_ms=1000 * record.duration,
        attempts=1 + exchange.retries,
        action="none" if decision is None else decision.stage,
        observed=exchange.observed,
        evicted=evicted_count(plan) if plan.evictions else 0,
        strategy="" if decision is None or not decision.trail else decision.strategy,
        pressure_before=tokens.before / base,
        velocity=reading.velocity_tokens_per_turn if reading is not None else None,
        turns_until_red=reading.turns_until_red if reading is not None else None,
        trend=decision.trend._replace(window=recognized.view.window)
        if decision is not None
        else None,
        parent_conversation=exchange.asked.parent if exchange.asked is not None else None,
        detail=_detail(record, recognized) | {"status": pressure.status},
        health=record.checkup,
        events=record.events,
        refusal={"code": plan.refused} if plan.refused is not None else exchange.refusal,
        inspection=inspection,
        key="" if exchange.caller is None else exchange.caller.account,
        team="" if exchange.caller is None else exchange.caller.team,
        reserved=exchange.reserved,
    )


def _detail(record: ExchangeRecord, recognized: Recognized) -> dict[str, object]:
    exchange = record.exchange
    detail = dict[str, object]()
    decision = exchange.plan.decision
    budget = recognized.limits.budget
    if decision is not None:
        detail["buckets"] = {name: tokens for name, tokens in decision.buckets.items() if tokens}
    detail["base"], detail["window"] = recognized.policy_limits.base, budget.window
    if budget.caps:
        detail["caps"] = dict(budget.caps)
        if decision is not None:
            detail["burn"] = burn_in(decision.trend, ratio=budget.ratio)
    if exchange.trace.recorded:
        detail["trace"] = exchange.trace.trace_id
    detail["source"] = "model_reported" if budget.reported else "client_estimated"
    if record.events:
        detail["events"] = [{"kind": e.kind, **e.facts} for e in record.events[:MAX_EVENTS]]
    if record.ending is not None:
        detail["ending"] = record.ending
    if record.checkup is not None and record.checkup.health.is_too_small:
        detail["too_small"] = True
    if decision is not None and decision.pruned:
        detail["pruned"] = list(decision.pruned)
    if decision is not None and decision.trail:
        detail |= _done(decision)
    transcript = recognized.transcript
    if tools := results_by_tool(transcript, transcript.head + recognized.length):
        detail["tools"] = tools
    if record.cache is not None:
        detail |= record.cache.facts()
    if record.spent is not NOTHING_SPENT and record.spent.any:
        detail["summarizer"] = msgspec.structs.asdict(record.spent)
    if exchange.recalls:
        detail["recall"] = [msgspec.structs.asdict(each) for each in exchange.recalls]
    return detail


def burn_in(trend: Trend, *, ratio: float) -> dict[str, int]:
    """Tokens by which each bucket that grows does so with a request, as the upstream counts."""
    return {
        each.bucket: round(rate * ratio)
        for each in trend.burn
        if (rate := each.rate) is not None and rate > 0
    }


def _done(decision: Decision) -> dict[str, object]:
    done: dict[str, object] = {"layers": layers_in(decision)}
    if condensed := condensed_in(decision):
        done["condensed"] = condensed
    if decision.window_id is not None:
        done["window_id"] = decision.window_id
    if decision.cut is not None:
        done["summary_tokens"] = decision.cut.tokens
    return done
