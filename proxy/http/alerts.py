"""What the management API tells of health: open alerts, and one conversation's metrics, trend and alerts."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from policies.quality.health import Category, HealthTrend, Level, Snapshot, trend_of
from proxy.http.request import ManagementRequest, page
from proxy.http.shape import Count, Moment, Page, Shape, Share
from proxy.store.records import AlertRow, ConversationRow

Status = Literal["ok", "critical", "warning", "info"]
LEVELS: tuple[Level, ...] = ("critical", "warning", "info")


class Alert(Shape):
    """One alert; closed is null while it is open."""

    kind: str
    level: Level
    category: Category = msgspec.field(name="class")
    conversation: str
    at: Moment
    closed: Moment | None
    value: float
    threshold: float
    said: str


def alert_of(row: AlertRow) -> Alert:
    """One alert."""
    return Alert.of(row, value=round(row.value, 4), threshold=row.limit)


class Reading(Shape):
    """The six health metrics after one request; what was not measured is null."""

    at: Moment
    utilization: Share
    eviction_rate: Annotated[float, Meta(ge=0)]
    compression_ratio: float | None
    burn_rate: float | None
    fidelity_score: Share | None
    tool_result_bloat: Share
    window_id: Annotated[int, Meta(ge=1)]


def reading_of(snapshot: Snapshot) -> Reading:
    """The health metrics after one request, shares and ratios with three decimals."""
    values: dict[str, Any] = snapshot._asdict()
    measured = {name: round(each, 3) for name, each in values.items() if isinstance(each, float)}
    return Reading.of(snapshot, **{**measured, "at": snapshot.at})


class ConversationHealth(Shape):
    """How well one conversation is kept, and where that is heading."""

    conversation: str
    status: Status
    snapshot: Reading | None
    trend: HealthTrend
    alerts: list[Alert]
    history: list[Reading]


def conversation_health(
    row: ConversationRow, snapshots: Sequence[Snapshot], alerts: Sequence[AlertRow], *, limit: int
) -> ConversationHealth:
    """The health of a conversation by its snapshots, oldest first, of which the newest ``limit`` are shown."""
    opened = {alert.level for alert in alerts if alert.closed is None}
    return ConversationHealth(
        conversation=row.name,
        status=next((level for level in LEVELS if level in opened), "ok"),
        snapshot=reading_of(snapshots[-1]) if snapshots else None,
        trend=trend_of(snapshots),
        alerts=[alert_of(alert) for alert in alerts],
        history=[reading_of(each) for each in snapshots[-limit:]],
    )


class Open(Shape):
    """How many alerts are open, by level."""

    critical: Count
    warning: Count
    info: Count


class OpenAlerts(Shape):
    """The open alerts, and the gravest level among them."""

    status: Status
    open: Open
    data: list[Alert]
    next: str | None


def open_alerts(found: Page[Alert], counts: Mapping[str, int]) -> OpenAlerts:
    """A page of open alerts; ``counts`` are how many there are of each level, on all pages."""
    return OpenAlerts(
        status=next((level for level in LEVELS if counts.get(level)), "ok"),
        open=Open(**{level: counts.get(level, 0) for level in LEVELS}),
        data=found.data,
        next=found.next,
    )


async def health(asked: ManagementRequest) -> OpenAlerts:
    """The open alerts over the caller's conversations, the newest first, and how many there are of each level."""
    limit, after = asked.limit(), asked.after(float, str, str, str)
    rows, counts = await asked.store.open_alerts(asked.tenant, limit=limit + 1, after=after)
    found = page(rows, limit, alert_of, lambda row: (row.at, row.kind, row.tenant, row.conversation))
    return open_alerts(found, counts)


async def health_of(asked: ManagementRequest) -> ConversationHealth:
    """The six metrics of one conversation, where they are heading, and its alerts."""
    limit = asked.limit()
    row = await asked.conversation()
    snapshots = await asked.store.snapshots(row)
    return conversation_health(row, snapshots, await asked.store.alerts(row), limit=limit)
