"""What the management API tells of health: open alerts, and one conversation's metrics, trend and alerts."""

from dataclasses import asdict

from policies.health import KEPT, trend_of
from proxy.routes.question import Answer, Question, as_json
from proxy.routes.rows import alert_json, snapshot_json

LISTED = 200
LEVELS = ("critical", "warning", "info")
FINE = "ok"


async def health(question: Question) -> Answer:
    """The open alerts over the caller's conversations, the newest first, and how many there are of each level."""
    rows, counts = await question.store.open_alerts(question.tenant, limit=question.limit(LISTED))
    return as_json(
        {
            "status": next((level for level in LEVELS if counts.get(level)), FINE),
            "open": {level: counts.get(level, 0) for level in LEVELS},
            "data": [alert_json(row) for row in rows],
        }
    )


async def health_of(question: Question) -> Answer:
    """The six metrics of one conversation, where they are heading, and its alerts."""
    limit = question.limit(KEPT, most=KEPT)
    row = await question.conversation()
    snapshots = await question.store.snapshots(row)
    alerts = await question.store.alerts(row)
    opened = [alert for alert in alerts if alert.closed is None]
    return as_json(
        {
            "conversation": row.name,
            "status": next((level for level in LEVELS if any(a.level == level for a in opened)), FINE),
            "snapshot": snapshot_json(snapshots[-1]) if snapshots else None,
            "trend": asdict(trend_of(snapshots)),
            "alerts": [alert_json(alert) for alert in alerts],
            "history": [snapshot_json(each) for each in snapshots[-limit:]],
        }
    )
