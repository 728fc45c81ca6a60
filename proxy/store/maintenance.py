"""Deleting for good: what is past its retention, and what somebody asked to be deleted."""

import math
from collections.abc import Sequence

import sqlalchemy as sa

from proxy.store.archive import drop_unheld, forget_words
from proxy.store.audit import append
from proxy.store.audit_events import of_deletion
from proxy.store.bulk import prune
from proxy.store.chain import AuditEvent
from proxy.store.records import ConversationRow
from proxy.store.tables import branches, conversations, exchanges, keep_last, meta, relayed, removed, summaries

CONVERSATIONS_AT_ONCE = 10
KEEP_TIME = keep_last(meta, replaced=("number",))
OLDEST = (
    sa.select(conversations.c.tenant, conversations.c.id, conversations.c.name, conversations.c.requests)
    .where(conversations.c.updated < sa.bindparam("before"))
    .order_by(conversations.c.closed.is_(None), conversations.c.updated)
)
STORED = sa.text(
    "SELECT (SELECT count(*) * 300 + coalesce(sum(pg_column_size(body) + pg_column_size(words)), 0) FROM originals)"
    " + (SELECT coalesce(sum(pg_column_size(body)), 0) FROM checkpoints)"
    " + (SELECT coalesce(sum(pg_column_size(text)), 0) FROM cuts)"
    " + (SELECT count(*) * 1200 FROM exchanges) + (SELECT count(*) * 600 FROM edits)"
    " + (SELECT count(*) * 500 FROM audit)"
)
TIME, DOUBTED = "time", "doubted"


def kept_time(connection: sa.Connection) -> tuple[float | None, float]:
    """The time that was kept last, else that of the newest row, and for how long the clock was ahead of it, seconds."""
    kept = connection.execute(sa.select(meta.c.name, meta.c.number).where(meta.c.name.in_((TIME, DOUBTED))))
    found = {row.name: float(row.number) for row in kept}
    newest = found.get(TIME) or connection.scalar(sa.select(sa.func.max(conversations.c.updated)))
    return newest, found.get(DOUBTED, 0.0)


def keep_time(connection: sa.Connection, believed: float, doubted: float) -> None:
    """Keep what :func:`kept_time` gives back."""
    rows = [{"name": DOUBTED, "number": int(doubted)}, {"name": TIME, "number": int(believed)}]
    connection.execute(KEEP_TIME[connection.dialect.name], rows)


def prune_conversations(connection: sa.Connection, before: float, at: float) -> int:
    """Delete some conversations that were last used before ``before``; how many, 0 when none is left."""
    rows = connection.execute(
        sa.select(conversations.c.tenant, conversations.c.id, conversations.c.name, conversations.c.requests)
        .where(conversations.c.updated < before)
        .order_by(conversations.c.updated)
        .limit(CONVERSATIONS_AT_ONCE)
    ).all()
    found = [(row.tenant, row.id, row.name, row.requests) for row in rows]
    append(connection, _delete(connection, found, at=at, reason="retention"))
    return len(rows)


def size(connection: sa.Connection) -> int:
    """Bytes that are in use: of the file without its free pages, of PostgreSQL what the large columns and rows take."""
    if connection.dialect.name == "sqlite":
        pages, free, each = (
            connection.exec_driver_sql(f"PRAGMA {name}").scalar_one()
            for name in ("page_count", "freelist_count", "page_size")
        )
        return int((pages - free) * each)
    # What PostgreSQL's files take says nothing: deleted rows leave room that is used again, not given back.
    return int(connection.execute(STORED).scalar_one())


def drop_oldest(connection: sa.Connection, before: float, at: float, most: float) -> tuple[int, int]:
    """Delete a few conversations last used before ``before``, closed ones first; how many, and requests they had.

    At least one, and no more than need be if each had a single one of the ``most`` requests that are to go.
    """
    limit = max(1, min(CONVERSATIONS_AT_ONCE, math.ceil(most)))
    rows = connection.execute(OLDEST.limit(limit), {"before": before}).all()
    found = [(row.tenant, row.id, row.name, row.requests) for row in rows]
    append(connection, _delete(connection, found, at=at, reason="size"))
    return len(rows), sum(row.requests for row in rows)


def requests(connection: sa.Connection) -> int:
    """How many requests the stored conversations had."""
    return int(connection.scalar(sa.select(sa.func.sum(conversations.c.requests))) or 0)


def prune_exchanges(connection: sa.Connection, before: float) -> int:
    """Delete some exchanges from before ``before``; how many, 0 when none is left."""
    return prune(connection, exchanges.c.id, before)


def prune_relayed(connection: sa.Connection, before: float) -> int:
    """Delete some relayed requests from before ``before``; how many, 0 when none is left."""
    return prune(connection, relayed.c.id, before)


def delete(connection: sa.Connection, conversation: ConversationRow, at: float) -> bool:
    """Delete a conversation with all its branches, bodies and words; whether it was there."""
    which = (conversation.tenant, conversation.id, conversation.name, conversation.requests)
    gone = _delete(connection, [which], at=at, reason="asked")
    if gone:  # what models wrote does not say of which conversation it is
        connection.execute(sa.delete(summaries).where(summaries.c.tenant == conversation.tenant))
    forget_words(connection)
    append(connection, gone)
    return bool(gone)


def _delete(
    connection: sa.Connection, which: Sequence[tuple[str, str, str, int]], *, at: float, reason: str
) -> list[AuditEvent]:
    """Delete conversations (tenant, id, name, requests); what the audit is to say of those that were there."""
    gone: list[AuditEvent] = []
    for tenant, conversation, name, requests in which:
        refs = list(
            connection.scalars(
                sa.select(removed.c.ref)
                .join(branches, sa.and_(branches.c.tenant == removed.c.tenant, branches.c.branch == removed.c.branch))
                .where(removed.c.tenant == tenant, branches.c.conversation == conversation)
                .distinct()
            )
        )
        there = connection.execute(
            sa.delete(conversations).where(conversations.c.tenant == tenant, conversations.c.id == conversation)
        ).rowcount
        drop_unheld(connection, tenant, refs)
        if there:
            counts = {"requests": requests, "removed": len(refs)}
            gone.append(of_deletion(tenant, conversation, name=name, at=at, reason=reason, counts=counts))
    return gone
