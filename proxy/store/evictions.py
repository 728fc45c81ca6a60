"""What batches took out of windows: which call each answered, what it freed, and whether it was asked for again."""

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import sqlalchemy as sa

from policies.ledger import ADDING, EditKind
from proxy.store.archive import message_of
from proxy.store.ledger import Batched, cuts_of, load_batches
from proxy.store.memory import newest_branch
from proxy.store.packing import Damaged
from proxy.store.records import Change, ConversationRow, EvictionRow, EvictionSum, ExchangeRow, RemovedRow
from proxy.store.schema import (
    OF_BRANCH,
    OF_CONVERSATION,
    branches,
    conversations,
    evictions,
    of,
    originals,
    recorded,
    same,
    stored,
)
from proxy.store.transaction import Place, Rows, Transaction, chunks, ordered

EXCERPT = 2000
ADD_EVICTION = sa.insert(evictions)
# A fork inherits what its parents had evicted until it left them.
EVICTED = (
    sa.text(
        "WITH RECURSIVE line (branch, parent, until) AS ("
        "SELECT branch, parent, CAST(1e300 AS DOUBLE PRECISION) FROM branches "
        "WHERE tenant = :tenant AND branch = :branch "
        "UNION SELECT b.branch, b.parent, c.created FROM line l "
        "JOIN branches c ON c.tenant = :tenant AND c.branch = l.branch "
        "JOIN branches b ON b.tenant = :tenant AND b.branch = l.parent) "
        "SELECT DISTINCT e.call_hash, e.branch FROM line l "
        "JOIN evictions e ON e.tenant = :tenant AND e.branch = l.branch AND e.at <= l.until "
        "WHERE length(e.call_hash) > 0 AND e.asked_again_at IS NULL"
    )
    .bindparams(*OF_BRANCH)
    .columns(evictions.c.call_hash, evictions.c.branch)
)
_OTHERS = evictions.alias()
ASKED_AGAIN = (
    sa.update(evictions)
    .where(
        of(evictions, "tenant", "branch", "call_hash"),
        evictions.c.version
        == sa.select(sa.func.max(_OTHERS.c.version))
        .where(of(_OTHERS, "tenant", "branch", "call_hash"))
        .scalar_subquery(),
    )
    .values(
        asked_again_at=sa.func.coalesce(evictions.c.asked_again_at, sa.bindparam("now")),
        asked_again_count=evictions.c.asked_again_count + 1,
    )
)


def add_evictions(tx: Transaction, change: Change, *, version: int) -> None:
    own = {"tenant": change.tenant, "branch": change.branch, "version": version, "at": change.at}
    tx.many(ADD_EVICTION, [stored(evictions, row, **own, position=n) for n, row in enumerate(change.evictions)])


def load_evicted(tx: Transaction, tenant: str, branch: str) -> tuple[tuple[bytes, str], ...]:
    return tuple((bytes(call), where) for call, where in tx.execute(EVICTED, {"tenant": tenant, "branch": branch}))


def mark_asked_again(tx: Transaction, rows: Sequence[ExchangeRow]) -> None:
    asked = [
        {"of_tenant": row.tenant, "of_branch": branch, "of_call_hash": call, "now": row.at}
        for row in rows
        for branch, call in row.asked_again
    ]
    tx.many(ASKED_AGAIN, asked)


def sums(
    tx: Transaction, tenant: str | None, *, conversation: ConversationRow | None = None, policy: str | None = None
) -> list[EvictionSum]:
    columns = evictions.c
    before, after = sa.func.sum(columns.tokens_before), sa.func.sum(columns.tokens_after)
    query = sa.select(
        columns.layer, columns.tool, sa.func.count(), sa.func.count(columns.asked_again_at), before, after
    ).select_from(evictions)
    query = _of(query, tenant, conversation, policy).group_by(columns.layer, columns.tool)
    rows = tx.execute(query.order_by((before - after).desc(), columns.layer, columns.tool))
    names = ("evicted", "asked_again", "tokens_before", "tokens_after")
    return [
        EvictionSum(layer=layer, tool=tool, **dict(zip(names, map(int, counts), strict=True)))
        for layer, tool, *counts in rows
    ]


def listed(
    tx: Transaction,
    tenant: str | None,
    *,
    conversation: ConversationRow | None = None,
    policy: str | None = None,
    asked_again: bool = False,
    limit: int = 200,
    after: Place | None = None,
) -> list[EvictionRow]:
    query = _of(sa.select(evictions, conversations.c.name), tenant, conversation, policy)
    if asked_again:
        query = query.where(evictions.c.asked_again_at.is_not(None))
    columns = evictions.c
    order = ((columns.at, True), (columns.branch, False), (columns.version, True), (columns.position, False))
    rows = tx.execute(ordered(query, order, after=after, limit=limit))
    return [recorded(EvictionRow, evictions, row, conversation=row.name) for row in rows]


@dataclass(frozen=True, slots=True)
class _Gone:
    row: RemovedRow
    place: int

    @property
    def order(self) -> tuple[int, int]:
        """By batch, then by place: the clock may have been wrong."""
        return (-self.row.version, -self.place)


def all_removed(tx: Transaction, conversation: ConversationRow, *, limit: int = 500) -> list[RemovedRow]:
    return removed_after(tx, conversation, None, limit=limit) or []


def removed_after(
    tx: Transaction, conversation: ConversationRow, after: str | None, *, limit: int
) -> list[RemovedRow] | None:
    branch = newest_branch(tx, conversation)
    if branch is None:
        return []
    batches = load_batches(tx, conversation.tenant, branch, withheld=True)
    pinned = {edit.ref for _, _, edit in batches if edit.kind is EditKind.PIN}
    gone = _edited(tx, conversation.tenant, branch, batches, pinned)
    for ref, each in _covered(tx, conversation, branch, pinned).items():
        known = gone.get(ref)
        gone[ref] = each if known is None else replace(each, row=replace(each.row, tool=known.row.tool))
    rows = [each.row for each in sorted(gone.values(), key=lambda each: each.order)]
    if after is not None:
        places = [place for place, row in enumerate(rows) if row.ref == after]
        if not places:
            return None
        rows = rows[places[0] + 1 :]
    rows = rows[:limit]
    known_originals: dict[str, sa.Row[*tuple[Any, ...]]] = {}
    for refs in chunks(row.ref for row in rows):
        query = sa.select(originals).where(originals.c.tenant == conversation.tenant, originals.c.ref.in_(refs))
        known_originals |= {row.ref: row for row in tx.execute(query)}
    return [_with_original(tx, row, known_originals.get(row.ref)) for row in rows]


def _of(query: Rows, tenant: str | None, conversation: ConversationRow | None, policy: str | None) -> Rows:
    query = query.join(branches, same(branches, evictions, "tenant", "branch")).join(conversations, OF_CONVERSATION)
    if tenant is not None:
        query = query.where(evictions.c.tenant == tenant)
    if conversation is not None:
        query = query.where(evictions.c.tenant == conversation.tenant, branches.c.conversation == conversation.id)
    return query if policy is None else query.where(evictions.c.policy == policy)


def _edited(
    tx: Transaction, tenant: str, branch: str, batches: Iterable[Batched], pinned: AbstractSet[str]
) -> dict[str, _Gone]:
    known = tx.execute(sa.select(evictions).where(evictions.c.tenant == tenant, evictions.c.branch == branch))
    facts = {(row.version, bytes(row.digest), row.occurrence): row for row in known}
    gone: dict[str, _Gone] = {}
    for batch, position, edit in batches:
        if edit.kind in ADDING or not edit.ref or (edit.ref in pinned and edit.kind is not EditKind.CLIP):
            continue
        row = RemovedRow(ref=edit.ref, how=str(edit.kind), version=batch, at=0.0, kept=edit.tokens)
        fact = facts.get((batch, *edit.key))
        if fact is not None:
            row = replace(row, at=fact.at, tool=fact.tool, tokens=fact.tokens_before, kept=fact.tokens_after)
        gone[edit.ref] = _Gone(row, position)
    return gone


def _covered(tx: Transaction, conversation: ConversationRow, branch: str, pinned: AbstractSet[str]) -> dict[str, _Gone]:
    known = cuts_of(tx, conversation).items()
    made = [each for (line, _), each in known if line == branch and pinned.isdisjoint(each.covered)]
    inside = set(made[-1].covered) if made else set()
    gone: dict[str, _Gone] = {}
    for each in made:
        for place, ref in enumerate(each.covered):
            if ref in inside and ref not in gone:
                row = RemovedRow(ref=ref, how=each.cut.layer, version=each.batch, at=each.at)
                gone[ref] = _Gone(row, place)
    return gone


def _with_original(tx: Transaction, row: RemovedRow, original: sa.Row[*tuple[Any, ...]] | None) -> RemovedRow:
    if original is None:
        return row
    text = ""
    is_whole = original.body is not None or original.frame is not None
    with suppress(Damaged):
        text = message_of(tx, original)[1][:EXCERPT] if is_whole and not original.quarantined else ""
    tokens, at = row.tokens or original.tokens, row.at or original.at
    return replace(row, role=original.role, tokens=tokens, text=text, at=at)
