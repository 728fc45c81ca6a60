"""What the management API tells about conversations: how full they are, what stands for them, what was removed."""

from policies.checkpoint import Checkpoint, InvalidCheckpoint
from proxy.errors import InvalidRequest, NotFound
from proxy.routes.blobs import READ, array_of, cursor_in, page
from proxy.routes.pages import cursor_of, gone, listed, part_of, place_in
from proxy.routes.question import Answer, Question, as_json
from proxy.routes.rows import (
    audit_json,
    changed_json,
    checkpoint_json,
    conversation_json,
    eviction_json,
    exchange_json,
    found_json,
    note_json,
    removed_json,
    report_json,
    state_json,
    version_json,
)
from proxy.store import AuditRow
from proxy.store.records import CheckpointRow, ConversationRow, EvictionRow, ExchangeRow, NoteRow
from proxy.store.transaction import Place

MARKDOWN = b"text/markdown; charset=utf-8"
FOUND_AT_MOST = 500
LONGEST_QUERY = 1_000
VERSIONS_SHOWN = 50
ENDED = (0, "", 0, 0)
"""The place in a list of evictions that has come to its end before the list beside it."""


async def listing(question: Question) -> Answer:
    """The caller's conversations, the one used last first; ``closed`` leaves those that are, or are not."""
    limit, closed = question.limit(), question.flag("closed")
    after = place_in(question.query.get("cursor"), float, str, str)
    rows = await question.store.conversations(question.tenant, limit=limit + 1, closed=closed, after=after)
    return listed(rows, limit, conversation_json, lambda row: (row.updated, row.id, row.tenant))


async def one(question: Question) -> Answer:
    """One conversation: its row, the reading of its last request, and the status report."""
    row = await question.conversation()
    last = next(iter(await question.store.timeline(row, limit=1)), None)
    newest = await question.store.latest_checkpoint(row.tenant, row.id)
    sums = await question.store.eviction_sums(row.tenant, conversation=row)
    report = report_json(
        row,
        last,
        windows=1 if newest is None else newest[1].window_id,
        events=sum(each.evicted for each in sums),
        soft=_soft(question, last),
    )
    return as_json(conversation_json(row) | state_json(last) | report)


def _soft(question: Question, last: ExchangeRow | None) -> dict[str, float]:
    """The shares of their caps at which buckets warn, as the policy of the last request has them now."""
    policies = question.runtime.config.policies
    if last is None or last.policy not in policies:
        return {}
    return {name: rule.soft for name, rule in question.runtime.policy(last.policy).buckets.items()}


async def timeline(question: Question) -> Answer:
    """The newest requests of a conversation, oldest first; ``cursor`` leads to older ones, ``since`` leaves newer."""
    limit, since = question.limit(), question.since()
    after = place_in(question.query.get("cursor"), float, str)
    row = await question.conversation()
    found = await question.store.timeline(row, limit=limit + 1, since=since, after=after)
    rows = found[-limit:]
    following = cursor_of((rows[0].at, rows[0].id)) if len(found) > limit else None
    return as_json({"data": [exchange_json(row) for row in rows], "next": following})


async def checkpoint(question: Question) -> Answer:
    """The newest version of the checkpoint."""
    return as_json(checkpoint_json(await _newest(question, await question.conversation())))


async def checkpoint_markdown(question: Question) -> Answer:
    """The newest version of the checkpoint, for people."""
    row = await _newest(question, await question.conversation())
    try:
        text = Checkpoint.from_json(row.body).to_markdown()
    except InvalidCheckpoint as error:
        raise NotFound(f"Version {row.version} was not written as a checkpoint: {error}.") from None
    return Answer(text.encode("utf-8", "replace"), kind=MARKDOWN)


async def checkpoints(question: Question) -> Answer:
    """The versions of the checkpoint, the newest first."""
    limit, after = question.limit(), place_in(question.query.get("cursor"), str, int)
    rows = (await saved(question, await question.conversation()))[::-1]

    def place(row: CheckpointRow) -> Place:
        return (row.branch, row.version)

    return listed(part_of(rows, limit, after, place), limit, version_json, place)


async def checkpoint_version(question: Question) -> Answer:
    """One version of the checkpoint."""
    version, row = question.version(), await question.conversation()
    found = await at_version(question, row, version)
    before = [each for each in await saved(question, row) if each.branch == found.branch and each.version < version]
    return as_json(checkpoint_json(found) | {"changed": changed_json(found, before[-1] if before else None)})


async def source(question: Question) -> Answer:
    """What a version's summary stands for: the messages as the client sent them, as one JSON array in pages."""
    tenant, cursor, version = question.own(READ), cursor_in(question), question.version()
    row = await at_version(question, await question.conversation(), version)
    if row.cut is None:
        raise NotFound(f"Version {version} was only saved ({row.reason}): it stands for no messages.")
    originals = await question.store.covered(tenant, row.cut.ref)
    if [each.ref for each in originals] != list(row.covered):
        by_ref = {ref: await question.store.original(tenant, ref) for ref in dict.fromkeys(row.covered)}
        originals = [found for ref in row.covered if (found := by_ref[ref]) is not None]
    if len(originals) < len(row.covered):
        there = f"{len(originals)} of the {len(row.covered)} messages that version {version} stands for"
        raise NotFound(f"Only {there} are still there: the store keeps digests only, or is damaged.")
    return await page(array_of([each.body for each in originals]), cursor)


async def removed(question: Question) -> Answer:
    """What is out of the conversation's window, why, since when, and where the original is."""
    limit, after = question.limit(), place_in(question.query.get("cursor"), str)
    row = await question.conversation()
    rows = await question.store.removed_after(row, None if after is None else str(after[0]), limit=limit + 1)
    if rows is None:
        raise gone()
    own = question.tenant is not None
    return listed(rows, limit, lambda row: removed_json(row, with_text=own), lambda row: (row.ref,))


async def notes(question: Question) -> Answer:
    """The notes on a conversation, oldest first."""
    limit, after = question.limit(), place_in(question.query.get("cursor"), str)
    row = await question.conversation()
    rows = await question.store.notes(row.tenant, row.id)

    def place(row: NoteRow) -> Place:
        return (row.id.hex(),)

    return listed(part_of(rows, limit, after, place), limit, note_json, place)


async def audit(question: Question) -> Answer:
    """What batches took out of the conversation's window or made shorter, and its rows in the audit, newest first."""
    limit, given = question.limit(), place_in(question.query.get("cursor"), float, str, int, int, int)
    row = await question.conversation()
    evicted, seen = (None, None) if given is None else (given[:4], given[4:])
    rows, told = list[EvictionRow](), list[AuditRow]()
    if evicted is None or evicted[1]:
        rows = await question.store.evictions(row.tenant, conversation=row, limit=limit + 1, after=evicted)
    if seen is None or seen[0]:
        told = await question.store.audit(row.tenant, conversation=row.id, limit=limit + 1, after=seen)
    following = None
    if len(rows) > limit or len(told) > limit:
        last = rows[limit - 1] if len(rows) > limit else None
        place = ENDED if last is None else (last.at, last.branch, last.version, last.position)
        following = cursor_of((*place, told[limit - 1].seq if len(told) > limit else 0))
    shown = {"data": [eviction_json(each) for each in rows[:limit]], "events": [audit_json(e) for e in told[:limit]]}
    return as_json({**shown, "next": following})


async def search(question: Question) -> Answer:
    """Removed messages with all the words that are asked for, else with any of them, best first."""
    tenant, words, name = question.own(READ), question.query.get("q", ""), question.query.get("conversation")
    if not words.strip():
        raise InvalidRequest("q should say what to search for.", param="q")
    if len(words) > LONGEST_QUERY:
        raise InvalidRequest(f"q may have up to {LONGEST_QUERY} characters.", param="q")
    limit, after = question.limit(), place_in(question.query.get("cursor"), int)
    start = 0 if after is None else min(FOUND_AT_MOST, max(0, int(after[0])))
    within = None if name is None else (await question.conversation_named(name)).id
    most = min(FOUND_AT_MOST, start + limit + 1)
    found = await question.store.search(tenant, words, limit=most, conversation=within)
    numbered = list(enumerate(found))[start:]
    return listed(numbered, limit, lambda each: found_json(each[1]), lambda each: (each[0] + 1,))


async def saved(question: Question, row: ConversationRow) -> list[CheckpointRow]:
    """Every version of a conversation's checkpoint, oldest first."""
    return [each for each in await question.store.checkpoints(row) if each.body]


async def at_version(question: Question, row: ConversationRow, version: int) -> CheckpointRow:
    """One version of a conversation's checkpoint. Raises NotFound with the versions that there are."""
    found = await question.store.checkpoint_at(row, version)
    if found is None:
        raise await no_version(question, row, version)
    return found


async def no_version(question: Question, row: ConversationRow, version: int) -> NotFound:
    """The error that says which versions there are."""
    versions = sorted({each.version for each in await saved(question, row)})[-VERSIONS_SHOWN:]
    there = f"there are {', '.join(map(str, versions))}" if versions else "none was saved yet"
    return NotFound(f"There is no version {version} of the checkpoint: {there}.", weir={"versions": versions})


async def _newest(question: Question, row: ConversationRow) -> CheckpointRow:
    found = await question.store.latest_checkpoint(row.tenant, row.id)
    newest = None if found is None else (found[1].branch, found[1].version)
    for each in reversed(await saved(question, row)) if newest is not None else ():
        if (each.branch, each.version) == newest:
            return each
    raise NotFound(f"Conversation {row.name[:80]!r} has no checkpoint: nothing was compacted or saved in it yet.")
