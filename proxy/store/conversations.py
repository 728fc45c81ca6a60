"""A conversation as people list it, and its health: a state, the newest snapshots, and
alerts as episodes.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import sqlalchemy as sa

from policies.health import KEPT, Health, Snapshot, check
from proxy.store.audit import append_if
from proxy.store.chain import AuditEvent, AuditType
from proxy.store.ledger import key_of
from proxy.store.packing import plain_text
from proxy.store.records import AlertRow, Arrival, Change, ConversationRow, ExchangeRow
from proxy.store.schema import (
    OF_CONVERSATION,
    alerts,
    branches,
    chains,
    conversations,
    exchanges,
    health_snapshots,
)
from proxy.store.transaction import (
    Place,
    Rows,
    Transaction,
    among,
    keep_first,
    keep_last,
    of,
    ordered,
    owned,
    recorded,
    stored,
)

MAX_ALERTS = 200

NAMED = sa.select(conversations.c.id).where(of(conversations, "tenant", "name"))
ADD_CONVERSATION = keep_first(conversations)
TOUCH_CHAIN = keep_last(chains, "at")
HOMES = sa.select(conversations.c.name, conversations.c.id).where(among(conversations.c.name))
ADD_SNAPSHOT = keep_first(health_snapshots)
ADD_ALERT = keep_first(alerts)
HOLD_STATES = (
    sa.select(conversations.c.id, conversations.c.health)
    .where(among(conversations.c.id))
    .order_by(conversations.c.id)
    .with_for_update(key_share=True)
)
CLOSE_ALL = sa.update(alerts).where(of(alerts, "tenant", "conversation"), alerts.c.closed.is_(None))
CLOSE_ALL = CLOSE_ALL.values(closed=sa.bindparam("now"))
CLOSE = CLOSE_ALL.where(of(alerts, "at", "kind"))


def _oldest(table: sa.Table, most: int) -> sa.Delete:
    newest = table.alias()
    border = (
        sa.select(newest.c.at)
        .where(of(newest, "tenant", "conversation"))
        .order_by(newest.c.at.desc())
    )
    border = border.limit(1).offset(most)
    return sa.delete(table).where(
        of(table, "tenant", "conversation"), table.c.at <= border.scalar_subquery()
    )


PRUNE_SNAPSHOTS = _oldest(health_snapshots, KEPT)
PRUNE_ALERTS = _oldest(alerts, MAX_ALERTS)


def named(tx: Transaction, tenant: str, name: str) -> str | None:
    return tx.scalar(NAMED, {"of_tenant": tenant, "of_name": name})


class Narrowing(msgspec.Struct, frozen=True, kw_only=True):
    name: str | None = None
    model: str | None = None
    zone: str | None = None
    policy: str | None = None
    closed: bool | None = None

    def of(self, query: Rows) -> Rows:
        columns = conversations.c
        if self.closed is not None:
            query = query.where(
                columns.closed.is_not(None) if self.closed else columns.closed.is_(None)
            )
        if self.name:
            query = query.where(columns.name.icontains(plain_text(self.name), autoescape=True))
        for column, wanted in ((columns.model, self.model), (columns.zone, self.zone)):
            if wanted is not None:
                query = query.where(column == plain_text(wanted))
        if self.policy is not None:
            mine = (exchanges.c.tenant == columns.tenant, exchanges.c.conversation == columns.id)
            newest = (
                sa.select(exchanges.c.policy).where(*mine).order_by(exchanges.c.at.desc()).limit(1)
            )
            query = query.where(newest.scalar_subquery() == plain_text(self.policy))
        return query


ANY = Narrowing()


def listed(
    tx: Transaction,
    tenant: str | None,
    *,
    limit: int = 50,
    only: Narrowing = ANY,
    after: Place | None = None,
) -> list[ConversationRow]:
    """The tenant's conversations, or with None everybody's, the one used last first.

    ``after`` leaves those that follow one of which this is ``updated``, ``id`` and ``tenant``.
    """
    query = only.of(listing_of(tenant))
    columns = conversations.c
    order = ((columns.updated, True), (columns.id, False), (columns.tenant, False))
    return [row_of(row) for row in tx.execute(ordered(query, order, after=after, limit=limit))]


def one(tx: Transaction, tenant: str | None, name_or_id: str) -> ConversationRow | None:
    """The conversation of this name, the one used last of several tenants'; where there is none,
    that of this id.
    """
    columns = conversations.c
    is_named = columns.name == name_or_id
    meant = listing_of(tenant).where(sa.or_(is_named, columns.id == name_or_id))
    row = tx.execute(meant.order_by(is_named.desc(), columns.updated.desc()).limit(1)).first()
    return None if row is None else row_of(row)


def close_conversation(tx: Transaction, conversation: ConversationRow, at: float) -> bool:
    tx.execute(CLOSE_ALL, key_of(conversation.tenant, conversation.id) | {"now": at})
    mine = owned(conversations, conversation.tenant, id=conversation.id)
    event = AuditEvent(conversation.tenant, at, AuditType.CLOSE, conversation.id)
    return append_if(tx, sa.update(conversations).where(mine).values(closed=at), event)


def open_conversations(
    tx: Transaction, rows: Sequence[tuple[str, str, str, str, float]]
) -> dict[tuple[str, str], str]:
    homes = _homes(tx, rows)
    known = {row[:2]: row for row in rows if (row[0], row[2]) not in homes}
    counts = {
        "requests": 0,
        "tokens_before": 0,
        "tokens_after": 0,
        "limit": 0,
        "zone": "green",
        "actions": "none",
    }
    fresh = [
        {
            "tenant": tenant,
            "id": conversation,
            "name": name,
            "created": at,
            "updated": at,
            "model": model,
            **counts,
        }
        for tenant, conversation, name, model, at in known.values()
    ]
    tx.many(ADD_CONVERSATION, fresh)
    return homes | _homes(tx, list(known.values()))


def _homes(
    tx: Transaction, rows: Sequence[tuple[str, str, str, str, float]]
) -> dict[tuple[str, str], str]:
    found = tx.ask_each(HOMES, ((tenant, name) for tenant, _, name, *_ in rows))
    return {(tenant, name): home for tenant, (name, home) in found}


def touch_chains(
    tx: Transaction,
    found: Iterable[tuple[Change | Arrival | ExchangeRow, Iterable[tuple[bytes, int]]]],
) -> None:
    rows = {
        (by.tenant, end, by.branch): {
            "tenant": by.tenant,
            "hash": end,
            "branch": by.branch,
            "length": length,
            "at": by.at,
        }
        for by, ends in found
        for end, length in ends
        if end and length > 0
    }
    tx.many(TOUCH_CHAIN, [rows[key] for key in sorted(rows)])


def follow_others(
    tx: Transaction, rows: Sequence[ExchangeRow], home: Mapping[str, str]
) -> list[ExchangeRow]:
    """The rows, each with the new state of its conversation as other servers have left it; no other
    server changes it meanwhile.
    """
    found = tx.ask_each(HOLD_STATES, ((row.tenant, home[row.id]) for row in rows))
    known = {(tenant, its): Health.from_json(state or "") for tenant, (its, state) in found}
    followed = list[ExchangeRow]()
    for row in rows:
        if (
            row.health is not None
            and row.health.sample is not None
            and row.health.rules is not None
        ):
            key = (row.tenant, home[row.id])
            checkup = check(known.get(key), row.health.sample, row.health.rules)
            known[key] = checkup.health
            row = msgspec.structs.replace(row, health=checkup)
        followed.append(row)
    return followed


def add_checkups(tx: Transaction, rows: Sequence[ExchangeRow], home: Mapping[str, str]) -> None:
    found = [
        ((row.tenant, home[row.id]), row, row.health) for row in rows if row.health is not None
    ]
    if not found:
        return
    # whatever is open of one that begins belongs to a process that is gone
    tx.many(
        CLOSE_ALL,
        [key_of(*key) | {"now": row.at} for key, row, checkup in found if checkup.is_first],
    )
    tx.many(
        ADD_SNAPSHOT,
        [
            stored(
                health_snapshots,
                checkup.snapshot,
                tenant=tenant,
                conversation=conversation,
                id=row.id,
            )
            for (tenant, conversation), row, checkup in found
        ],
    )
    tx.many(
        ADD_ALERT,
        [
            stored(alerts, alert, tenant=tenant, conversation=conversation)
            for (tenant, conversation), _, checkup in found
            for alert in checkup.opened
        ],
    )
    closed = [
        (key_of(*key), row.at, episode) for key, row, checkup in found for episode in checkup.closed
    ]
    tx.many(
        CLOSE,
        [{**key, "of_at": each.at, "of_kind": each.kind, "now": at} for key, at, each in closed],
    )
    long = {key for key, _, checkup in found if checkup.health.requests > KEPT}
    tx.many(PRUNE_SNAPSHOTS, [key_of(*key) for key in sorted(long)])
    tx.many(
        PRUNE_ALERTS,
        [key_of(*key) for key in sorted({key for key, _, checkup in found if checkup.opened})],
    )


def snapshots(
    tx: Transaction, conversation: ConversationRow, *, limit: int = KEPT
) -> list[Snapshot]:
    table = health_snapshots
    query = sa.select(table).where(owned(table, conversation.tenant, conversation=conversation.id))
    rows = tx.execute(query.order_by(table.c.at.desc(), table.c.id.desc()).limit(limit))
    return [recorded(Snapshot, table, row) for row in rows][::-1]


def alerts_of(
    tx: Transaction, conversation: ConversationRow, *, limit: int = MAX_ALERTS
) -> list[AlertRow]:
    query = _listing().where(owned(alerts, conversation.tenant, conversation=conversation.id))
    return _listed(tx, query, limit)


def open_alerts(
    tx: Transaction, tenant: str | None, *, limit: int = 200, after: Place | None = None
) -> tuple[list[AlertRow], dict[str, int]]:
    are_meant = sa.and_(alerts.c.closed.is_(None), owned(alerts, tenant))
    counted = tx.execute(
        sa.select(alerts.c.level, sa.func.count()).where(are_meant).group_by(alerts.c.level)
    )
    counts = {level: int(count) for level, count in counted}
    return _listed(tx, _listing().where(are_meant), limit, after), counts


def _listing() -> Rows:
    mine = sa.and_(
        conversations.c.tenant == alerts.c.tenant, conversations.c.id == alerts.c.conversation
    )
    return sa.select(alerts, conversations.c.name).join(conversations, mine)


def _listed(tx: Transaction, query: Rows, limit: int, after: Place | None = None) -> list[AlertRow]:
    order = (
        (alerts.c.at, True),
        (alerts.c.kind, False),
        (alerts.c.tenant, False),
        (conversations.c.name, False),
    )
    rows = tx.execute(ordered(query, order, after=after, limit=limit))
    return [recorded(AlertRow, alerts, row, conversation=row.name) for row in rows]


def listing_of(tenant: str | None) -> Rows:
    count = (
        sa.select(sa.func.count()).select_from(branches).where(OF_CONVERSATION).scalar_subquery()
    )
    version = (
        sa.select(sa.func.coalesce(sa.func.max(branches.c.version), 0))
        .where(OF_CONVERSATION)
        .scalar_subquery()
    )
    query: Rows = sa.select(conversations, count.label("branches"), version.label("version"))
    return query.where(owned(conversations, tenant))


def row_of(row: sa.Row[*tuple[Any, ...]]) -> ConversationRow:
    return recorded(ConversationRow, conversations, row, branches=row.branches, version=row.version)


def fullest(
    tx: Transaction, tenant: str | None, *, since: float, limit: int
) -> list[ConversationRow]:
    share = conversations.c.tokens_after * 1.0 / conversations.c.limit
    query = listing_of(tenant).where(conversations.c.updated >= since, conversations.c.limit > 0)
    query = query.where(conversations.c.closed.is_(None))
    return [
        row_of(row)
        for row in tx.execute(query.order_by(share.desc(), conversations.c.id).limit(limit))
    ]
