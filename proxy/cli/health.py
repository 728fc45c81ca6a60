"""``weir health``: how well a conversation is kept."""

import datetime as dt
from pathlib import Path
from typing import Any

import click
from rich.table import Table
from rich.text import Text

from policies.health import KEPT, HealthTrend, Snapshot, trend_of
from proxy.cli.config import config_option, console, json_option, loaded, print_json
from proxy.cli.conversations_read import found, reading, store_option
from proxy.config import Flags
from proxy.http.alerts import alert_of, conversation_health, open_alerts
from proxy.http.shape import Page
from proxy.store import Store
from proxy.store.records import AlertRow, ConversationRow

ALERTS_SHOWN = 20
MOST_OPEN = 500
PLAIN: dict[str, Any] = {"box": None, "pad_edge": False, "header_style": "bold"}
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
@config_option
@store_option
@json_option
def health(name: str | None, path: Path | None, store: str | None, *, as_json: bool) -> None:
    """One conversation's six health metrics, where they are heading, and its alerts; by its name or id.

    Without a name the alerts that are open, of all keys.

    \b
    Example:
      weir health
      weir health support-4711
      weir health support-4711 --json
    """
    url = loaded(path, Flags(store=store)).store.url
    if name is None:
        _show_open(*reading(url, lambda opened: opened.open_alerts(None, limit=MOST_OPEN)), as_json=as_json)
    else:
        _show_one(url, name, as_json=as_json)


def _show_open(alerts: list[AlertRow], counts: dict[str, int], *, as_json: bool) -> None:
    """The alerts that are open, the newest first."""
    if as_json:
        shown = open_alerts(Page(data=[alert_of(alert) for alert in alerts], next=None), counts).plain()
        del shown["next"]  # all of them are here
        print_json(shown)
    elif not alerts:
        click.echo("No alert is open.")
    else:
        table = Table("since (UTC)", "conversation", "level", "class", "alert", "", **PLAIN)
        for alert in alerts:
            whose = Text(_plain(alert.conversation))
            table.add_row(_moment(alert.at), whose, alert.level, alert.category, alert.kind, Text(alert.said))
        console().print(table)


def _show_one(url: str, name: str, *, as_json: bool) -> None:
    """One conversation's metrics, trend and alerts."""

    async def read(opened: Store) -> tuple[ConversationRow, list[Snapshot], list[AlertRow]]:
        row = await found(opened, name)
        return row, await opened.snapshots(row), await opened.alerts(row)

    row, snapshots, alerts = reading(url, read)
    trend = trend_of(snapshots)
    if as_json:
        print_json(conversation_health(row, snapshots, alerts, limit=KEPT).plain())
    elif not snapshots:
        click.echo(f"Nothing is known of the health of {_plain(row.name)} yet.", err=True)
    else:
        _show(snapshots[-1], trend, alerts)


def _show(last: Snapshot, trend: HealthTrend, alerts: list[AlertRow]) -> None:
    table = Table("metric", "now", "healthy", box=None, pad_edge=False, header_style="bold")
    for name, healthy in HEALTHY.items():
        table.add_row(name, _value(name, getattr(last, name)), healthy)
    console().print(table)
    click.echo(f"\nTrend: {_trend(trend)}\n")
    if not alerts:
        click.echo("No alerts.")
        return
    listed = Table("since (UTC)", "until", "level", "class", "alert", "", box=None, pad_edge=False, header_style="bold")
    for alert in alerts[:ALERTS_SHOWN]:
        until = "open" if alert.closed is None else _moment(alert.closed)
        listed.add_row(_moment(alert.at), until, alert.level, alert.category, alert.kind, Text(alert.said))
    console().print(listed)


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


def _plain(name: str) -> str:
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in name)


def _moment(at: float) -> str:
    return dt.datetime.fromtimestamp(at, tz=dt.UTC).strftime("%Y-%m-%d %H:%M:%S")
