"""What the README and its neighbours print is typed as it stands; only the port is another one."""

import asyncio
import re
import shutil
import sys
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path

import click
import pytest

from proxy.access.destination import upstream_for
from proxy.cli import main
from proxy.cli.demo import ROWS
from proxy.config.loading import load_config
from tests.functional.harness import COUNTER, ROOT, WeirProcess, free_port
from tests.upstream.app import serve_simulator
from tests.upstream.model import SimulatorSettings

README = (ROOT / "README.md").read_text()
COMMANDS, CONFIGURATION, HOW, TUTORIAL = (
    (ROOT / "docs" / f"{page}.md").read_text() for page in ("commands", "configuration", "how-it-works", "tutorial")
)
ADDRESS = "127.0.0.1:8400"


def blocks(language: str, word: str, page: str = README) -> list[str]:
    """A page's code in that language that has ``word`` in it."""
    return [
        text
        for kind, text in re.findall(r"^```(\w*)\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
        if kind == language and word in text
    ]


async def typed(*command: str, folder: Path) -> str:
    """What a command prints that a stranger types, whose shell knows nothing of OpenAI."""
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=folder,
        env={"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": str(folder)},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0, err.decode()
    return out.decode()


@pytest.fixture
async def made(tmp_path: Path) -> AsyncIterator[WeirProcess]:
    """What ``make run`` starts where there is no key for an upstream."""
    assert re.search(r"^run:.*\n\t\$\(BIN\)/weir serve$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    async with WeirProcess(["--store", f"sqlite+aiosqlite:///{tmp_path}/w.db"], free_port()) as weir:
        yield weir


@pytest.mark.requirement("A1.4")
async def test_the_first_snippets_work_as_printed(made: WeirProcess, tmp_path: Path) -> None:
    here = f"127.0.0.1:{made.port}"
    (snippet,) = (each.replace(ADDRESS, here) for each in blocks("python", ADDRESS))
    assert len(await typed(sys.executable, "-c", snippet, folder=tmp_path)) > 1

    (command,) = (each.replace(ADDRESS, here) for each in blocks("", "curl"))
    if shutil.which("curl"):
        answer = await typed("/bin/sh", "-c", command, folder=tmp_path)
        assert answer.startswith("HTTP/1.1 200")
        assert "x-weir-conversation: " in answer
        assert '"finish_reason":"stop"' in answer.replace(" ", "")


async def test_the_tutorial_shows_what_it_says(made: WeirProcess, tmp_path: Path) -> None:
    first, second = (each.replace(ADDRESS, f"127.0.0.1:{made.port}") for each in blocks("python", ADDRESS, TUTORIAL))
    assert await typed(sys.executable, "-c", first, folder=tmp_path) == "before=13;after=13;limit=5735 none\n"
    assert "`before=13;after=13;limit=5735 none`" in TUTORIAL
    turns = (await typed(sys.executable, "-c", second, folder=tmp_path)).splitlines()
    afters = [int(re.findall(r"after=(\d+)", turn)[0]) for turn in turns]
    actions = [turn.split()[-1] for turn in turns]
    begun = actions.index("compact=1")
    assert set(actions[:begun]) == {"none"}
    assert set(actions[begun:]) == {"compact=1"}
    assert max(afters) <= 5735
    assert sum(after < before for before, after in pairwise(afters)) == 2, "two batches"


async def test_weir_serves_in_front_of_any_server_as_printed(tmp_path: Path) -> None:
    (line,) = re.findall(r"^\.venv/bin/weir serve (.*)$", README, re.MULTILINE)
    async with serve_simulator(SimulatorSettings(), counter=COUNTER) as simulator:
        upstream = simulator.base_url.removeprefix("http://").removesuffix("/v1")
        arguments = line.replace("127.0.0.1:9000", upstream).replace("/weir.db", f"/{tmp_path}/weir.db").split()
        async with WeirProcess(arguments, free_port()) as weir:
            answer = await weir.client().chat.completions.create(
                model="sim", messages=[{"role": "user", "content": "Hello"}]
            )
        assert answer.choices[0].message.content
        assert len(simulator.answered()) == 1


def test_the_configuration_that_is_printed_is_one(tmp_path: Path) -> None:
    (text,) = blocks("yaml", "upstreams", CONFIGURATION)
    (tmp_path / "weir.yaml").write_text(text)
    secrets = {name: f"secret-{name}" for name in re.findall(r"\$\{(\w+)\}", text)}

    config = load_config(tmp_path / "weir.yaml", env=secrets)

    assert upstream_for(config, "claude-9").name == "claude"


def test_every_command_of_the_table_exists_with_its_options() -> None:
    told = re.findall(r"^\| `weir ([^|]*)\|", COMMANDS, re.MULTILINE)
    assert len(told) >= 14
    assert {cell.split("`")[0].split()[0] for cell in told} == set(main.list_commands(click.Context(main)))
    for cell in told:
        first, *more = re.findall(r"`([^`]+)`", f"`weir {cell}")
        group, *rest = first.removeprefix("weir ").split()
        command = main.get_command(click.Context(main), group)
        assert command is not None, first
        if isinstance(command, click.Group):
            own = [[*rest], *(each.split() for each in more)]
        else:
            own = [rest + [word for each in more for word in each.split()]]
        for words in own:
            found = (
                command.commands[words[0]]
                if isinstance(command, click.Group) and words[:1] and words[0].islower()
                else command
            )
            known = {option for parameter in found.params for option in parameter.opts}
            assert {word for word in words if word.startswith("--")} <= known, f"weir {group} {' '.join(words)}"


def test_the_demo_that_is_shown_has_the_rows_of_the_demo() -> None:
    (shown,) = blocks("text", "without Weir")
    rows = [re.split(r" {2,}", line)[0] for line in shown.splitlines()[1:]]

    assert rows == [*(label for label, _ in ROWS), "batches of edits"]
    answered = re.findall(r"^requests answered +(\d+) of 73 +73 of 73$", shown, re.MULTILINE)
    assert len(answered) == 1
