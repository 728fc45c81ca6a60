"""Health and alerts over the management API."""

import dataclasses
from collections.abc import Sequence

from policies.health import KEPT, Level, Snapshot, trend_of
from proxy.http.request import Json, ManagementRequest, page
from proxy.http.routes import CONVERSATION, PAGED, ManagementRoute
from proxy.store.records import AlertRow, ConversationRow

LEVELS: tuple[Level, ...] = ("critical", "warning", "info")


def alert_of(row: AlertRow) -> Json:
    """One alert; closed is None while it is open."""
    return {
        "kind": row.kind,
        "level": row.level,
        "class": row.category,
        "conversation": row.conversation,
        "at": row.at,
        "closed": row.closed,
        "value": round(row.value, 4),
        "threshold": row.limit,
        "said": row.said,
    }


def reading_of(snapshot: Snapshot) -> Json:
    """The six health metrics after one request; what was not measured is None."""
    values: Json = snapshot._asdict()
    measured = {name: round(each, 3) for name, each in values.items() if isinstance(each, float)}
    return {**values, **measured, "at": snapshot.at}


def conversation_health(
    row: ConversationRow, snapshots: Sequence[Snapshot], alerts: Sequence[AlertRow], *, limit: int
) -> Json:
    """How well one conversation is kept, and where that is heading."""
    opened = {alert.level for alert in alerts if alert.closed is None}
    return {
        "conversation": row.name,
        "status": next((level for level in LEVELS if level in opened), "ok"),
        "snapshot": reading_of(snapshots[-1]) if snapshots else None,
        "trend": dataclasses.asdict(trend_of(snapshots)),
        "alerts": [alert_of(alert) for alert in alerts],
        "history": [reading_of(each) for each in snapshots[-limit:]],
    }


async def open_alerts(request: ManagementRequest) -> Json:
    """The open alerts over the caller's conversations, the newest first, and how many there are of
    each level.
    """
    limit = request.limit()
    after = request.after(float, str, str, str)
    rows, counts = await request.store.open_alerts(request.tenant, limit=limit + 1, after=after)
    found = page(
        rows, limit, alert_of, lambda row: (row.at, row.kind, row.tenant, row.conversation)
    )
    status = next((level for level in LEVELS if counts.get(level)), "ok")
    return {"status": status, "open": {level: counts.get(level, 0) for level in LEVELS}, **found}


async def health_of(request: ManagementRequest) -> Json:
    """The six metrics of one conversation, where they are heading, and its alerts."""
    limit = request.limit()
    row = await request.conversation()
    snapshots = await request.store.snapshots(row)
    return conversation_health(row, snapshots, await request.store.alerts(row), limit=limit)


ROUTES = (
    ManagementRoute("GET", "health", open_alerts, PAGED),
    ManagementRoute("GET", f"{CONVERSATION}/health", health_of, ("limit",), rows=KEPT, most=KEPT),
)
