"""What commands share: options, the configuration these make, the store beside a running Weir, and how answers look.

Tables and lines are for people, JSON for programs, progress goes to stderr.
"""

import asyncio
import contextlib
import datetime as dt
import difflib
import functools
import json
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import click
from rich.console import Console
from rich.measure import measure_renderables
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from proxy.access.keys import Keyring
from proxy.cli import Failure
from proxy.config import Config, ConfigError, Flags, environment, load_config, masked_url
from proxy.config.file import nearest
from proxy.store import Store
from proxy.store.records import ConversationRow, RemovedRow, StoreError

WIDTH = 200
"""Columns where standard output is no terminal, so that nothing is cut in a pipe."""
SHORT = 24
"""Cells up to this width stay on one line: as wide as what is said of tokens, and as a generated name."""
SECONDS_BETWEEN_LINES = 5.0

Progressed = Callable[[int, int, str], None]


def print_json(value: object) -> None:
    """One JSON document on stdout."""
    click.echo(json.dumps(value, indent=2, ensure_ascii=False))


def print_line(text: str, *, wrap: bool = False) -> None:
    """One line, however long; with ``wrap`` as wide as the terminal."""
    console().print(text, soft_wrap=not wrap, markup=False)


def print_table(
    titles: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    numbers: int | None = None,
    optional: Collection[str] = (),
    width: int = WIDTH,
) -> None:
    """Rows under ``titles``; columns from ``numbers`` on are set to the right, ``optional`` ones left out if empty."""
    cells = [[_cell(value) for value in row] for row in rows]
    shown = [i for i, title in enumerate(titles) if title not in optional or any(str(row[i]) for row in cells)]
    table = Table(*(titles[i] for i in shown), box=None, pad_edge=False, header_style="bold")
    for column in table.columns[numbers:] if numbers is not None else ():
        column.justify = "right"
    for row in cells:
        table.add_row(*(row[i] for i in shown))
    _print(table, width)


def print_facts(facts: Mapping[str, object]) -> None:
    """A line for each fact that is not None."""
    table = Table.grid(padding=(0, 2))
    for label, value in facts.items():
        if value is not None:
            table.add_row(label, _cell(value))
    _print(table, WIDTH)


def console(width: int = WIDTH) -> Console:
    """Standard output: as wide as the terminal, else ``width``."""
    terminal = Console(highlight=False, soft_wrap=False)
    return terminal if terminal.is_terminal else Console(highlight=False, width=width)


def say(text: str) -> None:
    """Print what somebody else wrote: on a terminal without control characters, elsewhere as it is."""
    shown = tame(text) if sys.stdout.isatty() else text
    click.echo(shown.encode("utf-8", "replace"))


def tame(text: str) -> str:
    """A text without control characters."""
    return "".join(c if c in "\n\t" or c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def moment(at: float) -> str:
    """Seconds since the epoch as a date and a time in UTC."""
    return dt.datetime.fromtimestamp(at, tz=dt.UTC).strftime("%Y-%m-%d %H:%M:%S")


def counted(number: int, noun: str) -> str:
    """``1 request``, ``1,200 requests``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


@contextmanager
def progress(label: str) -> Iterator[Progressed]:
    """A function to be told what is done, of how much, and in a line: a bar on a terminal, else a line at times."""
    screen = Console(stderr=True, highlight=False)
    if not screen.is_terminal:
        yield _lines(screen)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=screen, transient=True) as bar:
        task = bar.add_task(label)
        yield lambda done, total, text: bar.update(task, completed=done, total=total, description=text)


def _lines(screen: Console) -> Progressed:
    last = time.monotonic()

    def progressed(done: int, total: int, text: str) -> None:  # noqa: ARG001 - the line says it in words
        nonlocal last
        if time.monotonic() - last > SECONDS_BETWEEN_LINES:
            last = time.monotonic()
            screen.print(text)

    return progressed


def _cell(value: object) -> Text:
    return Text("" if value is None else tame(str(value)))


def _print(table: Table, width: int) -> None:
    screen = console(width)
    left_out = _fit(table, screen) if screen.is_terminal else []
    with screen.capture() as captured:
        screen.print(table)
    lean = width != WIDTH
    click.echo("\n".join(line.rstrip() if lean else line for line in captured.get().splitlines()))
    if left_out:
        screen.print(Text(f"({', '.join(left_out)}: in a wider terminal, or with --json)"), style="dim")


def _fit(table: Table, screen: Console) -> list[str]:
    """Set the widths of the table's columns so that no word is broken; the titles of the columns left out for that.

    What is short stays on its line, and only a word of more than a third of the screen is folded.
    """
    columns, gap, longest = table.columns, 2, screen.width // 3
    spans = [measure_renderables(screen, screen.options, [each.header, *each.cells]) for each in columns]
    cells = [measure_renderables(screen, screen.options, [*each.cells]).maximum for each in columns]
    least = [
        min(max(span.minimum, cell if cell <= SHORT else 0), longest) for span, cell in zip(spans, cells, strict=True)
    ]
    shown = len(columns)
    while shown > 1 and sum(least[:shown]) + gap * (shown - 1) > screen.width:
        shown -= 1
    left_out = [str(each.header) for each in columns[shown:]]
    del columns[shown:]
    room = max(0, screen.width - sum(least[:shown]) - gap * (shown - 1))
    for at in sorted(range(shown), key=lambda at: spans[at].maximum - least[at]):
        more = min(spans[at].maximum - least[at], room)
        columns[at].width, columns[at].overflow, room = least[at] + more, "fold", room - more
    return left_out


T = TypeVar("T")
NAMES_TRIED = 10_000
NAMES_SHOWN = 3

config_option = click.option(
    "--config",
    "path",
    type=click.Path(path_type=Path, dir_okay=False),
    help="The YAML configuration file; defaults to WEIR_CONFIG.",
)
store_option = click.option("--store", metavar="URL", help="The database; defaults to the configuration's.")
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def configured(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command ``--config``; it is called with ``config``, what that makes of the configuration."""

    @functools.wraps(command)
    def run(*, path: Path | None, **options: Any) -> Any:
        return command(config=loaded(path), **options)

    return config_option(run)


def stored(command: Callable[..., Any]) -> Callable[..., Any]:
    """The same with ``--store``."""

    @functools.wraps(command)
    def run(*, path: Path | None, store: str | None, **options: Any) -> Any:
        return command(config=loaded(path, Flags(store=store)), **options)

    return config_option(store_option(run))


def loaded(path: Path | None, flags: Flags | None = None) -> Config:
    """The effective configuration of this process, or a one-line failure that names the first fault."""
    try:
        return load_config(path, env=environment(), flags=flags or Flags())
    except ConfigError as fault:
        more = f" (and {len(fault.problems) - 1} more, see weir config check)" if len(fault.problems) > 1 else ""
        raise Failure(f"{fault.problems[0]}{more}") from fault


def known_policy(name: str, config: Config) -> str:
    """A name that is a policy's, else wrong usage of ``--policy``."""
    if name not in config.policies:
        raise click.BadParameter(f"no policy {name}{nearest(name, sorted(config.policies))}", param_hint="--policy")
    return name


def reading(config: Config, read: Callable[[Store], Awaitable[T]]) -> T:
    """What ``read`` makes of the configuration's store, which has to be there."""

    async def work() -> T:
        async with opened(config.store.url, read_only=True) as store:
            return await read(store)

    return asyncio.run(work())


def writing(config: Config, write: Callable[[Store], Awaitable[T]], *, create: bool = False) -> T:
    """What ``write`` makes of the configuration's store, which it may change; with ``create`` it need not be there."""

    async def work() -> T:
        if not create:
            async with opened(config.store.url, read_only=True):
                pass
        async with opened(config.store.url, visitor=True) as store:
            return await write(store)

    return asyncio.run(work())


@contextlib.asynccontextmanager
async def opened(url: str, *, read_only: bool = False, visitor: bool = False) -> AsyncIterator[Store]:
    """A store for a moment, beside a Weir that may be running; its errors as one-line failures."""
    try:
        store = await Store.open(url, read_only=read_only, visitor=visitor)
        try:
            yield store
        finally:
            await store.close()
    except StoreError as fault:
        raise Failure(f"{masked_url(url)}: {fault}") from fault


async def key_names(store: Store, config: Config) -> dict[str, str]:
    """The name of every key, of the configuration and of the store, by its tenant."""
    return Keyring(config.keys, await store.list_keys(), secret=await store.secret(), mode="keys").names


async def found(store: Store, name: str) -> ConversationRow:
    """The conversation with this name or id. Fails for none, and for one of several that different keys named so."""
    row = await store.conversation(None, name)
    known = await store.conversations(None, limit=NAMES_TRIED)
    if row is None:
        close = difflib.get_close_matches(name, [each.name for each in known], n=NAMES_SHOWN, cutoff=0.6)
        hint = f"did you mean {' or '.join(close)}?" if close else "see weir conversations list"
        raise Failure(f"no conversation {name}; {hint}")
    same = sorted({each.id for each in known if name in (each.name, each.id)})
    if len(same) > 1:
        shown = ", ".join(same[:NAMES_SHOWN]) + (", …" if len(same) > NAMES_SHOWN else "")
        raise Failure(f"{len(same)} conversations of different keys are called {name}; say which by its id: {shown}")
    return row


def kinds_of(gone: Iterable[RemovedRow]) -> dict[str, int]:
    """How many messages each kind of edit, or layer of a cut, has taken."""
    counts: dict[str, int] = {}
    for each in gone:
        counts[each.how] = counts.get(each.how, 0) + 1
    return dict(sorted(counts.items()))


def removed_line(gone: list[RemovedRow]) -> str:
    """What was removed, in one line."""
    if not gone:
        return "nothing"
    kinds = ", ".join(f"{kind} {count}" for kind, count in kinds_of(gone).items())
    return f"{len(gone)} messages, {sum(each.tokens for each in gone):,} tokens ({kinds})"
