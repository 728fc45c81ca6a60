"""The command ``weir``: a table of commands whose modules are loaded only when they run."""

import difflib
import errno
import gc
import importlib
import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import click

COMMANDS = {
    "init": "Write a configuration: three questions, sensible defaults.",
    "serve": "Start the proxy.",
    "run": "Start a client with the environment that points it at Weir.",
    "doctor": "Check configuration, upstream, key, model, store, vocabulary, clock and port.",
    "demo": "Play a recorded agent run with and without Weir; needs no key and no network.",
    "replay": "Try policies on recorded conversations: a dry run with costs.",
    "evaluate": "Score what compactions keep: coverage, and fidelity by a judge.",
    "simulate": "Start a simulated model, to try Weir without a key.",
    "conversations": "List, inspect, export and delete conversations.",
    "usage": "Show tokens and dollars by key.",
    "audit": "Verify the audit log, and list what it says of a conversation.",
    "policy": "List, show, check, import and recommend policies.",
    "keys": "Create, list, limit, rotate and revoke API keys.",
    "db": "Back up, restore, prune and migrate the database.",
}
"""Each command with its line in ``weir --help``; ``proxy.cli.NAME`` has it under the same name."""

EXIT_FAILED = 1
EXIT_USAGE = 2


class Failure(click.ClickException):
    """A command that could not do its work: one line on stderr, exit code 1."""

    exit_code = EXIT_FAILED


class _CommandTable(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002 - click's
        if cmd_name not in COMMANDS:
            return None
        gc.disable()  # what is imported stays: to look for garbage in it took a tenth of a start
        home = importlib.import_module(f"proxy.cli.{cmd_name}")
        gc.enable()
        command: click.Command = getattr(home, cmd_name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002 - click's
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def main(  # type: ignore[override] # every way of calling it ends in SystemExit
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,  # noqa: ARG002 - click's signature; the name is always weir
        **extra: Any,
    ) -> NoReturn:
        """Run and exit: 0 done, 1 failed, 2 wrong usage; an error is one line on stderr."""
        extra["standalone_mode"] = False
        try:
            code = super().main(args, "weir", **extra)
        except click.exceptions.NoArgsIsHelpError as fault:
            click.echo(fault.format_message(), err=True)
            sys.exit(EXIT_USAGE)
        except click.UsageError as fault:
            asked = fault.ctx.command_path if fault.ctx is not None else "weir"
            _stop(f"{fault.format_message()}{_suggestion(fault)} (see {asked} --help)", EXIT_USAGE)
        except click.ClickException as fault:
            _stop(fault.format_message(), fault.exit_code)
        except click.Abort:
            _stop("interrupted", EXIT_FAILED)
        except OSError as fault:
            if fault.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            _stop(f"the output cannot be written: {fault.strerror}", EXIT_FAILED)
        sys.exit(code if isinstance(code, int) else 0)


def _suggestion(fault: click.UsageError) -> str:
    """`` Did you mean 'serve'?`` for a command that is spelt nearly like that; click does so for
    options only.
    """
    if fault.ctx is None or not isinstance(fault.ctx.command, click.Group):
        return ""
    misspelt = re.match(r"No such command '(.+)'\.$", fault.format_message())
    close = misspelt and difflib.get_close_matches(
        misspelt[1], fault.ctx.command.list_commands(fault.ctx), n=1
    )
    return f" Did you mean '{close[0]}'?" if close else ""


def _stop(message: str, code: int) -> NoReturn:
    click.echo(f"weir: {' '.join(message.split())}", err=True)
    sys.exit(code)


@click.group(
    cls=_CommandTable,
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True},
)
@click.version_option(package_name="weir-proxy", prog_name="weir")
def main() -> None:
    """Weir: an OpenAI-compatible proxy that keeps long conversations inside the context window.

    \b
    Example:
      weir serve --upstream http://127.0.0.1:9000/v1 --window 8192
      export OPENAI_BASE_URL=http://127.0.0.1:8400/v1
    """
