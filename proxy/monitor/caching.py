"""What the provider's prompt cache made of a request: warm or cold, by whose doing its prefix changed, what it cost.

Costs are list prices in US dollars, of the prompt and the answer::

    cost        prompt tokens that were not cached + .1 for cached ones (Anthropic's and OpenAI's price) + the answer
    cost_saved  the same for the client's own array, less cost; negative where a batch made the cache forget

The client's own array would have been read from the cache in the share that was reported; on a request whose prefix
Weir has just changed, in the share of the request before, because the array as the client sent it did not change.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import msgspec
import xxhash

from policies.ledger import EditKind
from policies.messages import count_occurrences
from policies.quality.advise import GEMINI_CLIFF, OPENAI_CLIFF, PROVIDERS, Cliff, TokenPrices
from policies.tokens import bare_name
from proxy.conversation.thread import Prefix
from proxy.models.facts import ModelFacts
from proxy.planning.values import CUT, Plan, Recognized
from proxy.tap import ReportedUsage
from proxy.wire.codec import ClientRequest

DEFAULT_PRICES = "anthropic"
CLIFFS: tuple[tuple[str, Cliff], ...] = (
    ("gpt-5.4", OPENAI_CLIFF),
    ("gpt-5.5", OPENAI_CLIFF),
    ("gpt-5.6", OPENAI_CLIFF),
    ("gemini-", GEMINI_CLIFF),
)
MINIMUM = 1_024
MILLION = 1_000_000


class BadPrices(ValueError): ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceList:
    prices: TokenPrices
    dollars: bool
    source: str

    def shown(self, cost: float) -> str:
        if not self.dollars:
            return f"{cost / 1000:,.1f}k"
        return f"${cost:,.2f}" if cost >= 1 else f"${cost:.4f}"


def price_list(stated: str | None, *, model: str, facts: ModelFacts) -> PriceList:
    """What was ``stated`` (a provider's name, or input,read,write,output), else the model's prices, else a default.

    Raises BadPrices for a statement that is neither.
    """
    if stated is not None:
        return _stated(stated)
    if facts.input_price is None:
        return PriceList(prices=PROVIDERS[DEFAULT_PRICES], dollars=False, source=f"the ratios of {DEFAULT_PRICES}")
    name = bare_name(model)
    prices = TokenPrices(
        facts.input_price,
        facts.cache_read_price if facts.cache_read_price is not None else facts.input_price,
        facts.cache_write_price if facts.cache_write_price is not None else facts.input_price,
        facts.output_price or 0.0,
        minimum=0 if facts.cache_read_price is None else MINIMUM,
        cliff=next((cliff for prefix, cliff in CLIFFS if name.startswith(prefix)), None),
    )
    return PriceList(prices=prices, dollars=True, source=f"the price list for {model}")


def _stated(stated: str) -> PriceList:
    if stated in PROVIDERS:
        return PriceList(prices=PROVIDERS[stated], dollars=False, source=f"the ratios of {stated}")
    try:
        numbers = [float(part) / MILLION for part in stated.split(",")]
    except ValueError:
        numbers = []
    if len(numbers) != 4 or not all(0 <= number < 1 for number in numbers):
        known = ", ".join(PROVIDERS)
        raise BadPrices(f"{stated} is neither one of {known} nor four dollar prices: input,read,write,output")
    plain, read, write, answer = numbers
    return PriceList(prices=TokenPrices(plain, read, write, answer, minimum=MINIMUM), dollars=True, source=stated)


Cause = Literal["none", "client", "proxy"]
CACHED_PRICE = 0.1
DIGITS = {"hit_ratio": 4, "cost": 9, "cost_saved": 9}
NO_HASH = b""
WHOLE = frozenset({CUT, str(EditKind.PRUNE_TOOLS)})
"""Kinds of what a batch did that changes the beginning of every request: a summary or a note, and the tools."""


class CacheUse(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    omit_defaults=True,
    rename={"is_cold": "cold", "changed": "prefix_changed"},
):
    """One request as the provider's cache saw it.

    ``hit_ratio`` is None where the upstream did not say. ``is_cold``: the conversation rested for longer than
    ``cache_ttl``. ``changed``: who made it begin in another way than the request before. Costs are US dollars, None
    without reported usage or a price.
    """

    hit_ratio: float | None = None
    is_cold: bool = False
    changed: Cause = "none"
    cost: float | None = None
    cost_saved: float | None = None

    def facts(self) -> dict[str, object]:
        said = msgspec.to_builtins(self)
        return {name: round(value, DIGITS[name]) if name in DIGITS else value for name, value in said.items()}


def shown(detail: Mapping[str, object]) -> dict[str, object]:
    return {each.encode_name: detail.get(each.encode_name, each.default) for each in msgspec.structs.fields(CacheUse)}


def follow(
    plan: Plan,
    recognized: Recognized,
    request: ClientRequest,
    usage: ReportedUsage | None,
    *,
    ttl: float,
    at: float,
    carried_out: bool,
    ok: bool,
) -> CacheUse:
    """What the cache made of a request, which the next one of the conversation will be compared with.

    ``ttl`` is seconds, ``at`` when the request was settled; ``carried_out``: the plan is what went up; ``ok``: the
    upstream accepted it.
    """
    thread = recognized.thread
    before, now = thread.prefix, _prefix(plan, recognized, request, usage)
    touched = carried_out and _touches_what_was_sent(plan, recognized)
    changed = _cause(recognized, before, now, touched=touched)
    if ok:
        thread.prefix = now
    elif before is not None and changed == "proxy":
        thread.prefix = before._replace(is_stale=True)
    is_cold = _is_cold(plan, recognized, ttl=ttl, at=at)
    prices = prices_of(request.model, recognized.limits.facts)
    if usage is None or prices is None:
        return CacheUse(hit_ratio=now.hit_ratio, is_cold=is_cold, changed=changed)
    cost, decision = cost_of(prices, usage), plan.decision
    removed = max(0, decision.before - decision.after) if carried_out and decision is not None else 0
    share = now.hit_ratio or 0.0
    if before is not None and before.hit_ratio is not None and changed == "proxy" and not is_cold:
        share = max(share, before.hit_ratio)
    return CacheUse(
        hit_ratio=now.hit_ratio,
        is_cold=is_cold,
        changed=changed,
        cost=cost,
        cost_saved=_cost_unmanaged(prices, usage, removed=removed, share=share) - cost if removed else 0.0,
    )


def _prefix(plan: Plan, recognized: Recognized, request: ClientRequest, usage: ReportedUsage | None) -> Prefix:
    transcript, fields, names = recognized.transcript, request.fields, request.codec.counted
    chain = transcript.chain
    return Prefix(
        head=b"".join([m.digest for m in transcript.messages[: transcript.head]]),
        tools=b"".join([xxhash.xxh3_64_digest(fields[name]) for name in names if name in fields]),
        end=chain[-1] if chain else NO_HASH,
        length=len(chain),
        pruned=plan.decision.pruned if plan.decision is not None else (),
        hit_ratio=hit_ratio(usage),
    )


def hit_ratio(usage: ReportedUsage | None) -> float | None:
    if usage is None or usage.cached is None or not usage.prompt or usage.prompt < 0:
        return None
    return min(1.0, max(0, usage.cached) / usage.prompt)


def _cause(recognized: Recognized, before: Prefix | None, now: Prefix, *, touched: bool) -> Cause:
    if touched or (before is not None and before.is_stale):
        return "proxy"
    if before is None:
        return "none"
    if (now.head, now.tools, now.pruned) != (before.head, before.tools, before.pruned):
        return "client"  # Weir has left out nothing new: a tool that comes back was asked for by name
    return "none" if _goes_on(recognized, before) else "client"


def _goes_on(recognized: Recognized, before: Prefix) -> bool:
    chain = recognized.transcript.chain
    if len(chain) < before.length:
        return recognized.length == len(chain)
    return before.length == 0 or chain[before.length - 1] == before.end


def _touches_what_was_sent(plan: Plan, recognized: Recognized) -> bool:
    decision, transcript = plan.decision, recognized.transcript
    if not recognized.length:
        return False
    sent = transcript.head + recognized.length
    if decision is not None and decision.removed and decision.removed[0] < sent:
        return True
    if not plan.evictions:
        return False
    messages = transcript.messages[:sent]
    places = {(m.digest, nth) for m, nth in zip(messages, count_occurrences(messages), strict=True)}
    return any(row.kind in WHOLE or (row.digest, row.occurrence) in places for row in plan.evictions)


def _is_cold(plan: Plan, recognized: Recognized, *, ttl: float, at: float) -> bool:
    last = recognized.trend.at
    mine = plan.decision.trend.at if plan.decision is not None else None
    return last is not None and (at if mine is None else mine) - last > ttl


@lru_cache(maxsize=1024)
def prices_of(model: str, facts: ModelFacts) -> TokenPrices | None:
    """US dollars a token; a cached one is a tenth where nobody says."""
    if facts.input_price is None:
        return None
    listed = price_list(None, model=model, facts=facts).prices
    read = facts.cache_read_price if facts.cache_read_price is not None else CACHED_PRICE * facts.input_price
    return TokenPrices(listed.input, read, listed.cache_write, listed.output, cliff=listed.cliff)


def cost_of(prices: TokenPrices, usage: ReportedUsage) -> float:
    prompt, cached, written = usage.prompt or 0, usage.cached or 0, usage.written or 0
    plain = max(0, prompt - cached - written)
    read = prices.input * plain + prices.cache_read * cached + prices.cache_write * written
    return _tiered(prices, prompt, read, usage.completion or 0)


def _cost_unmanaged(prices: TokenPrices, usage: ReportedUsage, *, removed: int, share: float) -> float:
    prompt = (usage.prompt or 0) + removed
    read = prompt * (prices.input * (1 - share) + prices.cache_read * share)
    return _tiered(prices, prompt, read, usage.completion or 0)


def _tiered(prices: TokenPrices, prompt: int, read: float, answer: int) -> float:
    cliff = prices.cliff
    if cliff is None or prompt <= cliff.above:
        return read + prices.output * answer
    return read * cliff.input + prices.output * answer * cliff.output
