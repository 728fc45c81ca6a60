"""The archive: every message that was removed or shortened, found by ref or by its words.

Words are indexed a little after the commit, off the path of the request: tokenizing them is most of a commit's time.
A body is given back only if its SHA-256 is the one that was stored with it; a damaged row is set aside
(``quarantined``) and counts as absent until the same message is archived again.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from hashlib import sha256
from itertools import islice
from typing import Any, TypeVar

import sqlalchemy as sa

from policies.text.words import SOLID, words
from proxy.store.ledger import Damage
from proxy.store.packing import Damaged, pack_message, unpack_message
from proxy.store.postgres import aside
from proxy.store.records import Original
from proxy.store.tables import branches, keep_first, meta, originals, plain_text, removed

T = TypeVar("T")
AT_ONCE = 500
MOST_TERMS = 32
INDEXED_BYTES = 64 << 10
MERGED_PAGES = 64
MERGE = sa.text("INSERT INTO originals_fts (originals_fts, rank) VALUES ('merge', :pages)")
MOST_WORDS = 200_000  # characters; PostgreSQL takes no more than 1 MB of them
INDEXED = sa.select(meta.c.number).where(meta.c.name == "indexed").scalar_subquery()
TO_INDEX = sa.select(originals.c.id, originals.c.body).where(
    originals.c.id > sa.bindparam("start"), originals.c.id <= sa.bindparam("stop"), originals.c.body.is_not(None)
)
INDEX = sa.text("INSERT INTO originals_fts (rowid, text) VALUES (:id, :text)")
INDEXED_ONES = sa.select(originals.c.id, originals.c.body).where(
    originals.c.tenant == sa.bindparam("tenant"),
    originals.c.ref.in_(sa.bindparam("refs", expanding=True)),
    originals.c.body.is_not(None),
    originals.c.id <= INDEXED,
)
UNINDEX = sa.text("INSERT INTO originals_fts (originals_fts, rowid, text) VALUES ('delete', :id, :text)")
SET_WORDS = sa.text("UPDATE originals SET words = to_tsvector('simple', :text) WHERE tenant = :tenant AND ref = :ref")
KNOWN = sa.select(originals.c.ref, sa.or_(originals.c.quarantined, originals.c.body.is_(None)).label("lacking")).where(
    originals.c.tenant == sa.bindparam("tenant"), originals.c.ref.in_(sa.bindparam("refs", expanding=True))
)
ADD = keep_first(originals)
HOLD = keep_first(removed)
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


def chunks(items: Iterable[T], size: int = AT_ONCE) -> Iterator[list[T]]:
    """``items`` in lists of at most ``size``."""
    iterator = iter(items)
    while chunk := list(islice(iterator, size)):
        yield chunk


def add_originals(
    connection: sa.Connection,
    *,
    tenant: str,
    branch: str,
    given: Sequence[Original],
    refs: Iterable[str],
    at: float,
    full: bool,
) -> None:
    """Archive what is not there yet, repair what is damaged, and note that ``branch`` needs it and ``refs``."""
    by_ref = {original.ref: original for original in given}
    for chunk in chunks(by_ref):
        _add(connection, tenant, [by_ref[ref] for ref in chunk], at=at, full=full)
    hold(connection, tenant=tenant, branch=branch, refs={*by_ref, *refs})


def hold(connection: sa.Connection, *, tenant: str, branch: str, refs: Iterable[str]) -> None:
    """Note that ``branch`` needs the originals with these refs."""
    rows = [{"tenant": tenant, "branch": branch, "ref": ref} for ref in sorted(refs)]
    if rows:
        connection.execute(HOLD[connection.dialect.name], rows)


def original(connection: sa.Connection, tenant: str, ref: str, damage: Damage) -> Original | None:
    """The original with this ref; None if it is unknown, damaged, or kept as a digest only."""
    return next(iter(_read(connection, tenant, [ref], damage).values()), None)


def originals_of(connection: sa.Connection, tenant: str, refs: Sequence[str], damage: Damage) -> list[Original]:
    """The originals with these refs, in order, without those that are absent."""
    found: dict[str, Original] = {}
    for chunk in chunks(dict.fromkeys(refs)):
        found |= _read(connection, tenant, chunk, damage)
    return [found[ref] for ref in refs if ref in found]


def search(
    connection: sa.Connection, *, tenant: str, text: str, limit: int, conversation: str | None, damage: Damage
) -> list[Original]:
    """Originals that hold all words of ``text``, else any of them, best first; nothing in ``text`` is an operator.

    With the id of a ``conversation`` only those that it needs.
    """
    terms = list(dict.fromkeys(term for word in text.split() for term in _phrases(word)))[:MOST_TERMS]
    for operator in ("AND", "OR")[: min(len(terms), 2)]:
        query, words = _match(connection, tenant, terms, operator)
        if conversation is not None:
            query = query.where(originals.c.ref.in_(held_by(tenant, conversation)))
        found = _found(connection, tenant, query.limit(limit), words, damage)
        if found:
            return found
    return []


def _phrases(word: str) -> list[str]:
    """A word of a query as it is indexed: a path's names have to follow one another, pairs of characters have not."""
    found = words(word)
    return found if SOLID.search(word) else [" ".join(found)] if found else []


def held_by(tenant: str, conversation: str) -> sa.Select[str]:
    """The refs of the originals that some branch of a conversation needs."""
    return (
        sa.select(removed.c.ref)
        .join(branches, sa.and_(branches.c.tenant == removed.c.tenant, branches.c.branch == removed.c.branch))
        .where(removed.c.tenant == tenant, branches.c.tenant == tenant, branches.c.conversation == conversation)
    )


def quarantine(connection: sa.Connection, damaged: Iterable[tuple[str, str]]) -> None:
    """Set the originals with these (tenant, ref) aside."""
    for tenant, ref in damaged:
        connection.execute(
            sa.update(originals).where(originals.c.tenant == tenant, originals.c.ref == ref).values(quarantined=True)
        )


def drop_unheld(connection: sa.Connection, tenant: str, refs: Iterable[str]) -> int:
    """Delete those of ``refs`` that no branch needs any more, their words included; how many there were."""
    gone = 0
    for chunk in chunks(refs):
        held = connection.scalars(
            sa.select(removed.c.ref).where(removed.c.tenant == tenant, removed.c.ref.in_(chunk)).distinct()
        )
        free = sorted(set(chunk) - set(held))
        if not free:
            continue
        _unindex(connection, tenant, free)
        gone += connection.execute(
            sa.delete(originals).where(originals.c.tenant == tenant, originals.c.ref.in_(free))
        ).rowcount
    return gone


def whole_body(row: sa.Row[*tuple[Any, ...]], damage: Damage) -> bytes | None:
    """The body of a row of originals, None where it is kept as a digest only, or damaged."""
    if row.body is None:
        return None
    with suppress(Damaged):
        body, _ = unpack_message(row.body)
        if sha256(body).digest() == row.sha:
            return body
    damage("original", row.tenant, row.ref)
    return None


def unindexed(connection: sa.Connection) -> bool:
    """Whether some originals cannot be found by their words yet."""
    if connection.dialect.name != "sqlite":
        return False
    newest = sa.select(sa.func.coalesce(sa.func.max(originals.c.id), 0)).scalar_subquery()
    return bool(connection.execute(sa.select(newest > INDEXED)).scalar_one())


def index_some(connection: sa.Connection) -> bool:
    """Index the words of the oldest originals that wait for it, about 64 KiB of them; whether more are waiting."""
    start: int = connection.execute(sa.select(INDEXED)).scalar_one()
    waiting = connection.execute(
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
        _words(connection, INDEX, connection.execute(TO_INDEX, {"start": start, "stop": stop}))
        connection.execute(sa.update(meta).where(meta.c.name == "indexed").values(number=stop))
    return bool(waiting) and stop < waiting[-1].id


def merge_words(connection: sa.Connection, *, begins: bool) -> bool:
    """Merge some of the full-text index, where deleted words take as much room as others; whether there is more.

    A negative number of pages begins with all that there is (sqlite.org/fts5.html, "The 'merge' command").
    """
    if connection.dialect.name != "sqlite":
        return False
    before: int = connection.exec_driver_sql("SELECT total_changes()").scalar_one()
    connection.execute(MERGE, {"pages": -MERGED_PAGES if begins else MERGED_PAGES})
    after: int = connection.exec_driver_sql("SELECT total_changes()").scalar_one()
    return after - before >= 2


def forget_words(connection: sa.Connection) -> None:
    """Merge the full-text index, so that words of deleted originals are in it no more."""
    if connection.dialect.name == "sqlite":
        connection.exec_driver_sql("INSERT INTO originals_fts (originals_fts) VALUES ('optimize')")


def _add(connection: sa.Connection, tenant: str, given: list[Original], *, at: float, full: bool) -> None:
    known = {
        row.ref: row.lacking for row in connection.execute(KNOWN, {"tenant": tenant, "refs": [o.ref for o in given]})
    }
    lacking = [o.ref for o in given if full and known.get(o.ref)]
    if lacking:
        _drop(connection, tenant, lacking)
    fresh = [o for o in given if o.ref not in known or o.ref in lacking]
    if not fresh:
        return
    texts = {o.ref: plain_text(o.text) for o in fresh}
    rows = aside(
        connection,
        lambda: [
            {
                "tenant": tenant,
                "ref": o.ref,
                "role": o.role,
                "tokens": o.tokens,
                "size": len(o.body),
                "sha": sha256(o.body).digest(),
                "body": pack_message(o.body, texts[o.ref]) if full else None,
                "at": at,
                "quarantined": False,
            }
            for o in fresh
        ],
    )
    connection.execute(ADD[connection.dialect.name], rows)
    if full and connection.dialect.name == "postgresql":
        found = {ref: indexed(text)[:MOST_WORDS] for ref, text in texts.items()}
        connection.execute(SET_WORDS, [{"tenant": tenant, "ref": ref, "text": text} for ref, text in found.items()])


def _unindex(connection: sa.Connection, tenant: str, refs: list[str]) -> None:
    """Take the words of these originals out of the index, where it is SQLite's."""
    if connection.dialect.name == "sqlite":
        _words(connection, UNINDEX, connection.execute(INDEXED_ONES, {"tenant": tenant, "refs": refs}))


def _words(connection: sa.Connection, statement: sa.TextClause, rows: Iterable[sa.Row[int, bytes]]) -> None:
    """Execute ``statement`` with the words of each original that can be read."""
    found = []
    for row in rows:
        with suppress(Damaged):
            found.append({"id": row.id, "text": indexed(said(row.body))})
    if found:
        connection.execute(statement, found)


def indexed(text: str) -> str:
    """A text as it is given to the full-text index: no database has to know where its language parts words."""
    return " ".join(words(text))


def said(packed: bytes) -> str:
    """The text of an original by its stored body. Raises :class:`Damaged`."""
    return unpack_message(packed)[1]


def _drop(connection: sa.Connection, tenant: str, refs: list[str]) -> None:
    _unindex(connection, tenant, refs)
    connection.execute(sa.delete(originals).where(originals.c.tenant == tenant, originals.c.ref.in_(refs)))


def _read(connection: sa.Connection, tenant: str, refs: list[str], damage: Damage) -> dict[str, Original]:
    rows = connection.execute(
        sa.select(originals).where(
            originals.c.tenant == tenant, originals.c.ref.in_(refs), sa.not_(originals.c.quarantined)
        )
    )
    return {row.ref: found for row in rows if (found := _verified(row, damage)) is not None}


def _verified(row: sa.Row[*tuple[Any, ...]], damage: Damage) -> Original | None:
    body = whole_body(row, damage)
    if body is None:
        return None
    return Original(ref=row.ref, role=row.role, tokens=row.tokens, body=body, text=said(row.body))


def _match(
    connection: sa.Connection, tenant: str, terms: list[str], operator: str
) -> tuple[sa.Select[*tuple[Any, ...]], str]:
    if connection.dialect.name == "sqlite":
        words = f" {operator} ".join(_quoted(term) for term in terms)
        query = MATCH_SQLITE
    else:
        glue = " or " if operator == "OR" else " "
        words, query = glue.join(_quoted(term) for term in terms), MATCH_POSTGRESQL
    return query.where(originals.c.tenant == tenant, sa.not_(originals.c.quarantined)), words


def _found(
    connection: sa.Connection, tenant: str, query: sa.Select[*tuple[Any, ...]], words: str, damage: Damage
) -> list[Original]:
    best = list(connection.scalars(query, {"query": words}))
    rows = {
        row.id: row
        for row in connection.execute(
            sa.select(originals).where(originals.c.tenant == tenant, originals.c.id.in_(best))
        )
    }
    return [found for key in best if (found := _verified(rows[key], damage)) is not None]


def _quoted(term: str) -> str:
    escaped = term.replace('"', '""').replace("\0", " ")
    return f'"{escaped}"'
