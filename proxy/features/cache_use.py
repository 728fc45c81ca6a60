"""What the provider's cache made of each request, and what the request cost.

A cache is warm or cold, and the client or Weir changed the prefix. Costs are list prices in US
dollars, of the prompt and the answer::

    cost        prompt tokens that were not cached, + .1 for cached ones (Anthropic's and OpenAI's
                price), + the answer
    cost_saved  the same for the client's own array, less cost; negative where a batch made the
                cache forget

The client's own array would have been read from the cache in the share that was reported; on a
request whose prefix Weir has just changed, in the share of the request before, because the array as
the client sent it did not change.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec
import xxhash

from policies.ledger import EditKind
from policies.quality.prices import TokenPrices
from proxy.conversation.thread import Prefix
from proxy.models.facts import cost_of, prices_of, tiered
from proxy.planning.values import CUT, Plan, Recognized
from proxy.tap import ReportedUsage, together
from proxy.wire.codec import ClientRequest

Cause = Literal["none", "client", "proxy"]
DIGITS = {"hit_ratio": 4, "cost": 9, "cost_saved": 9}
WHOLE = frozenset({CUT, str(EditKind.PRUNE_TOOLS)})
"""Kinds of edits that change the beginning of every request: a summary or a note, and the tools.
"""


class CacheUse(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request as the provider's cache saw it.

    ``hit_ratio`` is None where the upstream did not say. ``cold``: the conversation rested for
    longer than ``cache_ttl``. ``prefix_changed``: who made it begin in another way than the request
    before. Costs are US dollars, None without reported usage or a price.
    """

    hit_ratio: float | None = None
    cold: bool = False
    prefix_changed: Cause = "none"
    cost: float | None = None
    cost_saved: float | None = None

    def facts(self) -> dict[str, object]:
        said = msgspec.to_builtins(self)
        return {
            name: round(value, DIGITS[name]) if name in DIGITS else value
            for name, value in said.items()
        }


def facts_in(detail: Mapping[str, object]) -> dict[str, object]:
    return {
        each.name: detail.get(each.name, each.default) for each in msgspec.structs.fields(CacheUse)
    }


def cache_use_of(
    plan: Plan,
    recognized: Recognized,
    request: ClientRequest,
    billed: Sequence[ReportedUsage],
    *,
    ttl: float,
    at: float,
    carried_out: bool,
    ok: bool,
) -> CacheUse:
    """The cache's result for a request, with which the conversation's next one will be compared.

    ``billed`` is what each round's answer took; ``ttl`` is seconds, ``at`` when the request was
    settled; ``carried_out``: the plan is what went up; ``ok``: the upstream accepted it.
    """
    view = recognized.view
    usage = together(billed) if billed else None
    before = view.prefix
    now = _prefix(plan, recognized, request, usage)
    touched = carried_out and _touches_what_was_sent(plan, recognized)
    changed = _cause(recognized, before, now, touched=touched)
    if ok:
        view.prefix = now
    elif before is not None and changed == "proxy":
        view.prefix = before._replace(is_stale=True)
    is_cold = _is_cold(plan, recognized, ttl=ttl, at=at)
    prices = prices_of(request.model, recognized.limits.facts)
    if not billed or prices is None:
        return CacheUse(hit_ratio=now.hit_ratio, cold=is_cold, prefix_changed=changed)
    cost = sum(cost_of(prices, each) for each in billed)
    decision = plan.decision
    removed = (
        max(0, decision.before - decision.after) if carried_out and decision is not None else 0
    )
    share = now.hit_ratio or 0.0
    if before is not None and before.hit_ratio is not None and changed == "proxy" and not is_cold:
        share = max(share, before.hit_ratio)
    return CacheUse(
        hit_ratio=now.hit_ratio,
        cold=is_cold,
        prefix_changed=changed,
        cost=cost,
        cost_saved=(
            _cost_unmanaged(prices, billed, removed=removed, share=share) - cost if removed else 0.0
        ),
    )


def _prefix(
    plan: Plan, recognized: Recognized, request: ClientRequest, usage: ReportedUsage | None
) -> Prefix:
    transcript = recognized.transcript
    fields = request.fields
    names = request.codec.counted
    chain = transcript.chain
    return Prefix(
        head=b"".join([m.digest for m in transcript.messages[: transcript.head]]),
        tools=b"".join([xxhash.xxh3_64_digest(fields[name]) for name in names if name in fields]),
        end=chain[-1] if chain else b"",
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
        # Weir has left out nothing new: a tool that comes back was requested by name
        return "client"
    return "none" if _goes_on(recognized, before) else "client"


def _goes_on(recognized: Recognized, before: Prefix) -> bool:
    chain = recognized.transcript.chain
    if len(chain) < before.length:
        return recognized.length == len(chain)
    return before.length == 0 or chain[before.length - 1] == before.end


def _touches_what_was_sent(plan: Plan, recognized: Recognized) -> bool:
    decision = plan.decision
    transcript = recognized.transcript
    if not recognized.length:
        return False
    sent = transcript.head + recognized.length
    if decision is not None and decision.removed and decision.removed[0] < sent:
        return True
    if decision is not None and any(event.kind == "rollback" for event in decision.events):
        return True
    if not plan.evictions:
        return False
    places = {
        (m.digest, nth)
        for m, nth in zip(transcript.messages[:sent], transcript.occurrences, strict=False)
    }
    return any(
        row.kind in WHOLE or (row.digest, row.occurrence) in places for row in plan.evictions
    )


def _is_cold(plan: Plan, recognized: Recognized, *, ttl: float, at: float) -> bool:
    last = recognized.trend.at
    mine = plan.decision.trend.at if plan.decision is not None else None
    return last is not None and (at if mine is None else mine) - last > ttl


def _cost_unmanaged(
    prices: TokenPrices, billed: Sequence[ReportedUsage], *, removed: int, share: float
) -> float:
    prompt = (billed[0].prompt or 0) + removed
    read = prompt * (prices.input * (1 - share) + prices.cache_read * share)
    return tiered(prices, prompt, read, billed[-1].completion or 0)
