"""What conversations took and how they fare: ``weir usage`` by key, ``weir health``."""

from collections.abc import Mapping
from typing import get_args

import click

from policies.health import KEPT, HealthTrend, Snapshot, trend_of
from proxy.cli.output import print_columns, print_table
from proxy.cli.shared import Findings, found, key_names, moment, reads, since_option, tame
from proxy.config.values import Config
from proxy.http.reports import alert_of, conversation_health, open_alerts, taken, taken_by
from proxy.http.request import Page
from proxy.store import Store
from proxy.store.exchanges import By
from proxy.store.records import AlertRow, ConversationRow


@click.command()
@since_option("30d", "Seconds since 1970, or like 90m, 24h or 7d.")
@click.option("--by", type=click.Choice(get_args(By)), help="Also group by this.")
@click.option("--key", metavar="NAME", help="Only the key with this name.")
@reads
async def usage(store: Store, config: Config, *, since: float, by: By | None, key: str | None) -> Findings:
    """Show usage by key: tokens before and after Weir, tokens saved, and costs.

    Deleted conversations and requests older than the store's retention are no longer counted.

    \b
    Example:
      weir usage
      weir usage --since 7d --by model --key support-bot
    """
    rows = await store.usage(None, since=since, by=by)
    names = await key_names(store, config) if rows else {}
    rows = [row for row in rows if key is None or names.get(row.tenant) == key]
    data, total = [taken_by(row, by=by, names=names).plain() for row in rows], taken(rows).plain()

    def show() -> None:
        if not rows:
            return click.echo("No requests since then.", err=True)
        named = [(names.get(row.tenant, row.tenant[:8]), row.group or "") for row in rows]
        lines = [(*of, *_cells(figures)) for of, figures in zip(named, data, strict=True)]
        if len(rows) > 1:
            lines.append(("all", "", *_cells(total)))
        return print_table(("key", by or "", *FIGURES), lines, optional=() if by else ("",))

    return Findings(lambda: {"since": since, "by": by, "total": total, "data": data}, show)


FIGURES = (
    "requests", "failed", "tokens", "forwarded", "saved", "cached", "answers", "cost", "saved $", "summaries $",
)  # fmt: skip


def _cells(figures: Mapping[str, object]) -> list[str]:
    before, saved = figures["tokens_before"], figures["tokens_saved"]
    share = f"{saved / before:.0%}" if isinstance(saved, int) and isinstance(before, int) and before else "-"
    counts = [f"{figures[name]:,}" for name in ("requests", "failed", "tokens_before", "tokens_after")]
    dollars = ["-" if figures[n] is None else f"{figures[n]:.4f}" for n in ("cost", "cost_saved", "summarizer_cost")]
    return [*counts, share, f"{figures['cached']:,}", f"{figures['completion']:,}", *dollars]


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
@reads
async def health(store: Store, _: Config, *, name: str | None) -> Findings:
    """Show a conversation's six health metrics, their trend and its alerts, by name or id.

    Without a name, show the open alerts of all keys.

    \b
    Example:
      weir health
      weir health support-4711
      weir health support-4711 --json
    """
    if name is not None:
        row = await found(store, name)
        return _health(row, await store.snapshots(row), await store.alerts(row))
    alerts, counts = await store.open_alerts(None, limit=MAX_OPEN)

    def value() -> dict[str, object]:
        shown = open_alerts(Page(data=[alert_of(alert) for alert in alerts], next=None), counts).plain()
        del shown["next"]  # all of them are here
        return shown

    def show() -> None:
        if not alerts:
            return click.echo("There are no open alerts.")
        return print_columns(alerts, SINCE | {"conversation": lambda alert: alert.conversation} | ALERT)

    return Findings(value, show)


def _health(row: ConversationRow, snapshots: list[Snapshot], alerts: list[AlertRow]) -> Findings:
    def show() -> None:
        if not snapshots:
            return click.echo(f"There is no health data for {tame(row.name)} yet.", err=True)
        last = snapshots[-1]
        metrics = [(metric, _value(metric, getattr(last, metric)), healthy) for metric, healthy in HEALTHY.items()]
        print_table(("metric", "now", "healthy"), metrics)
        click.echo(f"\nTrend: {_trend(trend_of(snapshots))}\n")
        if not alerts:
            return click.echo("No alerts.")
        until = {"until": lambda alert: "open" if alert.closed is None else moment(alert.closed)}
        return print_columns(alerts[:ALERTS_SHOWN], SINCE | until | ALERT)

    return Findings(lambda: conversation_health(row, snapshots, alerts, limit=KEPT).plain(), show)


SINCE = {"since (UTC)": lambda alert: moment(alert.at)}
ALERT = {
    "level": lambda alert: alert.level,
    "class": lambda alert: alert.category,
    "alert": lambda alert: alert.kind,
    "": lambda alert: alert.said,
}


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
