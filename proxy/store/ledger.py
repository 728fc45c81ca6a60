"""A branch's edits and cuts: how they are written, and read back only if they are what was written."""

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import sqlalchemy as sa

from policies.ledger import Cut, Edit, EditKind
from proxy.store.errors import StoreError
from proxy.store.packing import Damaged, unpack_words
from proxy.store.records import Branch, Change, ConversationRow
from proxy.store.tables import OF_BRANCH, branches, cuts, edits

Damage = Callable[[str, str, str], None]
Batched = tuple[int, int, Edit]
KINDS = {str(kind): kind for kind in EditKind}

ADD_EDITS = sa.insert(edits)
ADD_CUTS = sa.insert(cuts)
BATCHES = (
    sa.select(edits.c.digest, edits.c.occurrence, sa.func.max(edits.c.version).label("batch"))
    .where(edits.c.tenant == sa.bindparam("tenant"), edits.c.branch == sa.bindparam("branch"))
    .group_by(edits.c.digest, edits.c.occurrence)
)
LATEST_CUT = sa.select(sa.func.max(cuts.c.version)).where(
    cuts.c.tenant == sa.bindparam("tenant"), cuts.c.branch == sa.bindparam("branch")
)
# As text and without column types: a ledger may have a thousand edits, and converting rows would be most of the time.
EDITS = sa.text(
    "SELECT digest, occurrence, kind, text, ref, tokens, chain, sha, version, position, length FROM edits "
    "WHERE tenant = :tenant AND branch = :branch ORDER BY version, position"
).bindparams(*OF_BRANCH)
CUTS = (
    sa.select(*(c for c in cuts.c if c.name != "covered"))
    .where(cuts.c.tenant == sa.bindparam("tenant"), cuts.c.branch == sa.bindparam("branch"))
    .order_by(cuts.c.version)
)


@dataclass(frozen=True, slots=True)
class Covering:
    """A cut, the refs of what it covers in order, the number of its batch, and when that was."""

    cut: Cut
    covered: tuple[str, ...]
    batch: int
    at: float


WITHHELD = b""
"""In place of the SHA-256 of an edit or a cut: it was stored without its text (``store.content: digest``)."""


def load_edits(connection: sa.Connection, tenant: str, branch: str, damage: Damage) -> tuple[Edit, ...]:
    """The newest edit of every message, oldest first; a row whose SHA-256 does not match is reported, not returned."""
    found: dict[tuple[bytes, int], Edit] = {}
    for _, _, edit in load_batches(connection, tenant, branch, damage):
        key = (edit.digest, edit.occurrence)  # not the property: there may be a thousand
        found.pop(key, None)
        found[key] = edit
    return tuple(found.values())


def load_batches(
    connection: sa.Connection, tenant: str, branch: str, damage: Damage, *, withheld: bool = False
) -> list[Batched]:
    """Every edit with the number of its batch and its place in it, oldest first, without damaged ones.

    Those that were stored without their text can be listed, ``withheld``, but not replayed.
    """
    found: list[Batched] = []
    rows = connection.execute(EDITS, {"tenant": tenant, "branch": branch}).all()
    for digest, occurrence, kind, text, ref, tokens, chain, sha, version, position, length in rows:
        if sha == WITHHELD and not withheld:
            continue
        said = _said(text)
        whole = said is not None and sha in (
            WITHHELD,
            _edit_sha(digest, occurrence, kind, said.encode("utf-8", "surrogatepass"), ref, tokens, chain),
        )
        if said is None or not whole:
            damage("edit", tenant, f"{branch} {version}.{position}")
            continue
        edit = Edit(digest, occurrence, KINDS[kind], said, ref, tokens, chain, length)
        found.append((version, position, edit))
    return found


def load_cuts(connection: sa.Connection, tenant: str, branch: str, damage: Damage) -> tuple[Cut, ...]:
    """The branch's cuts, oldest first, without damaged ones."""
    rows = connection.execute(CUTS, {"tenant": tenant, "branch": branch})
    found = [_cut(row, damage) for row in rows if row.sha != WITHHELD]
    return tuple(cut for cut in found if cut is not None)


def add_edits(
    connection: sa.Connection, *, tenant: str, branch: str, version: int, given: Sequence[Edit], full: bool
) -> None:
    """Store ``given`` as the batch of ``version``, without their texts unless ``full``."""
    rows = []
    for position, edit in enumerate(given):
        hidden = bool(edit.text) and not full
        text = edit.text.encode("utf-8", "surrogatepass")
        sha = _edit_sha(edit.digest, edit.occurrence, edit.kind, text, edit.ref, edit.tokens, edit.chain)
        rows.append(
            {
                "tenant": tenant,
                "branch": branch,
                "version": version,
                "position": position,
                "digest": edit.digest,
                "occurrence": edit.occurrence,
                "kind": str(edit.kind),
                "text": "" if hidden else edit.text,
                "ref": edit.ref,
                "tokens": edit.tokens,
                "chain": edit.chain,
                "sha": WITHHELD if hidden else sha,
                "length": edit.length,
            }
        )
    if rows:
        connection.execute(ADD_EDITS, rows)


def add_cut(connection: sa.Connection, change: Change, *, batch: int, full: bool) -> None:
    """Store the change's cut with the batch of this number; a version that is not above the last one is refused.

    Unless ``full`` it is stored without its text, and in place of those that a process before this one has made.
    """
    cut = change.cut
    if cut is None:
        return
    key = {"tenant": change.tenant, "branch": change.branch}
    latest = connection.scalar(LATEST_CUT, key)
    if latest is not None and cut.version <= latest and not full:
        connection.execute(sa.delete(cuts).where(cuts.c.tenant == change.tenant, cuts.c.branch == change.branch))
    elif latest is not None and cut.version <= latest:
        raise StoreError(f"checkpoint {cut.version} is not newer than {latest}", reason="version")
    row = _cut_row(cut, at=change.at, full=full) | {"covered": json.dumps(change.covered), "batch": batch}
    connection.execute(ADD_CUTS, key | row)


def copy_edits(connection: sa.Connection, parent: Branch, *, target: str, kept: Sequence[Edit], full: bool) -> None:
    """Store ``kept`` for branch ``target`` in the batches that the parent has them in, as far as it has them."""
    given = connection.execute(BATCHES, {"tenant": parent.tenant, "branch": parent.branch})
    batches = {(bytes(row.digest), row.occurrence): row.batch for row in given}
    by_batch: dict[int, list[Edit]] = {}
    for edit in kept:
        by_batch.setdefault(batches.get(edit.key, parent.version), []).append(edit)
    for batch in sorted(by_batch):
        add_edits(connection, tenant=parent.tenant, branch=target, version=batch, given=by_batch[batch], full=full)


def copy_cuts(
    connection: sa.Connection, parent: Branch, *, target: str, kept: Sequence[Cut], at: float, full: bool
) -> None:
    """Store ``kept`` for branch ``target`` in the batches that the parent has them in, as far as it has them."""
    if not kept:
        return
    known = {
        row.version: row
        for row in connection.execute(
            sa.select(cuts.c.version, cuts.c.at, cuts.c.covered, cuts.c.batch).where(
                cuts.c.tenant == parent.tenant, cuts.c.branch == parent.branch
            )
        )
    }
    rows = []
    for cut in kept:
        row, old = _cut_row(cut, at=at, full=full), known.get(cut.version)
        row |= {"tenant": parent.tenant, "branch": target}
        row |= {"covered": "[]", "batch": parent.version}
        if old is not None:
            row |= {"at": old.at, "covered": old.covered, "batch": old.batch}
        rows.append(row)
    connection.execute(ADD_CUTS, rows)


def batches_without(connection: sa.Connection, parent: Branch, *, kept: Sequence[Cut]) -> list[int]:
    """The batches of the parent's cuts that are not in ``kept``."""
    versions = [cut.version for cut in kept]
    query = sa.select(cuts.c.batch).where(cuts.c.tenant == parent.tenant, cuts.c.branch == parent.branch)
    return list(connection.scalars(query.where(cuts.c.version.not_in(versions))))


def covered_refs(connection: sa.Connection, tenant: str, ref: str) -> tuple[str, ...]:
    """The refs that the newest cut with this ``ref`` covers, in order; empty if there is none."""
    found = connection.scalar(
        sa.select(cuts.c.covered)
        .where(cuts.c.tenant == tenant, cuts.c.ref == ref)
        .order_by(cuts.c.at.desc(), cuts.c.version.desc())
        .limit(1)
    )
    return tuple(json.loads(found)) if found else ()


def refs_of_cuts(connection: sa.Connection, *, tenant: str, branch: str) -> set[str]:
    """Every ref that a cut of this branch covers."""
    rows = connection.scalars(sa.select(cuts.c.covered).where(cuts.c.tenant == tenant, cuts.c.branch == branch))
    return {ref for row in rows for ref in json.loads(row)}


def cuts_of(connection: sa.Connection, of: ConversationRow, damage: Damage) -> dict[tuple[str, int], Covering]:
    """Every cut of a conversation with the refs of what it covers, by branch and batch, without damaged ones."""
    rows = connection.execute(
        sa.select(cuts)
        .join(branches, sa.and_(branches.c.tenant == cuts.c.tenant, branches.c.branch == cuts.c.branch))
        .where(cuts.c.tenant == of.tenant, branches.c.conversation == of.id)
        .order_by(cuts.c.branch, cuts.c.batch)
    )
    return {
        (row.branch, row.batch): Covering(cut, tuple(json.loads(row.covered)), row.batch, row.at)
        for row in rows
        if (cut := _cut(row, damage)) is not None
    }


def _cut_row(cut: Cut, *, at: float, full: bool = True) -> dict[str, object]:
    return {
        "version": cut.version,
        "at": at,
        "covers": cut.covers,
        "prefix": cut.prefix,
        "text": cut.text if full else "",
        "tokens": cut.tokens,
        "ref": cut.ref,
        "stays": json.dumps([cut.before, cut.after]),
        "origin": cut.origin,
        "narrative": cut.narrative if full else "",
        "noted": cut.noted,
        "length": cut.length,
        "sha": _cut_sha(cut) if full else WITHHELD,
    }


def _cut(row: sa.Row[*tuple[Any, ...]], damage: Damage) -> Cut | None:
    try:
        before, after = json.loads(row.stays)
        cut = Cut(
            covers=row.covers,
            prefix=row.prefix,
            text=row.text,
            tokens=row.tokens,
            version=row.version,
            ref=row.ref,
            before=tuple(before),
            after=tuple(after),
            origin=row.origin,
            narrative=row.narrative,
            noted=row.noted,
            length=row.length,
        )
    except ValueError:
        cut = None
    if cut is None or row.sha not in (WITHHELD, _cut_sha(cut)):
        damage("cut", row.tenant, f"{row.branch} {row.version}")
        return None
    return cut


def _said(packed: bytes) -> str | None:
    """The text of an edit, None where it cannot be read."""
    with suppress(Damaged):
        return unpack_words(packed)
    return None


def _edit_sha(digest: bytes, occurrence: int, kind: str, text: bytes, ref: str, tokens: int, chain: bytes) -> bytes:
    facts = f" {occurrence} {kind} {ref} {tokens} ".encode()
    return sha256(b"".join((digest, chain, facts, text))).digest()


def _cut_sha(cut: Cut) -> bytes:
    facts = (cut.covers, cut.prefix.hex(), cut.tokens, cut.version, cut.ref, cut.before, cut.after, cut.origin)
    return _sha(f"{facts} {cut.narrative}\0{cut.text}")


def _sha(text: str) -> bytes:
    return sha256(text.encode("utf-8", "surrogatepass")).digest()
