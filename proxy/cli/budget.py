"""``weir budget``: which bucket keeps running over, and which tools fill the window, by what was recorded."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import click

from policies.limits import BUCKETS
from policies.pressure import SOFT
from policies.quality.advise import BucketUse, ToolUse, Traffic, advise_budget, worst_tools
from proxy.cli.output import print_json, print_table
from proxy.cli.stored import json_option, reading, stored
from proxy.config import Config
from proxy.store import Store
from proxy.store.records import ExchangeRow

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
    """What recorded conversations say of the division of their windows."""

    buckets: list[BucketUse] = field(default_factory=list)
    tools: dict[str, ToolUse] = field(default_factory=dict)

    def add(self, requests: Iterable[ExchangeRow], config: Config) -> None:
        over, tokens, count = dict[str, int](), dict[str, int](), 0
        for row in requests:
            count += 1
            used, soft = _numbers(row, "buckets"), _soft(config, row.policy)
            for name, cap in _numbers(row, "caps").items():
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


def _numbers(row: ExchangeRow, name: str) -> dict[str, int]:
    found = row.detail.get(name)
    return {n: int(found[n]) for n in BUCKETS if n in found} if isinstance(found, Mapping) else {}


def _soft(config: Config, policy: str) -> dict[str, float]:
    """The shares of their caps at which a policy's buckets warn, as it is now."""
    if policy not in config.policies:
        return {}
    return {name: rule.soft for name, rule in config.policy(policy).buckets.items()}
