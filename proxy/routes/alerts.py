"""What the management API tells of health: open alerts, and one conversation's metrics, trend and alerts."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict

from policies.health import Snapshot, trend_of
from proxy.routes.pages import listed, place_in
from proxy.routes.question import Answer, Question, as_json
from proxy.routes.rows import alert_json, snapshot_json
from proxy.store.records import AlertRow, ConversationRow

LEVELS = ("critical", "warning", "info")
FINE = "ok"


async def health(question: Question) -> Answer:
    """The open alerts over the caller's conversations, the newest first, and how many there are of each level."""
    limit, after = question.limit(), place_in(question.query.get("cursor"), float, str, str, str)
    rows, counts = await question.store.open_alerts(question.tenant, limit=limit + 1, after=after)
    return listed(
        rows,
        limit,
        alert_json,
        lambda row: (row.at, row.kind, row.tenant, row.conversation),
        **_counted(counts),
    )


async def health_of(question: Question) -> Answer:
    """The six metrics of one conversation, where they are heading, and its alerts."""
    limit = question.limit()
    row = await question.conversation()
    snapshots = await question.store.snapshots(row)
    return as_json(health_json(row, snapshots, await question.store.alerts(row), limit=limit))


def health_json(
    row: ConversationRow, snapshots: Sequence[Snapshot], alerts: Sequence[AlertRow], *, limit: int
) -> dict[str, object]:
    """The health of a conversation by its snapshots, oldest first, of which the newest ``limit`` are shown."""
    opened = {alert.level for alert in alerts if alert.closed is None}
    return {
        "conversation": row.name,
        "status": next((level for level in LEVELS if level in opened), FINE),
        "snapshot": snapshot_json(snapshots[-1]) if snapshots else None,
        "trend": asdict(trend_of(snapshots)),
        "alerts": [alert_json(alert) for alert in alerts],
        "history": [snapshot_json(each) for each in snapshots[-limit:]],
    }


def open_json(rows: Sequence[AlertRow], counts: Mapping[str, int]) -> dict[str, object]:
    """How many alerts are open, by level, the gravest of these, and the alerts themselves."""
    return {**_counted(counts), "data": [alert_json(row) for row in rows]}


def _counted(counts: Mapping[str, int]) -> dict[str, object]:
    status = next((level for level in LEVELS if counts.get(level)), FINE)
    return {"status": status, "open": {level: counts.get(level, 0) for level in LEVELS}}
