"""``weir config``: the effective configuration, where each value came from, and whether a file is right."""

import json
from collections.abc import Iterator, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any, cast

import click
from rich.console import Console
from rich.measure import measure_renderables
from rich.table import Table
from rich.text import Text

from proxy.cli import Failure
from proxy.config import Config, ConfigError, Flags, environment, load_config, public
from proxy.config.file import KeyPath, dotted

SHORT = 24  # as wide as what is said of tokens, and as a generated name

config_option = click.option(
    "--config",
    "path",
    type=click.Path(path_type=Path, dir_okay=False),
    help="The YAML file; else WEIR_CONFIG; else there is none.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="For programs.")


def loaded(path: Path | None, flags: Flags | None = None) -> Config:
    """The effective configuration of this process, or a one-line failure that names the first fault."""
    try:
        return load_config(path, env=environment(), flags=flags or Flags())
    except ConfigError as fault:
        more = f" (and {len(fault.problems) - 1} more, see weir config check)" if len(fault.problems) > 1 else ""
        raise Failure(f"{fault.problems[0]}{more}") from fault


def print_json(value: object) -> None:
    """One JSON document on stdout."""
    click.echo(json.dumps(value, indent=2, ensure_ascii=False))


def flat(value: object, path: KeyPath = ()) -> Iterator[tuple[KeyPath, object]]:
    """Every leaf of plain data with its path; an empty mapping or list is a leaf."""
    if isinstance(value, Mapping) and value:
        for key, each in value.items():
            yield from flat(each, (*path, str(key)))
    elif isinstance(value, list) and value:
        for at, each in enumerate(value):
            yield from flat(each, (*path, at))
    else:
        yield path, value


def shown(value: object) -> str:
    """A leaf as YAML would write it."""
    return value if isinstance(value, str) else json.dumps(value)


@click.group()
def config() -> None:
    """The effective configuration.

    \b
    Example:
      weir config check --config weir.yaml && weir config show --config weir.yaml
    """


@config.command()
@config_option
@json_option
def show(path: Path | None, *, as_json: bool) -> None:
    """Every value that holds and where it came from; secrets are shown as ***.

    \b
    Example:
      WEIR_PORT=9000 weir config show
    """
    effective = loaded(path)
    data = cast("dict[str, object]", public(effective))
    if as_json:
        print_json(data)
        return
    table = Table("value", "", "from", box=None, pad_edge=False, header_style="bold")
    rows = {key: value for key, value in data.items() if key not in {"policies", "warnings"}}
    for at, value in flat(rows):
        table.add_row(dotted(at), shown(value), _source(effective, at))
    for name in effective.policies:
        table.add_row(f"policies.{name}", f"weir policy show {name}", _source(effective, ("policies", name)))
    console().print(table)
    _warn(effective)


@config.command()
@config_option
@json_option
def check(path: Path | None, *, as_json: bool) -> None:
    """Read a file as `weir serve` would; every fault is one line with file, line and path.

    \b
    Example:
      weir config check --config weir.yaml
    """
    try:
        effective = load_config(path, env=environment())
    except ConfigError as fault:
        if as_json:
            print_json({"ok": False, "problems": list(fault.problems), "warnings": []})
        else:
            for problem in fault.problems:
                click.echo(problem, err=True)
        raise click.exceptions.Exit(1) from fault
    if as_json:
        print_json({"ok": True, "problems": [], "warnings": list(effective.warnings)})
        return
    click.echo(f"{effective.path or 'no file, the defaults'}: ok")
    _warn(effective)


@config.command()
def example() -> None:
    """A file with every key, its default and a comment, to begin your own with.

    \b
    Example:
      weir config example > weir.yaml
    """
    click.echo((files("proxy") / "defaults" / "weir.yaml").read_text(encoding="utf-8"), nl=False)


def _source(effective: Config, at: KeyPath) -> str:
    return effective.places.get(at, "default")


def _warn(effective: Config) -> None:
    for warning in effective.warnings:
        click.echo(f"warning: {warning}", err=True)


def console() -> Console:
    """Standard output; as wide as it needs where it is no terminal, so that nothing is cut in a pipe."""
    console = _Terminal(highlight=False, soft_wrap=False)
    return console if console.is_terminal else Console(highlight=False, width=200)


class _Terminal(Console):
    """A terminal, in which a table keeps its words whole: what has no room is left out, the last columns first."""

    def print(self, *objects: Any, **options: Any) -> None:
        """Print as rich does, tables fitted."""
        left_out = [title for each in objects if isinstance(each, Table) for title in _fit(each, self)]
        super().print(*objects, **options)
        if left_out:
            super().print(Text(f"({', '.join(left_out)}: in a wider terminal, or with --json)"), style="dim")


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
