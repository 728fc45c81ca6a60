"""``weir policy``: what every policy does, with all its values; what is wrong with one; which one to try."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import click
import yaml
from rich.console import Console
from rich.table import Table

from policies.settings import ContextSettings, Mode
from proxy.cli import Failure
from proxy.cli.config import config_option, console, flat, json_option, loaded, print_json, shown
from proxy.cli.recommend import recommend
from proxy.config import Config, environment
from proxy.config_file import ConfigError, Document, KeyPath, dotted, nearest, read_document
from proxy.policy_import import imported
from proxy.presets import (
    about,
    policy_amounts,
    policy_cautions,
    policy_from,
    policy_values,
    preset_directory,
    preset_documents,
)

EXIT_ERRORS = 2
EXIT_WARNINGS = 1
WIDE = 240


@click.group()
def policy() -> None:
    """Policies in full, every default visible.

    \b
    Example:
      weir policy list
      weir policy show balanced
    """


policy.add_command(recommend)


@policy.command("list")
@config_option
@json_option
def list_policies(path: Path | None, *, as_json: bool) -> None:
    """Presets and the file's own policies, one line each.

    \b
    Example:
      weir policy list --config weir.yaml
    """
    effective = loaded(path)
    purposes = _purposes(effective)
    rows = [_row(name, effective, purposes.get(name, "")) for name in effective.policies]
    if as_json:
        print_json(rows)
        return
    table = Table("policy", "for", "window", "acts", "layers", box=None, pad_edge=False)
    for row in rows:
        layers = row["cascade"]
        table.add_row(
            f"{row['name']}{' (default)' if row['default'] else ''}",
            str(row["for"]),
            _window_words(effective.policy(str(row["name"]))),
            str(row["acts"]),
            " > ".join(map(str, layers)) if isinstance(layers, list) and layers and row["mode"] != "off" else "-",
        )
    out = console()
    (out if out.is_terminal else Console(highlight=False, width=WIDE)).print(table)


@policy.command()
@click.argument("name")
@click.option("--window", type=click.IntRange(min=64), help="Also say what the shares come to in this window, tokens.")
@config_option
@json_option
def show(name: str, window: int | None, path: Path | None, *, as_json: bool) -> None:
    """Every value of one policy as it holds, in the words of the YAML file.

    \b
    Example:
      weir policy show balanced
      weir policy show five-bucket-128k --window 64000
    """
    effective = loaded(path)
    if name not in effective.policies:
        raise Failure(f"no policy {name}{nearest(name, sorted(effective.policies))}")
    settings = effective.policy(name)
    values = policy_values(settings)
    size = window or settings.window or settings.designed_for
    if size is not None:
        values["tokens"] = policy_amounts(settings, size)
    if as_json:
        print_json(values)
        return
    table = Table("key", "value", box=None, pad_edge=False)
    for at, value in flat(values):
        table.add_row(dotted(at), f"{value:,}" if at[0] == "tokens" and isinstance(value, int) else shown(value))
    console().print(table)


@policy.command()
@click.argument("file", metavar="FILE")
@click.option("--strict", is_flag=True, help="Exit 1 for warnings too.")
@json_option
def lint(file: str, *, strict: bool, as_json: bool) -> None:
    """What is wrong with a policy, and what is probably not meant; FILE is a policy, a weir.yaml, or a preset's name.

    Exit code 0: nothing wrong; 1: warnings, with --strict; 2: errors, the policy would not be loaded.

    \b
    Example:
      weir policy lint weir.yaml --strict
      weir policy lint fb-code-200k
    """
    errors, warnings = _linted(file)
    if as_json:
        print_json({"ok": not errors, "errors": errors, "warnings": warnings})
    else:
        for text in errors:
            click.echo(f"error: {text}", err=True)
        for text in warnings:
            click.echo(f"warning: {text}", err=True)
        if not errors and not warnings:
            click.echo(f"{file}: ok")
    if errors:
        raise click.exceptions.Exit(EXIT_ERRORS)
    if warnings and strict:
        raise click.exceptions.Exit(EXIT_WARNINGS)


@policy.command("import")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--name", default="imported", show_default=True, help="What the policy is to be called.")
def import_policy(file: Path, *, name: str) -> None:
    """Another tool's settings as a policy: YAML for weir.yaml on stdout, what could not be said on stderr.

    \b
    Example:
      weir policy import agent-context.yaml --name agent >> weir.yaml
    """
    try:
        made = imported(read_document(file, env=environment()))
        document = Document(name="", data=made.policy)
        settings = policy_from(name, document, presets=preset_documents())
    except ConfigError as fault:
        raise Failure(fault.problems[0]) from fault
    click.echo(yaml.safe_dump({"policies": {name: made.policy}}, sort_keys=False, allow_unicode=True), nl=False)
    for note in (*made.notes, *policy_cautions(settings, document, presets=preset_documents())):
        click.echo(f"note: {note}", err=True)


def _row(name: str, effective: Config, purpose: str) -> dict[str, object]:
    settings = effective.policy(name)
    return {
        "name": name,
        "for": purpose,
        "from": "file" if ("policies", name) in effective.places else "preset",
        "default": name == effective.default_policy,
        "mode": str(settings.mode),
        "window": settings.window,
        "designed_for": settings.designed_for,
        "acts": _acts(settings),
        "cascade": [layer.strategy for layer in settings.layers],
        "summarizer": settings.summarizer,
    }


def _purposes(effective: Config) -> Mapping[str, str]:
    """What each policy is for, as far as its file says so."""
    found = {name: about(document) for name, document in preset_documents().items()}
    if effective.path is not None:
        own = read_document(effective.path, env=environment()).data.get("policies")
        for name, body in own.items() if isinstance(own, Mapping) else ():
            preset = found.get(str(body.get("preset"))) if isinstance(body, Mapping) else None
            found[name] = (about(Document(name="", data=body)) if isinstance(body, Mapping) else "") or preset or ""
    return found


def _window_words(settings: ContextSettings) -> str:
    if settings.window is not None:
        return f"{settings.window:,}"
    if settings.window_per_output is not None:
        return f"{settings.window_per_output} x output"
    return "any" if settings.designed_for is None else f"{settings.designed_for:,}"


def _acts(settings: ContextSettings) -> str:
    """Where a policy first removes something."""
    if settings.mode is Mode.OFF or settings.when_full == "reject":
        return "never"
    first = [layer for layer in settings.layers if layer.at != 0]
    if not first:
        return "when full"
    if any(layer.at is None and layer.scope == "total" for layer in first):
        shares = sorted({round(100 * shape.trigger) for shape in settings.shapes})
        return f"{shares[0]}-{shares[-1]} % of usable" if len(shares) > 1 else f"{shares[0]} % of usable"
    layer = min(first, key=lambda each: 1.0 if each.at is None else each.at)
    of = settings.base.replace("_", " ") if layer.scope == "total" else layer.scope
    return "when full" if layer.at is None or layer.at >= 1 else f"{100 * layer.at:g} % of {of}"


def _linted(file: str) -> tuple[list[str], list[str]]:
    """Errors and warnings of every policy in a file; of a preset where no such file exists."""
    path = Path(file)
    if not path.exists() and file in preset_documents():
        path = preset_directory() / f"{file}.yaml"
    try:
        document = read_document(path, env=environment())
    except ConfigError as fault:
        return [*fault.problems], []
    errors: list[str] = []
    warnings: list[str] = []
    for name, own, at in _policies_in(document, path.stem):
        try:
            settings = policy_from(name, own, presets=preset_documents(), at=at)
        except ConfigError as fault:
            errors += fault.problems
            continue
        warnings += policy_cautions(settings, own, presets=preset_documents(), at=at)
    return errors, warnings


def _policies_in(document: Document, stem: str) -> list[tuple[str, Document, KeyPath]]:
    """The policies of a configuration, or the one that the file itself is."""
    policies = document.data.get("policies")
    if "policies" not in document.data:
        return [(stem, document, ())]
    if not isinstance(policies, Mapping):
        return []
    return [
        (str(name), dataclasses.replace(document, data=body if isinstance(body, Mapping) else {}), ("policies", name))
        for name, body in policies.items()
    ]
