"""``weir policy``: every value of a policy, what is wrong with it, which one to try."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import click
import yaml

from policies.quality.recommend import REPEATED, Recommendation, Traffic
from policies.quality.recommend import recommend as choose
from policies.settings import ContextSettings, Mode
from proxy.cli import Failure
from proxy.cli.output import listing, print_table, progress
from proxy.cli.replay import conditions_for, recorded
from proxy.cli.shared import (
    FILE,
    Findings,
    configured,
    counted,
    in_yaml,
    json_option,
    print_json,
    reading,
)
from proxy.config.file import (
    ConfigError,
    Document,
    KeyPath,
    dotted,
    leaves_of,
    nearest,
    read_document,
)
from proxy.config.importing import imported
from proxy.config.loading import environment
from proxy.config.presets import (
    DEFAULT_PRESET,
    SetPolicy,
    about,
    policies_in,
    policy_amounts,
    policy_cautions,
    policy_from,
    policy_section,
    policy_values,
    preset_directory,
    preset_documents,
    read_policy,
    uses_shapes,
    with_set_policies,
)
from proxy.config.values import Config, FileValues
from proxy.features.replay.script import Script
from proxy.store import Store
from proxy.store.records import PolicyRow

EXIT_ERRORS = 2
EXIT_WARNINGS = 1
TOOLS_NAMED = 3
NARROW = 120
WIDE = 300
WINDOWS = (8_192, 32_768, 131_072)
BUSY_TIMEOUT = 1.0
"""Seconds to wait for a database that is being written: without it the list lacks the policies
stored in it.
"""
FILE_KEYS = frozenset(each.name for each in dataclasses.fields(FileValues))
POLICY_KEYS = frozenset(each.name for each in dataclasses.fields(ContextSettings))


@click.group()
def policy() -> None:
    """List, show, check, import and recommend policies.

    \b
    Example:
      weir policy list
      weir policy show balanced
    """


@policy.command("list")
@configured
def list_policies(config: Config) -> Findings:
    """List presets, the configuration's own policies, and those set over HTTP.

    \b
    Example:
      weir policy list --config weir.yaml
    """
    config, stored = _with_stored(config)
    purposes = _purposes(config, stored)
    rows = [_row(name, config, purposes.get(name, ""), stored) for name in config.policies]
    return listing(rows, "name from default window designed_for acts for")


@policy.command()
@click.argument("name")
@click.option(
    "--window", type=click.IntRange(min=64), help="The window for which to show shares in tokens."
)
@click.option(
    "--yaml",
    "as_yaml",
    is_flag=True,
    help="Print a section of weir.yaml that loads to the same policy.",
)
@configured
def show(config: Config, *, name: str, window: int | None, as_yaml: bool) -> Findings:
    """Show every effective value of a policy, with the keys of the YAML file.

    Shares are also shown in tokens: for the policy's own window, or for three common ones. Shapes
    are left out if no layer of the policy uses them.

    \b
    Example:
      weir policy show balanced
      weir policy show five-bucket-128k --window 64000
      weir policy show fb-code-200k --yaml > code.yaml
    """
    config, stored = _with_stored(config)
    if name not in config.policies:
        raise Failure(f"no policy {name}{nearest(name, sorted(config.policies))}")
    settings = config.policy(name)
    values = policy_values(settings)
    if not uses_shapes(settings):
        del values["shapes"]
    size = window or settings.window or settings.designed_for
    if size is not None:
        values["tokens"] = policy_amounts(settings, size)
    else:
        values["tokens"] = {str(each): policy_amounts(settings, each) for each in WINDOWS}
    section = _section_text(
        policy_section(config.policies[name], _purposes(config, stored).get(name, ""))
    )
    lines = [
        (
            dotted(at),
            f"{value:,}" if at[0] == "tokens" and isinstance(value, int) else in_yaml(value),
        )
        for at, value in leaves_of(values)
    ]

    def show() -> None:
        if as_yaml:
            click.echo(section, nl=False)
        else:
            print_table(("key", "value"), lines, width=WIDE)

    return Findings(lambda: values, show)


@policy.command()
@click.argument("file", metavar="FILE")
@click.option("--strict", is_flag=True, help="Exit with 1 on warnings too.")
@json_option
def lint(file: str, *, strict: bool, as_json: bool) -> None:
    """Check a policy for errors and likely mistakes; FILE is a policy, a weir.yaml, or a preset's
    name.

    Exit code 0: no problems; 1: warnings, with --strict; 2: errors, the policy would not load.

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
@click.argument("file", type=FILE)
@click.option("--name", default="imported", help="The name of the new policy.")
def import_policy(file: Path, *, name: str) -> None:
    """Convert another tool's settings to a policy: YAML on stdout, what could not be converted on
    stderr.

    The output is a complete file. To use it in a weir.yaml that already has policies, add the lines
    below `policies:` to that file's own. Two declarations are known, see docs/policies.md; any
    other key is an error.

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
    for note in (*made.notes, *policy_cautions(settings, document)):
        click.echo(f"note: {note}", err=True)


@policy.command()
@click.argument("file", type=FILE)
@click.option(
    "--window", type=click.IntRange(min=256), help="The window, tokens; defaults to the model's."
)
@click.option("--model", help="The model, for its tokenizer and window.")
@click.option("--limit", type=click.IntRange(min=1), help="Only the first so many conversations.")
@configured
def recommend(
    config: Config, *, file: Path, window: int | None, model: str | None, limit: int | None
) -> Findings:
    """Recommend a policy for recorded conversations, as YAML: what to evict first, and a cap for
    each bucket.

    FILE is as for weir replay. A cap is what nine of ten requests keep to, as a share of the usable
    window. It only warns, unless `enforce: bucket` is added. Nothing is sent anywhere and nothing
    is changed.

    \b
    Example:
      weir policy recommend sessions.jsonl --model gpt-5 > recommended.yaml
      weir replay sessions.jsonl --policy recommended.yaml:recommended
    """
    conditions = conditions_for(config, model=model, window=window)
    traffic = Traffic()
    with progress("conversations") as progressed:
        for place in recorded(file, limit, progressed):
            script = Script(place.recording, counter=conditions.counter, model=conditions.model)
            traffic.add(
                script.transcript(len(script.recording.raws)), requests=script.recording.requests
            )
    choice = choose(traffic)
    budget = conditions.budget(ContextSettings())
    made = _recommended(choice, traffic.caps(budget.usable))
    tools = {
        name: round(tokens / max(1, traffic.tools.total()), 4)
        for name, tokens in traffic.tools.most_common()
    }

    def value() -> dict[str, object]:
        return {
            "conversations": traffic.conversations,
            "requests": len(traffic.requests),
            "window": budget.window,
            "usable": budget.usable,
            "kind": choice.kind,
            "reason": choice.reason,
            "then": choice.then,
            "tools": tools,
            "policy": made,
        }

    def show() -> None:
        shares = ", ".join(
            f"{name} {share:.0%}" for name, share in list(tools.items())[:TOOLS_NAMED]
        )
        played = (
            f"{counted(traffic.conversations, 'conversation')},"
            f" {counted(len(traffic.requests), 'request')}"
        )
        for line in (
            f"{played}, a window of {budget.window:,} tokens ({budget.usable:,} usable)",
            f"{choice.kind}: {choice.reason}",
            f"then consider: {choice.then}",
            *([f"tool results by tool: {shares}"] if shares else []),
        ):
            click.echo(f"# {line}")
        click.echo(_section_text({"policies": {"recommended": made}}), nl=False)

    return Findings(value, show)


def _recommended(choice: Recommendation, caps: Mapping[str, float]) -> dict[str, object]:
    """A policy's section: the default's cascade with the recommended eviction, and the caps."""
    cascade: list[dict[str, object]] = []
    preset = preset_documents()[DEFAULT_PRESET].data["cascade"]
    for layer in cast("list[dict[str, object]]", preset):
        if layer["layer"] == "evict" and choice.kind == REPEATED:
            cascade.append({"layer": "semantic_merge"})
        cascade.append(
            {**layer, "params": dict(choice.evict)} if layer["layer"] == "evict" else dict(layer)
        )
    buckets = {name: {"cap": cap} for name, cap in caps.items()}
    return {"preset": DEFAULT_PRESET, "buckets": buckets, "cascade": cascade}


def _section_text(section: Mapping[str, object]) -> str:
    where = (
        "# Complete by itself. In a weir.yaml that has policies: already, only what is below"
        " policies: goes under it.\n"
    )
    return where + yaml.safe_dump(section, sort_keys=False, allow_unicode=True, width=NARROW)


def _with_stored(effective: Config) -> tuple[Config, Mapping[str, SetPolicy]]:
    url = effective.store.url
    scheme, _, place = url.partition(":///")
    if scheme.startswith("sqlite") and not (place and Path(place.partition("?")[0]).exists()):
        return effective, {}
    try:
        rows = reading(effective, Store.policies, busy_timeout=BUSY_TIMEOUT)
    except Failure as fault:
        said = f"{fault.message}; a server may hold policies that were set over HTTP"
        click.echo(f"note: {said}, see GET /weir/policies", err=True)
        return effective, {}
    policies = {row.name: given for row in rows if (given := _given(row)) is not None}
    return with_set_policies(effective, policies.values()), policies


def _given(row: PolicyRow) -> SetPolicy | None:
    try:
        return SetPolicy(row.name, row.document, row.at, read_policy(row.name, row.document))
    except ConfigError as fault:
        click.echo(
            f"note: the policy {row.name} that was set over HTTP cannot be read:"
            f" {fault.problems[0]}",
            err=True,
        )
        return None


def _row(
    name: str, effective: Config, purpose: str, stored: Mapping[str, SetPolicy]
) -> dict[str, Any]:
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
    found = {name: about(document) for name, document in preset_documents().items()}
    if effective.path is not None:
        for name, own in policies_in(read_document(effective.path, env=environment())).items():
            found[name] = about(own) or found.get(str(own.data.get("preset")), "")
    for name, given in stored.items():
        found[name] = about(Document(name="", data=given.body or {}))
    return found


def _acts(settings: ContextSettings) -> str:
    if settings.mode is Mode.OFF or not settings.manages:
        return "never"
    first = [layer for layer in settings.layers if layer.at != 0]
    if not first:
        return "when full"
    if any(layer.at is None and layer.scope == "total" for layer in first):
        shares = sorted({round(100 * shape.trigger) for shape in settings.shapes})
        return (
            f"{shares[0]}-{shares[-1]} % of usable"
            if len(shares) > 1
            else f"{shares[0]} % of usable"
        )
    layer = min(first, key=lambda each: 1.0 if each.at is None else each.at)
    of = settings.base.replace("_", " ") if layer.scope == "total" else layer.scope
    return "when full" if layer.at is None or layer.at >= 1 else f"{100 * layer.at:g} % of {of}"


def _linted(file: str) -> tuple[list[str], list[str]]:
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
        warnings.append(
            f"{file}: nothing was found to lint: neither keys of a policy nor policies:"
        )
    errors += _no_mappings(document)
    for name, own, at in policies:
        try:
            settings = policy_from(name, own, presets=preset_documents(), at=at)
        except ConfigError as fault:
            errors += fault.problems
            continue
        warnings += policy_cautions(settings, own, at=at)
    return errors, warnings


def _no_mappings(document: Document) -> list[str]:
    given = document.data.get("policies")
    bodies = given.items() if isinstance(given, Mapping) else ()
    places: list[KeyPath] = [
        ("policies", name) for name, b in bodies if not isinstance(b, Mapping | None)
    ]
    if not isinstance(given, Mapping | None):
        places = [("policies",)]
    return [document.problem(place, "should be a mapping") for place in places]


def _policies_in(document: Document, stem: str) -> list[tuple[str, Document, KeyPath]]:
    keys = set(document.data)
    if not keys or (keys <= FILE_KEYS - {"policies"} and not keys <= POLICY_KEYS):
        return []
    if "policies" not in document.data:
        return [(stem, document, ())]
    return [(name, own, ("policies", name)) for name, own in policies_in(document).items()]
