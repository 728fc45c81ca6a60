"""What is learned from the upstream's answers: what fits, and how it counts."""

import logging

from proxy.exchange.exchange import Exchange
from proxy.models.limits import COUNTED_IN, TOKENS, ModelLimitsResolver, cut_at, stays_cut
from proxy.planning.loads import SIZES, Scales
from proxy.planning.values import Plan, PlanRequest, Recognized
from proxy.runtime import Runtime
from proxy.tap import ReportedUsage
from proxy.upstream.overflow import Kind, Verdict, plausible_limit
from proxy.wire.codec import ClientRequest
from proxy.wire.transcripts import Transcripts

CUT_IN_SILENCE = (
    "%s reads %d tokens of a request of %d, and said nothing: a window of %d is taken for its own; "
    "set num_ctx (Ollama) or what the server calls it, or state the window under models"
)
log = logging.getLogger("weir.windows")


def learn_from_exchange(runtime: Runtime, exchange: Exchange) -> None:
    """Learn from the first answer of an exchange, as far as the upstream has reported its usage."""
    plan_request = exchange.plan_request
    attempts = exchange.attempts
    if plan_request is None or attempts is None:
        return
    accepted = exchange.status is not None and exchange.status < 400
    planner = runtime.planner
    plan = exchange.plan
    if accepted:
        learn_loads_passed(runtime.limits_resolver, planner.scales, plan, plan_request.request)
    usage = attempts.rounds[0] if attempts.rounds else exchange.seen.usage
    if usage is not None and learn_from_answer(
        runtime.limits_resolver,
        planner.transcripts,
        plan,
        plan_request,
        usage=usage,
        accepted=accepted,
    ):
        attempts.overflows += 1


def learn_from_error(
    limits_resolver: ModelLimitsResolver, verdict: Verdict, plan: Plan
) -> int | None:
    """Learn from an overflow; the window that it named where that holds for this request only,
    tokens.
    """
    recognized = plan.recognized
    if recognized is None:
        return None
    known = recognized.limits
    is_counted = not (recognized.has_media or recognized.sampled)
    if verdict.kind is Kind.COMPLETION:
        limits_resolver.know(known.scope, COUNTED_IN)
    limit = plausible_limit(verdict)
    doubted = None
    is_within = limit == known.budget.window and not limits_resolver.knows(known.scope, TOKENS)
    if limit is not None:  # a repeat that was planned within it is not another that names it
        doubted = limit if is_within or not limits_resolver.learn(known.scope, limit) else None
    elif verdict.prompt is not None or is_counted:
        limits_resolver.refused(known.scope, verdict.prompt or known.budget.estimate(plan.sent))
    if verdict.prompt is not None and not verdict.at_least and is_counted:
        limits_resolver.calibrate(known.counted, estimated=plan.sent, reported=verdict.prompt)
    return doubted


def learn_load(
    limits_resolver: ModelLimitsResolver,
    scales: Scales,
    verdict: Verdict,
    plan: Plan,
    request: ClientRequest,
) -> None:
    """Learn what an upstream limits other than tokens, from its refusal of a request."""
    recognized = plan.recognized
    if recognized is None:
        return
    scope = recognized.limits.scope
    kind = verdict.kind.value
    if verdict.limit is not None:
        limits_resolver.learn(scope, verdict.limit, kind)
    else:
        limits_resolver.refused(scope, load_of(kind, scales, plan, request), kind)


def load_of(kind: str, scales: Scales, plan: Plan, request: ClientRequest) -> int:
    """How much of a kind went up."""
    if kind == "bytes" or plan.recognized is None:
        return len(plan.body)
    pieces = None if plan.decision is None else plan.decision.pieces
    return scales.amount(kind, request, plan.recognized.transcript, pieces)


def learn_loads_passed(
    limits_resolver: ModelLimitsResolver, scales: Scales, plan: Plan, request: ClientRequest
) -> None:
    """Note what an upstream has taken of each kind of which it is known to take only so much."""
    if plan.recognized is None:
        return
    for kind in plan.recognized.limits.most:
        if kind not in SIZES:
            amount = load_of(kind, scales, plan, request)
            limits_resolver.limits.passed(plan.recognized.limits.scope, amount, kind=kind)


def learn_from_answer(
    limits_resolver: ModelLimitsResolver,
    transcripts: Transcripts,
    plan: Plan,
    plan_request: PlanRequest,
    *,
    usage: ReportedUsage,
    accepted: bool,
) -> bool:
    """Learn from what the upstream says that the forwarded request took; whether it has read only a
    part of it.
    """
    recognized = plan.recognized
    prompt = usage.prompt
    if recognized is None or prompt is None:
        return False
    known = recognized.limits
    has_media = recognized.has_media
    is_counted = not (has_media or recognized.sampled)
    if accepted and is_counted and limits_resolver.is_too_little(known, plan.sent, prompt):
        if bytes(plan_request.request.fields.get("truncation", b"")) == b'"auto"':
            limits_resolver.refused(known.scope, known.budget.estimate(plan.sent))
            return True
        new = _new_tokens(plan, recognized, usage)
        window = None if new is None else cut_at(prompt, new=new)
        if window is not None and not stays_cut(recognized.thread, prompt, plan.sent, window):
            return False
        if window is not None:
            log.warning(
                CUT_IN_SILENCE,
                plan_request.request.model[:200],
                prompt,
                known.budget.estimate(plan.sent),
                window,
            )
            limits_resolver.learn_cut(known.scope, window, counted=known.counted)
            return True
    recognized.thread.still = None
    if accepted:
        limits_resolver.limits.passed(known.scope, prompt)
    if is_counted:
        limits_resolver.calibrate(known.counted, estimated=plan.sent, reported=prompt)
    elif has_media and plan.body is plan_request.request.body:
        beyond = prompt - known.budget.estimate(plan.sent)
        transcripts.learn_files(plan_request.request, tenant=plan_request.tenant, tokens=beyond)
    return False


def _new_tokens(plan: Plan, recognized: Recognized, usage: ReportedUsage) -> int | None:
    """What of a request the upstream's cache cannot hold, None where its usage shows no cut.

    A server that counts only what its cache did not give reports about so much, one that reads from
    a cache says so.
    """
    if plan.decision is None or plan.decision.is_new or usage.cached or not recognized.length:
        return None
    transcript = recognized.transcript
    known = len(transcript.messages) - len(transcript.chain) + recognized.length
    return sum(message.tokens for message in transcript.messages[known:])
