"""What the command line says, as text: every ``--help``, each command on a small recorded store, exit codes.

    python -m tests.golden.cli             # writes cli_help.txt and cli_output.txt anew
    python -m tests.golden.cli --record    # records the store anew before that

What differs from run to run (secrets, ids, dates of what is written, milliseconds, the folder) is masked. Of what is
long the beginning is kept, and a digest of the whole.
"""

import asyncio
import gzip
import json
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

import click
from click.testing import CliRunner

from proxy.cli import main
from tests.functional.harness import COUNTER, TOOLS, opening, prose, tool_step, weir
from tests.upstream.app import serve_simulator
from tests.upstream.model import SimulatorSettings

HELP = Path(__file__).with_name("cli_help.txt")
OUTPUT = Path(__file__).with_name("cli_output.txt")
STORE = Path(__file__).with_name("cli.db.gz")
MAX_KEPT = 2_500
WINDOW = 4096
NAME = "support-4711"
POLICIES = """
policies:
  own: {preset: balanced, window: 4096, about: Mine}
  strict: {preset: balanced, enforce: bucket, buckets: {tool_outputs: {cap: 500, on_overflow: reject}}}
"""
MASKS = (
    (r"weir-sk-[\w-]+", "SECRET"),
    (r'("(?:at|created|revoked|since|until)": )1[789]\d{8}\.\d+', r"\1SECONDS"),
    (r'("(?:plan_ms_mean|plan_ms_max|overhead_ms_median)": )[\d.]+', r"\1MS"),
)
"""What is masked everywhere; a moment also where something is written on the way."""
WRITTEN = (
    (r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d(:\d\d)?(\+00:00)?", "DATE"),
    (r"[0-9a-f]{32,64}", "HASH"),
    (r"conv-\w+", "CONVERSATION"),
)
DEMO = ((r"\S*bin/weir", "weir"), (r"conv-\w+", "CONVERSATION"), (r"\d[\d.,]*", "N"), (" {2,}", "  "))

COMMANDS = f"""
--version
nonsense
servee
keys creat --name x
doctor --config broken.yaml
doctor --config broken.yaml --json
doctor --values --config broken.yaml
doctor --values --config weir.yaml
doctor --values --config weir.yaml --json
conversations list
conversations list --json --limit 1
conversations list --store sqlite+aiosqlite:///none.db
conversations show {NAME}
conversations show {NAME} --json
conversations show suport-4711
conversations show {NAME} --timeline
conversations show {NAME} --timeline --json
conversations show {NAME} --checkpoint
conversations show {NAME} --checkpoint --json
conversations show {NAME} --removed
conversations show {NAME} --removed --json
conversations show {NAME} --request REQUEST
conversations show {NAME} --request REQUEST --json
conversations show {NAME} --request FIRST
conversations show {NAME} --request nothing
conversations show {NAME} --ref REF
conversations show {NAME} --ref REF --json
conversations show {NAME} --ref 000000000000
conversations show greeting
conversations show greeting --removed
conversations show greeting --checkpoint
conversations export greeting
usage --since 1
usage --since 1 --json
usage --since 1 --by model
usage --since 0s
usage --since soon
usage --since 1 --key nobody
audit list {NAME}
audit list {NAME} --json
audit list nobody
audit verify
audit verify --json
policy list
policy list --json
policy list --config weir.yaml
policy show balanced
policy show balanced --json
policy show own --config weir.yaml --window 64000
policy show own --config weir.yaml --yaml
policy show balancd
policy lint weir.yaml
policy lint weir.yaml --strict
policy lint weir.yaml --json
policy lint balanced
policy lint broken.yaml
policy lint nothing.yaml
policy import broken.yaml
policy recommend runs.jsonl
policy recommend runs.jsonl --json --model gpt-4o-mini
policy recommend nothing.jsonl
replay runs.jsonl --window 4096 --max-tokens 256
replay runs.jsonl --window 4096 --max-tokens 256 --json --policy balanced --policy off
replay runs.jsonl --window 4096 --max-tokens 256 --policy strict --config weir.yaml
replay runs.jsonl --window 4096 --prices gold
replay nothing.jsonl
evaluate runs.jsonl --window 4096 --max-tokens 256
evaluate runs.jsonl --window 4096 --max-tokens 256 --json --limit 1
evaluate runs.jsonl --window 4096 --max-tokens 256 --gate-coverage 1
evaluate runs.jsonl --window 100000 --gate-coverage 0.5
evaluate runs.jsonl --gate 0.5
evaluate runs.jsonl --model gpt-4o-mini
evaluate
demo --steps 12 --window 4096 --fast --keep demo.db
demo --steps 12 --window 4096 --fast --json --keep demo2.db
demo --keep demo.db
serve --config broken.yaml
serve --host 256.0.0.1
db migrate
db migrate --json
db migrate --store sqlite+aiosqlite:////nowhere/w.db
conversations notes greeting
conversations notes greeting --json
conversations delete greeting
conversations delete greeting --yes
conversations delete nobody
conversations delete {NAME} --yes --json
keys create --name bot --policy balanced --models gpt-* --allow mode
keys create --name " "
keys create --name other --policy balancd
keys create --name bot
keys create --name two --json
keys list
keys list --json
keys revoke bott
keys revoke bot
keys revoke two --json
keys list
conversations list
"""


def helps(command: click.Command = main, *path: str) -> Iterator[str]:
    """The ``--help`` of a command and of everything below it."""
    command._help_option = None  # click keeps the one of whoever asked first, who may have begun below `weir`
    result = CliRunner().invoke(main, [*path, "--help"], prog_name="weir")
    yield f"=== weir {' '.join((*path, '--help'))}\n{result.output}"
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            assert found is not None
            yield from helps(found, *path, name)


def outputs() -> Iterator[str]:
    """What every line of :data:`COMMANDS` says, on stdout and on stderr, and its exit code."""
    with tempfile.TemporaryDirectory() as folder, _inside(Path(folder)):
        Path("w.db").write_bytes(gzip.decompress(STORE.read_bytes()))
        CliRunner().invoke(main, ["db", "migrate"])
        variables = {"REQUEST": _ids()[-1], "FIRST": _ids()[0], "REF": _refs()[-1]}
        for line in COMMANDS.strip().splitlines():
            arguments = [variables.get(each, each) for each in shlex.split(line)]
            result = CliRunner().invoke(main, arguments, prog_name="weir")
            said = re.sub(
                r"^.*(% of the file| rows)\n", "", result.stderr, flags=re.MULTILINE
            )  # on a slow machine only
            aside = f"--- stderr\n{said}" if said else ""
            yield f"=== weir {line}\n{_short(_masked(result.stdout + aside, line))}--- exit {result.exit_code}\n"


def _masked(text: str, line: str) -> str:
    text = text.replace(str(Path.cwd()), "FOLDER")
    command = line.split()[0]
    written = command == "keys" or any(word in line for word in ("notes", "delete"))
    masks = (*MASKS, *(WRITTEN if written else DEMO if command == "demo" else ()))
    for pattern, mask in masks:
        text = re.sub(pattern, mask, text)
    return text


def _short(text: str) -> str:
    if len(text) <= MAX_KEPT:
        return text
    return f"{text[:MAX_KEPT]}\n--- {len(text)} characters, sha256 {sha256(text.encode()).hexdigest()}\n"


@contextmanager
def _inside(folder: Path) -> Iterator[None]:
    """In a folder with recordings and configurations, and an environment without anything of Weir's."""
    before, here = dict(os.environ), Path.cwd()
    for name in before:
        if name.startswith(("WEIR_", "OPENAI_", "OTEL_", "COLUMNS")):
            del os.environ[name]
    os.environ["WEIR_STORE"] = "sqlite+aiosqlite:///w.db"
    os.chdir(folder)
    lines = [
        {
            "messages": session(14),
            "tools": TOOLS,
            "meta": {"id": "first", "facts": [{"value": "zulu", "needed_at": [26]}]},
        },
        {"messages": session(5, seed=50)},
    ]
    Path("runs.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    Path("weir.yaml").write_text(POLICIES, encoding="utf-8")
    Path("broken.yaml").write_text("prot: 1\nlisten: {port: many}\n", encoding="utf-8")
    try:
        yield
    finally:
        os.chdir(here)
        os.environ.clear()
        os.environ.update(before)


def session(steps: int, *, seed: int = 0) -> list[dict[str, object]]:
    """A conversation of so many requests."""
    messages = opening(seed=seed + 1)
    for number in range(steps - 1):
        messages += tool_step(number, text=f"{'zulu' if not number else ''} {prose(280, seed=seed + number)}")
    return [*messages, {"role": "assistant", "content": "Done."}]


async def _recorded() -> None:
    """A database after two conversations, one of which was edited."""
    messages = session(14)
    async with (
        serve_simulator(SimulatorSettings(window=WINDOW), counter=COUNTER) as simulator,
        weir(simulator.base_url, Path("w.db"), window=WINDOW) as target,
        target.client() as client,
    ):
        for length in range(2, len(messages), 2):
            await client.chat.completions.create(
                model="sim", messages=messages[:length], max_tokens=256, tools=TOOLS,
                extra_headers={"x-weir-conversation": NAME},
            )  # fmt: skip
            await target.runtime.preparation.settled()
        await client.chat.completions.create(
            model="sim", messages=[{"role": "user", "content": "hi"}], max_tokens=16,
            extra_headers={"x-weir-conversation": "greeting"},
        )  # fmt: skip
        await target.runtime.preparation.settled()


def _ids() -> list[str]:
    return [each["id"] for each in _told("conversations", "show", NAME, "--timeline")]


def _refs() -> list[str]:
    return [each["ref"] for each in _told("conversations", "show", NAME, "--removed")]


def _told(*arguments: str) -> list[dict[str, str]]:
    told: list[dict[str, str]] = json.loads(CliRunner().invoke(main, [*arguments, "--json"]).stdout)
    return told


if __name__ == "__main__":
    if "--record" in sys.argv:
        with tempfile.TemporaryDirectory() as place, _inside(Path(place)):
            asyncio.run(_recorded())
            STORE.write_bytes(gzip.compress(Path("w.db").read_bytes(), mtime=0))
    HELP.write_text("\n".join(helps()), encoding="utf-8")
    OUTPUT.write_text("\n".join(outputs()), encoding="utf-8")
