"""A plan sent: attempts until there is an answer to relay.

An overflow plans again with a harder target, at most twice, before any byte went to the client.
"""

from policies.settings import ContextSettings
from proxy.errors import EndpointMissing
from proxy.exchange.attempts import Attempts
from proxy.exchange.exchange import Exchange, Request
from proxy.exchange.learn import learn_from_error
from proxy.exchange.plan import plan_lighter, plan_smaller, plan_without_reasoning
from proxy.exchange.recall import Recalling
from proxy.features.feature import Overflow
from proxy.planning.values import Plan
from proxy.runtime import Runtime
from proxy.stream import UpstreamResponse
from proxy.upstream.client import has_no_route
from proxy.upstream.overflow import MEASURED, NONE, Kind, Verdict

MAX_RETRIES = 2
NO_SUCH_ROUTE = frozenset({404, 405})
REFUSES_REASONING = frozenset({Kind.BINDING, Kind.CHANGED})


def attempts_for(runtime: Runtime, exchange: Exchange, request: Request) -> Attempts:
    """The attempts of one request; none is made yet."""
    settings: ContextSettings | None = None
    if request.plan_request is not None:
        settings = request.plan_request.settings
    exchange.attempts = Attempts(
        runtime.upstreams,
        runtime.limits_resolver,
        runtime.telemetry.metrics,
        request.chat,
        request.destination,
        exchange.headers,
        exchange.query,
        exchange.trace,
        settings,
    )
    return exchange.attempts


def recall_for(runtime: Runtime, request: Request, attempts: Attempts) -> Recalling | None:
    """The recall tool of one request, None where its policy has none."""
    plan_request = request.plan_request
    if plan_request is None or not plan_request.settings.recall.tool:
        return None
    return Recalling(plan_request, attempts, runtime.planner, runtime.without_tools)


async def send_plan(
    runtime: Runtime,
    exchange: Exchange,
    request: Request,
    plan: Plan,
    attempts: Attempts,
    recalling: Recalling | None,
) -> tuple[UpstreamResponse, bytes]:
    """The answer to relay, and the body that it answers.

    Sends again with less, at most twice, where the upstream says that it does not fit. Raises
    UpstreamUnreachable and other errors of the upstream's.
    """
    plan_request = request.plan_request
    make = (recalling or attempts).make
    plan = _carried(exchange, plan, recalling)
    body = attempts.within_window(plan)
    while True:
        received, verdict = await make(body, plan)
        if verdict is NONE:
            return received, body
        changed = await _changed(runtime, exchange, request, plan, attempts, verdict)
        if changed is not None:
            received.answer.close()
            attempts.retries += 1
            plan = _carried(exchange, changed, recalling)
            body = attempts.within_window(plan)
            continue
        if not verdict.is_overflow or plan_request is None:
            return received, body
        overflow = Overflow(source="upstream", tokens=verdict.prompt, limit=verdict.limit)
        exchange.emit(runtime.features.on_overflow, overflow)
        if plan_request.settings.observes:
            return received, body
        attempts.overflows += 1
        window = learn_from_error(runtime.limits_resolver, verdict, plan)
        attempt = attempts.retries + 1
        if attempt > MAX_RETRIES:
            return received, body
        shorter = attempts.clamped(body, verdict, plan, floor=True)
        if shorter is None:
            smaller = await plan_smaller(
                runtime, exchange, request, plan_request, plan, attempt=attempt, window=window
            )
            if smaller is not None:
                plan = _carried(exchange, smaller, recalling)
                shorter = plan.body
        if shorter is None:
            shorter = attempts.clamped(body, verdict, plan, floor=False)
        if shorter is None:
            return received, body
        body = shorter
        received.answer.close()
        attempts.retries += 1


def _carried(exchange: Exchange, plan: Plan, recalling: Recalling | None) -> Plan:
    exchange.plan = plan if recalling is None else recalling.consider(plan)
    return exchange.plan


async def _changed(
    runtime: Runtime,
    exchange: Exchange,
    request: Request,
    plan: Plan,
    attempts: Attempts,
    verdict: Verdict,
) -> Plan | None:
    """Another plan where the upstream refused this one for something else than its tokens."""
    if verdict.kind in REFUSES_REASONING:
        return await plan_without_reasoning(runtime, request, plan, verdict)
    if verdict.kind in MEASURED and attempts.retries < MAX_RETRIES:
        return await plan_lighter(runtime, exchange, request, plan, verdict)
    return None


def require_endpoint(runtime: Runtime, request: Request, received: UpstreamResponse) -> None:
    """Raises EndpointMissing where the upstream has nothing at the endpoint, and remembers that for
    a time.
    """
    upstream = request.destination.upstream
    codec = request.client.codec
    status = received.answer.status
    if status not in NO_SUCH_ROUTE:
        if status < 300:
            runtime.unsupported.pop((upstream.name, codec.path), None)
    elif codec.name in upstream.endpoints and has_no_route(
        status, received.body or b"", codec.path
    ):
        runtime.unsupported[upstream.name, codec.path] = None
        received.answer.close()
        raise EndpointMissing.of(upstream.name, f"POST /v1{codec.path}", status=status)
