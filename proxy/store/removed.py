"""What was removed from a conversation's window, as people see it."""

import json
from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from contextlib import suppress
from typing import Any

import msgspec
import sqlalchemy as sa

from policies.ledger import ADDING, EditKind
from proxy.store.archive import message_of, originals_with
from proxy.store.ledger import Batched, cuts_of, load_batches, newest_branch
from proxy.store.packing import Damaged
from proxy.store.records import ConversationRow, Original, RemovedRow
from proxy.store.schema import cuts, evictions, originals
from proxy.store.transaction import Transaction, owned

EXCERPT = 2000
Placed = tuple[RemovedRow, int]


def covered(tx: Transaction, tenant: str, ref: str) -> list[Original]:
    query = sa.select(cuts.c.covered).where(owned(cuts, tenant, ref=ref))
    found = tx.scalar(query.order_by(cuts.c.at.desc(), cuts.c.version.desc()).limit(1))
    return originals_with(tx, tenant, json.loads(found)) if found else []


def removed(
    tx: Transaction, conversation: ConversationRow, *, after: str | None = None, limit: int = 500
) -> list[RemovedRow]:
    """What is out of the newest branch's window, the newest first; KeyError where ``after`` is none
    of their refs.
    """
    gone = _gone(tx, conversation)
    # By batch, then by place: the clock may have been wrong.
    rows = [
        row for row, place in sorted(gone.values(), key=lambda each: (-each[0].version, -each[1]))
    ]
    if after is not None:
        places = [place for place, row in enumerate(rows) if row.ref == after]
        if not places:
            raise KeyError(after)
        rows = rows[places[0] + 1 :]
    rows = rows[:limit]
    query = sa.select(originals).where(
        owned(originals, conversation.tenant, ref=[row.ref for row in rows])
    )
    known_originals = {row.ref: row for row in tx.execute(query)}
    return [_with_original(tx, row, known_originals.get(row.ref)) for row in rows]


def count_removed(tx: Transaction, conversation: ConversationRow) -> int:
    """How many messages are out of the newest branch's window."""
    return len(_gone(tx, conversation))


def _gone(tx: Transaction, conversation: ConversationRow) -> dict[str, tuple[RemovedRow, int]]:
    """What is out of the newest branch's window by its ref, with its place in its batch."""
    branch = newest_branch(tx, conversation)
    if branch is None:
        return {}
    batches = load_batches(tx, conversation.tenant, branch, withheld=True)
    pinned = {edit.ref for *_, edit in batches if edit.kind is EditKind.PIN}
    gone = _edited(tx, conversation.tenant, branch, batches, pinned)
    for ref, (row, place) in _covered(tx, conversation, branch, pinned).items():
        gone[ref] = (
            msgspec.structs.replace(row, tool=gone[ref][0].tool) if ref in gone else row,
            place,
        )
    return gone


def _edited(
    tx: Transaction, tenant: str, branch: str, batches: Iterable[Batched], pinned: AbstractSet[str]
) -> dict[str, Placed]:
    known = tx.execute(sa.select(evictions).where(owned(evictions, tenant, branch=branch)))
    facts = {(row.version, bytes(row.digest), row.occurrence): row for row in known}
    gone: dict[str, Placed] = {}
    for _, batch, position, edit in batches:
        if (
            edit.kind in ADDING
            or not edit.ref
            or (edit.ref in pinned and edit.kind is not EditKind.CLIP)
        ):
            continue
        row = RemovedRow(ref=edit.ref, how=str(edit.kind), version=batch, at=0.0, kept=edit.tokens)
        fact = facts.get((batch, *edit.key))
        if fact is not None:
            row = msgspec.structs.replace(
                row, at=fact.at, tool=fact.tool, tokens=fact.tokens_before, kept=fact.tokens_after
            )
        gone[edit.ref] = (row, position)
    return gone


def _covered(
    tx: Transaction, conversation: ConversationRow, branch: str, pinned: AbstractSet[str]
) -> dict[str, Placed]:
    known = cuts_of(tx, conversation).items()
    made = [each for (line, _), each in known if line == branch and pinned.isdisjoint(each.covered)]
    newest = {each.window: each for each in made}.values()
    inside = {ref for each in newest for ref in each.covered}
    gone: dict[str, Placed] = {}
    for each in made:
        for place, ref in enumerate(each.covered):
            if ref in inside and ref not in gone:
                row = RemovedRow(ref=ref, how=each.cut.layer, version=each.batch, at=each.at)
                gone[ref] = (row, place)
    return gone


def _with_original(
    tx: Transaction, row: RemovedRow, original: sa.Row[*tuple[Any, ...]] | None
) -> RemovedRow:
    if original is None:
        return row
    text = ""
    if original.frame is not None and not original.quarantined:
        with suppress(Damaged):
            text = message_of(tx, original)[1][:EXCERPT]
    tokens = row.tokens or original.tokens
    return msgspec.structs.replace(
        row, role=original.role, tokens=tokens, text=text, at=row.at or original.at
    )
