"""What was taken out of the window: the list of it, the search in it, the originals, checkpoints,
and the way back.

And one request looked at from both sides: what the client sent, and what the model saw. A side is a
list of rows, whatever the client's API calls its items: a message of a chat is one, and an item or
a block of another API can be one.
"""

import asyncio
import json
from collections.abc import Mapping
from hashlib import sha256
from itertools import groupby
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType
from starlette.responses import Response

from policies.ledger import EditKind
from policies.memory.checkpoint import Checkpoint, InvalidCheckpoint
from policies.messages import Body
from policies.tokens import TEXT_OF
from proxy.errors import InvalidRequest, NotFound
from proxy.http.request import (
    JSON,
    MAX_DIGITS,
    Json,
    ManagementRequest,
    exchange_of,
    fields_of,
    gone,
    page,
    page_from,
    page_of_whole,
)
from proxy.store import Store
from proxy.store.inspections import Inspected
from proxy.store.records import CheckpointRow, ConversationRow, NoSuchVersion, Original, RemovedRow
from proxy.wire import view_of_stored
from proxy.wire.chat import body_of
from proxy.wire.codec import array_of
from proxy.wire.raw import split_array

PAGE = 64 * 1024
MAX_REF_LEN = 100
MAX_QUERY_LEN = 1_000
MAX_FOUND = 500
MAX_FOUND_TEXT = 2_000
EXCERPT = 200
BLOBS = "/weir/blobs/"
TEXT = "text/plain"
READ = "Originals are read"

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


async def removed(asked: ManagementRequest) -> Json:
    """What is out of the conversation's window, why, since when, and where the original is."""
    limit = asked.limit()
    after = asked.after(str)
    row = await asked.conversation()
    try:
        rows = await asked.store.removed(
            row, after=None if after is None else str(after[0]), limit=limit + 1
        )
    except KeyError:
        raise gone() from None
    own = asked.tenant is not None
    return page(rows, limit, lambda row: removed_of(row, with_text=own), lambda row: (row.ref,))


async def search(asked: ManagementRequest) -> Json:
    """Removed messages with all the words that are asked for, else with any of them, best first;
    with the first page also what is still in the window and is kept (the policy's ``inspect``).
    """
    tenant = asked.own(READ)
    words = asked.query.get("q", "")
    name = asked.query.get("conversation")
    if not words.strip():
        raise InvalidRequest("q should say what to search for.", param="q")
    if len(words) > MAX_QUERY_LEN:
        raise InvalidRequest(f"q may have up to {MAX_QUERY_LEN} characters.", param="q")
    limit = asked.limit()
    start = min(MAX_FOUND, asked.start())
    within = None if name is None else (await asked.conversation(name)).id
    kept = []
    if not start:
        kept = await asked.store.search_kept(tenant, words, limit=MAX_FOUND, text_of=_said_by)
    found = await asked.store.search(
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


def _said_by(raw: bytes) -> str:
    return said_in(body_of(view_of_stored(raw)))


async def pin(asked: ManagementRequest) -> Json:
    """Have a removed message come back, and never be removed again."""
    given = (await asked.fields(("ref",))).get("ref")
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
    if not await asked.runtime.planner.conversations.pin(await asked.only_conversation(), ref):
        raise NotFound(
            f"Nothing with the ref {ref!r} was removed from this conversation; see its list of what"
            " was."
        )
    return {"pinned": ref}


async def blob(asked: ManagementRequest) -> Response:
    """The original of a removed message, or of all that a summary covers, in pages of at most 64
    KiB.

    ``REF`` is the JSON that the client sent, ``REF.txt`` what it says, as UTF-8.
    """
    tenant = asked.own(READ)
    given = asked.path["ref"]
    cursor = cursor_in(asked)
    body = await _original(asked, tenant, given.removesuffix(TEXT_OF))
    return await page_of_bytes(body, cursor, as_text=given.endswith(TEXT_OF))


async def page_of_bytes(body: bytes, cursor: int, *, as_text: bool = False) -> Response:
    """One page of ``body`` from a cursor on, as JSON or as the text that it says.

    Cursors count bytes, and a page ends between two characters. ``x-weir-size`` and
    ``x-weir-sha256`` are those of the whole, ``x-weir-end`` is true on the last page, and
    ``x-weir-cursor`` leads to the next one.
    """
    return await asyncio.to_thread(_page, body, cursor, as_text=as_text)


def cursor_in(asked: ManagementRequest) -> int:
    given = asked.query.get("cursor", "0")
    if not (given.isascii() and given.isdigit() and len(given) <= MAX_DIGITS):
        raise InvalidRequest("cursor must be a number of bytes.", param="cursor")
    return int(given)


async def _original(asked: ManagementRequest, tenant: str, ref: str) -> bytes:
    waiting = asked.runtime.settler.original(tenant, ref)
    if waiting is not None:
        return waiting
    store = asked.store
    if len(ref) <= MAX_REF_LEN and ref.isprintable():
        original = await store.original(tenant, ref)
        if original is not None:
            return original.body
        covered = await store.covered(tenant, ref)
        if covered:
            return array_of([each.body for each in covered])
    raise NotFound(f"There is no original with the ref {ref[:64]!r}.")


def _page(body: bytes, start: int, *, as_text: bool) -> Response:
    whole = _text_of(body) if as_text else body
    stop = min(len(whole), start + PAGE)
    while start + 4 < stop < len(whole) and whole[stop] & 0xC0 == 0x80:
        stop -= 1
    response = Response(whole[start:stop], media_type=TEXT if as_text else JSON)
    response.headers["x-weir-size"] = str(len(whole))
    response.headers["x-weir-sha256"] = sha256(whole).hexdigest()
    response.headers["x-weir-end"] = "false" if stop < len(whole) else "true"
    if stop < len(whole):
        response.headers["x-weir-cursor"] = str(stop)
    return response


def _text_of(body: bytes) -> bytes:
    messages = split_array(body) if body.startswith(b"[") else (body,)
    return "\n".join(body_of(view_of_stored(raw)).whole for raw in messages or ()).encode(
        "utf-8", "surrogatepass"
    )


MARKDOWN = "text/markdown"
VERSIONS_SHOWN = 50


def _state(row: CheckpointRow) -> Json:
    return {
        "version": row.version,
        "reason": row.reason,
        "window_id": row.window_id,
        "at": row.at,
        "branch": row.branch,
        "messages": row.length,
    }


def version_of(row: CheckpointRow) -> Json:
    """One version of the checkpoint in a list."""
    size = len(row.body.encode("utf-8", "surrogatepass"))
    return {**_state(row), "size": size, "covers": None if row.cut is None else row.cut.covers}


def saved_of(row: CheckpointRow) -> Json:
    """One version of the checkpoint; covers, ref and summary are null where it was only saved."""
    state = Checkpoint.from_json(row.body)
    cut = row.cut
    named = [each.value for each in state.identifiers]
    return {
        **_state(row),
        "covers": None if cut is None else cut.covers,
        "ref": None if cut is None else cut.ref,
        "summary": None if cut is None else cut.text,
        # share of the identifiers of what was removed that the state shows
        "coverage": round(state.coverage(named), 3) if named else None,
        "state": json.loads(row.body),
    }


async def checkpoint(asked: ManagementRequest) -> Json:
    """The newest version of the checkpoint."""
    return saved_of(await _newest(asked))


async def checkpoint_markdown(asked: ManagementRequest) -> Response:
    """The newest version of the checkpoint, for people."""
    row = await _newest(asked)
    try:
        text = Checkpoint.from_json(row.body).to_markdown()
    except InvalidCheckpoint as error:
        raise NotFound(f"Version {row.version} was not written as a checkpoint: {error}.") from None
    return Response(text.encode("utf-8", "replace"), media_type=MARKDOWN)


async def checkpoints(asked: ManagementRequest) -> Json:
    """The versions of the checkpoint, the newest first."""
    wanted = asked.limit(), asked.after(str, int)
    rows = (await checkpoints_of(asked.store, await asked.conversation()))[::-1]
    return page_of_whole(rows, wanted, version_of, lambda row: (row.branch, row.version))


async def checkpoint_version(asked: ManagementRequest) -> Json:
    """One version of the checkpoint."""
    version = asked.version()
    row = await asked.conversation()
    found = await _at_version(asked, row, version)
    rows = await checkpoints_of(asked.store, row)
    before = [each for each in rows if each.branch == found.branch and each.version < version]
    previous = Checkpoint.from_json(before[-1].body) if before else None
    return {**saved_of(found), "changed": dict(Checkpoint.from_json(found.body).delta(previous))}


async def source(asked: ManagementRequest) -> Response:
    """What a version's summary stands for: the messages as the client sent them, as one JSON array
    in pages.
    """
    tenant = asked.own(READ)
    cursor = cursor_in(asked)
    version = asked.version()
    row = await _at_version(asked, await asked.conversation(), version)
    if row.cut is None:
        raise NotFound(
            f"Version {version} was only saved ({row.reason}): it stands for no messages."
        )
    originals = await asked.store.covered(tenant, row.cut.ref)
    if [each.ref for each in originals] != list(row.covered):
        by_ref = {
            ref: await asked.store.original(tenant, ref) for ref in dict.fromkeys(row.covered)
        }
        originals = [found for ref in row.covered if (found := by_ref[ref]) is not None]
    if len(originals) < len(row.covered):
        there = (
            f"{len(originals)} of the {len(row.covered)} messages that version {version} stands for"
        )
        raise NotFound(
            f"Only {there} are still there: the store keeps digests only, or is damaged."
        )
    return await page_of_bytes(array_of([each.body for each in originals]), cursor)


async def rollback(asked: ManagementRequest) -> Json:
    """Take back what was done after a version; what is in force then is a version of its own."""
    version = asked.version()
    await asked.fields(())
    row = await asked.only_conversation()
    try:
        return {"version": await asked.runtime.planner.conversations.rollback(row, version)}
    except NoSuchVersion:
        versions = sorted({0, *(each.version for each in await checkpoints_of(asked.store, row))})[
            -VERSIONS_SHOWN:
        ]
        there = (
            f"it is at version {row.version}, with checkpoints at {', '.join(map(str, versions))}"
        )
        text = f"The conversation cannot go back to version {version}: {there}."
        raise NotFound(text, weir={"versions": versions}) from None


async def checkpoints_of(store: Store, row: ConversationRow) -> list[CheckpointRow]:
    return [each for each in await store.checkpoints(row) if each.body]


async def newest_checkpoint(store: Store, row: ConversationRow) -> CheckpointRow | None:
    latest = await store.latest_checkpoint(row.tenant, row.id)
    return latest[1] if latest is not None and latest[1].body else None


async def _at_version(
    asked: ManagementRequest, row: ConversationRow, version: int
) -> CheckpointRow:
    found = await asked.store.checkpoint_at(row, version)
    if found is None:
        versions = sorted({each.version for each in await checkpoints_of(asked.store, row)})[
            -VERSIONS_SHOWN:
        ]
        there = f"there are {', '.join(map(str, versions))}" if versions else "none was saved yet"
        raise NotFound(
            f"There is no version {version} of the checkpoint: {there}.",
            weir={"versions": versions},
        )
    return found


async def _newest(asked: ManagementRequest) -> CheckpointRow:
    row = await asked.conversation()
    if (found := await newest_checkpoint(asked.store, row)) is not None:
        return found
    raise NotFound(
        f"Conversation {row.name[:80]!r} has no checkpoint: nothing was compacted or saved in it"
        " yet."
    )


MAX_ID_LEN = 100
SUMMARY = "a summary of what was removed before it"
RECALLED = "removed earlier and asked for by the newest user message"
SUMMARISED = "a summary of the older history has its place"
DROPPED = "it was dropped"
Status = Literal["same", "changed", "removed", "added"]


class SideRow(msgspec.Struct):
    """One item of a side; text is not there for the operator, None where it was not kept.

    place: its line; what stands beside it on the other side has the same.
    """

    place: int
    role: str
    kind: str
    tokens: int
    status: Status
    reason: str | None
    ref: str | None
    link: str | None
    text: str | UnsetType | None = UNSET


class Pair(msgspec.Struct, frozen=True):
    client: SideRow | None
    model: SideRow | None

    @property
    def status(self) -> Status:
        row = self.client or self.model
        assert row is not None  # noqa: S101 - a line has at least one side
        return row.status


async def both_sides(asked: ManagementRequest) -> Json:
    """One request: what the client sent, and what the model saw, item by item.

    The newest requests of a conversation are kept so (the policy's ``inspect``). Items that stand
    beside one another have the same ``place``. What they say is given to the caller alone.
    """
    row = await asked.conversation()
    request = asked.path["rid"]
    if len(request) > MAX_ID_LEN or not request.isprintable():
        raise NotFound("There is no such request.")
    try:
        told, found = await asked.store.inspection(row, request)
    except KeyError:
        raise NotFound(f"The conversation has no request {request[:80]!r}.") from None
    exchange = exchange_of(told)
    template = asked.runtime.config.telemetry.trace_url
    trace = exchange["detail"].get("trace")
    link = template.replace("{trace_id}", str(trace)) if template and trace else None
    client: list[SideRow] = []
    model: list[SideRow] = []
    if found is not None:
        client, model = _sides(found, with_text=asked.tenant is not None)
    return {
        "exchange": exchange,
        "kept": found is not None,
        "tools": 0 if found is None else found.tools,
        "pruned": [] if found is None else list(found.pruned),
        "trace": link,
        "client": client,
        "model": model,
    }


def runs(both: Json) -> list[tuple[Status, list[Pair]]]:
    client, model = ({row.place: row for row in side} for side in (both["client"], both["model"]))
    pairs = [Pair(client.get(n), model.get(n)) for n in sorted(client.keys() | model.keys())]
    return [(status, list(lines)) for status, lines in groupby(pairs, key=lambda pair: pair.status)]


def _sides(found: Inspected, *, with_text: bool) -> tuple[list[SideRow], list[SideRow]]:
    client: list[SideRow] = []
    model: list[SideRow] = []
    place = done = 0

    def sent(index: int, status: Status, reason: str | None) -> SideRow:
        ref, role, tokens = found.client[index]
        link = BLOBS + ref if ref in found.archived else None
        text = _message(found.bodies.get(ref)) if with_text else UNSET
        return SideRow(place, role, "message", tokens, status, reason, ref, link, text)

    forwarded = (
        found.sent
        if found.sent is not None
        else [(n, None, row[2], None) for n, row in enumerate(found.client)]
    )
    indices = [index for index, *_ in forwarded]
    for n, (index, kind, tokens, ref) in enumerate(forwarded):
        following = next((each for each in indices[n:] if each is not None), len(found.client))
        gone = following if index is None or index >= done else done
        is_summary = index is None and kind != EditKind.RECALL
        while done < gone:  # what is missing stands before what came in its place
            client.append(sent(done, "removed", SUMMARISED if is_summary else DROPPED))
            place = place + 1
            done = done + 1
        text = _text(found, ref) if with_text else UNSET
        if index is None:
            of = "recall" if kind == EditKind.RECALL else "summary"
            reason = RECALLED if of == "recall" else SUMMARY
            model.append(SideRow(place, "user", of, tokens, "added", reason, None, None, text))
        elif ref is None and kind is None:
            client.append(sent(index, "same", None))
            model.append(client[-1])
            done = index + 1
        else:
            client.append(sent(index, "changed", WHY.get(kind or "", "the policy changed it")))
            after = text if ref is not None and kind not in _KEEPING else client[-1].text
            row = client[-1]
            model.append(
                SideRow(
                    place,
                    row.role,
                    "message",
                    tokens,
                    "changed",
                    row.reason,
                    row.ref,
                    row.link,
                    after,
                )
            )
            done = index + 1
        place += 1
    for index in range(done, len(found.client)):
        client.append(sent(index, "removed", DROPPED))
        place += 1
    return client, model


_KEEPING = frozenset({str(EditKind.REASONING), str(EditKind.UNBOUND), str(EditKind.MEDIA)})
"""Edits whose text is not the whole of what the message says then."""


def _text(found: Inspected, ref: str | None) -> str | None:
    body = None if ref is None else found.bodies.get(ref)
    return None if body is None else body.decode("utf-8", "replace")


def _message(raw: bytes | None) -> str | None:
    return None if raw is None else said_in(body_of(view_of_stored(raw)))


def said_in(body: Body) -> str:
    parts = [body.whole] if body.whole else []
    parts += [f"→ {call.name}({call.arguments})" for call in body.calls]
    parts += [f"[{each}]" for each in body.attached]
    if body.reasoning:
        parts.insert(0, f"[thinking] {body.reasoning}")
    return "\n".join(parts).encode("utf-8", "replace").decode()
