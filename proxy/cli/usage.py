"""What conversations took: ``weir usage`` by key, ``weir budget`` by bucket."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import get_args

import click

from policies.pressure import SOFT
from policies.quality.advise import BucketUse, ToolAdvice, ToolUse, Traffic, advise_budget, worst_tools
from proxy.cli.output import listing, print_columns
from proxy.cli.shared import Findings, key_names, reads, since_option
from proxy.config.values import Config
from proxy.http.conversations import tokens_by_bucket
from proxy.http.reports import taken, taken_by
from proxy.store import Store
from proxy.store.exchanges import By
from proxy.store.records import ExchangeRow


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
    data = [taken_by(row, by=by, names=names).plain() for row in rows]
    total = taken(rows).plain()
    shown = [{**each, "key": each["key"] or str(each["tenant"])[:8]} for each in data]
    if len(shown) > 1:
        shown.append({"key": "all", **total})
    listed = listing(shown, FIGURES, empty="No requests since then.", optional="group")
    return Findings(lambda: {"since": since, "by": by, "total": total, "data": data}, listed.show)


FIGURES = (
    "key group requests failed tokens_before tokens_after tokens_saved cached completion cost cost_saved "
    "summarizer_cost"
)


REQUESTS_READ = 1_000


@click.group()
def budget() -> None:
    """Advise on how to divide the window.

    \b
    Example:
      weir budget advise
    """


@budget.command()
@click.option("--limit", type=click.IntRange(min=1), default=200, help="How many conversations, newest first.")
@click.option("--policy", metavar="P", help="Only requests with this policy.")
@reads
async def advise(store: Store, config: Config, *, limit: int, policy: str | None) -> Findings:
    """Show which bucket keeps exceeding its soft limit, and which tools take the most tokens.

    A bucket counts if it exceeds its limit in half of the requests of half of the conversations; at least ten
    conversations must be recorded. Nothing is changed.

    \b
    Example:
      weir budget advise --policy support
    """
    use = _Use()
    for row in await store.conversations(None, limit=limit):
        requests = await store.timeline(row, limit=REQUESTS_READ)
        use.add([each for each in requests if policy is None or each.policy == policy], config)
    traffic, advice = use.traffic, advise_budget(tuple(use.buckets))
    tools = worst_tools(traffic)

    value = {
        "conversations": traffic.conversations,
        "requests": traffic.requests,
        "ready": advice.ready,
        "enlarge": list(advice.enlarge),
        "reason": advice.reason,
        "worst_tools": worst_json(tools, "calls", "tokens", "largest"),
    }

    def show() -> None:
        click.echo(advice.reason)
        if tools:
            click.echo()
            print_columns(tools, TOOLS)

    return Findings(lambda: value, show)


def worst_json(tools: Iterable[ToolAdvice], *figures: str) -> list[dict[str, object]]:
    """What is advised on tools, with so many of their figures."""
    return [
        {
            "tool": each.tool.name,
            **{name: getattr(each.tool, name) for name in figures},
            "share": round(each.share, 4),
            "advice": each.advice,
        }
        for each in tools
    ]


TOOLS = {
    "tool": lambda each: each.tool.name,
    "results": lambda each: f"{each.tool.calls:,}",
    "tokens": lambda each: f"{each.tool.tokens:,}",
    "share": lambda each: f"{each.share:.0%}",
    "largest": lambda each: f"{each.tool.largest:,}",
    "note": lambda each: each.advice,
}


@dataclass(slots=True)
class _Use:
    buckets: list[BucketUse] = field(default_factory=list)
    tools: dict[str, ToolUse] = field(default_factory=dict)

    @property
    def traffic(self) -> Traffic:
        requests = sum(each.requests for each in self.buckets)
        return Traffic(
            conversations=len(self.buckets), requests=requests, turns=requests, tools=tuple(self.tools.values())
        )

    def add(self, requests: Sequence[ExchangeRow], config: Config) -> None:
        over, tokens = Counter[str](), dict[str, int]()
        for row in requests:
            used, soft = tokens_by_bucket(row.detail.get("buckets")), config.soft_shares(row.policy)
            caps = tokens_by_bucket(row.detail.get("caps"))
            over.update(name for name, cap in caps.items() if used.get(name, 0) >= soft.get(name, SOFT) * cap)
            tokens = used or tokens
            self._add_tools(row)
        if requests:
            self.buckets.append(BucketUse(requests=len(requests), over=over, tokens=tokens))

    def _add_tools(self, row: ExchangeRow) -> None:
        found = row.detail.get("tools")
        for name, (calls, tokens, largest) in found.items() if isinstance(found, Mapping) else ():
            tool = self.tools.setdefault(name, ToolUse(name=name))
            tool.calls += int(calls)
            tool.tokens += int(tokens)
            tool.largest = max(tool.largest, int(largest))
