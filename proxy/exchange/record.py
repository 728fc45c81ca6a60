"""All that happened to a request of the managed route, once it has ended.

Four sinks read the record (:mod:`proxy.exchange.tell`): the trace, the metrics, the log line and the row. An observed
request is forwarded as it came: the metrics and the log say what went up, the trace and the row what would have.
"""

import logging
from collections.abc import Mapping, Sequence

import msgspec

from policies import ContextSettings, Decision
from policies.pressure import Event
from policies.quality.health import Checkup
from policies.turns import follow_calls
from proxy.access.destination import Caller
from proxy.effects.allowance import Spent
from proxy.exchange.progress import ExchangeProgress, TokenUsage, evictions_alone
from proxy.monitor.caching import CacheUse, follow
from proxy.monitor.health import sample_of
from proxy.planning.values import Plan, PlanRequest
from proxy.recall.rounds import Recalled
from proxy.runtime import Runtime
from proxy.tap import ReportedUsage, Tap
from proxy.telemetry import AnySpan, ModelCall, Trace
from proxy.upstream.overflow import Ending
from proxy.wire.chat import digest_of
from proxy.wire.codec import ClientRequest

log = logging.getLogger("weir.settlement")


class ExchangeRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One request from beginning to end, complete when it exists.

    Attributes:
        at: when it ended, s since the epoch, after ``duration`` s; ``overhead_ms`` passed before it went up.
        model: empty where the request could not be read; ``settings`` are the policy's, else the default ones.
        plan: what was planned, empty for a request that never was; ``attempt`` the span of its last try upstream.
        degraded: what was done with less than there should be, and why.
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
    route: str
    request: ClientRequest | None
    caller: Caller | None
    model: str
    policy: ContextSettings | None
    settings: ContextSettings
    observed: bool
    asked: PlanRequest | None
    plan: Plan
    degraded: tuple[str, ...]
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
    def carried_out(self) -> Decision | None:
        return None if self.observed else self.plan.decision


def record_of(runtime: Runtime, progress: ExchangeProgress, *, ended: float) -> ExchangeRecord:
    at, plan, tokens, attempts = runtime.planner.clock(), progress.plan, progress.tokens(), progress.attempts
    request, ending, reported = progress.request, progress.ending(), progress.reported()
    events, cache = _events(runtime, progress, ending), _cache_use(progress, at=at)
    checkup, ratios = _check_up(runtime, progress, tokens, at=at)
    failed = "" if progress.label == "ok" else progress.label
    return ExchangeRecord(
        id=progress.id,
        at=at,
        duration=ended - progress.started,
        overhead_ms=progress.overhead_ms,
        status=progress.status,
        error=progress.error,
        label=progress.label,
        headers=progress.headers,
        route=f"/v1{progress.route.path}",
        request=progress.chat,
        caller=progress.caller,
        model=progress.model,
        policy=progress.settings,
        settings=progress.policy,
        observed=progress.observed,
        asked=None if request is None else request.asked,
        plan=plan,
        degraded=progress.all_degraded(),
        attempt=None if attempts is None else attempts.span,
        trace=progress.trace,
        tokens=tokens,
        actions=progress.actions(),
        decided=progress.actions(planned=True) if progress.observed else "",
        retries=progress.retries,
        overflows=0 if attempts is None else attempts.overflows,
        seen=progress.seen,
        ending=ending,
        reported=reported,
        billed=progress.billed(),
        call=None if attempts is None else attempts.end_call(reported, progress.seen, failed),
        cache=cache,
        events=events,
        checkup=checkup,
        ratios=ratios,
        recalls=progress.recalls,
        spent=request.replies.spent if request is not None and request.replies is not None else Spent(),
        refusal=progress.refusal,
        answers=listened(runtime, progress) if tokens is not None else (),
    )


def listened(runtime: Runtime, progress: ExchangeProgress) -> tuple[bytes, ...]:
    """The chain's hashes after each answer that was given, where they tell the conversation from others."""
    recognized = progress.plan.recognized
    if progress.listener is None or recognized is None or not recognized.listens:
        return ()
    answers = [digest_of(message) for message in progress.listener.messages()]
    return runtime.planner.conversations.answered(recognized.thread, recognized.transcript, answers)


def _check_up(
    runtime: Runtime, progress: ExchangeProgress, tokens: TokenUsage | None, *, at: float
) -> tuple[Checkup | None, tuple[float, ...]]:
    plan, settings, recognized, nothing = progress.plan, progress.settings, progress.plan.recognized, (None, ())
    if tokens is None or settings is None or recognized is None or not settings.health.enabled:
        return nothing
    health, rules, thread = runtime.health, settings.health, recognized.thread
    if not health.is_news(plan.decision, recognized):
        return nothing
    try:
        length = recognized.length
        run = follow_calls(recognized.transcript, health.run_of(thread), length=length, most=rules.loop)
        sample = sample_of(
            plan.decision,
            recognized,
            settings,
            limits=runtime.planner.limits_of(settings, recognized.limits.budget),
            used=tokens.after,
            pressure=tokens.pressure,
            evicted=evictions_alone(plan),
            repeats=run.longest,
            at=at,
        )
        return health.see(thread, sample, rules, run=run), sample.ratios
    except Exception:  # what is watched must not suffer from being watched
        log.exception("the health of a conversation could not be told")
        return nothing


def _cache_use(progress: ExchangeProgress, *, at: float) -> CacheUse | None:
    plan, attempts = progress.plan, progress.attempts
    if plan.recognized is None or progress.chat is None or attempts is None or attempts.span is None:
        return None
    return follow(
        plan,
        plan.recognized,
        progress.chat,
        progress.billed(),
        ttl=progress.policy.cache_ttl,
        at=at,
        carried_out=not progress.observed,
        ok=progress.status is not None and progress.status < 400,
    )


def _events(runtime: Runtime, progress: ExchangeProgress, ending: Ending | None) -> tuple[Event, ...]:
    plan = progress.plan
    events = plan.decision.events if plan.decision is not None else ()
    if ending is Ending.RESERVE_EXHAUSTED:
        events = (_exhausted(progress, ending), *events)
    drift = None if plan.limits is None else runtime.windows.take_drift(plan.limits.counted)
    if drift is None:
        return events
    facts = {"estimated": drift.predicted, "reported": drift.reported, "ratio": round(drift.ratio, 3)}
    log.warning("%s counted %d tokens where %d were predicted", progress.model[:200], drift.reported, drift.predicted)
    return (Event("estimate_drift", facts), *events)


def _exhausted(progress: ExchangeProgress, ending: Ending) -> Event:
    """The window left the answer less than the client asked for: by how much, in tokens, as far as it is known."""
    usage, limits = progress.reported(), progress.plan.limits
    found = {
        "reason": progress.seen.finish_reasons[-1],
        "limit": limits.budget.window if limits is not None else None,
        "tokens": usage.prompt,
        "count": usage.completion,
        "asked": progress.chat.max_tokens if progress.chat is not None else None,
    }
    return Event(ending, {name: value for name, value in found.items() if value is not None})
