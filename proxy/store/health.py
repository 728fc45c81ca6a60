"""What is kept of the health of conversations: its state, the newest snapshots, alerts as episodes."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import sqlalchemy as sa

from policies.health import KEPT, Alert, Health, Snapshot, check
from proxy.store.bulk import run_many
from proxy.store.paging import Place, ordered
from proxy.store.records import AlertRow, ConversationRow, ExchangeRow
from proxy.store.tables import alerts, conversations, health_snapshots, keep_first

MOST_ALERTS = 200
"""Episodes of one conversation that are kept, the newest ones."""

SAME_NAME = ("tenant", "kind", "level", "category", "at", "value", "said", "closed")
ADD_SNAPSHOT = keep_first(health_snapshots)
ADD_ALERT = keep_first(alerts)
SET_STATE = (
    sa.update(conversations)
    .where(conversations.c.tenant == sa.bindparam("t"), conversations.c.id == sa.bindparam("c"))
    .values(health=sa.bindparam("state"))
)
STATE = sa.select(conversations.c.health).where(
    conversations.c.tenant == sa.bindparam("t"), conversations.c.id == sa.bindparam("c")
)
CLOSE = (
    sa.update(alerts)
    .where(
        alerts.c.tenant == sa.bindparam("t"),
        alerts.c.conversation == sa.bindparam("c"),
        alerts.c.at == sa.bindparam("since"),
        alerts.c.kind == sa.bindparam("k"),
        alerts.c.closed.is_(None),
    )
    .values(closed=sa.bindparam("now"))
)

CLOSE_ALL = (
    sa.update(alerts)
    .where(alerts.c.tenant == sa.bindparam("t"), alerts.c.conversation == sa.bindparam("c"), alerts.c.closed.is_(None))
    .values(closed=sa.bindparam("now"))
)


def _oldest(table: sa.Table, most: int) -> sa.Delete:
    """A DELETE of all rows of one conversation but the newest ``most``."""
    newest = table.alias()
    mine = (newest.c.tenant == sa.bindparam("t"), newest.c.conversation == sa.bindparam("c"))
    border = sa.select(newest.c.at).where(*mine).order_by(newest.c.at.desc()).limit(1).offset(most)
    return sa.delete(table).where(
        table.c.tenant == sa.bindparam("t"),
        table.c.conversation == sa.bindparam("c"),
        table.c.at <= border.scalar_subquery(),
    )


PRUNE_SNAPSHOTS = _oldest(health_snapshots, KEPT)
PRUNE_ALERTS = _oldest(alerts, MOST_ALERTS)


def follow_others(connection: sa.Connection, rows: Sequence[ExchangeRow], home: Mapping[str, str]) -> list[ExchangeRow]:
    """The rows, each with what it makes of its conversation as other servers have left that.

    The conversations' rows are locked since this transaction has counted its requests in them.
    """
    known: dict[tuple[str, str], Health | None] = {}
    followed = list[ExchangeRow]()
    for row in rows:
        if row.health is not None and row.health.sample is not None and row.health.rules is not None:
            key = (row.tenant, home[row.id])
            if key not in known:
                known[key] = Health.from_json(connection.scalar(STATE, {"t": key[0], "c": key[1]}) or "")
            checkup = check(known[key], row.health.sample, row.health.rules)
            known[key], row = checkup.health, replace(row, health=checkup)
        followed.append(row)
    return followed


def add_checkups(connection: sa.Connection, rows: Sequence[ExchangeRow], home: Mapping[str, str]) -> None:
    """Store what a batch of exchanges made of their conversations' health; ``home`` has the conversation of each."""
    found = [((row.tenant, home[row.id]), row, row.health) for row in rows if row.health is not None]
    if not found:
        return
    states = {key: checkup.health for key, _, checkup in found}
    for key, row, checkup in found:
        if checkup.is_first:  # whatever is open of it is of somebody who is gone
            close_all(connection, *key, row.at)
    run_many(
        connection,
        ADD_SNAPSHOT[connection.dialect.name],
        [{**_own(key), "id": row.id, **checkup.snapshot._asdict()} for key, row, checkup in found],
    )
    run_many(
        connection,
        ADD_ALERT[connection.dialect.name],
        [_alert_values(key, alert) for key, _, checkup in found for alert in checkup.opened],
    )
    run_many(
        connection,
        CLOSE,
        [
            {"t": key[0], "c": key[1], "since": episode.at, "k": episode.kind, "now": row.at}
            for key, row, checkup in found
            for episode in checkup.closed
        ],
    )
    values = [{"t": key[0], "c": key[1], "state": states[key].to_json()} for key in sorted(states)]
    run_many(connection, SET_STATE, values)
    for key in sorted(key for key, health in states.items() if health.requests > KEPT):
        connection.execute(PRUNE_SNAPSHOTS, {"t": key[0], "c": key[1]})
    for key in sorted({key for key, _, checkup in found if checkup.opened}):
        connection.execute(PRUNE_ALERTS, {"t": key[0], "c": key[1]})


def snapshots(connection: sa.Connection, of: ConversationRow, *, limit: int) -> list[Snapshot]:
    """The newest ``limit`` snapshots of a conversation, oldest first."""
    table = health_snapshots
    query = (
        sa.select(*(table.c[name] for name in Snapshot._fields))
        .where(table.c.tenant == of.tenant, table.c.conversation == of.id)
        .order_by(table.c.at.desc(), table.c.id.desc())
        .limit(limit)
    )
    return [Snapshot(*row) for row in connection.execute(query)][::-1]


def alerts_of(connection: sa.Connection, of: ConversationRow, *, limit: int) -> list[AlertRow]:
    """The newest ``limit`` alerts of a conversation, open and closed, the newest first."""
    query = _listing().where(alerts.c.tenant == of.tenant, alerts.c.conversation == of.id)
    return _listed(connection, query, limit)


def open_alerts(
    connection: sa.Connection, tenant: str | None, *, limit: int, after: Place | None = None
) -> list[AlertRow]:
    """The newest ``limit`` open alerts of a tenant, or with None of everybody, the newest first.

    ``after`` leaves those behind one of which this is ``at``, ``kind``, ``tenant`` and the conversation's name.
    """
    query = _listing().where(alerts.c.closed.is_(None))
    return _listed(connection, query if tenant is None else query.where(alerts.c.tenant == tenant), limit, after)


def count_open(connection: sa.Connection, tenant: str | None) -> dict[str, int]:
    """How many alerts of a tenant, or with None of everybody, are open, by level."""
    query = sa.select(alerts.c.level, sa.func.count()).where(alerts.c.closed.is_(None)).group_by(alerts.c.level)
    counted = connection.execute(query if tenant is None else query.where(alerts.c.tenant == tenant))
    return {level: int(count) for level, count in counted}


def rate(connection: sa.Connection, tenant: str, conversation: str, fidelity: float) -> None:
    """Have an evaluated fidelity (0 to 1) hold from the conversation's next request on, in whichever process."""
    where = (conversations.c.tenant == tenant, conversations.c.id == conversation)
    health = Health.from_json(connection.scalar(sa.select(conversations.c.health).where(*where)) or "")
    if health is not None:
        state = health._replace(fidelity=fidelity).to_json()
        connection.execute(SET_STATE, {"t": tenant, "c": conversation, "state": state})


def close_all(connection: sa.Connection, tenant: str, conversation: str, at: float) -> None:
    """Close every alert of a conversation that is open."""
    connection.execute(CLOSE_ALL, {"t": tenant, "c": conversation, "now": at})


def _own(key: tuple[str, str]) -> dict[str, object]:
    return {"tenant": key[0], "conversation": key[1]}


def _alert_values(key: tuple[str, str], alert: Alert) -> dict[str, object]:
    return {
        **_own(key),
        "at": alert.at,
        "kind": alert.kind,
        "level": alert.level,
        "category": alert.category,
        "value": alert.value,
        "threshold": alert.limit,
        "said": alert.said,
        "closed": None,
    }


def _listing() -> sa.Select[*tuple[object, ...]]:
    mine = sa.and_(conversations.c.tenant == alerts.c.tenant, conversations.c.id == alerts.c.conversation)
    return sa.select(alerts, conversations.c.name).join(conversations, mine)


def _listed(
    connection: sa.Connection, query: sa.Select[*tuple[object, ...]], limit: int, after: Place | None = None
) -> list[AlertRow]:
    order = ((alerts.c.at, True), (alerts.c.kind, False), (alerts.c.tenant, False), (conversations.c.name, False))
    rows = connection.execute(ordered(query, order, after=after, limit=limit))
    return [
        AlertRow(
            **{name: getattr(row, name) for name in SAME_NAME},
            conversation=row.name,
            limit=row.threshold,
        )
        for row in rows
    ]
