"""``python -m tools.commands`` writes docs/command-reference.md from the commands themselves."""

from collections.abc import Iterator
from inspect import cleandoc
from pathlib import Path

import click

from proxy.cli import main as weir

PAGE = Path(__file__).resolve().parents[1] / "docs" / "command-reference.md"
HEAD = """# Command reference

Made from the code by `python -m tools.commands`: what `--help` says of each command, on one page.
[commands.md](commands.md) is the overview.
"""


def page() -> str:
    """All of it, as Markdown."""
    return "\n".join([HEAD, *_sections(weir, "weir")])


def _sections(command: click.Command, name: str) -> Iterator[str]:
    context = click.Context(command, info_name=name, **weir.context_settings)
    if isinstance(command, click.Group):
        for each in command.list_commands(context):
            found = command.get_command(context, each)
            if found is not None and not found.hidden:
                yield from _sections(found, f"{name} {each}")
        return
    usage = " ".join(command.collect_usage_pieces(context))
    yield f"## {name}\n\n```text\n{name} {usage}\n```\n\n{_text(command)}"
    options = [
        record
        for param in command.get_params(context)
        if isinstance(param, click.Option) and (record := param.get_help_record(context))
    ]
    yield "| option | |\n|---|---|"
    yield "\n".join(f"| `{_cell(option)}` | {_cell(said)} |" for option, said in options) + "\n"


def _text(command: click.Command) -> str:
    r"""What a command says of itself; a block that begins with \b keeps its lines."""
    parts = cleandoc(command.help or "").split("\n\n")
    shown = []
    for part in parts:
        lines = part.removeprefix("\b\n").splitlines()
        kept = part.startswith("\b")
        shown.append("\n".join(["```text", *lines, "```"]) if kept else " ".join(lines))
    return "\n\n".join(shown) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def main() -> None:
    """Write the page."""
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
