"""``weir conversations`` against a database that a real session wrote, and is writing."""

import asyncio
import json
import re
import sqlite3
import sys
from base64 import b64decode
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from policies.memory.checkpoint import Checkpoint
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


def test_list_shows_every_conversation_the_newest_first(written: Path) -> None:
    rows = json.loads(conversations("list", "--json", file=written).stdout)
    table = conversations("list", file=written)

    assert [(row["name"], row["requests"]) for row in rows] == [("greeting", 1), (NAME, STEPS)]
    assert rows[1]["tokens_after"] < rows[1]["tokens_before"]
    assert [line.split()[0] for line in table.stdout.splitlines()] == ["name", "greeting", NAME]
    assert len(json.loads(conversations("list", "--limit", "1", "--json", file=written).stdout)) == 1


def test_show_says_how_full_a_conversation_is_and_what_is_gone(written: Path) -> None:
    status, gone = shown(NAME, file=written), shown(NAME, "--removed", file=written)
    page = conversations("show", NAME, file=written)

    assert status["removed"]["messages"] == len(gone) > 0
    assert status["removed"]["tokens"] == sum(row["tokens"] for row in gone)
    for name in ("requests", "branches", "tokens_before", "tokens_after", "limit"):
        assert re.search(rf"^{name} +{status[name]:,} *$", page.stdout, re.MULTILINE), name
    assert f"show {NAME} --removed --store {url(written)}" in page.stderr


def test_the_timeline_has_a_row_per_request(written: Path) -> None:
    rows = shown(NAME, "--timeline", file=written)
    table = conversations("show", NAME, "--timeline", file=written).stdout.splitlines()

    assert len(rows) == STEPS == len(table) - 1
    assert [row["length"] for row in rows] == sorted(row["length"] for row in rows)
    assert all(row["status"] == 200 for row in rows)
    assert rows[0]["actions"] == "none" != rows[-1]["actions"]
    assert rows[-1]["actions"] in table[-1]


@pytest.mark.requirement("A0.101")
def test_the_checkpoint_comes_as_markdown_or_json_of_one_row(written: Path) -> None:
    page = conversations("show", NAME, "--checkpoint", file=written)
    as_json = shown(NAME, "--checkpoint", file=written)

    assert page.exit_code == 0
    assert page.stdout.startswith(Checkpoint.from_json(json.dumps(as_json["state"])).to_markdown().rstrip("\n"))
    assert page.stdout.rstrip("\n").endswith(as_json["summary"].rstrip("\n"))
    assert as_json["ref"] in page.stderr
    assert as_json["version"] == max(shown(NAME, file=written)["checkpoints"])
    assert "nothing was compacted" in failed(conversations("show", "greeting", "--checkpoint", file=written))


def test_what_was_removed_is_listed_with_its_reason_and_its_time(written: Path) -> None:
    rows = shown(NAME, "--removed", file=written)
    table = conversations("show", NAME, "--removed", file=written).stdout.splitlines()

    assert len(table) == len(rows) + 1
    for row, line in zip(rows, table[1:], strict=True):
        assert line.split()[0] == row["ref"]
        assert row["how"] in line
        assert row["why"]
        assert row["since"] > 1e9
        assert row["text"]
    nothing = conversations("show", "greeting", "--removed", file=written)
    assert (nothing.exit_code, nothing.stdout, nothing.stderr) == (0, "", "Nothing was removed.\n")


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


@pytest.mark.requirement("A0.60")
def test_notes_are_listed(written: Path, tmp_path: Path) -> None:
    none = conversations("notes", NAME, file=written)
    assert (none.exit_code, none.stdout, none.stderr) == (0, "", "There are no notes.\n")
    assert "no conversation zzz" in failed(conversations("notes", "zzz", file=written))


def test_an_export_holds_everything(written: Path) -> None:
    whole = json.loads(conversations("export", NAME, file=written).stdout)

    assert len(whole["exchanges"]) == STEPS
    bodies = {each["ref"]: b64decode(each["body"]) for each in whole["originals"]}
    assert json.loads(bodies[shown(NAME, "--removed", file=written)[0]["ref"]])
    assert {row["ref"] for row in shown(NAME, "--removed", file=written)} <= set(bodies)
    assert "no conversation zzz" in failed(conversations("export", "zzz", file=written))


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


@pytest.mark.requirement("A2.24", "A0.112")
def test_what_a_conversation_is_a_part_of_and_when_it_was_closed_are_shown_where_there_is_such_a_one(
    written: Path, tmp_path: Path
) -> None:
    copy = copied(
        written, tmp_path, "UPDATE conversations SET parent = 'main-task', closed = 86400.0 WHERE name = 'greeting'",
        f"UPDATE conversations SET actions = 'observe=1,evict=3' WHERE name = '{NAME}'",
    )  # fmt: skip
    table = conversations("list", file=copy).stdout.splitlines()
    page = conversations("show", "greeting", file=copy).stdout

    assert not {"parent", "closed (UTC)"} & set(conversations("list", file=written).stdout.splitlines()[0].split("  "))
    assert "parent" in table[0]
    assert "closed (UTC)" in table[0]
    assert "main-task" in table[1]
    assert "1970-01-02 00:00:00" in table[1]
    assert "observe=1,evict=3" in table[2]
    assert "parent" in page
    assert "closed" in page
    assert not re.search(r"^closed", conversations("show", NAME, file=copy).stdout, re.MULTILINE)


def test_every_command_has_an_example() -> None:
    for command in ("list", "show", "notes", "export", "delete"):
        said = CliRunner().invoke(main, ["conversations", command, "--help"])
        assert said.exit_code == 0
        assert "Example:\n    weir conversations " in said.stdout
        assert f"weir conversations {command}" in said.stdout


def test_a_removed_message_is_given_back_as_it_was_sent(written: Path) -> None:
    results = [row for row in shown(NAME, "--removed", file=written) if row["role"] == "tool"]
    page = conversations("show", NAME, "--ref", results[0]["ref"], file=written)
    original = shown(NAME, "--ref", results[0]["ref"], file=written)

    assert page.stdout == prose(280, seed=1000) + "\n"
    assert original[0]["message"] == tool_step(0)[1]


def test_the_ref_of_a_summary_gives_all_that_it_covers(written: Path) -> None:
    checkpoint = shown(NAME, "--checkpoint", file=written)
    covered = shown(NAME, "--ref", checkpoint["ref"], file=written)

    assert len(covered) > 1
    assert {each["ref"] for each in covered} <= {row["ref"] for row in shown(NAME, "--removed", file=written)}


def failed(result: Result, code: int = 1) -> str:
    """The one line of a failure."""
    assert result.exit_code == code
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1, result.stderr
    return result.stderr.strip()


def test_an_unknown_conversation_names_the_nearest_one(written: Path) -> None:
    assert failed(conversations("show", "suport-4711", file=written)) == (
        "weir: no conversation suport-4711; did you mean support-4711?"
    )
    assert failed(conversations("show", "zzz", file=written)).endswith(
        "no conversation zzz; see weir conversations list"
    )


def test_an_unknown_ref_is_one_line(written: Path) -> None:
    assert failed(conversations("show", NAME, "--ref", "nothing", file=written)) == (
        f"weir: no original nothing in {NAME}"
    )


def test_a_missing_file_is_one_line_and_is_not_made(tmp_path: Path) -> None:
    for arguments in (("list",), ("show", "x")):
        assert "there is no database at" in failed(conversations(*arguments, file=tmp_path / "none.db"))
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_no_database_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "w.db").write_bytes(b"not a database " * 100)

    assert "not a database" in failed(conversations("list", file=tmp_path / "w.db"))


@pytest.mark.requirement("R.67")
def test_a_newer_schema_is_refused_in_one_line(written: Path, tmp_path: Path) -> None:
    copy = tmp_path / "newer.db"
    with sqlite3.connect(written) as source, sqlite3.connect(copy) as target:
        source.backup(target)
        target.execute("UPDATE alembic_version SET version_num = '9999'")
    source.close()
    target.close()

    assert "schema 9999" in failed(conversations("list", file=copy))


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
