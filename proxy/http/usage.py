"""What the management API tells of usage: which key took how many tokens and dollars."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, get_args

from msgspec import Meta

from proxy.http.request import ManagementRequest, page_from
from proxy.http.shape import Count, Dollars, Moment, Shape, Tokens
from proxy.store.exchanges import ADDED, By
from proxy.store.records import UsageRow

DAYS = 30
DAY = 86_400.0
DOLLAR_DIGITS = 6
KINDS: tuple[By, ...] = get_args(By)


class Taken(Shape, kw_only=True):
    """What requests took, all together."""

    requests: Count
    failed: Annotated[int, Meta(ge=0, description="answered with a status of 400 or above, or not at all")]
    tokens_before: Annotated[int, Meta(ge=0, description="of answered requests as clients sent them")]
    tokens_after: Annotated[int, Meta(ge=0, description="of the same as they were forwarded")]
    prompt: Annotated[int, Meta(ge=0, description="tokens that upstreams reported")]
    cached: Tokens
    completion: Tokens
    priced: Annotated[int, Meta(ge=0, description="requests whose cost is known")]
    cost: Dollars | None
    cost_saved: Dollars | None
    summarizer_tokens: Tokens
    summarizer_cost: Dollars
    tokens_saved: int


class _OfKey(Taken):  # fields that are not for keywords only come first in the JSON
    tenant: str
    key: Annotated[str | None, Meta(description="name of the key, null for one that Weir does not know")]
    group: Annotated[str | None, Meta(description="the model, policy, day or conversation, null where by is not given")]


class TakenBy(_OfKey, kw_only=True):
    """What the requests of one key took, or of one group of them."""

    first: Moment
    last: Moment


class Usage(Shape):
    """What requests took since a moment."""

    since: Moment
    by: By | None
    total: Taken
    data: list[TakenBy]
    next: str | None


def taken_by(row: UsageRow, *, by: By | None, names: Mapping[str, str]) -> TakenBy:
    """What one key took, or one part of it: ``names`` are those of keys by their tenant."""
    group = row.group if by is not None else None
    return TakenBy.of(row, key=names.get(row.tenant), group=group, **_sums([row]))


def taken(rows: Sequence[UsageRow]) -> Taken:
    """What all rows took together."""
    return Taken(**_sums(rows))


def _sums(rows: Sequence[UsageRow]) -> dict[str, Any]:
    """Sums of rows; dollars are null where no request has a price."""
    sums: dict[str, Any] = {name: sum(getattr(row, name) for row in rows) for name in ADDED}
    for name in ("cost", "cost_saved"):
        sums[name] = round(sums[name], DOLLAR_DIGITS) if sums["priced"] else None
    sums["summarizer_cost"] = round(sums["summarizer_cost"], DOLLAR_DIGITS)
    return sums | {"tokens_saved": sums["tokens_before"] - sums["tokens_after"]}


async def usage(asked: ManagementRequest) -> Usage:
    """What requests took since a moment (30 days ago), by key and ``by`` model, policy, day or conversation.

    The most forwarded tokens come first; a caller sees its own, the operator every key's.
    """
    limit, by = asked.limit(), asked.word("by", KINDS)
    since = asked.since()
    since = asked.runtime.planner.clock() - DAYS * DAY if since is None else since
    start = asked.start()
    rows = await asked.store.usage(asked.tenant, since=since, by=by)
    names = asked.runtime.keyring.names
    found = page_from(rows, start, limit, lambda row: taken_by(row, by=by, names=names))
    return Usage(since=since, by=by, total=taken(rows), data=found.data, next=found.next)
