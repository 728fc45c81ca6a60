"""A database that cannot be written in mid-run: requests are answered and edited as before, and nothing is lost."""

import asyncio
import contextlib
import logging
import resource
import shutil
import sqlite3
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.functional.harness import (
    COUNTER,
    EVICTING,
    RunningWeir,
    Talk,
    WeirProcess,
    answered,
    arrays_of,
    batches,
    begins_with,
    free_port,
    weir,
)
from tests.upstream.app import serve_simulator
from tests.upstream.model import SimulatorSettings

pytestmark = pytest.mark.slow

BEFORE, DURING, AFTER = 12, 4, 2
BACK = "the store is written again: what waited in memory goes into it"
BATCHES = "SELECT count(*) FROM (SELECT version FROM cuts UNION SELECT version FROM edits)"
"""How many batches a database has; a version of a branch may be a state that was only saved."""


@contextmanager
def locked(database: Path) -> Iterator[None]:
    """Another connection holds the write lock."""
    connection = sqlite3.connect(database, isolation_level=None)
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
    finally:
        connection.execute("ROLLBACK")
        connection.close()


@contextmanager
def moved_away(database: Path) -> Iterator[None]:
    """The file has gone, as on a share that was unmounted."""
    away = database.with_name("away.db")
    database.rename(away)
    try:
        yield
    finally:
        away.rename(database)


@contextmanager
def read_only(database: Path) -> Iterator[None]:
    """Nobody may write the files, open descriptors included."""
    files = [f for f in (database, Path(f"{database}-wal")) if f.exists()]
    chattr = shutil.which("chattr") or ""
    done = [subprocess.run([chattr, "+i", f], capture_output=True).returncode for f in files] if chattr else [1]
    try:
        if any(done):
            pytest.skip("files cannot be made immutable here: that needs root and a file system that knows how")
        yield
    finally:
        for file in files if chattr else ():
            subprocess.run([chattr, "-i", file], capture_output=True, check=False)


async def metric(root: str, line: str) -> bool:
    """Whether ``/metrics`` has a line that begins so, with a value above zero."""
    async with httpx.AsyncClient() as http:
        text = (await http.get(f"{root}/metrics")).text
    return any(row.startswith(line) and float(row.rpartition(" ")[2]) > 0 for row in text.splitlines())


async def until(done: Callable[[], Awaitable[bool]], seconds: float = 12.0, *, pause: float = 0.1) -> None:
    """Wait for something to become true."""
    async with asyncio.timeout(seconds):
        while not await done():
            await asyncio.sleep(pause)


@asynccontextmanager
async def session(
    database: Path, rules: Mapping[str, Any] = {}
) -> AsyncIterator[tuple[RunningWeir, Talk, Callable[[], list[list[dict[str, object]]]]]]:
    async with (
        serve_simulator(SimulatorSettings(window=8192), counter=COUNTER) as simulator,
        weir(simulator.base_url, database, balanced=rules) as target,
    ):
        talk = Talk(target.client())

        def arrays() -> list[list[dict[str, object]]]:
            seen = answered(simulator)
            assert {s.status for s in seen} == {200}
            return arrays_of(seen)

        yield target, talk, arrays


def stored(database: Path, query: str) -> int:
    """One number from the database."""
    with contextlib.closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
        return int(connection.execute(query).fetchone()[0])


@pytest.mark.requirement("P6", "P9", "R.63", "R.66")
@pytest.mark.parametrize("trouble", [locked, moved_away, read_only])
async def test_edits_are_made_and_replayed_while_the_database_cannot_be_written_and_are_stored_after_it(
    trouble: Callable[[Path], contextlib.AbstractContextManager[None]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    database = tmp_path / "w.db"
    async with session(database) as (target, talk, arrays):
        await talk.agent(BEFORE)
        await target.stored()
        assert talk.actions()[-1] == "none"
        with trouble(database):
            await talk.agent(DURING)
            assert "compact=" in talk.actions()[-1]
            assert "degraded=store" in talk.actions()[-1]
            assert await metric(target.root, 'weir_degraded_total{weir_reason="store"}')
            assert [r for r in caplog.records if r.levelno >= logging.ERROR and "store" in r.getMessage()]
            assert batches(arrays()) == 1
        edited = arrays()[-1]
        await until(lambda: recovered(target))
        assert [r.getMessage() for r in caplog.records].count(BACK) == 1
        await talk.agent(AFTER)
        assert talk.actions()[-1].startswith("compact=")
        assert "degraded" not in talk.actions()[-1]
        assert begins_with(arrays()[-1], edited)
        await target.stored()
        assert stored(database, "SELECT count(*) FROM exchanges") == BEFORE + DURING + AFTER
        assert stored(database, BATCHES) == 1
    # What was decided while the database was away is known to the next process.
    async with session(database) as (_, again, arrays):
        again.messages = talk.messages
        await again.agent(1)
        assert begins_with(arrays()[-1], edited)


async def failing(target: RunningWeir) -> bool:
    return target.runtime.write_queue.failing


async def recovered(target: RunningWeir) -> bool:
    return not target.runtime.write_queue.failing


@pytest.mark.requirement("P6", "R.63")
async def test_a_second_batch_right_after_the_database_is_back_does_not_lose_the_first(tmp_path: Path) -> None:
    """The first batch waits in memory; the second one must not be stored in its place."""
    database = tmp_path / "w.db"
    async with session(database, EVICTING) as (target, talk, arrays):
        talk.grow(BEFORE, kind="agent")
        await talk.agent(1)
        await target.stored()
        with moved_away(database):
            talk.grow(2, kind="agent")
            await talk.agent(1)
            assert "evict=" in talk.actions()[-1]
            await until(lambda: failing(target))
        first = arrays()[-1]
        talk.grow(8, kind="agent")
        await talk.agent(1)
        second = arrays()[-1]
        placeholders = [m for m in first if m["role"] == "tool" and "rchived as" in str(m["content"])]
        assert placeholders
        assert all(m in second for m in placeholders), "edits of the first batch were forgotten"
        await target.stored()
        assert stored(database, BATCHES) >= 2
        async with httpx.AsyncClient(headers={"authorization": "Bearer sk-test"}) as http:
            for message in placeholders:
                ref = str(message["content"]).rpartition("rchived as ")[2][:12]
                page = await http.get(f"{target.root}/weir/blobs/{ref}")
                assert page.status_code == 200


@pytest.mark.requirement("P6", "P9", "R.62")
async def test_a_full_disk_costs_no_request_and_what_waited_is_written_when_there_is_room(tmp_path: Path) -> None:
    database = tmp_path / "w.db"
    async with serve_simulator(SimulatorSettings(window=8192), counter=COUNTER) as simulator:
        arguments = ["--upstream", simulator.base_url, "--window", "8192"]
        arguments += ["--store", f"sqlite+aiosqlite:///{database}"]
        async with WeirProcess(arguments, free_port()) as process:
            talk = Talk(process.client())
            await talk.agent(BEFORE)
            assert process.process is not None
            pid = process.process.pid
            _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (4096, hard))
            await talk.agent(DURING)
            assert "compact=" in talk.actions()[-1]
            assert "degraded=store" in talk.actions()[-1]
            assert await metric(process.root, 'weir_degraded_total{weir_reason="store"}')
            assert any("store" in line and "memory" in line for line in process.log)
            edited = arrays_of(answered(simulator))[-1]
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (hard, hard))

            async def written() -> bool:
                return stored(database, "SELECT count(*) FROM exchanges") >= BEFORE + DURING

            await until(written)
            await process.stop()
            await process.start()
            await talk.agent(1)
            assert begins_with(arrays_of(answered(simulator))[-1], edited)
        assert {s.status for s in answered(simulator)} == {200}
        assert batches(arrays_of(answered(simulator))) == 1
