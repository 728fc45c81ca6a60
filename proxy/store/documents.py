"""Policies that were set while Weir ran: their documents by name."""

import json
from collections.abc import Sequence

import sqlalchemy as sa

from proxy.store.audit import append, hold_head
from proxy.store.audit_events import of_policy
from proxy.store.chain import OPERATOR, AuditEvent, AuditType, harmless
from proxy.store.records import PolicyRow
from proxy.store.tables import audit, keep_last, policies

MOST_LOOKED = 500

SAVE = keep_last(policies, replaced=("document", "at"))
NEWEST_CHANGES = (
    sa.select(audit.c.type, audit.c.facts)
    .where(audit.c.tenant == OPERATOR, audit.c.type.in_([AuditType.POLICY_CHANGE, AuditType.KEY_CHANGE]))
    .order_by(audit.c.seq.desc())
    .limit(MOST_LOOKED)
)
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


def note_changes(connection: sa.Connection, changes: Sequence[AuditEvent]) -> None:
    """Audit changes of policies and keys; one that says what the last row of its subject says is left out."""
    hold_head(connection, OPERATOR)
    known: dict[tuple[str, object], object] = {}
    for row in connection.execute(NEWEST_CHANGES):
        known.setdefault(_subject(row.type, facts := json.loads(row.facts)), facts)
    fresh = [each for each in changes if known.get(_subject(each.type, told := harmless(each.facts))) != told]
    append(connection, fresh)


def _subject(kind: str, facts: object) -> tuple[str, object]:
    """What a change is of: a policy, a key, or the policy of whoever names none."""
    named = facts if isinstance(facts, dict) else {}
    return (str(kind), named.get("policy") if kind == AuditType.POLICY_CHANGE else named.get("key"))


def all_policies(connection: sa.Connection) -> list[PolicyRow]:
    """Every stored policy, by name."""
    return [PolicyRow(name=row.name, document=row.document, at=row.at) for row in connection.execute(ALL)]
