"""The versions of a conversation's checkpoint, what each stands for, and the way back to one."""

import json
from typing import Annotated, Any

from msgspec import Meta

from policies.memory import Checkpoint, InvalidCheckpoint
from proxy.errors import NotFound
from proxy.http.archive import READ, array_of, cursor_in, page_of_bytes
from proxy.http.request import ManagementAnswer, ManagementRequest, page_of_whole
from proxy.http.shape import Count, Moment, Page, Shape, Share
from proxy.store import NoSuchVersion
from proxy.store.records import CheckpointRow, ConversationRow

MARKDOWN = b"text/markdown; charset=utf-8"
VERSIONS_SHOWN = 50


class Version(Shape):
    """One version of the checkpoint in a list."""

    version: Count
    reason: str
    window_id: Annotated[int, Meta(ge=1)]
    at: Moment
    branch: str
    messages: Count
    size: Annotated[int, Meta(ge=0, description="bytes of the state")]
    covers: int | None


def version_of(row: CheckpointRow) -> Version:
    """One version of the checkpoint in a list."""
    size = len(row.body.encode("utf-8", "surrogatepass"))
    return Version.of(row, messages=row.length, size=size, covers=None if row.cut is None else row.cut.covers)


class Saved(Shape):
    """One version of the checkpoint; covers, ref and summary are null where it was only saved."""

    version: Count
    reason: str
    window_id: Annotated[int, Meta(ge=1)]
    at: Moment
    branch: str
    messages: Count
    covers: int | None
    ref: str | None
    summary: str | None
    coverage: Share | None
    state: Checkpoint


class SavedVersion(Saved):
    """A version of the checkpoint, and what it has that the one before it has not, or has no more."""

    changed: dict[str, Any]


def saved_of(row: CheckpointRow) -> Saved:
    """One version of the checkpoint."""
    return Saved.of(row, **_saved(row))


def saved_version_of(row: CheckpointRow, before: CheckpointRow | None) -> SavedVersion:
    """One version of the checkpoint against the one ``before`` it; against nothing for the first one."""
    previous = Checkpoint.from_json(before.body) if before is not None else None
    return SavedVersion.of(row, **_saved(row), changed=dict(Checkpoint.from_json(row.body).delta(previous)))


def _saved(row: CheckpointRow) -> dict[str, object]:
    state, cut = Checkpoint.from_json(row.body), row.cut
    named = [each.value for each in state.identifiers]
    return {
        "messages": row.length,
        "covers": None if cut is None else cut.covers,
        "ref": None if cut is None else cut.ref,
        "summary": None if cut is None else cut.text,
        # share of the identifiers of what was removed that the state shows
        "coverage": round(state.coverage(named), 3) if named else None,
        "state": json.loads(row.body),
    }


class RolledBack(Shape):
    """The version that the conversation has now."""

    version: Count


async def checkpoint(asked: ManagementRequest) -> Saved:
    """The newest version of the checkpoint."""
    return saved_of(await _newest(asked))


async def checkpoint_markdown(asked: ManagementRequest) -> ManagementAnswer:
    """The newest version of the checkpoint, for people."""
    row = await _newest(asked)
    try:
        text = Checkpoint.from_json(row.body).to_markdown()
    except InvalidCheckpoint as error:
        raise NotFound(f"Version {row.version} was not written as a checkpoint: {error}.") from None
    return ManagementAnswer(text.encode("utf-8", "replace"), kind=MARKDOWN)


async def checkpoints(asked: ManagementRequest) -> Page[Version]:
    """The versions of the checkpoint, the newest first."""
    wanted = asked.limit(), asked.after(str, int)
    rows = (await _versions(asked, await asked.conversation()))[::-1]
    return page_of_whole(rows, wanted, version_of, lambda row: (row.branch, row.version))


async def checkpoint_version(asked: ManagementRequest) -> SavedVersion:
    """One version of the checkpoint."""
    version, row = asked.version(), await asked.conversation()
    found = await _at_version(asked, row, version)
    rows = await _versions(asked, row)
    before = [each for each in rows if each.branch == found.branch and each.version < version]
    return saved_version_of(found, before[-1] if before else None)


async def source(asked: ManagementRequest) -> ManagementAnswer:
    """What a version's summary stands for: the messages as the client sent them, as one JSON array in pages."""
    tenant, cursor, version = asked.own(READ), cursor_in(asked), asked.version()
    row = await _at_version(asked, await asked.conversation(), version)
    if row.cut is None:
        raise NotFound(f"Version {version} was only saved ({row.reason}): it stands for no messages.")
    originals = await asked.store.covered(tenant, row.cut.ref)
    if [each.ref for each in originals] != list(row.covered):
        by_ref = {ref: await asked.store.original(tenant, ref) for ref in dict.fromkeys(row.covered)}
        originals = [found for ref in row.covered if (found := by_ref[ref]) is not None]
    if len(originals) < len(row.covered):
        there = f"{len(originals)} of the {len(row.covered)} messages that version {version} stands for"
        raise NotFound(f"Only {there} are still there: the store keeps digests only, or is damaged.")
    return await page_of_bytes(array_of([each.body for each in originals]), cursor)


async def rollback(asked: ManagementRequest) -> RolledBack:
    """Take back what was done after a version; what is in force then is a version of its own."""
    version = asked.version()
    await asked.fields(())
    row = await asked.only_conversation()
    try:
        return RolledBack(version=await asked.runtime.planner.conversations.rollback(row, version))
    except NoSuchVersion:
        versions = sorted({0, *(each.version for each in await _versions(asked, row))})[-VERSIONS_SHOWN:]
        there = f"it is at version {row.version}, with checkpoints at {', '.join(map(str, versions))}"
        text = f"The conversation cannot go back to version {version}: {there}."
        raise NotFound(text, weir={"versions": versions}) from None


async def _versions(asked: ManagementRequest, row: ConversationRow) -> list[CheckpointRow]:
    return [each for each in await asked.store.checkpoints(row) if each.body]


async def _at_version(asked: ManagementRequest, row: ConversationRow, version: int) -> CheckpointRow:
    found = await asked.store.checkpoint_at(row, version)
    if found is None:
        versions = sorted({each.version for each in await _versions(asked, row)})[-VERSIONS_SHOWN:]
        there = f"there are {', '.join(map(str, versions))}" if versions else "none was saved yet"
        raise NotFound(f"There is no version {version} of the checkpoint: {there}.", weir={"versions": versions})
    return found


async def _newest(asked: ManagementRequest) -> CheckpointRow:
    row = await asked.conversation()
    found = await asked.store.latest_checkpoint(row.tenant, row.id)
    newest = None if found is None else (found[1].branch, found[1].version)
    for each in reversed(await _versions(asked, row)) if newest is not None else ():
        if (each.branch, each.version) == newest:
            return each
    raise NotFound(f"Conversation {row.name[:80]!r} has no checkpoint: nothing was compacted or saved in it yet.")
