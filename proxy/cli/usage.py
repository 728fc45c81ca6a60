"""``weir usage``: which key's requests took how many tokens and dollars."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import get_args

import click
from rich.text import Text

from proxy.cli.config import config_option, console, json_option, loaded, print_json
from proxy.cli.conversations_read import key_names, reading, store_option
from proxy.cli.conversations_show import key_name, plain_table, tame
from proxy.config import Flags
from proxy.errors import InvalidRequest
from proxy.http.request import moment_in
from proxy.http.usage import taken, taken_by
from proxy.store import Store
from proxy.store.exchanges import By
from proxy.store.records import UsageRow


@click.command()
@click.option("--since", default="30d", show_default=True, help="Seconds since 1970, or like 90m, 24h or 7d.")
@click.option("--by", type=click.Choice(get_args(By)), help="What to tell apart beside keys.")
@click.option("--key", metavar="NAME", help="Only the key with this name.")
@config_option
@store_option
@json_option
def usage(*, since: str, by: By | None, key: str | None, path: Path | None, store: str | None, as_json: bool) -> None:
    """What the requests of each key took: tokens before and after Weir, what was saved, what it cost.

    Deleted conversations, and what is older than the store's retention, are not counted any more.

    \b
    Example:
      weir usage
      weir usage --since 7d --by model --key support-bot
    """
    config = loaded(path, Flags(store=store))
    try:
        start = moment_in(since, now=time.time())
    except InvalidRequest as fault:
        raise click.BadParameter(fault.message, param_hint="--since") from fault

    async def read(opened: Store) -> tuple[list[UsageRow], dict[str, str]]:
        rows = await opened.usage(None, since=start, by=by)
        return rows, await key_names(opened, config) if rows else {}

    rows, names = reading(config.store.url, read)
    if key is not None:
        rows = [row for row in rows if names.get(row.tenant) == key]
    if as_json:
        data = [taken_by(row, by=by, names=names).plain() for row in rows]
        print_json({"since": start, "by": by, "total": taken(rows).plain(), "data": data})
    elif not rows:
        click.echo("No requests since then.", err=True)
    else:
        _show(rows, by, names)


def _show(rows: Sequence[UsageRow], by: By | None, names: Mapping[str, str]) -> None:
    titles = ("key", *(() if by is None else (by,)), "requests", "failed", "tokens", "forwarded", "saved", "cached")
    table = plain_table(*titles, "answers", "cost", "saved $", "summaries $")
    for row in rows:
        whose = [Text(key_name(row.tenant, names))]
        if by is not None:
            whose.append(Text(tame(row.group or "")))
        table.add_row(*whose, *_cells(taken_by(row, by=by, names=names).plain()))
    if len(rows) > 1:
        table.add_row("all", *(() if by is None else ("",)), *_cells(taken(rows).plain()))
    console().print(table)


def _cells(figures: Mapping[str, object]) -> list[str]:
    before, saved = figures["tokens_before"], figures["tokens_saved"]
    share = f"{saved / before:.0%}" if isinstance(saved, int) and isinstance(before, int) and before else "-"
    counts = [f"{figures[name]:,}" for name in ("requests", "failed", "tokens_before", "tokens_after")]
    dollars = ["-" if figures[n] is None else f"{figures[n]:.4f}" for n in ("cost", "cost_saved", "summarizer_cost")]
    return [*counts, share, f"{figures['cached']:,}", f"{figures['completion']:,}", *dollars]
