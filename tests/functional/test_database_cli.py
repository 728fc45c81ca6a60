"""``weir db``: a copy taken while Weir writes is whole, and what is old goes only when somebody says so."""

import asyncio
import contextlib
import json
import re
import sqlite3
import stat
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from proxy.cli import main
from tests.functional.harness import COUNTER, Talk, weir
from tests.upstream.app import serve_simulator
from tests.upstream.model import SimulatorSettings

pytestmark = pytest.mark.slow

NAME = "support-4711"


def run(*arguments: str, store: Path | str, **more: str) -> Result:
    url = store if isinstance(store, str) else f"sqlite+aiosqlite:///{store}"
    return CliRunner().invoke(main, [*arguments, "--store", url], **more)


async def told(*arguments: str, store: Path | str) -> Any:
    done = await asyncio.to_thread(run, *arguments, "--json", store=store)
    assert done.exit_code == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.requirement("P9")
async def test_a_copy_taken_while_requests_come_in_is_whole_and_goes_on_where_it_was_taken(tmp_path: Path) -> None:
    database, copy = tmp_path / "w.db", tmp_path / "copy.db"
    async with serve_simulator(SimulatorSettings(window=4096), counter=COUNTER) as simulator:
        async with weir(simulator.base_url, database, window=4096) as target:
            talk = Talk(target.client(default_headers={"x-weir-conversation": NAME}))
            await talk.agent(10)
            await target.stored()
            busy = asyncio.create_task(Talk(target.client(), seed=5).agent(10))
            made = await told("db", "backup", str(copy), store=database)
            await busy
        assert made == {"path": str(copy), "bytes": copy.stat().st_size}
        assert stat.S_IMODE(copy.stat().st_mode) == 0o600
        with contextlib.closing(sqlite3.connect(f"file:{copy}?mode=ro", uri=True)) as opened:
            assert opened.execute("PRAGMA integrity_check").fetchone() == ("ok",)

        async with weir(simulator.base_url, copy, window=4096) as again:
            talk.client = again.client(default_headers={"x-weir-conversation": NAME})
            await talk.agent(1)
        assert "compact=" in talk.headers[-1]["x-weir-actions"]
        found = await told("conversations", "show", NAME, store=copy)
    assert found["requests"] == 11

    kept = copy.read_bytes()
    refused = await asyncio.to_thread(run, "db", "backup", str(copy), store=database)
    assert refused.exit_code == 1
    assert "copy.db exists already; name a new file" in refused.stderr
    assert copy.read_bytes() == kept
    nowhere = await asyncio.to_thread(run, "db", "backup", str(tmp_path / "no" / "w.db"), store=database)
    assert "cannot be made (No such file or directory)" in nowhere.stderr
    assert not list(tmp_path.glob("*.part*"))


async def test_a_restore_replaces_only_what_it_is_told_to_and_keeps_it(tmp_path: Path) -> None:
    database, copy, broken = tmp_path / "w.db", tmp_path / "copy.db", tmp_path / "broken.db"
    assert (await asyncio.to_thread(run, "db", "migrate", store=database)).exit_code == 0
    await told("db", "backup", str(copy), store=database)
    before = database.read_bytes()
    broken.write_bytes(b"SQLite format 3\0" + b"x" * 8_192)
    for source, words, said in (
        (copy, (), "is there: stop Weir, then say --replace"),
        (tmp_path / "none.db", ("--replace",), "there is no database at"),
        (broken, ("--replace",), "broken.db"),
    ):
        done = await asyncio.to_thread(run, "db", "restore", str(source), *words, store=database)
        assert (done.exit_code, said in done.stderr) == (1, True), done.stderr
        assert database.read_bytes() == before
    made = await told("db", "restore", str(copy), "--replace", store=database)
    assert Path(made["before"]).read_bytes() == before
    assert await told("conversations", "list", store=database) == []
    said = (await asyncio.to_thread(run, "db", "restore", str(copy), store="postgresql://weir@db/weir")).stderr
    assert "PostgreSQL is restored by its own tools: pg_restore" in said


async def test_what_is_there_and_what_is_old_is_counted_and_goes_only_after_a_yes(tmp_path: Path) -> None:
    database = tmp_path / "w.db"
    async with (
        serve_simulator(SimulatorSettings(), counter=COUNTER) as simulator,
        weir(simulator.base_url, database) as target,
    ):
        for name in ("old", "new"):
            await Talk(target.client(default_headers={"x-weir-conversation": name})).agent(1)
    with contextlib.closing(sqlite3.connect(database)) as opened, opened:
        opened.execute("UPDATE conversations SET updated = ? WHERE name = 'old'", (time.time() - 8 * 86_400,))

    checked = (await asyncio.to_thread(run, "doctor", store=database)).stdout
    assert re.search(
        r"^ok    store: it can be written, schema \d+, 2 conversations in [\d,]+ bytes$", checked, re.MULTILINE
    )

    prune = ("db", "prune", "--older-than", "7d")
    asked = await asyncio.to_thread(run, *prune, store=database, input="n\n")
    assert asked.exit_code == 1
    assert "1 conversation last used before" in asked.stderr
    unanswered = await asyncio.to_thread(run, *prune, store=database, input="")
    assert unanswered.exit_code == 1
    assert unanswered.stderr.endswith("weir: nothing was deleted: nobody answered (--yes deletes without asking)\n")
    assert len(await told("conversations", "list", store=database)) == 2

    gone = await told(*prune, "--yes", store=database)
    assert gone["conversations"] == 1
    rows = await told("conversations", "list", store=database)
    assert [row["name"] for row in rows] == ["new"]
    assert (await asyncio.to_thread(run, "db", "prune", "--older-than", "soon", store=database)).exit_code == 2
