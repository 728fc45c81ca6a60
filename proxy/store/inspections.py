"""What a conversation has for whoever looks into it: the arrays of its newest requests, and what was removed from it.

The arrays are one row a conversation. What their messages say is kept by ref in bundles, until the archive has it or no
request that is kept needs it. A bundle that is damaged costs what it holds, no request and no other bundle.
"""

import json
import struct
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import sqlalchemy as sa

from policies.ledger import ADDING, EditKind
from proxy.store.archive import IS_WHOLE, message_of, originals_with
from proxy.store.ledger import Batched, cuts_of, load_batches, load_cuts, newest_branch
from proxy.store.packing import (
    OWN,
    Damaged,
    Inspected,
    Inspection,
    KeptArrays,
    pack_arrays,
    pack_named,
    ref_of,
    refs_of,
    unpack_arrays,
    unpack_named,
)
from proxy.store.records import ConversationRow, ExchangeRow, Original, RemovedRow
from proxy.store.schema import (
    among,
    conversations,
    cuts,
    evictions,
    exchanges,
    inspected,
    inspected_parts,
    keep_last,
    of,
    originals,
    recorded,
)
from proxy.store.transaction import Transaction, chunks

Home = tuple[str, str]
Made = Sequence[tuple[ExchangeRow, Inspection]]
FEW = 8
"""So many arrays may stay beyond those that are kept, so many bundles be small, and so many messages new at once."""
SMALL, LARGE = 32 << 10, 4 << 20
BROKEN = (Damaged, ValueError, LookupError, TypeError, struct.error)
INSPECTED = sa.select(inspected.c.conversation, inspected.c.body).where(among(inspected.c.conversation))
SET_INSPECTED = keep_last(inspected)
MINE = of(inspected_parts, "tenant", "conversation")
BUNDLES = (
    sa.select(
        inspected_parts.c.conversation,
        inspected_parts.c.number,
        inspected_parts.c.refs,
        sa.func.length(inspected_parts.c.body).label("size"),
    )
    .where(among(inspected_parts.c.conversation))
    .order_by(inspected_parts.c.number)
)
ADD_BUNDLE = sa.insert(inspected_parts)
BODIES = sa.select(inspected_parts).where(MINE).order_by(inspected_parts.c.number)
LOCK = sa.select(conversations.c.id).where(of(conversations, "tenant", "id")).with_for_update()
ARCHIVED = sa.select(originals.c.ref).where(among(originals.c.ref), IS_WHOLE)


class Bundle(NamedTuple):
    conversation: str
    number: int
    refs: str
    size: int


def kept_arrays(tx: Transaction, given: Iterable[Home]) -> dict[Home, list[KeptArrays]]:
    found: dict[Home, list[KeptArrays]] = {key: [] for key in given}
    for tenant, (conversation, body) in _of_homes(tx, INSPECTED, found):
        try:
            found[tenant, conversation] = tx.aside(partial(unpack_arrays, body))
        except BROKEN:
            tx.damage("inspected", tenant, conversation)
    return found


def _bundles(tx: Transaction, given: Iterable[Home]) -> dict[Home, list[Bundle]]:
    found: dict[Home, list[Bundle]] = {key: [] for key in given}
    for tenant, row in _of_homes(tx, BUNDLES, found):
        found[tenant, row[0]].append(Bundle(*row))
    return found


def _of_homes(tx: Transaction, query: sa.Select[Any], homes: Collection[Home]) -> Iterator[tuple[str, tuple[Any, ...]]]:
    for tenant in {tenant for tenant, _ in homes}:
        for row in tx.ask(query, tenant, sorted(its for owner, its in homes if owner == tenant)):
            yield tenant, row


def inspection(tx: Transaction, conversation: ConversationRow, request: str) -> tuple[ExchangeRow, Inspected | None]:
    mine = (exchanges.c.tenant == conversation.tenant, exchanges.c.conversation == conversation.id)
    row = tx.execute(sa.select(exchanges).where(*mine, exchanges.c.id == request)).first()
    if row is None:
        raise KeyError(request)
    told = recorded(ExchangeRow, exchanges, row, name=conversation.name, detail=json.loads(row.detail))
    [kept] = kept_arrays(tx, [(conversation.tenant, conversation.id)]).values()
    for newer, arrays in enumerate(reversed(kept)):
        if arrays.request == request:
            with suppress(*BROKEN):
                found = arrays.inspected()
                return told, None if newer >= found.keep else _with_bodies(tx, conversation, found, refs_of([arrays]))
            tx.damage("inspected", conversation.tenant, request)
    return told, None


def exported(tx: Transaction, conversation: ConversationRow) -> tuple[list[dict[str, Any]], list[dict[str, str]]]:
    home = conversation.tenant, conversation.id
    arrays = [{"id": each.request, "at": each.at, **_plain(each)} for each in kept_arrays(tx, [home])[home]]
    said = [
        {"conversation": conversation.id, "ref": ref, "body": body.decode(errors="replace")}
        for ref, body in sorted(_said(tx, home).items())
    ]
    return arrays, said


def keep(tx: Transaction, batch: Sequence[tuple[ExchangeRow, Inspection, str]]) -> None:
    """Keep the two arrays of each request (with the id of its conversation), and no longer what nobody needs.

    The conversations' rows are locked by the caller.
    """
    by_home: dict[Home, list[tuple[ExchangeRow, Inspection]]] = {}
    for row, its, home in batch:
        by_home.setdefault((row.tenant, home), []).append((row, its))
    known, there = kept_arrays(tx, by_home), _bundles(tx, by_home)
    arrays, bundles = list[dict[str, object]](), list[dict[str, object]]()
    for key, made in by_home.items():
        try:
            fresh = {ref: body for _, its in made for ref, body in its.bodies().items()}
            left, packed = tx.aside(partial(_packed, known[key], made))
        except (*BROKEN, OverflowError):  # requests that cannot be looked at are still requests
            continue
        arrays.append({"tenant": key[0], "conversation": key[1], "body": packed})
        is_due = len(left) <= len(known[key]) or any(row.evicted or row.strategy for row, _ in made)
        branch, left_now = made[-1][0].branch, left if is_due else None
        bundles += _bundled(tx, key, fresh, there[key], branch=branch, left=left_now)
    tx.many(SET_INSPECTED, arrays)
    tx.many(ADD_BUNDLE, bundles)


def keep_texts(tx: Transaction, conversation: ConversationRow, branch: str, *, above: int) -> None:
    home = conversation.tenant, conversation.id
    tx.execute(LOCK, {"of_tenant": home[0], "of_id": home[1]})
    if there := _bundles(tx, [home])[home]:
        gone = (cuts.c.tenant == home[0], cuts.c.branch == branch, cuts.c.batch > above)
        texts = [text for text in tx.scalars(sa.select(cuts.c.text).where(*gone)) if text]
        fresh = {ref_of(text): text.encode("utf-8", "surrogatepass") for text in texts}
        tx.many(ADD_BUNDLE, list(_bundled(tx, home, fresh, there)))


def _bundled(
    tx: Transaction,
    home: Home,
    fresh: Mapping[str, bytes],
    there: Sequence[Bundle],
    *,
    branch: str | None = None,
    left: Sequence[KeptArrays] | None = None,
) -> Iterator[dict[str, object]]:
    """The bundles to add, of what is said in no other place; what they take the place of is taken out."""
    by_number = {row.number: row.refs.split() for row in there}
    known = set(chain.from_iterable(by_number.values()))
    bodies = {ref: body for ref, body in fresh.items() if ref not in known}
    for ref in _elsewhere(tx, home, branch, bodies.keys()):
        bodies.pop(ref, None)
    rewritten = {row.number for row in there if row.size < SMALL}
    if len(rewritten) < FEW:
        rewritten = set()
    if left is not None:
        stays = tx.aside(partial(_needed, left)) & (known | bodies.keys())
        stays -= _archived(tx, home, stays)
        bodies = {ref: body for ref, body in bodies.items() if ref in stays}
        rewritten |= {number for number, refs in by_number.items() if not stays.issuperset(refs)}
    if rewritten:
        kept = _said(tx, home, rewritten)
        bodies |= {ref: body for ref, body in kept.items() if left is None or ref in stays}
        tx.execute(sa.delete(inspected_parts).where(MINE, inspected_parts.c.number.in_(rewritten)), _key(home))
    if bodies:
        level, own = 3 if rewritten else 1, {"tenant": home[0], "conversation": home[1]}
        for number, part in enumerate(_parts(bodies), 1 + max(by_number, default=0)):
            packed = tx.aside(partial(pack_named, part, level=level))
            yield own | {"number": number, "refs": " ".join(part), "body": packed}


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


def _elsewhere(tx: Transaction, home: Home, branch: str | None, refs: AbstractSet[str]) -> set[str]:
    found = set[str]()
    if branch is not None and any(ref.startswith(OWN) for ref in refs):
        found |= {ref_of(cut.text) for cut in load_cuts(tx, home[0], branch)}
    messages = {ref for ref in refs if not ref.startswith(OWN)}
    return found | _archived(tx, home, messages) if len(messages) > FEW else found  # a few are new, in no archive


def _archived(tx: Transaction, home: Home, refs: Iterable[str]) -> set[str]:
    return {ref for (ref,) in tx.ask(ARCHIVED, home[0], sorted(ref for ref in refs if not ref.startswith(OWN)))}


def _said(tx: Transaction, home: Home, numbers: Iterable[int] | None = None) -> dict[str, bytes]:
    query = BODIES if numbers is None else BODIES.where(inspected_parts.c.number.in_(numbers))
    found = dict[str, bytes]()
    for row in tx.execute(query, _key(home)):
        try:
            found |= {ref: body for ref, [body] in unpack_named(row.body, parts=1).items()}
        except Damaged:
            tx.damage("inspected", home[0], f"{home[1]} {row.number}")
    return found


def _packed(known: Sequence[KeptArrays], made: Made) -> tuple[list[KeptArrays], bytes]:
    new, keep = [each.kept(row.id, row.at) for row, each in made], made[-1][1].keep
    every = sorted([*known, *new], key=lambda each: (each.at, each.request))
    left = every if len(every) <= keep + FEW else every[-keep:]
    return left, pack_arrays(left)


def _needed(left: Sequence[KeptArrays]) -> set[str]:
    try:
        return refs_of(left)
    except BROKEN:
        return set[str]().union(*(_needed([each]) for each in left if len(left) > 1))


def _with_bodies(tx: Transaction, conversation: ConversationRow, found: Inspected, needed: set[str]) -> Inspected:
    bodies = {ref: body for ref, body in _said(tx, (conversation.tenant, conversation.id)).items() if ref in needed}
    if any(ref.startswith(OWN) and ref not in bodies for ref in needed):
        texts = (each.cut.text for each in cuts_of(tx, conversation).values())
        bodies |= {ref_of(text): text.encode("utf-8", "surrogatepass") for text in texts}
    lacking = sorted({ref for ref, _, _ in found.client} - bodies.keys())
    archived = {each.ref: each.body for each in originals_with(tx, conversation.tenant, lacking)}
    return replace(found, bodies=bodies | archived, archived=frozenset(archived))


def _plain(kept: KeptArrays) -> dict[str, Any]:
    with suppress(*BROKEN):
        arrays = kept.inspected()
        return {"client": arrays.client, "sent": arrays.sent, "pruned": arrays.pruned, "tools": arrays.tools}
    return {}


def _key(home: Home) -> dict[str, object]:
    return {"of_tenant": home[0], "of_conversation": home[1]}


EXCERPT = 2000
Placed = tuple[RemovedRow, int]


def covered(tx: Transaction, tenant: str, ref: str) -> list[Original]:
    query = sa.select(cuts.c.covered).where(cuts.c.tenant == tenant, cuts.c.ref == ref)
    found = tx.scalar(query.order_by(cuts.c.at.desc(), cuts.c.version.desc()).limit(1))
    return originals_with(tx, tenant, json.loads(found)) if found else []


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
    for ref, (row, place) in _covered(tx, conversation, branch, pinned).items():
        gone[ref] = (replace(row, tool=gone[ref][0].tool) if ref in gone else row, place)
    # By batch, then by place: the clock may have been wrong.
    rows = [row for row, place in sorted(gone.values(), key=lambda each: (-each[0].version, -each[1]))]
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


def _edited(
    tx: Transaction, tenant: str, branch: str, batches: Iterable[Batched], pinned: AbstractSet[str]
) -> dict[str, Placed]:
    known = tx.execute(sa.select(evictions).where(evictions.c.tenant == tenant, evictions.c.branch == branch))
    facts = {(row.version, bytes(row.digest), row.occurrence): row for row in known}
    gone: dict[str, Placed] = {}
    for batch, position, edit in batches:
        if edit.kind in ADDING or not edit.ref or (edit.ref in pinned and edit.kind is not EditKind.CLIP):
            continue
        row = RemovedRow(ref=edit.ref, how=str(edit.kind), version=batch, at=0.0, kept=edit.tokens)
        fact = facts.get((batch, *edit.key))
        if fact is not None:
            row = replace(row, at=fact.at, tool=fact.tool, tokens=fact.tokens_before, kept=fact.tokens_after)
        gone[edit.ref] = (row, position)
    return gone


def _covered(
    tx: Transaction, conversation: ConversationRow, branch: str, pinned: AbstractSet[str]
) -> dict[str, Placed]:
    known = cuts_of(tx, conversation).items()
    made = [each for (line, _), each in known if line == branch and pinned.isdisjoint(each.covered)]
    inside = set(made[-1].covered) if made else set()
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
    return replace(row, role=original.role, tokens=tokens, text=text, at=at)
