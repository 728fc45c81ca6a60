"""Notes on a conversation, which are kept through every compaction."""

from starlette.responses import Response

from policies.ledger import Note
from policies.memory.notes import CATEGORIES, IMPORTANCE, category_of
from proxy.errors import InvalidRequest
from proxy.http.request import MAX_ROWS, Json, ManagementRequest, as_json, fields_of, page_of_whole
from proxy.http.routes import CONVERSATION, PAGED, ManagementRoute
from proxy.store.records import NoteRow

MAX_NOTE_LEN = 4_000
USUAL = "normal"


async def list_notes(request: ManagementRequest) -> Json:
    """The notes on a conversation, oldest first."""
    wanted = request.limit(), request.after(str)
    row = await request.conversation()
    rows = await request.store.notes(row.tenant, row.id)
    return page_of_whole(rows, wanted, fields_of, lambda row: (row.id.hex(),))


async def add_note(request: ManagementRequest) -> Json | Response:
    """Store a note on the conversation; the same text in the same category is stored once."""
    note = _note(await request.fields(("text", "category", "importance")))
    row = await request.only_conversation()
    if not request.store.keeps_content:
        raise InvalidRequest(
            "This proxy stores nothing that is said (store.content: digest), and so no notes."
        )
    stored = NoteRow.of(note, at=request.runtime.planner.clock())
    if await request.store.add_notes(row.tenant, row.id, [stored]):
        request.runtime.planner.conversations.note(row, note)
        return fields_of(stored)
    known = {each.id: each for each in await request.store.notes(row.tenant, row.id)}
    return as_json(fields_of(known.get(stored.id, stored)))


def _note(fields: dict[str, object]) -> Note:
    text = fields.get("text")
    category = fields.get("category", "")
    importance = fields.get("importance", USUAL)
    if not isinstance(text, str) or not text.strip() or len(text) > MAX_NOTE_LEN:
        raise InvalidRequest(f"text must be 1 to {MAX_NOTE_LEN} characters.", param="text")
    if not isinstance(category, str):
        raise InvalidRequest(f"category must be one of {', '.join(CATEGORIES)}.", param="category")
    if not isinstance(importance, str) or importance not in IMPORTANCE:
        raise InvalidRequest(
            f"importance must be one of {', '.join(IMPORTANCE)}.", param="importance"
        )
    return Note(category_of(category), importance, text, "api")


ROUTES = (
    ManagementRoute("GET", f"{CONVERSATION}/notes", list_notes, PAGED, rows=MAX_ROWS),
    ManagementRoute("POST", f"{CONVERSATION}/notes", add_note, statuses=(201, 200)),
)
