"""The archive: every message that was removed or shortened, found by ref, by its words, or by what it is about.

Words are indexed a little after the commit, off the path of the request: tokenizing them is most of a commit's time.
A body is given back only if its SHA-256 is the one that was stored with it; a damaged row is set aside
(``quarantined``) and counts as absent until the same message is archived again. Vectors by an embeddings model are
32-bit floats of length 1, compared one by one: a conversation has thousands of them at most.

A row of what was evicted says which call a message answered, what it freed, and whether somebody asked for it again.
"""

import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import sha256
from operator import mul
from typing import Any

import sqlalchemy as sa

from policies.ledger import ADDING, EditKind
from policies.text.segments import SOLID, words
from proxy.store.ledger import Batched, covered_refs, cuts_of, load_batches
from proxy.store.memory import newest_branch
from proxy.store.packing import Damaged, pack_message, unpack_message
from proxy.store.records import Change, ConversationRow, EvictionRow, EvictionSum, ExchangeRow, Original, RemovedRow
from proxy.store.schema import (
    OF_BRANCH,
    OF_CONVERSATION,
    branches,
    conversations,
    evictions,
    keep_first,
    meta,
    of,
    originals,
    plain_text,
    recorded,
    removed,
    same,
    stored,
    vectors,
)
from proxy.store.transaction import AT_ONCE, Place, Rows, Transaction, chunks, ordered

MAX_TERMS = 32
INDEXED_BYTES = 64 << 10
MERGED_PAGES = 64
MERGE = sa.text("INSERT INTO originals_fts (originals_fts, rank) VALUES ('merge', :pages)")
MAX_WORDS_LEN = 200_000  # characters; PostgreSQL takes no more than 1 MB of them
INDEXED = sa.select(meta.c.number).where(meta.c.name == "indexed").scalar_subquery()
INDEX = sa.text("INSERT INTO originals_fts (rowid, text) VALUES (:id, :text)")
UNINDEX = sa.text("INSERT INTO originals_fts (originals_fts, rowid, text) VALUES ('delete', :id, :text)")
SET_WORDS = sa.text("UPDATE originals SET words = to_tsvector('simple', :text) WHERE tenant = :tenant AND ref = :ref")
KNOWN = sa.select(originals.c.ref, sa.or_(originals.c.quarantined, originals.c.body.is_(None)).label("lacking")).where(
    of(originals, "tenant"), originals.c.ref.in_(sa.bindparam("refs", expanding=True))
)
ADD_ORIGINAL = keep_first(originals)
HOLD_ORIGINAL = keep_first(removed)
ADD_VECTOR = keep_first(vectors)
WORDS = sa.table("originals_fts", sa.column("rowid", sa.Integer))
MATCH_SQLITE = (
    sa.select(originals.c.id)
    .join(WORDS, WORDS.c.rowid == originals.c.id)
    .where(sa.text("originals_fts MATCH :query"))
    .order_by(sa.text("bm25(originals_fts)"), originals.c.id.desc())
)
MATCH_POSTGRESQL = (
    sa.select(originals.c.id)
    .where(sa.text("originals.words @@ websearch_to_tsquery('simple', :query)"))
    .order_by(sa.text("ts_rank(originals.words, websearch_to_tsquery('simple', :query)) DESC"), originals.c.id.desc())
)


def original(tx: Transaction, tenant: str, ref: str) -> Original | None:
    """The removed message with this ref; None if unknown, damaged, or kept as a digest only."""
    return next(iter(_originals(tx, tenant, [ref])), None)


def covered(tx: Transaction, tenant: str, ref: str) -> list[Original]:
    """What the cut with this ref covers, in order, as far as it is there."""
    return _originals(tx, tenant, covered_refs(tx, tenant, ref))


def held(tx: Transaction, tenant: str, conversation: str) -> set[str]:
    """The refs of all that was removed from a conversation (by id)."""
    return set(tx.scalars(_held_by(tenant, conversation)))


def search(
    tx: Transaction, tenant: str, text: str, *, limit: int = 20, conversation: str | None = None
) -> list[Original]:
    """Removed messages with all words of ``text``, else with any of them, best first; nothing in it is an operator.

    With the id of a ``conversation`` only those that were removed from it.
    """
    terms = list(dict.fromkeys(term for word in text.split() for term in _phrases(word)))[:MAX_TERMS]
    for operator in ("AND", "OR")[: min(len(terms), 2)]:
        query, words = _match(tx, terms, operator)
        query = query.where(originals.c.tenant == tenant, sa.not_(originals.c.quarantined))
        if conversation is not None:
            query = query.where(originals.c.ref.in_(_held_by(tenant, conversation)))
        best = list(tx.scalars(query.limit(limit), {"query": words}))
        theirs = sa.select(originals).where(originals.c.tenant == tenant, originals.c.id.in_(best))
        rows = {row.id: row for row in tx.execute(theirs)}
        found = [each for key in best if (each := _original(tx, rows[key])) is not None]
        if found:
            return found
    return []


def lacking_vectors(tx: Transaction, tenant: str, conversation: str, model: str, *, limit: int) -> dict[str, str]:
    """The newest removed texts of a conversation (by id) that have no vector by this model, by ref."""
    known = sa.select(vectors.c.ref).where(vectors.c.tenant == tenant, vectors.c.model == model)
    query = (
        sa.select(originals.c.ref, originals.c.body)
        .where(originals.c.tenant == tenant, originals.c.body.is_not(None))
        .where(originals.c.ref.in_(_held_by(tenant, conversation)), originals.c.ref.not_in(known))
        .order_by(originals.c.id.desc())
        .limit(limit)
    )
    found: dict[str, str] = {}
    for row in tx.execute(query):
        with suppress(Damaged):
            found[row.ref] = said(row.body)
    return {ref: text for ref, text in found.items() if text}


def add_vectors(tx: Transaction, tenant: str, model: str, given: Mapping[str, Sequence[float]]) -> None:
    """Keep vectors of removed texts, by ref; those of texts that have gone meanwhile are left out."""
    there = tx.scalars(sa.select(originals.c.ref).where(originals.c.tenant == tenant, originals.c.ref.in_(list(given))))
    own = {"tenant": tenant, "model": model}
    tx.many(ADD_VECTOR, [{**own, "ref": ref, "body": _unit(given[ref])} for ref in sorted(there)])


def nearest(
    tx: Transaction, tenant: str, conversation: str, model: str, wanted: Sequence[float], *, limit: int
) -> list[tuple[Original, float]]:
    """The removed texts of a conversation (by id) that are most like ``wanted``, each with its cosine."""
    query = sa.select(vectors.c.ref, vectors.c.body).where(
        vectors.c.tenant == tenant, vectors.c.model == model, vectors.c.ref.in_(_held_by(tenant, conversation))
    )
    mine = array("f", _unit(wanted))
    cosines: list[tuple[str, float]] = []
    for row in tx.execute(query):
        other = array("f", row.body)
        if len(other) == len(mine):
            cosines.append((row.ref, sum(map(mul, mine, other))))
    near = dict(sorted(cosines, key=lambda each: -each[1])[:limit])
    return [(each, near[each.ref]) for each in _originals(tx, tenant, list(near))]


def add_originals(tx: Transaction, change: Change) -> None:
    """Archive what is not there yet, repair what is damaged, and note that the branch needs all that is gone."""
    by_ref = {original.ref: original for original in change.originals}
    for refs in chunks(by_ref):
        _add(tx, change.tenant, [by_ref[ref] for ref in refs], at=change.at)
    hold(tx, change.tenant, change.branch, {*by_ref, *change.covered, *(edit.ref for edit in change.edits)})


def hold(tx: Transaction, tenant: str, branch: str, refs: Iterable[str]) -> None:
    """Note that ``branch`` needs the originals with these refs."""
    tx.many(HOLD_ORIGINAL, [{"tenant": tenant, "branch": branch, "ref": ref} for ref in sorted(refs)])


def drop_unheld(tx: Transaction, tenant: str, refs: Iterable[str]) -> None:
    """Delete those of ``refs`` that no branch needs any more, their words included."""
    for chunk in chunks(refs):
        needed = tx.scalars(sa.select(removed.c.ref).where(removed.c.tenant == tenant, removed.c.ref.in_(chunk)))
        _drop(tx, tenant, sorted(set(chunk) - set(needed)))


def whole_body(tx: Transaction, row: sa.Row[*tuple[Any, ...]]) -> bytes | None:
    """The body of a row of originals, None where it is kept as a digest only, or damaged."""
    if row.body is None:
        return None
    with suppress(Damaged):
        body, _ = unpack_message(row.body)
        if sha256(body).digest() == row.sha:
            return body
    tx.damage("original", row.tenant, row.ref)
    return None


def said(packed: bytes) -> str:
    """The text of an original by its stored body. Raises :class:`Damaged`."""
    return unpack_message(packed)[1]


def unindexed(tx: Transaction) -> bool:
    """Whether some originals cannot be found by their words yet."""
    if tx.dialect != "sqlite":
        return False
    newest = sa.select(sa.func.coalesce(sa.func.max(originals.c.id), 0)).scalar_subquery()
    return bool(tx.execute(sa.select(newest > INDEXED)).scalar_one())


def index_some(tx: Transaction) -> bool:
    """Index the words of the oldest originals that wait for it, about 64 KiB of them; whether more are waiting."""
    start: int = tx.execute(sa.select(INDEXED)).scalar_one()
    waiting = tx.execute(
        sa.select(originals.c.id, originals.c.size)
        .where(originals.c.id > start)
        .order_by(originals.c.id)
        .limit(AT_ONCE)
    ).all()
    stop, size = start, 0
    for row in waiting:
        if size > 0 and size + row.size > INDEXED_BYTES:
            break
        stop, size = row.id, size + row.size
    if stop > start:
        _index(tx, INDEX, originals.c.id > start, originals.c.id <= stop)
        tx.execute(sa.update(meta).where(meta.c.name == "indexed").values(number=stop))
    return bool(waiting) and stop < waiting[-1].id


def merge_words(tx: Transaction, *, begins: bool) -> bool:
    """Merge some of the full-text index, where deleted words take as much room as others; whether there is more.

    A negative number of pages begins with all that there is (sqlite.org/fts5.html, "The 'merge' command").
    """
    if tx.dialect != "sqlite":
        return False
    changed = sa.text("SELECT total_changes()")
    before: int = tx.execute(changed).scalar_one()
    tx.execute(MERGE, {"pages": -MERGED_PAGES if begins else MERGED_PAGES})
    after: int = tx.execute(changed).scalar_one()
    return after - before >= 2


def forget_words(tx: Transaction) -> None:
    """Merge the full-text index, so that words of deleted originals are in it no more."""
    if tx.dialect == "sqlite":
        tx.execute(sa.text("INSERT INTO originals_fts (originals_fts) VALUES ('optimize')"))


def _held_by(tenant: str, conversation: str) -> sa.Select[str]:
    """The refs of the originals that some branch of a conversation needs."""
    return (
        sa.select(removed.c.ref)
        .join(branches, same(branches, removed, "tenant", "branch"))
        .where(removed.c.tenant == tenant, branches.c.tenant == tenant, branches.c.conversation == conversation)
    )


def _originals(tx: Transaction, tenant: str, refs: Sequence[str]) -> list[Original]:
    """The originals with these refs, in order, without those that are absent."""
    found: dict[str, Original | None] = {}
    for chunk in chunks(dict.fromkeys(refs)):
        mine = (originals.c.tenant == tenant, originals.c.ref.in_(chunk), sa.not_(originals.c.quarantined))
        found |= {row.ref: _original(tx, row) for row in tx.execute(sa.select(originals).where(*mine))}
    return [each for ref in refs if (each := found.get(ref)) is not None]


def _original(tx: Transaction, row: sa.Row[*tuple[Any, ...]]) -> Original | None:
    body = whole_body(tx, row)
    return None if body is None else recorded(Original, originals, row, body=body, text=said(row.body))


def _add(tx: Transaction, tenant: str, given: list[Original], *, at: float) -> None:
    refs = [each.ref for each in given]
    known = {row.ref: row.lacking for row in tx.execute(KNOWN, {"of_tenant": tenant, "refs": refs})}
    lacking = [ref for ref in refs if tx.full and known.get(ref)]
    _drop(tx, tenant, lacking)
    fresh = [each for each in given if each.ref not in known or each.ref in lacking]
    if not fresh:
        return
    texts = {each.ref: plain_text(each.text) for each in fresh}

    def packed() -> list[dict[str, Any]]:
        return [
            stored(
                originals,
                each,
                tenant=tenant,
                size=len(each.body),
                sha=sha256(each.body).digest(),
                body=pack_message(each.body, texts[each.ref]) if tx.full else None,
                at=at,
                quarantined=False,
            )
            for each in fresh
        ]

    tx.execute(ADD_ORIGINAL[tx.dialect], tx.aside(packed))
    if tx.full and tx.dialect == "postgresql":
        found = {ref: _indexed(text)[:MAX_WORDS_LEN] for ref, text in texts.items()}
        tx.execute(SET_WORDS, [{"tenant": tenant, "ref": ref, "text": text} for ref, text in found.items()])


def _drop(tx: Transaction, tenant: str, refs: list[str]) -> None:
    if not refs:
        return
    mine = (originals.c.tenant == tenant, originals.c.ref.in_(refs))
    if tx.dialect == "sqlite":
        _index(tx, UNINDEX, *mine, originals.c.id <= INDEXED)
    tx.execute(sa.delete(originals).where(*mine))


def _index(tx: Transaction, statement: sa.TextClause, *which: sa.ColumnElement[bool]) -> None:
    found = []
    for row in tx.execute(sa.select(originals.c.id, originals.c.body).where(*which, originals.c.body.is_not(None))):
        with suppress(Damaged):
            found.append({"id": row.id, "text": _indexed(said(row.body))})
    if found:
        tx.execute(statement, found)


def _indexed(text: str) -> str:
    """A text as it is given to the full-text index: no database has to know where its language parts words."""
    return " ".join(words(text))


def _phrases(word: str) -> list[str]:
    """A word of a query as it is indexed: a path's names have to follow one another, pairs of characters have not."""
    found = words(word)
    return found if SOLID.search(word) else [" ".join(found)] if found else []


def _match(tx: Transaction, terms: list[str], operator: str) -> tuple[Rows, str]:
    quoted = ['"{}"'.format(term.replace('"', '""').replace("\0", " ")) for term in terms]
    if tx.dialect == "sqlite":
        return MATCH_SQLITE, f" {operator} ".join(quoted)
    return MATCH_POSTGRESQL, (" or " if operator == "OR" else " ").join(quoted)


def _unit(vector: Sequence[float]) -> bytes:
    length = math.sqrt(math.fsum(x * x for x in vector)) or 1.0
    return array("f", (x / length for x in vector)).tobytes()


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
    """The calls whose results this branch or one that it came from has evicted, and which branch that was."""
    return tuple((bytes(call), where) for call, where in tx.execute(EVICTED, {"tenant": tenant, "branch": branch}))


def mark_asked_again(tx: Transaction, rows: Sequence[ExchangeRow]) -> None:
    """Note on the newest eviction of each call that these exchanges asked for it again."""
    asked = [
        {"of_tenant": row.tenant, "of_branch": branch, "of_call_hash": call, "now": row.at}
        for row in rows
        for branch, call in row.asked_again
    ]
    tx.many(ASKED_AGAIN, asked)


def sums(
    tx: Transaction, tenant: str | None, *, conversation: ConversationRow | None = None, policy: str | None = None
) -> list[EvictionSum]:
    """How much each layer took from each tool, and how much of it was asked for again, most tokens first."""
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
    """What was evicted for a tenant, or with None for everybody, the newest first.

    ``asked_again`` leaves only what was asked for again; ``policy`` is the name of the one that evicted it;
    ``after`` leaves those behind one of which this is ``at``, ``branch``, ``version`` and ``position``.
    """
    query = _of(sa.select(evictions, conversations.c.name), tenant, conversation, policy)
    if asked_again:
        query = query.where(evictions.c.asked_again_at.is_not(None))
    columns = evictions.c
    order = ((columns.at, True), (columns.branch, False), (columns.version, True), (columns.position, False))
    rows = tx.execute(ordered(query, order, after=after, limit=limit))
    return [recorded(EvictionRow, evictions, row, conversation=row.name) for row in rows]


@dataclass(frozen=True, slots=True)
class _Gone:
    """One message that is out, and its place among all that went in the same batch."""

    row: RemovedRow
    place: int

    @property
    def order(self) -> tuple[int, int]:
        """By batch, then by place: the clock may have been wrong."""
        return (-self.row.version, -self.place)


def all_removed(tx: Transaction, conversation: ConversationRow, *, limit: int = 500) -> list[RemovedRow]:
    """What is out of the window of the conversation's newest branch, wholly or in part, newest first."""
    return removed_after(tx, conversation, None, limit=limit) or []


def removed_after(
    tx: Transaction, conversation: ConversationRow, after: str | None, *, limit: int
) -> list[RemovedRow] | None:
    """The same behind the message with the ref ``after``; None where that one is not out of the window."""
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
    return [_with_original(row, known_originals.get(row.ref)) for row in rows]


def _of(query: Rows, tenant: str | None, conversation: ConversationRow | None, policy: str | None) -> Rows:
    """``query`` over evictions with their conversations, narrowed to what was asked about."""
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
    """What the newest cut that hides nothing pinned stands for, each with the first cut that did."""
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


def _with_original(row: RemovedRow, original: sa.Row[*tuple[Any, ...]] | None) -> RemovedRow:
    if original is None:
        return row
    text = ""
    with suppress(Damaged):
        text = said(original.body)[:EXCERPT] if original.body is not None and not original.quarantined else ""
    tokens, at = row.tokens or original.tokens, row.at or original.at
    return replace(row, role=original.role, tokens=tokens, text=text, at=at)
