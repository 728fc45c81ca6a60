"""Everything that is known of a conversation as plain data that JSON can hold, with originals in base64."""

import json
from base64 import b64encode
from typing import Any

import sqlalchemy as sa

from proxy.store.archive import whole_body
from proxy.store.ledger import Damage
from proxy.store.packing import Damaged, unpack_text
from proxy.store.records import ConversationRow
from proxy.store.tables import (
    alerts,
    audit,
    branches,
    chains,
    checkpoints,
    conversations,
    cuts,
    edits,
    evictions,
    exchanges,
    health_snapshots,
    notes,
    originals,
    removed,
)

OF_CONVERSATION = (exchanges, notes, health_snapshots, alerts)
OF_BRANCHES = (edits, cuts, checkpoints, evictions, chains)
JSON_TEXT = frozenset({"covered", "facts", "stays", "detail", "trend", "undone", "prepared", "health"})
HIDDEN = frozenset({"tenant"})


def export(connection: sa.Connection, of: ConversationRow, damage: Damage) -> dict[str, Any]:
    """The rows of every table that speak of this conversation, by table; digests are hex, JSON columns are read."""
    mine = sa.and_(branches.c.tenant == of.tenant, branches.c.conversation == of.id)
    own = sa.select(branches.c.branch).where(mine)
    found: dict[str, Any] = {
        "conversation": next(
            iter(
                _rows(
                    connection,
                    sa.select(conversations).where(conversations.c.tenant == of.tenant, conversations.c.id == of.id),
                )
            ),
            None,
        ),
        "branches": _rows(connection, sa.select(branches).where(mine).order_by(branches.c.created, branches.c.branch)),
    }
    for table in OF_CONVERSATION:
        query = sa.select(table).where(table.c.tenant == of.tenant, table.c.conversation == of.id)
        found[table.name] = _rows(connection, query.order_by(table.c.at, *table.primary_key.columns))
    for table in OF_BRANCHES:
        query = sa.select(table).where(table.c.tenant == of.tenant, table.c.branch.in_(own))
        found[table.name] = _rows(connection, query.order_by(*table.primary_key.columns))
    told = sa.select(audit).where(audit.c.tenant == of.tenant, audit.c.conversation == of.id)
    found["audit"] = _rows(connection, told.order_by(audit.c.seq))
    found["originals"] = _originals(connection, of, own, damage)
    return found


def _originals(
    connection: sa.Connection, of: ConversationRow, own: sa.Select[str], damage: Damage
) -> list[dict[str, Any]]:
    held = sa.select(removed.c.ref).where(removed.c.tenant == of.tenant, removed.c.branch.in_(own))
    query = sa.select(originals).where(originals.c.tenant == of.tenant, originals.c.ref.in_(held))
    found = []
    for row in connection.execute(query.order_by(originals.c.id)):
        body = whole_body(row, damage)
        found.append(
            {
                "ref": row.ref,
                "role": row.role,
                "tokens": row.tokens,
                "size": row.size,
                "sha256": row.sha.hex(),
                "at": row.at,
                "body": None if body is None else b64encode(body).decode("ascii"),
            }
        )
    return found


def _rows(connection: sa.Connection, query: sa.Select[*tuple[Any, ...]]) -> list[dict[str, Any]]:
    return [_plain(row) for row in connection.execute(query).mappings()]


def _plain(row: sa.RowMapping) -> dict[str, Any]:
    return {name: _value(name, value) for name, value in row.items() if name not in HIDDEN}


def _value(name: str, value: object) -> object:
    if isinstance(value, bytes) and name == "body":
        try:
            return unpack_text(value)
        except Damaged:
            return None
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, str) and name in JSON_TEXT:
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value
