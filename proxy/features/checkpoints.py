"""Checkpoints of a conversation: its versions, what each covers, and the way back to one."""

import json

from starlette.responses import Response

from policies.memory.checkpoint import Checkpoint, InvalidCheckpoint
from proxy.errors import NotFound
from proxy.http.request import Json, ManagementRequest, cursor_in, page_of_bytes, page_of_whole
from proxy.http.routes import CONVERSATION, PAGED, ManagementRoute
from proxy.store import Store
from proxy.store.records import CheckpointRow, ConversationRow, NoSuchVersion
from proxy.wire.codec import array_of

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


async def checkpoint(request: ManagementRequest) -> Json:
    """The newest version of the checkpoint."""
    return saved_of(await _newest(request))


async def checkpoint_markdown(request: ManagementRequest) -> Response:
    """The newest version of the checkpoint, for people."""
    row = await _newest(request)
    try:
        text = Checkpoint.from_json(row.body).to_markdown()
    except InvalidCheckpoint as error:
        raise NotFound(f"Version {row.version} was not written as a checkpoint: {error}.") from None
    return Response(text.encode("utf-8", "replace"), media_type=MARKDOWN)


async def list_checkpoints(request: ManagementRequest) -> Json:
    """The versions of the checkpoint, the newest first."""
    wanted = request.limit(), request.after(str, int)
    rows = (await checkpoints_of(request.store, await request.conversation()))[::-1]
    return page_of_whole(rows, wanted, version_of, lambda row: (row.branch, row.version))


async def checkpoint_version(request: ManagementRequest) -> Json:
    """One version of the checkpoint."""
    version = request.version()
    row = await request.conversation()
    found = await _at_version(request, row, version)
    rows = await checkpoints_of(request.store, row)
    before = [each for each in rows if each.branch == found.branch and each.version < version]
    previous = Checkpoint.from_json(before[-1].body) if before else None
    return {**saved_of(found), "changed": dict(Checkpoint.from_json(found.body).delta(previous))}


async def source(request: ManagementRequest) -> Response:
    """What a version's summary stands for: the messages as the client sent them, as one JSON array
    in pages.
    """
    tenant = request.own()
    cursor = cursor_in(request)
    version = request.version()
    row = await _at_version(request, await request.conversation(), version)
    if row.cut is None:
        raise NotFound(
            f"Version {version} was only saved ({row.reason}): it stands for no messages."
        )
    originals = await request.store.covered(tenant, row.cut.ref)
    if [each.ref for each in originals] != list(row.covered):
        by_ref = {
            ref: await request.store.original(tenant, ref) for ref in dict.fromkeys(row.covered)
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


async def roll_back(request: ManagementRequest) -> Json:
    """Take back what was done after a version; what is in force then is a version of its own."""
    version = request.version()
    await request.fields(())
    row = await request.only_conversation()
    try:
        return {"version": await request.runtime.planner.conversations.rollback(row, version)}
    except NoSuchVersion:
        versions = sorted(
            {0, *(each.version for each in await checkpoints_of(request.store, row))}
        )[-VERSIONS_SHOWN:]
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
    request: ManagementRequest, row: ConversationRow, version: int
) -> CheckpointRow:
    found = await request.store.checkpoint_at(row, version)
    if found is None:
        versions = sorted({each.version for each in await checkpoints_of(request.store, row)})[
            -VERSIONS_SHOWN:
        ]
        there = f"there are {', '.join(map(str, versions))}" if versions else "none was saved yet"
        raise NotFound(
            f"There is no version {version} of the checkpoint: {there}.",
            weir={"versions": versions},
        )
    return found


async def _newest(request: ManagementRequest) -> CheckpointRow:
    row = await request.conversation()
    if (found := await newest_checkpoint(request.store, row)) is not None:
        return found
    raise NotFound(
        f"Conversation {row.name[:80]!r} has no checkpoint: nothing was compacted or saved in it"
        " yet."
    )


CHECKPOINT = f"{CONVERSATION}/checkpoints/{{version}}"

ROUTES = (
    ManagementRoute("GET", f"{CONVERSATION}/checkpoint", checkpoint),
    ManagementRoute("GET", f"{CONVERSATION}/checkpoint.md", checkpoint_markdown),
    ManagementRoute("GET", f"{CONVERSATION}/checkpoints", list_checkpoints, PAGED),
    ManagementRoute("GET", CHECKPOINT, checkpoint_version),
    ManagementRoute("GET", f"{CHECKPOINT}/source", source, ("cursor",), asker="caller"),
    ManagementRoute("POST", f"{CONVERSATION}/rollback/{{version}}", roll_back),
)
