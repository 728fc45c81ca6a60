"""What a conversation has for whoever looks into it: the arrays of its newest requests, and what was removed from it.

What arrays and their messages say is only added, in bundles, as requests come. Once there are a few small ones, they
become one: arrays then go to the conversation's one row of them, and what the archive has or no request that is kept
needs goes. A bundle that is damaged costs what it holds, no request and no other bundle.

Arrays are kept as references: what a message says stands in the archive, or once among what the bundles say.
"""

import json
import struct
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from functools import partial
from hashlib import blake2b
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple

import msgspec
import sqlalchemy as sa

from policies.ledger import ADDING, EditKind, PlannedMessage
from policies.messages import PIN_SIZE
from proxy.store.archive import IS_WHOLE, message_of, originals_with
from proxy.store.ledger import Batched, cuts_of, key_of, load_batches, load_cuts, newest_branch
from proxy.store.packing import Damaged, exact_bytes, joined, pack, pack_named, parted, unpack, unpack_named
from proxy.store.records import ConversationRow, ExchangeRow, Inspection, Original, RemovedRow
from proxy.store.schema import conversations, cuts, evictions, exchanges, inspected, inspected_parts, originals
from proxy.store.transaction import Rows, Transaction, among, chunks, keep_last, of, owned, recorded

Home = tuple[str, str]
RECORD_FORM = f"{PIN_SIZE}sHI"
RECORD = struct.Struct(f">{RECORD_FORM}")
"""Of a message the beginning of its digest, its role's place among the roles, and its tokens."""
OWN = "t"
_ENCODER = json.JSONEncoder(separators=(",", ":"))
FEW = 8
"""So many bundles may be small, and so many messages new at once."""
TINY, SMALL, LARGE = 16 << 10, 32 << 10, 4 << 20
ARRAYS = ""
"""The name of arrays in a bundle, which is tiny before it is packed, so that it is small: it is written anew soon."""
BROKEN = (Damaged, ValueError, LookupError, TypeError, struct.error)
INSPECTED = sa.select(inspected.c.body).where(of(inspected, "tenant", "conversation"))
SET_INSPECTED = keep_last(inspected)
MINE = of(inspected_parts, "tenant", "conversation")
PARTS = inspected_parts.c
COUNTS = (
    sa.select(
        PARTS.conversation, sa.func.max(PARTS.number), sa.func.count(sa.case((sa.func.length(PARTS.body) < SMALL, 1)))
    )
    .where(among(PARTS.conversation))
    .group_by(PARTS.conversation)
)
REFS = sa.select(PARTS.number, PARTS.refs, (sa.func.length(PARTS.body) < SMALL).label("is_small")).where(MINE)
ADD_BUNDLE = sa.insert(inspected_parts)
BODIES = sa.select(PARTS.number, PARTS.body).where(MINE).order_by(PARTS.number)
SMALL_BODIES = BODIES.where(sa.func.length(PARTS.body) < SMALL)
ONE_BODY = BODIES.where(of(inspected_parts, "number"))
DROP = sa.delete(inspected_parts).where(MINE, of(inspected_parts, "number"))
LOCK = sa.select(conversations.c.id).where(of(conversations, "tenant", "id")).with_for_update()
ARCHIVED = sa.select(originals.c.ref).where(among(originals.c.ref), IS_WHOLE)


class Inspected(msgspec.Struct, frozen=True, kw_only=True):
    """What was kept of one request.

    Attributes:
        keep: how many of the conversation's requests were to be kept then.
        client: ref, role and tokens of each message that the client sent.
        sent: of each forwarded one its place among the client's (None: Weir's own), its edit, tokens, and the ref of
            its text (None: as the client sent it); None where the whole array was the client's.
        bodies: what is known by its ref: JSON of messages, UTF-8 of texts; ``archived`` the refs that the archive has.
    """

    keep: int
    client: Sequence[tuple[str, str, int]]
    sent: Sequence[tuple[int | None, str | None, int, str | None]] | None
    pruned: tuple[str, ...]
    tools: int
    bodies: Mapping[str, bytes]
    archived: frozenset[str] = frozenset()


def ref_of(text: str) -> str:
    return OWN + blake2b(exact_bytes(text), digest_size=PIN_SIZE).hexdigest()


class KeptArrays(NamedTuple):
    request: str
    at: float
    told: bytes
    records: bytes

    @classmethod
    def of(cls, request: str, at: float, its: Inspection) -> "KeptArrays":
        said_by = [*map(attrgetter("role"), its.messages)]
        roles = {role: number for number, role in enumerate(dict.fromkeys(said_by))}
        facts: list[object] = [None] * (3 * len(said_by))  # by column: there may be hundreds in each request
        facts[0::3] = [*map(attrgetter("digest"), its.messages)]
        facts[1::3] = [*map(roles.__getitem__, said_by)]
        facts[2::3] = [*map(attrgetter("tokens"), its.messages)]
        records = struct.pack(">" + len(said_by) * RECORD_FORM, *facts)
        sent = None if its.pieces is None else list(_runs(its.pieces))
        said = {"keep": its.keep, "roles": list(roles), "sent": sent, "pruned": its.pruned, "tools": its.tools}
        return cls(request, at, _ENCODER.encode(said).encode(), records)

    def inspected(self) -> Inspected:
        said = json.loads(self.told)
        client = [(pin.hex(), said["roles"][role], tokens) for pin, role, tokens in RECORD.iter_unpack(self.records)]
        sent = None if said["sent"] is None else [each for run in said["sent"] for each in _pieces(run, client)]
        pruned, tools = tuple(said["pruned"]), said["tools"]
        return Inspected(keep=said["keep"], client=client, sent=sent, pruned=pruned, tools=tools, bodies={})


def parts_of(given: Sequence[KeptArrays]) -> tuple[bytes, bytes, bytes]:
    heads, own = list[tuple[str, float, int, int]](), list[bytes]()
    for each, fresh in _fresh(given):
        heads.append((each.request, each.at, len(each.records) - len(fresh), len(fresh)))
        own.append(fresh)
    return msgspec.json.encode(heads), b"\n".join([each.told for each in given]), b"".join(own)


def arrays_of(parts: Sequence[bytes]) -> list[KeptArrays]:
    heads, told, own = parts
    found, start, records = list[KeptArrays](), 0, b""
    for (request, at, same, fresh), said in zip(msgspec.json.decode(heads), told.split(b"\n"), strict=True):
        records = records[:same] + own[start : start + fresh]
        start += fresh
        found.append(KeptArrays(request, at, said, records))
    return found


def _fresh(given: Iterable[KeptArrays]) -> Iterator[tuple[KeptArrays, bytes]]:
    """Each array with its records from the first that is not the one before's: most go on where that ended."""
    before = b""
    for each in given:
        same = len(before)
        if not each.records.startswith(before):
            most = min(len(before), len(each.records)) // RECORD.size
            ends = range(RECORD.size, (most + 1) * RECORD.size, RECORD.size)
            same = RECORD.size * bisect_left(ends, 1, key=lambda end: before[:end] != each.records[:end])
        yield each, each.records[same:]
        before = each.records


def refs_of(given: Iterable[KeptArrays]) -> set[str]:
    """Every ref in arrays of requests, most of which have most in common. Raises what JSON and structs raise."""
    pins, texts = set[bytes](), set[str]()
    for each, fresh in _fresh(given):
        pins.update([pin for pin, _, _ in RECORD.iter_unpack(fresh)])
        texts.update([run[3] for run in json.loads(each.told)["sent"] or () if len(run) == 4 and run[3] is not None])
    return {pin.hex() for pin in pins} | texts


def _runs(pieces: Sequence[PlannedMessage]) -> Iterator[list[object]]:
    run: list[int] = []
    for piece in pieces:
        same = piece.index if piece.text is None and piece.kind is None else None
        if run and same == run[1] + 1:
            run[1] += 1
            continue
        if run:
            yield [*run]
        run = [] if same is None else [same, same]
        if same is None:
            yield [piece.index, piece.kind, piece.tokens, None if piece.text is None else ref_of(piece.text)]
    if run:
        yield [*run]


def _pieces(
    run: list[Any], client: Sequence[tuple[str, str, int]]
) -> Iterator[tuple[int | None, str | None, int, str | None]]:
    match run:
        case [first, last]:
            yield from ((n, None, client[n][2], None) for n in range(first, last + 1))
        case [index, kind, tokens, ref]:
            yield index, kind, tokens, ref
        case _:
            raise Damaged("the array is broken")


def inspection(tx: Transaction, conversation: ConversationRow, request: str) -> tuple[ExchangeRow, Inspected | None]:
    mine = owned(exchanges, conversation.tenant, conversation=conversation.id, id=request)
    row = tx.execute(sa.select(exchanges).where(mine)).first()
    if row is None:
        raise KeyError(request)
    told = recorded(ExchangeRow, exchanges, row, name=conversation.name, detail=json.loads(row.detail))
    kept, said = _whole(tx, (conversation.tenant, conversation.id))
    for newer, arrays in enumerate(reversed(kept)):
        if arrays.request == request:
            with suppress(*BROKEN):
                found, needed = arrays.inspected(), refs_of([arrays])
                return told, None if newer >= found.keep else _with_bodies(tx, conversation, found, said, needed)
            tx.damage("inspected", conversation.tenant, request)
    return told, None


def exported(tx: Transaction, conversation: ConversationRow) -> tuple[list[dict[str, Any]], list[dict[str, str]]]:
    kept, bodies = _whole(tx, (conversation.tenant, conversation.id))
    arrays = [{"id": each.request, "at": each.at, **_plain(each)} for each in kept]
    said = [
        {"conversation": conversation.id, "ref": ref, "body": body.decode(errors="replace")}
        for ref, body in sorted(bodies.items())
    ]
    return arrays, said


def keep(tx: Transaction, batch: Sequence[tuple[ExchangeRow, Inspection, str]]) -> None:
    """Keep the two arrays of each request (with the id of its conversation), and no longer what nobody needs.

    The conversations' rows are locked by the caller.
    """
    by_home: dict[Home, list[tuple[ExchangeRow, Inspection]]] = {}
    for row, its, home in batch:
        by_home.setdefault((row.tenant, home), []).append((row, its))
    counts = {(tenant, its): (last, few) for tenant, (its, last, few) in tx.ask_each(COUNTS, by_home)}
    bundles = list[dict[str, object]]()
    for key, made in by_home.items():
        last, small = counts.get(key, (0, 0))
        try:
            arrays = [KeptArrays.of(row.id, row.at, its) for row, its in made]
            fresh = {ref: body for _, its in made for ref, body in _bodies_of(its)}
        except (*BROKEN, OverflowError):  # requests that cannot be looked at are still requests
            continue
        for ref in _elsewhere(tx, key, made[-1][0].branch, fresh.keys()):
            fresh.pop(ref, None)
        together = joined(parts_of(arrays))
        if small + 1 < FEW and len(together) <= TINY and not any(row.evicted or row.strategy for row, _ in made):
            bundles += _bundled(tx, key, fresh, last=last, arrays=together)
        else:
            bundles += _rewritten(tx, key, arrays, fresh, most=made[-1][1].keep)
    tx.many(ADD_BUNDLE, bundles)


def _bodies_of(its: Inspection) -> Iterator[tuple[str, bytes]]:
    yield from ((its.messages[n].ref, raw) for n, raw in enumerate(its.raws, its.first))
    for piece in its.pieces or ():
        if piece.text is not None:
            yield ref_of(piece.text), exact_bytes(piece.text)


def keep_texts(tx: Transaction, home: Home, branch: str, gone: sa.ColumnElement[bool]) -> None:
    tx.execute(LOCK, {"of_tenant": home[0], "of_id": home[1]})
    if there := tx.execute(REFS, key_of(*home)).all():
        known = set(chain.from_iterable(row.refs.split() for row in there))
        mine = owned(cuts, home[0], branch=branch)
        texts = [text for text in tx.scalars(sa.select(cuts.c.text).where(mine, gone)) if text]
        fresh = {ref: exact_bytes(text) for text in texts if (ref := ref_of(text)) not in known}
        tx.many(ADD_BUNDLE, list(_bundled(tx, home, fresh, last=max(row.number for row in there))))


def _rewritten(
    tx: Transaction, home: Home, new: Sequence[KeptArrays], fresh: Mapping[str, bytes], *, most: int
) -> Iterator[dict[str, object]]:
    """The bundles in place of small ones and of those that hold what nobody needs; the arrays of the newest stay."""
    there = tx.execute(REFS, key_of(*home)).all()
    refs = {row.number: row.refs.split() for row in there}
    gone = {row.number for row in there if row.is_small}
    arrays, bodies = _read(tx, home, SMALL_BODIES)
    left = _in_order([*_kept(tx, home), *arrays, *new])[-most:]
    packed = tx.aside(lambda: pack(*parts_of(left), level=1))
    tx.many(SET_INSPECTED, [{"tenant": home[0], "conversation": home[1], "body": packed}])
    stays = tx.aside(partial(_needed, left)) & {*fresh, *chain.from_iterable(refs.values())}
    stays -= _archived(tx, home, stays if len(fresh) <= FEW else stays - fresh.keys())  # of many it was asked before
    for number in sorted(refs.keys() - gone):
        if not stays.issuperset(refs[number]):
            gone.add(number)
            bodies |= _read(tx, home, ONE_BODY, of_number=number)[1]
    elsewhere = set(chain.from_iterable(its for number, its in refs.items() if number not in gone))
    tx.many(DROP, [key_of(*home) | {"of_number": number} for number in sorted(gone)])
    kept = {ref: body for ref, body in {**bodies, **fresh}.items() if ref in stays and ref not in elsewhere}
    yield from _bundled(tx, home, kept, last=max(refs, default=0), level=3)


def _bundled(
    tx: Transaction, home: Home, bodies: Mapping[str, bytes], *, last: int, arrays: bytes = b"", level: int = 1
) -> Iterator[dict[str, object]]:
    parts = list(_parts(bodies))
    if arrays:
        if not parts or len(arrays) + sum(map(len, bodies.values())) > TINY:
            parts.append({})
        parts[-1][ARRAYS] = [arrays]
    for number, part in enumerate(parts, last + 1):
        body = tx.aside(partial(pack_named, part, level=level))
        refs = " ".join([ref for ref in part if ref != ARRAYS])
        yield {"tenant": home[0], "conversation": home[1], "number": number, "refs": refs, "body": body}


def _parts(bodies: Mapping[str, bytes]) -> Iterator[dict[str, list[bytes]]]:
    part, size = dict[str, list[bytes]](), 0
    for ref, body in bodies.items():
        part[ref] = [body]
        size += len(body)
        if size >= LARGE:
            yield part
            part, size = {}, 0
    if part:
        yield part


def _elsewhere(tx: Transaction, home: Home, branch: str, refs: AbstractSet[str]) -> set[str]:
    if len(refs) <= FEW and not any(ref.startswith(OWN) for ref in refs):  # a few are new, in no archive and no bundle
        return set()
    found = set(chain.from_iterable(row.refs.split() for row in tx.execute(REFS, key_of(*home))))
    new = refs - found
    if any(ref.startswith(OWN) for ref in new):
        found |= {ref_of(cut.text) for _, cut in load_cuts(tx, home[0], branch)}
    return found | _archived(tx, home, new) if len(new) > FEW else found


def _archived(tx: Transaction, home: Home, refs: Iterable[str]) -> set[str]:
    return {ref for (ref,) in tx.ask(ARCHIVED, home[0], [ref for ref in refs if not ref.startswith(OWN)])}


def _kept(tx: Transaction, home: Home) -> list[KeptArrays]:
    packed = tx.scalar(INSPECTED, key_of(*home))
    try:
        return [] if packed is None else tx.aside(lambda: arrays_of(unpack(packed, parts=3)))
    except BROKEN:
        tx.damage("inspected", *home)
        return []


def _read(tx: Transaction, home: Home, query: Rows, **more: object) -> tuple[list[KeptArrays], dict[str, bytes]]:
    """Arrays that are in bundles, and what these say."""
    arrays, bodies = list[KeptArrays](), dict[str, bytes]()
    for number, body in tx.execute(query, key_of(*home) | more):
        try:
            found = {ref: said for ref, [said] in tx.aside(partial(unpack_named, body, parts=1)).items()}
            arrays += arrays_of(parted(found.pop(ARRAYS), 3)) if ARRAYS in found else ()
        except BROKEN:
            tx.damage("inspected", home[0], f"{home[1]} {number}")
        else:
            bodies |= found
    return arrays, bodies


def _whole(tx: Transaction, home: Home) -> tuple[list[KeptArrays], dict[str, bytes]]:
    arrays, bodies = _read(tx, home, BODIES)
    return _in_order([*_kept(tx, home), *arrays]), bodies


def _in_order(arrays: Iterable[KeptArrays]) -> list[KeptArrays]:
    return sorted(arrays, key=lambda each: (each.at, each.request))


def _needed(left: Sequence[KeptArrays]) -> set[str]:
    try:
        return refs_of(left)
    except BROKEN:
        return set[str]().union(*(_needed([each]) for each in left if len(left) > 1))


def _with_bodies(
    tx: Transaction, conversation: ConversationRow, found: Inspected, said: Mapping[str, bytes], needed: set[str]
) -> Inspected:
    bodies = {ref: body for ref, body in said.items() if ref in needed}
    if any(ref.startswith(OWN) and ref not in bodies for ref in needed):
        texts = (each.cut.text for each in cuts_of(tx, conversation).values())
        bodies |= {ref_of(text): text.encode("utf-8", "surrogatepass") for text in texts}
    lacking = sorted({ref for ref, _, _ in found.client} - bodies.keys())
    archived = {each.ref: each.body for each in originals_with(tx, conversation.tenant, lacking)}
    return msgspec.structs.replace(found, bodies=bodies | archived, archived=frozenset(archived))


def _plain(kept: KeptArrays) -> dict[str, Any]:
    with suppress(*BROKEN):
        arrays = kept.inspected()
        return {"client": arrays.client, "sent": arrays.sent, "pruned": arrays.pruned, "tools": arrays.tools}
    return {}


EXCERPT = 2000
Placed = tuple[RemovedRow, int]


def covered(tx: Transaction, tenant: str, ref: str) -> list[Original]:
    query = sa.select(cuts.c.covered).where(owned(cuts, tenant, ref=ref))
    found = tx.scalar(query.order_by(cuts.c.at.desc(), cuts.c.version.desc()).limit(1))
    return originals_with(tx, tenant, json.loads(found)) if found else []


def removed(
    tx: Transaction, conversation: ConversationRow, *, after: str | None = None, limit: int = 500
) -> list[RemovedRow]:
    """What is out of the newest branch's window, the newest first; KeyError where ``after`` is none of their refs."""
    gone = _gone(tx, conversation)
    # By batch, then by place: the clock may have been wrong.
    rows = [row for row, place in sorted(gone.values(), key=lambda each: (-each[0].version, -each[1]))]
    if after is not None:
        places = [place for place, row in enumerate(rows) if row.ref == after]
        if not places:
            raise KeyError(after)
        rows = rows[places[0] + 1 :]
    rows = rows[:limit]
    known_originals: dict[str, sa.Row[*tuple[Any, ...]]] = {}
    for refs in chunks(row.ref for row in rows):
        query = sa.select(originals).where(owned(originals, conversation.tenant, ref=refs))
        known_originals |= {row.ref: row for row in tx.execute(query)}
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
        gone[ref] = (msgspec.structs.replace(row, tool=gone[ref][0].tool) if ref in gone else row, place)
    return gone


def _edited(
    tx: Transaction, tenant: str, branch: str, batches: Iterable[Batched], pinned: AbstractSet[str]
) -> dict[str, Placed]:
    known = tx.execute(sa.select(evictions).where(owned(evictions, tenant, branch=branch)))
    facts = {(row.version, bytes(row.digest), row.occurrence): row for row in known}
    gone: dict[str, Placed] = {}
    for _, batch, position, edit in batches:
        if edit.kind in ADDING or not edit.ref or (edit.ref in pinned and edit.kind is not EditKind.CLIP):
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


def _with_original(tx: Transaction, row: RemovedRow, original: sa.Row[*tuple[Any, ...]] | None) -> RemovedRow:
    if original is None:
        return row
    text = ""
    is_whole = original.body is not None or original.frame is not None
    with suppress(Damaged):
        text = message_of(tx, original)[1][:EXCERPT] if is_whole and not original.quarantined else ""
    tokens, at = row.tokens or original.tokens, row.at or original.at
    return msgspec.structs.replace(row, role=original.role, tokens=tokens, text=text, at=at)
