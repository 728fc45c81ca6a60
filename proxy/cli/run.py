"""``weir run -- COMMAND``: a client with the environment that points it at Weir."""

import contextlib
import errno
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import click

from proxy.child import python
from proxy.cli import Failure
from proxy.cli.shared import config_option, given_again, is_weir, loaded
from proxy.config.loading import environment
from proxy.config.values import Config

STARTS_WITHIN = 60.0
STOPS_WITHIN = 35.0  # limits.grace and a little
# as shells do
NOT_FOUND = 127
NOT_RUNNABLE = 126
TYPED = (signal.SIGINT, signal.SIGQUIT)
ENDING = (signal.SIGTERM, signal.SIGHUP)
MCP = "/weir/mcp"
SERVE = "sys.argv[:] = ['weir', *sys.argv[2:]]; from proxy.cli import main; main()"
UPSTREAM = "WEIR_UPSTREAM"
ANTHROPIC = "https://api.anthropic.com/v1"
CLAUDE_KEYS = ("ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN")
PROXIES = frozenset({"http_proxy", "https_proxy", "all_proxy"})


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@config_option
@click.option(
    "--url",
    metavar="URL",
    help="Weir's address, http://host:port; defaults to the configuration's.",
)
@click.option(
    "--key", help="The key to send, where Weir asks for one; defaults to what the environment has."
)
@click.option(
    "--serve/--no-serve",
    "serves",
    default=None,
    help=(
        "Start a Weir for the time of the command if none answers; the default where --url does not"
        " name one."
    ),
)
@click.option(
    "--mcp/--no-mcp",
    "mcp",
    default=True,
    help="Whether to register Weir's MCP server with the command.",
)
def run(
    command: tuple[str, ...],
    path: Path | None,
    url: str | None,
    key: str | None,
    *,
    serves: bool | None,
    mcp: bool,
) -> int:
    """Start a command with the environment that points it at Weir, and exit as it does.

    If no Weir answers, one is started for the time of the command, in front of OpenAI, for claude
    in front of Anthropic, or of what the configuration says. The client's own key is forwarded.

    Set are OPENAI_BASE_URL, OPENAI_API_BASE, ANTHROPIC_BASE_URL, and for opencode
    OPENCODE_CONFIG_CONTENT; codex is given its provider by -c. A placeholder stands in for an
    OPENAI_API_KEY that is not set. claude, codex and opencode get Weir's MCP server, with which the
    model looks up what was removed; --no-mcp leaves it out.

    \b
    Example:
      weir run -- python my_agent.py
      weir run -- claude
      weir run --config weir.yaml -- codex exec "fix the tests"
    """
    if shutil.which(command[0]) is None:
        # without a slash only PATH counts, whatever is in this folder
        is_there = "/" in command[0] and Path(command[0]).exists()
        number = errno.EACCES if is_there else errno.ENOENT
        return _not_started(command[0], OSError(number, os.strerror(number)))
    config = loaded(path)
    root = weir_address(url, config)
    own = _own_environment(command[0], config)
    with _weir_at(root, path, own, serves=url is None if serves is None else serves) as started:
        if started and config.simulate and UPSTREAM not in own:
            click.echo("weir: there is no OPENAI_API_KEY: a simulated model answers", err=True)
        changes = _changes(root, command[0], key, environment(), mcp=mcp)
        env = {**environment(), **changes}
        arguments = [command[0], *_arguments(root, command[0], env, mcp=mcp), *command[1:]]
        shown = {
            name: "***" if name.endswith("_KEY") and value == key else value
            for name, value in changes.items()
        }
        for name, value in shown.items():
            click.echo(f"weir: {name}={shlex.quote(value)}", err=True)
        if arguments[1:] != list(command[1:]):
            click.echo(f"weir: {shlex.join(arguments)}", err=True)
        if not started:
            return _replaced(arguments, env)
        return _supervised(arguments, env)


def weir_address(url: str | None, config: Config) -> str:
    host = "127.0.0.1" if config.listen.host in ("0.0.0.0", "::") else config.listen.host  # noqa: S104 - not bound
    return (url or f"http://{host}:{config.listen.port}").rstrip("/").removesuffix("/v1")


def _own_environment(program: str, config: Config) -> dict[str, str]:
    """The upstream of a Weir that is started for a command: Claude Code does not use OpenAI, or its
    key.
    """
    env = {**environment(), "WEIR_DRAIN": "0"}  # nobody but the command was sent here
    if Path(program).name == "claude" and config.path is None and not env.get(UPSTREAM):
        env[UPSTREAM] = ANTHROPIC
        env.pop("OPENAI_API_KEY", None)
        env.pop("OPENAI_API_KEY_FILE", None)
    return env


def _changes(
    root: str, program: str, key: str | None, env: Mapping[str, str], *, mcp: bool
) -> dict[str, str]:
    base = f"{root}/v1"
    changes = {"OPENAI_BASE_URL": base, "OPENAI_API_BASE": base, "ANTHROPIC_BASE_URL": root}
    if key is not None:
        changes |= {"OPENAI_API_KEY": key, "ANTHROPIC_API_KEY": key}
    elif not env.get("OPENAI_API_KEY"):
        changes["OPENAI_API_KEY"] = "any"  # SDKs do not start without one
    # reads no base URL from the environment, but a whole configuration
    if Path(program).name == "opencode":
        providers = {name: {"options": {"baseURL": base}} for name in ("openai", "anthropic")}
        content: dict[str, object] = {"provider": providers}
        if mcp:
            headers = {"Authorization": "Bearer {env:OPENAI_API_KEY}"}
            content["mcp"] = {
                "weir": {
                    "type": "remote",
                    "url": f"{root}{MCP}",
                    "headers": headers,
                    "oauth": False,
                }
            }
        changes["OPENCODE_CONFIG_CONTENT"] = json.dumps(content)
    if any(name.lower() in PROXIES and value for name, value in env.items()):
        around = ",".join(
            filter(None, (env.get("NO_PROXY") or env.get("no_proxy"), "127.0.0.1,localhost"))
        )
        changes |= {"NO_PROXY": around, "no_proxy": around}
    return changes


def _arguments(root: str, program: str, env: Mapping[str, str], *, mcp: bool) -> list[str]:
    """Options for programs that read no variable: Codex's provider, and the MCP server of Codex and
    Claude Code.

    Keys stay in the environment: arguments can be seen by everybody on the machine.
    """
    name = Path(program).name
    if name == "codex":
        provider = {
            "name": "Weir",
            "base_url": f"{root}/v1",
            "env_key": "OPENAI_API_KEY",
            "wire_api": "responses",
        }
        values = {"model_provider": "weir"} | {
            f"model_providers.weir.{name}": value for name, value in provider.items()
        }
        if mcp:
            values["mcp_servers.weir.url"] = f"{root}{MCP}"
            values["mcp_servers.weir.bearer_token_env_var"] = "OPENAI_API_KEY"  # noqa: S105 - a name
        return [
            word for name, value in values.items() for word in ("-c", f"{name}={json.dumps(value)}")
        ]
    if name == "claude" and mcp:
        variable = next((each for each in CLAUDE_KEYS if env.get(each)), None)
        headers = {"Authorization": f"Bearer ${{{variable}}}"} if variable is not None else {}
        servers = {"weir": {"type": "http", "url": f"{root}{MCP}", "headers": headers}}
        # with =, since a value after a blank would take the words after it with it
        return [f"--mcp-config={json.dumps({'mcpServers': servers})}", "--allowedTools=mcp__weir"]
    return []


@contextlib.contextmanager
def _weir_at(
    root: str, path: Path | None, env: Mapping[str, str], *, serves: bool
) -> Iterator[bool]:
    there = is_weir(root)
    if there is False:
        raise Failure(f"what answers at {root} is not Weir; name Weir's address with --url")
    if there is None and not serves:
        raise Failure(
            f"no Weir answers at {root}: start one with weir serve{given_again(path)}, or add"
            " --serve"
        )
    with contextlib.nullcontext() if there else _serving(root, path, env):
        yield not there


@contextlib.contextmanager
def _serving(root: str, path: Path | None, env: Mapping[str, str]) -> Iterator[None]:
    host, _, port = root.removeprefix("http://").rpartition(":")
    given = ["--config", str(path)] if path else []
    for number in ENDING:  # else the Weir would outlive a command that is ended while it starts
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    descriptor, log = tempfile.mkstemp(prefix="weir-run-", suffix=".log")
    # not -m: a proxy.py in the user's folder would be taken for Weir
    arguments = python(SERVE, "serve", *given, "--host", host, "--port", port)
    with os.fdopen(descriptor, "wb") as file:
        weir = subprocess.Popen(  # noqa: S603 - this interpreter and this package
            arguments,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
            env=env,
        )
    click.echo(f"weir: started for this command, log in {log}", err=True)
    try:
        deadline = time.monotonic() + STARTS_WITHIN
        while not is_weir(root):
            if weir.poll() is not None or time.monotonic() > deadline:
                last = (
                    Path(log).read_text(encoding="utf-8", errors="replace").strip()
                    or "it said nothing"
                ).splitlines()
                raise Failure(f"the proxy could not be started: {last[-1]}")
            time.sleep(0.05)
        yield
    finally:
        weir.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            weir.wait(STOPS_WITHIN)
        weir.kill()


def _replaced(arguments: list[str], env: Mapping[str, str]) -> int:
    sys.stderr.flush()
    try:
        os.execvpe(arguments[0], arguments, env)  # noqa: S606 - what the user typed
    except OSError as fault:
        return _not_started(arguments[0], fault)


def _supervised(arguments: list[str], env: Mapping[str, str]) -> int:
    children: list[subprocess.Popen[bytes]] = []
    early: list[int] = []

    def pass_on(number: int, _: object) -> None:
        # A terminal sends Ctrl-C and Ctrl-\\ to the whole group, so the command has it already.
        if number in TYPED and sys.stdin.isatty():
            return
        for child in children:
            child.send_signal(number)
        if not children:
            early.append(number)

    for number in (*TYPED, *ENDING, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, pass_on)
    try:
        children.append(subprocess.Popen(arguments, env=env))  # noqa: S603 - what the user typed
    except OSError as fault:
        return _not_started(arguments[0], fault)
    for late in early:
        children[0].send_signal(late)
    code = children[0].wait()
    return code if code >= 0 else 128 - code


def _not_started(program: str, fault: OSError) -> int:
    click.echo(f"weir: {program} cannot be started: {fault.strerror or fault}", err=True)
    return NOT_FOUND if isinstance(fault, FileNotFoundError) else NOT_RUNNABLE
