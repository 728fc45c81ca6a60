"""Requests that went through: written in batches after their answers, with the chain ends by which
the next one is recognised.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, TypeVar

import sqlalchemy as sa

from proxy.store import inspections
from proxy.store.answers import add_answers, add_provider_ids
from proxy.store.audit import append, of_exchange
from proxy.store.budgets import settle
from proxy.store.conversations import add_checkups, follow_others, open_conversations, touch_chains
from proxy.store.records import (
    AnswerRow,
    Arrival,
    ConversationRow,
    ExchangeRow,
    ProviderIdsRow,
    RelayedRow,
)
from proxy.store.schema import branches, conversations, exchanges, relayed
from proxy.store.transaction import (
    Place,
    Transaction,
    among,
    larger,
    ordered,
    overwriting,
    owned,
    recorded,
    stored,
)
from proxy.store.usage import add_to_days

R = TypeVar("R")
Stored = TypeVar("Stored", ExchangeRow, RelayedRow)
TOUCH_BRANCH = overwriting(
    branches,
    lambda new, old: {
        **{name: larger(new[name], old[name]) for name in ("longest", "updated", "trend_at")},
        "floating": sa.func.coalesce(new.floating, old.floating),
        "trend": sa.case(
            (sa.and_(new.trend.is_not(None), new.trend_at >= old.trend_at), new.trend),
            else_=old.trend,
        ),
    },
)
COUNTED = (ExchangeRow, RelayedRow)
ADD = sa.insert(exchanges)
ADD_RELAYED = sa.insert(relayed)
_ENCODER = json.JSONEncoder(separators=(",", ":"))
KNOWN = sa.select(exchanges.c.id).where(among(exchanges.c.id))
KNOWN_RELAYED = sa.select(relayed.c.id).where(among(relayed.c.id))
TOUCH = overwriting(
    conversations,
    lambda new, old: {
        **{
            name: new[name]
            for name in ("model", "tokens_before", "tokens_after", "limit", "zone", "actions")
        },
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
    """The exchanges of a batch that were stored; a row with an id that is there already is not
    counted twice.

    In a ``shared`` store their checkups are recomputed from what all servers know of a
    conversation.
    """
    settle(tx, [row.id for row in batch if isinstance(row, COUNTED) and row.reserved])
    add_answers(tx, [row for row in batch if isinstance(row, AnswerRow)])
    add_provider_ids(tx, [row for row in batch if isinstance(row, ProviderIdsRow)])
    _add_relayed(
        tx, _new(tx, [row for row in batch if isinstance(row, RelayedRow)], known=KNOWN_RELAYED)
    )
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
    tx.many(ADD, [_values(row, home[row.id]) for row in rows])
    add_to_days(tx, exchanges, rows)
    inspections.keep(
        tx, [(row, row.inspection, home[row.id]) for row in rows if row.inspection is not None]
    )
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

    ``since`` leaves those from then on, ``after`` those older than one of which this is ``at`` and
    ``id``.
    """
    query = sa.select(exchanges).where(
        owned(exchanges, conversation.tenant, conversation=conversation.id)
    )
    if since is not None:
        query = query.where(exchanges.c.at >= since)
    query = ordered(
        query, ((exchanges.c.at, True), (exchanges.c.id, True)), after=after, limit=limit
    )
    found = [
        (row, {"name": conversation.name, "detail": json.loads(row.detail)})
        for row in tx.execute(query)
    ]
    return [recorded(ExchangeRow, exchanges, row, **more) for row, more in reversed(found)]


def _new(tx: Transaction, rows: Sequence[Stored], *, known: sa.Select[Any]) -> list[Stored]:
    unique = {(row.tenant, row.id): row for row in rows}
    there = {(tenant, its) for tenant, (its,) in tx.ask_each(known, unique)}
    return [row for key, row in unique.items() if key not in there]


def _add_relayed(tx: Transaction, rows: Sequence[RelayedRow]) -> None:
    if rows:
        tx.many(ADD_RELAYED, [stored(relayed, row) for row in rows])
        add_to_days(tx, relayed, rows)


def _values(row: ExchangeRow, home: str) -> dict[str, Any]:
    detail: Mapping[str, Any] = row.detail
    spent: Mapping[str, Any] = detail.get("summarizer", {})
    return stored(
        exchanges,
        row,
        conversation=home,
        detail=_ENCODER.encode(dict(detail)) if detail else "{}",
        cost=detail.get("cost"),
        cost_saved=detail.get("cost_saved"),
        summaries=spent.get("asked", 0) + spent.get("answered", 0) or None,
        summaries_cost=spent.get("dollars"),
    )


def _touch_branches(tx: Transaction, rows: Sequence[ExchangeRow | Arrival]) -> dict[str, str]:
    """The conversation of each request by its id; conversations and branches that are missing are
    made.
    """
    homes = open_conversations(
        tx, [(row.tenant, row.conversation, row.name, row.model, row.at) for row in rows]
    )
    home = {row.id: homes.get((row.tenant, row.name), row.conversation) for row in rows}
    given = []
    for (tenant, branch), its in _grouped(rows, lambda row: (row.tenant, row.branch)):
        last = its[-1]
        trends = [row.trend for row in reversed(its) if row.trend is not None]
        trend = max(trends, key=lambda each: each.at or 0.0, default=None)
        own: dict[str, Any] = {
            "tenant": tenant,
            "branch": branch,
            "conversation": home[last.id],
            "parent": last.parent,
        }
        own |= {
            "version": 0,
            "longest": max(row.length for row in its),
            "created": last.at,
            "updated": last.at,
        }
        own |= {"floating": " ".join([digest.hex() for digest in last.floating]) or None}
        given.append(
            own | {"trend": trend and trend.to_json(), "trend_at": (trend and trend.at) or 0.0}
        )
    tx.many(TOUCH_BRANCH, given)
    return home


def _touch_conversations(
    tx: Transaction, rows: Sequence[ExchangeRow], home: dict[str, str]
) -> None:
    given = []
    for (_, conversation), its in _grouped(rows, lambda row: (row.tenant, home[row.id])):
        last = its[-1]
        parents = (row.parent_conversation for row in its if row.parent_conversation is not None)
        states = [row.health.health for row in its if row.health is not None]
        own = {"id": conversation, "created": last.at, "updated": last.at, "requests": len(its)}
        own |= {"parent": next(parents, None), "health": states[-1].to_json() if states else None}
        given.append(stored(conversations, last, **own))
    tx.many(TOUCH, given)


def _grouped(
    rows: Sequence[R], key: Callable[[R], tuple[str, str]]
) -> Iterator[tuple[tuple[str, str], list[R]]]:
    return ((place, list(its)) for place, its in groupby(sorted(rows, key=key), key=key))
