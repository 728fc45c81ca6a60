"""The first schema that databases are brought up from. A new database is made by :func:`proxy.store.schema.make`."""

revision = "0013"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None: ...
