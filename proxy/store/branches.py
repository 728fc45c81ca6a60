"""What waits on a branch for its next request, and taking a branch back to what it was."""

import json
from collections.abc import Mapping
from dataclasses import replace
from hashlib import sha256

import sqlalchemy as sa

from policies.ledger import Prepared
from proxy.store.audit import append
from proxy.store.audit_events import of_conversation
from proxy.store.chain import AuditEvent, AuditType
from proxy.store.checkpoints import insert, is_undone, newest_row, read_spans
from proxy.store.errors import NoSuchVersion, StaleVersion
from proxy.store.ledger import Damage
from proxy.store.records import ConversationRow
from proxy.store.tables import branches, cuts, edits, evictions

MINE = sa.and_(branches.c.tenant == sa.bindparam("t"), branches.c.branch == sa.bindparam("b"))
PREPARE = sa.update(branches).where(MINE).values(prepared=sa.bindparam("body"))
NOW: dict[str, sa.ColumnElement[float]] = {
    "sqlite": (sa.func.julianday("now") - 2_440_587.5) * 86_400.0,
    "postgresql": sa.cast(sa.extract("epoch", sa.func.clock_timestamp()), sa.Double),
}
WANT = sa.update(branches).where(MINE).values(wanted=sa.bindparam("what")).returning(branches.c.conversation)
NEWEST = (
    sa.select(branches.c.branch, branches.c.version, branches.c.undone)
    .where(branches.c.tenant == sa.bindparam("tenant"), branches.c.conversation == sa.bindparam("conversation"))
    .order_by(branches.c.updated.desc(), branches.c.created.desc(), branches.c.branch)
    .limit(1)
)
NEWEST_HELD = NEWEST.with_for_update()  # SQLite has the whole file locked
TAKE_BACK = (
    sa.update(branches)
    .where(MINE, branches.c.version == sa.bindparam("expected"))
    .values(
        version=branches.c.version + 1,
        updated=sa.bindparam("now"),
        undone=sa.bindparam("spans"),
        prepared=None,
        wanted=None,
    )
)


def newest(connection: sa.Connection, of: ConversationRow) -> str | None:
    """The branch of a conversation that was used last."""
    found: str | None = connection.scalar(NEWEST, {"tenant": of.tenant, "conversation": of.id})
    return found


def prepare(connection: sa.Connection, tenant: str, branch: str, prepared: Prepared | None) -> bool:
    """Keep a summary for the branch's next batch, in place of any other; whether the branch is there."""
    body = None if prepared is None else write_prepared(prepared)
    return connection.execute(PREPARE, {"t": tenant, "b": branch, "body": body}).rowcount == 1


def claim(connection: sa.Connection, tenant: str, branch: str, seconds: float) -> bool:
    """Whether the branch's next summary is the caller's to have written for so long, by the clock of the database."""
    now = NOW[connection.dialect.name]
    values = {"t": tenant, "b": branch, "seconds": seconds}
    free = sa.or_(branches.c.preparing.is_(None), branches.c.preparing < now)
    taken = sa.update(branches).where(MINE, free).values(preparing=now + sa.bindparam("seconds", type_=sa.Double))
    return connection.execute(taken, values).rowcount == 1


def release(connection: sa.Connection, tenant: str, branch: str) -> None:
    """Let whoever asks next have the branch's next summary written."""
    connection.execute(sa.update(branches).where(MINE).values(preparing=None), {"t": tenant, "b": branch})


def want(connection: sa.Connection, tenant: str, branch: str, what: str | None, at: float) -> bool:
    """Ask something of the branch's next request; whether the branch is there."""
    row = connection.execute(WANT, {"t": tenant, "b": branch, "what": what}).first()
    if row is not None:
        told = {"tenant": tenant, "at": at, "conversation": row.conversation, "branch": branch}
        append(connection, [AuditEvent(**told, type=AuditType.WANT, facts={"what": what})])
    return row is not None


def rollback(connection: sa.Connection, of: ConversationRow, version: int, at: float, damage: Damage) -> int:
    """The new head of the conversation's newest branch, which is again what it was at ``version``.

    Edits and cuts of later versions go; their originals stay. Raises :class:`NoSuchVersion` and, where somebody
    commits at the same time, :class:`StaleVersion`.
    """
    head = connection.execute(NEWEST_HELD, {"tenant": of.tenant, "conversation": of.id}).first()
    undone = read_spans(None if head is None else head.undone)
    if head is None or not 0 <= version <= head.version or is_undone(version, undone):
        raise NoSuchVersion(f"the conversation cannot go back to version {version}", reason="version")
    later = ((version + 1, head.version),) if version < head.version else ()
    key = {"t": of.tenant, "b": head.branch}
    spans = json.dumps([*undone, *later])
    moved = connection.execute(TAKE_BACK, {**key, "expected": head.version, "now": at, "spans": spans})
    if moved.rowcount != 1:
        current = connection.scalar(sa.select(branches.c.version).where(MINE), key)
        raise StaleVersion(current or 0)
    state = newest_row(connection, of.tenant, head.branch, damage, undone=(*undone, *later))
    _forget_later(connection, of.tenant, head.branch, version)
    if state is not None:
        insert(connection, of.tenant, replace(state, version=head.version + 1, at=at, reason="rollback"))
    facts = {"from": head.version, "to": version, "version": head.version + 1}
    event = of_conversation(of, AuditType.ROLLBACK, at=at, branch=head.branch, facts=facts)
    append(connection, [event])
    return int(head.version) + 1


def write_prepared(prepared: Prepared) -> str:
    """A prepared summary as JSON text, with the SHA-256 of what it says."""
    said = _said(prepared)
    return json.dumps({**said, "sha": _sha(said)})


def read_prepared(text: str | None) -> Prepared | None:
    """The prepared summary that was written, None if it is damaged."""
    try:
        said = json.loads(text) if text else None
        if not isinstance(said, dict) or said.pop("sha", None) != _sha(said):
            return None
        return Prepared(**{**said, "prefix": bytes.fromhex(said["prefix"])})
    except (ValueError, TypeError, KeyError):
        return None


def _said(prepared: Prepared) -> dict[str, object]:
    return {
        "covers": prepared.covers,
        "prefix": prepared.prefix.hex(),
        "text": prepared.text,
        "proposal": prepared.proposal,
        "purpose": prepared.purpose,
        "calls": prepared.calls,
    }


def _sha(said: Mapping[str, object]) -> str:
    return sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def _forget_later(connection: sa.Connection, tenant: str, branch: str, version: int) -> None:
    for table, batch in ((edits, edits.c.version), (cuts, cuts.c.batch)):
        connection.execute(sa.delete(table).where(table.c.tenant == tenant, table.c.branch == branch, batch > version))
    # What is back in the window cannot be asked for again: the audit keeps its row, but no call is looked for.
    connection.execute(
        sa.update(evictions)
        .where(evictions.c.tenant == tenant, evictions.c.branch == branch, evictions.c.version > version)
        .values(call_hash=b"")
    )
