"""A request planned: which conversation it belongs to, and what is sent of it.

An upstream may refuse the plan for its size or its reasoning; then a smaller plan is made here.
"""

from dataclasses import replace
from typing import TypedDict

import msgspec

from policies.ledger import LayerReport
from policies.limits import Limits, layers_of, limit_for
from proxy.errors import ContextLengthExceeded
from proxy.exchange.exchange import Exchange, Request, evicted_count
from proxy.exchange.learn import learn_load
from proxy.exchange.reserve import reserve
from proxy.features.compaction import natively
from proxy.features.feature import Overflow
from proxy.models.limits import BINDING
from proxy.planning.values import Plan, PlanRequest
from proxy.runtime import Runtime
from proxy.telemetry.trace import Span
from proxy.upstream.overflow import Kind, Verdict


async def plan_request(runtime: Runtime, exchange: Exchange, request: Request) -> Plan:
    """The plan of a request. Raises ContextLengthExceeded where the policy refuses it."""
    plan_request = request.plan_request
    exchange.plan = Plan(body=request.chat.body)
    if plan_request is None:
        exchange.identify()
        await reserve(runtime, exchange, request, None)
        return exchange.plan
    if exchange.trace.recorded:
        with exchange.trace.plan() as plan_request.span:
            plan = await _planned(runtime, exchange, request, plan_request)
            note_plan(plan_request.span, plan)
    else:
        plan = await _planned(runtime, exchange, request, plan_request)
    if runtime.features.on_planned or runtime.features.on_overflow:
        _emit_planned(runtime, exchange, plan)
    return plan


async def _planned(
    runtime: Runtime, exchange: Exchange, request: Request, plan_request: PlanRequest
) -> Plan:
    planner = runtime.planner
    recognized = await planner.recognize(plan_request)
    if recognized is not None:
        exchange.plan = Plan(
            body=request.chat.body, recognized=recognized, degraded=recognized.degraded
        )
    exchange.identify()
    await reserve(runtime, exchange, request, recognized)
    try:
        plan = await planner.first(plan_request, recognized)
        if request.client is not plan_request.request:
            plan = await request.held.followed(planner, plan_request, request.client, plan)
        if plan_request.settings.observes:
            plan = natively(plan_request, request.client, request.destination.upstream, plan)
        exchange.plan = plan
    except ContextLengthExceeded:
        exchange.emit(runtime.features.on_overflow, Overflow(source="planned"))
        raise
    return plan


def _emit_planned(runtime: Runtime, exchange: Exchange, plan: Plan) -> None:
    features = runtime.features
    exchange.emit(features.on_planned, plan)
    recognized = plan.recognized
    if recognized is None:
        return
    tokens = recognized.transcript.tokens
    if plan.decision is not None:
        tokens = plan.decision.raw_after
    budget = recognized.limits.budget
    if not budget.fits(tokens):
        used = budget.estimate(tokens)
        overflow = Overflow(source="planned", tokens=used, limit=budget.usable)
        exchange.emit(features.on_overflow, overflow)


async def plan_smaller(
    runtime: Runtime,
    exchange: Exchange,
    request: Request,
    plan_request: PlanRequest,
    plan: Plan,
    *,
    attempt: int,
    window: int | None,
) -> Plan | None:
    """A plan with a harder target after an overflow; None where nothing more can be removed.

    ``window`` is the one that the overflow named where it holds for this request only, tokens.
    """
    with exchange.trace.plan() as plan_request.span:
        smaller = await runtime.planner.harder(plan_request, plan, attempt=attempt, window=window)
        if smaller is None:
            return None
        note_plan(plan_request.span, smaller)
        return msgspec.structs.replace(smaller, restarted=bool(request.held.chain))


async def plan_lighter(
    runtime: Runtime, exchange: Exchange, request: Request, plan: Plan, verdict: Verdict
) -> Plan | None:
    """A plan within what the upstream takes besides tokens; None where Weir may not change it."""
    plan_request = request.plan_request
    if plan_request is None or plan_request.settings.observes:
        return None
    planner = runtime.planner
    learn_load(runtime.limits_resolver, planner.scales, verdict, plan, plan_request.request)
    with exchange.trace.plan() as plan_request.span:
        lighter = await planner.lighter(plan_request, plan)
        if lighter is None:
            return None
        note_plan(plan_request.span, lighter)
        return msgspec.structs.replace(lighter, restarted=bool(request.held.chain))


async def plan_without_reasoning(
    runtime: Runtime, request: Request, plan: Plan, verdict: Verdict
) -> Plan | None:
    """The plan without any reasoning, after the upstream refused it for its place.

    A model that refuses it after what it was not signed for is known from now on to do so. Else the
    client has changed it, or the rounds that it belonged to are lost. None where that was tried, or
    Weir may not do it.
    """
    plan_request = request.plan_request
    recognized = plan.recognized
    if (
        plan_request is None
        or recognized is None
        or plan_request.unbinds
        or plan_request.settings.observes
    ):
        return None
    plan_request.unbinds = True
    if verdict.kind is Kind.CHANGED and plan_request.drops_unbound:
        return None  # a loop has to begin with its thinking
    if verdict.kind is Kind.BINDING:
        runtime.limits_resolver.know(recognized.limits.scope, BINDING)
    transcript = replace(recognized.transcript, binds=not plan_request.drops_unbound)
    recognized = msgspec.structs.replace(recognized, transcript=transcript)
    return await runtime.planner.first(plan_request, recognized)


def note_plan(span: Span, plan: Plan) -> None:
    """Set on a span what each layer did, and what was decided."""
    decision = plan.decision
    recognized = plan.recognized
    if not span.recorded or decision is None or recognized is None:
        return
    tokens = recognized.limits.budget.estimate
    for report in decision.trail:
        span.layer(
            report.layer,
            before=tokens(report.before),
            after=tokens(report.after),
            units=report.units if report.kept else 0,
            ref=report.ref,
            reason=report.reason,
            rung=report.rung,
            **_due(report, recognized.policy_limits),
        )
    span.decide(
        decision.action.value,
        decision.usage,
        base=recognized.policy_limits.base,
        reading=decision.reading,
        stage=decision.stage,
        strategy=decision.strategy,
        evicted=evicted_count(plan),
    )


class _Due(TypedDict):
    trigger: int | None
    scorer: str | None


def _due(report: LayerReport, limits: Limits) -> _Due:
    """From how many tokens on the policy's layer of a report is due, and by what rule it
    chooses.
    """
    own = (
        each
        for each in layers_of(limits.settings)
        if (each.strategy, each.scope) == (report.layer, report.scope)
    )
    layer = None if report.rung else next(own, None)
    if layer is None:
        return {"trigger": None, "scorer": None}
    scorer = layer.params.get("scorer")
    most = max(0, limit_for(layer, limits.settings, limits.budget))
    return {
        "trigger": limits.budget.estimate(most),
        "scorer": scorer if isinstance(scorer, str) else None,
    }
