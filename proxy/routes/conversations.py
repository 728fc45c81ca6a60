"""What the management API tells about conversations: how full they are, what stands for them, what was removed."""

from policies.checkpoint import Checkpoint, InvalidCheckpoint
from proxy.errors import InvalidRequest, NotFound
from proxy.routes.blobs import READ, array_of, cursor_in, page
from proxy.routes.question import MOST_NAMES, Answer, Question, as_json
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
from proxy.store.records import CheckpointRow, ConversationRow, ExchangeRow

MARKDOWN = b"text/markdown; charset=utf-8"
LISTED = 50
ROWS = 200
FOUND = 20
LONGEST_QUERY = 1_000
VERSIONS_SHOWN = 50


async def listing(question: Question) -> Answer:
    """The caller's conversations, the one used last first; ``closed`` leaves those that are, or are not."""
    limit, closed = question.limit(LISTED), question.flag("closed")
    rows = await question.store.conversations(question.tenant, limit=limit if closed is None else MOST_NAMES)
    chosen = [row for row in rows if closed is None or (row.closed is not None) is closed]
    return as_json({"data": [conversation_json(row) for row in chosen[:limit]]})


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
    """The newest requests of a conversation, oldest first."""
    limit = question.limit(ROWS)
    rows = await question.store.timeline(await question.conversation(), limit=limit)
    return as_json({"data": [exchange_json(row) for row in rows]})


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
    limit = question.limit(ROWS)
    rows = await saved(question, await question.conversation())
    return as_json({"data": [version_json(row) for row in reversed(rows[-limit:])]})


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
    limit = question.limit(ROWS)
    rows = await question.store.removed(await question.conversation(), limit=limit)
    return as_json({"data": [removed_json(row, with_text=question.tenant is not None) for row in rows]})


async def notes(question: Question) -> Answer:
    """The notes on a conversation, oldest first."""
    row = await question.conversation()
    rows = await question.store.notes(row.tenant, row.id)
    return as_json({"data": [note_json(row) for row in rows]})


async def audit(question: Question) -> Answer:
    """What batches took out of the conversation's window or made shorter, and its rows in the audit, newest first."""
    limit = question.limit(ROWS)
    row = await question.conversation()
    rows = await question.store.evictions(row.tenant, conversation=row, limit=limit)
    told = await question.store.audit(row.tenant, conversation=row.id, limit=limit)
    return as_json({"data": [eviction_json(each) for each in rows], "events": [audit_json(each) for each in told]})


async def search(question: Question) -> Answer:
    """Removed messages with all the words that are asked for, else with any of them, best first."""
    tenant, words, name = question.own(READ), question.query.get("q", ""), question.query.get("conversation")
    if not words.strip():
        raise InvalidRequest("q should say what to search for.", param="q")
    if len(words) > LONGEST_QUERY:
        raise InvalidRequest(f"q may have up to {LONGEST_QUERY} characters.", param="q")
    limit = question.limit(FOUND)
    within = None if name is None else (await question.conversation_named(name)).id
    found = await question.store.search(tenant, words, limit=limit, conversation=within)
    return as_json({"data": [found_json(each) for each in found]})


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
