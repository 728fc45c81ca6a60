"""The audit's chain: nothing in it can be changed unseen, and writers that are killed leave it whole."""

import asyncio
import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from proxy.store import Store
from proxy.store.chain import AuditRow
from tests.proxy.audit_writer import PART
from tests.proxy.store_rows import change, eviction, url

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
WRITER = Path(__file__).with_name("audit_writer.py")
PIPES = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error"}
TENANT = "tenant-a"
ROWS = 12


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    opened = await Store.open(url(tmp_path / "w.db"))
    yield opened
    await opened.close()


async def grow(store: Store, rows: int = ROWS, *, start: int = 0, at: float = 2000.0) -> None:
    """A chain of ``rows`` rows of one tenant, from commits that have one each."""
    for number in range(start, start + rows):
        given = change(number, count=1, with_cut=False, at=at + number)
        await store.commit(msgspec.structs.replace(given, evictions=(eviction(number),)))


async def chain_of(store: Store, tenant: str = TENANT) -> list[AuditRow]:
    """The rows of a tenant, oldest first."""
    return (await store.audit(tenant, limit=10_000))[::-1]


def tamper(path: Path, *statements: str) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        for statement in statements:
            connection.execute(statement)


TAMPERINGS: dict[str, tuple[tuple[str, ...], int]] = {
    "its facts": (("UPDATE audit SET facts = '{}' WHERE seq = 5",), 5),
    "its time": (("UPDATE audit SET at = at + 1 WHERE seq = 5",), 5),
    "its type": (("UPDATE audit SET type = 'save' WHERE seq = 5",), 5),
    "its conversation": (("UPDATE audit SET conversation = 'c2' WHERE seq = 5",), 5),
    "its branch": (("UPDATE audit SET branch = 'b9' WHERE seq = 5",), 5),
    "its request": (("UPDATE audit SET request = 'r' WHERE seq = 5",), 5),
    "its hash": (("UPDATE audit SET hash = zeroblob(32) WHERE seq = 5",), 5),
    "the hash before": (("UPDATE audit SET prev = zeroblob(32) WHERE seq = 5",), 5),
    "the last row": ((f"UPDATE audit SET at = 7 WHERE seq = {ROWS}",), ROWS),
    "a value of another type": (("UPDATE audit SET facts = x'00ff' WHERE seq = 5",), 5),
    "a text for a hash": (("UPDATE audit SET prev = 'x', hash = 'y' WHERE seq = 5",), 5),
    "a row that is deleted": (("DELETE FROM audit WHERE seq = 5",), 6),
    "a row below the first": (("UPDATE audit SET seq = -3 WHERE seq = 5",), -3),
    "two rows swapped": (
        (
            "UPDATE audit SET seq = 99 WHERE seq = 5",
            "UPDATE audit SET seq = 5 WHERE seq = 9",
            "UPDATE audit SET seq = 9 WHERE seq = 99",
        ),
        5,
    ),
}


@pytest.mark.requirement("A0.138", "A0.147")
@pytest.mark.parametrize("what", TAMPERINGS)
async def test_every_change_to_the_chain_is_found(what: str, store: Store, tmp_path: Path) -> None:
    statements, broken = TAMPERINGS[what]
    await grow(store)
    (chain,) = await store.verify()
    assert (chain.first, chain.last, chain.broken) == (1, ROWS, None)
    tamper(tmp_path / "w.db", *statements)
    (chain,) = await store.verify()
    assert chain.broken == broken


@pytest.mark.requirement("A0.138")
async def test_two_processes_and_two_hundred_commits_make_one_line(postgres_url: str) -> None:
    await (await Store.open(postgres_url)).close()
    writers = [
        await asyncio.create_subprocess_exec(
            sys.executable, str(WRITER), "many", postgres_url, name, "100", env=ENVIRONMENT, **PIPES
        )
        for name in ("b1", "b2")
    ]
    for _ in range(100 // PART):
        for writer in writers:
            assert writer.stdout is not None
            line = await writer.stdout.readline()
            assert line == b"ready\n", (await writer.communicate())[1].decode()[-1500:]
        for writer in writers:
            assert writer.stdin is not None
            writer.stdin.write(b"go\n")
    for writer in writers:
        _, said = await writer.communicate()
        assert writer.returncode == 0, said.decode()
    store = await Store.open(postgres_url)
    rows = await chain_of(store)
    (chain,) = await store.verify()
    await store.close()
    assert (chain.broken, chain.last) == (None, len(rows))
    assert [row.seq for row in rows] == list(range(1, len(rows) + 1))
    for branch in ("b1", "b2"):
        mine = [row for row in rows if row.branch == branch]
        assert [json.loads(row.facts)["version"] for row in mine if row.type == "eviction"] == list(range(1, 101))
        assert sum(row.type == "compaction" for row in mine) == 50
        assert sum(row.type == "refused" for row in mine) == 25
    switches = sum(one.branch != two.branch for one, two in zip(rows, rows[1:], strict=False))
    assert switches > 2, "the two wrote at the same time"


@pytest.mark.requirement("A0.138", "R.60")
async def test_killed_writers_leave_a_whole_chain_with_every_commit(tmp_path: Path) -> None:
    path = tmp_path / "w.db"
    await (await Store.open(url(path))).close()
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, str(WRITER), "killed", str(path), "10"],
        env=ENVIRONMENT, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    store = await Store.open(url(path))
    (chain,) = await store.verify()
    branch = await store.branch(TENANT, "b1")
    rows = await chain_of(store)
    await store.close()
    assert branch is not None
    assert branch.version >= int(done.stdout)
    assert chain.broken is None
    for kind in ("eviction", "compaction", "save"):
        told = [json.loads(row.facts)["version"] for row in rows if row.type == kind]
        assert told == list(range(1, branch.version + 1))
