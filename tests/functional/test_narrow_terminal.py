"""Tables on a terminal of 80 columns: a row stays on one line, and a conversation goes by its name."""

import asyncio
import contextlib
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from proxy.cli import main
from tests.functional.harness import COUNTER, Talk, weir
from tests.upstream.app import serve_simulator
from tests.upstream.model import SimulatorSettings

WIDTH = 80
TERMINAL = {"FORCE_COLOR": "1", "NO_COLOR": "1", "COLUMNS": str(WIDTH), "LINES": "50", "TERM": "xterm"}
NAME = "a-conversation-with-a-name"
YAML = """
upstreams: {{main: {{base_url: "{upstream}"}}}}
window: 8192
store: {{url: "sqlite+aiosqlite:///w.db"}}
keys: [{{name: support-bot, secret: sk-of-the-bot}}]
"""


def shown(*command: str, **environment: str) -> str:
    result = CliRunner().invoke(main, command, env=environment)
    assert result.exit_code == 0, result.output
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", result.stdout)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration whose store holds a conversation that was compacted."""
    folder = tmp_path_factory.mktemp("narrow")
    store = folder / "w.db"

    async def talk() -> None:
        async with serve_simulator(SimulatorSettings(), counter=COUNTER) as simulator:
            yaml = YAML.format(upstream=simulator.base_url)
            async with weir("", store, yaml=yaml, folder=folder, window=None) as target:
                named: dict[str, Any] = {"default_headers": {"x-weir-conversation": NAME}}
                await Talk(target.client("sk-of-the-bot", **named)).agent(16)

    asyncio.run(talk())
    with contextlib.chdir(folder):
        shown("keys", "create", "--name", "night-shift", "--models", "gpt-*", "--config", "weir.yaml")
    return folder


@pytest.fixture(autouse=True)
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work where the configuration is."""
    monkeypatch.chdir(folder)


TABLES = (
    "conversations list",
    f"conversations show {NAME} --timeline",
    f"conversations show {NAME} --removed",
    "usage",
    "usage --by model",
    "keys list",
)


@pytest.mark.requirement("A0.3")
@pytest.mark.parametrize("command", TABLES)
def test_a_row_stays_on_one_line_and_the_columns_left_out_are_named(command: str) -> None:
    arguments = [*command.split(), "--config", "weir.yaml"]
    wide = shown(*arguments).splitlines()
    narrow, _, note = shown(*arguments, **TERMINAL).strip().partition("\n(")
    titles, shorter = (re.split(r"\s{2,}", lines[0].strip()) for lines in (wide, narrow.splitlines()))

    assert len([line for line in wide if line.strip()]) == len(narrow.splitlines())
    assert shorter == titles[: len(shorter)]
    assert " ".join(note.split()).partition(": ")[0] == ", ".join(titles[len(shorter) :])


@pytest.mark.requirement("P7")
def test_who_deletes_is_told_whose_conversation_it_is() -> None:
    asked = CliRunner().invoke(main, ["conversations", "delete", NAME, "--config", "weir.yaml"], input="n\n")
    assert "of key support-bot, last used" in asked.stderr
