"""Bodies of originals and of checkpoints are packed; the words of originals stand in the index alone."""

import sqlalchemy as sa
from alembic import op

from proxy.store.packing import pack, pack_message

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    context = op.get_context()
    if not context.as_sql:  # a script cannot pack
        _pack("originals", ("id",), ("body", "text"))
        _pack("checkpoints", ("tenant", "branch", "version"), ("body",))
    if context.dialect.name == "sqlite":
        op.execute("DROP TABLE originals_fts")
        op.drop_column("originals", "text")
        op.execute(
            "CREATE VIRTUAL TABLE originals_fts USING fts5(tenant, text, content='', "
            "tokenize='unicode61 remove_diacritics 2')"
        )
        op.execute("UPDATE meta SET number = 0 WHERE name = 'indexed'")
        return
    op.execute("ALTER TABLE originals ALTER COLUMN words DROP EXPRESSION")
    op.drop_column("originals", "text")


def _pack(name: str, key: tuple[str, ...], parts: tuple[str, ...]) -> None:
    """Pack the parts of every row into its body."""
    table = sa.table(name, *(sa.column(c) for c in (*key, *parts)))
    connection = op.get_bind()
    one = [table.c[c] == sa.bindparam(f"the_{c}") for c in key]
    change = sa.update(table).where(*one).values(body=sa.bindparam("packed"))
    said = sa.select(*(table.c[c] for c in parts)).where(*one)
    for each in connection.execute(sa.select(*(table.c[c] for c in key)).where(table.c.body.is_not(None))).all():
        where = {f"the_{c}": value for c, value in zip(key, each, strict=True)}
        row = connection.execute(said, where).one()
        packed = pack(bytes(row.body)) if len(parts) == 1 else pack_message(bytes(row.body), row.text or "")
        connection.execute(change, where | {"packed": packed})
