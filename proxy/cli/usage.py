"""``weir usage``: what conversations took, by key."""

from typing import get_args

import click

from proxy.cli.output import listing
from proxy.cli.shared import Findings, key_names, reads, since_option
from proxy.config.values import Config
from proxy.features.usage import beside_cost, taken, taken_by
from proxy.store import Store
from proxy.store.usage import By, day_of


@click.command()
@since_option("30d", "Seconds since 1970, or like 90m, 24h or 7d.")
@click.option("--by", type=click.Choice(get_args(By)), help="Also group by this.")
@click.option("--key", metavar="NAME", help="Only the key with this name.")
@reads
async def usage(
    store: Store, config: Config, *, since: float, by: By | None, key: str | None
) -> Findings:
    """Show usage by key: tokens before and after Weir, tokens saved, and costs.

    Days are those of UTC: the one of --since is counted whole. Deleted conversations are counted,
    without a name.

    \b
    Example:
      weir usage
      weir usage --since 7d --by model --key support-bot
    """
    since = day_of(since)
    rows = await store.usage(None, since=since, by=by)
    names = await key_names(store, config) if rows else {}
    rows = [row for row in rows if key is None or names.get(row.tenant) == key]
    data = [taken_by(row, by=by, names=names) for row in rows]
    total = taken(rows)
    shown = [{**each, "key": each["key"] or str(each["tenant"])[:8]} for each in data]
    if len(shown) > 1:
        shown.append({"key": "all", **total})
    listed = listing(shown, FIGURES, empty="No requests since then.", optional="group")

    def show() -> None:
        listed.show()
        note = beside_cost(unpriced=total["unpriced"], estimated=total["estimated"])
        if total["priced"] and note:
            click.echo(f"Of the costs: {note}.", err=True)

    return Findings(lambda: {"since": since, "by": by, "total": total, "data": data}, show)


FIGURES = (
    "key group requests failed tokens_before tokens_after tokens_saved cached completion cost"
    " cost_saved summarizer_cost"
)
