"""What a key may take and until when; a key's requests by their time."""

import sqlalchemy as sa
from alembic import op

from proxy.store.schema import exchanges

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None


def upgrade() -> None:
    for name, kind in (("concurrency", sa.BigInteger), ("requests_per_minute", sa.BigInteger), ("expires", sa.Double)):
        op.add_column("keys", sa.Column(name, kind))
    op.drop_index("exchanges_of_conversation", "exchanges")
    for index in exchanges.indexes:
        if index.name in ("exchanges_of_conversation", "exchanges_of_tenant"):
            index.create(op.get_bind())
