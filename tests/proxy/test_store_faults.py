import asyncio
import json
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from proxy.store import Store, StoreUnavailable
from tests.proxy.store_rows import chain, change, exchange, original, sha, url
from tests.proxy.store_writer import big_state

ROOT = Path(__file__).resolve().parents[2]
WRITER = Path(__file__).with_name("store_writer.py")
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error"}


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    opened = await Store.open(url(tmp_path / "w.db"), busy_timeout=0.4)
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
    assert len(branch.cuts) == branch.version
    assert len(branch.edits) == 3 * branch.version
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
async def test_two_hundred_kills_leave_no_half_checkpoint_and_lose_none_that_was_acknowledged(tmp_path: Path) -> None:
    path = tmp_path / "w.db"
    said = run_writer("states", str(path), "200")
    assert isinstance(said, list)
    assert len(said) == 200
    assert sum(1 for version in said if version) > 100, "most rounds must have written something"
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
    assert [cut.version for cut in branch.cuts] == list(range(2, branch.version + 1, 2))
    assert len(branch.edits) == 3 * len(branch.cuts)
    assert branch.checkpoint == big_state(branch.version - 1)
    assert store.damaged == 0
    await store.close()
    connection = sqlite3.connect(path)
    assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    connection.close()


@pytest.mark.requirement("R.62")
async def test_a_full_disk_refuses_the_commit_and_nothing_else(tmp_path: Path) -> None:
    told = run_writer("full", str(tmp_path / "w.db"))
    assert isinstance(told, dict)
    assert told["refused"] in {"full", "io"}
    assert told["read"] == told["version"]
    assert told["again"] == told["version"] + 1
    store = await Store.open(url(tmp_path / "w.db"))
    branch = await store.branch("tenant-a", "b1")
    assert branch is not None
    assert branch.version == told["again"]
    await store.close()


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
async def test_a_task_cancelled_anywhere_leaves_no_lock_and_no_half(store: Store, tmp_path: Path) -> None:
    expected, made = 0, 0
    for step in range(60):
        task = asyncio.create_task(store.commit(change(expected)))
        for _ in range(step % 12):
            await asyncio.sleep(0)
        if step % 3 == 0:
            await asyncio.sleep(0.0005 * (step % 7))
        task.cancel()
        outcome = (await asyncio.gather(task, return_exceptions=True))[0]
        made += not isinstance(outcome, BaseException)
        branch = await store.branch("tenant-a", "b1")
        await store.record([exchange(1000 + step, conversation="other", branch="other")])
        assert lock_is_free(tmp_path / "w.db")
        branch = await store.branch("tenant-a", "b1")
        expected = branch.version if branch is not None else 0
        if branch is not None:
            assert (len(branch.edits), len(branch.cuts)) == (3 * expected, expected)
    assert 0 < expected < 60
    assert made <= expected


@pytest.mark.requirement("R.65")
async def test_reads_cancelled_anywhere_leave_the_store_usable(store: Store) -> None:
    await store.record([exchange(1, end=chain(1)[0], length=1)])
    for step in range(60):
        tasks = [asyncio.create_task(store.find("tenant-a", chain(1))) for _ in range(20)]
        for _ in range(step % 10):
            await asyncio.sleep(0)
        for task in tasks[::2]:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(r is not None and not isinstance(r, Exception) for r in results[1::2])
    assert await store.commit(change(0)) == 1


async def test_closing_waits_for_what_has_begun(tmp_path: Path) -> None:
    store = await Store.open(url(tmp_path / "w.db"))
    task = asyncio.create_task(store.commit(change(0)))
    await asyncio.sleep(0)
    await store.close()
    await store.close()
    assert await task == 1
    with pytest.raises(StoreUnavailable):
        await store.commit(change(1))


@pytest.mark.requirement("R.66")
async def test_a_file_that_was_deleted_or_replaced_is_noticed(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "w.db"
    await store.commit(change(0))
    shutil.copy(path, tmp_path / "copy.db")
    path.unlink()
    for attempt in (store.commit(change(1)), store.ping()):
        with pytest.raises(StoreUnavailable, match="deleted") as gone:
            await attempt
        assert gone.value.reason == "gone"
    shutil.copy(tmp_path / "copy.db", path)
    with pytest.raises(StoreUnavailable, match="replaced"):
        await store.commit(change(1))


@pytest.mark.requirement("R.66")
def test_a_file_or_a_directory_that_may_not_be_written_refuses_the_start() -> None:
    with tempfile.TemporaryDirectory() as made:
        there = Path(made)
        for entry in (there / "file" / "w.db", there / "directory" / "w.db"):
            entry.parent.mkdir()
        asyncio.run(_make(there / "file" / "w.db"))
        (there / "file" / "w.db").chmod(0o444)
        for directory in (there, there / "file", there / "directory"):
            directory.chmod(0o555)
        try:
            for name in ("file", "directory"):
                told = run_writer("readonly", str(there / name / "w.db"))
                assert isinstance(told, dict)
                assert told["reason"] == "read_only"
        finally:
            for directory in (there, there / "file", there / "directory"):
                directory.chmod(0o755)


async def _make(path: Path) -> None:
    await (await Store.open(url(path))).close()
