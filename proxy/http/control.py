"""What the management API does to a conversation beside its checkpoints and its archive, and the notes on it."""

from typing import Annotated, Literal

from msgspec import UNSET, Meta, UnsetType

from policies.ledger import Note
from policies.memory import CATEGORIES, IMPORTANCE, category_of
from proxy.errors import InvalidRequest, NotFound
from proxy.http.request import ManagementAnswer, ManagementRequest, as_json, page_of_whole
from proxy.http.shape import Digest, Moment, Page, Shape
from proxy.store.records import NoteRow

MAX_NOTE_LEN = 4_000
USUAL = "normal"
Importance = Literal["critical", "high", "normal"]


class KeptNote(Shape):
    """One note on a conversation."""

    id: Digest
    at: Moment
    category: str
    importance: Importance
    source: str
    text: str


class NewNote(Shape):
    """A note to take; another category is filed under misc."""

    text: Annotated[str, Meta(min_length=1, max_length=MAX_NOTE_LEN)]
    category: str | UnsetType = UNSET
    importance: Importance | UnsetType = UNSET


class Wanted(Shape):
    """What the next request was asked to do."""

    wanted: Literal["compact"]


class Closed(Shape):
    """When the conversation was closed."""

    closed: Moment


class Deleted(Shape):
    """That it is gone."""

    deleted: Literal[True]


async def compact(asked: ManagementRequest) -> ManagementAnswer:
    """Have the conversation's next request compacted, whatever its size."""
    await asked.fields(())
    await asked.runtime.planner.conversations.want(await asked.only_conversation(), "compact")
    return as_json(Wanted(wanted="compact"), status=202)


async def close(asked: ManagementRequest) -> Closed:
    """Archive the conversation; closing it again changes nothing."""
    await asked.fields(())
    row = await asked.only_conversation()
    if row.closed is not None:
        return Closed(closed=row.closed)
    return Closed(closed=await asked.runtime.planner.conversations.close(row))


async def delete(asked: ManagementRequest) -> Deleted:
    """Delete the conversation for good: rows, bodies, and what memory holds of it."""
    row = await asked.only_conversation()
    if not await asked.store.delete(row, asked.runtime.planner.clock()):
        raise NotFound(f"There is no conversation {row.name[:80]!r}.")
    asked.runtime.summarizer.forget(row.tenant)
    asked.runtime.planner.conversations.forget(row)
    asked.runtime.health.forget(row.tenant, row.id)
    return Deleted(deleted=True)


async def notes(asked: ManagementRequest) -> Page[KeptNote]:
    """The notes on a conversation, oldest first."""
    wanted = asked.limit(), asked.after(str)
    row = await asked.conversation()
    rows = await asked.store.notes(row.tenant, row.id)
    return page_of_whole(rows, wanted, KeptNote.of, lambda row: (row.id.hex(),))


async def add_note(asked: ManagementRequest) -> ManagementAnswer:
    """Store a note on the conversation; the same text in the same category is stored once."""
    note = _note(await asked.fields(NewNote.__struct_fields__))
    row = await asked.only_conversation()
    if not asked.store.keeps_content:
        raise InvalidRequest("This proxy stores nothing that is said (store.content: digest), and so no notes.")
    stored = NoteRow.of(note, at=asked.runtime.planner.clock())
    if await asked.store.add_notes(row.tenant, row.id, [stored]):
        asked.runtime.planner.conversations.note(row, note)
        return as_json(KeptNote.of(stored), status=201)
    known = {each.id: each for each in await asked.store.notes(row.tenant, row.id)}
    return as_json(KeptNote.of(known.get(stored.id, stored)))


def _note(fields: dict[str, object]) -> Note:
    text, category = fields.get("text"), fields.get("category", "")
    importance = fields.get("importance", USUAL)
    if not isinstance(text, str) or not text.strip() or len(text) > MAX_NOTE_LEN:
        raise InvalidRequest(f"text must be 1 to {MAX_NOTE_LEN} characters.", param="text")
    if not isinstance(category, str):
        raise InvalidRequest(f"category must be one of {', '.join(CATEGORIES)}.", param="category")
    if not isinstance(importance, str) or importance not in IMPORTANCE:
        raise InvalidRequest(f"importance must be one of {', '.join(IMPORTANCE)}.", param="importance")
    return Note(category_of(category), importance, text, "api")
