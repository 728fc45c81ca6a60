"""What ``weir conversations`` does with what is kept of one: its checkpoint, notes, originals; export and deletion."""

import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import click

from policies.notes import Note
from proxy.cli import Failure
from proxy.cli.config import config_option, json_option, loaded, print_json
from proxy.cli.conversations_read import (
    checkpoint_of,
    checkpoints_of,
    found,
    reading,
    removed_from,
    removed_line,
    store_option,
    writing,
)
from proxy.cli.conversations_show import moment, show_notes, show_removed, show_state, tame
from proxy.config import Flags
from proxy.http.checkpoints import saved_of
from proxy.http.control import MAX_NOTE_LEN, USUAL, KeptNote
from proxy.store import Store
from proxy.store.records import ConversationRow, NoteRow

MISC = "misc"


@click.command()
@click.argument("name", metavar="ID")
@click.option(
    "--format",
    "form",
    type=click.Choice(["md", "json"]),
    default="md",
    show_default=True,
    help="For people or programs.",
)
@click.option("--version", type=click.IntRange(min=1), help="One version; else the newest.")
@config_option
@store_option
@json_option
def checkpoint(
    *, name: str, form: Literal["md", "json"], version: int | None, path: Path | None, store: str | None, as_json: bool
) -> None:
    """The checkpoint of a conversation: goal, rules, what is done and left, decisions, identifiers.

    \b
    Example:
      weir conversations checkpoint support-4711
      weir conversations checkpoint support-4711 --version 3 --format json
    """

    async def read(opened: Store) -> Callable[[], None]:
        row = await checkpoint_of(opened, await found(opened, name), version)
        if form == "json" or as_json:
            return lambda: print_json(saved_of(row).plain())
        return lambda: show_state(row)

    reading(_url(path, store), read)()


@click.command()
@click.argument("name", metavar="ID")
@config_option
@store_option
@json_option
def removed(name: str, path: Path | None, store: str | None, *, as_json: bool) -> None:
    """What is out of a conversation's window: what took it, since when, and the ref of its original.

    \b
    Example:
      weir conversations removed support-4711
      weir conversations show support-4711 --ref 74e67f258338
    """

    async def read(opened: Store) -> Callable[[], None]:
        gone = await removed_from(opened, await found(opened, name))
        return lambda: show_removed(gone, as_json=as_json)

    reading(_url(path, store), read)()


@click.command()
@click.argument("name", metavar="ID")
@click.option("--add", "text", metavar="TEXT", help=f"A note to keep, up to {MAX_NOTE_LEN:,} characters.")
@config_option
@store_option
@json_option
def notes(name: str, text: str | None, path: Path | None, store: str | None, *, as_json: bool) -> None:
    """The notes on a conversation: decisions, bugs, constraints, what is left to do; or one more of them.

    A note that is added beside a Weir that is running is in that conversation's next checkpoint after a restart; add
    it over HTTP (POST /weir/conversations/ID/notes) to have it at once.

    \b
    Example:
      weir conversations notes support-4711
      weir conversations notes support-4711 --add "The customer wants a refund, not a replacement."
    """
    url = _url(path, store)
    if text is None:
        show_notes(reading(url, lambda opened: _notes(opened, name)), as_json=as_json)
        return
    if not text.strip() or len(text) > MAX_NOTE_LEN:
        raise click.BadParameter(f"should be 1 to {MAX_NOTE_LEN} characters", param_hint="--add")
    note = NoteRow.of(Note(MISC, USUAL, text, "api"), at=time.time())
    is_new = writing(url, lambda opened: _add(opened, name, note))
    if as_json:
        print_json({**KeptNote.of(note).plain(), "new": is_new})
    else:
        click.echo("The note is kept." if is_new else "This note was there already.")


async def _notes(store: Store, name: str) -> list[NoteRow]:
    row = await found(store, name)
    return await store.notes(row.tenant, row.id)


async def _add(store: Store, name: str, note: NoteRow) -> bool:
    row = await found(store, name)
    return await store.add_notes(row.tenant, row.id, [note]) > 0


@click.command()
@click.argument("name", metavar="ID")
@click.option("--out", metavar="FILE", type=click.Path(path_type=Path, dir_okay=False), help="Else standard output.")
@click.option("--force", is_flag=True, help="Write over a file that is there.")
@config_option
@store_option
def export(*, name: str, out: Path | None, force: bool, path: Path | None, store: str | None) -> None:
    """Everything that is known of a conversation as one JSON document, messages included; a file is its owner's only.

    \b
    Example:
      weir conversations export support-4711 --out support-4711.json
    """
    if out is not None and out.exists() and not force:
        raise Failure(f"{out} is there already; --force writes over it")

    async def read(opened: Store) -> dict[str, object]:
        return await opened.export(await found(opened, name))

    document = json.dumps(reading(_url(path, store), read), indent=2)
    if out is None:
        click.echo(document)
        return
    _write(out, f"{document}\n", force=force)
    click.echo(f"{out}: {len(document):,} characters.", err=True)


def _write(out: Path, text: str, *, force: bool) -> None:
    """Write a file that only its owner may read, in one go. Fails for one that came into being meanwhile."""
    try:
        with tempfile.NamedTemporaryFile(
            "w", dir=out.parent, prefix=f".{out.name}.", encoding="utf-8", delete=False
        ) as f:
            written = Path(f.name)
            f.write(text)
        try:
            if force:
                written.replace(out)
            else:
                out.hardlink_to(written)
        finally:
            written.unlink(missing_ok=True)
    except FileExistsError as fault:
        raise Failure(f"{out} is there already; --force writes over it") from fault
    except OSError as fault:
        raise Failure(f"{out} cannot be written: {fault.strerror}") from fault


@click.command()
@click.argument("name", metavar="ID")
@click.option("--yes", is_flag=True, help="Do not ask.")
@config_option
@store_option
@json_option
def delete(name: str, path: Path | None, store: str | None, *, yes: bool, as_json: bool) -> None:
    """Delete a conversation for good: requests, checkpoints, notes, and the messages that only it had removed.

    A Weir that is running may hold the conversation in memory and begin it anew with its next request; over HTTP
    (DELETE /weir/conversations/ID) it forgets it at once.

    \b
    Example:
      weir conversations export support-4711 --out support-4711.json
      weir conversations delete support-4711
    """
    url = _url(path, store)
    row, going = reading(url, lambda opened: _going(opened, name))
    if not yes:
        click.echo(going, err=True)
        if not click.confirm("Delete it for good?", err=True):
            raise Failure("nothing was deleted")
    if not writing(url, lambda opened: opened.delete(row)):
        raise Failure(f"{row.name} is gone already")
    if as_json:
        print_json({"id": row.id, "name": row.name, "deleted": True})
    else:
        click.echo(f"{tame(row.name)} is deleted.")


async def _going(store: Store, name: str) -> tuple[ConversationRow, str]:
    """The conversation, and what would be deleted with it."""
    row = await found(store, name)
    gone, saved = await removed_from(store, row), await checkpoints_of(store, row)
    kept = await store.notes(row.tenant, row.id)
    said = (
        f"{tame(row.name)} ({row.id}) of key {row.tenant[:8]}, last used {moment(row.updated)} UTC: "
        f"{row.requests} requests, {len(saved)} checkpoints, {len(kept)} notes; out of the window and kept: "
        f"{removed_line(gone)}."
    )
    return row, said


def _url(path: Path | None, store: str | None) -> str:
    """The store's URL."""
    return loaded(path, Flags(store=store)).store.url
