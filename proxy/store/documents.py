"""Policies that were set while Weir ran: their documents by name."""

import sqlalchemy as sa

from proxy.store.audit import append
from proxy.store.audit_events import of_policy
from proxy.store.records import PolicyRow
from proxy.store.tables import keep_last, policies

SAVE = keep_last(policies, replaced=("document", "at"))
ALL = sa.select(policies).order_by(policies.c.name)


def save_policy(connection: sa.Connection, row: PolicyRow) -> None:
    """Store a policy in place of the one of that name."""
    connection.execute(SAVE[connection.dialect.name], {"name": row.name, "document": row.document, "at": row.at})
    append(connection, [of_policy(row, at=row.at)])


def delete_policy(connection: sa.Connection, name: str, at: float) -> bool:
    """Delete the stored policy of that name; whether there was one."""
    found = connection.execute(sa.delete(policies).where(policies.c.name == name)).rowcount > 0
    if found:
        append(connection, [of_policy(name, at=at)])
    return found


def all_policies(connection: sa.Connection) -> list[PolicyRow]:
    """Every stored policy, by name."""
    return [PolicyRow(name=row.name, document=row.document, at=row.at) for row in connection.execute(ALL)]
