"""What is remembered of a request after it: the record of a managed one, or the row of one that was only relayed."""

import logging
import time

from policies import ContextSettings
from policies.pressure import Event
from policies.quality.health import Checkup
from policies.turns import follow_calls
from proxy.access.destination import Caller
from proxy.effects.allowance import Spent
from proxy.effects.hooks import TurnEnd
from proxy.exchange_rows import row_of
from proxy.monitor.caching import CacheUse, cost_of, follow, prices_of
from proxy.monitor.health import Notice, sample_of
from proxy.outcome import Outcome, TokenUsage, evictions_alone
from proxy.planning import PlannedRequest
from proxy.record import ExchangeRecord, count, count_cost, count_key, end_trace, write_line
from proxy.runtime import Runtime
from proxy.store.records import RelayedRow
from proxy.tap import NO_USAGE, ReportedUsage
from proxy.telemetry.metrics import SETTLEMENT
from proxy.upstream.overflow import Ending
from proxy.wire.messages import digest_of

log = logging.getLogger("weir.settlement")

CRITICAL = "critical"
NO_POLICY = "none"


def record_exchange(runtime: Runtime, outcome: Outcome) -> None:
    """Remember an exchange: trace, metrics, log line, what the hooks are told, and a row to be written later."""
    begun, metrics = time.perf_counter(), runtime.telemetry.metrics
    record = record_of(runtime, outcome, ended=begun)
    _tell_alerts(runtime, record)
    for event in record.events:
        log.debug("%s: %s", event.kind, event.facts)
    end_trace(record)
    count(metrics, record)
    write_line(runtime.logger, record)
    if outcome.turn is not None:
        runtime.hooks.turn_end(outcome.turn, _end(record))
    _store(runtime, record)
    metrics.record(SETTLEMENT, time.perf_counter() - begun)


def record_of(runtime: Runtime, outcome: Outcome, *, ended: float) -> ExchangeRecord:
    """All that happened in an exchange that ended at ``ended`` (``time.perf_counter``)."""
    at, planned, tokens = runtime.planner.clock(), outcome.planned, outcome.sent()
    ending = outcome.read_ending()
    events, cache = _events(runtime, outcome, ending), _cache_use(outcome, at=at)
    checkup, ratios = _check_up(runtime, outcome, tokens, at=at)
    reported = outcome.reported() or NO_USAGE
    return ExchangeRecord(
        id=outcome.id,
        at=at,
        duration=ended - outcome.started,
        overhead_ms=outcome.overhead_ms,
        status=outcome.status,
        error=outcome.error,
        label=outcome.label,
        headers=outcome.sent_with,
        request=outcome.request,
        caller=outcome.caller,
        policy=outcome.settings,
        observed=outcome.observed,
        job=outcome.job,
        planned=planned,
        attempt=outcome.attempt,
        trace=outcome.trace,
        tokens=tokens,
        actions=outcome.actions(),
        decided=outcome.actions(planned=True) if outcome.observed else "",
        retries=outcome.retries,
        overflows=outcome.overflows,
        seen=outcome.seen,
        ending=ending,
        reported=reported,
        billed=outcome.billed(),
        call=outcome.end_call(reported, outcome.seen, "" if outcome.label == "ok" else outcome.label),
        cache=cache,
        events=events,
        checkup=checkup,
        ratios=ratios,
        recalls=outcome.recalls,
        spent=outcome.spent() if outcome.spent is not None else Spent(),
        refusal=outcome.refusal,
        answers=listened(runtime, planned, outcome) if tokens is not None else (),
    )


def listened(runtime: Runtime, planned: PlannedRequest, outcome: Outcome) -> tuple[bytes, ...]:
    """The chain's hashes after each answer that was given, where they tell the conversation from others."""
    if outcome.listener is None or planned.recognised is None or planned.reading is None:
        return ()
    answers = [digest_of(message) for message in outcome.listener.messages()]
    return runtime.planner.conversations.answered(planned.recognised.thread, planned.reading.transcript, answers)


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
    """Have a request of a key counted with what its answer says that it used, at list prices where there are any."""
    used, metrics, cost = usage or NO_USAGE, runtime.telemetry.metrics, None
    if usage is not None:
        prices = prices_of(model, runtime.registry.facts(model, settings=ContextSettings())) if model else None
        cost = None if prices is None else cost_of(prices, usage)
        count_key(metrics, caller, forwarded=used.prompt or 0, saved=0, used=used)
    if cost is not None:
        count_cost(metrics, caller, cost, unmanaged=cost)
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
        )
    )


def _store(runtime: Runtime, record: ExchangeRecord) -> None:
    """Have the row written, and what the answer makes worth doing done."""
    if record.tokens is None or record.planned.branch is None:
        if record.caller is not None:
            record_relayed(
                runtime,
                record.caller,
                request=record.id,
                model=record.model,
                status=record.status or 0,
                outcome=record.label,
                usage=record.billed,
                policy=record.policy.name if record.policy is not None else NO_POLICY,
            )
        return
    runtime.settler.put(row_of(record, record.tokens))
    if record.job is None or record.label != "ok":
        return
    save = CRITICAL if record.checkup is not None and record.checkup.is_critical else None
    runtime.preparation.after(record.job, record.planned, save=save, trace=record.trace)
    if record.job.ask_about is not None:
        runtime.evaluation.after(record.id, record.job, record.planned, record.trace)


def _end(record: ExchangeRecord) -> TurnEnd:
    tokens = record.tokens
    return TurnEnd(
        status=record.status,
        outcome=record.label,
        tokens_before=None if tokens is None else tokens.before,
        tokens_after=None if tokens is None else tokens.after,
        zone="unknown" if tokens is None else tokens.pressure.zone,
        actions=record.actions,
    )


def _tell_alerts(runtime: Runtime, record: ExchangeRecord) -> None:
    """Tell what began with the request; where servers share a store, the one that stores its row does."""
    branch = record.planned.branch
    if record.checkup is None or branch is None or (runtime.store is not None and runtime.store.shared):
        return
    whose = {"tenant": branch.tenant, "conversation": branch.name, "policy": record.settings.name, "request": record.id}
    for alert in record.checkup.opened:
        runtime.alerts.tell(Notice(alert=alert, **whose))


def _check_up(
    runtime: Runtime, outcome: Outcome, tokens: TokenUsage | None, *, at: float
) -> tuple[Checkup | None, tuple[float, ...]]:
    """What the request makes of its conversation's health, and what it condensed; None if nothing is new."""
    planned, settings, nothing = outcome.planned, outcome.settings, (None, ())
    if tokens is None or settings is None or not settings.health.enabled:
        return nothing
    if not runtime.health.is_news(planned):
        return nothing
    reading, recognised, belief = planned.reading, planned.recognised, planned.belief
    if reading is None or recognised is None or belief is None:
        return nothing
    thread, health, rules = recognised.thread, runtime.health, settings.health
    try:
        run = follow_calls(reading.transcript, health.run_of(thread), length=recognised.length, most=rules.loop)
        sample = sample_of(
            planned,
            settings,
            limits=runtime.planner.limits_of(settings, belief.budget),
            used=tokens.after,
            pressure=tokens.pressure,
            evicted=evictions_alone(planned),
            repeats=run.longest,
            at=at,
        )
        return health.see(thread, sample, rules, run=run), sample.ratios
    except Exception:  # what is watched must not suffer from being watched
        log.exception("the health of a conversation could not be told")
        return nothing


def _cache_use(outcome: Outcome, *, at: float) -> CacheUse | None:
    """What the provider's cache made of the request; None where none went up, or nobody knows whose it was."""
    planned, request = outcome.planned, outcome.request
    if planned.recognised is None or request is None or outcome.attempt is None:
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


def _events(runtime: Runtime, outcome: Outcome, ending: Ending | None) -> tuple[Event, ...]:
    """What an operator may want to hear of the request: that estimates are off from now on, and the plan's events."""
    planned, decision = outcome.planned, outcome.decision
    events = decision.events if decision is not None else ()
    if ending is Ending.RESERVE_EXHAUSTED:
        events = (_exhausted(outcome, ending), *events)
    drift = None if planned.belief is None else runtime.windows.take_drift(planned.belief.counted)
    if drift is None:
        return events
    facts = {"estimated": drift.predicted, "reported": drift.reported, "ratio": round(drift.ratio, 3)}
    model = outcome.request.model[:200] if outcome.request is not None else ""
    log.warning("%s counted %d tokens where %d were predicted", model, drift.reported, drift.predicted)
    return (Event("estimate_drift", facts), *events)


def _exhausted(outcome: Outcome, ending: Ending) -> Event:
    """The window left the answer less than the client asked for: by how much, in tokens, as far as it is known."""
    usage, planned, request = outcome.reported() or NO_USAGE, outcome.planned, outcome.request
    found = {
        "reason": outcome.seen.finish_reasons[-1],
        "limit": planned.belief.budget.window if planned.belief is not None else None,
        "tokens": usage.prompt,
        "count": usage.completion,
        "asked": request.max_tokens if request is not None else None,
    }
    return Event(ending, {name: value for name, value in found.items() if value is not None})
