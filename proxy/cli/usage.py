"""``weir usage``: what conversations took, by key."""

from typing import get_args

import click

from proxy.cli.output import listing
from proxy.cli.shared import Findings, key_names, reads, since_option
from proxy.config.values import Config
from proxy.features.usage import as_csv, beside_cost, taken, taken_by
from proxy.store import Store
from proxy.store.usage import By, day_of


@click.command()
@since_option("30d", "Seconds since 1970, or like 90m, 24h or 7d.")
@click.option("--by", type=click.Choice(get_args(By)), help="Also group by this.")
@click.option("--key", metavar="NAME", help="Only the key with this name.")
@click.option("--csv", "is_table", is_flag=True, help="Print a table with all columns.")
@reads
async def usage(
    store: Store,
    config: Config,
    *,
    since: float,
    by: By | None,
    key: str | None,
    is_table: bool,
) -> Findings:
    """Show usage by key, or by team: tokens before and after Weir, tokens saved, and costs.

    Days are those of UTC: the one of --since is counted whole. Deleted conversations are counted,
    without a name. By team and by key it is of known keys.

    \b
    Example:
      weir usage
      weir usage --since 7d --by model --key support-bot
      weir usage --since 30d --by team --csv
    """
    since = day_of(since)
    names = await key_names(store, config)
    own = next((tenant for tenant, name in names.items() if name == key), "")
    rows = await store.usage(None, since=since, by=by, key=own if key is not None else None)
    if by not in SUMMED:
        rows = [row for row in rows if key is None or names.get(row.tenant) == key]
    data = [taken_by(row, by=by, names=names) for row in rows]
    total = taken(rows)
    if by in SUMMED:
        shown = [{**each, "group": each["group"] or "no team"} for each in data]
        all_of_them = {"group": "all", **total}
    else:
        shown = [{**each, "key": each["key"] or str(each["tenant"])[:8]} for each in data]
        all_of_them = {"key": "all", **total}
    listed = listing(
        [*shown, all_of_them] if len(shown) > 1 else shown,
        FIGURES,
        empty="No requests since then.",
        optional="group key",
    )

    def show() -> None:
        if is_table:
            click.echo(as_csv(data), nl=False)
            return
        listed.show()
        note = beside_cost(unpriced=total["unpriced"], estimated=total["estimated"])
        if total["priced"] and note:
            click.echo(f"Of the costs: {note}.", err=True)

    return Findings(lambda: {"since": since, "by": by, "total": total, "data": data}, show)


SUMMED = ("team", "key")
"""The group that sums up the usage of all keys."""
FIGURES = (
    "key group requests failed tokens_before tokens_after tokens_saved cached completion cost"
    " cost_saved summarizer_cost"
)
