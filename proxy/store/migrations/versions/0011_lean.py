"""Rows say less: ids as bytes on SQLite, details packed, no words twice, no index that nothing needs."""

import json
import re

import sqlalchemy as sa
from alembic import op

from proxy.store.packing import pack_words

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
        _functions()
        _details()
        _audit()
        _ids()
        _words()
    else:
        if not op.get_context().as_sql:
            _texts()
        op.execute("ALTER TABLE audit ALTER COLUMN facts TYPE BYTEA USING convert_to(facts, 'UTF8')")
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


def _texts() -> None:
    """Texts of edits that look packed are packed; others are read as they are."""
    columns = [sa.column(name, sa.Text) for name in ("tenant", "branch", "version", "position")]
    text = sa.column("text", sa.LargeBinary)
    table, connection = sa.table("edits", *columns, text), op.get_bind()
    for *key, said in connection.execute(sa.select(*columns, text).where(sa.func.substr(text, 1, 1) == b"\1")).all():
        one = [column == value for column, value in zip(columns, key, strict=True)]
        connection.execute(sa.update(table).where(*one).values(text=_packed(bytes(said))))


def _details() -> None:
    """Details and the texts of edits are packed."""
    op.add_column("exchanges", sa.Column("packed", sa.LargeBinary, nullable=False, server_default=""))
    op.execute("UPDATE exchanges SET packed = weir_packed(detail)")
    op.drop_column("exchanges", "detail")
    op.execute("ALTER TABLE exchanges RENAME COLUMN packed TO detail")
    op.execute("UPDATE edits SET text = weir_packed(text)")


def _audit() -> None:
    """The audit's rows become shorter. Its triggers let nobody change one, so the table is made anew with them."""
    connection = op.get_bind()
    kept = connection.scalars(
        sa.text("SELECT sql FROM sqlite_master WHERE tbl_name = 'audit' AND type IN ('index', 'trigger') AND sql > ''")
    ).all()
    op.create_table(
        "audit_lean",
        sa.Column("tenant", sa.Text, primary_key=True),
        sa.Column("seq", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("at", sa.Double, nullable=False),
        sa.Column("type", sa.Text, nullable=False),
        sa.Column("conversation", sa.Text, nullable=False),
        sa.Column("branch", sa.Text, nullable=False),
        sa.Column("request", sa.Text, nullable=False),
        sa.Column("sealed", sa.BigInteger, nullable=False),
        sa.Column("facts", sa.LargeBinary, nullable=False),
        sa.Column("prev", sa.LargeBinary, nullable=False),
        sa.Column("hash", sa.LargeBinary, nullable=False),
        sqlite_with_rowid=False,
    )
    op.execute(
        f"INSERT INTO audit_lean SELECT weir_short(tenant, '{TENANT}'), seq, at, type, "  # noqa: S608 - constants
        f"weir_short(conversation, '{CONVERSATION}'), weir_short(branch, '{BRANCH}'), "
        f"weir_short(request, '{REQUEST}'), sealed, weir_packed(facts), prev, hash FROM audit ORDER BY tenant, seq"
    )
    op.drop_table("audit")
    op.rename_table("audit_lean", "audit")
    for statement in kept:
        connection.exec_driver_sql(statement)


def _functions() -> None:
    driver = op.get_bind().connection.driver_connection
    assert driver is not None  # noqa: S101 - the migration runs on it
    driver.create_function("weir_short", 2, _short, deterministic=True)
    driver.create_function("weir_packed", 1, _packed, deterministic=True)


def _ids() -> None:
    """Ids of Weir's own become the bytes that their digits stand for."""
    op.execute("PRAGMA defer_foreign_keys = ON")
    for table, columns in IDS.items():
        changes = ", ".join(f"{name} = weir_short({name}, '{prefix}')" for name, prefix in columns.items())
        op.execute(f"UPDATE {table} SET {changes}")  # noqa: S608 - names of this file


def _short(value: object, prefix: str) -> object:
    if not isinstance(value, str) or not value.startswith(prefix) or not DIGITS.fullmatch(value[len(prefix) :]):
        return value
    return bytes.fromhex(value[len(prefix) :])


def _packed(text: str | bytes) -> bytes:
    return pack_words(text if isinstance(text, str) else text.decode("utf-8", "surrogatepass"))


def _words() -> None:
    """The full-text index has the words alone; whose they are is known by their originals."""
    op.execute("DROP TABLE originals_fts")
    op.execute(
        "CREATE VIRTUAL TABLE originals_fts USING fts5(text, content='', tokenize='unicode61 remove_diacritics 2')"
    )
    op.execute("UPDATE meta SET number = 0 WHERE name = 'indexed'")
