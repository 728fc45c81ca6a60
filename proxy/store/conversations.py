"""Recognising a conversation by its chain, committing a batch of edits, forking, and what people list.

State is found by content: a chain hash is seeded with the tenant and covers every message up to it, so the row with
the longest stored prefix is the conversation's state. A name only labels; where two first requests of one name race,
both branches end up in the conversation that was stored first.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import sqlalchemy as sa

from policies.ledger import Cut, Edit, Prepared
from policies.pressure import Trend
from proxy.store import audit_events, ledger
from proxy.store.archive import add_originals, hold
from proxy.store.audit import append
from proxy.store.branches import read_prepared, write_prepared
from proxy.store.bulk import run_many
from proxy.store.chain import AuditType
from proxy.store.checkpoints import add_checkpoint, insert, newest_body, newest_row, read_spans
from proxy.store.errors import StaleVersion
from proxy.store.evictions import add_evictions, load_evicted
from proxy.store.ledger import Damage
from proxy.store.paging import Place, ordered
from proxy.store.records import Branch, Change, CheckpointRow, ConversationRow
from proxy.store.tables import TENANT, ExactText, branches, chains, conversations, cuts, edits, keep_first, keep_last

FIRST_LOOK = 8
LATER_LOOKS = 500

OF_BRANCH = (
    branches.c.tenant == conversations.c.tenant,
    branches.c.conversation == conversations.c.id,
)
HEADS = sa.select(
    branches.c.branch,
    branches.c.version,
    branches.c.longest,
    branches.c.conversation,
    branches.c.trend,
    branches.c.prepared,
    branches.c.wanted,
    branches.c.resumed,
    branches.c.undone,
    conversations.c.name,
    conversations.c.health,
).join(conversations, sa.and_(*OF_BRANCH))
# All hashes travel as one value: SQLAlchemy spends ten times as long on 200 parameters as SQLite on 200 look-ups.
LOOK = (
    sa.text(
        "WITH RECURSIVE places (start) AS "
        "(SELECT 1 UNION ALL SELECT start + :width FROM places WHERE start + :width <= :size) "
        "SELECT chains.branch, chains.length FROM places CROSS JOIN chains "
        "WHERE chains.tenant = :tenant AND chains.hash = substr(:hashes, start, :width) "
        "ORDER BY chains.length DESC, chains.at DESC LIMIT 1"
    )
    .bindparams(
        sa.bindparam("tenant", type_=TENANT),
        sa.bindparam("hashes", type_=sa.LargeBinary),
        sa.bindparam("width", type_=sa.Integer),
        sa.bindparam("size", type_=sa.Integer),
    )
    .columns(chains.c.branch, chains.c.length)
)
BY_ID = HEADS.where(branches.c.tenant == sa.bindparam("tenant"), branches.c.branch == sa.bindparam("branch"))
NAMED = sa.select(conversations.c.id).where(
    conversations.c.tenant == sa.bindparam("tenant"), conversations.c.name == sa.bindparam("name")
)
ADD_BRANCH = keep_first(branches)
ADD_CONVERSATION = keep_first(conversations)
TOUCH_CHAIN = keep_last(chains, replaced=("at",))
HOMES = sa.select(conversations.c.name, conversations.c.id).where(
    conversations.c.tenant == sa.bindparam("tenant"), conversations.c.name.in_(sa.bindparam("names", expanding=True))
)
INHERIT = (
    sa.update(branches)
    .where(branches.c.tenant == sa.bindparam("t"), branches.c.branch == sa.bindparam("b"))
    .values(undone=sa.bindparam("gone"), resumed=sa.bindparam("body"))
)
FORGET_EDITS, FORGET_CUTS = (
    sa.delete(table).where(table.c.tenant == sa.bindparam("tenant"), table.c.branch == sa.bindparam("branch"))
    for table in (edits, cuts)
)
SET_VERSION = (
    sa.update(branches)
    .where(branches.c.tenant == sa.bindparam("t"), branches.c.branch == sa.bindparam("b"))
    .values(version=sa.bindparam("now"))
)
CLOSE = (
    sa.update(conversations)
    .where(conversations.c.tenant == sa.bindparam("t"), conversations.c.id == sa.bindparam("c"))
    .values(closed=sa.bindparam("now"))
)
ADVANCE = (
    sa.update(branches)
    .where(
        branches.c.tenant == sa.bindparam("t"),
        branches.c.branch == sa.bindparam("b"),
        branches.c.version == sa.bindparam("expected"),
    )
    .values(
        version=branches.c.version + 1,
        updated=sa.bindparam("now"),
        prepared=sa.case(
            (branches.c.prepared == sa.bindparam("known", type_=ExactText), None), else_=branches.c.prepared
        ),
        wanted=sa.case((sa.bindparam("done", type_=sa.Boolean), None), else_=branches.c.wanted),
        resumed=sa.func.coalesce(sa.bindparam("resumed_from", type_=ExactText), branches.c.resumed),
    )
    .returning(branches.c.conversation)
)


def named(connection: sa.Connection, tenant: str, name: str) -> str | None:
    """The internal id of the tenant's conversation with this label."""
    return connection.scalar(NAMED, {"tenant": tenant, "name": name})


def find(connection: sa.Connection, tenant: str, chain: Sequence[bytes], damage: Damage) -> Branch | None:
    """The branch with the longest stored prefix of ``chain`` (hashes of one size), the newest one on a tie, loaded."""
    stop, size = len(chain), FIRST_LOOK
    while stop > 0:
        start = max(0, stop - size)
        hashes = b"".join(chain[start:stop])
        values = {"tenant": tenant, "hashes": hashes, "size": len(hashes), "width": len(hashes) // (stop - start)}
        match = connection.execute(LOOK, values).first()
        if match is not None:
            row = connection.execute(BY_ID, {"tenant": tenant, "branch": match.branch}).one()
            return _branch(connection, tenant, row, length=match.length, damage=damage)
        stop, size = start, LATER_LOOKS
    return None


def branch(connection: sa.Connection, tenant: str, branch_id: str, damage: Damage) -> Branch | None:
    """The branch with this id, its edits and cuts loaded; ``length`` is 0."""
    row = connection.execute(BY_ID, {"tenant": tenant, "branch": branch_id}).first()
    return None if row is None else _branch(connection, tenant, row, length=0, damage=damage)


def commit(connection: sa.Connection, change: Change, *, full: bool) -> int:
    """The branch's new version after ``change`` is stored; :class:`StaleVersion` if it is not at ``expected``."""
    if change.expected == 0:
        open_branch(connection, change, parent=None)
    advanced = connection.execute(
        ADVANCE,
        {
            "t": change.tenant,
            "b": change.branch,
            "expected": change.expected,
            "now": change.at,
            "known": write_prepared(change.prepared) if change.prepared and change.cut else None,
            "done": change.cut is not None or bool(change.edits),
            "resumed_from": change.resumed if full else None,
        },
    ).first()
    if advanced is None:
        row = connection.execute(BY_ID, {"tenant": change.tenant, "branch": change.branch}).first()
        raise StaleVersion(0 if row is None else row.version)
    version = change.expected + 1
    if change.chain_end and change.length > 0:
        tip = {"tenant": change.tenant, "hash": change.chain_end, "branch": change.branch}
        run_many(connection, TOUCH_CHAIN[connection.dialect.name], [{**tip, "length": change.length, "at": change.at}])
    ledger.add_edits(
        connection, tenant=change.tenant, branch=change.branch, version=version, given=change.edits, full=full
    )
    ledger.add_cut(connection, change, batch=version, full=full)
    if full:
        add_checkpoint(connection, change, version=version, keep=change.keep)
    add_evictions(connection, change, version=version)
    add_originals(
        connection,
        tenant=change.tenant,
        branch=change.branch,
        given=change.originals,
        refs={*change.covered, *(edit.ref for edit in change.edits)},
        at=change.at,
        full=full,
    )
    told = audit_events.of_change(change, conversation=advanced.conversation, version=version)
    append(connection, (*told, *change.audited))
    return version


def fork(
    connection: sa.Connection,
    *,
    parent: Branch,
    branch: str,
    keep_edits: Sequence[Edit],
    keep_cuts: Sequence[Cut],
    at: float,
    length: int | None,
    damage: Damage,
    full: bool,
) -> Branch:
    """A new branch of the parent's conversation with these edits and cuts; its version goes on from the parent's.

    It goes on from the parent's newest checkpoint too, of those that were saved when the conversation had at most
    ``length`` messages after the head.
    """
    change = Change(
        tenant=parent.tenant,
        conversation=parent.conversation,
        name=parent.name,
        branch=branch,
        expected=parent.version,
        at=at,
    )
    state = None
    if open_branch(connection, change, parent=parent.branch):
        ledger.copy_edits(connection, parent, target=branch, kept=keep_edits, full=full)
        ledger.copy_cuts(connection, parent, target=branch, kept=keep_cuts, at=at, full=full)
        state = _copy_state(connection, parent, target=branch, kept=keep_cuts, length=length, damage=damage)
        refs = {edit.ref for edit in keep_edits} | ledger.refs_of_cuts(connection, tenant=parent.tenant, branch=branch)
        hold(connection, tenant=parent.tenant, branch=branch, refs=refs)
    return Branch(
        tenant=parent.tenant,
        conversation=parent.conversation,
        name=parent.name,
        branch=branch,
        version=parent.version,
        edits=tuple(keep_edits),
        cuts=tuple(keep_cuts),
        length=parent.length,
        longest=parent.length,
        resumed=parent.resumed,
        checkpoint=None if state is None else state.body,
        checkpoint_length=0 if state is None else state.length,
    )


def restate(
    connection: sa.Connection, *, known: Branch, edits: Sequence[Edit], cuts: Sequence[Cut], at: float, full: bool
) -> None:
    """Store a branch with all its edits and cuts as memory has it, unless what is stored is as new or newer."""
    stored = connection.execute(BY_ID, {"tenant": known.tenant, "branch": known.branch}).first()
    if stored is not None and stored.version >= known.version:
        return
    change = Change(
        tenant=known.tenant,
        conversation=known.conversation,
        name=known.name,
        branch=known.branch,
        expected=known.version,
        at=at,
    )
    open_branch(connection, change, parent=None)
    mine = {"tenant": known.tenant, "branch": known.branch}
    for statement in (FORGET_EDITS, FORGET_CUTS):
        connection.execute(statement, mine)
    connection.execute(SET_VERSION, {"t": known.tenant, "b": known.branch, "now": known.version})
    ledger.copy_edits(connection, known, target=known.branch, kept=edits, full=full)
    ledger.copy_cuts(connection, known, target=known.branch, kept=cuts, at=at, full=full)
    hold(connection, tenant=known.tenant, branch=known.branch, refs={edit.ref for edit in edits})


def _copy_state(
    connection: sa.Connection, parent: Branch, *, target: str, kept: Sequence[Cut], length: int | None, damage: Damage
) -> CheckpointRow | None:
    """The checkpoint that the fork goes on from, stored for it, with what the parent resumed and took back.

    Where a cut does not fit the fork, the checkpoints since then tell of another future.
    """
    old = connection.execute(BY_ID, {"tenant": parent.tenant, "branch": parent.branch}).first()
    if old is None:
        return None
    if old.undone is not None or old.resumed is not None:
        values = {"t": parent.tenant, "b": target, "gone": old.undone, "body": old.resumed}
        connection.execute(INHERIT, values)
    row = newest_row(
        connection,
        parent.tenant,
        parent.branch,
        damage,
        undone=read_spans(old.undone),
        below=min([parent.version + 1, *ledger.batches_without(connection, parent, kept=kept)]),
        longest=length,
    )
    if row is not None:
        insert(connection, parent.tenant, replace(row, branch=target))
    return row


def open_branch(connection: sa.Connection, change: Change, *, parent: str | None) -> bool:
    """Make sure that the change's conversation and branch exist; whether the branch is new."""
    rows = [(change.tenant, change.conversation, change.name, "", change.at)]
    home = open_conversations(connection, rows).get((change.tenant, change.name), change.conversation)
    made = connection.execute(
        ADD_BRANCH[connection.dialect.name],
        {
            "tenant": change.tenant,
            "branch": change.branch,
            "conversation": home,
            "parent": parent,
            "version": change.expected,
            "longest": 0,
            "created": change.at,
            "updated": change.at,
        },
    )
    return made.rowcount == 1


def open_conversations(
    connection: sa.Connection, rows: Sequence[tuple[str, str, str, str, float]]
) -> dict[tuple[str, str], str]:
    """Make sure that conversations of (tenant, id, name, model, time) exist; the id that every (tenant, name) has."""
    known = {(tenant, conversation): row for row in rows for tenant, conversation in (row[:2],)}
    run_many(
        connection,
        ADD_CONVERSATION[connection.dialect.name],
        [
            {
                "tenant": tenant,
                "id": conversation,
                "name": name,
                "created": at,
                "updated": at,
                "model": model,
                "requests": 0,
                "tokens_before": 0,
                "tokens_after": 0,
                "token_limit": 0,
                "zone": "green",
                "actions": "none",
            }
            for tenant, conversation, name, model, at in known.values()
        ],
    )
    homes: dict[tuple[str, str], str] = {}
    for tenant in {row[0] for row in rows}:
        names = sorted({row[2] for row in rows if row[0] == tenant})
        found = connection.execute(HOMES, {"tenant": tenant, "names": names})
        homes |= {(tenant, name): home for name, home in found}
    return homes


def close(connection: sa.Connection, of: ConversationRow, at: float) -> bool:
    """Mark a conversation as closed; whether it was there."""
    found = connection.execute(CLOSE, {"t": of.tenant, "c": of.id, "now": at}).rowcount == 1
    if found:
        append(connection, [audit_events.of_conversation(of, AuditType.CLOSE, at=at)])
    return found


def listed(
    connection: sa.Connection, tenant: str | None, *, limit: int, closed: bool | None = None, after: Place | None = None
) -> list[ConversationRow]:
    """The tenant's conversations, or with None everybody's, the one used last first.

    ``closed`` leaves those that are, or are not; ``after`` those behind one of which this is ``updated``, ``id`` and
    ``tenant``.
    """
    query = _listing(tenant)
    if closed is not None:
        query = query.where(conversations.c.closed.is_not(None) if closed else conversations.c.closed.is_(None))
    columns = conversations.c
    order = ((columns.updated, True), (columns.id, False), (columns.tenant, False))
    return [_row(row) for row in connection.execute(ordered(query, order, after=after, limit=limit))]


def one(connection: sa.Connection, tenant: str | None, name_or_id: str) -> ConversationRow | None:
    """The conversation with this label or internal id, the one used last where several tenants have it."""
    query = (
        _listing(tenant)
        .where(sa.or_(conversations.c.name == name_or_id, conversations.c.id == name_or_id))
        .order_by(conversations.c.updated.desc())
        .limit(1)
    )
    row = connection.execute(query).first()
    return None if row is None else _row(row)


def _branch(
    connection: sa.Connection, tenant: str, row: sa.Row[*tuple[Any, ...]], *, length: int, damage: Damage
) -> Branch:
    touched = row.version > 0
    body, saved = newest_body(connection, tenant, row.branch, row.undone, damage) if touched else (None, 0)
    return Branch(
        tenant=tenant,
        conversation=row.conversation,
        name=row.name,
        branch=row.branch,
        version=row.version,
        edits=ledger.load_edits(connection, tenant, row.branch, damage) if touched else (),
        cuts=ledger.load_cuts(connection, tenant, row.branch, damage) if touched else (),
        length=length,
        longest=row.longest,
        trend=None if row.trend is None else Trend.from_json(row.trend),
        evicted=load_evicted(connection, tenant, row.branch) if touched else (),
        prepared=None if row.prepared is None else _prepared(row, tenant, damage),
        wanted=row.wanted,
        resumed=row.resumed,
        checkpoint=body,
        checkpoint_length=saved,
        health=row.health,
    )


def _prepared(row: sa.Row[*tuple[Any, ...]], tenant: str, damage: Damage) -> Prepared | None:
    prepared = read_prepared(row.prepared)
    if prepared is None:
        damage("prepared", tenant, row.branch)
    return prepared


def _listing(tenant: str | None) -> sa.Select[*tuple[Any, ...]]:
    mine = sa.and_(*OF_BRANCH)
    count = sa.select(sa.func.count()).select_from(branches).where(mine).scalar_subquery()
    version = sa.select(sa.func.coalesce(sa.func.max(branches.c.version), 0)).where(mine).scalar_subquery()
    query: sa.Select[*tuple[Any, ...]] = sa.select(conversations, count.label("branches"), version.label("version"))
    return query if tenant is None else query.where(conversations.c.tenant == tenant)


def _row(row: sa.Row[*tuple[Any, ...]]) -> ConversationRow:
    return ConversationRow(
        id=row.id,
        name=row.name,
        tenant=row.tenant,
        created=row.created,
        updated=row.updated,
        model=row.model,
        requests=row.requests,
        branches=row.branches,
        version=row.version,
        tokens_before=row.tokens_before,
        tokens_after=row.tokens_after,
        limit=row.token_limit,
        zone=row.zone,
        actions=row.actions,
        parent=row.parent,
        closed=row.closed,
    )
