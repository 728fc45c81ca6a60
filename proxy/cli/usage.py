"""``weir usage``: which key's requests took how many tokens and dollars."""

import time
from collections.abc import Mapping
from typing import get_args

import click

from proxy.cli.output import print_json, print_table
from proxy.cli.stored import json_option, key_names, reading, stored
from proxy.config import Config
from proxy.errors import InvalidRequest
from proxy.http.request import moment_in
from proxy.http.usage import taken, taken_by
from proxy.store import Store
from proxy.store.exchanges import By
from proxy.store.records import UsageRow


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
