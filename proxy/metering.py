"""What the metrics say of an exchange: each call upstream once it has ended, and the whole of it at the end.

A call is counted where its end is seen: one that failed, or was an overflow, where that is found out; one that is
relayed when the exchange is settled; one that another round of recall follows before that round.
"""

import time

from policies import Decision
from proxy.caching import CacheUse
from proxy.outcome import Outcome, Sent
from proxy.tap import Usage
from proxy.telemetry import Metrics

ROUTE = "/v1/chat/completions"
TENANT_SHOWN = 8
PREPARED = "prepared+extract"
NOTHING = Usage()


def begin_call(outcome: Outcome) -> None:
    """Note that a call upstream begins."""
    outcome.called, outcome.received, outcome.first_chunk = time.perf_counter(), None, None


def count_call(
    metrics: Metrics, outcome: Outcome, *, usage: Usage | None = None, model: str | None = None, error: str = ""
) -> None:
    """Count the call upstream that has ended, if there is one; ``model`` is the one that its answer names."""
    begun, upstream = outcome.called, outcome.upstream
    if begun is None or upstream is None:
        return
    outcome.called = None
    address, port = outcome.address()
    used = usage or NOTHING
    metrics.answered(
        provider=outcome.provider(),
        model=outcome.request.model if outcome.request is not None else "",
        seconds=(outcome.received or time.perf_counter()) - begun,
        response_model=model or "",
        address=address,
        port=port,
        error_type=error,
        input_tokens=used.prompt,
        output_tokens=used.completion,
        cache_read=used.cached,
        cache_write=used.written,
        reasoning=used.reasoning,
        first_chunk=outcome.first_chunk,
    )


def count_exchange(
    metrics: Metrics, outcome: Outcome, sent: Sent | None, use: CacheUse | None, *, duration: float
) -> None:
    """Count an exchange that has ended after ``duration`` s; what was only observed counts as what went up."""
    label, seen = outcome.label, outcome.seen
    failed = "" if label == "ok" else label
    count_call(metrics, outcome, usage=outcome.reported(), model=seen.model if seen is not None else None, error=failed)
    metrics.request(outcome=label, policy=outcome.settings_or_default().name)
    metrics.served(method="POST", route=ROUTE, status=outcome.status, error=failed, seconds=duration)
    metrics.overhead(outcome.overhead_ms / 1000, summarizer=outcome.waited)
    for _ in range(outcome.overflows):
        metrics.overflow()
    for _ in range(outcome.retries):
        metrics.retry("overflow")
    if outcome.planned is not None:
        for reason in outcome.planned.degraded:
            metrics.degraded(reason)
    if sent is not None:
        metrics.pressure(sent.pressure.level, zone=sent.pressure.zone)
    if outcome.decision is not None and not outcome.observed:
        prepared = outcome.planned is not None and outcome.planned.prepared
        _count_actions(metrics, outcome.decision, prepared=prepared)
    if outcome.attempt is not None:
        billed = outcome.billed()
        _count_key(metrics, outcome, billed or NOTHING, sent, use)
        _count_cache(metrics, billed or NOTHING, use)


def _count_actions(metrics: Metrics, decision: Decision, *, prepared: bool) -> None:
    for report in decision.trail:
        if report.kept:
            metrics.action(report.layer, count=max(1, report.units))
    if decision.cut is not None and decision.cut.origin == PREPARED:
        metrics.preparation("used")
    elif decision.cut is not None and prepared:
        metrics.preparation("wasted")


def _count_key(metrics: Metrics, outcome: Outcome, usage: Usage, sent: Sent | None, use: CacheUse | None) -> None:
    """Count what a request that went up took, in all and of its key: tokens, and dollars where there is a price."""
    caller = outcome.caller
    if caller is None:
        return
    tenant, key = caller.tenant[:TENANT_SHOWN], caller.name or ""
    if sent is not None:
        metrics.tokens(before=sent.before, after=sent.after)
        metrics.burned(
            tenant=tenant,
            key=key,
            forwarded=sent.after,
            saved=sent.before - sent.after,
            cached=usage.cached,
            answered=usage.completion,
        )
    if use is not None and use.cost is not None:
        metrics.cost(forwarded=use.cost, unmanaged=use.cost + (use.cost_saved or 0.0), tenant=tenant, key=key)


def _count_cache(metrics: Metrics, usage: Usage, use: CacheUse | None) -> None:
    """Count what the provider's cache gave, where it says so."""
    if usage.cached is not None and usage.prompt:
        metrics.cached(prompt=usage.prompt, read=usage.cached, written=usage.written or 0)
    if use is not None:
        metrics.cache(changed=use.changed, is_cold=use.is_cold)
