"""What the management API does to a conversation: compact it, take it back, pin, note, close, delete."""

from policies.clipping import TEXT_OF
from policies.notes import CATEGORIES, IMPORTANCE, Note, category_of
from proxy.errors import InvalidRequest, NotFound
from proxy.routes.blobs import LONGEST_REF
from proxy.routes.conversations import VERSIONS_SHOWN, saved
from proxy.routes.question import Answer, Question, as_json
from proxy.routes.rows import note_json
from proxy.store import NoSuchVersion
from proxy.store.records import ConversationRow, NoteRow

LONGEST_NOTE = 4_000
USUAL = "normal"


async def compact(question: Question) -> Answer:
    """Have the conversation's next request compacted, whatever its size."""
    await question.fields(())
    await question.runtime.planner.conversations.want(await question.only_conversation(), "compact")
    return as_json({"wanted": "compact"}, status=202)


async def rollback(question: Question) -> Answer:
    """Take back what was done after a version; what is in force then is a version of its own."""
    version = question.version()
    await question.fields(())
    row = await question.only_conversation()
    try:
        new = await question.runtime.planner.conversations.rollback(row, version)
    except NoSuchVersion:
        raise await _no_way_back(question, row, version) from None
    return as_json({"version": new})


async def _no_way_back(question: Question, row: ConversationRow, version: int) -> NotFound:
    """The error that says which versions there are to go back to."""
    versions = sorted({0, *(each.version for each in await saved(question, row))})[-VERSIONS_SHOWN:]
    there = f"it is at version {row.version}, with checkpoints at {', '.join(map(str, versions))}"
    return NotFound(f"The conversation cannot go back to version {version}: {there}.", weir={"versions": versions})


async def pin(question: Question) -> Answer:
    """Have a removed message come back, and never be removed again."""
    ref = await _ref(question)
    row = await question.only_conversation()
    if not await question.runtime.planner.conversations.pin(row, ref):
        raise NotFound(f"Nothing with the ref {ref!r} was removed from this conversation; see its list of what was.")
    return as_json({"pinned": ref})


async def _ref(question: Question) -> str:
    """The ref in the body, without ``.txt``. Raises InvalidRequest where there is none."""
    given = (await question.fields(("ref",))).get("ref")
    if not isinstance(given, str) or not given or len(given) > LONGEST_REF or not given.isprintable():
        raise InvalidRequest("ref must be that of a removed message, as its list has it.", param="ref")
    return given.removesuffix(TEXT_OF)


async def add_note(question: Question) -> Answer:
    """Store a note on the conversation; the same text in the same category is stored once."""
    note = _note(await question.fields(("text", "category", "importance")))
    row = await question.only_conversation()
    if not question.store.keeps_content:
        raise InvalidRequest("This proxy stores nothing that is said (store.content: digest), and so no notes.")
    stored = NoteRow.of(note, at=question.runtime.planner.clock())
    if await question.store.add_notes(row.tenant, row.id, [stored]):
        question.runtime.planner.conversations.note(row, note)
        return as_json(note_json(stored), status=201)
    known = {each.id: each for each in await question.store.notes(row.tenant, row.id)}
    return as_json(note_json(known.get(stored.id, stored)))


def _note(fields: dict[str, object]) -> Note:
    """The note in a body. Raises InvalidRequest for a text or an importance that cannot be."""
    text, category = fields.get("text"), fields.get("category", "")
    importance = fields.get("importance", USUAL)
    if not isinstance(text, str) or not text.strip() or len(text) > LONGEST_NOTE:
        raise InvalidRequest(f"text must be 1 to {LONGEST_NOTE} characters.", param="text")
    if not isinstance(category, str):
        raise InvalidRequest(f"category must be one of {', '.join(CATEGORIES)}.", param="category")
    if not isinstance(importance, str) or importance not in IMPORTANCE:
        raise InvalidRequest(f"importance must be one of {', '.join(IMPORTANCE)}.", param="importance")
    return Note(category_of(category), importance, text, "api")


async def close(question: Question) -> Answer:
    """Archive the conversation; closing it again changes nothing."""
    await question.fields(())
    row = await question.only_conversation()
    if row.closed is not None:
        return as_json({"closed": row.closed})
    return as_json({"closed": await question.runtime.planner.conversations.close(row)})


async def delete(question: Question) -> Answer:
    """Delete the conversation for good: rows, bodies, and what memory holds of it."""
    row = await question.only_conversation()
    if not await question.store.delete(row, question.runtime.planner.clock()):
        raise NotFound(f"There is no conversation {row.name[:80]!r}.")
    question.runtime.summarizer.forget(row.tenant)
    question.runtime.planner.conversations.forget(row)
    question.runtime.health.forget(row.tenant, row.id)
    return as_json({"deleted": True})
