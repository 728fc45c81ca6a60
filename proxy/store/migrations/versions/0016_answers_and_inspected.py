"""The record of answers that requests may go on from, and what is kept of the newest requests to be looked at."""

from alembic import op

from proxy.store.schema import answer_items, answers, inspected, inspected_parts

revision = "0016"
down_revision = "0013"
branch_labels = None
depends_on = None


def upgrade() -> None:
    for table in (answers, answer_items, inspected, inspected_parts):
        table.create(op.get_bind())
