"""``weir db``: the database's schema."""

import asyncio
from pathlib import Path

import click

from proxy.cli import Failure
from proxy.cli.config import config_option, json_option, loaded, print_json
from proxy.config import Flags
from proxy.store import Store, StoreError


@click.group()
def db() -> None:
    """Look after the database.

    \b
    Example:
      weir db upgrade
    """


@db.command()
@config_option
@click.option("--store", metavar="URL", help="The database; else the configuration's.")
@json_option
def upgrade(path: Path | None, store: str | None, as_json: bool) -> None:  # noqa: FBT001 - a flag of the command line
    """Bring the database to the newest schema, or make a new one; `weir serve` does the same when it starts.

    A database that a newer Weir has written is refused.

    \b
    Example:
      weir db upgrade --store sqlite+aiosqlite:///weir.db
    """
    url = loaded(path, Flags(store=store)).store.url
    try:
        schema, journal, notices = asyncio.run(_upgrade(url))
    except StoreError as error:
        raise Failure(str(error)) from error
    if as_json:
        print_json({"schema": schema, "journal": journal, "notices": list(notices)})
        return
    for notice in notices:
        click.echo(f"Note: {notice}", err=True)
    click.echo(f"Schema {schema}, up to date (journal: {journal}).")


async def _upgrade(url: str) -> tuple[str, str, tuple[str, ...]]:
    store = await Store.open(url, visitor=True)
    try:
        return store.schema, store.journal, store.notices
    finally:
        await store.close()
