"""What an exchange leaves once it has ended: trace, metrics, log line, hooks, and its row."""

import logging
import time
from collections.abc import Mapping

from policies.pressure import STATUS
from proxy.access.destination import TENANT_SHOWN, Caller
from proxy.exchange.exchange import Exchange, evicted_count
from proxy.exchange.metrics import count, count_cost, count_key
from proxy.exchange.record import ExchangeRecord, record_of
from proxy.exchange.row import inspection_of, row_of
from proxy.features.feature import TurnEnd
from proxy.runtime import Runtime
from proxy.store.records import RelayedRow
from proxy.tap import NO_USAGE, ReportedUsage
from proxy.telemetry.logs import ExchangeLine, log_exchange

log = logging.getLogger("weir.settlement")

CRITICAL = "critical"
NO_POLICY = "none"


def record_exchange(runtime: Runtime, exchange: Exchange, *, ended: float | None = None) -> None:
    begun = time.perf_counter()
    metrics = runtime.telemetry.metrics
    if exchange.reserved:
        runtime.budgets.ended(exchange.id)
    record = record_of(exchange, runtime, ended=begun if ended is None else ended)
    _emit_alerts(runtime, record)
    if runtime.features.on_answered:
        exchange.emit(runtime.features.on_answered, _end(record))
    if record.events and log.isEnabledFor(logging.DEBUG):
        for event in record.events:
            log.debug("%s: %s", event.kind, event.facts)
    end_trace(record)
    count(metrics, record)
    write_line(runtime.logger, record)
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
        cost = runtime.registry.list_price(model, usage)
        count_key(metrics, caller, used.prompt or 0, 0, used)
        if cost is not None:
            count_cost(metrics, caller, cost, 0.0)
    runtime.write_queue.put(
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
    if keep.requests and runtime.store.keeps_content and not runtime.write_queue.is_full:
        inspection = inspection_of(
            exchange.plan.recognized, record.carried_out, exchange.chat, keep
        )
    runtime.write_queue.put(row_of(record, record.tokens, exchange.plan.recognized, inspection))
    plan_request = exchange.plan_request
    if plan_request is None or record.label != "ok":
        return
    checkup = record.checkup
    save = CRITICAL if checkup is not None and checkup.opened and checkup.is_critical else None
    runtime.preparation.after(plan_request, exchange.plan, save=save, trace=exchange.trace)


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


def _emit_alerts(runtime: Runtime, record: ExchangeRecord) -> None:
    """Emit the alerts that began with the request; with a shared store the queue does that, on one
    server.
    """
    checkup = record.checkup
    if checkup is not None and checkup.opened and not runtime.store.shared:
        record.exchange.emit(runtime.features.on_alerts, checkup.opened)


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
    exchange.identify()
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
