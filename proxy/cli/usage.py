"""What conversations took and how they fare: ``weir usage`` by key, ``weir budget`` by bucket, ``weir health``."""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import get_args

import click

from policies.pressure import SOFT
from policies.quality.advise import BucketUse, ToolUse, Traffic, advise_budget, worst_tools
from policies.quality.health import KEPT, HealthTrend, Snapshot, trend_of
from proxy.cli.output import print_table
from proxy.cli.shared import found, json_option, key_names, moment, print_json, reading, stored, tame
from proxy.config import Config
from proxy.errors import InvalidRequest
from proxy.http.conversations import tokens_by_bucket
from proxy.http.reports import alert_of, conversation_health, open_alerts, taken, taken_by
from proxy.http.request import Page, moment_in
from proxy.store import Store
from proxy.store.exchanges import By
from proxy.store.records import AlertRow, ConversationRow, ExchangeRow, UsageRow


@click.command()
@click.option("--since", default="30d", show_default=True, help="Seconds since 1970, or like 90m, 24h or 7d.")
@click.option("--by", type=click.Choice(get_args(By)), help="Also group by this.")
@click.option("--key", metavar="NAME", help="Only the key with this name.")
@stored
@json_option
def usage(config: Config, *, since: str, by: By | None, key: str | None, as_json: bool) -> None:
    """Show usage by key: tokens before and after Weir, tokens saved, and costs.

    Deleted conversations and requests older than the store's retention are no longer counted.

    \b
    Example:
      weir usage
      weir usage --since 7d --by model --key support-bot
    """
    try:
        start = moment_in(since, now=time.time())
    except InvalidRequest as fault:
        raise click.BadParameter(fault.message, param_hint="--since") from fault

    async def read(store: Store) -> tuple[list[UsageRow], dict[str, str]]:
        rows = await store.usage(None, since=start, by=by)
        return rows, await key_names(store, config) if rows else {}

    rows, names = reading(config, read)
    if key is not None:
        rows = [row for row in rows if names.get(row.tenant) == key]
    if as_json:
        data = [taken_by(row, by=by, names=names).plain() for row in rows]
        return print_json({"since": start, "by": by, "total": taken(rows).plain(), "data": data})
    if not rows:
        return click.echo("No requests since then.", err=True)
    lines = [
        (names.get(row.tenant, row.tenant[:8]), row.group or "", *_cells(taken_by(row, by=by, names=names).plain()))
        for row in rows
    ]
    if len(rows) > 1:
        lines.append(("all", "", *_cells(taken(rows).plain())))
    titles = (
        "requests",
        "failed",
        "tokens",
        "forwarded",
        "saved",
        "cached",
        "answers",
        "cost",
        "saved $",
        "summaries $",
    )
    group = by or ""
    return print_table(("key", group, *titles), lines, optional=() if by else (group,))


def _cells(figures: Mapping[str, object]) -> list[str]:
    before, saved = figures["tokens_before"], figures["tokens_saved"]
    share = f"{saved / before:.0%}" if isinstance(saved, int) and isinstance(before, int) and before else "-"
    counts = [f"{figures[name]:,}" for name in ("requests", "failed", "tokens_before", "tokens_after")]
    dollars = ["-" if figures[n] is None else f"{figures[n]:.4f}" for n in ("cost", "cost_saved", "summarizer_cost")]
    return [*counts, share, f"{figures['cached']:,}", f"{figures['completion']:,}", *dollars]


REQUESTS_READ = 1_000


@click.group()
def budget() -> None:
    """Advise on how to divide the window.

    \b
    Example:
      weir budget advise
    """


@budget.command()
@click.option(
    "--limit", type=click.IntRange(min=1), default=200, show_default=True, help="How many conversations, newest first."
)
@click.option("--policy", metavar="P", help="Only requests with this policy.")
@stored
@json_option
def advise(config: Config, *, limit: int, policy: str | None, as_json: bool) -> None:
    """Show which bucket keeps exceeding its soft limit, and which tools take the most tokens.

    A bucket counts if it exceeds its limit in half of the requests of half of the conversations; at least ten
    conversations must be recorded. Nothing is changed.

    \b
    Example:
      weir budget advise --policy support
    """

    async def read(store: Store) -> list[list[ExchangeRow]]:
        rows = await store.conversations(None, limit=limit)
        return [await store.timeline(row, limit=REQUESTS_READ) for row in rows]

    use = _Use()
    for rows in reading(config, read):
        use.add([row for row in rows if policy is None or row.policy == policy], config)
    requests = sum(each.requests for each in use.buckets)
    traffic = Traffic(
        conversations=len(use.buckets), requests=requests, turns=requests, tools=tuple(use.tools.values())
    )
    advice, tools = advise_budget(tuple(use.buckets)), worst_tools(traffic)
    if as_json:
        return print_json(
            {
                "conversations": traffic.conversations,
                "requests": requests,
                "ready": advice.ready,
                "enlarge": list(advice.enlarge),
                "reason": advice.reason,
                "worst_tools": [
                    {
                        "tool": each.tool.name,
                        "calls": each.tool.calls,
                        "tokens": each.tool.tokens,
                        "largest": each.tool.largest,
                        "share": round(each.share, 4),
                        "advice": each.advice,
                    }
                    for each in tools
                ],
            }
        )
    click.echo(advice.reason)
    if not tools:
        return None
    click.echo()
    return print_table(
        ("tool", "results", "tokens", "share", "largest", "note"),
        [
            (t.tool.name, f"{t.tool.calls:,}", f"{t.tool.tokens:,}", f"{t.share:.0%}", f"{t.tool.largest:,}", t.advice)
            for t in tools
        ],
    )


@dataclass(slots=True)
class _Use:
    buckets: list[BucketUse] = field(default_factory=list)
    tools: dict[str, ToolUse] = field(default_factory=dict)

    def add(self, requests: Iterable[ExchangeRow], config: Config) -> None:
        over, tokens, count = dict[str, int](), dict[str, int](), 0
        for row in requests:
            count += 1
            used, soft = tokens_by_bucket(row.detail.get("buckets")), config.soft_shares(row.policy)
            for name, cap in tokens_by_bucket(row.detail.get("caps")).items():
                if used.get(name, 0) >= soft.get(name, SOFT) * cap:
                    over[name] = over.get(name, 0) + 1
            tokens = used or tokens
            self._add_tools(row)
        if count:
            self.buckets.append(BucketUse(requests=count, over=over, tokens=tokens))

    def _add_tools(self, row: ExchangeRow) -> None:
        found = row.detail.get("tools")
        for name, (calls, tokens, largest) in found.items() if isinstance(found, Mapping) else ():
            old = self.tools.get(name, ToolUse(name=name, calls=0, tokens=0, largest=0))
            self.tools[name] = ToolUse(
                name=name,
                calls=old.calls + int(calls),
                tokens=old.tokens + int(tokens),
                largest=max(old.largest, int(largest)),
            )


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
