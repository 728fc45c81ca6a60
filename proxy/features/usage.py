"""What requests took, in tokens and dollars, by key and by model, policy, day or conversation."""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from typing import get_args

from starlette.responses import Response

from proxy.access.destination import TENANT_SHOWN
from proxy.http.request import (
    DOLLAR_DIGITS,
    Json,
    ManagementRequest,
    page_from,
)
from proxy.http.routes import PAGED, ManagementRoute
from proxy.store.records import UsageRow
from proxy.store.usage import ADDED, By, day_of

KINDS: tuple[By, ...] = get_args(By)
FORMATS = ("json", "csv")
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
    group = row.group if by is not None else None
    if by == "key":
        group = names.get(row.group or "") or (row.group or "")[:TENANT_SHOWN]
    whose = {"tenant": row.tenant, "key": names.get(row.tenant), "group": group}
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
    """A note on what a sum of costs leaves out and what in it is estimated; empty where there is
    neither.
    """
    kinds = ((unpriced, "without a price"), (estimated, "by Weir's own count"))
    return ", ".join(
        f"{number:,.0f} request{'' if number == 1 else 's'} {kind}"
        for number, kind in kinds
        if number
    )


async def usage_by(request: ManagementRequest) -> Json | Response:
    """What requests took since a day (30 days ago), by key and ``by`` team, model, policy, day or
    conversation.

    Days are those of UTC: the one of ``since`` is counted whole. Deleted conversations are counted,
    without a name. By team and by key (``by=key`` has a key's requests of all tenants together) it
    is of known keys. The most forwarded tokens come first; a caller sees its own, the operator
    every key's. ``format=csv`` gives all rows as a table.
    """
    if request.word("format", FORMATS) != "csv":
        return await usage_page(request)
    by, _, rows = await _used(request)
    names = request.runtime.keyring.names
    text = as_csv(taken_by(row, by=by, names=names) for row in rows)
    return Response(text, media_type="text/csv")


async def usage_page(request: ManagementRequest) -> Json:
    """A page of what requests took."""
    limit = request.limit()
    start = request.start()
    by, since, rows = await _used(request)
    names = request.runtime.keyring.names
    found = page_from(rows, start, limit, lambda row: taken_by(row, by=by, names=names))
    return {"since": since, "by": by, "total": taken(rows), **found}


async def _used(request: ManagementRequest) -> tuple[By | None, float, Sequence[UsageRow]]:
    by = request.word("by", KINDS)
    since = day_of(request.since("30d"))
    rows = await request.store.usage(request.tenant, since=since, by=by, key=request.key)
    return by, since, rows


def as_csv(rows: Iterable[Json]) -> str:
    """What requests took as a table with a line for each row of :func:`taken_by`."""
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow(TAKEN_BY)
    for row in rows:
        writer.writerow([_cell(row[name]) for name in TAKEN_BY])
    return out.getvalue()


def _cell(value: object) -> object:
    """A cell that no program takes for a formula."""
    is_formula = isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t")
    return f"'{value}" if is_formula else value


ROUTES = (ManagementRoute("GET", "usage", usage_by, ("since", "by", "format", *PAGED)),)
