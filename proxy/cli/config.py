"""``weir config``: the effective configuration, where each value came from, and whether a file is right."""

import json
from collections.abc import Iterator, Mapping
from importlib.resources import files
from pathlib import Path
from typing import cast

import click

from proxy.cli.output import print_json, print_table
from proxy.cli.stored import config_option, configured, json_option
from proxy.config import Config, ConfigError, environment, load_config, public
from proxy.config.file import KeyPath, dotted


def flat(value: object, path: KeyPath = ()) -> Iterator[tuple[KeyPath, object]]:
    """Every leaf of plain data with its path; a list of plain values is one, and an empty mapping."""
    if isinstance(value, Mapping) and value:
        for key, each in value.items():
            yield from flat(each, (*path, str(key)))
    elif isinstance(value, list) and any(isinstance(each, Mapping | list) for each in value):
        for at, each in enumerate(value):
            yield from flat(each, (*path, at))
    else:
        yield path, value


def shown(value: object) -> str:
    """A leaf as YAML would write it."""
    return value if isinstance(value, str) else json.dumps(value)


@click.group()
def config() -> None:
    """Check and show the configuration.

    \b
    Example:
      weir config check --config weir.yaml && weir config show --config weir.yaml
    """


@config.command()
@configured
@json_option
def show(config: Config, *, as_json: bool) -> None:
    """Show every effective value and where it came from; secrets are shown as ***.

    \b
    Example:
      WEIR_PORT=9000 weir config show
    """
    data = cast("dict[str, object]", public(config))
    if as_json:
        return print_json(data)
    leaves = [
        leaf for key, value in data.items() if key not in {"policies", "warnings"} for leaf in flat(value, (key,))
    ]
    rows = [(dotted(at), shown(value), config.places.get(at, "default")) for at, value in leaves]
    for name in config.policies:
        source = config.places.get(("policies", name), "default")
        rows.append((f"policies.{name}", f"weir policy show {name}", source))
    print_table(("value", "", "from"), rows)
    return _warn(config)


@config.command()
@config_option
@json_option
def check(path: Path | None, *, as_json: bool) -> None:
    """Check a file as `weir serve` reads it; each problem is one line with file, line and path.

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
        return print_json({"ok": True, "problems": [], "warnings": list(effective.warnings)})
    click.echo(f"{effective.path or 'no file, the defaults'}: ok")
    return _warn(effective)


@config.command()
def example() -> None:
    """Print a commented file with every key and its default, as a start for your own.

    \b
    Example:
      weir config example > weir.yaml
    """
    click.echo((files("proxy") / "defaults" / "weir.yaml").read_text(encoding="utf-8"), nl=False)


def _warn(effective: Config) -> None:
    for warning in effective.warnings:
        click.echo(f"warning: {warning}", err=True)
