"""What requests took, in tokens and dollars, by key and by model, policy, day or conversation."""

from collections.abc import Mapping, Sequence
from typing import get_args

from proxy.http.request import DOLLAR_DIGITS, Json, ManagementRequest, page_from
from proxy.http.routes import PAGED, ManagementRoute
from proxy.store.records import UsageRow
from proxy.store.usage import ADDED, By, day_of

KINDS: tuple[By, ...] = get_args(By)
TAKEN = (
    *(
        "requests",
        "failed",
        "tokens_before",
        "tokens_after",
        "prompt",
        "cached",
        "completion",
        "priced",
        "unpriced",
    ),
    *("estimated", "cost", "cost_saved", "summarizer_tokens", "summarizer_cost", "tokens_saved"),
)
"""What requests took, in the order of the JSON."""
TAKEN_BY = ("tenant", "key", "group", *TAKEN)


def taken_by(row: UsageRow, *, by: By | None, names: Mapping[str, str]) -> Json:
    """What the requests of one key took, or of one group of them."""
    whose = {
        "tenant": row.tenant,
        "key": names.get(row.tenant),
        "group": row.group if by is not None else None,
    }
    return {**whose, **taken([row]), "first": row.first, "last": row.last}


def taken(rows: Sequence[UsageRow]) -> Json:
    """What requests took, all together."""
    sums: Json = {name: sum(getattr(row, name) for row in rows) for name in ADDED}
    for name in ("cost", "cost_saved"):
        sums[name] = round(sums[name], DOLLAR_DIGITS) if sums["priced"] else None
    sums["summarizer_cost"] = round(sums["summarizer_cost"], DOLLAR_DIGITS)
    sums["unpriced"] = max(0, sums["requests"] - sums["failed"] - sums["priced"])
    sums["tokens_saved"] = sums["tokens_before"] - sums["tokens_after"]
    return {name: sums[name] for name in TAKEN}


def beside_cost(*, unpriced: float, estimated: float) -> str:
    """What a sum of costs leaves out, and what in it is estimated, as words; empty where there is
    neither.
    """
    kinds = ((unpriced, "without a price"), (estimated, "by Weir's own count"))
    return ", ".join(
        f"{number:,.0f} request{'' if number == 1 else 's'} {kind}"
        for number, kind in kinds
        if number
    )


async def usage_by(request: ManagementRequest) -> Json:
    """What requests took since a day (30 days ago), by key and ``by`` model, policy, day or
    conversation.

    Days are those of UTC: the one of ``since`` is counted whole. Deleted conversations are counted,
    without a name. The most forwarded tokens come first; a caller sees its own, the operator every
    key's.
    """
    limit = request.limit()
    by = request.word("by", KINDS)
    since = day_of(request.since("30d"))
    start = request.start()
    rows = await request.store.usage(request.tenant, since=since, by=by)
    names = request.runtime.keyring.names
    found = page_from(rows, start, limit, lambda row: taken_by(row, by=by, names=names))
    return {"since": since, "by": by, "total": taken(rows), **found}


ROUTES = (ManagementRoute("GET", "usage", usage_by, ("since", "by", *PAGED)),)
