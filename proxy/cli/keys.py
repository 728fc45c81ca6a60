"""``weir keys``: API keys in the store; a secret is printed once and kept as a digest."""

import asyncio
import contextlib
import datetime as dt
import time
from collections.abc import AsyncIterator
from pathlib import Path

import click
from rich.table import Table

from proxy.access.keys import create_secret, key_digest
from proxy.cli import Failure
from proxy.cli.config import config_option, console, json_option, loaded, print_json
from proxy.config import Config, Flags, masked_url
from proxy.config.file import nearest
from proxy.store import Store, StoreError
from proxy.store.records import KeyRow

store_option = click.option("--store", metavar="URL", help="The database; else the configuration's.")


@click.group()
def keys() -> None:
    """API keys, each with its own policy, models and permissions.

    \b
    Example:
      weir keys create --name support-bot --policy balanced --models "gpt-*"
    """


@keys.command()
@click.option("--name", required=True, help="What operators call the key.")
@click.option("--policy", help="The policy it is bound to; else the default one.")
@click.option("--models", multiple=True, metavar="PATTERN", help="A model it may use; may be repeated; else all.")
@click.option(
    "--allow",
    multiple=True,
    type=click.Choice(["policy", "mode", "relay"]),
    help="A header it may send (x-weir-policy, x-weir-mode); relay: with --models, also files, batches and all else "
    "that names no model. May be repeated.",
)
@config_option
@store_option
@json_option
def create(
    *,
    name: str,
    policy: str | None,
    models: tuple[str, ...],
    allow: tuple[str, ...],
    path: Path | None,
    store: str | None,
    as_json: bool,
) -> None:
    """Make a key. Its secret is printed now and never again.

    \b
    Example:
      weir keys create --name support-bot --policy balanced --models "gpt-*" --allow mode
    """
    effective = loaded(path, Flags(store=store))
    if policy is not None and policy not in effective.policies:
        raise click.BadParameter(
            f"no policy {policy}{nearest(policy, sorted(effective.policies))}", param_hint="--policy"
        )
    if not name.strip():
        raise click.BadParameter("should not be empty", param_hint="--name")
    secret = create_secret()
    row = asyncio.run(_create(effective, secret, name=name, policy=policy, models=models, allow=allow))
    if as_json:
        print_json({**_public(row), "secret": secret})
        return
    click.echo(secret)
    click.echo(f"Key {name} is made. The line above is its secret: it is shown only now.", err=True)
    if effective.auth.mode == "open":
        click.echo("Weir takes any key while auth.mode is open; say auth.mode: keys to take only these.", err=True)
    else:
        click.echo("A running Weir takes it within two seconds, and from then on only keys that it knows.", err=True)


@keys.command("list")
@config_option
@store_option
@json_option
def list_keys(path: Path | None, store: str | None, *, as_json: bool) -> None:
    """The keys of the store, revoked ones too.

    \b
    Example:
      weir keys list
    """
    rows = asyncio.run(_list(loaded(path, Flags(store=store))))
    if as_json:
        print_json([_public(row) for row in rows])
        return
    table = Table("key", "policy", "models", "allow", "created", "revoked", box=None, pad_edge=False)
    for row in rows:
        table.add_row(
            row.name,
            row.policy or "default",
            " ".join(row.models) or "all",
            " ".join(row.allow) or "-",
            _day(row.created),
            _day(row.revoked) if row.revoked is not None else "",
        )
    console().print(table)


@keys.command()
@click.argument("name")
@config_option
@store_option
@json_option
def revoke(name: str, path: Path | None, store: str | None, *, as_json: bool) -> None:
    """Refuse a key from now on.

    \b
    Example:
      weir keys revoke support-bot
    """
    asyncio.run(_revoke(loaded(path, Flags(store=store)), name))
    if as_json:
        print_json({"name": name, "revoked": True})
    else:
        click.echo(f"Key {name} is revoked.")


@contextlib.asynccontextmanager
async def _opened(effective: Config) -> AsyncIterator[Store]:
    """The configuration's store for a moment; its errors as one-line failures."""
    try:
        store = await Store.open(effective.store.url, visitor=True)
        try:
            yield store
        finally:
            await store.close()
    except StoreError as fault:
        raise Failure(f"{masked_url(effective.store.url)}: {fault}") from fault


async def _create(
    effective: Config, secret: str, *, name: str, policy: str | None, models: tuple[str, ...], allow: tuple[str, ...]
) -> KeyRow:
    async with _opened(effective) as store:
        row = KeyRow(
            name=name,
            digest=key_digest(await store.secret(), secret.encode()),
            policy=policy,
            models=models,
            allow=tuple(dict.fromkeys(allow)),
            created=time.time(),
        )
        await store.add_key(row)
        return row


async def _list(effective: Config) -> list[KeyRow]:
    async with _opened(effective) as store:
        return await store.list_keys()


async def _revoke(effective: Config, name: str) -> None:
    async with _opened(effective) as store:
        if not await store.revoke_key(name, time.time()):
            known = sorted(row.name for row in await store.list_keys() if row.revoked is None)
            raise Failure(f"no key {name}{nearest(name, known)}")


def _public(row: KeyRow) -> dict[str, object]:
    return {
        "name": row.name,
        "policy": row.policy,
        "models": list(row.models),
        "allow": list(row.allow),
        "created": row.created,
        "revoked": row.revoked,
    }


def _day(at: float) -> str:
    return dt.datetime.fromtimestamp(at, tz=dt.UTC).strftime("%Y-%m-%d %H:%M")
