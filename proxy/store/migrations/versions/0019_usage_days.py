"""What requests took, added up by day, so that no sum is over all of them."""

from alembic import op

from proxy.store.exchanges import add_up_days
from proxy.store.schema import usage_days

revision = "0019"
down_revision = "0018"
branch_labels = None
depends_on = None


def upgrade() -> None:
    usage_days.create(op.get_bind())
    add_up_days(op.get_bind())
