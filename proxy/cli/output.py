"""How answers look: tables and lines for people, progress on stderr. Loaded only by the commands
that print them.
"""

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import click
import msgspec
from rich.console import Console
from rich.measure import measure_renderables
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from proxy.cli.shared import Findings, moment, tame

WIDTH = 200
"""Columns where standard output is no terminal, so that nothing is cut in a pipe."""
SHORT = 24
"""Cells up to this width stay on one line: as wide as token counts and as a generated name.
"""
SECONDS_BETWEEN_LINES = 5.0
MONEY = frozenset({"cost", "cost_saved", "summarizer_cost"})
MOMENTS = frozenset({"at", "since", "created", "updated", "closed", "expires", "revoked"})

Row = TypeVar("Row", bound=Any)
Progressed = Callable[[int, int, str], None]


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
    """Rows under ``titles``; columns from ``numbers`` on are set to the right, ``optional`` ones
    left out if empty.
    """
    cells = [[_cell(value) for value in row] for row in rows]
    shown = [
        i
        for i, title in enumerate(titles)
        if title not in optional or any(str(row[i]) for row in cells)
    ]
    table = Table(*(titles[i] for i in shown), box=None, pad_edge=False, header_style="bold")
    for column in table.columns[numbers:] if numbers is not None else ():
        column.justify = "right"
    for row in cells:
        table.add_row(*(row[i] for i in shown))
    _print(table, width)


def print_columns(
    rows: Iterable[Row],
    columns: Mapping[str, Callable[[Row], object]],
    *,
    optional: Collection[str] = (),
) -> None:
    """Rows under the titles of the columns, each with what makes its cell of a row."""
    print_table(
        tuple(columns),
        [[cell(row) for cell in columns.values()] for row in rows],
        optional=optional,
    )


def table(
    rows: Sequence[Row],
    columns: Mapping[str, Callable[[Row], object]],
    *,
    plain: Callable[[Row], object] = msgspec.to_builtins,
    empty: str = "",
    optional: Collection[str] = (),
) -> Findings:
    """Rows as a list of values, and under the titles of the columns; ``empty`` is said where there
    are none.
    """

    def show() -> None:
        if rows or not empty:
            print_columns(rows, columns, optional=optional)
        else:
            click.echo(empty, err=True)

    return Findings(lambda: [plain(row) for row in rows], show)


def listing(
    rows: Sequence[Mapping[str, Any]], fields: str, *, empty: str = "", optional: str = ""
) -> Findings:
    """Rows as they are, and of each the ``fields`` under their names; ``empty`` is said where there
    are none.
    """

    def show() -> None:
        if rows or not empty:
            spare = {
                name for name in optional.split() if all(row.get(name) is None for row in rows)
            }
            names = [name for name in fields.split() if name not in spare]
            print_table(
                [_title(n) for n in names],
                [[_written(n, row.get(n)) for n in names] for row in rows],
            )
        else:
            click.echo(empty, err=True)

    return Findings(lambda: rows, show)


def print_facts(*parts: tuple[Mapping[str, Any], str]) -> None:
    """Of each mapping those of the named fields that are known, a line each."""
    table = Table.grid(padding=(0, 2))
    for facts, fields in parts:
        for name in fields.split():
            if facts.get(name) not in (None, "", [], {}):
                table.add_row(_title(name), _cell(_written(name, facts[name])))
    _print(table, WIDTH)


def _title(name: str) -> str:
    return f"{name} (UTC)" if name in MOMENTS else name


def _written(name: str, value: object) -> str:
    if value is None or value in ("", [], ()):
        return "-"
    if name in MOMENTS and isinstance(value, int | float):
        return moment(value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.4f}" if name in MONEY else f"{value:,.2f}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_written(str(key), inner)}" for key, inner in value.items())
    if isinstance(value, list | tuple):
        return " ".join(_written(name, each) for each in value)
    return " ".join(str(value).split())


def console(width: int = WIDTH) -> Console:
    terminal = Console(highlight=False, soft_wrap=False)
    return terminal if terminal.is_terminal else Console(highlight=False, width=width)


@contextmanager
def progress(label: str) -> Iterator[Progressed]:
    """A function that takes what is done, the total, and a line of text: it draws a bar on a
    terminal, else prints a line now and then.
    """
    screen = Console(stderr=True, highlight=False)
    if not screen.is_terminal:
        yield _lines(screen)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=screen, transient=True) as bar:
        task = bar.add_task(label)
        yield lambda done, total, text: bar.update(
            task, completed=done, total=total, description=text
        )


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
        screen.print(
            Text(f"({', '.join(left_out)}: in a wider terminal, or with --json)"), style="dim"
        )


def _fit(table: Table, screen: Console) -> list[str]:
    columns = table.columns
    gap = 2
    longest = screen.width // 3
    spans = [
        measure_renderables(screen, screen.options, [each.header, *each.cells]) for each in columns
    ]
    cells = [measure_renderables(screen, screen.options, [*each.cells]).maximum for each in columns]
    least = [
        min(max(span.minimum, cell if cell <= SHORT else 0), longest)
        for span, cell in zip(spans, cells, strict=True)
    ]
    shown = len(columns)
    while shown > 1 and sum(least[:shown]) + gap * (shown - 1) > screen.width:
        shown -= 1
    left_out = [str(each.header) or "more" for each in columns[shown:]]
    del columns[shown:]
    room = max(0, screen.width - sum(least[:shown]) - gap * (shown - 1))
    for at in sorted(range(shown), key=lambda at: spans[at].maximum - least[at]):
        more = min(spans[at].maximum - least[at], room)
        columns[at].width = least[at] + more
        columns[at].overflow = "fold"
        room = room - more
    return left_out
