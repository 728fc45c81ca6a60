"""``weir audit verify`` and ``list``: whether the audit is what was written, and what it says."""

import datetime as dt
import json
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from proxy.cli import Failure
from proxy.cli.config import config_option, console, json_option, loaded, print_json
from proxy.cli.conversations_read import reading, store_option
from proxy.config import Flags
from proxy.store import Audited, AuditRow, AuditType, Store, Verified

OPERATOR = "operator"
QUIET_FOR = 5.0
TENANT_SHOWN = 8
FACTS_SHOWN = 100
HEAD = re.compile(r"(?:(\d+):)?([0-9a-f]{64})")

tenant_option = click.option(
    "--tenant", metavar="T", help=f"Only this chain: a tenant's id or how it begins, or {OPERATOR}; else all."
)


@dataclass(frozen=True, slots=True)
class Head:
    """A head that was noted earlier: the row's number, None where that was not noted, and its hash."""

    seq: int | None
    link: bytes


@click.command()
@tenant_option
@click.option("--head", "heads", multiple=True, metavar="HASH", help="A head noted earlier; may be repeated.")
@config_option
@store_option
@json_option
def verify(*, tenant: str | None, heads: tuple[str, ...], path: Path | None, store: str | None, as_json: bool) -> None:
    """Walk every chain of the audit: is each row what was written, and is each there?

    A chain that was cut short at its end looks like a shorter one. So note down the head that this prints, somewhere
    else, and give it with --head later: it must still be in the chain. Rows that retention took out stand under a seal.

    \b
    Example:
      weir audit verify
      weir audit verify --head 412:9f2c51c0be5dbe6ea3f7a8a1b9d6a0a7c6f8a6f0f0b1c9d8e7f6a5b4c3d2e1f0
    """
    noted = [_head(text) for text in heads]
    url = loaded(path, Flags(store=store)).store.url

    async def read(opened: Store) -> Audited:
        only = None if tenant is None else await _tenant(opened, tenant)
        with _progress() as moved:
            return await opened.verify(only, heads=[each.link for each in noted], progress=moved)

    audited = reading(url, read)
    lost = [each for each in noted if not any(each.link in chain.found for chain in audited.chains)]
    if as_json:
        print_json(_plain(audited, noted, lost))
    else:
        _show(audited, noted, lost)
    broken = sum(1 for chain in audited.chains if chain.broken is not None)
    if broken or lost or audited.unguarded:
        raise Failure("; ".join(_faults(audited, lost, broken)))


@click.command("list")
@click.option("--conversation", metavar="ID", help="Only this one, by its name or id; also one that was deleted.")
@click.option("--type", "kind", type=click.Choice([str(each) for each in AuditType]), help="Only rows of this type.")
@click.option("--limit", type=click.IntRange(min=1), default=50, show_default=True, help="How many, newest first.")
@tenant_option
@config_option
@store_option
@json_option
def list_rows(
    *,
    conversation: str | None,
    kind: str | None,
    limit: int,
    tenant: str | None,
    path: Path | None,
    store: str | None,
    as_json: bool,
) -> None:
    """What was done to conversations, policies and keys, the newest first.

    \b
    Example:
      weir audit list --conversation support-4711
      weir audit list --type budget_violation --limit 20 --json
    """
    url = loaded(path, Flags(store=store)).store.url

    async def read(opened: Store) -> list[AuditRow]:
        only = None if tenant is None else await _tenant(opened, tenant)
        known = None if conversation is None else await opened.conversation(only, conversation)
        wanted = conversation if known is None else known.id
        return await opened.audit(only, conversation=wanted, kind=kind, limit=limit)

    rows = reading(url, read)
    if as_json:
        print_json([_row(row) for row in rows])
    elif not rows:
        click.echo("Nothing of the kind is in the audit.", err=True)
    else:
        _show_rows(rows)


def _head(text: str) -> Head:
    found = HEAD.fullmatch(text.strip().lower())
    if found is None:
        raise click.BadParameter("should be 64 hex digits, as verify prints them", param_hint="--head")
    return Head(None if found[1] is None else int(found[1]), bytes.fromhex(found[2]))


async def _tenant(store: Store, given: str) -> str:
    """The tenant that is meant. Fails for none, and for several that begin so."""
    if given == OPERATOR:
        return ""
    known = await store.audited_tenants()
    matching = [each for each in known if each.startswith(given)] if given not in known else [given]
    if not given or len(matching) != 1:
        there = f"{len(matching)} chains begin" if len(matching) > 1 else "no chain begins"
        raise Failure(f"{there} with {given!r}; see weir audit verify")
    return matching[0]


def _faults(audited: Audited, lost: list[Head], broken: int) -> Iterator[str]:
    if broken:
        yield f"{broken} of {len(audited.chains)} chains {'is' if broken == 1 else 'are'} not what was written"
    if lost:
        yield f"{len(lost)} of the given heads {'is' if len(lost) == 1 else 'are'} not there"
    if audited.unguarded:
        yield f"the table is not guarded any more: {', '.join(audited.unguarded)}"


def _plain(audited: Audited, noted: list[Head], lost: list[Head]) -> dict[str, object]:
    return {
        "ok": not (lost or audited.unguarded or any(chain.broken for chain in audited.chains)),
        "chains": [{**asdict(chain), "found": sorted(link.hex() for link in chain.found)} for chain in audited.chains],
        "heads": [{"head": each.link.hex(), "found": each not in lost} for each in noted],
        "unguarded": audited.unguarded,
    }


def _show(audited: Audited, noted: list[Head], lost: list[Head]) -> None:
    if not audited.chains:
        click.echo("Nothing is in the audit.", err=True)
    else:
        table = Table(
            "chain",
            "rows",
            "good",
            "sealed up to",
            "first broken",
            "head",
            box=None,
            pad_edge=False,
            header_style="bold",
        )
        for chain in audited.chains:
            broken = "-" if chain.broken is None else f"{chain.broken.seq}: {chain.broken.kind}"
            sealed = str(chain.sealed) if chain.sealed else "-"
            table.add_row(_name(chain.tenant), str(chain.rows), str(chain.good), sealed, broken, chain.head)
        console().print(table)
    for each in noted:
        click.echo(f"{each.link.hex()[:12]}… {_where(each, audited.chains) if each in lost else 'is in the chain'}")


def _where(head: Head, chains: list[Verified]) -> str:
    """Why a head may not be found."""
    if head.seq is not None and any(head.seq < chain.sealed for chain in chains):
        return "is not in a chain; a row of that number was taken out under a seal in one"
    return "is not in any chain: one was cut short, or made anew"


def _row(row: AuditRow) -> dict[str, object]:
    return {**asdict(row), "facts": row.told, "prev": row.prev.hex(), "hash": row.hash.hex()}


def _show_rows(rows: list[AuditRow]) -> None:
    table = Table(
        "at (UTC)", "row", "type", "facts", "conversation", "chain", "request",
        box=None, pad_edge=False, header_style="bold",
    )  # fmt: skip
    for row in rows:
        moment = dt.datetime.fromtimestamp(row.at, tz=dt.UTC).strftime("%Y-%m-%d %H:%M:%S")
        told = json.dumps(row.told, ensure_ascii=False)  # with blanks, at which a narrow terminal breaks lines
        facts = told if len(told) <= FACTS_SHOWN else f"{told[:FACTS_SHOWN]}…"
        whose = (row.conversation or "-", _name(row.tenant), row.request or "-")
        table.add_row(moment, str(row.seq), row.type, Text(facts), *whose)
    console().print(table)


def _name(tenant: str) -> str:
    return tenant[:TENANT_SHOWN] if tenant else OPERATOR


@contextmanager
def _progress() -> Iterator["Moved"]:
    """Says on stderr how many rows were looked at: a bar on a terminal, else a line every few seconds."""
    screen = Console(stderr=True, highlight=False)
    if not screen.is_terminal:
        yield Moved(screen, None)
        return
    columns = (TextColumn("rows"), BarColumn(), TextColumn("{task.completed}"), TimeRemainingColumn())
    with Progress(*columns, console=screen, transient=True) as bar:
        yield Moved(screen, bar)


class Moved:
    """Called now and then with the rows looked at and all that there are."""

    def __init__(self, screen: Console, bar: Progress | None) -> None:
        self._screen = screen
        self._bar = bar
        self._task = None if bar is None else bar.add_task("rows")
        self._said = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        """Show it, unless something was said a moment ago."""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=done, total=total)
        elif time.monotonic() - self._said > QUIET_FOR:
            self._said = time.monotonic()
            self._screen.print(f"{done} of {total} rows")
