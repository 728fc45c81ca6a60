import asyncio
import contextlib
import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from proxy.store import Store
from proxy.store.records import StoreUnavailable
from tests.profile import tried
from tests.proxy.store_rows import chain, change, decided, exchange, original, sha, url
from tests.proxy.store_writer import big_state

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
FULL = 2  # the log is flushed before a commit is acknowledged (sqlite.org/pragma.html, synchronous)
WRITER = Path(__file__).with_name("store_writer.py")
KILLS = tried(25, 200)
"""How often a writer of checkpoints is killed."""
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error"}


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    opened = await Store.open(url(tmp_path / "w.db"), busy_timeout=0.4)
    yield opened
    await opened.close()


@pytest.fixture
async def patient(tmp_path: Path) -> AsyncIterator[Store]:
    """As patient as it is served: writers and readers on a busy machine wait."""
    opened = await Store.open(url(tmp_path / "w.db"))
    yield opened
    await opened.close()


def run_writer(*arguments: str) -> object:
    done = subprocess.run(
        [sys.executable, str(WRITER), *arguments], env=ENVIRONMENT, cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def lock_is_free(path: Path) -> bool:
    connection = sqlite3.connect(path, isolation_level=None, timeout=0)
    try:
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("ROLLBACK")
    except sqlite3.OperationalError:
        return False
    finally:
        connection.close()
    return True


@pytest.mark.requirement("P9", "R.60", "R.74")
async def test_forty_killed_writers_lose_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    path = tmp_path / "w.db"
    said = run_writer("crash", str(path), "40")
    assert isinstance(said, list)
    assert sum(1 for version in said if version) > 20, "most rounds must have written something"
    store = await Store.open(url(path))
    assert store.notices == ()
    branch = await store.branch("tenant-a", "b1")
    assert branch is not None
    assert max(said) <= branch.version <= max(said) + 1 + said.count(0)
    assert len(decided(branch).cuts) == branch.version
    assert len(decided(branch).edits) == 3 * branch.version
    for version in range(branch.version):
        given = change(version)
        for gone in (*given.originals, original(0, of=f"big{version}", text=f"{version} {'x' * 20_000}")):
            found = await store.original("tenant-a", gone.ref)
            assert found is not None
            assert sha(found.body) == sha(gone.body)
    assert store.damaged == 0
    assert len(await store.search("tenant-a", "output tool", limit=10_000)) == 3 * branch.version
    await store.close()
    connection = sqlite3.connect(path)
    assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    connection.close()


@pytest.mark.requirement("P9", "R.60", "A2.20", "A0.105")
async def test_kills_leave_no_half_checkpoint_and_lose_none_that_was_acknowledged(tmp_path: Path) -> None:
    path = tmp_path / "w.db"
    said = run_writer("states", str(path), str(KILLS))
    assert isinstance(said, list)
    assert len(said) == KILLS
    assert sum(1 for version in said if version) > KILLS / 2, "most rounds must have written something"
    assert [v for v in said if v] == sorted(v for v in said if v), "no version was ever lost"
    store = await Store.open(url(path))
    branch = await store.branch("tenant-a", "b1")
    row = await store.conversation("tenant-a", "c1")
    assert branch is not None
    assert row is not None
    assert branch.version >= max(said)
    states = await store.checkpoints(row)
    newest = range(max(1, branch.version - 99), branch.version + 1)
    assert [each.version for each in states[-len(newest) :]] == list(newest)
    for each in states:
        assert each.body == big_state(each.version - 1)
        assert (each.cut is not None) == (each.version % 2 == 0)
    assert [cut.version for cut in decided(branch).cuts] == list(range(2, branch.version + 1, 2))
    assert len(decided(branch).edits) == 3 * len(decided(branch).cuts)
    assert branch.known.checkpoint == big_state(branch.version - 1)
    assert store.damaged == 0
    await store.close()
    connection = sqlite3.connect(path)
    assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    connection.close()


@pytest.mark.requirement("R.63", "R.64")
async def test_a_lock_of_another_process_is_waited_for_then_reported_while_reads_go_on(
    store: Store, tmp_path: Path
) -> None:
    await store.record([exchange(1, end=chain(1)[0], length=1)])
    holder = await asyncio.create_subprocess_exec(
        sys.executable, str(WRITER), "hold", str(tmp_path / "w.db"), "2", env=ENVIRONMENT, stdout=subprocess.PIPE
    )
    assert holder.stdout is not None
    assert (await holder.stdout.readline()).strip() == b"held"
    waiting = [asyncio.create_task(store.commit(change(0, branch=f"b{n}"))) for n in range(4)]
    ticks = 0
    while not all(task.done() for task in waiting):
        await asyncio.sleep(0.01)
        ticks += 1
        assert await store.find("tenant-a", chain(1)) is not None
    for task in waiting:
        error = task.exception()
        assert isinstance(error, StoreUnavailable)
        assert error.reason in {"locked", "busy"}
    assert ticks > 5, "the event loop waited too"
    assert holder.returncode is None, "four writers wait together, not one after another"
    with pytest.raises(StoreUnavailable):
        await store.ping()
    await holder.wait()
    assert await store.commit(change(0)) == 1
    await store.ping()


@pytest.mark.requirement("R.65")
async def test_a_task_cancelled_anywhere_leaves_no_lock_and_no_half(patient: Store, tmp_path: Path) -> None:
    store, expected, made = patient, 0, 0
    for step in range(60):
        waits = [exchange(2000 + step, conversation="other", branch="other")]
        before = [asyncio.create_task(store.record(waits)) for _ in range(step % 2)]
        task = asyncio.create_task(store.commit(change(expected)))
        for _ in range(step % 12):
            await asyncio.sleep(0)
        if step % 3 == 0:
            await asyncio.sleep(0.0005 * (step % 7))
        task.cancel()
        outcome = (await asyncio.gather(task, return_exceptions=True))[0]
        await asyncio.gather(*before)
        made += not isinstance(outcome, BaseException)
        branch = await store.branch("tenant-a", "b1")
        await store.record([exchange(1000 + step, conversation="other", branch="other")])
        assert lock_is_free(tmp_path / "w.db")
        branch = await store.branch("tenant-a", "b1")
        expected = branch.version if branch is not None else 0
        if branch is not None:
            assert (len(decided(branch).edits), len(decided(branch).cuts)) == (3 * expected, expected)
    assert 0 < expected < 60
    assert made <= expected


@pytest.mark.requirement("R.61", "P9")
async def test_a_log_that_ends_at_any_frame_opens_to_what_was_committed_before(tmp_path: Path) -> None:
    """What a power loss leaves: any part of the log may not have reached the disk, from some frame on."""
    path, acknowledged = tmp_path / "w.db", 4
    store = await Store.open(url(path))
    await store.checkpoint()
    for version in range(acknowledged):
        await store.commit(change(version))
    assert await store._write(lambda tx: tx.connection.exec_driver_sql("PRAGMA synchronous").scalar()) == FULL
    database, log = path.read_bytes(), Path(f"{path}-wal").read_bytes()
    await store.close()
    page = int.from_bytes(log[8:12], "big")
    frame = 24 + page
    count = (len(log) - 32) // frame
    found = list[int]()
    for ends in (32 + n * frame + part for n in range(count + 1) for part in (0, frame // 2)):
        copy = tmp_path / f"{ends}" / "w.db"
        copy.parent.mkdir()
        copy.write_bytes(database)
        Path(f"{copy}-wal").write_bytes(log[:ends])
        with contextlib.closing(sqlite3.connect(copy)) as connection:
            assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
            rows = connection.execute("SELECT max(version) FROM branches").fetchone()
            edits = connection.execute("SELECT count(*) FROM edits").fetchone()
        assert edits[0] == 3 * (rows[0] or 0), "half of a transaction"
        if not found or found[-1] != (rows[0] or 0):
            found.append(rows[0] or 0)
            again = await Store.open(url(copy))
            branch = await again.branch("tenant-a", "b1")
            assert (branch.version if branch is not None else 0) == found[-1]
            assert again.damaged == 0
            await again.close()
    assert found == list(range(acknowledged + 1))
