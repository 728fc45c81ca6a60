"""Budgets: what each key and team took by day, and what requests in flight have reserved."""

import sqlalchemy as sa
from alembic import op

from proxy.store.schema import key_days, keys, reservations, usage_days
from proxy.store.usage import ADDED

revision = "2"
down_revision = "1"
NEW = ("tokens_per_minute", "team", "budgets")


def upgrade() -> None:
    connection = op.get_bind()
    if sa.inspect(connection).has_table(key_days.name):
        return  # the first revision makes the tables as they are now
    for name in NEW:
        op.add_column(keys.name, sa.Column(name, keys.c[name].type))
    for table in (key_days, reservations):
        table.create(connection)
    d = usage_days.c
    sums = [sa.func.sum(d[name]) for name in ADDED]
    taken = sa.select(
        d.tenant, sa.literal(""), d.at, d.model, *sums, sa.func.min(d.first), sa.func.max(d.last)
    )
    names = ["key", "team", "at", "model", *ADDED, "first", "last"]
    connection.execute(
        sa.insert(key_days).from_select(names, taken.group_by(d.tenant, d.at, d.model))
    )
