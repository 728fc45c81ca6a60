"""The audit over the management API: what was done to which conversation, and when."""

from proxy.http.request import Json, ManagementRequest, cursor_of, fields_of, page
from proxy.http.routes import CONVERSATION, PAGED, ManagementRoute
from proxy.store.chain import AuditRow, AuditType
from proxy.store.records import EvictionRow
from proxy.store.transaction import Place

ENDED = (0, "", 0, 0)
"""The place in a list of evictions that has ended before the list next to it."""


async def audit_rows(request: ManagementRequest) -> Json:
    """The rows of the caller's audit, newest first, those of deleted conversations included; for
    the operator of all.

    ``type`` leaves one kind of row.
    """
    limit = request.limit()
    kind = request.word("type", tuple(map(str, AuditType)))
    of_all = request.tenant is None
    after = request.after(float, str, int) if of_all else request.after(int)
    rows = await request.store.audit(request.tenant, kind=kind, limit=limit + 1, after=after)

    def place(row: AuditRow) -> Place:
        return (row.at, row.tenant, row.seq) if of_all else (row.seq,)

    return page(rows, limit, _audited, place)


async def conversation_audit(request: ManagementRequest) -> Json:
    """What batches took out of the conversation's window or made shorter, and its rows in the
    audit, newest first.
    """
    limit = request.limit()
    given = request.after(float, str, int, int, int)
    row = await request.conversation()
    evicted, seen = (None, None) if given is None else (given[:4], given[4:])
    rows = list[EvictionRow]()
    events = list[AuditRow]()
    if evicted is None or evicted[1]:
        rows = await request.store.evictions(
            row.tenant, conversation=row, limit=limit + 1, after=evicted
        )
    if seen is None or seen[0]:
        events = await request.store.audit(
            row.tenant, conversation=row.id, limit=limit + 1, after=seen
        )
    following = None
    if len(rows) > limit or len(events) > limit:
        last = rows[limit - 1] if len(rows) > limit else None
        place = ENDED if last is None else (last.at, last.branch, last.version, last.position)
        following = cursor_of((*place, events[limit - 1].seq if len(events) > limit else 0))
    return {
        "data": [
            fields_of(each, ref=each.digest.hex()[:12], freed=each.freed) for each in rows[:limit]
        ],
        "events": [_audited(each) for each in events[:limit]],
        "next": following,
    }


def _audited(row: AuditRow) -> Json:
    return fields_of(row, facts=row.told)


ROUTES = (
    ManagementRoute("GET", "audit", audit_rows, ("type", *PAGED)),
    ManagementRoute("GET", f"{CONVERSATION}/audit", conversation_audit, PAGED),
)
