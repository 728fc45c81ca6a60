"""Checkpoints: a conversation's structured state as JSON text, one row for every version that was saved.

A row is given back only if the SHA-256 of its body is the one that was stored with it; else the one before it counts.
Versions that a rollback has taken back stay as history, but nothing goes on from them.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from hashlib import sha256
from itertools import accumulate
from operator import itemgetter
from typing import Any

import sqlalchemy as sa

from proxy.store.ledger import Covering, Damage, cuts_of
from proxy.store.packing import Damaged, pack_text, unpack_text
from proxy.store.records import Change, CheckpointRow, ConversationRow
from proxy.store.tables import OF_BRANCH, branches, checkpoints, cuts

Spans = Sequence[tuple[int, int]]

ADD = sa.insert(checkpoints)
# As text and without column types: it is read whenever a branch with edits is.
NEWEST = sa.text(
    "SELECT body, sha, length FROM checkpoints "
    "WHERE tenant = :tenant AND branch = :branch ORDER BY version DESC LIMIT 1"
).bindparams(*OF_BRANCH)
MINE = sa.and_(checkpoints.c.tenant == sa.bindparam("tenant"), checkpoints.c.branch == sa.bindparam("branch"))
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
    != sa.select(sa.func.coalesce(sa.func.max(cuts.c.batch), 0))
    .where(cuts.c.tenant == sa.bindparam("tenant"), cuts.c.branch == sa.bindparam("branch"))
    .scalar_subquery(),
)
LINES = sa.select(branches.c.branch, branches.c.undone).where(
    branches.c.tenant == sa.bindparam("tenant"), branches.c.conversation == sa.bindparam("conversation")
)
LINES = LINES.order_by(branches.c.updated.desc(), branches.c.created.desc(), branches.c.branch)


def read_spans(text: str | None) -> Spans:
    """The spans of versions that rollbacks have taken back, as a branch keeps them."""
    return tuple((first, last) for first, last in json.loads(text)) if text else ()


def is_undone(version: int, undone: Spans) -> bool:
    """Whether a rollback has taken this version back."""
    return any(first <= version <= last for first, last in undone)


def add_checkpoint(connection: sa.Connection, change: Change, *, version: int, keep: int) -> None:
    """Store the change's checkpoint as ``version``; of older ones the newest ``keep`` stay, and the newest cut's."""
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
    insert(connection, change.tenant, row)
    prune_checkpoints(connection, change.tenant, change.branch, keep=keep)


def insert(connection: sa.Connection, tenant: str, row: CheckpointRow) -> None:
    """Store one row, with the SHA-256 of its body."""
    connection.execute(
        ADD,
        {
            "tenant": tenant,
            "branch": row.branch,
            "version": row.version,
            "at": row.at,
            "reason": row.reason,
            "window_id": row.window_id,
            "length": row.length,
            "body": pack_text(row.body),
            "sha": _sha(row.body),
        },
    )


def prune_checkpoints(connection: sa.Connection, tenant: str, branch: str, *, keep: int) -> int:
    """Delete a branch's checkpoints but the newest ``keep`` and the one of its newest cut; how many went."""
    values = {"tenant": tenant, "branch": branch, "skipped": max(1, keep) - 1}
    return connection.execute(DROP_OLDER, values).rowcount


def newest_body(
    connection: sa.Connection, tenant: str, branch: str, undone: str | None, damage: Damage
) -> tuple[str | None, int]:
    """The newest checkpoint of a branch that is whole and was not taken back (``undone``), and its length.

    None and 0 where there is none.
    """
    if undone is None:
        row = connection.execute(NEWEST, {"tenant": tenant, "branch": branch}).first()
        if row is None:
            return None, 0
        body = _whole(row)
        if body is not None:
            return body, row.length
    found = newest_row(connection, tenant, branch, damage, undone=read_spans(undone))
    return (None, 0) if found is None else (found.body, found.length)


def newest_row(
    connection: sa.Connection,
    tenant: str,
    branch: str,
    damage: Damage,
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
    for row in connection.execute(query.order_by(checkpoints.c.version.desc())):
        found = None if is_undone(row.version, undone) else _checkpoint(row, damage)
        if found is not None:
            return found
    return None


def listed(connection: sa.Connection, of: ConversationRow, damage: Damage) -> list[CheckpointRow]:
    """The checkpoints of every branch of a conversation with their cuts, oldest first, without damaged ones.

    Within a branch it is the version that counts, whatever the clock said.
    """
    by_branch: dict[str, list[CheckpointRow]] = {}
    for row in _rows(connection, of, damage, version=None):
        by_branch.setdefault(row.branch, []).append(row)
    placed = [
        (at, row)
        for line in by_branch.values()
        for at, row in zip(accumulate((row.at for row in line), max), line, strict=True)
    ]
    return [row for _, row in sorted(placed, key=itemgetter(0))]


def at_version(connection: sa.Connection, of: ConversationRow, version: int, damage: Damage) -> CheckpointRow | None:
    """The checkpoint with this version, of the branch that was used last among those that have it."""
    found = {row.branch: row for row in _rows(connection, of, damage, version=version)}
    return next((found[branch] for branch, _ in _lines(connection, of) if branch in found), None)


def latest(connection: sa.Connection, of: ConversationRow, damage: Damage) -> CheckpointRow | None:
    """The newest whole checkpoint of the branch that was used last among those that have one."""
    for branch, undone in _lines(connection, of):
        row = newest_row(connection, of.tenant, branch, damage, undone=undone)
        if row is not None:
            return _with_cut(row, cuts_of(connection, of, damage))
    return None


def _lines(connection: sa.Connection, of: ConversationRow) -> list[tuple[str, Spans]]:
    rows = connection.execute(LINES, {"tenant": of.tenant, "conversation": of.id})
    return [(row.branch, read_spans(row.undone)) for row in rows]


def _rows(
    connection: sa.Connection, of: ConversationRow, damage: Damage, *, version: int | None
) -> list[CheckpointRow]:
    query = (
        sa.select(checkpoints)
        .join(branches, sa.and_(branches.c.tenant == checkpoints.c.tenant, branches.c.branch == checkpoints.c.branch))
        .where(checkpoints.c.tenant == of.tenant, branches.c.conversation == of.id)
        .order_by(checkpoints.c.branch, checkpoints.c.version)
    )
    if version is not None:
        query = query.where(checkpoints.c.version == version)
    known = cuts_of(connection, of, damage)
    found = (_checkpoint(row, damage) for row in connection.execute(query))
    return [_with_cut(row, known) for row in found if row is not None]


def _checkpoint(row: sa.Row[*tuple[Any, ...]], damage: Damage) -> CheckpointRow | None:
    body = _whole(row)
    if body is None:
        damage("checkpoint", row.tenant, f"{row.branch} {row.version}")
        return None
    return CheckpointRow(
        branch=row.branch,
        version=row.version,
        at=row.at,
        body=body,
        reason=row.reason,
        window_id=row.window_id,
        length=row.length,
    )


def _with_cut(row: CheckpointRow, known: Mapping[tuple[str, int], Covering]) -> CheckpointRow:
    made = known.get((row.branch, row.version))
    return row if made is None else replace(row, cut=made.cut, covered=made.covered)


def _whole(row: sa.Row[*tuple[Any, ...]]) -> str | None:
    """The body of a row, None where it is not what was stored."""
    with suppress(Damaged):
        body = unpack_text(row.body)
        return body if _sha(body) == row.sha else None
    return None


def _sha(body: str) -> bytes:
    return sha256(body.encode("utf-8", "surrogatepass")).digest()
