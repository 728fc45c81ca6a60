"""When a branch's trend was read, by which an older one is known: a branch is used by more than its requests."""

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("branches", sa.Column("trend_at", sa.Double, nullable=False, server_default="0"))
