"""``weir audit``: what Weir did to conversations; here what it took out of them, and what of it was asked for again."""

import asyncio
import datetime as dt
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import click
from rich.table import Table
from rich.text import Text

from proxy.cli import Failure
from proxy.cli.audit_chain import list_rows, verify
from proxy.cli.config import config_option, console, json_option, loaded, print_json
from proxy.cli.conversations import opened_to_read, store_option
from proxy.config import Flags
from proxy.store.records import EvictionRow, EvictionSum

SHOWN = 20


@dataclass(frozen=True, slots=True)
class Report:
    """What was evicted: sums by layer and tool, and rows, the newest first."""

    sums: list[EvictionSum]
    rows: list[EvictionRow]
    asked: list[EvictionRow]


@click.group()
def audit() -> None:
    """What Weir did to conversations, to be looked at afterwards.

    \b
    Example:
      weir audit verify
      weir audit list --conversation support-4711
      weir audit evictions --conversation support-4711
    """


for command in (verify, list_rows):
    audit.add_command(command)


@audit.command()
@click.option("--conversation", "name", metavar="NAME", help="Only this one, by its name or id.")
@click.option("--policy", metavar="P", help="Only what this policy evicted.")
@click.option("--limit", type=click.IntRange(min=1), default=200, show_default=True, help="Rows in --json.")
@config_option
@store_option
@json_option
def evictions(
    *, name: str | None, policy: str | None, limit: int, path: Path | None, store: str | None, as_json: bool
) -> None:
    """What was evicted, what that freed, and what of it a later call asked for again: the regret.

    A tool whose results are often asked for again wants a longer life in the policy; look at five to ten runs
    before changing anything. Results that a newer one repeats or replaces do not count as asked for again.

    \b
    Example:
      weir audit evictions --policy balanced
      weir audit evictions --conversation support-4711 --json
    """
    url = loaded(path, Flags(store=store)).store.url
    report = asyncio.run(_read(url, name=name, policy=policy, limit=limit))
    if as_json:
        print_json(_plain(report))
    elif not report.sums:
        click.echo("Nothing was evicted.", err=True)
    else:
        _show(report)


async def _read(url: str, *, name: str | None, policy: str | None, limit: int) -> Report:
    async with opened_to_read(url) as store:
        one = None if name is None else await store.conversation(None, name)
        if name is not None and one is None:
            raise Failure(f"no conversation {name}; see weir conversations list")
        return Report(
            await store.eviction_sums(None, conversation=one, policy=policy),
            await store.evictions(None, conversation=one, policy=policy, limit=limit),
            await store.evictions(None, conversation=one, policy=policy, asked_again=True, limit=limit),
        )


def _plain(report: Report) -> dict[str, object]:
    return {
        **_total(report.sums),
        "by_layer": _grouped(report.sums, "layer", lambda each: each.layer),
        "by_tool": _grouped(report.sums, "tool", lambda each: each.tool),
        "asked_again_rows": [_row(row) for row in report.asked],
        "rows": [_row(row) for row in report.rows],
    }


def _row(row: EvictionRow) -> dict[str, object]:
    return {**asdict(row), "digest": row.digest.hex(), "call_hash": row.call_hash.hex(), "freed": row.freed}


def _total(sums: Iterable[EvictionSum]) -> dict[str, object]:
    """Counts, tokens, and the share of results that were asked for again; only what answers a call can be."""
    listed = list(sums)
    results = sum(each.evicted for each in listed if each.tool)
    again = sum(each.asked_again for each in listed)
    return {
        "evicted": sum(each.evicted for each in listed),
        "results": results,
        "asked_again": again,
        "regret": round(again / results, 4) if results else None,
        "tokens_freed": sum(each.tokens_before - each.tokens_after for each in listed),
    }


def _grouped(sums: Iterable[EvictionSum], label: str, key: Callable[[EvictionSum], str]) -> list[dict[str, object]]:
    groups: dict[str, list[EvictionSum]] = {}
    for each in sums:
        groups.setdefault(key(each), []).append(each)
    return [{label: name, **_total(group)} for name, group in groups.items()]


def _show(report: Report) -> None:
    total = _total(report.sums)
    console().print(
        f"{total['evicted']} evicted, {total['tokens_freed']:,} tokens freed; {total['asked_again']} of "
        f"{total['results']} tool results were asked for again (regret {_share(total['regret'])}).\n"
    )
    _print_groups("layer", _grouped(report.sums, "layer", lambda each: each.layer))
    _print_groups("tool", _grouped(report.sums, "tool", lambda each: each.tool))
    if not report.asked:
        return
    click.echo("Asked for again, the newest first:")
    table = _table(
        "evicted at (UTC)", "asked again", "conversation", "tool", "layer", "scorer", "policy", "tokens", "ref"
    )
    for row in report.asked[:SHOWN]:
        table.add_row(
            _moment(row.at),
            _moment(row.asked_again_at or 0.0),
            _text(row.conversation),
            _text(row.tool),
            row.layer,
            row.scorer or "-",
            _text(row.policy),
            f"{row.tokens_before:,} > {row.tokens_after:,}",
            row.digest.hex()[:12],
        )
    console().print(table)


def _print_groups(label: str, groups: list[dict[str, object]]) -> None:
    table = _table(label, "evicted", "asked again", "regret", "tokens freed")
    for group in groups:
        name = _text(str(group[label]) or "(no tool)")
        freed = f"{group['tokens_freed']:,}"
        table.add_row(name, str(group["evicted"]), str(group["asked_again"]), _share(group["regret"]), freed)
    console().print(table)
    click.echo()


def _table(*columns: str) -> Table:
    return Table(*columns, box=None, pad_edge=False, header_style="bold")


def _share(value: object) -> str:
    return f"{value:.1%}" if isinstance(value, float) else "-"


def _text(name: str) -> Text:
    return Text("".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in name))


def _moment(at: float) -> str:
    return dt.datetime.fromtimestamp(at, tz=dt.UTC).strftime("%Y-%m-%d %H:%M:%S")
