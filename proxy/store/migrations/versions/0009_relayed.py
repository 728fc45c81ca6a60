"""Requests that were relayed and belong to no conversation, for what their keys have used."""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "relayed",
        sa.Column("tenant", sa.Text, primary_key=True),
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("at", sa.Double, nullable=False),
        sa.Column("model", sa.Text, nullable=False),
        sa.Column("policy", sa.Text, nullable=False),
        sa.Column("status", sa.Integer, nullable=False),
        sa.Column("outcome", sa.Text, nullable=False),
        sa.Column("usage_prompt", sa.BigInteger),
        sa.Column("usage_completion", sa.BigInteger),
        sa.Column("usage_cached", sa.BigInteger),
        sa.Column("cost", sa.Double),
    )
    op.create_index("relayed_at", "relayed", ["at"])
