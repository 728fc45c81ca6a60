"""``weir conversations``: what the store knows, read without disturbing a Weir that is running."""

import shlex
from collections.abc import Callable, Mapping
from pathlib import Path

import click

from proxy.cli.config import config_option, json_option, loaded
from proxy.cli.conversations_keep import checkpoint, delete, export, notes, removed
from proxy.cli.conversations_read import (
    COMPACT,
    checkpoint_of,
    checkpoints_of,
    found,
    key_names,
    kinds_of,
    opened_to_read,
    originals_of,
    reading,
    removed_from,
    removed_line,
    request_of,
    store_option,
)
from proxy.cli.conversations_show import (
    show_list,
    show_originals,
    show_removed,
    show_request,
    show_status,
    show_summary,
    show_timeline,
)
from proxy.config import Flags, masked_url
from proxy.store import Store
from proxy.store.records import ConversationRow
from proxy.store.records import RemovedRow as Removed

REQUESTS_SHOWN = 200

__all__ = [
    "COMPACT",
    "Removed",
    "conversations",
    "kinds_of",
    "opened_to_read",
    "removed_from",
    "removed_line",
    "store_option",
]


@click.group()
def conversations() -> None:
    """What Weir knows about conversations: how full they are, what was done to them, what was removed.

    \b
    Example:
      weir conversations list
      weir conversations show support-4711 --timeline
      weir conversations checkpoint support-4711
    """


for command in (checkpoint, removed, notes, export, delete):
    conversations.add_command(command)


@conversations.command("list")
@config_option
@store_option
@click.option("--limit", type=click.IntRange(min=1), default=50, show_default=True, help="How many, newest first.")
@json_option
def list_conversations(path: Path | None, store: str | None, limit: int, *, as_json: bool) -> None:
    """Conversations of all keys, the one used last first; tokens are those of its last request.

    \b
    Example:
      weir conversations list --store sqlite+aiosqlite:///weir.db --limit 10
    """
    config = loaded(path, Flags(store=store))
    url = config.store.url

    async def read(opened: Store) -> tuple[list[ConversationRow], Mapping[str, str]]:
        rows = await opened.conversations(None, limit=limit)
        return rows, await key_names(opened, config) if rows else {}

    rows, names = reading(url, read)
    if not rows and not as_json:
        click.echo(f"No conversations in {masked_url(url)}.", err=True)
        return
    show_list(rows, names, as_json=as_json)


@conversations.command()
@click.argument("name", metavar="ID")
@click.option("--timeline", is_flag=True, help=f"One line per request, the newest {REQUESTS_SHOWN}.")
@click.option("--checkpoint", is_flag=True, help="The newest checkpoint: what stands for the compacted history.")
@click.option("--removed", is_flag=True, help="Every message that was removed, with the ref that --ref takes.")
@click.option("--request", metavar="ID", help="What was done to one request, layer by layer, and why.")
@click.option("--ref", help="The text of one removed message in full; with --json as it was sent.")
@config_option
@store_option
@json_option
def show(
    *,
    name: str,
    timeline: bool,
    checkpoint: bool,
    removed: bool,
    request: str | None,
    ref: str | None,
    path: Path | None,
    store: str | None,
    as_json: bool,
) -> None:
    """One conversation, by its name or id.

    \b
    Example:
      weir conversations show support-4711 --timeline
      weir conversations show support-4711 --request req_0a1b2c
      weir conversations show support-4711 --ref 74e67f258338
    """
    if sum((timeline, checkpoint, removed, request is not None, ref is not None)) > 1:
        raise click.UsageError("--timeline, --checkpoint, --removed, --request and --ref are asked one at a time")
    config = loaded(path, Flags(store=store))
    url = config.store.url

    async def read(opened: Store) -> Callable[[], None]:
        row = await found(opened, name)
        if timeline:
            requests = await opened.timeline(row, limit=REQUESTS_SHOWN)
            return lambda: show_timeline(requests, as_json=as_json)
        if checkpoint:
            newest = await checkpoint_of(opened, row)
            return lambda: show_summary(newest, as_json=as_json)
        if removed:
            gone = await removed_from(opened, row)
            return lambda: show_removed(gone, as_json=as_json)
        if request is not None:
            asked = await request_of(opened, row, request)
            return lambda: show_request(asked, as_json=as_json)
        if ref is not None:
            originals = await originals_of(opened, row, ref)
            return lambda: show_originals(originals, as_json=as_json)
        gone, saved = await removed_from(opened, row), await checkpoints_of(opened, row)
        last, names = (await opened.timeline(row, limit=1))[-1:], await key_names(opened, config)
        where = _where(path, store)
        return lambda: show_status(row, gone, saved, names, last=last, where=where, as_json=as_json)

    reading(url, read)()


def _where(path: Path | None, store: str | None) -> str:
    """The options that lead to the same store again."""
    given = (("--config", path), ("--store", store))
    return "".join(f" {option} {shlex.quote(str(value))}" for option, value in given if value is not None)
