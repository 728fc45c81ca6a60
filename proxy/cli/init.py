"""``weir init``: three answers become a commented weir.yaml, which is never written over another
file.
"""

import json
import re
import shlex
import sys
import tempfile
from importlib.resources import files
from pathlib import Path
from urllib.parse import urlsplit

import click

from proxy.cli import Failure
from proxy.config.file import ConfigError
from proxy.config.loading import environment, load_config

OPENAI = "https://api.openai.com/v1"
DEFAULTS = files("proxy") / "defaults"
PASS = "pass"  # noqa: S105 - the word in place of a key
VARIABLES = {
    "api.openai.com": "OPENAI_API_KEY",
    "api.anthropic.com": "ANTHROPIC_API_KEY",
    "openrouter.ai": "OPENROUTER_API_KEY",
}
LOCAL = frozenset({"localhost", "127.0.0.1", "::1"})
LOCAL_WINDOW = "8192"
CLIENTS = {
    "sdk": "python my_agent.py",
    "codex": "codex",
    "claude-code": "claude",
    "opencode": "opencode",
    "aider": "aider",
    "other": "COMMAND",
}
Answers = dict[str, str]


@click.command()
@click.option(
    "--upstream", metavar="URL", help=f"Base URL that requests go to; defaults to {OPENAI}."
)
@click.option(
    "--key-variable",
    metavar="NAME",
    help="Environment variable with its key; 'pass': the client's own key.",
)
@click.option(
    "--client",
    type=click.Choice(list(CLIENTS)),
    help="What you will start; decides what is printed only.",
)
@click.option(
    "--model",
    metavar="PATTERN",
    help="Models that --window is about, like 'local-*'; defaults to all.",
)
@click.option(
    "--window",
    type=click.IntRange(min=64),
    help="Context window, tokens; defaults to what is known.",
)
@click.option(
    "--access",
    type=click.Choice(["me", "keys"]),
    help="Who may use it: any program here, or known keys.",
)
@click.option(
    "--out", type=click.Path(path_type=Path, dir_okay=False), default="weir.yaml", help="The file."
)
@click.option("--yes", is_flag=True, help="Ask nothing; take the defaults for what no option says.")
@click.option("--example", is_flag=True, help="Only print a file with every key and its default.")
def init(*, out: Path, yes: bool, example: bool, **given: object) -> None:
    """Write a commented weir.yaml: asks where requests go, which client and window, and who may
    call.

    Without a terminal nothing is asked. An existing file is never overwritten.

    \b
    Example:
      weir init
      weir init --upstream http://127.0.0.1:9000/v1 --window 8192 --access keys --yes
    """
    if example:
        return click.echo((DEFAULTS / "weir.yaml").read_text(encoding="utf-8"), nl=False)
    if out.exists():
        raise Failure(f"{out} exists already; name another file with --out, or move it away")
    answers = _answered(given, asking=not yes and sys.stdin.isatty())
    text = _text(answers, out.name)
    _check(text, out.name)
    try:
        with out.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise Failure(f"{out} cannot be written: {error.strerror or error}") from error
    return _say_what_next(answers, out)


def _answered(given: dict[str, object], *, asking: bool) -> Answers:
    answers: Answers = {}

    def ask(
        name: str,
        question: str,
        default: str,
        kind: click.Choice[str] | click.types.IntParamType | None = None,
    ) -> str:
        answer = given[name]
        if answer is None:
            answer = (
                click.prompt(question, default=default, type=kind, err=True) if asking else default
            )
        answers[name] = str(answer)
        return answers[name]

    host = urlsplit(ask("upstream", "1. Where do requests go? Base URL", OPENAI)).hostname or ""
    usual = PASS if host in LOCAL else VARIABLES.get(host, "OPENAI_API_KEY")
    variable = ask(
        "key_variable", "   Environment variable with its key (pass: the client's own)", usual
    )
    if not re.fullmatch(r"[A-Za-z_]\w*", variable):
        raise click.UsageError(
            "--key-variable should name an environment variable, not hold the key itself"
        )
    ask("client", "2. Which client will you use?", "other", click.Choice(list(CLIENTS)))
    usual = LOCAL_WINDOW if host in LOCAL else "0"
    if (
        ask("window", "   Its model's context window, tokens (0: as it is known)", usual, click.INT)
        != "0"
    ):
        ask("model", "   Which models have it? A pattern", "*")
    ask(
        "access",
        "3. Who may use it? me: any program here, keys: known keys",
        "me",
        click.Choice(["me", "keys"]),
    )
    return answers


def _text(answers: Answers, name: str) -> str:
    variable = answers["key_variable"]
    window = answers["window"]
    rule = (
        f"[{{match: {json.dumps(answers['model'])}, window: {window}}}]" if window != "0" else "[]"
    )
    return (
        (DEFAULTS / "init.yaml")
        .read_text(encoding="utf-8")
        .format(
            name=name,
            base_url=json.dumps(answers["upstream"]),
            api_key=PASS if variable == PASS else f"${{{variable}:-{PASS}}}",
            models=rule,
            mode="keys" if answers["access"] == "keys" else "auto",
        )
    )


def _check(text: str, name: str) -> None:
    with tempfile.TemporaryDirectory(prefix="weir-") as folder:
        path = Path(folder, name)
        path.write_text(text, encoding="utf-8")
        try:
            load_config(path, env=environment())
        except ConfigError as fault:
            raise click.UsageError(fault.problems[0].replace(f"{folder}/", "")) from fault


def _say_what_next(answers: Answers, out: Path) -> None:
    where = shlex.quote(str(out))
    variable = answers["key_variable"]
    click.echo(f"Wrote {out}. Next:")
    if variable != PASS and not environment().get(variable):
        click.echo(
            f"  export {variable}=…    # it is not set now: every client's own key would go up"
        )
    click.echo(f"  weir doctor --config {where}")
    if answers["access"] == "keys":
        click.echo(f"  weir keys create --name me --config {where}")
    click.echo(f"  weir serve --config {where}")
    click.echo(
        f"  weir run --config {where} -- {CLIENTS[answers['client']]}    # in another terminal"
    )
