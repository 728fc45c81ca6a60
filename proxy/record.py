"""All that happened to a request of the managed route, once it has ended, and three of the four that read it.

The trace, the metrics and the log line are told here; the row is made by :mod:`proxy.exchange_rows`. An observed
request is forwarded as it came: the metrics and the log say what went up, the trace and the row what would have.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from policies import ContextSettings, Decision
from policies.pressure import STATUS, Event
from policies.quality.health import Checkup
from proxy.access.destination import Caller
from proxy.effects.allowance import Spent
from proxy.monitor.caching import CacheUse
from proxy.outcome import Outcome, TokenUsage, evicted_count
from proxy.planning import PlannedRequest, PlanRequest
from proxy.recall.rounds import Recalled
from proxy.tap import NO_USAGE, ReportedUsage, Tap
from proxy.telemetry import AnySpan, ExchangeLine, Metrics, ModelCall, Trace, log_exchange
from proxy.telemetry import metrics as i
from proxy.upstream.overflow import Ending
from proxy.wire.client import name_from
from proxy.wire.messages import ChatRequest

ROUTE = "/v1/chat/completions"
TENANT_SHOWN = 8
PREPARED = "prepared+extract"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeRecord:
    """One request from beginning to end, complete when it exists.

    Attributes:
        at: when it ended, s since the epoch, after ``duration`` s; ``overhead_ms`` passed before it went up.
        planned: what was planned, empty for a request that never was; ``attempt`` the span of its last try upstream.
        tokens: what went up, None where nothing was counted; ``cache`` what the provider's cache made of it.
        actions: what was done to it; ``decided`` what was planned, whether it was done or not.
        seen: what the client was told; ``reported`` the usage of the last round, ``billed`` of all of them together.
        call: the call to the model that ended with it, if one did.
        answers: the chain's hashes after each answer that tells the conversation from others.
        ratios: how many times shorter each thing became that was condensed, known where ``checkup`` is.
    """

    id: str
    at: float
    duration: float
    overhead_ms: float
    status: int | None
    error: str | None
    label: str
    headers: Sequence[tuple[bytes, bytes]]
    request: ChatRequest | None
    caller: Caller | None
    policy: ContextSettings | None
    observed: bool
    job: PlanRequest | None
    planned: PlannedRequest
    attempt: AnySpan | None
    trace: Trace
    tokens: TokenUsage | None
    actions: str
    decided: str
    retries: int
    overflows: int
    seen: Tap
    ending: Ending | None
    reported: ReportedUsage
    billed: ReportedUsage | None
    call: ModelCall | None
    cache: CacheUse | None
    events: tuple[Event, ...]
    checkup: Checkup | None
    ratios: tuple[float, ...]
    recalls: Sequence[Recalled]
    spent: Spent
    refusal: Mapping[str, object]
    answers: tuple[bytes, ...]

    @property
    def model(self) -> str:
        """The model that was asked for, empty where the request could not be read."""
        return "" if self.request is None else self.request.model

    @property
    def settings(self) -> ContextSettings:
        """The policy's settings, the default ones where no policy was found."""
        return self.policy or ContextSettings()

    @property
    def carried_out(self) -> Decision | None:
        """What was decided and done."""
        return None if self.observed else self.planned.decision


def count_call(metrics: Metrics, outcome: Outcome, *, seen: Tap | None = None, error: str = "") -> None:
    """Count the call to a model that has ended before its exchange, if there is one."""
    used = seen.usage if seen is not None else None
    if (call := outcome.end_call(used or NO_USAGE, seen, error)) is not None:
        metrics.called(call)


def count(metrics: Metrics, record: ExchangeRecord) -> None:
    """Tell the metrics."""
    add, failed = metrics.add, "" if record.label == "ok" else record.label
    if record.call is not None:
        metrics.called(record.call)
    add(i.REQUESTS, record.label, record.settings.name)
    metrics.served(method="POST", route=ROUTE, status=record.status, error=failed, seconds=record.duration)
    metrics.record(i.OVERHEAD, record.overhead_ms / 1000, "true" if record.spent.seconds > 0 else "")
    if record.overflows:
        add(i.OVERFLOWS, value=record.overflows)
    if record.retries:
        add(i.RETRIES, "overflow", value=record.retries)
    for event in record.events:
        add(i.EVENTS, event.kind)
    for _ in record.recalls:
        add(i.EVENTS, "recall")
    for reason in record.planned.degraded:
        add(i.DEGRADED, reason)
    for ratio in record.ratios:
        metrics.record(i.COMPRESSION, ratio)
    if record.tokens is not None:
        metrics.record(i.PRESSURE, record.tokens.pressure.level, record.tokens.pressure.zone)
    if record.carried_out is not None:
        _count_actions(metrics, record.carried_out, prepared=record.planned.prepared)
    if record.attempt is not None:
        _count_tokens(metrics, record)
        _count_cache(metrics, record)


def _count_actions(metrics: Metrics, decision: Decision, *, prepared: bool) -> None:
    for report in decision.trail:
        if report.kept:
            metrics.add(i.ACTIONS, report.layer, value=max(1, report.units))
    if decision.cut is not None and decision.cut.origin == PREPARED:
        metrics.add(i.PREPARATIONS, "used")
    elif decision.cut is not None and prepared:
        metrics.add(i.PREPARATIONS, "wasted")


def _count_tokens(metrics: Metrics, record: ExchangeRecord) -> None:
    """Count what a request that went up took, in all and of its key: tokens, and dollars where there is a price."""
    tokens, cache, used = record.tokens, record.cache, record.billed or NO_USAGE
    if record.caller is None:
        return
    if tokens is not None:
        saved = max(0, tokens.before - tokens.after)
        for kind, count in (("before", tokens.before), ("after", tokens.after), ("saved", saved)):
            metrics.add(i.TOKENS_SEEN, kind, value=count)
        count_key(metrics, record.caller, forwarded=tokens.after, saved=saved, used=used)
    if cache is not None and cache.cost is not None:
        count_cost(metrics, record.caller, cache.cost, unmanaged=cache.cost + (cache.cost_saved or 0.0))


def count_key(metrics: Metrics, caller: Caller, *, forwarded: int, saved: int, used: ReportedUsage) -> None:
    """Count the tokens of one request for its key: the first digits of the tenant's hash, and the key's name."""
    tenant, key = caller.tenant[:TENANT_SHOWN], caller.name or ""
    for kind, tokens in (
        ("forwarded", forwarded),
        ("saved", saved),
        ("cached", used.cached),
        ("answered", used.completion),
    ):
        if tokens is not None:
            metrics.add(i.KEY_TOKENS, kind, tenant, key, value=tokens)


def count_cost(metrics: Metrics, caller: Caller, forwarded: float, *, unmanaged: float) -> None:
    """Count the US dollars that one request cost, and that the client's own array would have cost."""
    tenant, key = caller.tenant[:TENANT_SHOWN], caller.name or ""
    metrics.add(i.COST, "forwarded", tenant, key, value=forwarded)
    metrics.add(i.COST, "unmanaged", tenant, key, value=unmanaged)


def _count_cache(metrics: Metrics, record: ExchangeRecord) -> None:
    """Count what the provider's cache gave, where it says so."""
    used = record.billed
    if used is not None and used.cached is not None and used.prompt:
        for kind, tokens in (("prompt", used.prompt), ("read", used.cached), ("written", used.written or 0)):
            metrics.add(i.CACHE_TOKENS, kind, value=tokens)
    if (cache := record.cache) is not None:
        metrics.add(i.CACHE_REQUESTS, cache.changed, "true" if cache.is_cold else "false")


def end_trace(record: ExchangeRecord) -> None:
    """Tell the trace, and end it."""
    trace = record.trace
    if not trace.recorded:
        return
    _note_events(record)
    if record.cache is not None:
        trace.cache(changed=record.cache.changed, is_cold=record.cache.is_cold, hit_ratio=record.cache.hit_ratio)
    _identify(record)
    if record.ending is not None:
        trace.ending(record.ending)
    for reason in record.planned.degraded:
        trace.event("degraded", reason=reason)
    if record.attempt is not None and record.status is not None:
        failed = record.error or ("error_in_stream" if record.seen.error is not None else None)
        record.attempt.answered(seen=record.seen, usage=record.reported, error_type=failed)
    trace.end(record.status, record.error)


def _note_events(record: ExchangeRecord) -> None:
    """What the planner and the health of the conversation have to say of this request."""
    planned, note = record.planned, record.trace.event
    for event in record.events:
        facts = {**event.facts, "actions": record.actions} if event.kind == STATUS else event.facts
        note(event.kind, **facts)
    if rows := planned.evictions:
        note(
            "eviction",
            count=evicted_count(planned),
            freed=sum(row.freed for row in rows),
            remaining=rows[-1].tokens_remaining,
            placeholders=sum(1 for row in rows if row.tokens_after),
            policy=rows[-1].policy,
        )
    if planned.asked_again:
        note("asked_again", count=len(planned.asked_again))
    for each in record.recalls:
        note("recall", count=each.hits, tokens=each.tokens)
    if record.observed and (planned.decision is not None or planned.refused is not None):
        note("observed", actions=record.decided, reason=planned.refused or "")
    for alert in record.checkup.opened if record.checkup is not None else ():
        kinds = {"alert": alert.kind, "level": alert.level, "category": alert.category}
        note("alert", **kinds, value=round(alert.value, 4), threshold=alert.limit)


def _identify(record: ExchangeRecord) -> None:
    """Tell the trace whose request it was, as far as that is known: a stranger's word for it is not taken."""
    caller, branch = record.caller, record.planned.branch
    if caller is None:
        return
    fields = record.request.fields if record.request is not None else {}
    record.trace.identify(
        conversation=name_from(record.headers, fields) if branch is None else branch.name,
        tenant=caller.tenant if branch is None else branch.tenant,
        policy=record.settings.name,
        model=record.model,
        derived=branch is not None and branch.name == branch.conversation,
    )


def write_line(logger: logging.Logger, record: ExchangeRecord) -> None:
    """Tell the operator's log."""
    tokens, branch, done = record.tokens, record.planned.branch, record.carried_out
    scanned, prunable = _scan(record)
    line = ExchangeLine(
        request=record.id,
        tokens_before=tokens.before if tokens is not None else 0,
        tokens_after=tokens.after if tokens is not None else 0,
        usable=tokens.limit if tokens is not None else 0,
        zone=tokens.pressure.zone if tokens is not None else "unknown",
        status=record.status,
        outcome=record.label,
        conversation=branch.name if branch is not None else None,
        trace=record.trace.trace_id,
        tenant=branch.tenant[:TENANT_SHOWN] if branch is not None else None,
        model=record.request.model if record.request is not None else None,
        policy=record.policy.name if record.policy is not None else None,
        actions=record.actions,
        overflow=record.overflows > 0,
        scanned=scanned,
        prunable=prunable,
        removed=len(done.removed) or None if done is not None else None,
        attempts=1 + record.retries,
        overhead_ms=round(record.overhead_ms, 2),
        duration_ms=round(1000 * record.duration, 1),
        ending=record.ending,
        error=record.error,
    )
    log_exchange(logger, line)


def _scan(record: ExchangeRecord) -> tuple[int | None, int | None]:
    """The tokens of the results that the first pruning layer looked at, and of those that it could take."""
    decision, belief = record.carried_out, record.planned.belief
    for report in decision.trail if decision is not None and belief is not None else ():
        if report.scanned is not None and belief is not None:
            return round(report.scanned * belief.budget.ratio), round((report.prunable or 0) * belief.budget.ratio)
    return None, None
