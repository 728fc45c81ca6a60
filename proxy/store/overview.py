"""What people look at: figures of all requests over time, and what stands beside conversations in a list."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import sqlalchemy as sa

from proxy.store.conversations import listing_of, row_of
from proxy.store.records import ConversationRow
from proxy.store.schema import alerts, conversations, exchanges, recorded, same
from proxy.store.transaction import Transaction, chunks

NEWEST = 5_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What managed requests of one step of time came to; ``at`` is when the step began.

    Attributes:
        failed: answered with a status of 400 or above, or not at all; ``refused`` of them because they could not fit.
        healed: answered although the upstream had said once that they do not fit.
        degraded: managed with less than there should be.
        batches: of edits, or summaries.
        before: tokens as clients sent them, ``after`` those that went up.
        overhead_ms: sum of the milliseconds before each went up.
    """

    at: float
    requests: int
    failed: int
    refused: int
    healed: int
    degraded: int
    batches: int
    before: int
    after: int
    prompt: int
    cached: int
    completion: int
    priced: int
    cost: float
    cost_saved: float
    overhead_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    before: int = 0
    after: int = 0
    cost: float | None = None
    cost_saved: float | None = None
    policy: str = ""
    alerts: int = 0


def figures(tx: Transaction, tenant: str | None, *, since: float, step: float) -> list[Figures]:
    x = exchanges.c
    answered = sa.and_(x.status >= 200, x.status < 400)
    forwarded = sa.case((x.observed, x.tokens_before), else_=x.tokens_after)

    def times(condition: sa.ColumnElement[bool]) -> sa.ColumnElement[int]:
        return _sum(sa.case((condition, 1), else_=0))

    part = x.at / step
    number = sa.cast(part if tx.dialect == "sqlite" else sa.func.floor(part), sa.BigInteger).label("number")
    said = {
        "requests": sa.func.count(),
        "failed": times(sa.not_(answered)),
        "refused": times(x.outcome == "context_length_exceeded"),
        "healed": times(sa.and_(answered, x.attempts > 1)),
        "degraded": times(x.actions.contains("degraded=")),
        "batches": times(sa.or_(x.evicted > 0, x.strategy != "")),
        "before": _sum(sa.case((answered, x.tokens_before), else_=0)),
        "after": _sum(sa.case((answered, forwarded), else_=0)),
        "prompt": _sum(x.usage_prompt),
        "cached": _sum(x.usage_cached),
        "completion": _sum(x.usage_completion),
        "priced": sa.func.count(x.cost),
        "cost": _sum(x.cost),
        "cost_saved": _sum(x.cost_saved),
        "overhead_ms": _sum(x.overhead_ms),
    }
    query = sa.select(number, *(value.label(name) for name, value in said.items())).where(x.at >= since)
    if tenant is not None:
        query = query.where(x.tenant == tenant)
    kinds = {each.name: float if each.type is float else int for each in fields(Figures)}
    found = []
    for row in tx.execute(query.group_by(number).order_by(number)):
        values: dict[str, Any] = {name: kinds[name](getattr(row, name)) for name in said}
        found.append(Figures(at=step * row.number, **values))
    return found


def overheads(tx: Transaction, tenant: str | None, *, since: float) -> list[float]:
    query = sa.select(exchanges.c.overhead_ms).where(exchanges.c.at >= since)
    if tenant is not None:
        query = query.where(exchanges.c.tenant == tenant)
    return sorted(tx.scalars(query.order_by(exchanges.c.at.desc()).limit(NEWEST)))


def beside(tx: Transaction, keys: Sequence[tuple[str, str]]) -> dict[tuple[str, str], Beside]:
    x, found = exchanges.c, dict[tuple[str, str], Beside]()
    for some in chunks(keys):
        ids = [conversation for _, conversation in some]
        newest = sa.func.max(x.at).label("newest")
        sums = (_sum(x.tokens_before), _sum(x.tokens_after), sa.func.sum(x.cost), sa.func.sum(x.cost_saved))
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
            found[key] = Beside(
                before=int(before),
                after=int(after),
                cost=cost,
                cost_saved=saved,
                policy=policies.get(key, ""),
                alerts=counts.get(key, 0),
            )
    return found


def fullest(tx: Transaction, tenant: str | None, *, since: float, limit: int) -> list[ConversationRow]:
    share = conversations.c.tokens_after * 1.0 / conversations.c.limit
    query = listing_of(tenant).where(conversations.c.updated >= since, conversations.c.limit > 0)
    query = query.where(conversations.c.closed.is_(None))
    return [row_of(row) for row in tx.execute(query.order_by(share.desc(), conversations.c.id).limit(limit))]


def dearest(tx: Transaction, tenant: str | None, *, since: float, limit: int) -> list[tuple[ConversationRow, float]]:
    x = exchanges.c
    cost = _sum(x.cost)
    query = sa.select(x.tenant, x.conversation, cost.label("cost")).where(x.at >= since, x.cost > 0)
    if tenant is not None:
        query = query.where(x.tenant == tenant)
    query = query.group_by(x.tenant, x.conversation).order_by(cost.desc(), x.conversation).limit(limit)
    paid = {(row.tenant, row.conversation): float(row.cost) for row in tx.execute(query)}
    listed = listing_of(tenant).where(conversations.c.id.in_([key[1] for key in paid]))
    rows = {(row.tenant, row.id): row_of(row) for row in tx.execute(listed)} if paid else {}
    return [(rows[key], dollars) for key, dollars in paid.items() if key in rows]


@dataclass(frozen=True, slots=True, kw_only=True)
class Passed:
    id: str
    tenant: str
    conversation: str
    name: str
    at: float
    model: str
    policy: str
    status: int
    outcome: str
    tokens_before: int
    tokens_after: int
    pressure: float
    zone: str
    actions: str


def passed(tx: Transaction, tenant: str | None, *, limit: int, since: float) -> list[Passed]:
    query = sa.select(exchanges, conversations.c.name).join(
        conversations,
        sa.and_(same(conversations, exchanges, "tenant"), conversations.c.id == exchanges.c.conversation),
    )
    query = query.where(exchanges.c.at >= since)
    if tenant is not None:
        query = query.where(exchanges.c.tenant == tenant)
    query = query.order_by(exchanges.c.at.desc(), exchanges.c.id.desc()).limit(limit)
    return [recorded(Passed, exchanges, row, name=row.name) for row in tx.execute(query)]


def _sum(value: sa.ColumnElement[object]) -> sa.ColumnElement[int]:
    return sa.func.coalesce(sa.func.sum(value), 0)
