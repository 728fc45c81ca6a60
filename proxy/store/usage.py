"""What requests took: by key and by model, policy, day or conversation, and in steps of time.

It is added up by day as requests are stored.
"""

import datetime as dt
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec
import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import Insert

from proxy.store import conversations as conversations_
from proxy.store.audit import REFUSED
from proxy.store.packing import CONVERSATION, TENANT, Plain
from proxy.store.records import DAY, ConversationRow, ExchangeRow, RelayedRow, UsageRow
from proxy.store.schema import (
    NO_CONVERSATION,
    alerts,
    conversations,
    exchanges,
    key_days,
    relayed,
    usage_days,
)
from proxy.store.transaction import (
    Transaction,
    among,
    chunks,
    larger,
    of,
    overwriting,
    owned,
    same,
    total,
)

By = Literal["team", "model", "policy", "day", "conversation", "key"]
ADDED = tuple(
    each for each in UsageRow.__struct_fields__ if each not in {"tenant", "group", "first", "last"}
)
HOME = sa.and_(
    same(conversations, exchanges, "tenant"), conversations.c.id == exchanges.c.conversation
)
NEWEST = 5_000


def day_of(at: float) -> float:
    """When the day (UTC) of a moment began."""
    return DAY * math.floor(at / DAY)


def usage(
    tx: Transaction,
    tenant: str | None,
    *,
    since: float,
    by: By | None = None,
    key: str | None = None,
) -> list[UsageRow]:
    """What requests took from the day (UTC) of ``since`` on, of a tenant or with None of each; the
    most tokens first.

    By ``team`` and by ``key`` it is of known keys, or of one ``key``, all tenants together: a
    ``group`` is the team's name, or what ``key_days`` has for the key. A conversation that was
    deleted is counted as before, without a name. Tokens are those of requests that were answered
    with a status below 400; of what was only relayed those that were reported.
    """
    if by in ("team", "key"):
        return _by_key(tx, by, since=since, key=key)
    d = usage_days.c
    name = "at" if by == "day" else by
    part = sa.null() if name is None else d[name]
    query = sa.select(d.tenant, part.label("part"), *_numbers(UsageRow, _sums(usage_days)))
    query = query.where(d.at >= day_of(since), owned(usage_days, tenant))
    query = query.group_by(d.tenant, *([] if by is None else [part]))
    if by == "conversation":  # the name of each is looked up once, not for each request
        each = query.subquery()
        mine = sa.and_(conversations.c.tenant == each.c.tenant, conversations.c.id == each.c.part)
        columns = [conversations.c.name.label("part") if c.name == "part" else c for c in each.c]
        query = sa.select(*columns).outerjoin_from(each, conversations, mine)
    found = [UsageRow(*row) for row in tx.execute(query)]
    if by == "day":
        found = [msgspec.structs.replace(row, group=_day(row.group)) for row in found]
    return sorted(found, key=lambda row: (-row.tokens_after, row.tenant, row.group or ""))


def _by_key(tx: Transaction, by: str, *, since: float, key: str | None) -> list[UsageRow]:
    d = key_days.c
    whose = sa.true() if key is None else d.key == key
    query = sa.select(sa.literal(""), d[by], *_numbers(UsageRow, _sums(key_days)))
    query = query.where(d.at >= day_of(since), whose).group_by(d[by])
    found = [UsageRow(*row) for row in tx.execute(query)]
    return sorted(found, key=lambda row: (-row.tokens_after, row.group or ""))


def keep_usage(tx: Transaction, tenant: str, conversation: str) -> None:
    """Detach a conversation's usage from it: it is about to be deleted."""
    given = {"of_tenant": tenant, "of_conversation": conversation}
    tx.execute(ADD_UP_WITHOUT, given)
    tx.execute(FORGET_WHOSE, given)


def _numbers(record: Any, given: Mapping[str, sa.ColumnElement[Any]]) -> list[sa.Label[Any]]:
    """Fields of a record as the database gives them: converting ten thousand rows here takes longer
    than the query.
    """
    kinds = {
        each.name: sa.Double if each.type is float else sa.BigInteger
        for each in msgspec.structs.fields(record)
    }
    return [sa.cast(given[name], kind).label(name) for name, kind in kinds.items() if name in given]


def _sums(table: sa.Table) -> dict[str, sa.ColumnElement[Any]]:
    if table is usage_days or table is key_days:
        kept: dict[str, sa.ColumnElement[Any]] = {name: total(table.c[name]) for name in ADDED}
        return kept | {"first": sa.func.min(table.c.first), "last": sa.func.max(table.c.last)}
    is_managed = table is exchanges
    answered = sa.and_(table.c.status >= 200, table.c.status < 400)
    before = exchanges.c.tokens_before if is_managed else relayed.c.usage_prompt
    forwarded = (
        sa.case((exchanges.c.observed, before), else_=exchanges.c.tokens_after)
        if is_managed
        else before
    )
    nothing = sa.literal(0)
    return {
        "failed": total(sa.case((answered, 0), else_=1)),
        "tokens_before": total(sa.case((answered, before), else_=0)),
        "tokens_after": total(sa.case((answered, forwarded), else_=0)),
        "prompt": total(table.c.usage_prompt),
        "cached": total(table.c.usage_cached),
        "completion": total(table.c.usage_completion),
        "cost": total(table.c.cost),
        "cost_saved": total(exchanges.c.cost_saved) if is_managed else nothing,
        "summarizer_tokens": total(exchanges.c.summaries) if is_managed else nothing,
        "summarizer_cost": total(exchanges.c.summaries_cost) if is_managed else nothing,
        "requests": sa.func.count(),
        "priced": sa.func.count(table.c.cost),
        "estimated": total(sa.case((exchanges.c.usage_estimated, 1), else_=0))
        if is_managed
        else nothing,
        "first": sa.func.min(table.c.at),
        "last": sa.func.max(table.c.at),
    }


def _step_of(at: sa.Column[float], seconds: float) -> sa.ColumnElement[int]:
    """Which step of time a moment is in, since 1970; a cast alone rounds on PostgreSQL."""
    return sa.cast(sa.func.floor(at / seconds), sa.BigInteger)


def taken_in_days(table: sa.Table) -> sa.Select[Any]:
    x = table.c
    day = DAY * _step_of(x.at, DAY)
    home = x.conversation if table is exchanges else sa.literal(NO_CONVERSATION, CONVERSATION)
    sums = _numbers(UsageRow, _sums(table))
    query = sa.select(
        x.tenant, home.label("conversation"), day.label("at"), x.model, x.policy, *sums
    )
    return query.where(among(x.id)).group_by(x.tenant, home, day, x.model, x.policy)


def _taken_by_key(table: sa.Table) -> sa.Select[Any]:
    x = table.c
    day = DAY * _step_of(x.at, DAY)
    key = sa.bindparam("of_key", type_=TENANT).label("key")
    team = sa.bindparam("of_team", type_=Plain()).label("team")
    query = sa.select(key, team, day.label("at"), x.model, *_numbers(UsageRow, _sums(table)))
    return query.where(among(x.id)).group_by(day, x.model)


def _without_conversation() -> sa.Select[Any]:
    d = usage_days.c
    sums = _numbers(UsageRow, _sums(usage_days))
    home = sa.literal(NO_CONVERSATION, CONVERSATION).label("conversation")
    query = sa.select(d.tenant, home, d.at, d.model, d.policy, *sums)
    return query.where(of(usage_days, "tenant", "conversation")).group_by(
        d.tenant, d.at, d.model, d.policy
    )


def adding(taken: sa.Select[Any], table: sa.Table = usage_days) -> Insert:
    return overwriting(
        table,
        lambda new, old: {
            **{name: old[name] + new[name] for name in ADDED},
            "first": sa.case((new.first < old.first, new.first), else_=old.first),
            "last": larger(new.last, old.last),
        },
        taken,
    )


ADD_TO_DAYS = adding(taken_in_days(exchanges))
ADD_RELAYED_TO_DAYS = adding(taken_in_days(relayed))
ADD_TO_KEYS = adding(_taken_by_key(exchanges), key_days)
ADD_RELAYED_TO_KEYS = adding(_taken_by_key(relayed), key_days)
ADD_UP_WITHOUT = adding(_without_conversation())
FORGET_WHOSE = sa.delete(usage_days).where(of(usage_days, "tenant", "conversation"))


def add_to_days(
    tx: Transaction, table: sa.Table, rows: Sequence[ExchangeRow] | Sequence[RelayedRow]
) -> None:
    """Add up what rows of ``table`` took that this transaction has stored."""
    is_managed = table is exchanges
    days = ADD_TO_DAYS if is_managed else ADD_RELAYED_TO_DAYS
    keys = ADD_TO_KEYS if is_managed else ADD_RELAYED_TO_KEYS
    tx.ask_each(days, ((row.tenant, row.id) for row in rows))
    whose: dict[tuple[str, str, str], list[str]] = {}
    for row in rows:
        if row.key:
            whose.setdefault((row.key, row.team, row.tenant), []).append(row.id)
    for (key, team, tenant), ids in sorted(whose.items()):
        for some in chunks(ids):
            given = {"of_key": key, "of_team": team, "of_tenant": tenant, "ids": some}
            tx.execute(keys, given)


def prune_keys(tx: Transaction, *, before: float) -> None:
    """Delete what keys took on days that began before ``before``."""
    tx.execute(sa.delete(key_days).where(key_days.c.at < before))


def _day(at: Any) -> str:
    return dt.datetime.fromtimestamp(at, tz=dt.UTC).strftime("%Y-%m-%d")


class Beside(msgspec.Struct, frozen=True):
    before: int = 0
    after: int = 0
    cost: float | None = None
    cost_saved: float | None = None
    policy: str = ""
    alerts: int = 0


def beside(tx: Transaction, keys: Sequence[tuple[str, str]]) -> dict[tuple[str, str], Beside]:
    x = exchanges.c
    a = alerts.c
    took = _sums(exchanges)
    ids = [conversation for _, conversation in keys]
    newest = sa.func.max(x.at).label("newest")
    sums = (
        took["tokens_before"],
        took["tokens_after"],
        sa.func.sum(x.cost),
        sa.func.sum(x.cost_saved),
    )
    query = sa.select(x.tenant, x.conversation, *sums, newest).where(x.conversation.in_(ids))
    summed = {
        (row[0], row[1]): tuple(row) for row in tx.execute(query.group_by(x.tenant, x.conversation))
    }
    last = sa.select(x.tenant, x.conversation, x.policy).where(
        sa.tuple_(x.conversation, x.tenant, x.at).in_(
            [(key[1], key[0], row[6]) for key, row in summed.items()]
        )
    )
    policies = (
        {(row.tenant, row.conversation): row.policy for row in tx.execute(last)} if summed else {}
    )
    open_ = sa.select(a.tenant, a.conversation, sa.func.count()).where(
        a.closed.is_(None), a.conversation.in_(ids)
    )
    counts = {
        (row[0], row[1]): int(row[2])
        for row in tx.execute(open_.group_by(a.tenant, a.conversation))
    }
    found: dict[tuple[str, str], Beside] = {}
    for key in keys:
        _, _, before, after, cost, saved, _ = summed.get(key, (*key, 0, 0, None, None, 0.0))
        found[key] = Beside(
            int(before), int(after), cost, saved, policies.get(key, ""), counts.get(key, 0)
        )
    return found


class Figures(msgspec.Struct, frozen=True):
    """What managed requests of one step of time came to; ``at`` is when the step began.

    Attributes:
        failed: answered with a status of 400 or above, or not at all; ``refused`` of them because
            they could not fit.
        healed: answered although the upstream had said once that they do not fit.
        degraded: managed with less than there should be.
        batches: of edits, or summaries.
        tokens_before: as clients sent them, ``tokens_after`` those that went up.
        overhead_ms: sum of the milliseconds before each went up.
    """

    at: float
    requests: int
    failed: int
    refused: int
    healed: int
    degraded: int
    batches: int
    tokens_before: int
    tokens_after: int
    prompt: int
    cached: int
    completion: int
    priced: int
    estimated: int
    cost: float
    cost_saved: float
    overhead_ms: float


def figures(tx: Transaction, tenant: str | None, *, since: float, step: float) -> list[Figures]:
    x = exchanges.c

    def times(condition: sa.ColumnElement[bool]) -> sa.ColumnElement[int]:
        return total(sa.case((condition, 1), else_=0))

    number = _step_of(x.at, step)
    counted = _sums(exchanges) | {
        "refused": times(x.outcome == REFUSED),
        "healed": times(sa.and_(x.status.between(200, 399), x.attempts > 1)),
        "degraded": times(x.actions.contains("degraded=")),
        "batches": times(sa.or_(x.evicted > 0, x.strategy != "")),
        "overhead_ms": total(x.overhead_ms),
    }
    query = sa.select(number, *_numbers(Figures, counted)).where(
        x.at >= since, owned(exchanges, tenant)
    )
    rows = tx.execute(query.group_by(number).order_by(number))
    return [Figures(step * at, *sums) for at, *sums in rows]


def dearest(
    tx: Transaction, tenant: str | None, *, since: float, limit: int
) -> list[tuple[ConversationRow, float]]:
    x = exchanges.c
    d = usage_days.c
    morrow = DAY * (since // DAY + 1)
    begun = sa.select(x.tenant, x.conversation, x.cost).where(
        x.at >= since, x.at < morrow, owned(exchanges, tenant)
    )
    whole = sa.select(d.tenant, d.conversation, d.cost).where(
        d.at >= morrow, d.conversation != NO_CONVERSATION, owned(usage_days, tenant)
    )
    each = sa.union_all(begun, whole).subquery().c
    cost = total(each.cost)
    query = sa.select(each.tenant, each.conversation, cost).group_by(each.tenant, each.conversation)
    query = query.having(cost > 0).order_by(cost.desc(), each.conversation).limit(limit)
    paid = {(owner, its): float(dollars) for owner, its, dollars in tx.execute(query)}
    listed = conversations_.listing_of(tenant).where(
        conversations.c.id.in_([its for _, its in paid])
    )
    rows = (
        {(row.tenant, row.id): conversations_.row_of(row) for row in tx.execute(listed)}
        if paid
        else {}
    )
    return [(rows[key], dollars) for key, dollars in paid.items() if key in rows]


def overheads(tx: Transaction, tenant: str | None, *, since: float) -> list[float]:
    query = sa.select(exchanges.c.overhead_ms).where(
        exchanges.c.at >= since, owned(exchanges, tenant)
    )
    return sorted(tx.scalars(query.order_by(exchanges.c.at.desc()).limit(NEWEST)))


def passed(
    tx: Transaction, tenant: str | None, *, limit: int, since: float
) -> list[dict[str, Any]]:
    x = exchanges.c
    about = (
        x.id,
        x.tenant,
        x.conversation,
        conversations.c.name,
        x.at,
        x.model,
        x.policy,
        x.status,
        x.outcome,
    )
    figures = (x.tokens_before, x.tokens_after, x.pressure, x.zone, x.actions)
    query = (
        sa.select(*about, *figures)
        .join(conversations, HOME)
        .where(x.at >= since, owned(exchanges, tenant))
    )
    rows = tx.execute(query.order_by(x.at.desc(), x.id.desc()).limit(limit))
    return [dict(row) for row in rows.mappings()]
