"""``weir health``: how well a conversation is kept."""

import click

from policies.quality.health import KEPT, HealthTrend, Snapshot, trend_of
from proxy.cli.output import moment, print_json, print_table, tame
from proxy.cli.stored import found, json_option, reading, stored
from proxy.config import Config
from proxy.http.alerts import alert_of, conversation_health, open_alerts
from proxy.http.shape import Page
from proxy.store import Store
from proxy.store.records import AlertRow, ConversationRow

ALERTS_SHOWN = 20
MAX_OPEN = 500
HEALTHY = {
    "utilization": "under 60%",
    "eviction_rate": "under 2 a request",
    "compression_ratio": "3 to 15",
    "burn_rate": "steady",
    "fidelity_score": "over 85%",
    "tool_result_bloat": "10 to 15%",
}


@click.command()
@click.argument("name", metavar="[ID]", required=False)
@stored
@json_option
def health(config: Config, name: str | None, *, as_json: bool) -> None:
    """Show a conversation's six health metrics, their trend and its alerts, by name or id.

    Without a name, show the open alerts of all keys.

    \b
    Example:
      weir health
      weir health support-4711
      weir health support-4711 --json
    """
    if name is not None:
        return _show_one(config, name, as_json=as_json)
    alerts, counts = reading(config, lambda store: store.open_alerts(None, limit=MAX_OPEN))
    if as_json:
        shown = open_alerts(Page(data=[alert_of(alert) for alert in alerts], next=None), counts).plain()
        del shown["next"]  # all of them are here
        return print_json(shown)
    if not alerts:
        return click.echo("There are no open alerts.")
    rows = [(moment(a.at), a.conversation, a.level, a.category, a.kind, a.said) for a in alerts]
    return print_table(("since (UTC)", "conversation", "level", "class", "alert", ""), rows)


def _show_one(config: Config, name: str, *, as_json: bool) -> None:
    async def read(store: Store) -> tuple[ConversationRow, list[Snapshot], list[AlertRow]]:
        row = await found(store, name)
        return row, await store.snapshots(row), await store.alerts(row)

    row, snapshots, alerts = reading(config, read)
    if as_json:
        return print_json(conversation_health(row, snapshots, alerts, limit=KEPT).plain())
    if not snapshots:
        return click.echo(f"There is no health data for {tame(row.name)} yet.", err=True)
    last = snapshots[-1]
    metrics = [(metric, _value(metric, getattr(last, metric)), healthy) for metric, healthy in HEALTHY.items()]
    print_table(("metric", "now", "healthy"), metrics)
    click.echo(f"\nTrend: {_trend(trend_of(snapshots))}\n")
    if not alerts:
        return click.echo("No alerts.")
    rows = [
        (moment(a.at), "open" if a.closed is None else moment(a.closed), a.level, a.category, a.kind, a.said)
        for a in alerts[:ALERTS_SHOWN]
    ]
    return print_table(("since (UTC)", "until", "level", "class", "alert", ""), rows)


def _trend(trend: HealthTrend) -> str:
    if trend.utilization_delta is None:
        return f"{trend.trend} ({trend.samples} requests)"
    burn = "-" if trend.burn_rate_delta is None else f"{trend.burn_rate_delta:+,.1f} tokens a request"
    fidelity = "" if trend.avg_fidelity is None else f", fidelity {trend.avg_fidelity:.0%}"
    return f"{trend.trend}: utilization {trend.utilization_delta:+.1%}, burn rate {burn}{fidelity} over {trend.samples}"


def _value(name: str, value: float | None) -> str:
    if value is None:
        return "-"
    if name in {"utilization", "fidelity_score", "tool_result_bloat"}:
        return f"{value:.1%}"
    return f"{value:,.1f}"
