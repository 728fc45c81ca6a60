"""What is known of an exchange while it runs, the headers that tell the client, and what is remembered after it.

An observed request is forwarded as it came: the headers, the metrics and the log say what went up, the trace and the
row of the exchange what would have.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from urllib.parse import urlsplit

from policies import ContextSettings, Decision, Mode, Pressure
from policies.calls import follow_calls, results_by_tool
from policies.growth import Event, zones_for
from policies.health import Checkup
from policies.pressure import read_pressure
from policies.trend import lift
from proxy.alerts import Notice
from proxy.caching import CacheUse, follow
from proxy.caller import Caller
from proxy.config import UpstreamSettings
from proxy.errors import ContextLengthExceeded, ProxyError
from proxy.evictions import CUT
from proxy.health import sample_of
from proxy.hooks import Turn, TurnEnd
from proxy.planning import Job, Planned
from proxy.recall.rounds import Recalled
from proxy.runtime import Runtime
from proxy.spent import Spent
from proxy.stages import condensed_in, stage_of, strategy_of
from proxy.store.records import ExchangeRow
from proxy.tap import Tap, Usage, together
from proxy.telemetry import Attempt, ExchangeLine, Trace, log_exchange
from proxy.upstream.overflow import Verdict
from proxy.wire.chat import ChatRequest

log = logging.getLogger("weir.settlement")

CLIENT_CLOSED = 499
MOST_EVENTS = 8
TENANT_SHOWN = 8
CRITICAL = "critical"


@dataclass(frozen=True, slots=True)
class Sent:
    """Calibrated tokens of a request as it came and as it went up, what W - R - H leaves, and the pressure of that."""

    before: int
    after: int
    limit: int
    pressure: Pressure


@dataclass(slots=True)
class Outcome:
    """One exchange as it unfolds; the routes and the line write it, :func:`settle` reads it.

    ``recalls`` are the calls of the recall tool that were answered in it, ``rounds`` what the upstream reported of
    the answers before the last one; ``seen`` is what the client was told, all rounds together.
    """

    id: str
    started: float
    trace: Trace
    query: bytes = b""
    request: ChatRequest | None = None
    caller: Caller | None = None
    settings: ContextSettings | None = None
    upstream: UpstreamSettings | None = None
    planned: Planned | None = None
    attempt: Attempt | None = None
    seen: Tap | None = None
    status: int | None = None
    error: str | None = None
    ready: float | None = None
    retries: int = 0
    overflows: int = 0
    clamped: bool = False
    turn: Turn | None = None
    job: Job | None = None
    spent: Callable[[], Spent] | None = None
    recalls: list[Recalled] = field(default_factory=list)
    rounds: list[Usage] = field(default_factory=list)
    refusal: Mapping[str, object] = field(default_factory=dict)

    @property
    def observed(self) -> bool:
        """Whether the policy only plans."""
        return self.settings is not None and self.settings.observes and self.settings.mode is not Mode.OFF

    @property
    def decision(self) -> Decision | None:
        """The plan that was carried out, if there is one."""
        return None if self.planned is None else self.planned.decision

    @property
    def label(self) -> str:
        """The outcome's label for metrics and rows."""
        if self.error is not None:
            return self.error
        if self.status is None or self.status >= 400:
            return f"upstream_{self.status}"
        if self.seen is not None and self.seen.error is not None:
            return "error_in_stream"
        return "ok"

    @property
    def overhead_ms(self) -> float:
        """Milliseconds from the request's arrival to its first departure upstream."""
        return 1000 * ((self.ready or time.perf_counter()) - self.started)

    def billed(self) -> Usage | None:
        """What the upstream's answers took together, every round's prompt counted."""
        usage = self.seen.usage if self.seen is not None else None
        if usage is None or not self.rounds:
            return usage
        return replace(together((*self.rounds, usage)), completion=usage.completion, reasoning=usage.reasoning)

    def reported(self) -> Usage | None:
        """What the upstream reported of the last round's answer alone."""
        usage = self.seen.usage if self.seen is not None else None
        if usage is None or usage.completion is None or not self.rounds:
            return usage
        before = together(self.rounds)
        thought = None if usage.reasoning is None else usage.reasoning - (before.reasoning or 0)
        return replace(usage, completion=usage.completion - (before.completion or 0), reasoning=thought)

    def address(self) -> tuple[str, int | None]:
        """Host and port of the upstream, for the trace."""
        return _host_and_port((self.upstream.base_url or self.upstream.api_base or "") if self.upstream else "")

    def settings_or_default(self) -> ContextSettings:
        """The policy's settings, the default ones before a policy was found."""
        return self.settings or ContextSettings()

    def overflowed(self, verdict: Verdict) -> None:
        """The upstream said that the request does not fit."""
        del verdict
        self.overflows += 1

    def refused(self, error: ProxyError) -> None:
        """Weir answered instead of an upstream."""
        self.status, self.error = error.status, error.code
        if isinstance(error, ContextLengthExceeded):
            self.refusal = error.weir or {}

    def gone(self) -> None:
        """The client left."""
        self.error = "client_disconnect"
        self.status = self.status or CLIENT_CLOSED

    def cut(self, reason: str) -> None:
        """The upstream's answer broke off."""
        del reason
        self.error = "stream_broken"

    def sent(self) -> Sent | None:
        """What went up, None where the request was not counted."""
        decision, planned = self.decision, self.planned
        if decision is not None and not self.observed:
            return Sent(decision.before, decision.after, decision.limit, decision.pressure)
        if planned is None or planned.reading is None or planned.belief is None:
            return None
        budget, settings = planned.belief.budget, self.settings_or_default()
        tokens = planned.reading.transcript.tokens
        used, zones = budget.estimate(tokens), zones_for(settings, budget.window)
        pressure = read_pressure(used, budget.base(settings), zones, fits=budget.fits(tokens))
        zone, _ = lift(pressure.zone, used, settings.rot_soft_tokens)
        return Sent(used, used, budget.usable, replace(pressure, zone=zone))

    def actions(self, *, planned: bool = False) -> str:
        """The value of ``x-weir-actions``: what was done to this request, ``none`` if nothing was.

        With ``planned`` it is what was decided, whether it was done or not.
        """
        decision, parts = self.decision, []
        if self.observed:
            parts.append("observe=1")
        if decision is not None and (planned or not self.observed):
            parts += [f"{name}={count}" for name, count in sorted(decision.applied.items())]
        if self.clamped:
            parts.append("clamp=1")
        if self.retries:
            parts.append(f"retry={self.retries}")
        if self.recalls:
            parts.append(f"recall={len(self.recalls)}")
        if planned and self.planned is not None and self.planned.refused is not None:
            parts.append(f"refused={self.planned.refused}")
        if self.planned is not None:
            parts += [f"degraded={reason}" for reason in dict.fromkeys(self.planned.degraded)]
        return ",".join(parts) or "none"

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Weir's response headers, as far as the exchange has come."""
        sent, planned = self.sent(), self.planned
        pairs = [(b"x-request-id", self.id), (b"x-weir-actions", self.actions())]
        if planned is not None and planned.branch is not None:
            pairs.append((b"x-weir-conversation", planned.branch.name))
        if sent is not None:
            pairs.append((b"x-weir-tokens", f"before={sent.before};after={sent.after};limit={sent.limit}"))
            pairs.append((b"x-weir-pressure", str(sent.pressure)))
        pairs.append((b"x-weir-overhead-ms", f"{self.overhead_ms:.2f}"))
        return [(name, value.encode("latin-1", "replace")) for name, value in pairs]


@lru_cache(maxsize=256)
def _host_and_port(base: str) -> tuple[str, int | None]:
    parts = urlsplit(base)
    return parts.hostname or "", parts.port


def settle(runtime: Runtime, outcome: Outcome) -> None:
    """Remember an exchange: trace, metrics, log line, what the hooks are told, and a row to be written later."""
    duration = time.perf_counter() - outcome.started
    sent, actions, at = outcome.sent(), outcome.actions(), runtime.planner.clock()
    events, use = _events(runtime, outcome), _cache_use(outcome, at=at)
    _report(runtime, outcome, events)
    checkup = _check_up(runtime, outcome, sent, at=at)
    if use is not None:
        outcome.trace.cache(changed=use.changed, is_cold=use.is_cold, hit_ratio=use.hit_ratio)
    _end_trace(outcome)
    _count(runtime, outcome, sent, use, duration)
    log_exchange(runtime.logger, _line(outcome, sent, duration, actions))
    if outcome.turn is not None:
        runtime.hooks.turn_end(outcome.turn, _end(outcome, sent))
    if sent is not None and outcome.planned is not None and outcome.planned.branch is not None:
        planned = outcome.actions(planned=True) if outcome.observed else actions
        detail = _detail(outcome.planned, outcome.settings_or_default(), events, use)
        if outcome.spent is not None and (spent := outcome.spent()).any:
            detail["summarizer"] = asdict(spent)
        if outcome.recalls:
            detail["recall"] = [asdict(each) for each in outcome.recalls]
        row = _row(
            outcome,
            outcome.planned,
            sent,
            actions=planned,
            duration=duration,
            at=at,
            detail=detail,
            checkup=checkup,
            events=events,
        )
        runtime.settler.put(row)
        if outcome.job is not None and outcome.label == "ok":
            save = CRITICAL if checkup is not None and checkup.is_critical else None
            runtime.preparation.after(outcome.job, outcome.planned, save=save)
            if outcome.job.ask_about is not None:
                runtime.evaluation.after(outcome.id, outcome.job, outcome.planned, outcome.trace)


def _check_up(runtime: Runtime, outcome: Outcome, sent: Sent | None, *, at: float) -> Checkup | None:
    """What the request makes of its conversation's health, told to trace, metrics and sinks; None if nothing new."""
    planned, settings = outcome.planned, outcome.settings
    if sent is None or settings is None or planned is None or not runtime.health.is_news(planned):
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
            evicted=evicted_count(planned),
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
        branch = thread.branch
        runtime.alerts.tell(
            Notice(
                alert=alert, tenant=branch.tenant, conversation=branch.name, policy=settings.name, request=outcome.id
            )
        )
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
    drift = None if planned is None or planned.belief is None else runtime.windows.take_drift(planned.belief.counted)
    if drift is None:
        return events
    facts = {"estimated": drift.predicted, "reported": drift.reported, "ratio": round(drift.ratio, 3)}
    model = outcome.request.model[:200] if outcome.request is not None else ""
    log.warning("%s counted %d tokens where %d were predicted", model, drift.reported, drift.predicted)
    return (Event("estimate_drift", facts), *events)


def _row(
    outcome: Outcome,
    planned: Planned,
    sent: Sent,
    *,
    actions: str,
    duration: float,
    at: float,
    detail: Mapping[str, object],
    checkup: Checkup | None,
    events: tuple[Event, ...],
) -> ExchangeRow:
    assert planned.recognised is not None  # noqa: S101 - the caller looked at its branch
    assert planned.reading is not None  # noqa: S101 - whoever was recognised was read
    assert planned.belief is not None  # noqa: S101 - sent() looked
    thread, chain, decision = planned.recognised.thread, planned.reading.transcript.chain, planned.decision
    usage = outcome.seen.usage if outcome.seen is not None else None
    settings, pressure = outcome.settings_or_default(), decision.pressure if decision is not None else sent.pressure
    base = max(1, planned.belief.budget.base(settings))
    reading = decision.reading if decision is not None else None
    return ExchangeRow(
        id=outcome.id,
        tenant=thread.branch.tenant,
        conversation=thread.branch.conversation,
        name=thread.branch.name,
        branch=thread.branch.branch,
        parent=thread.parent,
        at=at,
        model=outcome.request.model if outcome.request is not None else "",
        policy=settings.name,
        chain_end=chain[-1] if chain else b"",
        length=len(chain),
        status=outcome.status or 0,
        outcome=outcome.label,
        tokens_before=sent.before,
        tokens_after=decision.after if decision is not None else sent.after,
        limit=sent.limit,
        pressure=pressure.level,
        zone=pressure.zone,
        actions=actions,
        usage_prompt=usage.prompt if usage else None,
        usage_completion=usage.completion if usage else None,
        usage_cached=usage.cached if usage else None,
        overhead_ms=outcome.overhead_ms,
        duration_ms=1000 * duration,
        attempts=1 + outcome.retries,
        action="none" if decision is None else stage_of(decision, settings, base=base),
        observed=outcome.observed,
        evicted=evicted_count(planned),
        strategy="" if decision is None else strategy_of(decision),
        pressure_before=sent.before / base,
        velocity=reading.velocity_tokens_per_turn if reading is not None else None,
        turns_until_red=reading.turns_until_red if reading is not None else None,
        trend=decision.trend if decision is not None else None,
        parent_conversation=outcome.job.parent if outcome.job is not None else None,
        asked_again=planned.asked_again,
        detail=detail,
        health=checkup,
        events=events,
        refusal={"code": planned.refused} if planned.refused is not None else outcome.refusal,
    )


def _detail(
    planned: Planned, settings: ContextSettings, events: Sequence[Event], use: CacheUse | None
) -> dict[str, object]:
    """Buckets that hold something, what pressure is a share of, events, tools' results, tools left out, the cache."""
    decision, detail = planned.decision, dict[str, object]()
    if decision is not None:
        detail["buckets"] = {name: tokens for name, tokens in decision.buckets.items() if tokens}
    if planned.belief is not None:
        budget = planned.belief.budget
        detail["base"] = budget.base(settings)
        if budget.caps:
            detail["caps"] = dict(budget.caps)
        detail["source"] = "model_reported" if budget.reported else "client_estimated"
    if events:
        detail["events"] = [{"kind": e.kind, **e.facts} for e in events[:MOST_EVENTS]]
    if decision is not None and decision.pruned:
        detail["pruned"] = list(decision.pruned)
    if decision is not None and (condensed := condensed_in(decision)):
        detail["condensed"] = condensed
    if planned.reading is not None and planned.recognised is not None:
        transcript = planned.reading.transcript
        if tools := results_by_tool(transcript, transcript.head + planned.recognised.length):
            detail["tools"] = tools
    return detail if use is None else detail | use.facts()


def evicted_count(planned: Planned) -> int:
    """How many messages and definitions were newly taken out or shortened, summaries not counted."""
    return sum(1 for row in planned.evictions if row.kind != CUT or row.tool)


def _report(runtime: Runtime, outcome: Outcome, events: Sequence[Event]) -> None:
    """Say in trace, metrics and debug log what the planner had to say of this request."""
    planned, trace = outcome.planned, outcome.trace
    if planned is None:
        return
    decision = planned.decision
    for event in events:
        trace.event(event.kind, **event.facts)
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
    trace, planned, caller = outcome.trace, outcome.planned, outcome.caller
    if planned is not None and planned.branch is not None and caller is not None:
        branch = planned.branch
        trace.identify(
            conversation=branch.name,
            tenant=branch.tenant,
            policy=outcome.settings_or_default().name,
            model=outcome.request.model if outcome.request is not None else "",
            derived=branch.name == branch.conversation,
        )
        for reason in planned.degraded:
            trace.event("degraded", reason=reason)
    seen = outcome.seen
    if outcome.attempt is not None and outcome.status is not None:
        usage = outcome.reported()
        outcome.attempt.answered(
            outcome.status,
            response_model=seen.model if seen is not None else None,
            response_id=seen.id if seen is not None else None,
            finish_reasons=seen.finish_reasons if seen is not None else (),
            input_tokens=usage.prompt if usage else None,
            output_tokens=usage.completion if usage else None,
            cache_read=usage.cached if usage else None,
            reasoning=usage.reasoning if usage else None,
            error_type=outcome.error,
        )
    trace.end(outcome.status, outcome.error)


def _count(runtime: Runtime, outcome: Outcome, sent: Sent | None, use: CacheUse | None, duration: float) -> None:
    metrics, decision = runtime.telemetry.metrics, outcome.decision
    metrics.request(outcome=outcome.label, policy=outcome.settings_or_default().name)
    metrics.overhead(outcome.overhead_ms / 1000)
    for _ in range(outcome.overflows):
        metrics.overflow()
    for _ in range(outcome.retries):
        metrics.retry("overflow")
    if outcome.planned is not None:
        for reason in outcome.planned.degraded:
            metrics.degraded(reason)
    if sent is not None:
        metrics.tokens(before=sent.before, after=sent.after)
        metrics.pressure(sent.pressure.level, zone=sent.pressure.zone)
    if use is not None and use.cost is not None and outcome.caller is not None:
        unmanaged = use.cost + (use.cost_saved or 0.0)
        metrics.cost(forwarded=use.cost, unmanaged=unmanaged, tenant=outcome.caller.tenant[:TENANT_SHOWN])
    if decision is not None and not outcome.observed:
        for report in decision.trail:
            if report.kept:
                metrics.action(report.layer, count=max(1, report.units))
    usage = outcome.billed()
    if outcome.upstream is not None and outcome.attempt is not None:
        address, port = outcome.address()
        metrics.answered(
            provider=outcome.upstream.name,
            model=outcome.request.model if outcome.request is not None else "",
            seconds=duration,
            response_model=(outcome.seen.model or "") if outcome.seen is not None else "",
            address=address,
            port=port,
            error_type=outcome.error or "",
            input_tokens=usage.prompt if usage else None,
            output_tokens=usage.completion if usage else None,
        )


def _line(outcome: Outcome, sent: Sent | None, duration: float, actions: str) -> ExchangeLine:
    decision, planned = outcome.decision, outcome.planned
    branch = planned.branch if planned is not None else None
    removed = len(decision.removed) if decision is not None and not outcome.observed else 0
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
        removed=removed or None,
        attempts=1 + outcome.retries,
        overhead_ms=round(outcome.overhead_ms, 2),
        duration_ms=round(1000 * duration, 1),
        error=outcome.error,
    )
