"""What is kept of a conversation's newest requests, for whoever looks at them: their arrays, and what these say.

The arrays are one row a conversation. What messages say is kept by ref in bundles, until the archive has it or no
request that is kept needs it. A bundle that is damaged costs what it holds, no request and no other bundle.

And the record of answers that a later request may go on from, because their provider keeps them. An answer's row holds
what its request added to the history and what the answer did; the rows from the first request to an answer hold all of
it. Only what is found whole counts.
"""

import json
import struct
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import sqlalchemy as sa

from proxy.store.archive import originals_with
from proxy.store.ledger import cuts_of, load_cuts
from proxy.store.packing import (
    OWN,
    Damaged,
    Inspected,
    Inspection,
    KeptArrays,
    pack,
    pack_arrays,
    pack_named,
    ref_of,
    refs_of,
    unpack,
    unpack_arrays,
    unpack_named,
)
from proxy.store.records import AnswerRow, ConversationRow, ExchangeRow
from proxy.store.schema import (
    NOTHING,
    answer_items,
    answers,
    conversations,
    cuts,
    exchanges,
    inspected,
    inspected_parts,
    keep_first,
    keep_last,
    of,
    originals,
    recorded,
    stored,
)
from proxy.store.transaction import Rows, Transaction, chunks

Home = tuple[str, str]
Made = Sequence[tuple[ExchangeRow, Inspection]]
FEW = 8
"""So many arrays may stay beyond those that are kept, so many bundles be small, and so many messages new at once."""
SMALL, LARGE = 32 << 10, 4 << 20
BROKEN = (Damaged, ValueError, LookupError, TypeError, struct.error)
INSPECTED = sa.select(inspected.c.conversation, inspected.c.body).where(
    of(inspected, "tenant"), inspected.c.conversation.in_(sa.bindparam("ids", expanding=True))
)
SET_INSPECTED = keep_last(inspected)
MINE = of(inspected_parts, "tenant", "conversation")
BUNDLES = (
    sa.select(inspected_parts.c.number, inspected_parts.c.refs, sa.func.length(inspected_parts.c.body).label("size"))
    .where(MINE)
    .order_by(inspected_parts.c.number)
)
BODIES = sa.select(inspected_parts).where(MINE).order_by(inspected_parts.c.number)
LOCK = sa.select(conversations.c.id).where(of(conversations, "tenant", "id")).with_for_update()
ARCHIVED = sa.select(originals.c.ref).where(
    of(originals, "tenant"),
    originals.c.ref.in_(sa.bindparam("refs", expanding=True)),
    sa.or_(originals.c.body.is_not(None), originals.c.frame.is_not(None)),
)


def kept_arrays(tx: Transaction, given: Iterable[Home]) -> dict[Home, list[KeptArrays]]:
    found: dict[Home, list[KeptArrays]] = {key: [] for key in given}
    for tenant in {tenant for tenant, _ in found}:
        for ids in chunks(sorted(its for owner, its in found if owner == tenant)):
            for conversation, body in tx.execute(INSPECTED, {"of_tenant": tenant, "ids": ids}):
                try:
                    found[tenant, conversation] = tx.aside(partial(unpack_arrays, body))
                except BROKEN:
                    tx.damage("inspected", tenant, conversation)
    return found


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
    known, arrays = kept_arrays(tx, by_home), list[dict[str, object]]()
    for key, made in by_home.items():
        try:
            fresh = {ref: body for _, its in made for ref, body in its.bodies().items()}
            left, packed = tx.aside(partial(_packed, known[key], made))
        except (*BROKEN, OverflowError):  # requests that cannot be looked at are still requests
            continue
        arrays.append({"tenant": key[0], "conversation": key[1], "body": packed})
        is_due = len(left) <= len(known[key]) or any(row.evicted or row.strategy for row, _ in made)
        _put(tx, key, fresh, branch=made[-1][0].branch, left=left if is_due else None)
    tx.many(SET_INSPECTED, arrays)


def keep_texts(tx: Transaction, conversation: ConversationRow, branch: str, *, above: int) -> None:
    home = conversation.tenant, conversation.id
    tx.execute(LOCK, {"of_tenant": home[0], "of_id": home[1]})
    if tx.execute(BUNDLES, _key(home)).first() is not None:
        gone = (cuts.c.tenant == home[0], cuts.c.branch == branch, cuts.c.batch > above)
        texts = [text for text in tx.scalars(sa.select(cuts.c.text).where(*gone)) if text]
        _put(tx, home, {ref_of(text): text.encode("utf-8", "surrogatepass") for text in texts})


def _put(
    tx: Transaction,
    home: Home,
    fresh: Mapping[str, bytes],
    *,
    branch: str | None = None,
    left: Sequence[KeptArrays] | None = None,
) -> None:
    there = tx.execute(BUNDLES, _key(home)).all()
    by_number = {row.number: set(row.refs.split()) for row in there}
    known = set[str]().union(*by_number.values())
    there_too = _elsewhere(tx, home, branch, fresh.keys() - known)
    bodies = {ref: body for ref, body in fresh.items() if ref not in known and ref not in there_too}
    rewritten = {row.number for row in there if row.size < SMALL}
    if len(rewritten) < FEW:
        rewritten = set()
    stays = known | bodies.keys()
    if left is not None:
        needed = tx.aside(partial(_needed, left))
        stays &= needed - _archived(tx, home, stays & needed)
        rewritten |= {number for number, refs in by_number.items() if not refs <= stays}
    if rewritten:
        bodies = _said(tx, home, rewritten) | bodies
        gone = inspected_parts.c.number.in_(rewritten)
        tx.execute(sa.delete(inspected_parts).where(MINE, gone), _key(home))
    if bodies := {ref: body for ref, body in sorted(bodies.items()) if ref in stays}:
        level, own = 3 if rewritten else 1, {"tenant": home[0], "conversation": home[1]}
        for number, part in enumerate(_bundled(bodies), 1 + max(by_number, default=0)):
            packed = tx.aside(partial(pack_named, part, level=level))
            tx.execute(sa.insert(inspected_parts), own | {"number": number, "refs": " ".join(part), "body": packed})


def _bundled(bodies: Mapping[str, bytes]) -> Iterator[dict[str, list[bytes]]]:
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
    found = set[str]()
    for chunk in chunks(sorted(ref for ref in refs if not ref.startswith(OWN))):
        found |= set(tx.scalars(ARCHIVED, {"of_tenant": home[0], "refs": chunk}))
    return found


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


MAX_LINKS = 20_000
ADD_ANSWER = keep_last(answers)
ADD_ITEM = keep_first(answer_items)
OF_TENANT = of(answers, "tenant")
_START = sa.select(answers.c.id, answers.c.parent, sa.literal(0).label("back")).where(of(answers, "tenant", "id"))
_LINE = _START.cte("line", recursive=True)
_LINE = _LINE.union_all(
    sa.select(answers.c.id, answers.c.parent, _LINE.c.back + 1)
    .join(_LINE, answers.c.id == _LINE.c.parent)
    .where(OF_TENANT, _LINE.c.back < MAX_LINKS)
)
LINE = sa.select(answers).join(_LINE, _LINE.c.id == answers.c.id).where(OF_TENANT)


def add_answers(tx: Transaction, rows: Sequence[AnswerRow]) -> None:
    if not rows or not tx.full:
        return
    packed = tx.aside(lambda: [pack(row.given, row.output, row.opening) for row in rows])
    tx.many(ADD_ANSWER, [stored(answers, row, body=body) for row, body in zip(rows, packed, strict=True)])
    tx.many(ADD_ITEM, [{"tenant": r.tenant, "item": item, "answer": r.id} for r in rows for item in r.items])


def answers_behind(tx: Transaction, tenant: str, answer: str) -> list[AnswerRow]:
    return _whole_answers(tx, LINE, {"of_tenant": tenant, "of_id": answer})


def known_answers(tx: Transaction, tenant: str, ids: Collection[str]) -> int:
    query = sa.select(sa.func.count()).select_from(answers).where(answers.c.tenant == tenant)
    return sum(int(tx.scalar(query.where(answers.c.id.in_(chunk))) or 0) for chunk in chunks(ids))


def answers_with(tx: Transaction, tenant: str, items: Collection[str]) -> list[AnswerRow]:
    found: list[AnswerRow] = []
    for chunk in chunks(items):
        ids = sa.select(answer_items.c.answer).where(answer_items.c.tenant == tenant, answer_items.c.item.in_(chunk))
        found += _whole_answers(tx, sa.select(answers).where(answers.c.tenant == tenant, answers.c.id.in_(ids)))
    return found


def forget_answer(tx: Transaction, tenant: str, answer: str) -> None:
    tx.execute(sa.delete(answers).where(answers.c.tenant == tenant, answers.c.id == answer))


def answers_of(tx: Transaction, conversation: ConversationRow) -> list[Mapping[str, Any]]:
    mine = answers.c.tenant == conversation.tenant, answers.c.conversation == conversation.id
    rows = _whole_answers(tx, sa.select(answers).where(*mine).order_by(answers.c.at))
    return [
        {k: v.decode(errors="replace") if isinstance(v, bytes) else v for k, v in asdict(row).items()} for row in rows
    ]


def _whole_answers(tx: Transaction, query: Rows, given: Mapping[str, str] = NOTHING) -> list[AnswerRow]:
    found: list[AnswerRow] = []
    for row in tx.execute(query, dict(given)):
        try:
            said = dict(zip(("given", "output", "opening"), unpack(row.body, parts=3), strict=True))
        except Damaged:
            tx.damage("answer", row.tenant, row.id)
        else:
            found.append(recorded(AnswerRow, answers, row, items=(), **said))
    return found
