"""``weir conversations``: what the store knows, read without disturbing a Weir that is running."""

import asyncio
import contextlib
import datetime as dt
import difflib
import json
import shlex
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

import click
from rich.table import Table
from rich.text import Text

from proxy.cli import Failure
from proxy.cli.config import config_option, console, json_option, loaded, print_json
from proxy.config import Flags, masked_url
from proxy.store import Store, StoreError
from proxy.store.records import CheckpointRow, ConversationRow, ExchangeRow, Original

T = TypeVar("T")

NAMES_TRIED = 1000
NAMES_SHOWN = 3
REQUESTS_SHOWN = 200
EXCERPT = 60
COMPACT = "compact"
STATE = ("pressure", "pressure_before", "velocity", "turns_until_red", "action", "observed", "detail")

store_option = click.option("--store", metavar="URL", help="The database; else the configuration's.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Removed:
    """One message that is out of the window, wholly or in part.

    ``how`` are the kinds of edit that it met, oldest kind of work first; role, tokens and text are empty where
    the archive keeps digests only.
    """

    ref: str
    how: tuple[str, ...]
    role: str = ""
    tokens: int = 0
    text: str = ""


@click.group()
def conversations() -> None:
    """What Weir knows about conversations: how full they are, what was done to them, what was removed.

    \b
    Example:
      weir conversations list
      weir conversations show support-4711 --timeline
    """


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
    url = loaded(path, Flags(store=store)).store.url
    rows = asyncio.run(_reading(url, lambda opened: opened.conversations(None, limit=limit)))
    if as_json:
        print_json([asdict(row) for row in rows])
        return
    if not rows:
        click.echo(f"No conversations in {masked_url(url)}.", err=True)
        return
    table = Table("conversation", "key", "model", "requests", "tokens", "zone", "last actions", "last used (UTC)")
    _plain(table)
    for row in rows:
        table.add_row(
            Text(_tame(row.name)),
            row.tenant[:8],
            Text(_tame(row.model)),
            str(row.requests),
            _tokens(row.tokens_before, row.tokens_after, row.limit),
            row.zone,
            row.actions,
            _moment(row.updated),
        )
    console().print(table)


@conversations.command()
@click.argument("name", metavar="ID")
@click.option("--timeline", is_flag=True, help=f"One line per request, the newest {REQUESTS_SHOWN}.")
@click.option("--checkpoint", is_flag=True, help="The newest checkpoint: what stands for the compacted history.")
@click.option("--removed", is_flag=True, help="Every message that was removed, with the ref that --ref takes.")
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
    ref: str | None,
    path: Path | None,
    store: str | None,
    as_json: bool,
) -> None:
    """One conversation, by its name or id.

    \b
    Example:
      weir conversations show support-4711 --removed
      weir conversations show support-4711 --ref 74e67f258338
    """
    if sum((timeline, checkpoint, removed, ref is not None)) > 1:
        raise click.UsageError("--timeline, --checkpoint, --removed and --ref are asked one at a time")
    url = loaded(path, Flags(store=store)).store.url

    async def read(opened: Store) -> Callable[[], None]:
        row = await _found(opened, name)
        if timeline:
            requests = await opened.timeline(row, limit=REQUESTS_SHOWN)
            return lambda: _show_timeline(requests, as_json=as_json)
        if checkpoint:
            newest = await _newest(opened, row)
            return lambda: _show_checkpoint(newest, as_json=as_json)
        if removed:
            gone = await removed_from(opened, row)
            return lambda: _show_removed(gone, as_json=as_json)
        if ref is not None:
            originals = await _originals(opened, row, ref)
            return lambda: _show_originals(originals, as_json=as_json)
        gone, saved = await removed_from(opened, row), await _checkpoints(opened, row)
        last = (await opened.timeline(row, limit=1))[-1:]
        return lambda: _show_status(row, gone, saved, last=last, where=_where(path, store), as_json=as_json)

    asyncio.run(_reading(url, read))()


async def removed_from(store: Store, row: ConversationRow) -> list[Removed]:
    """What is out of the window in the newest branch of a conversation, in order of its history where known."""
    newest = await store.timeline(row, limit=1)
    branch = await store.branch(row.tenant, newest[0].branch) if newest else None
    if branch is None:
        return []
    checkpoints = [each for each in await store.checkpoints(row) if each.branch == branch.branch]
    covered = checkpoints[-1].covered if checkpoints else ()
    how: dict[str, dict[str, None]] = {ref: {} for ref in covered}
    for edit in branch.edits:
        how.setdefault(edit.ref, {})[str(edit.kind)] = None
    for ref in covered:
        how[ref][COMPACT] = None
    found = []
    for ref, kinds in how.items():
        original = await store.original(row.tenant, ref)
        if original is None:
            found.append(Removed(ref=ref, how=tuple(kinds)))
        else:
            role, tokens, text = original.role, original.tokens, original.text
            found.append(Removed(ref=ref, how=tuple(kinds), role=role, tokens=tokens, text=text))
    return found


@contextlib.asynccontextmanager
async def opened_to_read(url: str) -> AsyncIterator[Store]:
    """The store behind ``url``, looked at only; its errors as one-line failures."""
    try:
        store = await Store.open(url, read_only=True)
        try:
            yield store
        finally:
            await store.close()
    except StoreError as fault:
        raise Failure(f"{masked_url(url)}: {fault}") from fault


async def _reading(url: str, read: Callable[[Store], Awaitable[T]]) -> T:
    async with opened_to_read(url) as store:
        return await read(store)


async def _found(store: Store, name: str) -> ConversationRow:
    row = await store.conversation(None, name)
    if row is None:
        known = [each.name for each in await store.conversations(None, limit=NAMES_TRIED)]
        raise Failure(f"no conversation {name}{_near(name, known)}")
    return row


def _near(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(known), n=NAMES_SHOWN, cutoff=0.6)
    return f"; did you mean {' or '.join(close)}?" if close else "; see weir conversations list"


async def _checkpoints(store: Store, row: ConversationRow) -> list[CheckpointRow]:
    """Every checkpoint, oldest first; a cut that drops messages without a summary has no body and is none."""
    return [each for each in await store.checkpoints(row) if each.body]


async def _newest(store: Store, row: ConversationRow) -> CheckpointRow:
    checkpoints = await _checkpoints(store, row)
    if not checkpoints:
        raise Failure(f"{row.name} has no checkpoint: nothing was compacted in it")
    return checkpoints[-1]


async def _originals(store: Store, row: ConversationRow, ref: str) -> list[Original]:
    """The message with this ref, or all that the summary with this ref covers."""
    one = await store.original(row.tenant, ref)
    found = [one] if one is not None else await store.covered(row.tenant, ref)
    if not found:
        gone = await removed_from(store, row)
        hint = "" if gone else ": nothing was removed from it"
        if any(each.ref == ref for each in gone):
            hint = ": its content was not kept (store.content is digest) or is damaged"
        raise Failure(f"no original {ref} in {row.name}{hint}")
    return found


def _show_status(
    row: ConversationRow,
    gone: list[Removed],
    checkpoints: list[CheckpointRow],
    *,
    last: list[ExchangeRow],
    where: str,
    as_json: bool,
) -> None:
    if as_json:
        out = {"messages": len(gone), "tokens": sum(each.tokens for each in gone), "kinds": kinds_of(gone)}
        state = {name: getattr(each, name) for each in last for name in STATE}
        print_json({**asdict(row), **state, "removed": out, "checkpoints": [each.version for each in checkpoints]})
        return
    table = Table.grid(padding=(0, 2))
    values = {
        "conversation": row.name,
        "id": row.id,
        "key": row.tenant,
        "model": row.model,
        "requests": f"{row.requests} on {row.branches} branch{'es' if row.branches != 1 else ''}",
        "first and last used": f"{_moment(row.created)} to {_moment(row.updated)} UTC",
        "last request": f"{_tokens(row.tokens_before, row.tokens_after, row.limit)} tokens, {row.zone}",
        **{name: line for each in last for name, line in (("pressure", _pressure(each)), ("growth", _growth(each)))},
        "last actions": row.actions,
        "batches of edits": str(row.version),
        "checkpoints": ", ".join(str(each.version) for each in checkpoints) or "none",
        "removed": removed_line(gone),
    }
    for label, value in values.items():
        table.add_row(label, Text(_tame(value)))
    console().print(table)
    for option in ["--timeline", *(["--checkpoint"] if checkpoints else []), *(["--removed"] if gone else [])]:
        click.echo(f"  weir conversations show {shlex.quote(_tame(row.name))} {option}{where}", err=True)


def _pressure(row: ExchangeRow) -> str:
    """Pressure before and after the newest request was managed, the zone, and what that took."""
    before = row.pressure if row.pressure_before is None else row.pressure_before
    moved = f"{before:.2f} > {row.pressure:.2f}" if f"{before:.2f}" != f"{row.pressure:.2f}" else f"{row.pressure:.2f}"
    return f"{moved}, {row.zone}; {row.action}{', observed only' if row.observed else ''}"


def _growth(row: ExchangeRow) -> str:
    """How fast the conversation grows, and when that will be too much."""
    if row.velocity is None:
        return "not known yet"
    left = "" if row.turns_until_red is None else f", red in {row.turns_until_red:g}"
    return f"{row.velocity:,.1f} tokens per request{left}"


def _where(path: Path | None, store: str | None) -> str:
    """The options that lead to the same store again."""
    given = (("--config", path), ("--store", store))
    return "".join(f" {option} {shlex.quote(str(value))}" for option, value in given if value is not None)


def kinds_of(gone: Iterable[Removed]) -> dict[str, int]:
    """How many messages met each kind of edit; a message may have met several."""
    counts: dict[str, int] = {}
    for each in gone:
        for kind in each.how:
            counts[kind] = counts.get(kind, 0) + 1
    return dict(sorted(counts.items()))


def removed_line(gone: list[Removed]) -> str:
    """What was removed, in one line."""
    if not gone:
        return "nothing"
    kinds = ", ".join(f"{kind} {count}" for kind, count in kinds_of(gone).items())
    return f"{len(gone)} messages, {sum(each.tokens for each in gone):,} tokens ({kinds})"


def _show_timeline(requests: list[ExchangeRow], *, as_json: bool) -> None:
    if as_json:
        print_json([_plain_exchange(row) for row in requests])
        return
    table = Table(
        "at (UTC)", "messages", "tokens", "pressure", "zone", "velocity", "action", "actions", "outcome", "cached",
        "weir ms",
    )  # fmt: skip
    _plain(table)
    for row in requests:
        cached = f"{row.usage_cached / row.usage_prompt:.0%}" if row.usage_cached and row.usage_prompt else ""
        table.add_row(
            _moment(row.at),
            str(row.length),
            _tokens(row.tokens_before, row.tokens_after, row.limit),
            f"{row.pressure:.2f}",
            row.zone,
            "" if row.velocity is None else f"{row.velocity:,.0f}",
            row.action,
            row.actions,
            f"{row.status} {row.outcome}",
            cached,
            f"{row.overhead_ms:.1f}",
        )
    console().print(table)


def _plain_exchange(row: ExchangeRow) -> dict[str, object]:
    own = {name: value for name, value in asdict(row).items() if name not in {"trend", "asked_again"}}
    return {**own, "chain_end": row.chain_end.hex(), "detail": dict(row.detail)}


def _show_checkpoint(row: CheckpointRow, *, as_json: bool) -> None:
    if as_json:
        state = json.loads(row.body) if row.body else None
        shown = {"version": row.version, "at": row.at, "branch": row.branch, "covers": row.cut.covers}
        shown |= {"origin": row.cut.origin, "tokens": row.cut.tokens, "ref": row.cut.ref, "text": row.cut.text}
        print_json({**shown, "covered": list(row.covered), "state": state})
        return
    cut = row.cut
    click.echo(
        f"Version {row.version}, {_moment(row.at)} UTC: {cut.tokens:,} tokens ({cut.origin}) stand for the first "
        f"{cut.covers} messages after the head; ref {cut.ref}.\n",
        err=True,
    )
    _say(cut.text)


def _show_removed(gone: list[Removed], *, as_json: bool) -> None:
    if as_json:
        print_json([asdict(each) for each in gone])
        return
    if not gone:
        click.echo("Nothing was removed.", err=True)
        return
    table = Table("ref", "role", "tokens", "how", "begins with")
    _plain(table)
    for each in gone:
        start = " ".join(each.text[: 4 * EXCERPT].split())[:EXCERPT]
        table.add_row(each.ref, each.role or "?", f"{each.tokens:,}", ", ".join(each.how), Text(_tame(start)))
    console().print(table)


def _show_originals(originals: list[Original], *, as_json: bool) -> None:
    if as_json:
        shown = [(each, json.loads(each.body)) for each in originals]
        print_json([{"ref": o.ref, "role": o.role, "tokens": o.tokens, "message": body} for o, body in shown])
        return
    for original in originals:
        if len(originals) > 1:
            click.echo(f"--- {original.ref} {original.role}", err=True)
        _say(original.text)


def _say(text: str) -> None:
    """Print what somebody else wrote: on a terminal without control characters, elsewhere as it is."""
    shown = _tame(text) if sys.stdout.isatty() else text
    click.echo(shown.encode("utf-8", "replace"))


def _tame(text: str) -> str:
    return "".join(c if c in "\n\t" or c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def _plain(table: Table) -> None:
    """The look of every table of the command line."""
    table.box, table.pad_edge, table.header_style = None, False, "bold"


def _tokens(before: int, after: int, limit: int) -> str:
    moved = f"{before:,} > {after:,}" if after != before else f"{after:,}"
    return f"{moved} of {limit:,}"


def _moment(at: float) -> str:
    return dt.datetime.fromtimestamp(at, tz=dt.UTC).strftime("%Y-%m-%d %H:%M:%S")
