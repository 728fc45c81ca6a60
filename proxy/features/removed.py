"""What was taken out of the window: the list of it, the search in it, the originals, and pins."""

from collections.abc import Mapping

from starlette.responses import Response

from policies.ledger import EditKind
from policies.tokens import TEXT_OF
from proxy.errors import InvalidRequest, NotFound
from proxy.http.request import (
    Json,
    ManagementRequest,
    cursor_in,
    fields_of,
    gone,
    page,
    page_from,
    page_of_bytes,
)
from proxy.http.routes import CONVERSATION, PAGED, ManagementRoute
from proxy.store.records import Original, RemovedRow
from proxy.wire import view_of_stored
from proxy.wire.chat import body_of
from proxy.wire.codec import array_of

MAX_REF_LEN = 100
MAX_QUERY_LEN = 1_000
MAX_FOUND = 500
MAX_FOUND_TEXT = 2_000
EXCERPT = 200
BLOBS = "/weir/blobs/"

WHY: Mapping[str, str] = {
    EditKind.INGEST_CAP: "the result was longer than the policy lets a single one be",
    EditKind.DEDUPE: "a later message says the same, or a later call replaced it",
    EditKind.EVICT: "it was old, and worth least of what could go",
    EditKind.PRUNE: "it was older than the results that the policy keeps",
    EditKind.MERGE: "it said nearly the same as another result",
    EditKind.TRUNCATE: "it was among the largest results",
    EditKind.CLIP: "nothing else was left to shorten",
    EditKind.MEDIA: "it was an old image, sound or file",
    EditKind.REASONING: "it was thinking of an earlier turn",
    EditKind.UNBOUND: "it was thinking that is only valid behind what was removed before it",
    EditKind.CUSTOM: "the policy's own function chose it",
    EditKind.PRUNE_TOOLS: "the tool was not used",
    EditKind.SUMMARY: "a summary of the result stands for it",
    EditKind.PROGRESSIVE: "it was condensed with its age",
    EditKind.DELEGATE: "another model read it and said what matters",
    "compact": "a summary of the older history stands for it",
    "rollover": "the conversation went on in a new window, from a checkpoint",
    "resume": "the conversation goes on from another one's checkpoint, which says it",
    "drop_oldest": "it was among the oldest, and nothing else was left to remove",
    "sliding_window": "it was older than the messages that the policy keeps",
}


def removed_of(row: RemovedRow, *, with_text: bool) -> Json:
    """One message that is out of the window; what it says is not there for the operator."""
    found: Json = {
        "ref": row.ref,
        "how": row.how,
        "why": WHY.get(row.how, "the policy took it"),
        "since": row.at,
        "version": row.version,
        "tool": row.tool or None,
        "role": row.role or None,
        "tokens": row.tokens,
        "kept": row.kept,
        "blob": BLOBS + row.ref,
    }
    return found | {"begins": row.text[:EXCERPT]} if with_text else found


async def list_removed(request: ManagementRequest) -> Json:
    """What is out of the conversation's window, why, since when, and where the original is."""
    limit = request.limit()
    after = request.after(str)
    row = await request.conversation()
    try:
        rows = await request.store.removed(
            row, after=None if after is None else str(after[0]), limit=limit + 1
        )
    except KeyError:
        raise gone() from None
    own = request.tenant is not None
    return page(rows, limit, lambda row: removed_of(row, with_text=own), lambda row: (row.ref,))


async def search_removed(request: ManagementRequest) -> Json:
    """Removed messages with all the words that are asked for, else with any of them, best first;
    with the first page also what is still in the window and is kept (the policy's ``inspect``).
    """
    tenant = request.own()
    words = request.query.get("q", "")
    name = request.query.get("conversation")
    if not words.strip():
        raise InvalidRequest("q should say what to search for.", param="q")
    if len(words) > MAX_QUERY_LEN:
        raise InvalidRequest(f"q may have up to {MAX_QUERY_LEN} characters.", param="q")
    limit = request.limit()
    start = min(MAX_FOUND, request.start())
    within = None if name is None else (await request.conversation(name)).id
    kept = []
    if not start:
        kept = await request.store.search_kept(tenant, words, limit=MAX_FOUND, text_of=text_of)
    found = await request.store.search(
        tenant, words, limit=min(MAX_FOUND, start + limit + 1), conversation=within
    )

    def show(row: Original) -> Json:
        return fields_of(
            row, without=("body",), text=row.text[:MAX_FOUND_TEXT], blob=BLOBS + row.ref
        )

    taken_out = {row.ref for row in found}
    in_window = [
        {"conversation": row.name, "ref": row.ref, "text": row.text[:MAX_FOUND_TEXT]}
        for row in kept
        if row.ref not in taken_out and within in (None, row.conversation)
    ]
    return page_from(found, start, limit, show) | {"in_window": in_window[:limit]}


async def pin_removed(request: ManagementRequest) -> Json:
    """Have a removed message come back, and never be removed again."""
    given = (await request.fields(("ref",))).get("ref")
    if (
        not isinstance(given, str)
        or not given
        or len(given) > MAX_REF_LEN
        or not given.isprintable()
    ):
        raise InvalidRequest(
            "ref must be that of a removed message, as its list has it.", param="ref"
        )
    ref = given.removesuffix(TEXT_OF)
    if not await request.runtime.planner.conversations.pin(await request.only_conversation(), ref):
        raise NotFound(
            f"Nothing with the ref {ref!r} was removed from this conversation; see its list of what"
            " was."
        )
    return {"pinned": ref}


async def blob(request: ManagementRequest) -> Response:
    """The original of a removed message, or of all that a summary covers, in pages of at most 64
    KiB.

    ``REF`` is the JSON that the client sent, ``REF.txt`` what it says, as UTF-8.
    """
    tenant = request.own()
    given = request.path["ref"]
    cursor = cursor_in(request)
    body = await _original(request, tenant, given.removesuffix(TEXT_OF))
    return await page_of_bytes(body, cursor, as_text=given.endswith(TEXT_OF))


async def _original(request: ManagementRequest, tenant: str, ref: str) -> bytes:
    waiting = request.runtime.write_queue.original(tenant, ref)
    if waiting is not None:
        return waiting
    store = request.store
    if len(ref) <= MAX_REF_LEN and ref.isprintable():
        original = await store.original(tenant, ref)
        if original is not None:
            return original.body
        covered = await store.covered(tenant, ref)
        if covered:
            return array_of([each.body for each in covered])
    raise NotFound(f"There is no original with the ref {ref[:64]!r}.")


FOUND = ("q", "conversation")

ROUTES = (
    ManagementRoute("GET", f"{CONVERSATION}/removed", list_removed, PAGED),
    ManagementRoute("POST", f"{CONVERSATION}/pin", pin_removed),
    ManagementRoute("GET", "blobs/{ref}", blob, ("cursor",), asker="caller"),
    ManagementRoute("GET", "search", search_removed, (*FOUND, *PAGED), rows=20, asker="caller"),
)


def text_of(raw: bytes) -> str:
    """What a message says whose JSON is kept: its text, its calls, and what is attached."""
    body = body_of(view_of_stored(raw))
    parts = [body.whole] if body.whole else []
    parts += [f"→ {call.name}({call.arguments})" for call in body.calls]
    parts += [f"[{each}]" for each in body.attached]
    if body.reasoning:
        parts.insert(0, f"[thinking] {body.reasoning}")
    return "\n".join(parts).encode("utf-8", "replace").decode()
