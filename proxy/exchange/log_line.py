"""The log line of an exchange."""

import logging

from proxy.access.destination import TENANT_SHOWN
from proxy.exchange.record import ExchangeRecord
from proxy.telemetry.logs import ExchangeLine, log_exchange


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
