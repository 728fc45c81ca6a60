"""What servers share while they work: tokens that summaries took, and who prepares a branch's next one."""

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "spending",
        sa.Column("tenant", sa.Text, primary_key=True),
        sa.Column("slot", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("tokens", sa.BigInteger, nullable=False),
    )
    op.add_column("branches", sa.Column("preparing", sa.Double))
