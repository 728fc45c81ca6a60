"""An exchange as the metrics count it."""

from math import isfinite

from proxy.access.destination import TENANT_SHOWN, Caller
from proxy.exchange.record import ExchangeRecord
from proxy.tap import NO_USAGE, ReportedUsage
from proxy.telemetry.metrics import Metrics, exemplar

PREPARED = "prepared+extract"


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
    """The usage of a request that was sent to an upstream, by Weir's count and as the upstream
    reported it.
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
        count_key(metrics, caller, tokens.after, saved, used)
    if used.cached is not None and used.prompt:
        metrics.cache_tokens.labels("prompt").inc(used.prompt)
        metrics.cache_tokens.labels("read").inc(used.cached)
        metrics.cache_tokens.labels("written").inc(used.written or 0)
    if cache is not None and cache.cost is not None:
        count_cost(metrics, caller, cache.cost, cache.cost_saved or 0.0)


def count_key(
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


def count_cost(metrics: Metrics, caller: Caller, cost: float, saved: float) -> None:
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
