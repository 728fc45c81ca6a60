"""What is remembered of an exchange after it: trace, metrics, log line, health, and the row of it.

An observed request is forwarded as it came: the metrics and the log say what went up, the trace and the row what
would have.
"""

import logging
import time
from collections.abc import Sequence

from policies.calls import follow_calls
from policies.health import Checkup
from policies.pressure import STATUS, Event
from proxy.alerts import Notice
from proxy.caching import CacheUse, follow
from proxy.exchange_rows import row_of
from proxy.health import sample_of
from proxy.hooks import TurnEnd
from proxy.metering import TENANT_SHOWN, count_exchange
from proxy.outcome import Outcome, Sent, evicted_count, evictions_alone
from proxy.planning import Planned
from proxy.relayed import NO_POLICY, settle_relayed
from proxy.runtime import Runtime
from proxy.tap import Tap, Usage
from proxy.telemetry import ExchangeLine, log_exchange
from proxy.upstream.ending import Ending
from proxy.wire.chat import digest_of
from proxy.wire.names import name_from

log = logging.getLogger("weir.settlement")

CRITICAL = "critical"


def settle(runtime: Runtime, outcome: Outcome) -> None:
    """Remember an exchange: trace, metrics, log line, what the hooks are told, and a row to be written later."""
    begun = time.perf_counter()
    duration = begun - outcome.started
    sent, actions, at = outcome.sent(), outcome.actions(), runtime.planner.clock()
    outcome.ending = outcome.read_ending()
    events, use = _events(runtime, outcome), _cache_use(outcome, at=at)
    _report(runtime, outcome, events)
    checkup = _check_up(runtime, outcome, sent, at=at)
    if use is not None:
        outcome.trace.cache(changed=use.changed, is_cold=use.is_cold, hit_ratio=use.hit_ratio)
    _end_trace(outcome)
    metrics = runtime.telemetry.metrics
    count_exchange(metrics, outcome, sent, use, duration=duration)
    log_exchange(runtime.logger, _line(outcome, sent, duration, actions))
    if outcome.turn is not None:
        runtime.hooks.turn_end(outcome.turn, _end(outcome, sent))
    if sent is not None and outcome.planned is not None and outcome.planned.branch is not None:
        answers = listened(runtime, outcome.planned, outcome)
        row = row_of(
            outcome,
            outcome.planned,
            sent,
            duration=duration,
            at=at,
            checkup=checkup,
            events=events,
            use=use,
            answers=answers,
        )
        runtime.settler.put(row)
        if outcome.job is not None and outcome.label == "ok":
            save = CRITICAL if checkup is not None and checkup.is_critical else None
            runtime.preparation.after(outcome.job, outcome.planned, save=save, trace=outcome.trace)
            if outcome.job.ask_about is not None:
                runtime.evaluation.after(outcome.id, outcome.job, outcome.planned, outcome.trace)
    elif outcome.caller is not None:
        settle_relayed(
            runtime,
            outcome.caller,
            request=outcome.id,
            model=outcome.request.model if outcome.request is not None else "",
            status=outcome.status or 0,
            outcome=outcome.label,
            usage=outcome.billed(),
            policy=outcome.settings.name if outcome.settings is not None else NO_POLICY,
        )
    metrics.settlement(time.perf_counter() - begun)


def listened(runtime: Runtime, planned: Planned, outcome: Outcome) -> tuple[bytes, ...]:
    """The chain's hashes after each answer that was given, where they tell the conversation from others."""
    if outcome.listener is None or planned.recognised is None or planned.reading is None:
        return ()
    answers = [digest_of(message) for message in outcome.listener.messages()]
    return runtime.planner.conversations.answered(planned.recognised.thread, planned.reading.transcript, answers)


def _check_up(runtime: Runtime, outcome: Outcome, sent: Sent | None, *, at: float) -> Checkup | None:
    """What the request makes of its conversation's health, told to trace, metrics and sinks; None if nothing new."""
    planned, settings = outcome.planned, outcome.settings
    if sent is None or settings is None or planned is None or not settings.health.enabled:
        return None
    if not runtime.health.is_news(planned):
        return None
    reading, recognised, belief = planned.reading, planned.recognised, planned.belief
    if reading is None or recognised is None or belief is None:
        return None
    thread, health, rules = recognised.thread, runtime.health, settings.health
    try:
        run = follow_calls(reading.transcript, health.run_of(thread), length=recognised.length, most=rules.loop)
        sample = sample_of(
            planned,
            settings,
            limits=runtime.planner.limits_of(settings, belief.budget),
            used=sent.after,
            pressure=sent.pressure,
            evicted=evictions_alone(planned),
            repeats=run.longest,
            at=at,
        )
        checkup = health.see(thread, sample, rules, run=run)
    except Exception:  # what is watched must not suffer from being watched
        log.exception("the health of a conversation could not be told")
        return None
    for ratio in sample.ratios:
        runtime.telemetry.metrics.compression(ratio)
    for alert in checkup.opened:
        outcome.trace.event(
            "alert",
            alert=alert.kind,
            level=alert.level,
            category=alert.category,
            value=round(alert.value, 4),
            threshold=alert.limit,
        )
        if runtime.store is None or not runtime.store.shared:
            branch = thread.branch
            notice = Notice(
                alert=alert, tenant=branch.tenant, conversation=branch.name, policy=settings.name, request=outcome.id
            )
            runtime.alerts.tell(notice)
    return checkup


def _cache_use(outcome: Outcome, *, at: float) -> CacheUse | None:
    """What the provider's cache made of the request; None where none went up, or nobody knows whose it was."""
    planned, request = outcome.planned, outcome.request
    if planned is None or planned.recognised is None or request is None or outcome.attempt is None:
        return None
    return follow(
        planned,
        request,
        outcome.billed(),
        ttl=outcome.settings_or_default().cache_ttl,
        at=at,
        carried_out=not outcome.observed,
        ok=outcome.status is not None and outcome.status < 400,
    )


def _events(runtime: Runtime, outcome: Outcome) -> tuple[Event, ...]:
    """What an operator may want to hear of the request: that estimates are off from now on, and the plan's events."""
    planned, decision = outcome.planned, outcome.decision
    events = decision.events if decision is not None else ()
    if outcome.ending is Ending.RESERVE_EXHAUSTED:
        events = (_exhausted(outcome), *events)
    drift = None if planned is None or planned.belief is None else runtime.windows.take_drift(planned.belief.counted)
    if drift is None:
        return events
    facts = {"estimated": drift.predicted, "reported": drift.reported, "ratio": round(drift.ratio, 3)}
    model = outcome.request.model[:200] if outcome.request is not None else ""
    log.warning("%s counted %d tokens where %d were predicted", model, drift.reported, drift.predicted)
    return (Event("estimate_drift", facts), *events)


def _exhausted(outcome: Outcome) -> Event:
    """The window left the answer less than the client asked for: by how much, in tokens, as far as it is known."""
    usage, planned, request, facts = outcome.reported(), outcome.planned, outcome.request, dict[str, str | float]()
    if outcome.seen is not None:
        facts["reason"] = outcome.seen.finish_reasons[-1]
    if planned is not None and planned.belief is not None:
        facts["limit"] = planned.belief.budget.window
    if usage is not None and usage.prompt is not None:
        facts["tokens"] = usage.prompt
    if usage is not None and usage.completion is not None:
        facts["count"] = usage.completion
    if request is not None and request.max_tokens is not None:
        facts["asked"] = request.max_tokens
    return Event(outcome.ending or "", facts)


def _report(runtime: Runtime, outcome: Outcome, events: Sequence[Event]) -> None:
    """Say in trace, metrics and debug log what the planner had to say of this request."""
    planned, trace = outcome.planned, outcome.trace
    if planned is None:
        return
    decision = planned.decision
    for event in events:
        facts = {**event.facts, "actions": outcome.actions()} if event.kind == STATUS else event.facts
        trace.event(event.kind, **facts)
        runtime.telemetry.metrics.event(event.kind)
        log.debug("%s: %s", event.kind, event.facts)
    if planned.evictions:
        rows = planned.evictions
        trace.event(
            "eviction",
            count=evicted_count(planned),
            freed=sum(row.freed for row in rows),
            remaining=rows[-1].tokens_remaining,
            placeholders=sum(1 for row in rows if row.tokens_after),
            policy=rows[-1].policy,
        )
    if planned.asked_again:
        trace.event("asked_again", count=len(planned.asked_again))
    for each in outcome.recalls:
        trace.event("recall", count=each.hits, tokens=each.tokens)
        runtime.telemetry.metrics.event("recall")
    if outcome.observed and (decision is not None or planned.refused is not None):
        trace.event("observed", actions=outcome.actions(planned=True), reason=planned.refused or "")


def _end(outcome: Outcome, sent: Sent | None) -> TurnEnd:
    return TurnEnd(
        status=outcome.status,
        outcome=outcome.label,
        tokens_before=None if sent is None else sent.before,
        tokens_after=None if sent is None else sent.after,
        zone="unknown" if sent is None else sent.pressure.zone,
        actions=outcome.actions(),
    )


def _end_trace(outcome: Outcome) -> None:
    trace, planned, seen = outcome.trace, outcome.planned, outcome.seen
    if not trace.recorded:
        return
    _identify(outcome)
    if outcome.ending is not None:
        trace.ending(outcome.ending)
    for reason in planned.degraded if planned is not None else ():
        trace.event("degraded", reason=reason)
    if outcome.attempt is not None and outcome.status is not None:
        usage, seen = outcome.reported() or Usage(), seen or Tap()
        outcome.attempt.answered(
            response_model=seen.model,
            response_id=seen.id,
            finish_reasons=seen.finish_reasons,
            tier=seen.tier,
            fingerprint=seen.fingerprint,
            input_tokens=usage.prompt,
            output_tokens=usage.completion,
            cache_read=usage.cached,
            cache_write=usage.written,
            reasoning=usage.reasoning,
            error_type=outcome.error or ("error_in_stream" if seen.error is not None else None),
        )
    trace.end(outcome.status, outcome.error)


def _identify(outcome: Outcome) -> None:
    """Tell the trace whose request it was, as far as that is known: a stranger's word for it is not taken."""
    trace, caller, request, planned = outcome.trace, outcome.caller, outcome.request, outcome.planned
    if caller is None:
        return
    branch = planned.branch if planned is not None else None
    named = None if branch is not None else name_from(outcome.sent_with, request.fields if request is not None else {})
    trace.identify(
        conversation=named if branch is None else branch.name,
        tenant=caller.tenant if branch is None else branch.tenant,
        policy=outcome.settings_or_default().name,
        model=request.model if request is not None else "",
        derived=branch is not None and branch.name == branch.conversation,
    )


def _scan(outcome: Outcome) -> tuple[int | None, int | None]:
    """The tokens of the results that the first pruning layer looked at, and of those that it could take."""
    planned, decision = outcome.planned, outcome.decision
    if decision is None or planned is None or planned.belief is None or outcome.observed:
        return None, None
    for report in decision.trail:
        if report.scanned is not None:
            ratio = planned.belief.budget.ratio
            return round(report.scanned * ratio), round((report.prunable or 0) * ratio)
    return None, None


def _line(outcome: Outcome, sent: Sent | None, duration: float, actions: str) -> ExchangeLine:
    decision, planned = outcome.decision, outcome.planned
    branch = planned.branch if planned is not None else None
    removed = len(decision.removed) if decision is not None and not outcome.observed else 0
    scanned, prunable = _scan(outcome)
    return ExchangeLine(
        request=outcome.id,
        tokens_before=sent.before if sent is not None else 0,
        tokens_after=sent.after if sent is not None else 0,
        usable=sent.limit if sent is not None else 0,
        zone=sent.pressure.zone if sent is not None else "unknown",
        status=outcome.status,
        outcome=outcome.label,
        conversation=branch.name if branch is not None else None,
        trace=outcome.trace.trace_id,
        tenant=branch.tenant[:TENANT_SHOWN] if branch is not None else None,
        model=outcome.request.model if outcome.request is not None else None,
        policy=outcome.settings.name if outcome.settings is not None else None,
        actions=actions,
        overflow=outcome.overflows > 0,
        scanned=scanned,
        prunable=prunable,
        removed=removed or None,
        attempts=1 + outcome.retries,
        overhead_ms=round(outcome.overhead_ms, 2),
        duration_ms=round(1000 * duration, 1),
        ending=outcome.ending,
        error=outcome.error,
    )
