"""Notes on conversations: each is stored once, and a conversation has so many at most."""

from collections.abc import Sequence
from hashlib import sha256
from typing import Any

import sqlalchemy as sa

from proxy.store.archive import chunks
from proxy.store.audit import append
from proxy.store.audit_events import of_notes
from proxy.store.ledger import Damage
from proxy.store.records import NoteRow
from proxy.store.tables import conversations, keep_first, notes

MOST_NOTES = 500
ADD = keep_first(notes)
MINE = sa.and_(notes.c.tenant == sa.bindparam("tenant"), notes.c.conversation == sa.bindparam("conversation"))
ALL = sa.select(notes).where(MINE).order_by(notes.c.at, notes.c.id)
HOME = sa.select(conversations.c.id).where(
    conversations.c.tenant == sa.bindparam("tenant"), conversations.c.id == sa.bindparam("conversation")
)
COUNT = sa.select(sa.func.count()).select_from(notes).where(MINE)
LEAST = sa.select(notes.c.id).where(MINE)
LEAST = LEAST.order_by(sa.case((notes.c.importance == "critical", 1), else_=0), notes.c.at, notes.c.id)


def add_notes(connection: sa.Connection, tenant: str, conversation: str, given: Sequence[NoteRow]) -> int:
    """How many of ``given`` were new; 0 where there is no such conversation.

    Beyond :data:`MOST_NOTES` the oldest go, those that are critical after all others.
    """
    key = {"tenant": tenant, "conversation": conversation}
    if connection.scalar(HOME, key) is None:
        return 0
    rows = [
        {
            **key,
            "id": note.id,
            "at": note.at,
            "category": note.category,
            "importance": note.importance,
            "source": note.source,
            "text": note.text,
            "sha": _sha(note),
        }
        for note in given
    ]
    made = [connection.execute(ADD[connection.dialect.name], row).rowcount == 1 for row in rows]
    new = [note for note, is_new in zip(given, made, strict=True) if is_new]
    surplus = connection.execute(COUNT, key).scalar_one() - MOST_NOTES if new else 0
    if surplus > 0:
        _drop(connection, tenant, conversation, list(connection.scalars(LEAST.limit(surplus), key)))
    if new:
        append(connection, [of_notes(tenant, conversation, new)])
    return len(new)


def all_notes(connection: sa.Connection, tenant: str, conversation: str, damage: Damage) -> list[NoteRow]:
    """The notes of a conversation, oldest first, without damaged ones."""
    rows = connection.execute(ALL, {"tenant": tenant, "conversation": conversation})
    return [note for row in rows if (note := _note(row, damage)) is not None]


def _drop(connection: sa.Connection, tenant: str, conversation: str, ids: list[bytes]) -> None:
    for chunk in chunks(ids):
        connection.execute(
            sa.delete(notes).where(
                notes.c.tenant == tenant, notes.c.conversation == conversation, notes.c.id.in_(chunk)
            )
        )


def _note(row: sa.Row[*tuple[Any, ...]], damage: Damage) -> NoteRow | None:
    note = NoteRow(
        id=row.id, at=row.at, category=row.category, importance=row.importance, source=row.source, text=row.text
    )
    if _sha(note) != row.sha:
        damage("note", row.tenant, f"{row.conversation} {row.id.hex()}")
        return None
    return note


def _sha(note: NoteRow) -> bytes:
    facts = f" {note.category} {note.importance} {note.source} {note.text}".encode("utf-8", "surrogatepass")
    return sha256(note.id + facts).digest()
