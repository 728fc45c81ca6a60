"""``weir policy``: what every policy does, with all its values; what is wrong with one; which one to try."""

import asyncio
import dataclasses
import textwrap
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
from proxy.config import Config, environment, masked_url
from proxy.config.file import ConfigError, Document, KeyPath, dotted, nearest, read_document
from proxy.config.importing import imported, known_keys
from proxy.config.presets import (
    about,
    policy_amounts,
    policy_cautions,
    policy_from,
    policy_section,
    policy_values,
    preset_directory,
    preset_documents,
    uses_shapes,
)
from proxy.config.reload import SetPolicy, read_policy, with_set_policies
from proxy.config.values import FileValues
from proxy.store import Store, StoreError
from proxy.store.records import PolicyRow

EXIT_ERRORS = 2
EXIT_WARNINGS = 1
COLUMNS, WIDE = 120, 300
WINDOWS = (8_192, 32_768, 131_072)
PATIENCE = 1.0
_OF_THE_FILE = frozenset(each.name for each in dataclasses.fields(FileValues))
_OF_A_POLICY = frozenset(each.name for each in dataclasses.fields(ContextSettings))
IMPORT_KEYS = "\n\n".join(
    "\b\n" + textwrap.fill(f"{title}: {', '.join(keys)}.", 76, break_on_hyphens=False)
    for title, keys in zip(
        (
            "Keys of the set that divides the window into shares",
            "Keys of the flat set",
            "Keys of the set that gives each bucket its tokens",
        ),
        known_keys(),
        strict=True,
    )
)


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
@click.option("--wide", is_flag=True, help="Each policy's layers too, in one line.")
@config_option
@json_option
def list_policies(path: Path | None, *, wide: bool, as_json: bool) -> None:
    """Presets, the file's own policies, and those that were set over HTTP.

    \b
    Example:
      weir policy list --config weir.yaml
    """
    effective, stored = _with_stored(loaded(path))
    purposes = _purposes(effective, stored)
    rows = [_row(name, effective, purposes.get(name, ""), stored) for name in effective.policies]
    if as_json:
        print_json(rows)
        return
    table = Table("policy", "window", "acts", "for", *(["layers"] if wide else []), box=None, pad_edge=False)
    for row in rows:
        layers = row["cascade"]
        named = " > ".join(map(str, layers)) if isinstance(layers, list) and layers and row["mode"] != "off" else "-"
        table.add_row(
            f"{row['name']}{' (default)' if row['default'] else ''}",
            _window_words(effective.policy(str(row["name"]))),
            str(row["acts"]),
            str(row["for"]),
            *([named] if wide else []),
        )
    _print_lean(table, WIDE if wide else COLUMNS)


@policy.command()
@click.argument("name")
@click.option("--window", type=click.IntRange(min=64), help="Also say what the shares come to in this window, tokens.")
@click.option("--yaml", "as_yaml", is_flag=True, help="As a section of weir.yaml that loads to the same policy.")
@config_option
@json_option
def show(name: str, window: int | None, path: Path | None, *, as_yaml: bool, as_json: bool) -> None:
    """Every value of one policy as it holds, in the words of the YAML file.

    What shares come to in tokens is said for the window that the policy names, else for three usual ones. Shapes are
    left out where no layer of the policy uses them.

    \b
    Example:
      weir policy show balanced
      weir policy show five-bucket-128k --window 64000
      weir policy show fb-code-200k --yaml > code.yaml
    """
    effective, stored = _with_stored(loaded(path))
    if name not in effective.policies:
        raise Failure(f"no policy {name}{nearest(name, sorted(effective.policies))}")
    if as_yaml:
        purpose = _purposes(effective, stored).get(name, "")
        click.echo(_section_text(policy_section(effective.policies[name], purpose)), nl=False)
        return
    settings = effective.policy(name)
    values = policy_values(settings)
    if not uses_shapes(settings):
        del values["shapes"]
    size = window or settings.window or settings.designed_for
    if size is not None:
        values["tokens"] = policy_amounts(settings, size)
    else:
        values["tokens"] = {str(each): policy_amounts(settings, each) for each in WINDOWS}
    if as_json:
        print_json(values)
        return
    table = Table("key", "value", box=None, pad_edge=False)
    for at, value in flat(values):
        table.add_row(dotted(at), f"{value:,}" if at[0] == "tokens" and isinstance(value, int) else shown(value))
    _print_lean(table, WIDE)


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


@policy.command("import", epilog=IMPORT_KEYS)
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--name", default="imported", show_default=True, help="What the policy is to be called.")
def import_policy(file: Path, *, name: str) -> None:
    """Another tool's settings as a policy: a YAML file on stdout, what could not be said on stderr.

    What is printed is complete by itself. To use it in a weir.yaml that has policies already, put the lines below
    `policies:` under that file's own. Three sets of keys are known, below; a key of none is an error.

    \b
    Example:
      weir policy import agent-context.yaml --name agent > agent.yaml
      weir policy lint agent.yaml
    """
    try:
        made = imported(read_document(file, env=environment()))
        document = Document(name="", data=made.policy)
        settings = policy_from(name, document, presets=preset_documents())
    except ConfigError as fault:
        for problem in fault.problems:
            click.echo(f"error: {problem}", err=True)
        raise click.exceptions.Exit(EXIT_WARNINGS) from fault
    click.echo(_section_text({"policies": {name: made.policy}}), nl=False)
    for note in (*made.notes, *policy_cautions(settings, document, presets=preset_documents())):
        click.echo(f"note: {note}", err=True)


def _section_text(section: Mapping[str, object]) -> str:
    """A ``policies:`` section as YAML, and where it goes."""
    where = (
        "# Complete by itself. In a weir.yaml that has policies: already, only what is below policies: goes under it.\n"
    )
    return where + yaml.safe_dump(section, sort_keys=False, allow_unicode=True, width=COLUMNS)


def _print_lean(table: Table, width: int) -> None:
    """Print a table without blanks at the ends of its lines; as wide as a terminal where there is one."""
    out = console()
    paper = out if out.is_terminal else Console(highlight=False, width=width)
    with paper.capture() as captured:
        paper.print(table)
    click.echo("\n".join(line.rstrip() for line in captured.get().splitlines()))


def _with_stored(effective: Config) -> tuple[Config, Mapping[str, SetPolicy]]:
    """The configuration with the policies that were set over HTTP and are in its database, and these by name."""
    url = effective.store.url
    scheme, _, place = url.partition(":///")
    if scheme.startswith("sqlite") and not (place and Path(place.partition("?")[0]).exists()):
        return effective, {}
    try:
        rows = asyncio.run(_stored(url))
    except StoreError as fault:
        said = f"{masked_url(url)}: {fault}; a server may hold policies that were set over HTTP"
        click.echo(f"note: {said}, see GET /weir/policies", err=True)
        return effective, {}
    policies = {row.name: given for row in rows if (given := _given(row)) is not None}
    return with_set_policies(effective, policies.values()), policies


async def _stored(url: str) -> list[PolicyRow]:
    """The stored policies. StoreError."""
    store = await Store.open(url, read_only=True, busy_timeout=PATIENCE)
    try:
        return await store.policies()
    finally:
        await store.close()


def _given(row: PolicyRow) -> SetPolicy | None:
    """A stored policy as it was set, None if it can no longer be read."""
    try:
        return SetPolicy(row.name, row.document, row.at, read_policy(row.name, row.document))
    except ConfigError as fault:
        click.echo(f"note: the policy {row.name} that was set over HTTP cannot be read: {fault.problems[0]}", err=True)
        return None


def _row(name: str, effective: Config, purpose: str, stored: Mapping[str, SetPolicy]) -> dict[str, object]:
    settings = effective.policy(name)
    origin = "file" if ("policies", name) in effective.places else "preset"
    return {
        "name": name,
        "for": purpose,
        "from": "api" if name in stored else origin,
        "default": name == effective.default_policy,
        "mode": str(settings.mode),
        "window": settings.window,
        "designed_for": settings.designed_for,
        "acts": _acts(settings),
        "cascade": [layer.strategy for layer in settings.layers],
        "summarizer": settings.summarizer,
    }


def _purposes(effective: Config, stored: Mapping[str, SetPolicy]) -> Mapping[str, str]:
    """What each policy is for, as far as its file or its document says so."""
    found = {name: about(document) for name, document in preset_documents().items()}
    if effective.path is not None:
        own = read_document(effective.path, env=environment()).data.get("policies")
        for name, body in own.items() if isinstance(own, Mapping) else ():
            preset = found.get(str(body.get("preset"))) if isinstance(body, Mapping) else None
            found[name] = (about(Document(name="", data=body)) if isinstance(body, Mapping) else "") or preset or ""
    for name, given in stored.items():
        found[name] = about(Document(name="", data=given.body or {}))
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
    policies = _policies_in(document, path.stem)
    if not policies:
        warnings.append(f"{file}: nothing was found to lint: neither keys of a policy nor policies:")
    for name, own, at in policies:
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
    keys = set(document.data)
    if not keys or (keys <= _OF_THE_FILE - {"policies"} and not keys <= _OF_A_POLICY):
        return []
    if "policies" not in document.data:
        return [(stem, document, ())]
    if not isinstance(policies, Mapping):
        return []
    return [
        (str(name), dataclasses.replace(document, data=body if isinstance(body, Mapping) else {}), ("policies", name))
        for name, body in policies.items()
    ]
