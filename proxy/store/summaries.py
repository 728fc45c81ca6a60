"""What models wrote, by the address of what they were asked: bounded for every tenant, and pruned by age."""

from hashlib import sha256

import sqlalchemy as sa

from proxy.store.bulk import prune
from proxy.store.ledger import Damage
from proxy.store.records import SummaryRow
from proxy.store.tables import keep_last, summaries

MOST_SUMMARIES = 20_000
SUMMARIES_AT_ONCE = 500
KEEP = keep_last(summaries, replaced=("at", "purpose", "model", "tokens_in", "tokens_out", "text", "sha"))
ONE = sa.select(summaries).where(summaries.c.tenant == sa.bindparam("tenant"), summaries.c.key == sa.bindparam("key"))
SURPLUS = (
    sa.select(summaries.c.key)
    .where(summaries.c.tenant == sa.bindparam("tenant"))
    .order_by(summaries.c.at.desc(), summaries.c.key)
    .limit(SUMMARIES_AT_ONCE)
    .offset(MOST_SUMMARIES)
)


def summary(connection: sa.Connection, tenant: str, key: bytes, damage: Damage) -> SummaryRow | None:
    """The summary at this address, None if there is none or it is damaged."""
    row = connection.execute(ONE, {"tenant": tenant, "key": key}).first()
    if row is None:
        return None
    found = SummaryRow(
        key=row.key,
        at=row.at,
        purpose=row.purpose,
        model=row.model,
        tokens_in=row.tokens_in,
        tokens_out=row.tokens_out,
        text=row.text,
    )
    if _sha(found) != row.sha:
        damage("summary", tenant, key.hex())
        return None
    return found


def keep_summary(connection: sa.Connection, tenant: str, row: SummaryRow) -> None:
    """Store a summary in place of what its address had; of a tenant's the newest :data:`MOST_SUMMARIES` stay."""
    connection.execute(
        KEEP[connection.dialect.name],
        {
            "tenant": tenant,
            "key": row.key,
            "at": row.at,
            "purpose": row.purpose,
            "model": row.model,
            "tokens_in": row.tokens_in,
            "tokens_out": row.tokens_out,
            "text": row.text,
            "sha": _sha(row),
        },
    )
    surplus = list(connection.scalars(SURPLUS, {"tenant": tenant}))
    if surplus:
        connection.execute(sa.delete(summaries).where(summaries.c.tenant == tenant, summaries.c.key.in_(surplus)))


def prune_summaries(connection: sa.Connection, before: float) -> int:
    """Delete some summaries from before ``before``; how many, 0 when none is left."""
    return prune(connection, summaries.c.key, before)


def _sha(row: SummaryRow) -> bytes:
    return sha256(row.key + row.text.encode("utf-8", "surrogatepass")).digest()
