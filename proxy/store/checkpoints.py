"""Checkpoints: a conversation's structured state as JSON text, one row for every version that was
saved.

One is given back only if the SHA-256 of its body is the one that was stored with it; else the one
before it counts. The two newest of a branch are stored whole, as is every 16th; the others as what
the next one has not (``base`` says which): damage costs those before it, up to the next whole one.
Versions that a rollback has taken back stay as history, but nothing goes on from them.
"""

import json
from collections.abc import Sequence
from contextlib import suppress
from hashlib import sha256
from itertools import accumulate, groupby
from operator import attrgetter, itemgetter
from typing import Any

import msgspec
import sqlalchemy as sa

from proxy.store.ledger import LINES, cuts_of, key_of
from proxy.store.packing import Damaged, pack_text, unpack_text
from proxy.store.records import Change, CheckpointRow, ConversationRow
from proxy.store.schema import OF_BRANCH, branches, checkpoints, cuts
from proxy.store.transaction import Transaction, of, owned, recorded, same, stored

Spans = Sequence[tuple[int, int]]
Bodies = dict[tuple[str, int], str | None]

# As text and without column types: it is read whenever a branch with edits is.
NEWEST_BODY = sa.text(
    "SELECT branch, version, body, sha, length, base FROM checkpoints "
    "WHERE tenant = :tenant AND branch = :branch ORDER BY version DESC LIMIT 1"
).bindparams(*OF_BRANCH)
CHECKPOINTS_OF_BRANCH = of(checkpoints, "tenant", "branch")
VERSIONS_KEPT = 100
"""How many checkpoints of a branch are kept."""
IN_A_ROW = 16
"""How many checkpoints, at most, are between two that are stored whole."""
ONE = of(checkpoints, "tenant", "branch", "version")
ONE_CHECKPOINT = sa.select(checkpoints).where(ONE)
BASES = sa.select(checkpoints.c.version, checkpoints.c.base).where(CHECKPOINTS_OF_BRANCH)
BASES = BASES.order_by(checkpoints.c.version.desc())
OF_NEWEST_CUT = sa.select(sa.func.max(cuts.c.batch)).where(of(cuts, "tenant", "branch"))


def listed(tx: Transaction, conversation: ConversationRow) -> list[CheckpointRow]:
    """Every checkpoint of a conversation, all branches, oldest first, each with its cut where it
    has one.

    Within a branch it is the version that counts, whatever the clock said.
    """
    placed = list[tuple[float, CheckpointRow]]()
    for _, line in groupby(_rows(tx, conversation), key=attrgetter("branch")):
        rows = list(line)
        placed += zip(accumulate((row.at for row in rows), max), rows, strict=True)
    return [row for _, row in sorted(placed, key=itemgetter(0))]


def at_version(
    tx: Transaction, conversation: ConversationRow, version: int
) -> CheckpointRow | None:
    found = {row.branch: row for row in _rows(tx, conversation, checkpoints.c.version == version)}
    lines = tx.execute(LINES, key_of(conversation.tenant, conversation.id))
    return next((found[line.branch] for line in lines if line.branch in found), None)


def latest(tx: Transaction, conversation: ConversationRow) -> CheckpointRow | None:
    for line in tx.execute(LINES, key_of(conversation.tenant, conversation.id)).all():
        row = newest_row(tx, conversation.tenant, line.branch, undone=read_spans(line.undone))
        if row is not None:
            return _with_cuts(tx, conversation, [row])[0]
    return None


def add_checkpoint(tx: Transaction, change: Change, *, version: int) -> None:
    """Store the change's checkpoint as ``version``; of older ones the newest stay, and the newest
    cut's.
    """
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
    key = {"of_tenant": change.tenant, "of_branch": change.branch}
    known = tx.execute(BASES, key).all()
    old = {each.version: each.base for each in known[VERSIONS_KEPT:]}
    if old:
        kept = tx.scalar(OF_NEWEST_CUT, key)
        if old.pop(kept, None) is not None:
            _pack(tx, change.tenant, change.branch, kept, None)
        gone = checkpoints.c.version.in_(old)
        tx.execute(sa.delete(checkpoints).where(CHECKPOINTS_OF_BRANCH, gone), key)


def insert(tx: Transaction, tenant: str, row: CheckpointRow) -> None:
    values = stored(checkpoints, row, tenant=tenant, body=pack_text(row.body), sha=_sha(row.body))
    tx.execute(sa.insert(checkpoints), values)
    key = {"of_tenant": tenant, "of_branch": row.branch}
    _, *known = tx.execute(BASES.limit(IN_A_ROW + 3), key).all()
    if len(known) > 1 and not (
        len(known) > IN_A_ROW and all(each.base is not None for each in known[2:])
    ):
        _pack(tx, tenant, row.branch, known[1].version, known[0].version)


def _pack(tx: Transaction, tenant: str, branch: str, version: int, base: int | None) -> None:
    known: Bodies = {}
    key: dict[str, Any] = {"of_tenant": tenant, "of_branch": branch, "of_version": version}
    row = tx.execute(ONE_CHECKPOINT, key).one()
    body = _whole(tx, row, known)
    like = None if base is None else _body(tx, key | {"of_version": base}, known)
    if body is not None and (base is None or like is not None):
        # Not an UPDATE: SQLite leaves the room in the page that a row no longer takes.
        tx.execute(sa.delete(checkpoints).where(ONE), key)
        tx.execute(
            sa.insert(checkpoints),
            {**row._mapping, "body": pack_text(body, like=like), "base": base},  # noqa: SLF001
        )


def newest_body(
    tx: Transaction, tenant: str, branch: str, undone: str | None
) -> tuple[str | None, int]:
    if undone is None:
        row = tx.execute(NEWEST_BODY, {"tenant": tenant, "branch": branch}).first()
        if row is None:
            return None, 0
        if row.base is None and (body := _whole(tx, row, {})) is not None:
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
    query = sa.select(checkpoints).where(owned(checkpoints, tenant, branch=branch))
    if below is not None:
        query = query.where(checkpoints.c.version < below)
    if longest is not None:
        query = query.where(checkpoints.c.length <= longest)
    known: Bodies = {}
    for row in tx.execute(query.order_by(checkpoints.c.version.desc())).all():
        found = None if is_undone(row.version, undone) else _checkpoint(tx, row, known)
        if found is not None:
            return found
    return None


def read_spans(text: str | None) -> Spans:
    return tuple((first, last) for first, last in json.loads(text)) if text else ()


def is_undone(version: int, undone: Spans) -> bool:
    return any(first <= version <= last for first, last in undone)


def _rows(
    tx: Transaction, conversation: ConversationRow, *where: sa.ColumnElement[bool]
) -> list[CheckpointRow]:
    query = sa.select(checkpoints).join(branches, same(branches, checkpoints, "tenant", "branch"))
    query = query.where(
        owned(checkpoints, conversation.tenant), branches.c.conversation == conversation.id, *where
    )
    query = query.order_by(checkpoints.c.branch, checkpoints.c.version)
    known: Bodies = {}
    found = [_checkpoint(tx, row, known) for row in reversed(tx.execute(query).all())]
    return _with_cuts(tx, conversation, [row for row in reversed(found) if row is not None])


def _with_cuts(
    tx: Transaction, conversation: ConversationRow, rows: list[CheckpointRow]
) -> list[CheckpointRow]:
    known = cuts_of(tx, conversation)
    made = [(row, known.get((row.branch, row.version))) for row in rows]
    return [
        row if its is None else msgspec.structs.replace(row, cut=its.cut, covered=its.covered)
        for row, its in made
    ]


def _checkpoint(
    tx: Transaction, row: sa.Row[*tuple[Any, ...]], known: Bodies
) -> CheckpointRow | None:
    body = _whole(tx, row, known)
    if body is None:
        tx.damage("checkpoint", row.tenant, f"{row.branch} {row.version}")
        return None
    return recorded(CheckpointRow, checkpoints, row, body=body)


def _body(tx: Transaction, key: dict[str, Any], known: Bodies) -> str | None:
    place = key["of_branch"], key["of_version"]
    if place not in known and (row := tx.execute(ONE_CHECKPOINT, key).first()) is not None:
        return _whole(tx, row, known)
    return known.get(place)


def _whole(tx: Transaction, row: sa.Row[*tuple[Any, ...]], known: Bodies) -> str | None:
    if (row.branch, row.version) not in known:
        like = None
        if row.base is not None:
            key = {"of_tenant": row.tenant, "of_branch": row.branch, "of_version": row.base}
            like = _body(tx, key, known)
        body = None
        if row.base is None or like is not None:
            with suppress(Damaged):
                body = unpack_text(row.body, like=like)
        is_whole = body is not None and _sha(body) == row.sha
        known[row.branch, row.version] = body if is_whole else None
    return known[row.branch, row.version]


def _sha(body: str) -> bytes:
    return sha256(body.encode("utf-8", "surrogatepass")).digest()
