"""Checkpoints: a conversation's structured state as JSON text, one row for every version that was saved.

A row is given back only if the SHA-256 of its body is the one that was stored with it; else the one before it counts.
Versions that a rollback has taken back stay as history, but nothing goes on from them.
"""

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from hashlib import sha256
from itertools import accumulate
from operator import itemgetter
from typing import Any

import sqlalchemy as sa

from proxy.store.ledger import cuts_of
from proxy.store.packing import Damaged, pack_text, unpack_text
from proxy.store.records import Change, CheckpointRow, ConversationRow
from proxy.store.schema import OF_BRANCH, branches, checkpoints, cuts, of, recorded, same, stored
from proxy.store.transaction import Transaction

Spans = Sequence[tuple[int, int]]

# As text and without column types: it is read whenever a branch with edits is.
NEWEST_BODY = sa.text(
    "SELECT body, sha, length FROM checkpoints "
    "WHERE tenant = :tenant AND branch = :branch ORDER BY version DESC LIMIT 1"
).bindparams(*OF_BRANCH)
MINE = of(checkpoints, "tenant", "branch")
DROP_OLDER = sa.delete(checkpoints).where(
    MINE,
    checkpoints.c.version
    < sa.select(checkpoints.c.version)
    .where(MINE)
    .order_by(checkpoints.c.version.desc())
    .limit(1)
    .offset(sa.bindparam("skipped"))
    .scalar_subquery(),
    checkpoints.c.version
    != sa.select(sa.func.coalesce(sa.func.max(cuts.c.batch), 0)).where(of(cuts, "tenant", "branch")).scalar_subquery(),
)
LINES = (
    sa.select(branches.c.branch, branches.c.version, branches.c.undone)
    .where(of(branches, "tenant", "conversation"))
    .order_by(branches.c.updated.desc(), branches.c.created.desc(), branches.c.branch)
)
NEWEST = LINES.limit(1)


def newest_branch(tx: Transaction, conversation: ConversationRow) -> str | None:
    """The branch of a conversation that was used last."""
    found: str | None = tx.scalar(NEWEST, key_of(conversation))
    return found


def listed(tx: Transaction, conversation: ConversationRow) -> list[CheckpointRow]:
    """Every checkpoint of a conversation, all branches, oldest first, each with its cut where it has one.

    Within a branch it is the version that counts, whatever the clock said.
    """
    by_branch: dict[str, list[CheckpointRow]] = {}
    for row in _rows(tx, conversation):
        by_branch.setdefault(row.branch, []).append(row)
    placed = [
        (at, row)
        for line in by_branch.values()
        for at, row in zip(accumulate((row.at for row in line), max), line, strict=True)
    ]
    return [row for _, row in sorted(placed, key=itemgetter(0))]


def at_version(tx: Transaction, conversation: ConversationRow, version: int) -> CheckpointRow | None:
    """The checkpoint with this version, of the branch that was used last among those that have it."""
    found = {row.branch: row for row in _rows(tx, conversation, checkpoints.c.version == version)}
    return next((found[row.branch] for row in tx.execute(LINES, key_of(conversation)) if row.branch in found), None)


def latest(tx: Transaction, conversation: ConversationRow) -> CheckpointRow | None:
    """The newest whole checkpoint of the branch that was used last among those that have one."""
    for line in tx.execute(LINES, key_of(conversation)).all():
        row = newest_row(tx, conversation.tenant, line.branch, undone=read_spans(line.undone))
        if row is not None:
            return _with_cuts(tx, conversation, [row])[0]
    return None


def add_checkpoint(tx: Transaction, change: Change, *, version: int) -> None:
    """Store the change's checkpoint as ``version``; of older ones its ``keep`` newest stay, and the newest cut's."""
    if change.checkpoint is None:
        return
    row = CheckpointRow(
        branch=change.branch,
        version=version,
        at=change.at,
        body=change.checkpoint,
        reason=change.reason,
        window_id=change.window_id,
        length=change.length,
    )
    insert(tx, change.tenant, row)
    key = {"of_tenant": change.tenant, "of_branch": change.branch, "skipped": max(1, change.keep) - 1}
    tx.execute(DROP_OLDER, key)


def insert(tx: Transaction, tenant: str, row: CheckpointRow) -> None:
    values = stored(checkpoints, row, tenant=tenant, body=pack_text(row.body), sha=_sha(row.body))
    tx.execute(sa.insert(checkpoints), values)


def newest_body(tx: Transaction, tenant: str, branch: str, undone: str | None) -> tuple[str | None, int]:
    """The newest checkpoint of a branch that is whole and was not taken back (``undone``), and its length.

    None and 0 where there is none.
    """
    if undone is None:
        row = tx.execute(NEWEST_BODY, {"tenant": tenant, "branch": branch}).first()
        if row is None:
            return None, 0
        if (body := _whole(row)) is not None:
            return body, row.length
    found = newest_row(tx, tenant, branch, undone=read_spans(undone))
    return (None, 0) if found is None else (found.body, found.length)


def newest_row(
    tx: Transaction,
    tenant: str,
    branch: str,
    *,
    undone: Spans = (),
    below: int | None = None,
    longest: int | None = None,
) -> CheckpointRow | None:
    """The newest whole checkpoint of a branch without its cut, ``below`` a version, of at most ``longest`` messages."""
    query = sa.select(checkpoints).where(checkpoints.c.tenant == tenant, checkpoints.c.branch == branch)
    if below is not None:
        query = query.where(checkpoints.c.version < below)
    if longest is not None:
        query = query.where(checkpoints.c.length <= longest)
    for row in tx.execute(query.order_by(checkpoints.c.version.desc())):
        found = None if is_undone(row.version, undone) else _checkpoint(tx, row)
        if found is not None:
            return found
    return None


def read_spans(text: str | None) -> Spans:
    """The spans of versions that rollbacks have taken back, as a branch keeps them."""
    return tuple((first, last) for first, last in json.loads(text)) if text else ()


def is_undone(version: int, undone: Spans) -> bool:
    return any(first <= version <= last for first, last in undone)


def key_of(conversation: ConversationRow) -> dict[str, str]:
    return {"of_tenant": conversation.tenant, "of_conversation": conversation.id}


def _rows(tx: Transaction, conversation: ConversationRow, *where: sa.ColumnElement[bool]) -> list[CheckpointRow]:
    query = (
        sa.select(checkpoints)
        .join(branches, same(branches, checkpoints, "tenant", "branch"))
        .where(checkpoints.c.tenant == conversation.tenant, branches.c.conversation == conversation.id, *where)
        .order_by(checkpoints.c.branch, checkpoints.c.version)
    )
    found = [_checkpoint(tx, row) for row in tx.execute(query)]
    return _with_cuts(tx, conversation, [row for row in found if row is not None])


def _with_cuts(tx: Transaction, conversation: ConversationRow, rows: list[CheckpointRow]) -> list[CheckpointRow]:
    known = cuts_of(tx, conversation)
    made = [(row, known.get((row.branch, row.version))) for row in rows]
    return [row if its is None else replace(row, cut=its.cut, covered=its.covered) for row, its in made]


def _checkpoint(tx: Transaction, row: sa.Row[*tuple[Any, ...]]) -> CheckpointRow | None:
    body = _whole(row)
    if body is None:
        tx.damage("checkpoint", row.tenant, f"{row.branch} {row.version}")
        return None
    return recorded(CheckpointRow, checkpoints, row, body=body)


def _whole(row: sa.Row[*tuple[Any, ...]]) -> str | None:
    """The body of a row, None where it is not what was stored."""
    with suppress(Damaged):
        body = unpack_text(row.body)
        return body if _sha(body) == row.sha else None
    return None


def _sha(body: str) -> bytes:
    return sha256(body.encode("utf-8", "surrogatepass")).digest()
