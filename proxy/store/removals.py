"""What is out of the window of a conversation: by which edit or cut, since when, and what it said."""

from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import sqlalchemy as sa

from policies.ledger import ADDING, EditKind
from proxy.store.archive import chunks, said
from proxy.store.branches import newest
from proxy.store.ledger import Batched, Damage, cuts_of, load_batches
from proxy.store.packing import Damaged
from proxy.store.records import ConversationRow, RemovedRow
from proxy.store.tables import evictions, originals

EXCERPT = 2000
KNOWN = sa.select(
    evictions.c.version,
    evictions.c.digest,
    evictions.c.occurrence,
    evictions.c.tool,
    evictions.c.tokens_before,
    evictions.c.tokens_after,
    evictions.c.at,
).where(evictions.c.tenant == sa.bindparam("tenant"), evictions.c.branch == sa.bindparam("branch"))
SAID = sa.select(
    originals.c.ref,
    originals.c.role,
    originals.c.tokens,
    originals.c.at,
    originals.c.quarantined,
    originals.c.body,
).where(originals.c.tenant == sa.bindparam("tenant"), originals.c.ref.in_(sa.bindparam("refs", expanding=True)))


@dataclass(frozen=True, slots=True)
class _Gone:
    """One message that is out, and its place among all that went in the same batch."""

    row: RemovedRow
    place: int

    @property
    def order(self) -> tuple[int, int]:
        """By batch, then by place: the clock may have been wrong."""
        return (-self.row.version, -self.place)


def removed(
    connection: sa.Connection, of: ConversationRow, *, limit: int, damage: Damage, after: str | None = None
) -> list[RemovedRow] | None:
    """What edits and the newest cut have taken out of the newest branch's window, newest first.

    ``after`` leaves what comes behind the message with this ref; None where that is not out of the window.
    """
    branch = newest(connection, of)
    if branch is None:
        return []
    batches = load_batches(connection, of.tenant, branch, damage, withheld=True)
    pinned = {edit.ref for _, _, edit in batches if edit.kind is EditKind.PIN}
    gone = _edited(connection, of.tenant, branch, batches, pinned)
    for ref, each in _covered(connection, of, branch, pinned, damage).items():
        known = gone.get(ref)
        gone[ref] = each if known is None else replace(each, row=replace(each.row, tool=known.row.tool))
    newest_first = sorted(gone.values(), key=lambda each: each.order)
    if after is not None:
        places = [place for place, each in enumerate(newest_first) if each.row.ref == after]
        if not places:
            return None
        newest_first = newest_first[places[0] + 1 :]
    newest_first = newest_first[:limit]
    originally = _originally(connection, of.tenant, (each.row.ref for each in newest_first))
    return [_with_original(each.row, originally.get(each.row.ref)) for each in newest_first]


def _edited(
    connection: sa.Connection, tenant: str, branch: str, batches: Iterable[Batched], pinned: AbstractSet[str]
) -> dict[str, _Gone]:
    known = connection.execute(KNOWN, {"tenant": tenant, "branch": branch})
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


def _covered(
    connection: sa.Connection, of: ConversationRow, branch: str, pinned: AbstractSet[str], damage: Damage
) -> dict[str, _Gone]:
    """What the newest cut that hides nothing pinned stands for, each with the first cut that did."""
    known = cuts_of(connection, of, damage).items()
    made = [each for (line, _), each in known if line == branch and pinned.isdisjoint(each.covered)]
    inside = set(made[-1].covered) if made else set()
    gone: dict[str, _Gone] = {}
    for each in made:
        for place, ref in enumerate(each.covered):
            if ref in inside and ref not in gone:
                row = RemovedRow(ref=ref, how=each.cut.layer, version=each.batch, at=each.at)
                gone[ref] = _Gone(row, place)
    return gone


def _originally(connection: sa.Connection, tenant: str, refs: Iterable[str]) -> dict[str, sa.Row[*tuple[Any, ...]]]:
    found: dict[str, sa.Row[*tuple[Any, ...]]] = {}
    for chunk in chunks(refs):
        found |= {row.ref: row for row in connection.execute(SAID, {"tenant": tenant, "refs": chunk})}
    return found


def _excerpt(packed: bytes | None) -> str:
    with suppress(Damaged):
        return said(packed)[:EXCERPT] if packed is not None else ""
    return ""


def _with_original(row: RemovedRow, original: sa.Row[*tuple[Any, ...]] | None) -> RemovedRow:
    if original is None:
        return row
    return replace(
        row,
        role=original.role,
        tokens=row.tokens or original.tokens,
        text="" if original.quarantined else _excerpt(original.body),
        at=row.at or original.at,
    )
