"""All that happened in an exchange, once it has ended.

Four sinks read the record (:mod:`proxy.exchange.sinks`): the trace, the metrics, the log line and
the row. An observed request is forwarded as it came: headers, metrics and log say what was sent,
trace and row what would have been.
"""

import logging
from collections.abc import Sequence

import msgspec

from policies.health import Checkup
from policies.ledger import DROPPING, Decision, Event, TokenUsage
from policies.settings import CACHE_TTL, ContextSettings
from proxy.effects.perform import NOTHING_SPENT, Spent
from proxy.exchange.exchange import Exchange
from proxy.features.cache_use import CacheUse, cache_use_of
from proxy.planning.values import CUT, Plan
from proxy.runtime import Runtime
from proxy.tap import ReportedUsage, together
from proxy.telemetry.metrics import ModelCall
from proxy.telemetry.trace import Span
from proxy.upstream.overflow import Ending


def evictions_alone(plan: Plan) -> int:
    """How many evictions a plan has, without those that a summary covers: a compaction is no
    sign of too small a window.
    """
    return len([row for row in plan.evictions if row.kind != CUT or row.layer in DROPPING])


log = logging.getLogger("weir.settlement")


class ExchangeRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One exchange that has ended, and what follows from that; complete when it exists.

    Attributes:
        at: when it ended, seconds since the epoch, after ``duration`` seconds.
        policy: the exchange's, else the default one.
        carried_out: what was decided and done.
        tokens: what was sent, ``actions`` what was done.
        reported: the usage of the last round, ``billed`` that of all of them together.
    """

    exchange: Exchange
    at: float
    duration: float
    label: str
    policy: ContextSettings
    carried_out: Decision | None
    attempt: Span | None
    overflows: int
    spent: Spent
    tokens: TokenUsage | None
    actions: str
    ending: Ending | None
    reported: ReportedUsage
    billed: ReportedUsage | None
    call: ModelCall | None
    cache: CacheUse | None
    events: tuple[Event, ...]
    checkup: Checkup | None


def record_of(exchange: Exchange, runtime: Runtime, *, ended: float) -> ExchangeRecord:
    at = runtime.planner.clock()
    tokens = exchange.tokens()
    attempts = exchange.attempts
    label = exchange.label
    policy = exchange.policy
    ending = exchange.ending()
    reported = exchange.reported()
    billed = exchange.billed()
    failure = "" if label == "ok" else label
    return ExchangeRecord(
        exchange=exchange,
        at=at,
        duration=ended - exchange.started,
        label=label,
        policy=policy,
        carried_out=None if exchange.observed else exchange.plan.decision,
        attempt=None if attempts is None else attempts.span,
        overflows=0 if attempts is None else attempts.overflows,
        spent=_spent(exchange),
        tokens=tokens,
        actions=exchange.actions(),
        ending=ending,
        reported=reported,
        billed=together(billed) if billed else None,
        call=None if attempts is None else attempts.end_call(reported, exchange.seen, failure),
        cache=_cache_use(exchange, billed, ttl=CACHE_TTL, at=at),
        events=_events(runtime, exchange, ending),
        checkup=_check_up(runtime, exchange, tokens, at=at),
    )


def _spent(exchange: Exchange) -> Spent:
    request = exchange.request
    if request is None or request.replies is None:
        return NOTHING_SPENT
    return request.replies.spent


def _check_up(
    runtime: Runtime, exchange: Exchange, tokens: TokenUsage | None, *, at: float
) -> Checkup | None:
    plan = exchange.plan
    settings = exchange.settings
    recognized = exchange.plan.recognized
    if tokens is None or settings is None or recognized is None or not settings.health.enabled:
        return None
    evicted = evictions_alone(plan) if plan.evictions else 0
    try:
        return runtime.health.check_up(
            plan,
            recognized,
            settings,
            used=tokens.after,
            pressure=tokens.pressure,
            evicted=evicted,
            at=at,
        )
    except Exception:  # a failing observer must not affect the request
        log.exception("the health of a conversation could not be read")
        return None


def _cache_use(
    exchange: Exchange, took: Sequence[ReportedUsage], *, ttl: float, at: float
) -> CacheUse | None:
    plan = exchange.plan
    attempts = exchange.attempts
    if (
        plan.recognized is None
        or exchange.chat is None
        or attempts is None
        or attempts.span is None
    ):
        return None
    return cache_use_of(
        plan,
        plan.recognized,
        exchange.chat,
        took,
        ttl=ttl,
        at=at,
        carried_out=not exchange.observed,
        ok=exchange.status is not None and exchange.status < 400,
    )


def _events(runtime: Runtime, exchange: Exchange, ending: Ending | None) -> tuple[Event, ...]:
    plan = exchange.plan
    events = plan.decision.events if plan.decision is not None else ()
    if ending is Ending.RESERVE_EXHAUSTED:
        events = (_exhausted(exchange, ending), *events)
    drift = (
        None
        if plan.recognized is None
        else runtime.limits_resolver.take_drift(plan.recognized.limits.counted)
    )
    if drift is None:
        return events
    facts = {
        "estimated": drift.predicted,
        "reported": drift.reported,
        "ratio": round(drift.ratio, 3),
    }
    log.warning(
        "%s counted %d tokens where %d were predicted",
        exchange.model[:200],
        drift.reported,
        drift.predicted,
    )
    return (Event("estimate_drift", facts), *events)


def _exhausted(exchange: Exchange, ending: Ending) -> Event:
    usage = exchange.reported()
    recognized = exchange.plan.recognized
    found = {
        "reason": exchange.seen.finish_reasons[-1],
        "limit": recognized.limits.budget.window if recognized is not None else None,
        "tokens": usage.prompt,
        "count": usage.completion,
        "asked": exchange.chat.max_tokens if exchange.chat is not None else None,
    }
    return Event(ending, {name: value for name, value in found.items() if value is not None})
