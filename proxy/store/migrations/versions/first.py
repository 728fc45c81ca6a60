"""The tables of the first release."""

from alembic import op

from proxy.store.schema import make

revision = "1"
down_revision = None


def upgrade() -> None:
    make(op.get_bind())
