"""What is kept of the newest requests, so that both sides of them can be looked at."""

from alembic import op

from proxy.store.schema import inspected, inspected_parts

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Make the two tables."""
    for table in (inspected, inspected_parts):
        table.create(op.get_bind())
