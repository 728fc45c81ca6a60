"""Requests that went through: written in batches after their answers, with the chain ends that the next is known by."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import sqlalchemy as sa

from policies.pressure import Trend
from proxy.store.audit import append
from proxy.store.audit_events import REFUSED, of_evaluation, of_exchange
from proxy.store.bulk import run_many
from proxy.store.conversations import TOUCH_CHAIN, open_conversations
from proxy.store.evictions import mark_asked_again
from proxy.store.health import add_checkups, follow_others, rate
from proxy.store.paging import Place, ordered
from proxy.store.records import Arrival, ConversationRow, ExchangeRow, RelayedRow
from proxy.store.tables import branches, conversations, exchanges, keep_first, keep_last, plain_text, relayed

SAME_NAME = (
    "id",
    "tenant",
    "branch",
    "parent",
    "at",
    "model",
    "policy",
    "chain_end",
    "length",
    "status",
    "outcome",
    "tokens_before",
    "tokens_after",
    "pressure",
    "zone",
    "actions",
    "usage_prompt",
    "usage_completion",
    "usage_cached",
    "overhead_ms",
    "duration_ms",
    "attempts",
    "action",
    "observed",
    "evicted",
    "strategy",
    "pressure_before",
    "velocity",
    "turns_until_red",
)
TOUCH_BRANCH = keep_last(branches, greatest=("longest", "updated", "trend_at"), newest={"trend": "trend_at"})
ADD = sa.insert(exchanges)
ADD_RELAYED = keep_first(relayed)
_ENCODER = json.JSONEncoder(separators=(",", ":"))
KNOWN = sa.select(exchanges.c.id).where(
    exchanges.c.tenant == sa.bindparam("tenant"), exchanges.c.id.in_(sa.bindparam("ids", expanding=True))
)
TOUCH = (
    sa.update(conversations)
    .where(conversations.c.tenant == sa.bindparam("t"), conversations.c.id == sa.bindparam("c"))
    .values(
        updated=sa.case(
            (conversations.c.updated > sa.bindparam("now"), conversations.c.updated), else_=sa.bindparam("now")
        ),
        model=sa.bindparam("new_model"),
        requests=conversations.c.requests + sa.bindparam("more"),
        tokens_before=sa.bindparam("new_tokens_before"),
        tokens_after=sa.bindparam("new_tokens_after"),
        token_limit=sa.bindparam("new_token_limit"),
        zone=sa.bindparam("new_zone"),
        actions=sa.bindparam("new_actions"),
        parent=sa.func.coalesce(conversations.c.parent, sa.bindparam("part_of", type_=sa.Text)),
        closed=sa.case((conversations.c.closed < sa.bindparam("now"), None), else_=conversations.c.closed),
    )
)


def arrive(connection: sa.Connection, arrival: Arrival) -> str:
    """Have the next request find its branch by this one; the conversation's id, where others gave its name first."""
    given = [(arrival.tenant, arrival.conversation, arrival.name, arrival.model, arrival.at)]
    home = open_conversations(connection, given).get((arrival.tenant, arrival.name), arrival.conversation)
    _touch_branches(connection, [arrival], {arrival.id: home})
    tips = [
        {"tenant": arrival.tenant, "hash": end, "branch": arrival.branch, "length": length, "at": arrival.at}
        for end, length in arrival.ends
    ]
    run_many(connection, TOUCH_CHAIN[connection.dialect.name], tips)
    return home


def record(
    connection: sa.Connection, batch: Sequence[ExchangeRow | RelayedRow], *, shared: bool = False
) -> Sequence[ExchangeRow]:
    """The exchanges of a batch that were stored; a row with an id that is there already is not counted twice.

    In a ``shared`` store their checkups are made anew, from what all servers know of a conversation.
    """
    run_many(
        connection, ADD_RELAYED[connection.dialect.name], [_relayed(r) for r in batch if isinstance(r, RelayedRow)]
    )
    rows = _new(connection, [row for row in batch if isinstance(row, ExchangeRow)])
    if not rows:
        return rows
    homes = open_conversations(connection, [(r.tenant, r.conversation, r.name, r.model, r.at) for r in rows])
    home = {r.id: homes.get((r.tenant, r.name), r.conversation) for r in rows}
    _touch_branches(connection, rows, home)
    _touch_chains(connection, rows)
    _touch_conversations(connection, rows, home)
    mark_asked_again(connection, rows)
    if shared:
        rows = follow_others(connection, rows, home)
    add_checkups(connection, rows, home)
    run_many(
        connection,
        ADD,
        [
            {name: getattr(row, name) for name in SAME_NAME}
            | {
                "conversation": home[row.id],
                "token_limit": row.limit,
                "detail": _ENCODER.encode(dict(row.detail)) if row.detail else "{}",
                **_spent(row.detail),
            }
            for row in rows
        ],
    )
    audited = [row for row in rows if row.events or row.refusal or row.outcome == REFUSED or _has_alerts(row)]
    append(connection, [event for row in audited for event in of_exchange(row, conversation=home[row.id])])
    return rows


def _has_alerts(row: ExchangeRow) -> bool:
    return row.health is not None and bool(row.health.opened or row.health.closed)


def timeline(
    connection: sa.Connection,
    of: ConversationRow,
    *,
    limit: int,
    since: float | None = None,
    after: Place | None = None,
) -> list[ExchangeRow]:
    """The newest ``limit`` exchanges of a conversation, oldest first.

    ``since`` leaves those from then on, ``after`` those that are older than one of which this is ``at`` and ``id``.
    """
    query = sa.select(exchanges).where(exchanges.c.tenant == of.tenant, exchanges.c.conversation == of.id)
    if since is not None:
        query = query.where(exchanges.c.at >= since)
    query = ordered(query, ((exchanges.c.at, True), (exchanges.c.id, True)), after=after, limit=limit)
    found = [_exchange(row, of.name) for row in connection.execute(query)]
    return found[::-1]


def annotate(connection: sa.Connection, tenant: str, exchange: str, facts: Mapping[str, object]) -> bool:
    """Whether facts could be added to the detail of an exchange that is stored."""
    where = (exchanges.c.tenant == tenant, exchanges.c.id == exchange)
    found = connection.scalar(sa.select(exchanges.c.detail).where(*where))
    if found is None:
        return False
    detail = json.loads(found) | dict(facts)
    connection.execute(sa.update(exchanges).where(*where).values(detail=_ENCODER.encode(detail)))
    return True


def evaluated(connection: sa.Connection, tenant: str, exchange: str, fidelity: Mapping[str, object], at: float) -> bool:
    """Whether what the evaluation of an exchange's summary came to could be added to it, with a row in the audit.

    Where something was judged, the conversation's health has it from now on.
    """
    where = (exchanges.c.tenant == tenant, exchanges.c.id == exchange)
    home = connection.execute(sa.select(exchanges.c.conversation, exchanges.c.branch).where(*where)).first()
    if home is None or not annotate(connection, tenant, exchange, {"fidelity": fidelity}):
        return False
    score = fidelity.get("score")
    if isinstance(score, float):
        rate(connection, tenant, home.conversation, score)
    append(
        connection,
        [of_evaluation(tenant, home.conversation, branch=home.branch, request=exchange, at=at, facts=fidelity)],
    )
    return True


def _new(connection: sa.Connection, rows: Sequence[ExchangeRow]) -> list[ExchangeRow]:
    unique = {(row.tenant, row.id): row for row in rows}
    known: set[tuple[str, str]] = set()
    for tenant in {row.tenant for row in rows}:
        ids = [row.id for row in rows if row.tenant == tenant]
        found = connection.scalars(KNOWN, {"tenant": tenant, "ids": ids})
        known |= {(tenant, found_id) for found_id in found}
    return [row for key, row in unique.items() if key not in known]


def _touch_branches(connection: sa.Connection, rows: Sequence[ExchangeRow | Arrival], home: dict[str, str]) -> None:
    latest: dict[tuple[str, str], dict[str, object]] = {}
    longest: dict[tuple[str, str], int] = {}
    trends: dict[tuple[str, str], Trend] = {}
    for row in rows:
        key = (row.tenant, row.branch)
        longest[key] = max(longest.get(key, 0), row.length)
        if row.trend is not None and (key not in trends or (row.trend.at or 0.0) >= (trends[key].at or 0.0)):
            trends[key] = row.trend
        latest[key] = {
            "tenant": row.tenant,
            "branch": row.branch,
            "conversation": home[row.id],
            "parent": row.parent,
            "version": 0,
            "longest": longest[key],
            "created": row.at,
            "updated": row.at,
            "trend": None,
            "trend_at": 0.0,
        }
    for key, trend in trends.items():
        latest[key] |= {"trend": trend.to_json(), "trend_at": trend.at or 0.0}
    run_many(connection, TOUCH_BRANCH[connection.dialect.name], [latest[key] for key in sorted(latest)])


def _touch_chains(connection: sa.Connection, rows: Sequence[ExchangeRow]) -> None:
    ends = {
        (row.tenant, end, row.branch): {
            "tenant": row.tenant,
            "hash": end,
            "branch": row.branch,
            "length": length,
            "at": row.at,
        }
        for row in rows
        for end, length in row.ends or ((row.chain_end, row.length),)
        if end and length > 0
    }
    run_many(connection, TOUCH_CHAIN[connection.dialect.name], [ends[key] for key in sorted(ends)])


def _touch_conversations(connection: sa.Connection, rows: Sequence[ExchangeRow], home: dict[str, str]) -> None:
    latest: dict[tuple[str, str], ExchangeRow] = {}
    counts: dict[tuple[str, str], int] = {}
    parents: dict[tuple[str, str], str] = {}
    for row in rows:
        key = (row.tenant, home[row.id])
        counts[key] = counts.get(key, 0) + 1
        latest[key] = row
        if row.parent_conversation is not None:
            parents.setdefault(key, plain_text(row.parent_conversation))
    run_many(
        connection,
        TOUCH,
        [
            {
                "t": key[0],
                "c": key[1],
                "now": latest[key].at,
                "new_model": latest[key].model,
                "more": counts[key],
                "new_tokens_before": latest[key].tokens_before,
                "new_tokens_after": latest[key].tokens_after,
                "new_token_limit": latest[key].limit,
                "new_zone": latest[key].zone,
                "new_actions": latest[key].actions,
                "part_of": parents.get(key),
            }
            for key in sorted(latest)
        ],
    )


def _relayed(row: RelayedRow) -> dict[str, object]:
    return asdict(row) | {"model": plain_text(row.model)}


def _spent(detail: Mapping[str, Any]) -> dict[str, object]:
    """What is added up of an exchange's detail."""
    summaries = detail.get("summarizer", {})
    return {
        "cost": detail.get("cost"),
        "cost_saved": detail.get("cost_saved"),
        "summaries": summaries.get("asked", 0) + summaries.get("answered", 0) or None,
        "summaries_cost": summaries.get("dollars"),
    }


def _exchange(row: sa.Row[*tuple[Any, ...]], name: str) -> ExchangeRow:
    return ExchangeRow(
        **{name: getattr(row, name) for name in SAME_NAME},
        conversation=row.conversation,
        name=name,
        limit=row.token_limit,
        detail=json.loads(row.detail),
    )
