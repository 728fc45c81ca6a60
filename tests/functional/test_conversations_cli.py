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
from proxy.simulator.serving import serve_simulator
from proxy.simulator.settings import SimulatorSettings
from tests.functional.harness import COUNTER, ROOT, TOOLS, opening, prose, tool_step, weir

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


def conversations(*arguments: str, file: Path) -> Result:
    return CliRunner().invoke(main, ["conversations", *arguments, "--store", url(file)], env={"WEIR_CONFIG": ""})


def shown(*arguments: str, file: Path) -> Any:
    result = conversations("show", *arguments, "--json", file=file)
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def test_list_shows_every_conversation_the_newest_first(written: Path) -> None:
    rows = json.loads(conversations("list", "--json", file=written).stdout)
    table = conversations("list", file=written)

    assert [(row["name"], row["requests"]) for row in rows] == [("greeting", 1), (NAME, STEPS)]
    assert rows[1]["tokens_after"] < rows[1]["tokens_before"]
    assert [line.split()[0] for line in table.stdout.splitlines()] == ["conversation", "greeting", NAME]
    assert len(json.loads(conversations("list", "--limit", "1", "--json", file=written).stdout)) == 1


def test_show_says_how_full_a_conversation_is_and_what_is_gone(written: Path) -> None:
    status, gone = shown(NAME, file=written), shown(NAME, "--removed", file=written)
    page = conversations("show", NAME, file=written)

    assert status["removed"]["messages"] == len(gone) > 0
    assert status["removed"]["tokens"] == sum(row["tokens"] for row in gone)
    assert f"{STEPS} on 1 branch" in page.stdout
    assert f"{status['tokens_before']:,} > {status['tokens_after']:,} of {status['limit']:,} tokens" in page.stdout
    assert f"show {NAME} --removed --store {url(written)}" in page.stderr


def test_the_timeline_has_a_row_per_request(written: Path) -> None:
    rows = shown(NAME, "--timeline", file=written)
    table = conversations("show", NAME, "--timeline", file=written).stdout.splitlines()

    assert len(rows) == STEPS == len(table) - 1
    assert [row["length"] for row in rows] == sorted(row["length"] for row in rows)
    assert all(row["status"] == 200 for row in rows)
    assert rows[0]["actions"] == "none" != rows[-1]["actions"]
    assert rows[-1]["actions"] in table[-1]


def test_the_newest_checkpoint_is_shown_with_the_text_that_stands_for_the_history(written: Path) -> None:
    found = shown(NAME, "--checkpoint", file=written)
    page = conversations("show", NAME, "--checkpoint", file=written)

    assert found["covers"] >= len(found["covered"]) > 0
    assert isinstance(found["state"], dict)
    assert page.stdout.rstrip("\n") == found["text"].rstrip("\n")
    assert found["ref"] in page.stderr
    assert found["version"] == max(shown(NAME, file=written)["checkpoints"])


def test_a_removed_message_is_given_back_as_it_was_sent(written: Path) -> None:
    results = [row for row in shown(NAME, "--removed", file=written) if row["role"] == "tool"]
    page = conversations("show", NAME, "--ref", results[0]["ref"], file=written)
    original = shown(NAME, "--ref", results[0]["ref"], file=written)

    assert page.stdout == prose(280, seed=1000) + "\n"
    assert original[0]["message"] == tool_step(0)[1]


def test_the_ref_of_a_summary_gives_all_that_it_covers(written: Path) -> None:
    checkpoint = shown(NAME, "--checkpoint", file=written)
    covered = shown(NAME, "--ref", checkpoint["ref"], file=written)

    assert [each["ref"] for each in covered] == checkpoint["covered"]


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


def test_an_unknown_ref_and_a_missing_checkpoint_are_one_line(written: Path) -> None:
    assert failed(conversations("show", NAME, "--ref", "nothing", file=written)) == (
        f"weir: no original nothing in {NAME}"
    )
    assert "nothing was compacted" in failed(conversations("show", "greeting", "--checkpoint", file=written))
    assert "one at a time" in failed(conversations("show", NAME, "--timeline", "--removed", file=written), code=2)


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


async def test_it_can_be_read_while_weir_runs(tmp_path: Path) -> None:
    file = tmp_path / "live.db"
    async with (
        serve_simulator(SimulatorSettings(window=WINDOW), counter=COUNTER) as simulator,
        weir(simulator.base_url, file, window=WINDOW) as target,
        target.client() as client,
    ):
        for text in ("one", "two"):
            await client.chat.completions.create(model="sim", messages=[{"role": "user", "content": text}])
            await target.runtime.settler.flush()
            assert target.runtime.store is not None
        rows = await target.runtime.store.conversations(None)
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "proxy", "conversations", "list", "--json", "--store", url(file),
            stdout=asyncio.subprocess.PIPE, cwd=ROOT,
        )  # fmt: skip
        out, _ = await process.communicate()
        await client.chat.completions.create(model="sim", messages=[{"role": "user", "content": "three"}])

    assert [row["name"] for row in json.loads(out)] == [row.name for row in rows]
    assert len(rows) == 2
