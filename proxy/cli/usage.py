"""``weir usage``: what conversations took, by key."""

from collections.abc import Mapping
from typing import get_args

import click

from proxy.cli.output import print_table
from proxy.cli.shared import Findings, key_names, reads, since_option
from proxy.config.values import Config
from proxy.http.reports import taken, taken_by
from proxy.store import Store
from proxy.store.exchanges import By


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
