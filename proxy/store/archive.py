"""The archive: every message that was removed or shortened, found by ref, by its words, or by what
it is about.

Words are indexed a little after the commit, off the path of the request: tokenizing them is most of
a commit's time. Messages of one batch are stored in frames of some 64 KiB together: they have much
in common, and a damaged frame costs the messages in it alone. A body is given back only if its
SHA-256 is the one that was stored with it; a damaged row is set aside (``quarantined``) and counts
as absent until the same message is archived again. Vectors by an embeddings model are 32-bit floats
of length 1, compared one by one: a conversation has thousands of them at most.
"""

import math
import re
from array import array
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from hashlib import sha256
from itertools import chain
from operator import mul
from statistics import fmean, pstdev
from typing import Any
from unicodedata import category, normalize

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import TSVECTOR

from policies.text.segments import SOLID, words
from proxy.store.packing import (
    Damaged,
    Packed,
    pack,
    pack_message,
    plain_text,
    unpack,
    unpack_message,
)
from proxy.store.records import Change, Original
from proxy.store.schema import branches, frames, meta, originals, removed, vectors
from proxy.store.transaction import (
    AT_ONCE,
    Transaction,
    among,
    chunks,
    keep_first,
    of,
    owned,
    recorded,
    same,
    stored,
)

MAX_TERMS = 32
INDEXED_BYTES = 256 << 10
MERGED_PAGES = 64
MERGED_AT_ONCE = 16
MERGE = sa.text("INSERT INTO originals_fts (originals_fts, rank) VALUES ('merge', :pages)")
MAX_WORDS_LEN = 200_000  # characters; PostgreSQL takes no more than 1 MB of them
INDEXED = sa.select(meta.c.number).where(meta.c.name == "indexed").scalar_subquery()
WAITS_FOR_INDEX = sa.select(sa.select(sa.func.max(originals.c.id)).scalar_subquery() > INDEXED)
WAITING = (
    sa.select(originals.c.id, originals.c.ref, originals.c.size, originals.c.frame)
    .where(originals.c.id > sa.bindparam("start"))
    .order_by(originals.c.id)
    .limit(AT_ONCE)
)
SET_INDEXED = sa.update(meta).where(meta.c.name == "indexed").values(number=sa.bindparam("stop"))
# One row each: more rows in a statement took 1.4 times as long.
INDEX = "INSERT INTO originals_fts (rowid, text) VALUES (?, ?)"
UNINDEX = "INSERT INTO originals_fts (originals_fts, rowid, text) VALUES ('delete', ?, ?)"
IS_WHOLE = originals.c.frame.is_not(None)
KNOWN = sa.select(
    originals.c.ref, sa.or_(originals.c.quarantined, sa.not_(IS_WHOLE)).label("lacking")
)
KNOWN = KNOWN.where(among(originals.c.ref))
FRAMED = sa.select(sa.func.count()).where(
    of(originals, "tenant"),
    originals.c.ref.in_(sa.bindparam("refs", expanding=True)),
    originals.c.frame.in_(sa.bindparam("frames", expanding=True)),
)
FRAMED_BYTES = 64 << 10
FRAME_LEVEL = 3
FRAMES_HELD = 16
FRAME = sa.select(frames.c.body).where(frames.c.id == sa.bindparam("frame")).with_for_update()
QUARANTINE = sa.update(originals).where(of(originals, "tenant", "ref")).values(quarantined=True)
ADD_FRAME = sa.insert(frames)
ADD_ORIGINAL = keep_first(originals)
TO_WORDS = sa.func.to_tsvector(sa.literal_column("'simple'"), sa.bindparam("text", type_=sa.Text))
WORDED = sa.table(
    "originals",
    *(sa.column(each.name, each.type) for each in originals.c),
    sa.column("words", TSVECTOR),
)
ADD_WITH_WORDS = keep_first(WORDED).values(words=TO_WORDS)
HOLD_ORIGINAL = keep_first(removed)
ADD_VECTOR = keep_first(vectors)
WORDS = sa.table("originals_fts", sa.column("rowid", sa.Integer))
MATCHING = {
    "sqlite": sa.select(originals.c.id)
    .join(WORDS, WORDS.c.rowid == originals.c.id)
    .where(sa.text("originals_fts MATCH :query")),
    "postgresql": sa.select(originals.c.id).where(
        sa.text("originals.words @@ plainto_tsquery('simple', :query)")
    ),
}
"""The messages that have all words of a query, in any order."""
SIGNS = frozenset({"So", "Sk"})
OF_A_SIGN = "\ufe0e\ufe0f"
"""How an emoji is to be shown: some write it, some do not."""
ACCENTS = re.compile("[\u0300-\u036f]+")
CANDIDATES = 400
BM25_K1 = 1.2
BM25_B = 0.75


def original(tx: Transaction, tenant: str, ref: str) -> Original | None:
    return next(iter(originals_with(tx, tenant, [ref])), None)


def held(tx: Transaction, tenant: str, conversation: str) -> set[str]:
    return set(tx.scalars(_held_by(tenant, conversation)))


def search(
    tx: Transaction, tenant: str, text: str, *, limit: int = 20, conversation: str | None = None
) -> list[Original]:
    """Removed messages with all words of ``text``, else with any of them, best first; nothing in it
    is an operator.

    With the id of a ``conversation`` only those that were removed from it.
    """
    given = text.split()
    terms = list(dict.fromkeys(term for word in given for term in _phrases(word)))[:MAX_TERMS]
    signs = list(dict.fromkeys(sign for word in given for sign in _signs(word)))[:MAX_TERMS]
    where = [owned(originals, tenant), sa.not_(originals.c.quarantined)]
    if conversation is not None:
        where.append(originals.c.ref.in_(_held_by(tenant, conversation)))
    phrases = [f" {_indexed(term)} " for term in terms]
    for is_for_all in (True, False)[: min(len(terms) + len(signs), 2)]:
        there = _candidates(
            tx, phrases, signs, where, is_for_all=is_for_all, most=max(limit, CANDIDATES)
        )
        if found := tx.aside(partial(_ranked, there, phrases, signs, is_for_all=is_for_all)):
            return found[:limit]
    return []


def _candidates(
    tx: Transaction,
    phrases: Sequence[str],
    signs: Sequence[str],
    where: Sequence[sa.ColumnElement[bool]],
    *,
    is_for_all: bool,
    most: int,
) -> list[Original]:
    """The newest messages with all of the words, or with the rarest of them.

    ``signs`` are not indexed: they are searched in the newest messages.
    """
    newest = sa.select(originals.c.id).where(*where).order_by(originals.c.id.desc()).limit(most)
    matching = MATCHING[tx.dialect].where(*where).order_by(originals.c.id.desc()).limit(most)
    queries = [" ".join(phrases)] if is_for_all else phrases
    lists = [list(tx.scalars(matching, {"query": _query(tx, each)})) for each in queries if each]
    lists.sort(key=len)
    if signs and not (is_for_all and phrases):
        lists.append(list(tx.scalars(newest)))
    ids = list(dict.fromkeys(chain.from_iterable(lists)))[:most]
    rows = tx.execute(
        sa.select(originals).where(*where, originals.c.id.in_(ids)).order_by(originals.c.id.desc())
    ).all()
    return [each for row in rows if (each := read_original(tx, row)) is not None]


def _query(tx: Transaction, words: str) -> str:
    return " AND ".join(f'"{word}"' for word in words.split()) if tx.dialect == "sqlite" else words


def _ranked(
    there: Sequence[Original], phrases: Sequence[str], signs: Sequence[str], *, is_for_all: bool
) -> list[Original]:
    """Those that have what is looked for, the best first, by BM25 (S. Robertson, K. Spärck Jones
    1994).

    The index only knows which messages have a word: where and how often takes four times the room.
    """
    texts = [f" {_indexed(each.text)} " for each in there]
    counts = [
        [
            *(text.count(phrase) for phrase in phrases),
            *(original.text.count(sign) for sign in signs),
        ]
        for original, text in zip(there, texts, strict=True)
    ]
    mean = sum(map(len, texts)) / max(1, len(texts))
    weights = [
        _weight(sum(each[n] > 0 for each in counts), len(counts))
        for n in range(len(phrases) + len(signs))
    ]
    scored = [
        (sum(map(mul, weights, (_saturated(n, len(text) / mean) for n in each))), original)
        for original, text, each in zip(there, texts, counts, strict=True)
        if (all if is_for_all else any)(each)
    ]
    return [original for _, original in sorted(scored, key=lambda each: -each[0])]


def _weight(having: int, all_: int) -> float:
    return max(1e-6, math.log((all_ - having + 0.5) / (having + 0.5)))


def _saturated(count: int, length: float) -> float:
    return count * (BM25_K1 + 1) / (count + BM25_K1 * (1 - BM25_B + BM25_B * length))


def _indexed(text: str) -> str:
    """The words of a text as they are indexed, without accents: SQLite's tokenizer separates words
    by ASCII alone.
    """
    said = " ".join(words(text))
    if said.isascii():
        return said
    return normalize("NFC", ACCENTS.sub("", normalize("NFD", said)))


def lacking_vectors(
    tx: Transaction, tenant: str, conversation: str, model: str, *, limit: int
) -> dict[str, str]:
    known = sa.select(vectors.c.ref).where(owned(vectors, tenant, model=model))
    lacking = (
        owned(originals, tenant, ref=_held_by(tenant, conversation)),
        IS_WHOLE,
        originals.c.ref.not_in(known),
    )
    query = sa.select(originals).where(*lacking).order_by(originals.c.id.desc()).limit(limit)
    found: dict[str, str] = {}
    for row in tx.execute(query).all():
        with suppress(Damaged):
            found[row.ref] = message_of(tx, row)[1]
    return {ref: text for ref, text in found.items() if text}


def add_vectors(
    tx: Transaction, tenant: str, model: str, given: Mapping[str, Sequence[float]]
) -> None:
    there = tx.scalars(sa.select(originals.c.ref).where(owned(originals, tenant, ref=list(given))))
    own = {"tenant": tenant, "model": model}
    tx.many(ADD_VECTOR, [{**own, "ref": ref, "body": _unit(given[ref])} for ref in sorted(there)])


LIKE = 0.45
STANDS_OUT = 3.5
"""The cosine from which on a text is alike; or how many standard deviations it has above all others
of its conversation, since models differ in what they give to texts that have nothing in common.
"""


def nearest(
    tx: Transaction,
    tenant: str,
    conversation: str,
    model: str,
    wanted: Sequence[float],
    *,
    limit: int,
) -> list[tuple[Original, float]]:
    """Originals of a conversation that are alike, the nearest first, each with its cosine."""
    mine = owned(vectors, tenant, model=model, ref=_held_by(tenant, conversation))
    vector = array("f", _unit(wanted))
    cosines: dict[str, float] = {}
    for row in tx.execute(sa.select(vectors.c.ref, vectors.c.body).where(mine)):
        other = array("f", row.body)
        if len(other) == len(vector):
            cosines[row.ref] = sum(map(mul, vector, other))
    if not cosines:
        return []
    least = min(LIKE, fmean(cosines.values()) + STANDS_OUT * pstdev(cosines.values()))
    near = sorted(
        (ref for ref, cosine in cosines.items() if cosine >= least),
        key=cosines.__getitem__,
        reverse=True,
    )
    return [(each, cosines[each.ref]) for each in originals_with(tx, tenant, near[:limit])]


def add_originals(tx: Transaction, change: Change) -> None:
    by_ref = {original.ref: original for original in change.originals}
    for refs in chunks(by_ref):
        _add(tx, change.tenant, [by_ref[ref] for ref in refs], at=change.at)
    hold(
        tx,
        change.tenant,
        change.branch,
        {*by_ref, *change.covered, *(edit.ref for edit in change.edits)},
    )


def hold(tx: Transaction, tenant: str, branch: str, refs: Iterable[str]) -> None:
    tx.many(
        HOLD_ORIGINAL, [{"tenant": tenant, "branch": branch, "ref": ref} for ref in sorted(refs)]
    )


def drop_unheld(tx: Transaction, tenant: str, refs: Iterable[str]) -> None:
    for chunk in chunks(refs):
        needed = tx.scalars(sa.select(removed.c.ref).where(owned(removed, tenant, ref=chunk)))
        _drop(tx, tenant, sorted(set(chunk) - set(needed)))


def message_of(tx: Transaction, row: sa.Row[*tuple[Any, ...]]) -> tuple[bytes, str]:
    """A message's JSON and its text. Raises :class:`Damaged`."""
    found = tx.frames.get(row.frame)
    if found is None:
        body = tx.scalar(sa.select(frames.c.body).where(frames.c.id == row.frame))
        if len(tx.frames) >= FRAMES_HELD:
            tx.frames.pop(next(iter(tx.frames)))
        with suppress(Damaged):
            found = tx.aside(partial(unpack, body or b"", dict[str, Packed]))
        found = tx.frames[row.frame] = found or {}
    if row.ref not in found:
        raise Damaged("the frame has no such message")
    return unpack_message(found[row.ref])


def waits_for_index(tx: Transaction) -> bool:
    return tx.full and tx.dialect == "sqlite" and bool(tx.scalar(WAITS_FOR_INDEX))


def index_some(tx: Transaction) -> bool:
    """Index the words of the oldest originals that wait for it, about 256 KiB of them; whether more
    are waiting.

    Those that share a frame go together, so that each is unpacked once.
    """
    start: int = tx.execute(sa.select(INDEXED)).scalar_one()
    some: list[sa.Row[*tuple[Any, ...]]] = []
    size = 0
    with tx.execute(WAITING, {"start": start}) as waiting:
        for row in waiting:
            is_apart = row.frame is None or not some or row.frame != some[-1].frame
            if some and is_apart and size + row.size > INDEXED_BYTES:
                more = True
                break
            some.append(row)
            size += row.size
        else:
            more = len(some) == AT_ONCE
    if some:
        _index(tx, INDEX, some)
        tx.execute(SET_INDEXED, {"stop": some[-1].id})
        tx.execute(MERGE, {"pages": MERGED_AT_ONCE})
    return more


def merge_words(tx: Transaction, *, begins: bool) -> bool:
    """Merge some of the full-text index, where deleted words take as much room as others; whether
    there is more.

    A negative number of pages begins with all that there is (sqlite.org/fts5.html, "The 'merge'
    command").
    """
    if tx.dialect != "sqlite":
        return False
    changed = sa.text("SELECT total_changes()")
    before: int = tx.execute(changed).scalar_one()
    tx.execute(MERGE, {"pages": -MERGED_PAGES if begins else MERGED_PAGES})
    after: int = tx.execute(changed).scalar_one()
    return after - before >= 2


def forget_words(tx: Transaction) -> None:
    if tx.dialect == "sqlite":
        tx.execute(sa.text("INSERT INTO originals_fts (originals_fts) VALUES ('optimize')"))


def _held_by(tenant: str, conversation: str) -> sa.Select[str]:
    query = sa.select(removed.c.ref).join(branches, same(branches, removed, "tenant", "branch"))
    return query.where(owned(removed, tenant), owned(branches, tenant, conversation=conversation))


def originals_with(tx: Transaction, tenant: str, refs: Sequence[str]) -> list[Original]:
    found: dict[str, Original | None] = {}
    for chunk in chunks(dict.fromkeys(refs)):
        mine = owned(originals, tenant, ref=chunk, quarantined=False)
        rows = tx.execute(sa.select(originals).where(mine).order_by(originals.c.id)).all()
        found |= {row.ref: read_original(tx, row) for row in rows}
    return [each for ref in refs if (each := found.get(ref)) is not None]


def read_original(tx: Transaction, row: sa.Row[*tuple[Any, ...]]) -> Original | None:
    if row.frame is None:
        return None
    with suppress(Damaged):
        body, text = message_of(tx, row)
        if sha256(body).digest() == row.sha:
            return recorded(Original, originals, row, body=body, text=text)
    tx.damage("original", row.tenant, row.ref)
    return None


def _add(tx: Transaction, tenant: str, given: list[Original], *, at: float) -> None:
    refs = [each.ref for each in given]
    known: dict[str, bool] = dict(tx.ask(KNOWN, tenant, refs))
    lacking = [ref for ref in refs if tx.full and known.get(ref)]
    _drop(tx, tenant, lacking)
    fresh = [each for each in given if each.ref not in known or each.ref in lacking]
    if not fresh:
        return
    texts = {each.ref: plain_text(each.text) for each in fresh}
    framed = dict[str, int]()
    for group in _grouped(fresh) if tx.full else ():
        frame = tx.execute(
            ADD_FRAME, {"body": tx.aside(partial(_packed, group, texts))}
        ).inserted_primary_key
        framed |= dict.fromkeys([each.ref for each in group], 0 if frame is None else frame[0])
    has_words = tx.full and tx.dialect == "postgresql"

    def row(each: Original) -> dict[str, Any]:
        values = stored(
            originals, each, tenant=tenant, at=at, quarantined=False, frame=framed.get(each.ref)
        )
        values |= {"size": len(each.body), "sha": sha256(each.body).digest()}
        return values | ({"text": _indexed(texts[each.ref])[:MAX_WORDS_LEN]} if has_words else {})

    tx.many(
        ADD_WITH_WORDS if has_words else ADD_ORIGINAL,
        tx.aside(lambda: [row(each) for each in fresh]),
    )
    if has_words:
        there = tx.scalar(
            FRAMED, {"of_tenant": tenant, "refs": list(framed), "frames": list(framed.values())}
        )
        if there != len(framed):
            _settle(tx, tenant, framed.values())  # another server has archived the same meanwhile


def _packed(group: Sequence[Original], texts: Mapping[str, str]) -> bytes:
    # level 6 would take four times as long and save 2 to 7 % of it
    return pack(
        {each.ref: pack_message(each.body, texts[each.ref]) for each in group}, level=FRAME_LEVEL
    )


def _grouped(given: Sequence[Original]) -> list[list[Original]]:
    """Those that get a frame together, some 64 KiB in a row."""
    groups: list[list[Original]] = [[]]
    size = 0
    for each in given:
        if groups[-1] and size + len(each.body) > FRAMED_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(each)
        size += len(each.body)
    return groups


def _settle(tx: Transaction, tenant: str, which: Iterable[int]) -> None:
    """Rewrite frames so that they hold exactly the messages whose rows are in them; an unreadable
    one is deleted.
    """
    for number in sorted(set(which)):
        tx.frames.pop(number, None)
        held = dict[str, Packed]()
        with suppress(Damaged):
            held = unpack(tx.scalar(FRAME, {"frame": number}) or b"", dict[str, Packed])
        mine = owned(originals, tenant, frame=number, ref=list(held))
        stay = set(tx.scalars(sa.select(originals.c.ref).where(mine)))
        one = frames.c.id == number
        if not stay:
            tx.execute(sa.delete(frames).where(one))
        elif len(stay) < len(held):
            body = pack({ref: its for ref, its in held.items() if ref in stay}, level=FRAME_LEVEL)
            tx.execute(sa.update(frames).where(one).values(body=body))


def _drop(tx: Transaction, tenant: str, refs: list[str]) -> None:
    if not refs:
        return
    mine = owned(originals, tenant, ref=refs)
    if tx.dialect == "sqlite":
        _index(
            tx,
            UNINDEX,
            tx.execute(sa.select(originals).where(mine, originals.c.id <= INDEXED)).all(),
        )
    emptied = list(
        tx.scalars(
            sa.select(originals.c.frame).where(mine, originals.c.frame.is_not(None)).distinct()
        )
    )
    tx.execute(sa.delete(originals).where(mine))
    _settle(tx, tenant, emptied)


def _index(tx: Transaction, statement: str, rows: Iterable[sa.Row[*tuple[Any, ...]]]) -> None:
    found = list[tuple[int, str]]()
    for row in rows:
        if row.frame is not None:
            with suppress(Damaged):
                text = message_of(tx, row)[1]
                # SQLite folds ASCII itself
                found.append((row.id, text if text.isascii() else _indexed(text)))
    if found:
        tx.connection.exec_driver_sql(statement, found)


def _phrases(word: str) -> list[str]:
    """A word of a query as it is indexed: a path's names have to follow one another, pairs of
    characters have not.
    """
    found = words(word)
    if _signs(word):
        return []
    if SOLID.search(word) or not found:
        return found
    return [" ".join(found)]


def _signs(word: str) -> list[str]:
    """Whether a query word is not indexed: one character of a script without blanks, an emoji."""
    if word.isascii():
        return []
    found = words(word)
    if len(found) == 1 and len(found[0]) == 1 and SOLID.search(found[0]):
        return found
    if not found and any(category(character) in SIGNS for character in word):
        return [word.strip(OF_A_SIGN)]
    return []


def _unit(vector: Sequence[float]) -> bytes:
    length = math.sqrt(math.fsum(x * x for x in vector)) or 1.0
    return array("f", (x / length for x in vector)).tobytes()
