"""What is kept of a conversation for inspection: the arrays of its newest requests.

Arrays are kept as references, all of a conversation's in one row. What a message says is in the
archive, or once in a bundle: the new messages of a batch of requests are one. Where there are a few
small bundles, or a batch has removed something, they become one, and what the archive has or no
request that is kept needs goes. A bundle that is damaged costs what it holds, no request and no
other bundle.
"""

import json
import struct
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from functools import partial
from hashlib import blake2b
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple

import msgspec
import sqlalchemy as sa

from policies.ledger import PlannedMessage
from policies.messages import PIN_SIZE
from proxy.store.archive import IS_WHOLE, originals_with
from proxy.store.ledger import cuts_of, key_of, load_cuts
from proxy.store.packing import Damaged, exact_bytes, pack, unpack
from proxy.store.records import ConversationRow, ExchangeRow, Inspection
from proxy.store.schema import conversations, cuts, exchanges, inspected, inspected_parts, originals
from proxy.store.transaction import Rows, Transaction, among, keep_last, of, owned, recorded

Home = tuple[str, str]
RECORD_FORM = f"{PIN_SIZE}sHI"
RECORD = struct.Struct(f">{RECORD_FORM}")
"""Of a message the beginning of its digest, its role's place among the roles, and its tokens."""
OWN = "t"
_ENCODER = json.JSONEncoder(separators=(",", ":"))
FEW = 8
"""So many bundles may be small, and so many messages new at once."""
SEARCHED = 200
"""Conversations whose newest requests a search reads."""
SMALL = 32 << 10
BROKEN = (Damaged, ValueError, LookupError, TypeError, struct.error)
INSPECTED = sa.select(inspected.c.conversation, inspected.c.body).where(
    among(inspected.c.conversation)
)
SET_INSPECTED = keep_last(inspected)
MINE = of(inspected_parts, "tenant", "conversation")
PARTS = inspected_parts.c
REFS = sa.select(
    PARTS.conversation,
    PARTS.number,
    PARTS.refs,
    (sa.func.length(PARTS.body) < SMALL).label("is_small"),
).where(among(PARTS.conversation))
ADD_BUNDLE = sa.insert(inspected_parts)
BODIES = sa.select(PARTS.number, PARTS.body).where(MINE).order_by(PARTS.number)
SOME_BODIES = BODIES.where(PARTS.number.in_(sa.bindparam("numbers", expanding=True)))
DROP = sa.delete(inspected_parts).where(MINE, of(inspected_parts, "number"))
LOCK = sa.select(conversations.c.id).where(of(conversations, "tenant", "id")).with_for_update()
ARCHIVED = sa.select(originals.c.ref).where(among(originals.c.ref), IS_WHOLE)


class Inspected(msgspec.Struct, frozen=True, kw_only=True):
    """What was kept of one request.

    Attributes:
        keep: how many of the conversation's requests were to be kept then.
        client: ref, role and tokens of each message that the client sent.
        sent: of each forwarded one its place among the client's (None: Weir's own), its edit,
            tokens, and the ref of its text (None: as the client sent it); None where the whole
            array was the client's.
        bodies: what is known by its ref: JSON of messages, UTF-8 of texts; ``archived`` the refs
            that the archive has.
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


class KeptMessage(NamedTuple):
    """What a message of a request that is kept says, and which conversation it belongs to."""

    conversation: str
    name: str
    ref: str
    text: str


class KeptArrays(NamedTuple):
    request: str
    at: float
    facts: bytes
    records: bytes

    @classmethod
    def of(cls, request: str, at: float, its: Inspection) -> "KeptArrays":
        said_by = [*map(attrgetter("role"), its.messages)]
        roles = {role: number for number, role in enumerate(dict.fromkeys(said_by))}
        # by column: there may be hundreds in each request
        facts: list[object] = [None] * (3 * len(said_by))
        facts[0::3] = [*map(attrgetter("digest"), its.messages)]
        facts[1::3] = [*map(roles.__getitem__, said_by)]
        facts[2::3] = [*map(attrgetter("tokens"), its.messages)]
        records = struct.pack(">" + len(said_by) * RECORD_FORM, *facts)
        sent = None if its.pieces is None else list(_runs(its.pieces))
        said = {
            "keep": its.keep,
            "roles": list(roles),
            "sent": sent,
            "pruned": its.pruned,
            "tools": its.tools,
        }
        return cls(request, at, _ENCODER.encode(said).encode(), records)

    def inspected(self) -> Inspected:
        said = json.loads(self.facts)
        client = [
            (pin.hex(), said["roles"][role], tokens)
            for pin, role, tokens in RECORD.iter_unpack(self.records)
        ]
        sent = (
            None
            if said["sent"] is None
            else [each for run in said["sent"] for each in _pieces(run, client)]
        )
        pruned = tuple(said["pruned"])
        return Inspected(
            keep=said["keep"],
            client=client,
            sent=sent,
            pruned=pruned,
            tools=said["tools"],
            bodies={},
        )


def pack_arrays(given: Sequence[KeptArrays]) -> bytes:
    """Each with its records from the first that is not the one before's."""
    found = [
        (e.request, e.at, e.facts, len(e.records) - len(fresh), fresh) for e, fresh in _fresh(given)
    ]
    return pack(found, level=1)


def unpack_arrays(packed: bytes) -> list[KeptArrays]:
    found = list[KeptArrays]()
    records = b""
    for request, at, facts, same, fresh in unpack(
        packed, list[tuple[str, float, bytes, int, bytes]]
    ):
        records = records[:same] + fresh
        found.append(KeptArrays(request, at, facts, records))
    return found


def _fresh(given: Iterable[KeptArrays]) -> Iterator[tuple[KeptArrays, bytes]]:
    """Each array with its records from the first that is not the one before's: most go on where
    that ended.
    """
    before = b""
    for each in given:
        same = len(before)
        if not each.records.startswith(before):
            most = min(len(before), len(each.records)) // RECORD.size
            ends = range(RECORD.size, (most + 1) * RECORD.size, RECORD.size)
            same = RECORD.size * bisect_left(
                ends, 1, key=lambda end: before[:end] != each.records[:end]
            )
        yield each, each.records[same:]
        before = each.records


def refs_of(given: Iterable[KeptArrays]) -> set[str]:
    """Every ref in arrays of requests, most of which have most in common. Raises what JSON and
    structs raise.
    """
    pins: set[bytes] = set()
    texts: set[str] = set()
    for each, fresh in _fresh(given):
        pins.update([pin for pin, _, _ in RECORD.iter_unpack(fresh)])
        texts.update(
            [
                run[3]
                for run in json.loads(each.facts)["sent"] or ()
                if len(run) == 4 and run[3] is not None
            ]
        )
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
            yield [
                piece.index,
                piece.kind,
                piece.tokens,
                None if piece.text is None else ref_of(piece.text),
            ]
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


def inspection(
    tx: Transaction, conversation: ConversationRow, request: str
) -> tuple[ExchangeRow, Inspected | None]:
    mine = owned(exchanges, conversation.tenant, conversation=conversation.id, id=request)
    row = tx.execute(sa.select(exchanges).where(mine)).first()
    if row is None:
        raise KeyError(request)
    exchange = recorded(
        ExchangeRow, exchanges, row, name=conversation.name, detail=json.loads(row.detail)
    )
    home = (conversation.tenant, conversation.id)
    kept = _kept(tx, home)
    said = _read(tx, home, BODIES)
    for newer, arrays in enumerate(reversed(kept)):
        if arrays.request == request:
            with suppress(*BROKEN):
                found = arrays.inspected()
                needed = refs_of([arrays])
                return exchange, None if newer >= found.keep else _with_bodies(
                    tx, conversation, found, said, needed
                )
            tx.damage("inspected", conversation.tenant, request)
    return exchange, None


def exported(
    tx: Transaction, conversation: ConversationRow
) -> tuple[list[dict[str, Any]], list[dict[str, str]]]:
    home = (conversation.tenant, conversation.id)
    kept = _kept(tx, home)
    bodies = _read(tx, home, BODIES)
    arrays = [{"id": each.request, "at": each.at, **_plain(each)} for each in kept]
    said = [
        {"conversation": conversation.id, "ref": ref, "body": body.decode(errors="replace")}
        for ref, body in sorted(bodies.items())
    ]
    return arrays, said


def keep(tx: Transaction, batch: Sequence[tuple[ExchangeRow, Inspection, str]]) -> None:
    """Keep the two arrays of each request (with the id of its conversation), and delete what is no
    longer needed.

    The conversations' rows are locked by the caller.
    """
    by_home: dict[Home, list[tuple[ExchangeRow, Inspection]]] = {}
    for row, its, home in batch:
        by_home.setdefault((row.tenant, home), []).append((row, its))
    bundles: dict[Home, list[sa.Row[*tuple[Any, ...]]]] = {}
    for tenant, part in tx.ask_each(REFS, by_home):
        bundles.setdefault((tenant, part.conversation), []).append(part)
    packed = {
        (tenant, its.conversation): its.body for tenant, its in tx.ask_each(INSPECTED, by_home)
    }
    inspections: list[dict[str, object]] = []
    added: list[dict[str, object]] = []
    for key, made in by_home.items():
        try:
            arrays = [KeptArrays.of(row.id, row.at, its) for row, its in made]
            fresh = {ref: body for _, its in made for ref, body in _bodies_of(its)}
        except (*BROKEN, OverflowError):  # requests that cannot be inspected are still stored
            continue
        newest, its = made[-1]
        is_due = any(row.evicted or row.strategy for row, _ in made)
        there = bundles.get(key, [])
        every = _in_order([*_unpacked(tx, key, packed.get(key)), *arrays])
        stays = _kept_of(
            tx, key, there, every, fresh, branch=newest.branch, most=its.keep, is_due=is_due
        )
        size = sum(len(each.records) for each in stays)
        own = {"tenant": key[0], "conversation": key[1]}
        inspections.append({**own, "body": tx.aside(partial(pack_arrays, stays), size=size)})
        added += _bundle(tx, key, fresh, number=max((row.number for row in there), default=0) + 1)
    tx.many(SET_INSPECTED, inspections)
    tx.many(ADD_BUNDLE, added)


def _kept_of(
    tx: Transaction,
    home: Home,
    there: Sequence[sa.Row[*tuple[Any, ...]]],
    arrays: Sequence[KeptArrays],
    fresh: dict[str, bytes],
    *,
    branch: str,
    most: int,
    is_due: bool,
) -> Sequence[KeptArrays]:
    """Which arrays stay. ``fresh`` is left with the content of the next bundle; the older bundles
    are dropped.
    """
    refs = {row.number: set(row.refs.split()) for row in there}
    small = {row.number for row in there if row.is_small}
    for ref in _elsewhere(tx, home, branch, fresh.keys(), known=set[str]().union(*refs.values())):
        fresh.pop(ref, None)
    if not is_due and len(small) + 1 < FEW:
        return arrays
    arrays = arrays[-most:]
    needed = tx.aside(partial(_needed, arrays))
    stays = needed & set(fresh).union(*refs.values())
    stays -= _archived(tx, home, stays)
    gone = small | {number for number, its in refs.items() if not its <= stays}
    elsewhere = set[str]().union(*(its for number, its in refs.items() if number not in gone))
    bodies = _read(tx, home, SOME_BODIES, numbers=sorted(gone)) | fresh
    fresh.clear()
    fresh |= {ref: body for ref, body in bodies.items() if ref in stays and ref not in elsewhere}
    tx.many(DROP, [key_of(*home) | {"of_number": number} for number in sorted(gone)])
    return arrays


def _bundle(
    tx: Transaction, home: Home, said: Mapping[str, bytes], *, number: int
) -> list[dict[str, object]]:
    """The row of a bundle; none where it would be empty."""
    if not said:
        return []
    body = tx.aside(partial(pack, said, level=3), size=sum(map(len, said.values())))
    return [
        {
            "tenant": home[0],
            "conversation": home[1],
            "number": number,
            "refs": " ".join(said),
            "body": body,
        }
    ]


def _bodies_of(its: Inspection) -> Iterator[tuple[str, bytes]]:
    yield from ((its.messages[n].ref, bytes(raw)) for n, raw in enumerate(its.raws, its.first))
    for piece in its.pieces or ():
        if piece.text is not None:
            yield ref_of(piece.text), exact_bytes(piece.text)


def keep_texts(tx: Transaction, home: Home, branch: str, gone: sa.ColumnElement[bool]) -> None:
    tx.execute(LOCK, {"of_tenant": home[0], "of_id": home[1]})
    if there := tx.ask(REFS, home[0], [home[1]]):
        known = set(chain.from_iterable(row.refs.split() for row in there))
        mine = owned(cuts, home[0], branch=branch)
        texts = [text for text in tx.scalars(sa.select(cuts.c.text).where(mine, gone)) if text]
        fresh = {ref: exact_bytes(text) for text in texts if (ref := ref_of(text)) not in known}
        tx.many(ADD_BUNDLE, _bundle(tx, home, fresh, number=max(row.number for row in there) + 1))


def _elsewhere(
    tx: Transaction, home: Home, branch: str, refs: AbstractSet[str], *, known: set[str]
) -> set[str]:
    new = refs - known
    if any(ref.startswith(OWN) for ref in new):
        known = known | {ref_of(cut.text) for _, cut in load_cuts(tx, home[0], branch)}
    # a few are new, in no archive
    return known | _archived(tx, home, new) if len(new) > FEW else known


def _archived(tx: Transaction, home: Home, refs: Iterable[str]) -> set[str]:
    return {
        ref
        for (ref,) in tx.ask(ARCHIVED, home[0], [ref for ref in refs if not ref.startswith(OWN)])
    }


def _kept(tx: Transaction, home: Home) -> list[KeptArrays]:
    return [
        arrays
        for row in tx.ask(INSPECTED, home[0], [home[1]])
        for arrays in _unpacked(tx, home, row.body)
    ]


def _unpacked(tx: Transaction, home: Home, packed: bytes | None) -> list[KeptArrays]:
    try:
        return (
            [] if packed is None else tx.aside(partial(unpack_arrays, packed), size=8 * len(packed))
        )
    except BROKEN:
        tx.damage("inspected", *home)
        return []


def _read(tx: Transaction, home: Home, query: Rows, **more: object) -> dict[str, bytes]:
    """The content of bundles."""
    found = dict[str, bytes]()
    for number, body in tx.execute(query, key_of(*home) | more).all():
        try:
            found |= tx.aside(partial(unpack, body, dict[str, bytes]))
        except BROKEN:
            tx.damage("inspected", home[0], f"{home[1]} {number}")
    return found


def search_kept(
    tx: Transaction, tenant: str, text: str, *, limit: int, text_of: Callable[[bytes], str]
) -> list[KeptMessage]:
    """Messages of a tenant's newest requests with all words of ``text``, those of the conversation
    that was used last first.

    It reads the bundles of the ``SEARCHED`` conversations that were used last, because their texts
    have no index. ``text_of`` says what the JSON of a message says.
    """
    words = text.casefold().split()
    found: list[KeptMessage] = []
    if not words:
        return found
    newest = (
        sa.select(conversations.c.id, conversations.c.name)
        .where(owned(conversations, tenant))
        .order_by(conversations.c.updated.desc())
        .limit(SEARCHED)
    )
    for conversation, name in tx.execute(newest).all():
        said = _read(tx, (tenant, conversation), BODIES)
        for ref, shown in tx.aside(partial(_having, said, words, text_of)):
            found.append(KeptMessage(conversation, name, ref, shown))
            if len(found) == limit:
                return found
    return found


def _having(
    said: Mapping[str, bytes], words: Sequence[str], text_of: Callable[[bytes], str]
) -> list[tuple[str, str]]:
    """Messages whose text has all of ``words``, the newest first; none of what Weir wrote."""
    found = []
    for ref, body in reversed(list(said.items())):
        if ref.startswith(OWN):
            continue
        text = text_of(body)
        folded = text.casefold()
        if all(word in folded for word in words):
            found.append((ref, text))
    return found


def _in_order(arrays: Iterable[KeptArrays]) -> list[KeptArrays]:
    return sorted(arrays, key=lambda each: (each.at, each.request))


def _needed(left: Sequence[KeptArrays]) -> set[str]:
    try:
        return refs_of(left)
    except BROKEN:
        return set[str]().union(*(_needed([each]) for each in left if len(left) > 1))


def _with_bodies(
    tx: Transaction,
    conversation: ConversationRow,
    found: Inspected,
    said: Mapping[str, bytes],
    needed: set[str],
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
        return {
            "client": arrays.client,
            "sent": arrays.sent,
            "pruned": arrays.pruned,
            "tools": arrays.tools,
        }
    return {}
