"""Whole conversations: export of one, and deletion of what is past its retention or unwanted."""

import json
import math
import time
from base64 import b64encode
from collections.abc import Sequence
from contextlib import closing
from typing import Any

import sqlalchemy as sa

from proxy.store import answers as answers_
from proxy.store import checkpoints as checkpoints_
from proxy.store import inspections
from proxy.store.archive import drop_unheld, forget_words, held, read_original
from proxy.store.audit import append, of_deletion
from proxy.store.chain import AuditEvent
from proxy.store.records import ConversationRow
from proxy.store.schema import (
    alerts,
    answers,
    audit,
    branches,
    chains,
    checkpoints,
    conversations,
    cuts,
    edits,
    evictions,
    exchanges,
    health_snapshots,
    meta,
    notes,
    originals,
    provider_ids,
    relayed,
    removed,
    summaries,
)
from proxy.store.transaction import Rows, Transaction, keep_last, owned
from proxy.store.usage import keep_usage

CONVERSATIONS_AT_ONCE = 10
ROWS_AT_ONCE = 500
PAGES_AT_ONCE = 256
PRUNED = (exchanges.c.id, relayed.c.id, summaries.c.key, answers.c.id, provider_ids.c.digest)
STORED = sa.text(
    "SELECT (SELECT count(*) * 300 + coalesce(sum(pg_column_size(words)), 0) FROM originals)"
    " + (SELECT coalesce(sum(pg_column_size(body)), 0) FROM frames)"
    " + (SELECT coalesce(sum(pg_column_size(body)), 0) FROM checkpoints)"
    " + (SELECT coalesce(sum(pg_column_size(text)), 0) FROM cuts)"
    " + (SELECT coalesce(sum(pg_column_size(body)), 0) FROM answers)"
    " + (SELECT count(*) * 1200 FROM exchanges) + (SELECT count(*) * 600 FROM edits)"
    " + (SELECT count(*) * 500 FROM audit)"
)
OF_CONVERSATION = (exchanges, notes, health_snapshots, alerts)
OF_BRANCHES = (edits, cuts, checkpoints, evictions, chains)
JSON_TEXT = frozenset(
    {"covered", "facts", "stays", "detail", "trend", "undone", "prepared", "health"}
)
HIDDEN = frozenset({"tenant", "failed"})
SIZE = "size:"
HOUR = 3600
HOURS_KEPT = 31 * 24
KEEP_SIZE = keep_last(meta, "number")


def export(tx: Transaction, conversation: ConversationRow) -> dict[str, Any]:
    """Everything that is known of a conversation as plain data: the rows of every table that refers
    to it, by table.

    Digests are hex, JSON columns are read, the bodies of originals are in base64.
    """
    tenant = conversation.tenant
    its_id = conversation.id
    mine = owned(branches, tenant, conversation=its_id)
    own = sa.select(branches.c.branch).where(mine)
    itself = sa.select(conversations).where(owned(conversations, tenant, id=its_id))
    found: dict[str, Any] = {
        "conversation": next(iter(_rows(tx, itself)), None),
        "branches": _rows(
            tx, sa.select(branches).where(mine).order_by(branches.c.created, branches.c.branch)
        ),
    }
    for table in OF_CONVERSATION:
        query = sa.select(table).where(owned(table, tenant, conversation=its_id))
        order = [table.c.at] if "at" in table.c else []
        found[table.name] = _rows(tx, query.order_by(*order, *table.primary_key.columns))
    found["inspected"], found["inspected_parts"] = inspections.exported(tx, conversation)
    for table in OF_BRANCHES:
        query = sa.select(table).where(owned(table, tenant, branch=own))
        found[table.name] = _rows(tx, query.order_by(*table.primary_key.columns))
    bodies = {
        (each.branch, each.version): each.body for each in checkpoints_.listed(tx, conversation)
    }
    for row in found["checkpoints"]:
        row |= {"body": bodies.get((row["branch"], row["version"]))}
        del row["base"]
    found["answers"] = answers_.answers_of(tx, conversation)
    audited = sa.select(audit).where(owned(audit, tenant, conversation=its_id))
    found["audit"] = _rows(tx, audited.order_by(audit.c.seq))
    refs = sa.select(removed.c.ref).where(owned(removed, tenant, branch=own))
    query = sa.select(originals).where(owned(originals, tenant, ref=refs))
    found["originals"] = [_original(tx, row) for row in tx.execute(query.order_by(originals.c.id))]
    return found


def delete(tx: Transaction, conversation: ConversationRow, at: float | None = None) -> bool:
    which = (conversation.tenant, conversation.id, conversation.name, conversation.requests)
    gone = _delete(tx, [which], at=time.time() if at is None else at, reason="asked")
    if gone:  # models' texts do not name their conversation
        tx.execute(sa.delete(summaries).where(owned(summaries, conversation.tenant)))
    forget_words(tx)
    append(tx, gone)
    return bool(gone)


def prune_conversations(tx: Transaction, *, before: float, at: float) -> int:
    rows = tx.execute(_oldest(before).limit(CONVERSATIONS_AT_ONCE)).all()
    append(tx, _delete(tx, rows, at=at, reason="retention"))
    return len(rows)


def prune(tx: Transaction, key: sa.Column[Any], *, before: float) -> int:
    table = key.table
    rows = tx.execute(
        sa.select(table.c.tenant, key).where(table.c.at < before).limit(ROWS_AT_ONCE)
    ).all()
    for tenant in {row.tenant for row in rows}:
        keys = [found for its, found in rows if its == tenant]
        tx.execute(sa.delete(table).where(owned(table, tenant, **{key.key: keys})))
    return len(rows)


def drop_oldest(tx: Transaction, *, before: float, at: float, most: float) -> tuple[int, int]:
    limit = max(1, min(CONVERSATIONS_AT_ONCE, math.ceil(most)))
    rows = tx.execute(_oldest(before, conversations.c.closed.is_(None)).limit(limit)).all()
    append(tx, _delete(tx, rows, at=at, reason="size"))
    return len(rows), sum(row.requests for row in rows)


def requests(tx: Transaction) -> int:
    return int(tx.scalar(sa.select(sa.func.sum(conversations.c.requests))) or 0)


def counts(tx: Transaction, *, before: float) -> dict[str, int]:
    """How many conversations there are, how many of them were last used ``before``, and bytes in
    use.
    """
    old = (
        sa.select(sa.func.count())
        .select_from(conversations)
        .where(conversations.c.updated < before)
    )
    return {
        "conversations": tx.scalar(sa.select(sa.func.count()).select_from(conversations)) or 0,
        "due": tx.scalar(old) or 0,
        "bytes": size(tx),
    }


def size(tx: Transaction) -> int:
    """Bytes that are in use: of the file without its free pages, of PostgreSQL what the large
    columns and rows take.
    """
    if tx.dialect == "sqlite":
        names = ("page_count", "freelist_count", "page_size")
        pages, free, each = (tx.execute(sa.text(f"PRAGMA {name}")).scalar_one() for name in names)
        return int((pages - free) * each)
    # The size of PostgreSQL's files is no measure: deleted rows leave room that is used again, not
    # given back.
    return int(tx.execute(STORED).scalar_one())


def give_back(tx: Transaction) -> bool:
    """Give some free room of a SQLite file back to the file system; whether there is more."""
    if tx.dialect != "sqlite":
        return False
    free = sa.text("PRAGMA freelist_count")
    before: int = tx.execute(free).scalar_one()
    with closing(tx.connection.connection.cursor()) as cursor:
        cursor.execute(f"PRAGMA incremental_vacuum({PAGES_AT_ONCE})")
        cursor.fetchall()  # each step gives back one page
    after: int = tx.execute(free).scalar_one()
    return 0 < after < before


def keep_size(tx: Transaction, at: float) -> None:
    hour = int(at) // HOUR
    tx.execute(KEEP_SIZE, {"name": f"{SIZE}{hour}", "number": size(tx)})
    tx.execute(
        sa.delete(meta).where(
            meta.c.name.startswith(SIZE), meta.c.name < f"{SIZE}{hour - HOURS_KEPT}"
        )
    )


def sizes(tx: Transaction) -> list[tuple[float, int]]:
    rows = tx.execute(
        sa.select(meta.c.name, meta.c.number)
        .where(meta.c.name.startswith(SIZE))
        .order_by(meta.c.name)
    )
    return [(float(row.name.removeprefix(SIZE)) * HOUR, row.number) for row in rows]


def _oldest(before: float, *first: sa.ColumnElement[Any]) -> Rows:
    columns = (
        conversations.c.tenant,
        conversations.c.id,
        conversations.c.name,
        conversations.c.requests,
    )
    query: Rows = sa.select(*columns).where(conversations.c.updated < before)
    return query.order_by(*first, conversations.c.updated)


def _delete(
    tx: Transaction, which: Sequence[Sequence[Any]], *, at: float, reason: str
) -> list[AuditEvent]:
    gone: list[AuditEvent] = []
    for tenant, conversation, name, requests in which:
        refs = held(tx, tenant, conversation)
        keep_usage(tx, tenant, conversation)
        is_there = tx.execute(
            sa.delete(conversations).where(owned(conversations, tenant, id=conversation))
        ).rowcount
        tx.execute(sa.delete(answers).where(owned(answers, tenant, conversation=conversation)))
        drop_unheld(tx, tenant, refs)
        if is_there:
            counts = {"requests": requests, "removed": len(refs)}
            gone.append(
                of_deletion(tenant, conversation, name=name, at=at, reason=reason, counts=counts)
            )
    return gone


def _original(tx: Transaction, row: sa.Row[*tuple[Any, ...]]) -> dict[str, Any]:
    whole = read_original(tx, row)
    return {
        "ref": row.ref,
        "role": row.role,
        "tokens": row.tokens,
        "size": row.size,
        "sha256": row.sha.hex(),
        "at": row.at,
        "body": None if whole is None else b64encode(whole.body).decode("ascii"),
    }


def _rows(tx: Transaction, query: Rows) -> list[dict[str, Any]]:
    rows = tx.execute(query).mappings()
    return [
        {name: _plain(name, value) for name, value in row.items() if name not in HIDDEN}
        for row in rows
    ]


def _plain(name: str, value: object) -> object:
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, str) and name in JSON_TEXT:
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value
