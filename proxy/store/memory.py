"""What is kept of a conversation beside its history: checkpoints, notes, what models wrote, and their answers.

A checkpoint is a conversation's structured state as JSON text, one row for every version that was saved. It is given
back only if the SHA-256 of its body is the one that was stored with it; else the one before it counts. The two newest
of a branch are stored whole, as is every 16th; the others as what the next one has not (``base`` says which): damage
costs those before it, up to the next whole one. Versions that a rollback has taken back stay as history, but nothing
goes on from them.

A note is stored once, and a conversation has so many at most. Summaries are found by the address of what a model was
asked; they are bounded for every tenant, and pruned by age. Tokens are counted by the minute, of all servers together.

Answers are those that a later request may go on from, because their provider keeps them. A row holds what its request
added to the history and what the answer did; the rows from the first request to an answer hold all of it. Only what is
found whole counts.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from itertools import accumulate, groupby
from operator import attrgetter, itemgetter
from typing import Any

import msgspec
import sqlalchemy as sa

from proxy.store.audit import append, of_notes
from proxy.store.ledger import LINES, cuts_of, key_of
from proxy.store.packing import Damaged, pack, pack_text, unpack, unpack_text
from proxy.store.records import (
    AnswerRow,
    Change,
    CheckpointRow,
    ConversationRow,
    NoteRow,
    ProviderIdsRow,
    SummaryRow,
)
from proxy.store.schema import (
    OF_BRANCH,
    answer_items,
    answers,
    branches,
    checkpoints,
    conversations,
    cuts,
    notes,
    provider_ids,
    summaries,
)
from proxy.store.transaction import Rows, Transaction, chunks, keep_first, keep_last, of, owned, recorded, same, stored

Spans = Sequence[tuple[int, int]]
Bodies = dict[tuple[str, int], str | None]

# As text and without column types: it is read whenever a branch with edits is.
NEWEST_BODY = sa.text(
    "SELECT branch, version, body, sha, length, base FROM checkpoints "
    "WHERE tenant = :tenant AND branch = :branch ORDER BY version DESC LIMIT 1"
).bindparams(*OF_BRANCH)
CHECKPOINTS_OF_BRANCH = of(checkpoints, "tenant", "branch")
VERSIONS_KEPT = 100
"""Checkpoints of a conversation that stay beside the newest."""
IN_A_ROW = 16
"""So many checkpoints, at most, stand between two that are stored whole."""
ONE = of(checkpoints, "tenant", "branch", "version")
ONE_CHECKPOINT = sa.select(checkpoints).where(ONE)
BASES = sa.select(checkpoints.c.version, checkpoints.c.base).where(CHECKPOINTS_OF_BRANCH)
BASES = BASES.order_by(checkpoints.c.version.desc())
OF_NEWEST_CUT = sa.select(sa.func.max(cuts.c.batch)).where(of(cuts, "tenant", "branch"))


def listed(tx: Transaction, conversation: ConversationRow) -> list[CheckpointRow]:
    """Every checkpoint of a conversation, all branches, oldest first, each with its cut where it has one.

    Within a branch it is the version that counts, whatever the clock said.
    """
    placed = list[tuple[float, CheckpointRow]]()
    for _, line in groupby(_rows(tx, conversation), key=attrgetter("branch")):
        rows = list(line)
        placed += zip(accumulate((row.at for row in rows), max), rows, strict=True)
    return [row for _, row in sorted(placed, key=itemgetter(0))]


def at_version(tx: Transaction, conversation: ConversationRow, version: int) -> CheckpointRow | None:
    found = {row.branch: row for row in _rows(tx, conversation, checkpoints.c.version == version)}
    lines = tx.execute(LINES, key_of(conversation.tenant, conversation.id))
    return next((found[line.branch] for line in lines if line.branch in found), None)


def latest(tx: Transaction, conversation: ConversationRow) -> CheckpointRow | None:
    for line in tx.execute(LINES, key_of(conversation.tenant, conversation.id)).all():
        row = newest_row(tx, conversation.tenant, line.branch, undone=read_spans(line.undone))
        if row is not None:
            return _with_cuts(tx, conversation, [row])[0]
    return None


def add_checkpoint(tx: Transaction, change: Change, *, version: int) -> None:
    """Store the change's checkpoint as ``version``; of older ones the newest stay, and the newest cut's."""
    if change.checkpoint is None:
        return
    row = CheckpointRow(
        branch=change.branch,
        version=version,
        at=change.at,
        body=change.checkpoint,
        reason=change.reason,
        window_id=change.window_id,
        length=change.length,
    )
    insert(tx, change.tenant, row)
    key = {"of_tenant": change.tenant, "of_branch": change.branch}
    known = tx.execute(BASES, key).all()
    old = {each.version: each.base for each in known[VERSIONS_KEPT:]}
    if old:
        kept = tx.scalar(OF_NEWEST_CUT, key)
        if old.pop(kept, None) is not None:
            _pack(tx, change.tenant, change.branch, kept, None)
        gone = checkpoints.c.version.in_(old)
        tx.execute(sa.delete(checkpoints).where(CHECKPOINTS_OF_BRANCH, gone), key)


def insert(tx: Transaction, tenant: str, row: CheckpointRow) -> None:
    values = stored(checkpoints, row, tenant=tenant, body=pack_text(row.body), sha=_sha(row.body))
    tx.execute(sa.insert(checkpoints), values)
    key = {"of_tenant": tenant, "of_branch": row.branch}
    _, *known = tx.execute(BASES.limit(IN_A_ROW + 3), key).all()
    if len(known) > 1 and not (len(known) > IN_A_ROW and all(each.base is not None for each in known[2:])):
        _pack(tx, tenant, row.branch, known[1].version, known[0].version)


def _pack(tx: Transaction, tenant: str, branch: str, version: int, base: int | None) -> None:
    known: Bodies = {}
    key: dict[str, Any] = {"of_tenant": tenant, "of_branch": branch, "of_version": version}
    row = tx.execute(ONE_CHECKPOINT, key).one()
    body = _whole(tx, row, known)
    like = None if base is None else _body(tx, key | {"of_version": base}, known)
    if body is not None and (base is None or like is not None):
        # Not an UPDATE: SQLite leaves the room in the page that a row no longer takes.
        tx.execute(sa.delete(checkpoints).where(ONE), key)
        tx.execute(sa.insert(checkpoints), {**row._mapping, "body": pack_text(body, like=like), "base": base})  # noqa: SLF001


def newest_body(tx: Transaction, tenant: str, branch: str, undone: str | None) -> tuple[str | None, int]:
    if undone is None:
        row = tx.execute(NEWEST_BODY, {"tenant": tenant, "branch": branch}).first()
        if row is None:
            return None, 0
        if row.base is None and (body := _whole(tx, row, {})) is not None:
            return body, row.length
    found = newest_row(tx, tenant, branch, undone=read_spans(undone))
    return (None, 0) if found is None else (found.body, found.length)


def newest_row(
    tx: Transaction,
    tenant: str,
    branch: str,
    *,
    undone: Spans = (),
    below: int | None = None,
    longest: int | None = None,
) -> CheckpointRow | None:
    query = sa.select(checkpoints).where(owned(checkpoints, tenant, branch=branch))
    if below is not None:
        query = query.where(checkpoints.c.version < below)
    if longest is not None:
        query = query.where(checkpoints.c.length <= longest)
    known: Bodies = {}
    for row in tx.execute(query.order_by(checkpoints.c.version.desc())).all():
        found = None if is_undone(row.version, undone) else _checkpoint(tx, row, known)
        if found is not None:
            return found
    return None


def read_spans(text: str | None) -> Spans:
    return tuple((first, last) for first, last in json.loads(text)) if text else ()


def is_undone(version: int, undone: Spans) -> bool:
    return any(first <= version <= last for first, last in undone)


def _rows(tx: Transaction, conversation: ConversationRow, *where: sa.ColumnElement[bool]) -> list[CheckpointRow]:
    query = sa.select(checkpoints).join(branches, same(branches, checkpoints, "tenant", "branch"))
    query = query.where(owned(checkpoints, conversation.tenant), branches.c.conversation == conversation.id, *where)
    query = query.order_by(checkpoints.c.branch, checkpoints.c.version)
    known: Bodies = {}
    found = [_checkpoint(tx, row, known) for row in reversed(tx.execute(query).all())]
    return _with_cuts(tx, conversation, [row for row in reversed(found) if row is not None])


def _with_cuts(tx: Transaction, conversation: ConversationRow, rows: list[CheckpointRow]) -> list[CheckpointRow]:
    known = cuts_of(tx, conversation)
    made = [(row, known.get((row.branch, row.version))) for row in rows]
    return [row if its is None else msgspec.structs.replace(row, cut=its.cut, covered=its.covered) for row, its in made]


def _checkpoint(tx: Transaction, row: sa.Row[*tuple[Any, ...]], known: Bodies) -> CheckpointRow | None:
    body = _whole(tx, row, known)
    if body is None:
        tx.damage("checkpoint", row.tenant, f"{row.branch} {row.version}")
        return None
    return recorded(CheckpointRow, checkpoints, row, body=body)


def _body(tx: Transaction, key: dict[str, Any], known: Bodies) -> str | None:
    place = key["of_branch"], key["of_version"]
    if place not in known and (row := tx.execute(ONE_CHECKPOINT, key).first()) is not None:
        return _whole(tx, row, known)
    return known.get(place)


def _whole(tx: Transaction, row: sa.Row[*tuple[Any, ...]], known: Bodies) -> str | None:
    if (row.branch, row.version) not in known:
        like = None
        if row.base is not None:
            key = {"of_tenant": row.tenant, "of_branch": row.branch, "of_version": row.base}
            like = _body(tx, key, known)
        body = None
        if row.base is None or like is not None:
            with suppress(Damaged):
                body = unpack_text(row.body, like=like)
        is_whole = body is not None and _sha(body) == row.sha
        known[row.branch, row.version] = body if is_whole else None
    return known[row.branch, row.version]


def _sha(body: str) -> bytes:
    return sha256(body.encode("utf-8", "surrogatepass")).digest()


MAX_NOTES = 500
MAX_SUMMARIES = 20_000
SUMMARIES_AT_ONCE = 500
NOTES_OF_CONVERSATION = of(notes, "tenant", "conversation")
ADD_NOTE = keep_first(notes)
HOME = sa.select(conversations.c.id).where(of(conversations, "tenant", "id"))
COUNT = sa.select(sa.func.count()).select_from(notes).where(NOTES_OF_CONVERSATION)
LEAST = sa.select(notes.c.id).where(NOTES_OF_CONVERSATION)
LEAST = LEAST.order_by(sa.case((notes.c.importance == "critical", 1), else_=0), notes.c.at, notes.c.id)
ALL_NOTES = sa.select(notes).where(NOTES_OF_CONVERSATION).order_by(notes.c.at, notes.c.id)
SUMMARY = sa.select(summaries).where(of(summaries, "tenant", "key"))
KEEP_SUMMARY = keep_last(summaries)
SURPLUS = (
    sa.select(summaries.c.key)
    .where(of(summaries, "tenant"))
    .order_by(summaries.c.at.desc(), summaries.c.key)
    .limit(SUMMARIES_AT_ONCE)
    .offset(MAX_SUMMARIES)
)


def add_notes(tx: Transaction, tenant: str, conversation: str, given: Sequence[NoteRow]) -> int:
    """How many of the notes on a conversation (its id) were new; 0 where there is no such conversation yet.

    0 also where nothing that is said may be stored. Beyond :data:`MAX_NOTES` the oldest go, those that are critical
    after all others.
    """
    key = key_of(tenant, conversation)
    if not given or not tx.full or tx.scalar(HOME, {"of_tenant": tenant, "of_id": conversation}) is None:
        return 0
    own = {"tenant": tenant, "conversation": conversation}
    new = [note for note in given if tx.is_new(ADD_NOTE, stored(notes, note, sha=_note_sha(note), **own))]
    surplus = tx.execute(COUNT, key).scalar_one() - MAX_NOTES if new else 0
    if surplus > 0:
        for ids in chunks(list(tx.scalars(LEAST.limit(surplus), key))):
            tx.execute(sa.delete(notes).where(NOTES_OF_CONVERSATION, notes.c.id.in_(ids)), key)
    if new:
        append(tx, [of_notes(tenant, conversation, new)])
    return len(new)


def all_notes(tx: Transaction, tenant: str, conversation: str) -> list[NoteRow]:
    found: list[NoteRow] = []
    for row in tx.execute(ALL_NOTES, key_of(tenant, conversation)):
        note = recorded(NoteRow, notes, row)
        if _note_sha(note) == row.sha:
            found.append(note)
        else:
            tx.damage("note", tenant, f"{conversation} {row.id.hex()}")
    return found


def summary(tx: Transaction, tenant: str, key: bytes) -> SummaryRow | None:
    row = tx.execute(SUMMARY, {"of_tenant": tenant, "of_key": key}).first()
    if row is None:
        return None
    found = recorded(SummaryRow, summaries, row)
    if _summary_sha(found) != row.sha:
        tx.damage("summary", tenant, key.hex())
        return None
    return found


def keep_summary(tx: Transaction, tenant: str, row: SummaryRow) -> None:
    """Store what a model wrote in place of what its address had; nothing where what is said may not be stored.

    Of a tenant's the newest :data:`MAX_SUMMARIES` stay.
    """
    if not tx.full:
        return
    tx.execute(KEEP_SUMMARY[tx.dialect], stored(summaries, row, tenant=tenant, sha=_summary_sha(row)))
    surplus = list(tx.scalars(SURPLUS, {"of_tenant": tenant}))
    if surplus:
        tx.execute(sa.delete(summaries).where(owned(summaries, tenant, key=surplus)))


def _note_sha(note: NoteRow) -> bytes:
    facts = f" {note.category} {note.importance} {note.source} {note.text}".encode("utf-8", "surrogatepass")
    return sha256(note.id + facts).digest()


def _summary_sha(row: SummaryRow) -> bytes:
    return sha256(row.key + row.text.encode("utf-8", "surrogatepass")).digest()


MAX_LINKS = 20_000
ADD_ANSWER = keep_last(answers)
ADD_ITEM = keep_first(answer_items)
_START = sa.select(answers.c.id, answers.c.parent, sa.literal(0).label("back")).where(of(answers, "tenant", "id"))
_LINE = _START.cte("line", recursive=True)
_LINE = _LINE.union_all(
    sa.select(answers.c.id, answers.c.parent, _LINE.c.back + 1)
    .join(_LINE, answers.c.id == _LINE.c.parent)
    .where(of(answers, "tenant"), _LINE.c.back < MAX_LINKS)
)
LINE = sa.select(answers).join(_LINE, _LINE.c.id == answers.c.id).where(of(answers, "tenant"))


def add_answers(tx: Transaction, rows: Sequence[AnswerRow]) -> None:
    if not rows or not tx.full:
        return
    packed = tx.aside(lambda: [pack(row.given, row.output, row.opening) for row in rows])
    tx.many(ADD_ANSWER, [stored(answers, row, body=body) for row, body in zip(rows, packed, strict=True)])
    tx.many(ADD_ITEM, [{"tenant": r.tenant, "item": item, "answer": r.id} for r in rows for item in r.items])


def answers_behind(tx: Transaction, tenant: str, answer: str) -> list[AnswerRow]:
    return _whole_answers(tx, LINE, {"of_tenant": tenant, "of_id": answer})


def known_answers(tx: Transaction, tenant: str, ids: Collection[str]) -> int:
    query = sa.select(sa.func.count()).select_from(answers)
    return sum(int(tx.scalar(query.where(owned(answers, tenant, id=chunk))) or 0) for chunk in chunks(ids))


def answers_with(tx: Transaction, tenant: str, items: Collection[str]) -> list[AnswerRow]:
    found: list[AnswerRow] = []
    for chunk in chunks(items):
        ids = sa.select(answer_items.c.answer).where(owned(answer_items, tenant, item=chunk))
        found += _whole_answers(tx, sa.select(answers).where(owned(answers, tenant, id=ids)))
    return found


def forget_answer(tx: Transaction, tenant: str, answer: str) -> None:
    tx.execute(sa.delete(answers).where(owned(answers, tenant, id=answer)))


MAX_PROVIDER_IDS = 100_000
"""Of one tenant: the oldest go."""
ADD_PROVIDER_ID = keep_last(provider_ids)


def add_provider_ids(tx: Transaction, rows: Sequence[ProviderIdsRow]) -> None:
    """Store ids that were given to tenants; now and then those go of which a tenant has too many."""
    tx.many(ADD_PROVIDER_ID, [{"tenant": r.tenant, "digest": d, "at": r.at} for r in rows for d in r.digests])
    looked_at = {row.tenant for row in rows if any(digest[0] == 0 for digest in row.digests)}
    for tenant in sorted(looked_at):
        mine = owned(provider_ids, tenant)
        newest = sa.select(provider_ids.c.at).where(mine).order_by(provider_ids.c.at.desc())
        last = tx.scalar(newest.offset(MAX_PROVIDER_IDS).limit(1))
        if last is not None:
            tx.execute(sa.delete(provider_ids).where(mine, provider_ids.c.at <= last))


def own_provider_ids(tx: Transaction, tenant: str, digests: Sequence[bytes]) -> set[bytes]:
    found = set[bytes]()
    for chunk in chunks(digests):
        query = sa.select(provider_ids.c.digest).where(owned(provider_ids, tenant, digest=chunk))
        found.update(bytes(row.digest) for row in tx.execute(query))
    return found


def answers_of(tx: Transaction, conversation: ConversationRow) -> list[Mapping[str, Any]]:
    mine = owned(answers, conversation.tenant, conversation=conversation.id)
    rows = _whole_answers(tx, sa.select(answers).where(mine).order_by(answers.c.at))
    return [
        {k: v.decode(errors="replace") if isinstance(v, bytes) else v for k, v in msgspec.structs.asdict(row).items()}
        for row in rows
    ]


def _whole_answers(tx: Transaction, query: Rows, given: Mapping[str, str] | None = None) -> list[AnswerRow]:
    found: list[AnswerRow] = []
    for row in tx.execute(query, given):
        try:
            said = dict(zip(("given", "output", "opening"), unpack(row.body, parts=3), strict=True))
        except Damaged:
            tx.damage("answer", row.tenant, row.id)
        else:
            found.append(recorded(AnswerRow, answers, row, items=(), **said))
    return found
