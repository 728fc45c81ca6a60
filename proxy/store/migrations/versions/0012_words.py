"""Words are indexed as Weir parts them, so that those of scripts without blanks are found: the index is made anew.

On SQLite that happens little by little behind the requests that follow, on PostgreSQL here.
"""

import sqlalchemy as sa
from alembic import op

from proxy.store.archive import MOST_WORDS, indexed, said
from proxy.store.packing import Damaged

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None
AT_ONCE = 200


def upgrade() -> None:
    if op.get_context().dialect.name == "sqlite":
        op.execute("INSERT INTO originals_fts (originals_fts) VALUES ('delete-all')")
        op.execute("UPDATE meta SET number = 0 WHERE name = 'indexed'")
    elif not op.get_context().as_sql:  # a script cannot read bodies: it leaves the words of old texts as they were
        _anew()


def _anew() -> None:
    connection = op.get_bind()
    table = sa.table("originals", *(sa.column(name) for name in ("id", "body")))
    change = sa.text("UPDATE originals SET words = to_tsvector('simple', :text) WHERE id = :id")
    last = 0
    while rows := connection.execute(
        sa.select(table.c.id, table.c.body)
        .where(table.c.id > last, table.c.body.is_not(None))
        .order_by(table.c.id)
        .limit(AT_ONCE)
    ).all():
        last = rows[-1].id
        found = [(row.id, _text(bytes(row.body))) for row in rows]
        connection.execute(change, [{"id": key, "text": text} for key, text in found if text is not None])


def _text(packed: bytes) -> str | None:
    try:
        return indexed(said(packed))[:MOST_WORDS]
    except Damaged:
        return None
