"""``weir db``: the database's schema."""

import asyncio
import json
import sys
from typing import Any

import click

from proxy.store import Store, StoreError

DEFAULT_STORE = "sqlite+aiosqlite:///weir.db"


@click.group()
def db() -> None:
    """Look after the database."""


@db.command(epilog="Example: weir db upgrade --store sqlite+aiosqlite:///weir.db")
@click.option("--store", "url", envvar="WEIR_STORE", default=DEFAULT_STORE, show_default=True, help="SQLAlchemy URL.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def upgrade(url: str, *, as_json: bool) -> None:
    """Bring the database to the newest schema; create it if there is none.

    `weir serve` does the same at its start. Refuses a database that a newer Weir has written.
    """
    try:
        facts = asyncio.run(_upgrade(url))
    except StoreError as error:
        click.echo(json.dumps({"error": str(error)}) if as_json else f"error: {error}", err=not as_json)
        sys.exit(1)
    if as_json:
        click.echo(json.dumps(facts))
        return
    for notice in facts["notices"]:
        click.echo(f"note: {notice}")
    click.echo(f"schema {facts['schema']}, journal {facts['journal']}: up to date")


async def _upgrade(url: str) -> dict[str, Any]:
    store = await Store.open(url, visitor=True)
    try:
        return {"schema": store.schema, "journal": store.journal, "notices": store.notices}
    finally:
        await store.close()
