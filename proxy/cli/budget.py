"""``weir budget``: which bucket keeps running over, and which tools fill the window, by what was recorded."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import click
from rich.table import Table
from rich.text import Text

from policies.advise import BucketUse, BudgetAdvice, ToolAdvice, ToolUse, Traffic, advise_budget, worst_tools
from policies.limits import BUCKETS
from policies.pressure import SOFT
from proxy.cli.config import config_option, console, json_option, loaded, print_json
from proxy.cli.conversations_read import reading, store_option
from proxy.config import Config, Flags
from proxy.store import Store
from proxy.store.records import ExchangeRow

REQUESTS_READ = 1_000


@dataclass(frozen=True, slots=True)
class Recorded:
    """What recorded conversations say of the division of their windows."""

    uses: tuple[BucketUse, ...]
    tools: tuple[ToolUse, ...]

    @property
    def traffic(self) -> Traffic:
        """The same as the choice of tools to look at sees it."""
        requests = sum(use.requests for use in self.uses)
        return Traffic(conversations=len(self.uses), requests=requests, turns=requests, tools=self.tools)


@click.group()
def budget() -> None:
    """How the window is divided, and what to change about that.

    \b
    Example:
      weir budget advise
    """


@budget.command()
@click.option(
    "--limit", type=click.IntRange(min=1), default=200, show_default=True, help="Conversations, newest first."
)
@click.option("--policy", metavar="P", help="Only requests under this policy.")
@config_option
@store_option
@json_option
def advise(limit: int, policy: str | None, path: Path | None, store: str | None, *, as_json: bool) -> None:
    """Which bucket is constantly over its soft limit, and which tools take the most tokens.

    A bucket is constantly over if it is for half of the requests in half of the conversations; ten have to be recorded
    before anything is said. Nothing is changed.

    \b
    Example:
      weir budget advise --policy support
    """
    config = loaded(path, Flags(store=store))

    async def read(opened: Store) -> list[list[ExchangeRow]]:
        rows = await opened.conversations(None, limit=limit)
        return [await opened.timeline(row, limit=REQUESTS_READ) for row in rows]

    recorded = recorded_in(reading(config.store.url, read), config, policy=policy)
    advice, tools = advise_budget(recorded.uses), worst_tools(recorded.traffic)
    if as_json:
        print_json(_report(recorded, advice, tools))
    else:
        _show(advice, tools)


def recorded_in(timelines: Iterable[Iterable[ExchangeRow]], config: Config, *, policy: str | None) -> Recorded:
    """What the requests of conversations say, those of one ``policy`` only if it is given."""
    uses, tools = list[BucketUse](), dict[str, tuple[int, int, int]]()
    for rows in timelines:
        over, tokens, requests = dict[str, int](), dict[str, int](), 0
        for row in rows:
            if policy is not None and row.policy != policy:
                continue
            requests += 1
            used, caps = _numbers(row, "buckets"), _numbers(row, "caps")
            soft = _soft(config, row.policy)
            for name, cap in caps.items():
                if used.get(name, 0) >= soft.get(name, SOFT) * cap:
                    over[name] = over.get(name, 0) + 1
            tokens = used or tokens
            for name, found in _tools(row):
                tools[name] = _added(tools.get(name, (0, 0, 0)), found)
        if requests:
            uses.append(BucketUse(requests=requests, over=over, tokens=tokens))
    used_tools = (ToolUse(name=n, calls=c, tokens=t, largest=large) for n, (c, t, large) in tools.items())
    return Recorded(tuple(uses), tuple(used_tools))


def _added(one: tuple[int, int, int], other: tuple[int, int, int]) -> tuple[int, int, int]:
    return one[0] + other[0], one[1] + other[1], max(one[2], other[2])


def _numbers(row: ExchangeRow, name: str) -> dict[str, int]:
    found = row.detail.get(name)
    return {n: int(found[n]) for n in BUCKETS if n in found} if isinstance(found, Mapping) else {}


def _tools(row: ExchangeRow) -> Iterable[tuple[str, tuple[int, int, int]]]:
    found = row.detail.get("tools")
    for name, values in found.items() if isinstance(found, Mapping) else ():
        calls, tokens, largest = values
        yield name, (int(calls), int(tokens), int(largest))


def _soft(config: Config, policy: str) -> dict[str, float]:
    """The shares of their caps at which a policy's buckets warn, as it is now."""
    if policy not in config.policies:
        return {}
    return {name: rule.soft for name, rule in config.policy(policy).buckets.items()}


def _report(recorded: Recorded, advice: BudgetAdvice, tools: Iterable[ToolAdvice]) -> dict[str, object]:
    return {
        "conversations": len(recorded.uses),
        "requests": recorded.traffic.requests,
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


def _show(advice: BudgetAdvice, tools: tuple[ToolAdvice, ...]) -> None:
    click.echo(advice.reason)
    if not tools:
        return
    click.echo()
    table = Table("tool", "results", "tokens", "share", "largest", "it", box=None, pad_edge=False, header_style="bold")
    for each in tools:
        name = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in each.tool.name)
        sizes = f"{each.tool.calls:,}", f"{each.tool.tokens:,}", f"{each.share:.0%}", f"{each.tool.largest:,}"
        table.add_row(Text(name), *sizes, Text(each.advice))
    console().print(table)
