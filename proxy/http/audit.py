"""The audit as the management API shows it: of everything, and of one conversation with what was taken out of it."""

from typing import Annotated, Any

from msgspec import Meta

from proxy.http.request import ManagementRequest, cursor_of, page
from proxy.http.shape import Count, Digest, Moment, Page, Ref, Shape, Tokens
from proxy.store import AuditRow
from proxy.store.chain import AuditType
from proxy.store.records import EvictionRow
from proxy.store.transaction import Place

ENDED = (0, "", 0, 0)
"""The place in a list of evictions that has come to its end before the list beside it."""


class Eviction(Shape):
    """One thing that a batch took out or made shorter."""

    digest: Digest
    occurrence: Count
    kind: str
    layer: str
    policy: str
    tokens_before: Tokens
    tokens_after: Tokens
    tokens_remaining: Tokens
    scorer: str
    tool: str
    call_hash: Digest
    tenant: str
    conversation: str
    branch: str
    version: Count
    position: Count
    at: Moment
    asked_again_at: Moment | None
    asked_again_count: Count
    ref: Ref
    freed: int


class Audited(Shape):
    """One row of the audit with all that its hash covers."""

    tenant: str
    seq: Annotated[int, Meta(ge=1)]
    at: Moment
    type: str
    conversation: str
    branch: str
    request: str
    sealed: Count
    facts: Any
    prev: Digest
    hash: Digest


class ConversationAudit(Shape):
    """What batches took out of the window or made shorter, and the conversation's rows in the audit, newest first."""

    data: list[Eviction]
    events: list[Audited]
    next: str | None


async def audit(asked: ManagementRequest) -> Page[Audited]:
    """The rows of the caller's audit, newest first, those of deleted conversations included; for the operator of all.

    ``type`` leaves one kind of row.
    """
    limit, kind = asked.limit(), asked.word("type", tuple(map(str, AuditType)))
    of_all = asked.tenant is None
    after = asked.after(float, str, int) if of_all else asked.after(int)
    rows = await asked.store.audit(asked.tenant, kind=kind, limit=limit + 1, after=after)

    def place(row: AuditRow) -> Place:
        return (row.at, row.tenant, row.seq) if of_all else (row.seq,)

    return page(rows, limit, _audited, place)


async def conversation_audit(asked: ManagementRequest) -> ConversationAudit:
    """What batches took out of the conversation's window or made shorter, and its rows in the audit, newest first."""
    limit, given = asked.limit(), asked.after(float, str, int, int, int)
    row = await asked.conversation()
    evicted, seen = (None, None) if given is None else (given[:4], given[4:])
    rows, told = list[EvictionRow](), list[AuditRow]()
    if evicted is None or evicted[1]:
        rows = await asked.store.evictions(row.tenant, conversation=row, limit=limit + 1, after=evicted)
    if seen is None or seen[0]:
        told = await asked.store.audit(row.tenant, conversation=row.id, limit=limit + 1, after=seen)
    following = None
    if len(rows) > limit or len(told) > limit:
        last = rows[limit - 1] if len(rows) > limit else None
        place = ENDED if last is None else (last.at, last.branch, last.version, last.position)
        following = cursor_of((*place, told[limit - 1].seq if len(told) > limit else 0))
    return ConversationAudit(
        data=[Eviction.of(each, ref=each.digest.hex()[:12]) for each in rows[:limit]],
        events=[_audited(each) for each in told[:limit]],
        next=following,
    )


def _audited(row: AuditRow) -> Audited:
    return Audited.of(row, facts=row.told)
