"""What a request may take is reserved before anything is spent on it, of its key's and its team's
budgets and rates.
"""

from proxy.access.budgets import BYTES_A_TOKEN
from proxy.exchange.exchange import Exchange, Request
from proxy.models.facts import cost_of, prices_of
from proxy.planning.values import Recognized
from proxy.runtime import Runtime
from proxy.tap import ReportedUsage


async def reserve(
    runtime: Runtime, exchange: Exchange, request: Request, recognized: Recognized | None
) -> None:
    """Reserve what a request may take, once; its row settles it.

    Raises BudgetExceeded or RateLimited where there is not enough left.
    """
    caller = request.destination.caller
    if exchange.reserved or exchange.stay is None or not caller.is_counted:
        return
    took, dollars = _estimate(runtime, request, recognized)
    tokens = (took.prompt or 0) + (took.completion or 0)
    exchange.reserved = True
    await runtime.admission.take_tokens(exchange.stay, caller, tokens)
    if not caller.has_budget:
        return
    if dollars is None and caller.counts_dollars:
        exchange.degraded.append("price")
    exchange.budget, refusal = await runtime.budgets.reserve(
        caller, exchange.id, tokens=tokens, dollars=dollars or 0.0
    )
    if refusal is not None:
        raise refusal
    if exchange.budget is None:
        exchange.degraded.append("budget")


def _estimate(
    runtime: Runtime, request: Request, recognized: Recognized | None
) -> tuple[ReportedUsage, float | None]:
    """The tokens that a request may take, and their list price in US dollars, None without one."""
    chat = request.chat
    if recognized is None:
        facts = runtime.registry.facts(chat.model, settings=runtime.config.policy())
        prompt = len(request.client.body) // BYTES_A_TOKEN
        prompt = min(prompt, facts.window or prompt)
        answer = chat.max_tokens or runtime.config.policy().reserve_floor
    else:
        facts = recognized.limits.facts
        budget = recognized.limits.budget
        prompt = min(budget.estimate(recognized.transcript.tokens), budget.window)
        answer = chat.max_tokens or budget.reserve
    took = ReportedUsage(prompt=prompt, completion=answer)
    prices = prices_of(chat.model, facts)
    return took, None if prices is None else cost_of(prices, took)
