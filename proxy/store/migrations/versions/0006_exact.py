"""Calibrations as exactly as they are used."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("calibrations", sa.Column("recent", sa.Text, nullable=False, server_default="[]"))
    op.add_column("calibrations", sa.Column("drift", sa.Double, nullable=False, server_default="0"))
    op.add_column("calibrations", sa.Column("strict", sa.Boolean, nullable=False, server_default=sa.false()))
