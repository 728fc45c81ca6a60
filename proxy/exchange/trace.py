"""The trace of an exchange: what its spans say once it has ended."""

from collections.abc import Mapping

from policies.pressure import STATUS
from proxy.exchange.exchange import evicted_count
from proxy.exchange.record import ExchangeRecord


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
