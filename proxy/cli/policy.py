"""``weir policy``: what every policy does, with all its values."""

from pathlib import Path

import click
from rich.table import Table

from policies.settings import ContextSettings
from proxy.cli import Failure
from proxy.cli.config import config_option, console, flat, json_option, loaded, print_json, shown
from proxy.config_file import dotted, nearest
from proxy.presets import policy_values, preset_documents


@click.group()
def policy() -> None:
    """Policies in full, every default visible.

    \b
    Example:
      weir policy list
      weir policy show balanced
    """


@policy.command("list")
@config_option
@json_option
def list_policies(path: Path | None, *, as_json: bool) -> None:
    """Presets and the file's own policies.

    \b
    Example:
      weir policy list --config weir.yaml
    """
    effective = loaded(path)
    rows = [
        {
            "name": name,
            "from": "preset" if name in preset_documents() and ("policies", name) not in effective.places else "file",
            "default": name == effective.default_policy,
            "mode": str(settings.mode),
            "window": effective.policy(name).window,
            "cascade": [layer.strategy for layer in settings.layers],
            "summarizer": effective.policy(name).summarizer,
        }
        for name, settings in effective.policies.items()
    ]
    if as_json:
        print_json(rows)
        return
    table = Table("policy", "from", "mode", "window", "cascade", "summarizer", box=None, pad_edge=False)
    for row in rows:
        table.add_row(
            f"{row['name']}{' (default)' if row['default'] else ''}",
            str(row["from"]),
            str(row["mode"]),
            str(row["window"] or "of the model"),
            _cascade(effective.policies[str(row["name"])]),
            str(row["summarizer"] or "none"),
        )
    console().print(table)


@policy.command()
@click.argument("name")
@config_option
@json_option
def show(name: str, path: Path | None, *, as_json: bool) -> None:
    """Every value of one policy as it holds, in the words of the YAML file.

    \b
    Example:
      weir policy show balanced
    """
    effective = loaded(path)
    if name not in effective.policies:
        raise Failure(f"no policy {name}{nearest(name, sorted(effective.policies))}")
    values = policy_values(effective.policy(name))
    if as_json:
        print_json(values)
        return
    table = Table("key", "value", box=None, pad_edge=False)
    for at, value in flat(values):
        table.add_row(dotted(at), shown(value))
    console().print(table)


def _cascade(settings: ContextSettings) -> str:
    return " > ".join(layer.strategy for layer in settings.layers) if settings.mode != "off" else "-"
