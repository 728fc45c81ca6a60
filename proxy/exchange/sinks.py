"""What an exchange leaves once it has ended: trace, metrics, log line, hooks, and its row."""

import logging
import time

from policies.settings import ContextSettings
from proxy.access.destination import Caller
from proxy.exchange.exchange import Exchange
from proxy.exchange.log_line import write_line
from proxy.exchange.metrics import count, count_cost, count_key
from proxy.exchange.record import ExchangeRecord, record_of
from proxy.exchange.row import row_of
from proxy.exchange.trace import end_trace
from proxy.features.feature import TurnEnd
from proxy.features.inspect.kept import inspection_of
from proxy.models.facts import cost_of, prices_of
from proxy.runtime import Runtime
from proxy.store.records import RelayedRow
from proxy.tap import NO_USAGE, ReportedUsage

log = logging.getLogger("weir.settlement")

CRITICAL = "critical"
NO_POLICY = "none"


def record_exchange(runtime: Runtime, exchange: Exchange, *, ended: float | None = None) -> None:
    begun = time.perf_counter()
    metrics = runtime.telemetry.metrics
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
    """Emit what began with the request; of a store that servers share the queue does, for one."""
    checkup = record.checkup
    if checkup is not None and checkup.opened and not runtime.store.shared:
        record.exchange.emit(runtime.features.on_alerts, checkup.opened)
