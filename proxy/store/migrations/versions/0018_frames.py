"""Originals in frames, checkpoints by difference, what requests say in bundles; which summaries were of no use."""

import sqlalchemy as sa
from alembic import op

from proxy.store.packing import Damaged, pack_named, unpack
from proxy.store.schema import FULL_TEXT, frames, inspected_parts, meta

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None


def upgrade() -> None:
    connection = op.get_bind()
    op.add_column("originals", sa.Column("frame", sa.BigInteger))
    op.add_column("checkpoints", sa.Column("base", sa.Integer))
    op.add_column("branches", sa.Column("failed", sa.Integer))
    frames.create(connection)
    op.rename_table("inspected_parts", "inspected_parts_before")
    if connection.dialect.name == "postgresql":  # an index keeps its name when its table does not
        op.execute("ALTER INDEX inspected_parts_pkey RENAME TO inspected_parts_before_pkey")
    inspected_parts.create(connection)
    own = inspected_parts.c
    before = sa.table(
        "inspected_parts_before",
        sa.column("tenant", own.tenant.type),
        sa.column("conversation", own.conversation.type),
        sa.column("ref", sa.Text),
        sa.column("body", sa.LargeBinary),
    )
    homes = connection.execute(sa.select(before.c.tenant, before.c.conversation).distinct()).all()
    for tenant, conversation in homes:
        mine = (before.c.tenant == tenant, before.c.conversation == conversation)
        bodies = {}
        for ref, body in connection.execute(sa.select(before.c.ref, before.c.body).where(*mine).order_by(before.c.ref)):
            try:
                bodies[ref] = unpack(body, parts=1)
            except Damaged:
                continue
        if bodies:
            row = {"tenant": tenant, "conversation": conversation, "number": 1, "refs": " ".join(bodies)}
            connection.execute(sa.insert(inspected_parts), row | {"body": pack_named(bodies)})
    op.drop_table("inspected_parts_before")
    if connection.dialect.name == "sqlite":  # the words of what is there are indexed again in small steps
        op.execute("DROP TABLE originals_fts")
        op.execute(FULL_TEXT)
        connection.execute(sa.update(meta).where(meta.c.name == "indexed").values(number=0))
