"""A database that the first Weir with this schema made and filled opens, with all that was in it, on both databases.

    python -m tests.proxy.test_store_of_before

takes down anew what is read of them, where that is to be something else. The databases themselves stay as they are.
"""

import asyncio
import json
import sqlite3
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

import asyncpg
import pytest
import zstandard

from proxy.store import Store
from tests.proxy.store_rows import url as sqlite_url
from tests.proxy.store_story import read, tell

GOLDEN = Path(__file__).parents[1] / "golden"
FILE, SCRIPT, READ = (GOLDEN / f"store_{name}.zst" for name in ("sqlite", "postgresql", "read"))


def told() -> Any:
    """What is read of either."""
    return json.loads(zstandard.decompress(READ.read_bytes()))


def unpacked(folder: Path) -> Path:
    """The file of before."""
    path = folder / "w.db"
    path.write_bytes(zstandard.decompress(FILE.read_bytes()))
    return path


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return sqlite_url(tmp_path / "w.db")
    return str(request.getfixturevalue("postgres_url"))


async def open_before(url: str) -> Store:
    """A store on the database of before, which is put where nothing is yet."""
    if url.startswith("sqlite"):
        unpacked(Path(url.partition(":///")[2]).parent)
        return await Store.open(url)
    script = zstandard.decompress(SCRIPT.read_bytes()).decode()
    connection = await asyncpg.connect(url)
    await connection.execute("\n".join(line for line in script.splitlines() if not line.startswith("\\")))
    await connection.close()
    return await Store.open(url)


@pytest.mark.requirement("P9", "R.67")
async def test_all_that_a_database_of_before_held_is_read_of_it(url: str) -> None:
    store = await open_before(url)
    found, expected = await read(store), told()
    await store.close()
    for name in expected:
        assert found[name] == expected[name], name


@pytest.mark.requirement("P9", "R.67")
async def test_a_database_of_before_is_written_as_one_of_today(url: str) -> None:
    store = await open_before(url)
    for row in await store.conversations(None):
        assert await store.delete(row, 9000.0)
    for key in await store.list_keys():
        await store.revoke_key(key.name, 9000.0)
    assert [chain.broken for chain in await store.verify()] == [None] * 3
    await store.prune(9000.5, 9001.0)
    assert [chain.broken for chain in await store.verify()] == [None] * 3
    await store.close()


@pytest.mark.requirement("P9", "R.67")
async def test_rounds_of_the_recall_tool_that_no_longer_go_up_are_forgotten(tmp_path: Path) -> None:
    path = unpacked(tmp_path)
    with closing(sqlite3.connect(path)) as file, file:
        (before,) = file.execute("SELECT count(*) FROM edits").fetchone()
        tenant, branch = file.execute("SELECT tenant, branch FROM edits LIMIT 1").fetchone()
        one = "SELECT min(version * 1000 + position) FROM edits WHERE branch = :branch"
        round_ = f"UPDATE edits SET kind = 'round' WHERE branch = :branch AND version * 1000 + position = ({one})"
        assert (before > 1, file.execute(round_, {"branch": branch}).rowcount) == (True, 1)
    store = await Store.open(sqlite_url(path))
    assert await store.branch(tenant, branch) is not None
    await store.close()
    with closing(sqlite3.connect(path)) as file:
        assert file.execute("SELECT count(*), sum(kind = 'round') FROM edits").fetchone() == (before - 1, 0)


@pytest.mark.requirement("P9")
async def test_the_same_is_read_of_a_database_of_today(url: str) -> None:
    store = await Store.open(url)
    await tell(store)
    found, expected = await read(store), told()
    await store.close()
    for tenants in (found["tenants"], expected["tenants"]):
        for tenant in tenants.values():  # a Weir of before wrote fewer figures of health
            exports = [each["export"]["conversation"] for each in tenant["of"].values()]
            for each in (*exports, *filter(None, tenant["branches"])):
                each.pop("health", None)
    for name in expected.keys() - {"usage"}:  # of conversations that a Weir of before deleted, usage is gone as well
        assert found[name] == expected[name], name


@pytest.mark.requirement("P9")
async def test_a_file_of_today_has_the_tables_indexes_and_triggers_of_one_of_before(tmp_path: Path) -> None:
    before = unpacked(tmp_path)
    for path in (before, tmp_path / "new.db"):
        await (await Store.open(sqlite_url(path))).close()
    assert shape(tmp_path / "new.db") == shape(before)


def shape(path: Path) -> dict[str, Any]:
    """Columns in any order, and whatever else there is; what a column is without a value is nobody's concern."""
    with closing(sqlite3.connect(path)) as file:
        found: dict[str, Any] = {}
        for kind, name, table, sql in file.execute("SELECT type, name, tbl_name, sql FROM sqlite_master").fetchall():
            if kind == "trigger" or name.startswith("originals_fts"):
                found[name] = sql
            elif kind == "table":
                columns = file.execute(f"PRAGMA table_info({name})").fetchall()
                found[name] = sorted((name, type_, null, key) for _, name, type_, null, _, key in columns)
                found[f"{name} refers"] = sorted(each[2:] for each in file.execute(f"PRAGMA foreign_key_list({name})"))
                found[f"{name} is"] = ("AUTOINCREMENT" in sql, "WITHOUT ROWID" in sql)
            else:
                columns = file.execute(f"PRAGMA index_xinfo({name})").fetchall()
                shown = "" if name.startswith("sqlite_") else name
                found[f"{table}.{shown}"] = [each[2:] for each in columns], "WHERE" in (sql or "")
        return found


async def _write() -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = await Store.open(sqlite_url(unpacked(Path(folder))))
        found = await read(store)
        await store.close()
    READ.write_bytes(zstandard.compress(json.dumps(found, indent=0, sort_keys=True).encode(), 19))


if __name__ == "__main__":
    asyncio.run(_write())
