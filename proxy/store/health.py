"""What is kept of the health of conversations: its state, the newest snapshots, alerts as episodes."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import sqlalchemy as sa

from policies.quality.health import KEPT, Health, Snapshot, check
from proxy.store.records import AlertRow, ConversationRow, ExchangeRow
from proxy.store.schema import alerts, conversations, health_snapshots, keep_first, of, recorded
from proxy.store.transaction import Place, Rows, Transaction, ordered

MAX_ALERTS = 200
"""Episodes of one conversation that are kept, the newest ones."""

ADD_SNAPSHOT = keep_first(health_snapshots)
ADD_ALERT = keep_first(alerts)
MINE = of(conversations, "tenant", "id")
STATE = sa.select(conversations.c.health).where(MINE)
SET_STATE = sa.update(conversations).where(MINE).values(health=sa.bindparam("state"))
CLOSE_ALL = sa.update(alerts).where(of(alerts, "tenant", "conversation"), alerts.c.closed.is_(None))
CLOSE_ALL = CLOSE_ALL.values(closed=sa.bindparam("now"))
CLOSE = CLOSE_ALL.where(of(alerts, "at", "kind"))


def _oldest(table: sa.Table, most: int) -> sa.Delete:
    """A DELETE of all rows of one conversation but the newest ``most``."""
    newest = table.alias()
    border = sa.select(newest.c.at).where(of(newest, "tenant", "conversation")).order_by(newest.c.at.desc())
    border = border.limit(1).offset(most)
    return sa.delete(table).where(of(table, "tenant", "conversation"), table.c.at <= border.scalar_subquery())


PRUNE_SNAPSHOTS = _oldest(health_snapshots, KEPT)
PRUNE_ALERTS = _oldest(alerts, MAX_ALERTS)


def follow_others(tx: Transaction, rows: Sequence[ExchangeRow], home: Mapping[str, str]) -> list[ExchangeRow]:
    """The rows, each with what it makes of its conversation as other servers have left that.

    The conversations' rows are locked since this transaction has counted its requests in them.
    """
    known: dict[tuple[str, str], Health | None] = {}
    followed = list[ExchangeRow]()
    for row in rows:
        if row.health is not None and row.health.sample is not None and row.health.rules is not None:
            key = (row.tenant, home[row.id])
            if key not in known:
                known[key] = _state(tx, *key)
            checkup = check(known[key], row.health.sample, row.health.rules)
            known[key], row = checkup.health, replace(row, health=checkup)
        followed.append(row)
    return followed


def add_checkups(tx: Transaction, rows: Sequence[ExchangeRow], home: Mapping[str, str]) -> None:
    """Store what a batch of exchanges made of their conversations' health; ``home`` has the conversation of each."""
    found = [((row.tenant, home[row.id]), row, row.health) for row in rows if row.health is not None]
    states = {key: checkup.health for key, _, checkup in found}
    for key, row, checkup in found:
        if checkup.is_first:  # whatever is open of it is of somebody who is gone
            close_all(tx, *key, row.at)
    tx.many(
        ADD_SNAPSHOT,
        [
            {"tenant": tenant, "conversation": conversation, "id": row.id, **checkup.snapshot._asdict()}
            for (tenant, conversation), row, checkup in found
        ],
    )
    tx.many(
        ADD_ALERT,
        [
            {
                "tenant": tenant,
                "conversation": conversation,
                "at": alert.at,
                "kind": alert.kind,
                "level": alert.level,
                "category": alert.category,
                "value": alert.value,
                "limit": alert.limit,
                "said": alert.said,
            }
            for (tenant, conversation), _, checkup in found
            for alert in checkup.opened
        ],
    )
    closed = [(_key(*key), row.at, episode) for key, row, checkup in found for episode in checkup.closed]
    tx.many(CLOSE, [{**key, "of_at": each.at, "of_kind": each.kind, "now": at} for key, at, each in closed])
    tx.many(SET_STATE, [_of_id(*key) | {"state": states[key].to_json()} for key in sorted(states)])
    for key in sorted(key for key, health in states.items() if health.requests > KEPT):
        tx.execute(PRUNE_SNAPSHOTS, _key(*key))
    for key in sorted({key for key, _, checkup in found if checkup.opened}):
        tx.execute(PRUNE_ALERTS, _key(*key))


def snapshots(tx: Transaction, conversation: ConversationRow, *, limit: int = KEPT) -> list[Snapshot]:
    """The newest ``limit`` snapshots of a conversation's health, of the 100 that are kept, oldest first."""
    table = health_snapshots
    query = sa.select(table).where(table.c.tenant == conversation.tenant, table.c.conversation == conversation.id)
    rows = tx.execute(query.order_by(table.c.at.desc(), table.c.id.desc()).limit(limit))
    return [recorded(Snapshot, table, row) for row in rows][::-1]


def alerts_of(tx: Transaction, conversation: ConversationRow, *, limit: int = MAX_ALERTS) -> list[AlertRow]:
    """The newest alerts of a conversation, open and closed, the newest first."""
    query = _listing().where(alerts.c.tenant == conversation.tenant, alerts.c.conversation == conversation.id)
    return _listed(tx, query, limit)


def open_alerts(
    tx: Transaction, tenant: str | None, *, limit: int = 200, after: Place | None = None
) -> tuple[list[AlertRow], dict[str, int]]:
    """The newest open alerts of a tenant, or with None of everybody, and how many there are by level.

    ``after`` leaves those behind one of which this is ``at``, ``kind``, ``tenant`` and the conversation's name.
    """
    are_open = alerts.c.closed.is_(None)
    are_meant = are_open if tenant is None else sa.and_(are_open, alerts.c.tenant == tenant)
    counted = tx.execute(sa.select(alerts.c.level, sa.func.count()).where(are_meant).group_by(alerts.c.level))
    counts = {level: int(count) for level, count in counted}
    return _listed(tx, _listing().where(are_meant), limit, after), counts


def rate(tx: Transaction, tenant: str, conversation: str, fidelity: float) -> None:
    """Have an evaluated fidelity (0 to 1) hold from the conversation's next request on, in whichever process."""
    health = _state(tx, tenant, conversation)
    if health is not None:
        tx.execute(SET_STATE, _of_id(tenant, conversation) | {"state": health._replace(fidelity=fidelity).to_json()})


def close_all(tx: Transaction, tenant: str, conversation: str, at: float) -> None:
    tx.execute(CLOSE_ALL, _key(tenant, conversation) | {"now": at})


def _key(tenant: str, conversation: str) -> dict[str, object]:
    return {"of_tenant": tenant, "of_conversation": conversation}


def _of_id(tenant: str, conversation: str) -> dict[str, object]:
    return {"of_tenant": tenant, "of_id": conversation}


def _state(tx: Transaction, tenant: str, conversation: str) -> Health | None:
    return Health.from_json(tx.scalar(STATE, _of_id(tenant, conversation)) or "")


def _listing() -> Rows:
    mine = sa.and_(conversations.c.tenant == alerts.c.tenant, conversations.c.id == alerts.c.conversation)
    return sa.select(alerts, conversations.c.name).join(conversations, mine)


def _listed(tx: Transaction, query: Rows, limit: int, after: Place | None = None) -> list[AlertRow]:
    order = ((alerts.c.at, True), (alerts.c.kind, False), (alerts.c.tenant, False), (conversations.c.name, False))
    rows = tx.execute(ordered(query, order, after=after, limit=limit))
    return [recorded(AlertRow, alerts, row, conversation=row.name) for row in rows]
