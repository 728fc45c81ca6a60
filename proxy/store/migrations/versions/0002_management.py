"""How conversations grow, what was removed and asked for again, policies set at run time, more of each decision."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("branches", sa.Column("trend", sa.Text))
    op.add_column("edits", sa.Column("length", sa.Integer, nullable=False, server_default="0"))
    op.add_column("cuts", sa.Column("length", sa.Integer, nullable=False, server_default="0"))
    _exchanges()
    _evictions()
    _policies()


def _exchanges() -> None:
    for column in (
        sa.Column("action", sa.Text, nullable=False, server_default="none"),
        sa.Column("observed", sa.Boolean, nullable=False, server_default=sa.false()),
        sa.Column("evicted", sa.Integer, nullable=False, server_default="0"),
        sa.Column("strategy", sa.Text, nullable=False, server_default=""),
        sa.Column("pressure_before", sa.Double),
        sa.Column("velocity", sa.Double),
        sa.Column("turns_until_red", sa.Double),
    ):
        op.add_column("exchanges", column)


def _evictions() -> None:
    op.create_table(
        "evictions",
        sa.Column("tenant", sa.Text, primary_key=True),
        sa.Column("branch", sa.Text, primary_key=True),
        sa.Column("version", sa.Integer, primary_key=True),
        sa.Column("position", sa.Integer, primary_key=True),
        sa.Column("digest", sa.LargeBinary, nullable=False),
        sa.Column("occurrence", sa.Integer, nullable=False),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("layer", sa.Text, nullable=False),
        sa.Column("policy", sa.Text, nullable=False),
        sa.Column("scorer", sa.Text, nullable=False),
        sa.Column("tool", sa.Text, nullable=False),
        sa.Column("call_hash", sa.LargeBinary, nullable=False),
        sa.Column("tokens_before", sa.BigInteger, nullable=False),
        sa.Column("tokens_after", sa.BigInteger, nullable=False),
        sa.Column("tokens_remaining", sa.BigInteger, nullable=False),
        sa.Column("at", sa.Double, nullable=False),
        sa.Column("asked_again_at", sa.Double),
        sa.Column("asked_again_count", sa.Integer, nullable=False),
        sa.ForeignKeyConstraint(["tenant", "branch"], ["branches.tenant", "branches.branch"], ondelete="CASCADE"),
        sqlite_with_rowid=False,
    )
    op.create_index("evictions_of_call", "evictions", ["tenant", "branch", "call_hash"])


def _policies() -> None:
    op.create_table(
        "policies",
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("document", sa.LargeBinary, nullable=False),
        sa.Column("at", sa.Double, nullable=False),
    )
