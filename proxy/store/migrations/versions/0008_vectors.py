"""Vectors of what was removed, to find it by what it is about."""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "vectors",
        sa.Column("tenant", sa.Text, primary_key=True),
        sa.Column("ref", sa.Text, primary_key=True),
        sa.Column("model", sa.Text, primary_key=True),
        sa.Column("body", sa.LargeBinary, nullable=False),
        sa.ForeignKeyConstraint(["tenant", "ref"], ["originals.tenant", "originals.ref"], ondelete="CASCADE"),
    )
