"""When a branch's trend was read, by which an older one is known, and which messages the note of a cut is on.

What was stored before said nothing of that: its notes are on all that their cuts cover.
"""

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("branches", sa.Column("trend_at", sa.Double, nullable=False, server_default="0"))
    op.add_column("cuts", sa.Column("noted", sa.Integer, nullable=False, server_default="0"))
    op.execute("UPDATE cuts SET noted = covers")
