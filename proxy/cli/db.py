"""``weir db``: the database's schema."""

import click

from proxy.cli.output import print_json
from proxy.cli.stored import json_option, stored, writing
from proxy.config import Config
from proxy.store import Store


@click.group()
def db() -> None:
    """Migrate the database.

    \b
    Example:
      weir db upgrade
    """


@db.command()
@stored
@json_option
def upgrade(config: Config, *, as_json: bool) -> None:
    """Migrate the database to the latest schema, or create it; `weir serve` does the same when it starts.

    A database written by a newer version of Weir is refused.

    \b
    Example:
      weir db upgrade --store sqlite+aiosqlite:///weir.db
    """

    async def state(store: Store) -> tuple[str, str, tuple[str, ...]]:
        return store.schema, store.journal, store.notices

    schema, journal, notices = writing(config, state, create=True)
    if as_json:
        return print_json({"schema": schema, "journal": journal, "notices": list(notices)})
    for notice in notices:
        click.echo(f"Note: {notice}", err=True)
    return click.echo(f"Schema {schema}, up to date (journal: {journal}).")
