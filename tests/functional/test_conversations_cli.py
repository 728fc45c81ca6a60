"""``weir conversations`` against a database that a real session wrote, and is writing."""

import asyncio
import json
import sqlite3
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from proxy.cli import main
from proxy.store.packing import Packed, unpack, unpack_message
from tests.functional.harness import ALONE, COUNTER, ROOT, TOOLS, Deployment, opening, prose, tool_step, weir
from tests.upstream.app import serve_simulator
from tests.upstream.model import SimulatorSettings

pytestmark = pytest.mark.slow

STEPS = 12
WINDOW = 4096
NAME = "support-4711"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database after two conversations, one of which was edited."""
    file = tmp_path_factory.mktemp("conversations") / "w.db"
    asyncio.run(session(file))
    return file


async def session(file: Path) -> None:
    async with (
        serve_simulator(SimulatorSettings(window=WINDOW), counter=COUNTER) as simulator,
        weir(simulator.base_url, file, window=WINDOW) as target,
        target.client() as client,
    ):
        messages = opening()
        for number in range(STEPS):
            await client.chat.completions.create(
                model="sim", messages=messages, max_tokens=256, tools=TOOLS, extra_headers={"x-weir-conversation": NAME}
            )
            messages += [*tool_step(number), {"role": "assistant", "content": prose(60, seed=number)}]
            messages.append({"role": "user", "content": f"Go on with module {number + 1}. {prose(60, seed=-number)}"})
        await client.chat.completions.create(
            model="sim", messages=[{"role": "user", "content": "hi"}], max_tokens=16,
            extra_headers={"x-weir-conversation": "greeting"},
        )  # fmt: skip


def url(file: Path) -> str:
    return f"sqlite+aiosqlite:///{file}"


def conversations(*arguments: str, file: Path, given: str | None = None) -> Result:
    options = ["conversations", *arguments, "--store", url(file)]
    return CliRunner().invoke(main, options, env={"WEIR_CONFIG": ""}, input=given)


def shown(*arguments: str, file: Path) -> Any:
    result = conversations("show", *arguments, "--json", file=file)
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def copied(written: Path, tmp_path: Path, *changes: str) -> Path:
    """A copy of the database, changed."""
    copy = tmp_path / "copy.db"
    with sqlite3.connect(written) as source, sqlite3.connect(copy) as target:
        source.backup(target)
        for change in changes:
            target.execute(change)
    source.close()
    target.close()
    return copy


def held(database: Path, said: str) -> bool:
    """Whether an original in the database says it."""
    with sqlite3.connect(database) as connection:
        frames = [body for (body,) in connection.execute("SELECT body FROM frames")]
    connection.close()
    packed = [each for frame in frames for each in unpack(frame, dict[str, Packed]).values()]
    return any(said in unpack_message(each)[1] for each in packed)


@pytest.mark.requirement("A0.112")
def test_a_deletion_says_what_goes_and_asks(written: Path, tmp_path: Path) -> None:
    copy = copied(written, tmp_path)
    assert held(copy, "src/module_3.py")
    status = shown(NAME, file=copy)
    asked = conversations("delete", NAME, file=copy, given="n\n")
    unanswered = conversations("delete", NAME, file=copy)

    for said in (
        f"{STEPS} requests",
        f"{len(status['checkpoints'])} checkpoints",
        f"{status['removed']['messages']} messages",
    ):
        assert said in asked.stderr
    assert (asked.exit_code, asked.stdout) == (1, "")
    assert asked.stderr.endswith("weir: nothing was deleted\n")
    assert (unanswered.exit_code, unanswered.stdout) == (1, "")
    assert unanswered.stderr.endswith("weir: nothing was deleted: nobody answered (--yes deletes without asking)\n")
    assert shown(NAME, file=copy) == status
    done = conversations("delete", NAME, file=copy, given="y\n")
    assert (done.exit_code, done.stdout) == (0, f"Deleted {NAME}.\n")
    assert "no conversation" in failed(conversations("show", NAME, file=copy))
    assert [row["name"] for row in json.loads(conversations("list", "--json", file=copy).stdout)] == ["greeting"]
    left = json.loads(conversations("delete", "greeting", "--yes", "--json", file=copy).stdout)
    assert (left["name"], left["deleted"]) == ("greeting", True)
    assert b"src/module_3.py" not in copy.read_bytes()
    assert not held(copy, "src/module_3.py")


def test_a_name_of_two_conversations_is_refused_with_their_ids(written: Path, tmp_path: Path) -> None:
    ids = sorted(row["id"] for row in json.loads(conversations("list", "--json", file=written).stdout))
    copy = copied(
        written, tmp_path, "PRAGMA foreign_keys = OFF",
        f"UPDATE conversations SET tenant = 'other', name = '{NAME}' WHERE name = 'greeting'",
    )  # fmt: skip
    for arguments in (("show",), ("delete", "--yes"), ("notes",), ("export",)):
        line = failed(conversations(arguments[0], NAME, *arguments[1:], file=copy))
        assert line == (
            f"weir: 2 conversations of different keys are called {NAME}; say which by its id: {', '.join(ids)}"
        )
    mine = next(r["id"] for r in json.loads(conversations("list", "--json", file=copy).stdout) if r["requests"] > 1)
    assert shown(mine, file=copy)["requests"] == STEPS


def failed(result: Result, code: int = 1) -> str:
    """The one line of a failure."""
    assert result.exit_code == code
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1, result.stderr
    return result.stderr.strip()


def test_control_characters_of_a_name_do_not_reach_the_table(written: Path, tmp_path: Path) -> None:
    copy = tmp_path / "odd.db"
    with sqlite3.connect(written) as source, sqlite3.connect(copy) as target:
        source.backup(target)
        target.execute("UPDATE conversations SET name = ? WHERE name = 'greeting'", ("a\x1b[31m[red]b",))
    source.close()
    target.close()
    table = conversations("list", file=copy).stdout

    assert "\x1b" not in table
    assert "[red]b" in table


async def run(*arguments: str, store: str) -> bytes:
    """What a command in a process of its own prints."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "proxy", "conversations", *arguments, "--store", store,
        stdout=asyncio.subprocess.PIPE, cwd=ROOT,
    )  # fmt: skip
    out, _ = await process.communicate()
    assert process.returncode == 0
    return out


@ALONE
async def test_it_can_be_read_and_changed_while_weir_runs(deployment: Deployment) -> None:
    async with (
        serve_simulator(SimulatorSettings(window=WINDOW), counter=COUNTER) as simulator,
        deployment.serving(simulator.base_url, window=WINDOW) as target,
    ):
        client, store = target.client(), target.store
        for text in ("one", "two"):
            await client.chat.completions.create(model="sim", messages=[{"role": "user", "content": text}])
            await target.settled()
        rows = await store.conversations(None)
        out = await run("list", "--json", store=deployment.url)
        await run("delete", rows[1].name, "--yes", store=deployment.url)
        left = await store.conversations(None)
        await client.chat.completions.create(model="sim", messages=[{"role": "user", "content": "three"}])

    assert [row["name"] for row in json.loads(out)] == [row.name for row in rows]
    assert len(rows) == 2
    assert [row.id for row in left] == [rows[0].id]
