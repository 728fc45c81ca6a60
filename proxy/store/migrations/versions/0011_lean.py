"""Rows say less: ids as bytes on SQLite, details packed, no words twice, no index that nothing needs."""

import json
import re

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None

TENANT, CONVERSATION, BRANCH, REQUEST = "", "conv-", "br-", "req_"
IDS = {
    "conversations": {"tenant": TENANT, "id": CONVERSATION},
    "branches": {"tenant": TENANT, "branch": BRANCH, "conversation": CONVERSATION, "parent": BRANCH},
    "spending": {"tenant": TENANT},
    "chains": {"tenant": TENANT, "branch": BRANCH},
    "edits": {"tenant": TENANT, "branch": BRANCH},
    "cuts": {"tenant": TENANT, "branch": BRANCH},
    "checkpoints": {"tenant": TENANT, "branch": BRANCH},
    "notes": {"tenant": TENANT, "conversation": CONVERSATION},
    "summaries": {"tenant": TENANT},
    "originals": {"tenant": TENANT},
    "removed": {"tenant": TENANT, "branch": BRANCH},
    "vectors": {"tenant": TENANT},
    "evictions": {"tenant": TENANT, "branch": BRANCH},
    "exchanges": {
        "tenant": TENANT,
        "id": REQUEST,
        "conversation": CONVERSATION,
        "branch": BRANCH,
        "parent": BRANCH,
    },
    "relayed": {"tenant": TENANT, "id": REQUEST},
    "health_snapshots": {"tenant": TENANT, "conversation": CONVERSATION, "id": REQUEST},
    "alerts": {"tenant": TENANT, "conversation": CONVERSATION},
}
DIGITS = re.compile(r"(?:[0-9a-f]{2})+")
AT_ONCE = 500


def upgrade() -> None:
    op.drop_index("evictions_of_call", "evictions")
    op.drop_index("exchanges_of_conversation", "exchanges")
    op.drop_column("exchanges", "name")
    for name in ("cost", "cost_saved", "summaries_cost"):
        op.add_column("exchanges", sa.Column(name, sa.Double))
    op.add_column("exchanges", sa.Column("summaries", sa.BigInteger))
    if not op.get_context().as_sql:  # a script cannot read what it does not know
        _spent()
    if op.get_context().dialect.name == "sqlite":
        _details()
        _ids()
        _words()
    else:
        op.execute("ALTER TABLE exchanges ALTER COLUMN detail TYPE BYTEA USING convert_to(detail, 'UTF8')")
    op.create_index("exchanges_of_conversation", "exchanges", ["conversation", "at"])


def _spent() -> None:
    """What is added up of details, as columns."""
    table = sa.table("exchanges", *(sa.column(name) for name in ("tenant", "id", "detail", "cost", "cost_saved")))
    connection = op.get_bind()
    change = sa.text(
        "UPDATE exchanges SET cost = :cost, cost_saved = :cost_saved, summaries = :summaries, "
        "summaries_cost = :summaries_cost WHERE tenant = :tenant AND id = :id"
    ).bindparams(
        sa.bindparam("cost", type_=sa.Double),
        sa.bindparam("cost_saved", type_=sa.Double),
        sa.bindparam("summaries", type_=sa.BigInteger),
        sa.bindparam("summaries_cost", type_=sa.Double),
    )
    told = sa.select(table.c.tenant, table.c.id, table.c.detail)
    rows = connection.execute(told.where(table.c.detail.like('%"cost%') | table.c.detail.like('%"summarizer"%'))).all()
    for start in range(0, len(rows), AT_ONCE):
        connection.execute(change, [_sums(*row) for row in rows[start : start + AT_ONCE]])


def _sums(tenant: str, request: str, detail: str) -> dict[str, object]:
    told = json.loads(detail)
    summaries = told.get("summarizer", {})
    return {
        "tenant": tenant,
        "id": request,
        "cost": told.get("cost"),
        "cost_saved": told.get("cost_saved"),
        "summaries": summaries.get("asked", 0) + summaries.get("answered", 0) or None,
        "summaries_cost": summaries.get("dollars"),
    }


def _details() -> None:
    """Details that are stored become bytes; they are read as they are."""
    op.add_column("exchanges", sa.Column("packed", sa.LargeBinary, nullable=False, server_default=""))
    op.execute("UPDATE exchanges SET packed = CAST(detail AS BLOB)")
    op.drop_column("exchanges", "detail")
    op.execute("ALTER TABLE exchanges RENAME COLUMN packed TO detail")


def _ids() -> None:
    """Ids of Weir's own become the bytes that their digits stand for."""
    connection = op.get_bind()
    driver = connection.connection.driver_connection
    assert driver is not None  # noqa: S101 - the migration runs on it
    driver.create_function("weir_short", 2, _short, deterministic=True)
    op.execute("PRAGMA defer_foreign_keys = ON")
    for table, columns in IDS.items():
        changes = ", ".join(f"{name} = weir_short({name}, '{prefix}')" for name, prefix in columns.items())
        op.execute(f"UPDATE {table} SET {changes}")  # noqa: S608 - names of this file


def _short(value: object, prefix: str) -> object:
    if not isinstance(value, str) or not value.startswith(prefix) or not DIGITS.fullmatch(value[len(prefix) :]):
        return value
    return bytes.fromhex(value[len(prefix) :])


def _words() -> None:
    """The full-text index has the words alone; whose they are is known by their originals."""
    op.execute("DROP TABLE originals_fts")
    op.execute(
        "CREATE VIRTUAL TABLE originals_fts USING fts5(text, content='', tokenize='unicode61 remove_diacritics 2')"
    )
    op.execute("UPDATE meta SET number = 0 WHERE name = 'indexed'")
