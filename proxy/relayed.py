"""What is remembered of a request that was relayed and not recognised: one row, and what it took in the metrics."""

from policies import ContextSettings
from proxy.access.caller import Caller
from proxy.caching import cost_of, prices_of
from proxy.metering import TENANT_SHOWN
from proxy.runtime import Runtime
from proxy.store.records import RelayedRow
from proxy.tap import Usage

NO_POLICY = "none"


def settle_relayed(
    runtime: Runtime,
    caller: Caller,
    *,
    request: str,
    model: str,
    status: int,
    outcome: str,
    usage: Usage | None,
    policy: str = NO_POLICY,
) -> None:
    """Have a request of a key counted with what its answer says that it used, at list prices where there are any."""
    used = usage or Usage()
    settings = ContextSettings()
    prices = prices_of(model, runtime.registry.facts(model, settings=settings)) if usage is not None and model else None
    cost = None if prices is None or usage is None else cost_of(prices, usage)
    metrics, key = runtime.telemetry.metrics, caller.name or ""
    if usage is not None:
        metrics.burned(
            tenant=caller.tenant[:TENANT_SHOWN],
            key=key,
            forwarded=used.prompt or 0,
            saved=0,
            cached=used.cached,
            answered=used.completion,
        )
    if cost is not None:
        metrics.cost(forwarded=cost, unmanaged=cost, tenant=caller.tenant[:TENANT_SHOWN], key=key)
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
