"""What batches did to a branch, for each window that was believed: its edits and cuts, read back
only if they are intact, and its evictions: which call each message answered, and what it freed.
"""

import json
from collections.abc import Iterable, Sequence
from contextlib import suppress
from hashlib import sha256
from typing import Any, NamedTuple

import msgspec
import sqlalchemy as sa

from policies.ledger import EVERY_WINDOW, NOTHING, Cut, Edit, EditKind, Ledger
from proxy.store.packing import Damaged, unpack_text
from proxy.store.records import Branch, Change, ConversationRow, EvictionRow, StoreError
from proxy.store.schema import (
    OF_BRANCH,
    OF_CONVERSATION,
    branches,
    conversations,
    cuts,
    edits,
    evictions,
)
from proxy.store.transaction import (
    Place,
    Rows,
    Transaction,
    of,
    ordered,
    owned,
    recorded,
    same,
    stored,
)

KINDS = {str(kind): kind for kind in EditKind}
WITHHELD = b""
"""In place of the SHA-256 of an edit or a cut: it was stored without its text (``store.content:
digest``).
"""
BATCHES = (
    sa.select(
        edits.c.window_tokens,
        edits.c.digest,
        edits.c.occurrence,
        sa.func.max(edits.c.version).label("batch"),
    )
    .where(of(edits, "tenant", "branch"))
    .group_by(edits.c.window_tokens, edits.c.digest, edits.c.occurrence)
)
# As text and without column types: a ledger may have a thousand edits, and converting rows would be
# most of the time.
EDITS = sa.text(
    "SELECT digest, occurrence, kind, text, ref, tokens, chain, sha, window_tokens, version,"
    " position, length FROM edits WHERE tenant = :tenant AND branch = :branch ORDER BY version,"
    " position"
).bindparams(*OF_BRANCH)
ADD_EDIT = sa.insert(edits)
ADD_CUT = sa.insert(cuts)
IN_BRANCH = of(cuts, "tenant", "branch")
OF_VIEW = ("tenant", "branch", "window_tokens")
CUTS = (
    sa.select(*(column for column in cuts.c if column.name != "covered"))
    .where(IN_BRANCH)
    .order_by(cuts.c.version)
)
LINES = (
    sa.select(branches.c.branch, branches.c.version, branches.c.undone)
    .where(of(branches, "tenant", "conversation"))
    .order_by(branches.c.updated.desc(), branches.c.created.desc(), branches.c.branch)
)
NEWEST = LINES.limit(1)
COVERED = sa.select(
    cuts.c.window_tokens, cuts.c.version, cuts.c.at, cuts.c.covered, cuts.c.batch
).where(IN_BRANCH)


class Batched(NamedTuple):
    window: int
    version: int
    position: int
    edit: Edit


class Covering(msgspec.Struct, frozen=True):
    window: int
    cut: Cut
    covered: tuple[str, ...]
    batch: int
    at: float


def newest_branch(tx: Transaction, conversation: ConversationRow) -> str | None:
    found: str | None = tx.scalar(NEWEST, key_of(conversation.tenant, conversation.id))
    return found


def key_of(tenant: str, conversation: str) -> dict[str, Any]:
    return {"of_tenant": tenant, "of_conversation": conversation}


def load_views(tx: Transaction, tenant: str, branch: str) -> dict[int, Ledger]:
    """What was decided by window; what holds for every one is in each."""
    found: dict[int, dict[tuple[bytes, int], Edit]] = {}
    for window, _, _, edit in load_batches(tx, tenant, branch):
        key = (edit.digest, edit.occurrence)  # not the property: there may be a thousand
        mine = found.setdefault(window, {})
        mine.pop(key, None)
        mine[key] = edit
    made = load_cuts(tx, tenant, branch)
    common = found.get(EVERY_WINDOW, {})
    views = {}
    for window in {*found, *(each for each, _ in made)}:
        edited = common if window == EVERY_WINDOW else common | found.get(window, {})
        views[window] = Ledger(
            edited, tuple(cut for its, cut in made if its in (window, EVERY_WINDOW))
        )
    return views


def load_batches(
    tx: Transaction, tenant: str, branch: str, *, withheld: bool = False
) -> list[Batched]:
    """Every edit with the number of its batch and its place in it, oldest first, without damaged
    ones.

    Those that were stored without their text can be listed, ``withheld``, but not replayed.
    """
    found: list[Batched] = []
    rows = tx.execute(EDITS, {"tenant": tenant, "branch": branch}).all()
    for (
        digest,
        occurrence,
        kind,
        text,
        ref,
        tokens,
        chain,
        sha,
        window,
        version,
        position,
        length,
    ) in rows:
        if sha == WITHHELD and not withheld:
            continue
        said = None
        with suppress(Damaged):
            said = unpack_text(text)
        if said is None or sha not in (
            WITHHELD,
            _edit_sha(digest, occurrence, kind, said, ref, tokens, chain),
        ):
            tx.damage("edit", tenant, f"{branch} {version}.{position}")
            continue
        edit = Edit(digest, occurrence, KINDS[kind], said, ref, tokens, chain, length)
        found.append(Batched(window, version, position, edit))
    return found


def load_cuts(tx: Transaction, tenant: str, branch: str) -> list[tuple[int, Cut]]:
    """Every cut with the window that it was made for, oldest first."""
    rows = tx.execute(CUTS, _key(tenant, branch))
    found = [(row.window_tokens, _cut(tx, row)) for row in rows if row.sha != WITHHELD]
    return [(window, cut) for window, cut in found if cut is not None]


def open_view(tx: Transaction, branch: Branch, window: int, larger: int) -> Ledger:
    """What a window of a branch begins with: what was decided for a larger one, unless it was begun
    before.
    """
    own = {"of_tenant": branch.tenant, "of_branch": branch.branch, "of_window_tokens": window}
    if all(
        tx.scalar(sa.select(sa.literal(1)).where(of(t, *OF_VIEW)).limit(1), own) is None
        for t in (edits, cuts)
    ):
        for table in (edits, cuts):
            names = [column.name for column in table.c]
            copied = [
                sa.literal(window) if name == "window_tokens" else table.c[name] for name in names
            ]
            query = sa.select(*copied).where(of(table, *OF_VIEW))
            tx.execute(
                sa.insert(table).from_select(names, query), own | {"of_window_tokens": larger}
            )
    return load_views(tx, branch.tenant, branch.branch).get(window, NOTHING)


def add_edits(
    tx: Transaction, tenant: str, branch: str, window: int, version: int, given: Sequence[Edit]
) -> None:
    rows = []
    for position, edit in enumerate(given):
        is_hidden = bool(edit.text) and not tx.full
        sha = _edit_sha(
            edit.digest, edit.occurrence, edit.kind, edit.text, edit.ref, edit.tokens, edit.chain
        )
        own = {
            "tenant": tenant,
            "branch": branch,
            "window_tokens": window,
            "version": version,
            "position": position,
        }
        own |= {"kind": str(edit.kind)}
        own |= {"text": "", "sha": WITHHELD} if is_hidden else {"sha": sha}
        rows.append(stored(edits, edit, **own))
    tx.many(ADD_EDIT, rows)


def add_cut(tx: Transaction, change: Change, *, batch: int) -> None:
    """Store the change's cut with the batch of this number; a version that is not above the last
    one is refused.

    A cut without its text takes the place of those that a process before this one has made.
    """
    cut = change.cut
    if cut is None:
        return
    latest = tx.scalar(
        sa.select(sa.func.max(cuts.c.version)).where(IN_BRANCH), _key(change.tenant, change.branch)
    )
    if latest is not None and cut.version <= latest:
        if tx.full:
            raise StoreError(
                f"checkpoint {cut.version} is not newer than {latest}", reason="version"
            )
        tx.execute(sa.delete(cuts).where(IN_BRANCH), _key(change.tenant, change.branch))
    own = {"tenant": change.tenant, "branch": change.branch, "at": change.at, "batch": batch}
    own |= {"window_tokens": change.window}
    tx.many(ADD_CUT, [_cut_row(tx, cut, covered=json.dumps(change.covered), **own)])


def copy_batches(tx: Transaction, parent: Branch, target: Branch, *, at: float) -> set[str]:
    """Store what a branch knows, in the batches that its parent has it from; returns the refs of
    all that it lacks.
    """
    given = tx.execute(BATCHES, _key(parent.tenant, parent.branch))
    batches = {(row.window_tokens, bytes(row.digest), row.occurrence): row.batch for row in given}
    known = {
        (row.window_tokens, row.version): row
        for row in tx.execute(COVERED, _key(parent.tenant, parent.branch))
    }
    common = target.views.get(EVERY_WINDOW, NOTHING)
    refs = set[str]()
    for window, ledger in target.views.items():
        shared = NOTHING if window == EVERY_WINDOW else common
        by_batch: dict[int, list[Edit]] = {}
        for edit in ledger.edits.values():
            if shared.edits.get(edit.key) != edit:
                by_batch.setdefault(batches.get((window, *edit.key), parent.version), []).append(
                    edit
                )
                refs.add(edit.ref)
        for batch in sorted(by_batch):
            add_edits(tx, target.tenant, target.branch, window, batch, by_batch[batch])
        rows = []
        for cut in ledger.cuts:
            if cut in shared.cuts:
                continue
            own = {
                "tenant": target.tenant,
                "branch": target.branch,
                "at": at,
                "covered": "[]",
                "batch": parent.version,
            }
            if (old := known.get((window, cut.version))) is not None:
                own |= {"at": old.at, "covered": old.covered, "batch": old.batch}
                refs |= set(json.loads(old.covered))
            rows.append(_cut_row(tx, cut, window_tokens=window, **own))
        tx.many(ADD_CUT, rows)
    return refs


def batches_without(tx: Transaction, parent: Branch, *, kept: Iterable[Ledger]) -> list[int]:
    versions = {cut.version for ledger in kept for cut in ledger.cuts}
    rows = tx.execute(COVERED, _key(parent.tenant, parent.branch))
    return [row.batch for row in rows if row.version not in versions]


def cuts_of(tx: Transaction, conversation: ConversationRow) -> dict[tuple[str, int], Covering]:
    query = sa.select(cuts).join(branches, same(branches, cuts, "tenant", "branch"))
    query = query.where(
        owned(cuts, conversation.tenant), branches.c.conversation == conversation.id
    )
    return {
        (row.branch, row.batch): Covering(
            row.window_tokens, cut, tuple(json.loads(row.covered)), row.batch, row.at
        )
        for row in tx.execute(query.order_by(cuts.c.branch, cuts.c.batch))
        if (cut := _cut(tx, row)) is not None
    }


def _key(tenant: str, branch: str) -> dict[str, str]:
    return {"of_tenant": tenant, "of_branch": branch}


def _cut_row(tx: Transaction, cut: Cut, **own: object) -> dict[str, object]:
    own |= {"stays": json.dumps([cut.before, cut.after]), "sha": _cut_sha(cut)}
    return stored(cuts, cut, **own) | (
        {} if tx.full else {"text": "", "narrative": "", "sha": WITHHELD}
    )


def _cut(tx: Transaction, row: sa.Row[*tuple[Any, ...]]) -> Cut | None:
    try:
        before, after = json.loads(row.stays)
        cut = recorded(Cut, cuts, row, before=tuple(before), after=tuple(after))
    except ValueError:
        cut = None
    if cut is None or row.sha not in (WITHHELD, _cut_sha(cut)):
        tx.damage("cut", row.tenant, f"{row.branch} {row.version}")
        return None
    return cut


def _edit_sha(
    digest: bytes, occurrence: int, kind: str, text: str, ref: str, tokens: int, chain: bytes
) -> bytes:
    facts = f" {occurrence} {kind} {ref} {tokens} {text}".encode("utf-8", "surrogatepass")
    return sha256(b"".join((digest, chain, facts))).digest()


def _cut_sha(cut: Cut) -> bytes:
    facts = (
        cut.covers,
        cut.prefix.hex(),
        cut.tokens,
        cut.version,
        cut.ref,
        cut.before,
        cut.after,
        cut.origin,
    )
    return sha256(f"{facts} {cut.narrative}\0{cut.text}".encode("utf-8", "surrogatepass")).digest()


ADD_EVICTION = sa.insert(evictions)


def add_evictions(tx: Transaction, change: Change, *, version: int) -> None:
    own = {"tenant": change.tenant, "branch": change.branch, "version": version, "at": change.at}
    tx.many(
        ADD_EVICTION,
        [stored(evictions, row, position=n, **own) for n, row in enumerate(change.evictions)],
    )


def count_evictions(tx: Transaction, conversation: ConversationRow) -> int:
    query = _of(
        sa.select(sa.func.count()).select_from(evictions), conversation.tenant, conversation
    )
    return int(tx.scalar(query) or 0)


def listed(
    tx: Transaction,
    tenant: str | None,
    *,
    conversation: ConversationRow | None = None,
    limit: int = 200,
    after: Place | None = None,
) -> list[EvictionRow]:
    query = _of(sa.select(evictions, conversations.c.name), tenant, conversation)
    columns = evictions.c
    order = (
        (columns.at, True),
        (columns.branch, False),
        (columns.version, True),
        (columns.position, False),
    )
    rows = tx.execute(ordered(query, order, after=after, limit=limit))
    return [recorded(EvictionRow, evictions, row, conversation=row.name) for row in rows]


def _of(query: Rows, tenant: str | None, conversation: ConversationRow | None) -> Rows:
    query = query.join(branches, same(branches, evictions, "tenant", "branch")).join(
        conversations, OF_CONVERSATION
    )
    query = query.where(owned(evictions, tenant))
    if conversation is not None:
        query = query.where(
            owned(evictions, conversation.tenant), branches.c.conversation == conversation.id
        )
    return query
