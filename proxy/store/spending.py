"""Tokens that a tenant's summaries took, by the minute, of all servers together."""

import sqlalchemy as sa

from proxy.store.tables import keep_last, spending

SLOT = 60.0
SLOTS = 60
OPEN = keep_last(spending, replaced=("tenant",))
MINE = (spending.c.tenant == sa.bindparam("t"), spending.c.slot == sa.bindparam("s"))
ADD = sa.update(spending).where(*MINE).values(tokens=spending.c.tokens + sa.bindparam("more"))
FORGET = sa.delete(spending).where(spending.c.tenant == sa.bindparam("t"), spending.c.slot < sa.bindparam("s"))
TOTAL = sa.select(sa.func.coalesce(sa.func.sum(spending.c.tokens), 0)).where(spending.c.tenant == sa.bindparam("t"))


def reserve(connection: sa.Connection, tenant: str, tokens: int, *, limit: int, at: float) -> int | None:
    """The slot in which ``tokens`` more are counted; None where the last hour would then have more than ``limit``."""
    slot = int(at // SLOT)
    # the row is locked from here on: who asks at the same time waits, and then sees these tokens
    connection.execute(OPEN[connection.dialect.name], {"tenant": tenant, "slot": slot, "tokens": 0})
    connection.execute(FORGET, {"t": tenant, "s": slot - SLOTS})
    if int(connection.execute(TOTAL, {"t": tenant}).scalar_one()) + tokens > limit:
        return None
    connection.execute(ADD, {"t": tenant, "s": slot, "more": tokens})
    return slot


def correct(connection: sa.Connection, tenant: str, slot: int, more: int) -> None:
    """Count ``more`` (or fewer) tokens in a slot."""
    connection.execute(ADD, {"t": tenant, "s": slot, "more": more})
