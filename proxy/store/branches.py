"""Recognising a conversation by its chain, committing a batch of edits, forking, and going back.

State is found by content: a chain hash is seeded with whose history it is and covers every message
up to it, so the row with the longest stored prefix is the thread's state. Where two first requests
of one name race, both branches end up in the conversation that was stored first.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import msgspec
import sqlalchemy as sa

from policies.ledger import EVERY_WINDOW, ConversationState, Prepared, Trend
from proxy.store import checkpoints, ledger
from proxy.store.archive import add_originals, hold
from proxy.store.audit import append, of_change
from proxy.store.chain import AuditEvent, AuditType, digest_of
from proxy.store.checkpoints import Spans, is_undone, newest_row, read_spans
from proxy.store.conversations import one, open_conversations, touch_chains
from proxy.store.inspections import keep_texts
from proxy.store.ledger import NEWEST, key_of
from proxy.store.packing import Exact
from proxy.store.records import (
    DAY,
    Branch,
    Change,
    CheckpointRow,
    ConversationRow,
    NoSuchVersion,
    StaleVersion,
)
from proxy.store.schema import (
    OF_CONVERSATION,
    OF_TENANT,
    branches,
    chains,
    conversations,
    cuts,
    edits,
)
from proxy.store.transaction import Transaction, keep_first, of, owned

FIRST_LOOK = 8
LATER_LOOKS = 500
MAX_UNDONE = 50
BATCHED = ((edits, edits.c.version), (cuts, cuts.c.batch))
MINE = of(branches, "tenant", "branch")
BY_ID = (
    sa.select(branches, conversations.c.name, conversations.c.health)
    .join(conversations, OF_CONVERSATION)
    .where(MINE)
)
# All hashes travel as one value: SQLAlchemy spends ten times as long on 200 parameters as SQLite on
# 200 look-ups.
LOOK = (
    sa.text(
        "WITH RECURSIVE places (start) AS "
        "(SELECT 1 UNION ALL SELECT start + :width FROM places WHERE start + :width <= :size) "
        "SELECT chains.branch, chains.length FROM places CROSS JOIN chains "
        "WHERE chains.tenant = :tenant AND chains.hash = substr(:hashes, start, :width) "
        "ORDER BY chains.length DESC, chains.at DESC LIMIT 1"
    )
    .bindparams(
        OF_TENANT,
        sa.bindparam("hashes", type_=sa.LargeBinary),
        sa.bindparam("width", type_=sa.Integer),
        sa.bindparam("size", type_=sa.Integer),
    )
    .columns(chains.c.branch, chains.c.length)
)
ADD_BRANCH = keep_first(branches)
ADVANCE = (
    sa.update(branches)
    .where(of(branches, "tenant", "branch", "version"))
    .values(
        version=branches.c.version + 1,
        updated=sa.bindparam("now"),
        prepared=sa.case(
            (branches.c.prepared == sa.bindparam("known", type_=Exact), None),
            else_=branches.c.prepared,
        ),
        wanted=sa.case((sa.bindparam("done", type_=sa.Boolean), None), else_=branches.c.wanted),
        resumed=sa.func.coalesce(sa.bindparam("resumed_from", type_=Exact), branches.c.resumed),
    )
    .returning(branches.c.conversation)
)
NOW: dict[str, sa.ColumnElement[float]] = {
    "sqlite": (sa.func.julianday("now") - 2_440_587.5) * DAY,
    "postgresql": sa.cast(sa.extract("epoch", sa.func.clock_timestamp()), sa.Double),
}


def find(tx: Transaction, tenant: str, chain: Sequence[bytes]) -> Branch | None:
    """The branch with the longest stored prefix of ``chain`` (``chain[j]``: hash over ``j + 1``
    messages).

    ``length`` is how many messages matched, ``longest`` how many the branch has ever had; ties go
    to the newest.
    """
    stop = len(chain)
    size = FIRST_LOOK
    while stop > 0:
        start = max(0, stop - size)
        match = _look(tx, tenant, chain[start:stop])
        if match is not None:
            return _branch(tx, _row(tx, tenant, match.branch), length=match.length)
        stop = start
        size = LATER_LOOKS
    return None


def _look(tx: Transaction, tenant: str, links: Sequence[bytes]) -> sa.Row[*tuple[Any, ...]] | None:
    hashes = b"".join(links)
    values = {
        "tenant": tenant,
        "hashes": hashes,
        "size": len(hashes),
        "width": len(hashes) // len(links),
    }
    return tx.execute(LOOK, values).first()


def branch(tx: Transaction, tenant: str, branch_id: str) -> Branch | None:
    return _branch(tx, _row(tx, tenant, branch_id), length=0)


def commit(tx: Transaction, change: Change) -> int:
    """The branch's new version, once everything in ``change`` is durable; :class:`StaleVersion`
    stores nothing.
    """
    if change.expected == 0:
        _open_branch(tx, change, version=0, at=change.at)
    own = {"of_tenant": change.tenant, "of_branch": change.branch}
    changed = {
        "now": change.at,
        "known": write_prepared(change.prepared) if change.prepared and change.cut else None,
        "done": change.cut is not None or bool(change.edits),
        "resumed_from": change.resumed if tx.full else None,
    }
    advanced = tx.execute(ADVANCE, own | changed | {"of_version": change.expected}).first()
    if advanced is None:
        raise _stale(_row(tx, change.tenant, change.branch))
    version = change.expected + 1
    touch_chains(tx, [(change, [(change.chain_end, change.length)])])
    ledger.add_edits(tx, change.tenant, change.branch, change.window, version, change.edits)
    ledger.add_cut(tx, change, batch=version)
    if tx.full:
        checkpoints.add_checkpoint(tx, change, version=version)
    ledger.add_evictions(tx, change, version=version)
    add_originals(tx, change)
    append(
        tx,
        (*of_change(change, conversation=advanced.conversation, version=version), *change.audited),
    )
    return version


def fork(tx: Transaction, parent: Branch, forked: Branch, *, at: float) -> None:
    """Store a branch that knows some of its parent's edits and cuts; its version goes on from the
    parent's.

    It starts with the parent's newest checkpoint of at most the branch's ``length`` messages after
    the head.
    """
    if _open_branch(tx, forked, version=parent.version, at=at, parent=parent.branch):
        hold(tx, forked.tenant, forked.branch, ledger.copy_batches(tx, parent, forked, at=at))
        _copy_state(tx, parent, forked)


def restate(tx: Transaction, branch: Branch, *, at: float) -> None:
    """Bring a stored branch up to what memory has, where it has less: the file was replaced."""
    row = _row(tx, branch.tenant, branch.branch)
    if row is not None and row.version >= branch.version:
        return
    _open_branch(tx, branch, version=branch.version, at=at)
    forget_batches(tx, branch.tenant, branch.branch, [(0, branch.version)])
    _set(tx, branch.tenant, branch.branch, version=branch.version)
    hold(tx, branch.tenant, branch.branch, ledger.copy_batches(tx, branch, branch, at=at))


def prepare(tx: Transaction, tenant: str, branch: str, prepared: Prepared | None) -> bool:
    body = None if prepared is None or not tx.full else write_prepared(prepared)
    return _set(tx, tenant, branch, prepared=body)


def claim(
    tx: Transaction,
    tenant: str,
    branch: str,
    seconds: float,
    *,
    longest_failed: float | None = None,
) -> bool:
    """Whether to have the branch's next summary written: no other server is writing it, and none
    begins to for ``seconds``.

    The database's clock counts. Nor is it written where one was of no use for a history that was
    longer than ``longest_failed``.
    """
    now = NOW[tx.dialect]
    free = sa.or_(branches.c.preparing.is_(None), branches.c.preparing < now)
    if longest_failed is not None:
        free = sa.and_(
            free, sa.or_(branches.c.failed.is_(None), branches.c.failed <= longest_failed)
        )
    return _set(
        tx, tenant, branch, free, preparing=now + sa.bindparam("seconds", seconds, type_=sa.Double)
    )


def release(tx: Transaction, tenant: str, branch: str, *, failed: int | None = None) -> None:
    changed = {} if failed is None else {"failed": failed or None}
    _set(tx, tenant, branch, preparing=None, **changed)


def want(tx: Transaction, tenant: str, branch: str, what: str | None, at: float) -> bool:
    row = _row(tx, tenant, branch)
    if row is None or not _set(tx, tenant, branch, wanted=what):
        return False
    append(
        tx, [AuditEvent(tenant, at, AuditType.WANT, row.conversation, branch, facts={"what": what})]
    )
    return True


def rollback(tx: Transaction, conversation: ConversationRow, *, version: int, at: float) -> int:
    """The new head of the conversation's newest branch, which is again what it was at ``version``
    (0: as it came).

    Edits and cuts of later versions go; their originals stay. Raises :class:`NoSuchVersion`, or
    :class:`StaleVersion` where somebody commits at the same time.
    """
    tenant = conversation.tenant
    head = tx.execute(NEWEST.with_for_update(), key_of(tenant, conversation.id)).first()
    if (
        head is None
        or not 0 <= version <= head.version
        or is_undone(version, read_spans(head.undone))
    ):
        raise NoSuchVersion(
            f"the conversation cannot go back to version {version}", reason="version"
        )
    spans = [(version + 1, head.version)] if version < head.version else []
    facts = {"from": head.version, "to": version, "version": head.version + 1}
    return _undo(
        tx, (tenant, conversation.id), head, spans, at=at, facts=facts, prepared=None, wanted=None
    )


def take_back(
    tx: Transaction, branch: Branch, length: int, at: float, *, window: int
) -> Branch | None:
    """The branch without what was decided for a window on its requests of more than so many
    messages.
    """
    tenant = branch.tenant
    head = _row(tx, tenant, branch.branch)
    if head is None or head.version != branch.version:
        raise _stale(head)
    gone = set[int]()
    meant = (EVERY_WINDOW, window)
    for table, batch in BATCHED:
        mine = sa.and_(owned(table, tenant, branch=head.branch), table.c.window_tokens.in_(meant))
        gone.update(tx.scalars(sa.select(batch).where(mine, table.c.length > length)))
    facts = {
        "from": head.version,
        "batches": len(gone),
        "messages": length,
        "version": head.version + 1,
    }
    spans = [(batch, batch) for batch in sorted(gone)]
    _undo(tx, (tenant, head.conversation), head, spans, at=at, facts=facts, windows=meant)
    return _branch(tx, _row(tx, tenant, head.branch), length=0)


def _undo(
    tx: Transaction,
    home: tuple[str, str],
    head: sa.Row[*tuple[Any, ...]],
    spans: Spans,
    *,
    at: float,
    facts: Mapping[str, object],
    windows: Sequence[int] = (),
    **new: Any,
) -> int:
    tenant = home[0]
    version = int(head.version) + 1
    undone = sorted({*read_spans(head.undone), *spans})
    # the least is lost between those nearest to each other, the oldest of these
    while len(undone) > MAX_UNDONE:
        n = min(range(len(undone) - 1), key=lambda n: undone[n + 1][0] - undone[n][1])
        undone[n : n + 2] = [(undone[n][0], max(undone[n][1], undone[n + 1][1]))]
    unmoved = branches.c.version == head.version
    new |= {"version": version, "updated": at, "undone": json.dumps(undone)}
    if not _set(tx, tenant, head.branch, unmoved, **new):
        raise _stale(_row(tx, tenant, head.branch))
    state = newest_row(tx, tenant, head.branch, undone=undone)
    keep_texts(tx, home, head.branch, within(cuts.c.batch, spans))
    forget_batches(tx, tenant, head.branch, spans, windows)
    if state is not None:
        checkpoints.insert(
            tx, tenant, msgspec.structs.replace(state, version=version, at=at, reason="rollback")
        )
    append(tx, [AuditEvent(tenant, at, AuditType.ROLLBACK, home[1], head.branch, facts=facts)])
    return version


def latest_checkpoint(
    tx: Transaction, tenant: str, name_or_id: str
) -> tuple[ConversationRow, CheckpointRow] | None:
    conversation = one(tx, tenant, name_or_id)
    found = None if conversation is None else checkpoints.latest(tx, conversation)
    return None if conversation is None or found is None else (conversation, found)


def forget_batches(
    tx: Transaction, tenant: str, branch: str, spans: Spans, windows: Sequence[int] = ()
) -> None:
    """Forget what these batches decided, for these windows or, without any, for all."""
    for table, batch in BATCHED:
        meant = table.c.window_tokens.in_(windows) if windows else sa.true()
        tx.execute(
            sa.delete(table).where(owned(table, tenant, branch=branch), within(batch, spans), meant)
        )


def within(version: sa.ColumnElement[int], spans: Spans) -> sa.ColumnElement[bool]:
    return sa.or_(sa.false(), *(version.between(first, last) for first, last in spans))


def write_prepared(prepared: Prepared) -> str:
    said = asdict(prepared) | {"prefix": prepared.prefix.hex()}
    return json.dumps({**said, "sha": _sha(said)})


def _read_prepared(text: str) -> Prepared | None:
    try:
        said = json.loads(text) if text else None
        if not isinstance(said, dict) or said.pop("sha", None) != _sha(said):
            return None
        prefix = bytes.fromhex(said["prefix"])
        return Prepared(said["covers"], prefix, said["text"], said["purpose"], said["calls"])
    except (ValueError, TypeError, KeyError):
        return None


def _sha(said: Mapping[str, object]) -> str:
    return digest_of(json.dumps(said, sort_keys=True))


def _copy_state(tx: Transaction, parent: Branch, forked: Branch) -> None:
    old = _row(tx, parent.tenant, parent.branch)
    if old is None:
        return
    if old.undone is not None or old.resumed is not None:
        _set(tx, forked.tenant, forked.branch, undone=old.undone, resumed=old.resumed)
    below = min(
        [parent.version + 1, *ledger.batches_without(tx, parent, kept=forked.views.values())]
    )
    undone = read_spans(old.undone)
    row = newest_row(
        tx, parent.tenant, parent.branch, undone=undone, below=below, longest=forked.length
    )
    if row is not None:
        checkpoints.insert(tx, forked.tenant, msgspec.structs.replace(row, branch=forked.branch))


def _open_branch(
    tx: Transaction, opened: Branch | Change, *, version: int, at: float, parent: str | None = None
) -> bool:
    homes = open_conversations(tx, [(opened.tenant, opened.conversation, opened.name, "", at)])
    row = {
        "tenant": opened.tenant,
        "branch": opened.branch,
        "conversation": homes.get((opened.tenant, opened.name), opened.conversation),
        "parent": parent,
        "version": version,
        "longest": 0,
        "created": at,
        "updated": at,
        "trend_at": 0.0,
    }
    return tx.is_new(ADD_BRANCH, row)


def _set(
    tx: Transaction, tenant: str, branch: str, *where: sa.ColumnElement[bool], **values: Any
) -> bool:
    mine = owned(branches, tenant, branch=branch)
    return tx.execute(sa.update(branches).where(mine, *where).values(**values)).rowcount == 1


def _row(tx: Transaction, tenant: str, branch: str) -> sa.Row[*tuple[Any, ...]] | None:
    return tx.execute(BY_ID, {"of_tenant": tenant, "of_branch": branch}).first()


def _stale(row: sa.Row[*tuple[Any, ...]] | None) -> StaleVersion:
    return StaleVersion(0 if row is None else row.version)


def _branch(tx: Transaction, row: sa.Row[*tuple[Any, ...]] | None, *, length: int) -> Branch | None:
    if row is None:
        return None
    tenant = row.tenant
    is_touched = row.version > 0
    body, saved = (
        checkpoints.newest_body(tx, tenant, row.branch, row.undone) if is_touched else (None, 0)
    )
    prepared = None if row.prepared is None else _read_prepared(row.prepared)
    if row.prepared is not None and prepared is None:
        tx.damage("prepared", tenant, row.branch)
    return Branch(
        tenant=tenant,
        conversation=row.conversation,
        name=row.name,
        branch=row.branch,
        version=row.version,
        known=ConversationState(
            prepared=prepared,
            wanted=row.wanted,
            resumed=row.resumed,
            checkpoint=body,
            checkpoint_length=saved,
        ),
        views=ledger.load_views(tx, tenant, row.branch) if is_touched else {},
        floating=() if row.floating is None else tuple(map(bytes.fromhex, row.floating.split())),
        length=length,
        longest=row.longest,
        trend=None if row.trend is None else Trend.from_json(row.trend),
        health=row.health,
    )
