"""Requests that went through: written in batches after their answers, with the chain ends that the next is known by.

And what they add up to: which key's requests took how many tokens and dollars, by model, policy, day or conversation.
That is added up day by day as requests are stored: nobody waits for a sum over all of them.
"""

import datetime as dt
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import groupby, pairwise, starmap
from typing import Any, Literal, TypeVar

import msgspec
import sqlalchemy as sa

from proxy.store import conversations as conversations_
from proxy.store import inspections
from proxy.store.audit import REFUSED, append, of_exchange
from proxy.store.conversations import add_checkups, follow_others, open_conversations, touch_chains
from proxy.store.memory import add_answers, add_provider_ids
from proxy.store.packing import CONVERSATION
from proxy.store.records import (
    DAY,
    AnswerRow,
    Arrival,
    ConversationRow,
    ExchangeRow,
    ProviderIdsRow,
    RelayedRow,
    UsageRow,
)
from proxy.store.schema import NO_CONVERSATION, alerts, branches, conversations, exchanges, relayed, usage_days
from proxy.store.transaction import (
    Columns,
    Place,
    Transaction,
    Upsert,
    among,
    chunks,
    columns_of,
    larger,
    of,
    ordered,
    overwriting,
    owned,
    recorded,
    same,
    stored,
    total,
)

R = TypeVar("R")
Stored = TypeVar("Stored", ExchangeRow, RelayedRow)
By = Literal["model", "policy", "day", "conversation"]
ADDED = tuple(each for each in UsageRow.__struct_fields__ if each not in {"tenant", "group", "first", "last"})
TOUCH_BRANCH = overwriting(
    branches,
    lambda new, old: {
        **{name: larger(new[name], old[name]) for name in ("longest", "updated", "trend_at")},
        "floating": sa.func.coalesce(new.floating, old.floating),
        "trend": sa.case((sa.and_(new.trend.is_not(None), new.trend_at >= old.trend_at), new.trend), else_=old.trend),
    },
)
ADD = sa.insert(exchanges)
ADD_RELAYED = sa.insert(relayed)
_ENCODER = json.JSONEncoder(separators=(",", ":"))
KNOWN = sa.select(exchanges.c.id).where(among(exchanges.c.id))
KNOWN_RELAYED = sa.select(relayed.c.id).where(among(relayed.c.id))
HOME = sa.and_(same(conversations, exchanges, "tenant"), conversations.c.id == exchanges.c.conversation)
TOUCH = overwriting(
    conversations,
    lambda new, old: {
        **{name: new[name] for name in ("model", "tokens_before", "tokens_after", "limit", "zone", "actions")},
        "updated": larger(old.updated, new.updated),
        "requests": old.requests + new.requests,
        "parent": sa.func.coalesce(old.parent, new.parent),
        "closed": sa.case((old.closed < new.updated, None), else_=old.closed),
        "health": sa.func.coalesce(new.health, old.health),
    },
)


def arrive(tx: Transaction, arrivals: Sequence[Arrival]) -> dict[str, str]:
    home = _touch_branches(tx, arrivals)
    touch_chains(tx, [(a, a.ends) for a in arrivals])
    return home


def record(
    tx: Transaction,
    batch: Sequence[ExchangeRow | RelayedRow | AnswerRow | ProviderIdsRow | Arrival],
    *,
    shared: bool = False,
) -> list[ExchangeRow]:
    """The exchanges of a batch that were stored; a row with an id that is there already is not counted twice.

    In a ``shared`` store their checkups are made anew, from what all servers know of a conversation.
    """
    add_answers(tx, [row for row in batch if isinstance(row, AnswerRow)])
    add_provider_ids(tx, [row for row in batch if isinstance(row, ProviderIdsRow)])
    _add_relayed(tx, _new(tx, [row for row in batch if isinstance(row, RelayedRow)], known=KNOWN_RELAYED))
    rows = _new(tx, [row for row in batch if isinstance(row, ExchangeRow)], known=KNOWN)
    answered = {row.id for row in rows}
    arrive(tx, [row for row in batch if isinstance(row, Arrival) and row.id not in answered])
    if not rows:
        return rows
    home = _touch_branches(tx, rows)
    touch_chains(tx, [(row, ((row.chain_end, row.length),)) for row in rows])
    if shared:
        rows = follow_others(tx, rows, home)
    _touch_conversations(tx, rows, home)
    add_checkups(tx, rows, home)
    tx.columns(ADD, _columns(rows, home))
    tx.ask_each(ADD_TO_DAYS, ((row.tenant, row.id) for row in rows))
    inspections.keep(tx, [(row, row.inspection, home[row.id]) for row in rows if row.inspection is not None])
    append(tx, [event for row in rows for event in of_exchange(row, conversation=home[row.id])])
    return rows


def timeline(
    tx: Transaction,
    conversation: ConversationRow,
    *,
    limit: int = 200,
    since: float | None = None,
    after: Place | None = None,
) -> list[ExchangeRow]:
    """The newest ``limit`` exchanges of a conversation, oldest first.

    ``since`` leaves those from then on, ``after`` those older than one of which this is ``at`` and ``id``.
    """
    query = sa.select(exchanges).where(owned(exchanges, conversation.tenant, conversation=conversation.id))
    if since is not None:
        query = query.where(exchanges.c.at >= since)
    query = ordered(query, ((exchanges.c.at, True), (exchanges.c.id, True)), after=after, limit=limit)
    told = [(row, {"name": conversation.name, "detail": json.loads(row.detail)}) for row in tx.execute(query)]
    return [recorded(ExchangeRow, exchanges, row, **more) for row, more in reversed(told)]


def day_of(at: float) -> float:
    """When the day (UTC) of a moment began."""
    return DAY * math.floor(at / DAY)


def days(tx: Transaction, since: float) -> list[float]:
    """When each day (UTC) began from that of ``since`` on, as far as there is usage in them."""
    ends = [tx.scalar(sa.select(end(usage_days.c.at))) for end in (sa.func.min, sa.func.max)]
    if ends[0] is None or ends[1] is None:
        return []
    first = max(int(ends[0] // DAY), int(since // DAY))
    return [DAY * number for number in range(first, int(ends[1] // DAY) + 1)]


def used(tx: Transaction, tenant: str | None, *, day: float, by: By | None) -> list[UsageRow]:
    """What the requests of a day took, of a tenant or with None of each.

    A conversation that was deleted is counted as before, without a name. Tokens are those of requests that were
    answered with a status below 400; of what was only relayed those that were reported.
    """
    found = tx.execute(_usage_query(by, is_of_one=tenant is not None), {"day": day, "of_tenant": tenant}).all()
    if by == "day":
        return [UsageRow(owner, _day(int(day // DAY)), *figures) for owner, _, *figures in found]
    return [*starmap(UsageRow, found)]


@cache  # building a query takes longer than the database needs for a day of it
def _usage_query(by: By | None, *, is_of_one: bool) -> sa.Select[Any]:
    part = None if by is None or by == "day" else usage_days.c[by]
    shown = (sa.null() if part is None else part).label("part")
    query = sa.select(usage_days.c.tenant, shown, *_numbers(UsageRow, _sums(usage_days)))
    query = query.where(usage_days.c.at == sa.bindparam("day"))
    if is_of_one:
        query = query.where(of(usage_days, "tenant"))
    query = query.group_by(*([usage_days.c.tenant] if part is None else [usage_days.c.tenant, part]))
    if by == "conversation":  # the name of each is looked up once, not for each request
        each = query.subquery()
        mine = sa.and_(conversations.c.tenant == each.c.tenant, conversations.c.id == each.c.part)
        columns = [conversations.c.name.label("part") if c.name == "part" else c for c in each.c]
        query = sa.select(*columns).outerjoin_from(each, conversations, mine)
    return query


def keep_usage(tx: Transaction, tenant: str, conversation: str) -> None:
    """Let what a conversation took go on without it: it is about to be deleted."""
    given = {"of_tenant": tenant, "of_conversation": conversation}
    tx.execute(ADD_UP_WITHOUT[tx.dialect], given)
    tx.execute(FORGET_WHOSE, given)


def added_up(rows: Iterable[UsageRow]) -> list[UsageRow]:
    sums: dict[tuple[str, str | None], UsageRow] = {}
    for row in rows:
        key = (row.tenant, row.group)
        if (known := sums.get(key)) is not None:
            counts: dict[str, Any] = {name: getattr(known, name) + getattr(row, name) for name in ADDED}
            row = msgspec.structs.replace(
                known, **counts, first=min(known.first, row.first), last=max(known.last, row.last)
            )
        sums[key] = row
    return sorted(sums.values(), key=lambda row: (-row.tokens_after, row.tenant, row.group or ""))


def _new(tx: Transaction, rows: Sequence[Stored], *, known: sa.Select[Any]) -> list[Stored]:
    unique = {(row.tenant, row.id): row for row in rows}
    there = {(tenant, its) for tenant, (its,) in tx.ask_each(known, unique)}
    return [row for key, row in unique.items() if key not in there]


def _add_relayed(tx: Transaction, rows: Sequence[RelayedRow]) -> None:
    if rows:
        tx.many(ADD_RELAYED, [stored(relayed, row) for row in rows])
        tx.ask_each(ADD_RELAYED_TO_DAYS, ((row.tenant, row.id) for row in rows))


def _columns(rows: Sequence[ExchangeRow], home: Mapping[str, str]) -> Columns:
    details: list[Mapping[str, Any]] = [row.detail for row in rows]
    spent: list[Mapping[str, Any]] = [detail.get("summarizer", {}) for detail in details]
    return {
        **columns_of(exchanges, rows),
        "conversation": [home[row.id] for row in rows],
        "detail": [_ENCODER.encode(dict(detail)) if detail else "{}" for detail in details],
        "cost": [detail.get("cost") for detail in details],
        "cost_saved": [detail.get("cost_saved") for detail in details],
        "summaries": [each.get("asked", 0) + each.get("answered", 0) or None for each in spent],
        "summaries_cost": [each.get("dollars") for each in spent],
    }


def _touch_branches(tx: Transaction, rows: Sequence[ExchangeRow | Arrival]) -> dict[str, str]:
    """The conversation of each request by its id; conversations and branches that are missing are made."""
    homes = open_conversations(tx, [(row.tenant, row.conversation, row.name, row.model, row.at) for row in rows])
    home = {row.id: homes.get((row.tenant, row.name), row.conversation) for row in rows}
    given = []
    for (tenant, branch), its in _grouped(rows, lambda row: (row.tenant, row.branch)):
        last, trends = its[-1], [row.trend for row in reversed(its) if row.trend is not None]
        trend = max(trends, key=lambda each: each.at or 0.0, default=None)
        own: dict[str, Any] = {"tenant": tenant, "branch": branch, "conversation": home[last.id], "parent": last.parent}
        own |= {"version": 0, "longest": max(row.length for row in its), "created": last.at, "updated": last.at}
        own |= {"floating": " ".join([digest.hex() for digest in last.floating]) or None}
        given.append(own | {"trend": trend and trend.to_json(), "trend_at": (trend and trend.at) or 0.0})
    tx.many(TOUCH_BRANCH, given)
    return home


def _touch_conversations(tx: Transaction, rows: Sequence[ExchangeRow], home: dict[str, str]) -> None:
    given = []
    for (_, conversation), its in _grouped(rows, lambda row: (row.tenant, home[row.id])):
        last, parents = its[-1], (row.parent_conversation for row in its if row.parent_conversation is not None)
        states = [row.health.health for row in its if row.health is not None]
        own = {"id": conversation, "created": last.at, "updated": last.at, "requests": len(its)}
        own |= {"parent": next(parents, None), "health": states[-1].to_json() if states else None}
        given.append(stored(conversations, last, **own))
    tx.many(TOUCH, given)


def _grouped(rows: Sequence[R], key: Callable[[R], tuple[str, str]]) -> Iterator[tuple[tuple[str, str], list[R]]]:
    return ((place, list(its)) for place, its in groupby(sorted(rows, key=key), key=key))


def _numbers(record: Any, given: Mapping[str, sa.ColumnElement[Any]]) -> list[sa.Label[Any]]:
    """Fields of a record as the database gives them: converting ten thousand rows here takes longer than the query."""
    kinds = {each.name: sa.Double if each.type is float else sa.BigInteger for each in msgspec.structs.fields(record)}
    return [sa.cast(given[name], kind).label(name) for name, kind in kinds.items() if name in given]


def _sums(table: sa.Table) -> dict[str, sa.ColumnElement[Any]]:
    if table is usage_days:
        kept: dict[str, sa.ColumnElement[Any]] = {name: total(table.c[name]) for name in ADDED}
        return kept | {"first": sa.func.min(table.c.first), "last": sa.func.max(table.c.last)}
    is_managed = table is exchanges
    answered = sa.and_(table.c.status >= 200, table.c.status < 400)
    before = exchanges.c.tokens_before if is_managed else relayed.c.usage_prompt
    forwarded = sa.case((exchanges.c.observed, before), else_=exchanges.c.tokens_after) if is_managed else before
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
        "estimated": total(sa.case((exchanges.c.usage_estimated, 1), else_=0)) if is_managed else nothing,
        "first": sa.func.min(table.c.at),
        "last": sa.func.max(table.c.at),
    }


def _step_of(at: sa.Column[float], seconds: float, dialect: str) -> sa.ColumnElement[int]:
    """Which step of time a moment is in, since 1970; a cast alone rounds on PostgreSQL."""
    steps = at / seconds
    return sa.cast(steps if dialect == "sqlite" else sa.func.floor(steps), sa.BigInteger)


def add_up_days(connection: sa.Connection, table: sa.Table) -> None:
    """Add to ``usage_days``, which has to have none of them, all requests that there are in a table."""
    taken = _taken_in_days(connection.dialect.name, table)
    if table is exchanges:
        taken = taken.join(conversations, HOME)
    connection.execute(_adding(lambda _: taken)[connection.dialect.name])


def _taken_in_days(dialect: str, table: sa.Table) -> sa.Select[Any]:
    x = table.c
    day = DAY * _step_of(x.at, DAY, dialect)
    home = x.conversation if table is exchanges else sa.literal(NO_CONVERSATION, CONVERSATION)
    sums = _numbers(UsageRow, _sums(table))
    query = sa.select(x.tenant, home.label("conversation"), day.label("at"), x.model, x.policy, *sums)
    return query.group_by(x.tenant, home, day, x.model, x.policy)


def _without_conversation(_: str) -> sa.Select[Any]:
    d = usage_days.c
    sums = _numbers(UsageRow, _sums(usage_days))
    home = sa.literal(NO_CONVERSATION, CONVERSATION).label("conversation")
    query = sa.select(d.tenant, home, d.at, d.model, d.policy, *sums)
    return query.where(of(usage_days, "tenant", "conversation")).group_by(d.tenant, d.at, d.model, d.policy)


def _adding(taken: Callable[[str], Any]) -> Upsert:
    return overwriting(
        usage_days,
        lambda new, old: {
            **{name: old[name] + new[name] for name in ADDED},
            "first": sa.case((new.first < old.first, new.first), else_=old.first),
            "last": larger(new.last, old.last),
        },
        taken,
    )


ADD_TO_DAYS = _adding(lambda dialect: _taken_in_days(dialect, exchanges).where(among(exchanges.c.id)))
ADD_RELAYED_TO_DAYS = _adding(lambda dialect: _taken_in_days(dialect, relayed).where(among(relayed.c.id)))
ADD_UP_WITHOUT = _adding(_without_conversation)
FORGET_WHOSE = sa.delete(usage_days).where(of(usage_days, "tenant", "conversation"))


def _day(number: int) -> str:
    return dt.datetime.fromtimestamp(DAY * number, tz=dt.UTC).strftime("%Y-%m-%d")


NEWEST = 5_000
STEPS_APART = 400  # at most: to group, SQLite sorts all rows, which takes as long as to add them up


class Beside(msgspec.Struct, frozen=True):
    before: int = 0
    after: int = 0
    cost: float | None = None
    cost_saved: float | None = None
    policy: str = ""
    alerts: int = 0


def beside(tx: Transaction, keys: Sequence[tuple[str, str]]) -> dict[tuple[str, str], Beside]:
    x, took, found = exchanges.c, _sums(exchanges), dict[tuple[str, str], Beside]()
    for some in chunks(keys):
        ids = [conversation for _, conversation in some]
        newest = sa.func.max(x.at).label("newest")
        sums = (took["tokens_before"], took["tokens_after"], sa.func.sum(x.cost), sa.func.sum(x.cost_saved))
        query = sa.select(x.tenant, x.conversation, *sums, newest).where(x.conversation.in_(ids))
        summed = {(row[0], row[1]): tuple(row) for row in tx.execute(query.group_by(x.tenant, x.conversation))}
        last = sa.select(x.tenant, x.conversation, x.policy).where(
            sa.tuple_(x.conversation, x.tenant, x.at).in_([(key[1], key[0], row[6]) for key, row in summed.items()])
        )
        policies = {(row.tenant, row.conversation): row.policy for row in tx.execute(last)} if summed else {}
        a = alerts.c
        open_ = sa.select(a.tenant, a.conversation, sa.func.count()).where(a.closed.is_(None), a.conversation.in_(ids))
        counts = {(row[0], row[1]): int(row[2]) for row in tx.execute(open_.group_by(a.tenant, a.conversation))}
        for key in some:
            _, _, before, after, cost, saved, _ = summed.get(key, (*key, 0, 0, None, None, 0.0))
            found[key] = Beside(int(before), int(after), cost, saved, policies.get(key, ""), counts.get(key, 0))
    return found


class Figures(msgspec.Struct, frozen=True):
    """What managed requests of one step of time came to; ``at`` is when the step began.

    Attributes:
        failed: answered with a status of 400 or above, or not at all; ``refused`` of them because they could not fit.
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

    number = _step_of(x.at, step, tx.dialect)
    counted = _sums(exchanges) | {
        "refused": times(x.outcome == REFUSED),
        "healed": times(sa.and_(x.status.between(200, 399), x.attempts > 1)),
        "degraded": times(x.actions.contains("degraded=")),
        "batches": times(sa.or_(x.evicted > 0, x.strategy != "")),
        "overhead_ms": total(x.overhead_ms),
    }
    query = sa.select(sa.func.min(number), *_numbers(Figures, counted)).where(owned(exchanges, tenant))
    query = query.where(x.at >= sa.bindparam("since"), x.at < sa.bindparam("until"))
    newest = tx.scalar(sa.select(sa.func.max(x.at))) or since
    ends = [since, *(step * n for n in range(int(since // step) + 1, int(newest // step) + 1)), math.inf]
    if tx.dialect != "sqlite" or len(ends) > STEPS_APART:
        ends, query = [since, math.inf], query.group_by(number).order_by(number)
    rows = [row for begin, end in pairwise(ends) for row in tx.execute(query, {"since": begin, "until": end}).all()]
    return [Figures(step * at, *sums) for at, *sums in rows if at is not None]


def dearest(tx: Transaction, tenant: str | None, *, since: float, limit: int) -> list[tuple[ConversationRow, float]]:
    x = exchanges.c
    d = usage_days.c
    morrow = DAY * (since // DAY + 1)
    begun = sa.select(x.tenant, x.conversation, x.cost).where(x.at >= since, x.at < morrow, owned(exchanges, tenant))
    whole = sa.select(d.tenant, d.conversation, d.cost).where(
        d.at >= morrow, d.conversation != NO_CONVERSATION, owned(usage_days, tenant)
    )
    each = sa.union_all(begun, whole).subquery().c
    cost = total(each.cost)
    query = sa.select(each.tenant, each.conversation, cost).group_by(each.tenant, each.conversation)
    query = query.having(cost > 0).order_by(cost.desc(), each.conversation).limit(limit)
    paid = {(owner, its): float(dollars) for owner, its, dollars in tx.execute(query)}
    listed = conversations_.listing_of(tenant).where(conversations.c.id.in_([its for _, its in paid]))
    rows = {(row.tenant, row.id): conversations_.row_of(row) for row in tx.execute(listed)} if paid else {}
    return [(rows[key], dollars) for key, dollars in paid.items() if key in rows]


def overheads(tx: Transaction, tenant: str | None, *, since: float) -> list[float]:
    query = sa.select(exchanges.c.overhead_ms).where(exchanges.c.at >= since, owned(exchanges, tenant))
    return sorted(tx.scalars(query.order_by(exchanges.c.at.desc()).limit(NEWEST)))


def passed(tx: Transaction, tenant: str | None, *, limit: int, since: float) -> list[dict[str, Any]]:
    x = exchanges.c
    about = (x.id, x.tenant, x.conversation, conversations.c.name, x.at, x.model, x.policy, x.status, x.outcome)
    figures = (x.tokens_before, x.tokens_after, x.pressure, x.zone, x.actions)
    query = sa.select(*about, *figures).join(conversations, HOME).where(x.at >= since, owned(exchanges, tenant))
    rows = tx.execute(query.order_by(x.at.desc(), x.id.desc()).limit(limit))
    return [dict(row) for row in rows.mappings()]
