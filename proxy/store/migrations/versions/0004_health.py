"""The health of conversations: their state, the newest snapshots, and alerts as episodes."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("conversations", sa.Column("health", sa.Text))
    op.create_table(
        "health_snapshots",
        sa.Column("tenant", sa.Text, primary_key=True),
        sa.Column("conversation", sa.Text, primary_key=True),
        sa.Column("at", sa.Double, primary_key=True),
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("utilization", sa.Double, nullable=False),
        sa.Column("eviction_rate", sa.Double, nullable=False),
        sa.Column("compression_ratio", sa.Double),
        sa.Column("burn_rate", sa.Double),
        sa.Column("fidelity_score", sa.Double),
        sa.Column("tool_result_bloat", sa.Double, nullable=False),
        sa.Column("window_id", sa.Integer, nullable=False),
        _of_conversation(),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "alerts",
        sa.Column("tenant", sa.Text, primary_key=True),
        sa.Column("conversation", sa.Text, primary_key=True),
        sa.Column("at", sa.Double, primary_key=True),
        sa.Column("kind", sa.Text, primary_key=True),
        sa.Column("level", sa.Text, nullable=False),
        sa.Column("category", sa.Text, nullable=False),
        sa.Column("value", sa.Double, nullable=False),
        sa.Column("threshold", sa.Double, nullable=False),
        sa.Column("said", sa.Text, nullable=False),
        sa.Column("closed", sa.Double),
        _of_conversation(),
    )
    op.create_index("alerts_open", "alerts", ["tenant", "closed"])


def _of_conversation() -> sa.ForeignKeyConstraint:
    return sa.ForeignKeyConstraint(
        ["tenant", "conversation"], ["conversations.tenant", "conversations.id"], ondelete="CASCADE"
    )
