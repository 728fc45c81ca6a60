"""The audit: rows that are only ever added, each in the transaction that does what it tells of.

The database itself refuses the rest: a row is inserted behind the last one or not at all, never updated, and deleted
only once a later row seals it (triggers of the migration ``audit``). An append is the last thing that a transaction
does, tenants in order, so that two of them never wait for each other; on PostgreSQL it holds a lock of the tenant's
until the commit, on SQLite the transaction has the whole file.
"""

from collections.abc import Sequence
from hashlib import blake2b

import sqlalchemy as sa

from proxy.store.bulk import run_many
from proxy.store.chain import GENESIS, AuditEvent, AuditRow, AuditType, linked, name_digest
from proxy.store.paging import Place, ordered
from proxy.store.records import ConversationRow
from proxy.store.tables import audit

SEALED_AT_ONCE = 1_000
GUARDS = frozenset({"audit_appends", "audit_never_changes", "audit_goes_sealed"})

COLUMNS = tuple(column.name for column in audit.c)
ADD = sa.insert(audit)
MINE = audit.c.tenant == sa.bindparam("tenant")
HEAD = sa.select(audit.c.seq, audit.c.hash).where(MINE).order_by(audit.c.seq.desc()).limit(1)
LOCK = sa.select(sa.func.pg_advisory_xact_lock(sa.bindparam("key", type_=sa.BigInteger)))
STARTS = sa.select(audit.c.tenant, sa.func.min(audit.c.seq).label("first")).group_by(audit.c.tenant)
YOUNGEST = sa.select(audit.c.seq).where(MINE, audit.c.at >= sa.bindparam("before")).order_by(audit.c.seq).limit(1)
WORTH_SEALING = sa.select(sa.func.count()).where(
    MINE, audit.c.seq < sa.bindparam("end"), audit.c.type != str(AuditType.SEAL)
)
ONE = sa.select(audit.c.prev, audit.c.hash).where(MINE, audit.c.seq == sa.bindparam("seq"))
SEALS = sa.select(audit.c.tenant, sa.func.max(audit.c.sealed).label("sealed")).where(audit.c.sealed > 0)
SEALS = SEALS.group_by(audit.c.tenant)
FIRST = sa.select(sa.func.min(audit.c.seq)).where(MINE)
DROP_SEALED = sa.delete(audit).where(MINE, audit.c.seq < sa.bindparam("end"))


def append(connection: sa.Connection, events: Sequence[AuditEvent]) -> None:
    """Put events at the end of their tenants' chains, in order; without any nothing is asked of the database."""
    if not events:
        return
    for tenant in sorted({event.tenant for event in events}):
        seq, prev = hold_head(connection, tenant)
        rows = linked((event for event in events if event.tenant == tenant), seq=seq, prev=prev)
        run_many(connection, ADD, [{name: getattr(row, name) for name in COLUMNS} for row in rows])


def listed(
    connection: sa.Connection,
    tenant: str | None,
    *,
    conversation: str | None,
    kind: str | None,
    limit: int,
    after: Place | None = None,
) -> list[AuditRow]:
    """The newest ``limit`` rows of a tenant, or with None of everybody, newest first.

    ``conversation`` is the id of one, or the name that one had when it was deleted; ``after`` leaves those behind
    one of which this is ``seq``, with None for a tenant ``at``, ``tenant`` and ``seq``.
    """
    query, order = sa.select(audit), [(audit.c.at, True), (audit.c.tenant, False), (audit.c.seq, True)]
    if tenant is not None:
        query, order = query.where(audit.c.tenant == tenant), order[2:]
    if conversation is not None:
        ids = {(tenant, conversation), *_deleted_as(connection, tenant, conversation)}
        query = query.where(audit.c.conversation.in_(sorted(each for _, each in ids)))
    if kind is not None:
        query = query.where(audit.c.type == kind)
    query = ordered(query, order, after=after, limit=limit)
    return [AuditRow(**row._mapping) for row in connection.execute(query)]  # noqa: SLF001 - SQLAlchemy's public name


def tenants(connection: sa.Connection) -> list[str]:
    """The tenants that have a chain."""
    return [row.tenant for row in connection.execute(STARTS.order_by(audit.c.tenant))]


def of_conversation(connection: sa.Connection, of: ConversationRow, *, limit: int) -> list[AuditRow]:
    """The newest ``limit`` rows about a conversation, newest first."""
    return listed(connection, of.tenant, conversation=of.id, kind=None, limit=limit)


def seal_one(connection: sa.Connection, before: float, at: float) -> bool:
    """Seal the rows from before ``before`` at the start of one chain; False when no chain has any.

    The seal is a row like any other at the chain's end: which rows it stands for, and the hashes before and after.
    """
    for tenant, first in connection.execute(STARTS.order_by(audit.c.tenant)).all():
        end = connection.scalar(YOUNGEST, {"tenant": tenant, "before": before})
        seq, _ = hold_head(connection, tenant)
        end = seq + 1 if end is None else end
        covered = connection.scalar(sa.select(sa.func.max(audit.c.sealed)).where(audit.c.tenant == tenant)) or 0
        if end - 1 <= covered or not connection.scalar(WORTH_SEALING, {"tenant": tenant, "end": end}):
            continue
        start = max(first, covered + 1)
        opening = connection.execute(ONE, {"tenant": tenant, "seq": start}).one()
        last = connection.execute(ONE, {"tenant": tenant, "seq": end - 1}).one()
        facts = {
            "first": start,
            "last": end - 1,
            "count": end - start,
            "before": opening.prev,
            "after": last.hash,
            "older_than": before,
        }
        append(connection, [AuditEvent(tenant=tenant, at=at, type=AuditType.SEAL, sealed=end - 1, facts=facts)])
        return True
    return False


def drop_sealed(connection: sa.Connection) -> int:
    """Delete some rows that seals stand for; how many, 0 when none is left."""
    for tenant, sealed in connection.execute(SEALS.order_by(audit.c.tenant)).all():
        first = connection.scalar(FIRST, {"tenant": tenant})
        if first is not None and first <= sealed:
            end = min(sealed + 1, first + SEALED_AT_ONCE)
            return connection.execute(DROP_SEALED, {"tenant": tenant, "end": end}).rowcount
    return 0


def missing_guards(connection: sa.Connection) -> list[str]:
    """The names of the triggers that are not there, or switched off."""
    guards = GUARDS
    if connection.dialect.name == "sqlite":
        found = connection.scalars(
            sa.text("SELECT name FROM sqlite_master WHERE type = 'trigger' AND tbl_name = 'audit'")
        )
    else:
        guards = GUARDS | {"audit_stays"}
        found = connection.scalars(
            sa.text("SELECT tgname FROM pg_trigger WHERE tgrelid = 'audit'::regclass AND tgenabled <> 'D'")
        )
    return sorted(guards - set(found))


def hold_head(connection: sa.Connection, tenant: str) -> tuple[int, bytes]:
    """The last row's number and hash, which nobody else can write behind until this transaction ends."""
    if connection.dialect.name == "postgresql":
        key = int.from_bytes(blake2b(b"weir audit " + tenant.encode(), digest_size=8).digest(), "big", signed=True)
        connection.execute(LOCK, {"key": key})
    row = connection.execute(HEAD, {"tenant": tenant}).first()
    return (0, GENESIS) if row is None else (row.seq, bytes(row.hash))


def _deleted_as(connection: sa.Connection, tenant: str | None, name: str) -> list[tuple[str, str]]:
    """The ids of conversations that had this name when they were deleted, each with its tenant."""
    query = sa.select(audit.c.tenant, audit.c.conversation, audit.c.facts).where(audit.c.type == str(AuditType.DELETE))
    if tenant is not None:
        query = query.where(audit.c.tenant == tenant)
    rows = connection.execute(query)
    return [(row.tenant, row.conversation) for row in rows if name_digest(row.tenant, name) in row.facts]
