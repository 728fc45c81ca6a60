"""The record of answers that requests may go on from."""

from alembic import op

from proxy.store.schema import answer_items, answers

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Make its two tables."""
    for table in (answers, answer_items):
        table.create(op.get_bind())
