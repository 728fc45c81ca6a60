"""What a request may take is reserved before anything is spent on it, of its key's and its team's
budgets and rates.
"""

import math

from policies.settings import ContextSettings
from proxy.access.budgets import BYTES_A_TOKEN
from proxy.exchange.exchange import Exchange, Request
from proxy.models.facts import cost_of, prices_of
from proxy.planning.values import Recognized
from proxy.runtime import Runtime
from proxy.tap import ReportedUsage
from proxy.wire.codec import ClientRequest
from proxy.wire.raw import read_value

MAX_CHOICES = 128
CAUTION = 1.25
"""The factor by which an upstream may count more tokens of a prompt than Weir does."""


async def reserve(
    runtime: Runtime, exchange: Exchange, request: Request, recognized: Recognized | None
) -> None:
    """Reserve what a request may take, once; its row settles it.

    Raises BudgetExceeded or RateLimited where there is not enough left.
    """
    caller = request.destination.caller
    if exchange.reserved or exchange.slot is None or not caller.is_counted:
        return
    took, dollars = _estimate(runtime, request, recognized, exchange.policy)
    tokens = (took.prompt or 0) + (took.completion or 0)
    exchange.reserved = True
    exchange.assumed = took.prompt
    await runtime.admission.take_tokens(exchange.slot, caller, tokens)
    if not caller.has_budget:
        return
    if dollars is None and caller.counts_dollars:
        exchange.degraded.append("price")
    exchange.budget, refusal = await runtime.budgets.reserve(
        caller, exchange.id, tokens=_cautious(took), dollars=dollars or 0.0
    )
    if refusal is not None:
        raise refusal
    if exchange.budget is None:
        exchange.degraded.append("budget")


def _cautious(took: ReportedUsage) -> int:
    return math.ceil(CAUTION * (took.prompt or 0)) + (took.completion or 0)


def _choices(chat: ClientRequest) -> int:
    """How many answers a chat completion asks for."""
    asked = read_value(chat.fields["n"]) if "n" in chat.fields else 1
    return asked if type(asked) is int and 1 <= asked <= MAX_CHOICES else 1


def _estimate(
    runtime: Runtime, request: Request, recognized: Recognized | None, settings: ContextSettings
) -> tuple[ReportedUsage, float | None]:
    """The tokens that a request may take, and what they may cost in US dollars, None without a
    price.
    """
    chat = request.chat
    fallback = ""
    if recognized is None:
        facts = runtime.registry.facts(chat.model, settings=settings)
        prompt = len(request.client.body) // BYTES_A_TOKEN
        prompt = min(prompt, facts.window or prompt)
        answer = chat.max_tokens or settings.reserve_floor
    else:
        facts = recognized.limits.facts
        budget = recognized.limits.budget
        prompt = budget.estimate(recognized.transcript.tokens)
        answer = chat.max_tokens or budget.reserve
        if settings.fallback is None:
            prompt = min(prompt, budget.window)
        elif not budget.fits(recognized.transcript.tokens):
            fallback = settings.fallback
    answer *= _choices(chat)
    cautious = ReportedUsage(prompt=math.ceil(CAUTION * prompt), completion=answer)
    prices = prices_of(chat.model, facts)
    own = None if prices is None else cost_of(prices, cautious)
    other = runtime.registry.list_price(fallback, cautious)
    costs = [cost for cost in (own, other) if cost is not None]
    return ReportedUsage(prompt=prompt, completion=answer), max(costs, default=None)
