"""Notes on a conversation, and what models wrote.

A note is stored once, and a conversation has so many at most. Summaries are found by the content
address of the model's request; they are bounded for every tenant, and pruned by age.
"""

from collections.abc import Sequence
from hashlib import sha256

import sqlalchemy as sa

from proxy.store.audit import append, of_notes
from proxy.store.ledger import key_of
from proxy.store.records import NoteRow, SummaryRow
from proxy.store.schema import conversations, notes, summaries
from proxy.store.transaction import Transaction, keep_first, keep_last, of, owned, recorded, stored

MAX_NOTES = 500
MAX_SUMMARIES = 20_000
SUMMARIES_AT_ONCE = 500
NOTES_OF_CONVERSATION = of(notes, "tenant", "conversation")
ADD_NOTE = keep_first(notes)
HOME = sa.select(conversations.c.id).where(of(conversations, "tenant", "id"))
COUNT = sa.select(sa.func.count()).select_from(notes).where(NOTES_OF_CONVERSATION)
LEAST = sa.select(notes.c.id).where(NOTES_OF_CONVERSATION)
LEAST = LEAST.order_by(
    sa.case((notes.c.importance == "critical", 1), else_=0), notes.c.at, notes.c.id
)
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
    """How many of the notes on a conversation (its id) were new; 0 where there is no such
    conversation yet.

    0 also where no content may be stored. Beyond :data:`MAX_NOTES` the oldest go, those that are
    critical after all others.
    """
    key = key_of(tenant, conversation)
    if (
        not given
        or not tx.full
        or tx.scalar(HOME, {"of_tenant": tenant, "of_id": conversation}) is None
    ):
        return 0
    own = {"tenant": tenant, "conversation": conversation}
    new = [
        note
        for note in given
        if tx.is_new(ADD_NOTE, stored(notes, note, sha=_note_sha(note), **own))
    ]
    surplus = tx.execute(COUNT, key).scalar_one() - MAX_NOTES if new else 0
    if surplus > 0:
        ids = tx.scalars(LEAST.limit(surplus), key).all()
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
    """Store what a model wrote in place of what its address had; nothing where no content may be
    stored.

    Of a tenant's the newest :data:`MAX_SUMMARIES` stay.
    """
    if not tx.full:
        return
    tx.execute(KEEP_SUMMARY, stored(summaries, row, tenant=tenant, sha=_summary_sha(row)))
    surplus = list(tx.scalars(SURPLUS, {"of_tenant": tenant}))
    if surplus:
        tx.execute(sa.delete(summaries).where(owned(summaries, tenant, key=surplus)))


def _note_sha(note: NoteRow) -> bytes:
    facts = f" {note.category} {note.importance} {note.source} {note.text}".encode(
        "utf-8", "surrogatepass"
    )
    return sha256(note.id + facts).digest()


def _summary_sha(row: SummaryRow) -> bytes:
    return sha256(row.key + row.text.encode("utf-8", "surrogatepass")).digest()
