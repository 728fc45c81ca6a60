"""How large a database becomes, what goes first, and that looking after it holds nobody up."""

import asyncio
import json
import random
import sqlite3
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
from sqlalchemy import Connection, Engine, event

from proxy.store import Store
from proxy.store.records import Change
from tests.proxy.store_rows import change, exchange, original, url

SIZE = 20_000


def talk(number: int, *, at: float) -> Change:
    """A conversation with an original of 20 KB that nothing can make smaller."""
    name = f"c{number}"
    given = change(conversation=name, branch=name, of=name, at=at)
    noise = random.Random(number).randbytes(SIZE // 2).hex(" ", 16)
    return msgspec.structs.replace(given, originals=(original(0, of=name, text=f"word{number} {noise}"),))


async def fill(store: Store, count: int) -> None:
    """Store conversations, the first one oldest, with an exchange each."""
    for number in range(count):
        await store.commit(talk(number, at=1000.0 + number))
        row = exchange(number, conversation=f"c{number}", branch=f"c{number}", at=1000.0 + number)
        await store.record([row])


async def kept(store: Store) -> set[str]:
    return {row.id for row in await store.conversations("tenant-a", limit=1000)}


def in_use(path: Path) -> int:
    """Bytes of the file."""
    return path.stat().st_size


@pytest.mark.requirement("P9", "R.72")
async def test_a_database_above_its_size_loses_closed_conversations_then_the_oldest_and_gives_the_room_back(
    tmp_path: Path,
) -> None:
    path = tmp_path / "w.db"
    store = await Store.open(url(path))
    await fill(store, 60)
    for number in (40, 50):
        row = await store.conversation("tenant-a", f"c{number}")
        assert row is not None
        await store.close_conversation(row, 1060.0)
    await store.checkpoint()
    whole = in_use(path)
    most = whole // 2
    assert await store.fit(10 * whole, before=2000.0, at=2000.0) == 0
    gone = await store.fit(most, before=2000.0, at=2000.0)
    left = await kept(store)
    assert len(left) == 60 - gone
    assert 20 <= gone < 50
    assert not left & {"c40", "c50"}
    oldest = [n for n in range(60) if n not in (40, 50)][: gone - 2]
    assert not left & {f"c{n}" for n in oldest}
    await store.checkpoint()
    assert in_use(path) <= most
    assert len(await store.search("tenant-a", "word59")) == 1
    assert await store.search("tenant-a", "word0") == []
    told = await store.audit("tenant-a", kind="delete")
    assert {json.loads(row.facts)["reason"] for row in told} == {"size"}
    assert await store.fit(1, before=1055.0, at=2000.0) > 0
    assert await kept(store) == {f"c{n}" for n in range(55, 60)}, "what is in use stays"
    await store.close()
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        assert connection.execute("INSERT INTO originals_fts (originals_fts) VALUES ('integrity-check')")


@pytest.mark.requirement("P9", "R.72")
async def test_retention_and_vacuum_let_requests_in_between_their_steps(tmp_path: Path) -> None:
    path = tmp_path / "w.db"
    store = await Store.open(url(path))
    await fill(store, 40)
    await store.checkpoint()
    whole, begun = in_use(path), list[int]()

    def transaction(_: Connection) -> None:
        begun.append(1)

    event.listen(Engine, "engine_connect", transaction)
    waited = list[int]()
    try:
        pruning = asyncio.create_task(store.prune(before=1500.0))
        version = 0
        while not pruning.done() and len(waited) < 15:
            before = len(begun)
            version = await store.commit(
                change(version, conversation="new", branch="new", of=f"new{version}", at=3000.0)
            )
            waited.append(len(begun) - before)
        assert await pruning >= 40
    finally:
        event.remove(Engine, "engine_connect", transaction)
    assert len(waited) >= 8, "a request waited for all of it"
    assert max(waited) <= 6, "a request waited for more than the step under way"
    assert await kept(store) == {"new"}
    await store.checkpoint()
    assert in_use(path) < whole // 2
    await store.close()


@pytest.mark.requirement("R.72")
async def test_no_step_of_retention_deletes_more_than_a_few(tmp_path: Path) -> None:
    """A step holds the only writing connection: it is bounded by what it deletes."""
    store = await Store.open(url(tmp_path / "w.db"))
    await store.commit(change(at=3000.0))
    await store.record([exchange(n, at=1000.0 + n) for n in range(1200)])
    deleted = list[int]()

    def counted(_c: object, cursor: sqlite3.Cursor, statement: str, *_: object) -> None:
        if statement.startswith("DELETE FROM exchanges"):
            deleted.append(cursor.rowcount)

    event.listen(Engine, "after_cursor_execute", counted)
    try:
        await store.prune(before=2500.0)
    finally:
        event.remove(Engine, "after_cursor_execute", counted)
    assert sum(deleted) == 1200
    assert max(deleted) <= 500
    await store.close()
