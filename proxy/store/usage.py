"""Which key's requests took how many tokens and dollars, by model, policy, day or conversation."""

import datetime as dt
import math
from collections.abc import Iterable
from dataclasses import fields, replace
from typing import Any, Literal

import sqlalchemy as sa

from proxy.store.records import UsageRow
from proxy.store.tables import conversations, exchanges, relayed

By = Literal["model", "policy", "day", "conversation"]
DAY = 86_400
ADDED = tuple(each.name for each in fields(UsageRow) if each.name not in {"tenant", "group", "first", "last"})
ANSWERED = sa.and_(exchanges.c.status >= 200, exchanges.c.status < 400)
FORWARDED = sa.case((exchanges.c.observed, exchanges.c.tokens_before), else_=exchanges.c.tokens_after)


def slices(connection: sa.Connection, since: float) -> list[tuple[float, float]]:
    """The time since then in days, from the oldest request to the newest, so that nobody waits long for one of them."""
    asked = (sa.select(sa.func.min(t.c.at), sa.func.max(t.c.at)).where(t.c.at >= since) for t in (exchanges, relayed))
    ends = [end for query in asked for end in connection.execute(query).one() if end is not None]
    if not ends:
        return []
    first, last = min(ends), max(ends)
    days = int((last - first) // DAY)
    return [(first + DAY * n, first + DAY * (n + 1) if n < days else math.inf) for n in range(days + 1)]


def together(rows: Iterable[UsageRow]) -> list[UsageRow]:
    """Rows of one tenant and one group added up, the most forwarded tokens first."""
    sums: dict[tuple[str, str | None], UsageRow] = {}
    for row in rows:
        key = (row.tenant, row.group)
        sums[key] = _added(sums[key], row) if key in sums else row
    return sorted(sums.values(), key=lambda row: (-row.tokens_after, row.tenant, row.group or ""))


def _added(one: UsageRow, other: UsageRow) -> UsageRow:
    counts: dict[str, Any] = {name: getattr(one, name) + getattr(other, name) for name in ADDED}
    return replace(one, **counts, first=min(one.first, other.first), last=max(one.last, other.last))


def usage(
    connection: sa.Connection, tenant: str | None, *, since: float, until: float, by: By | None
) -> list[UsageRow]:
    """What the requests of a time took, of a tenant or with None of each.

    A conversation that was deleted, and what is older than the store's retention, is not counted any more. Tokens are
    those of requests that were answered with a status below 400.
    """
    group = _group(by, connection.dialect.name)
    query = sa.select(
        exchanges.c.tenant,
        sa.func.count().label("requests"),
        _sum(sa.case((ANSWERED, 0), else_=1)).label("failed"),
        _sum(sa.case((ANSWERED, exchanges.c.tokens_before), else_=0)).label("tokens_before"),
        _sum(sa.case((ANSWERED, FORWARDED), else_=0)).label("tokens_after"),
        _sum(exchanges.c.usage_prompt).label("prompt"),
        _sum(exchanges.c.usage_cached).label("cached"),
        _sum(exchanges.c.usage_completion).label("completion"),
        sa.func.count(exchanges.c.cost).label("priced"),
        _sum(exchanges.c.cost).label("cost"),
        _sum(exchanges.c.cost_saved).label("cost_saved"),
        _sum(exchanges.c.summaries).label("summaries"),
        _sum(exchanges.c.summaries_cost).label("summaries_cost"),
        sa.func.min(exchanges.c.at).label("first"),
        sa.func.max(exchanges.c.at).label("last"),
        *(() if group is None else (group.label("part"),)),
    ).where(exchanges.c.at >= since)
    if math.isfinite(until):
        query = query.where(exchanges.c.at < until)
    if tenant is not None:
        query = query.where(exchanges.c.tenant == tenant)
    if by == "conversation":
        mine = sa.and_(conversations.c.tenant == exchanges.c.tenant, conversations.c.id == exchanges.c.conversation)
        query = query.join(conversations, mine)
    groups = [exchanges.c.tenant, *(() if group is None else (group,))]
    found = [_row(row, by) for row in connection.execute(query.group_by(*groups))]
    return found + _relayed(connection, tenant, since=since, until=until, by=by)


def _relayed(
    connection: sa.Connection, tenant: str | None, *, since: float, until: float, by: By | None
) -> list[UsageRow]:
    """The same of requests that were relayed and belong to no conversation: their tokens are those reported."""
    answered = sa.and_(relayed.c.status >= 200, relayed.c.status < 400)
    prompt = _sum(sa.case((answered, relayed.c.usage_prompt), else_=0))
    group = None if by == "conversation" else _group(by, connection.dialect.name, relayed)
    query = sa.select(
        relayed.c.tenant,
        sa.func.count().label("requests"),
        _sum(sa.case((answered, 0), else_=1)).label("failed"),
        prompt.label("tokens_before"),
        prompt.label("tokens_after"),
        _sum(relayed.c.usage_prompt).label("prompt"),
        _sum(relayed.c.usage_cached).label("cached"),
        _sum(relayed.c.usage_completion).label("completion"),
        sa.func.count(relayed.c.cost).label("priced"),
        _sum(relayed.c.cost).label("cost"),
        sa.literal(0).label("cost_saved"),
        sa.literal(0).label("summaries"),
        sa.literal(0).label("summaries_cost"),
        sa.func.min(relayed.c.at).label("first"),
        sa.func.max(relayed.c.at).label("last"),
        *(() if group is None else (group.label("part"),)),
    ).where(relayed.c.at >= since)
    if math.isfinite(until):
        query = query.where(relayed.c.at < until)
    if tenant is not None:
        query = query.where(relayed.c.tenant == tenant)
    groups = [relayed.c.tenant, *(() if group is None else (group,))]
    return [_row(row, None if group is None else by) for row in connection.execute(query.group_by(*groups))]


def _group(by: By | None, dialect: str, table: sa.Table = exchanges) -> sa.ColumnElement[Any] | None:
    """What rows are told apart by beside the tenant; a day is its number since 1970 in UTC."""
    if by == "conversation":
        return conversations.c.name
    if by == "day":
        days = table.c.at / DAY
        return sa.cast(days if dialect == "sqlite" else sa.func.floor(days), sa.Integer)
    return None if by is None else table.c[by]


def _sum(value: sa.ColumnElement[Any]) -> sa.ColumnElement[Any]:
    return sa.func.coalesce(sa.func.sum(value), 0)


def _row(row: sa.Row[*tuple[Any, ...]], by: By | None) -> UsageRow:
    part = None if by is None else row.part
    if by == "day":
        part = dt.datetime.fromtimestamp(DAY * int(row.part), tz=dt.UTC).strftime("%Y-%m-%d")
    return UsageRow(
        tenant=row.tenant,
        group=part,
        requests=int(row.requests),
        failed=int(row.failed),
        tokens_before=int(row.tokens_before),
        tokens_after=int(row.tokens_after),
        prompt=int(row.prompt),
        cached=int(row.cached),
        completion=int(row.completion),
        priced=int(row.priced),
        cost=float(row.cost),
        cost_saved=float(row.cost_saved),
        summarizer_tokens=int(row.summaries),
        summarizer_cost=float(row.summaries_cost),
        first=float(row.first),
        last=float(row.last),
    )
