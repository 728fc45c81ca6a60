"""How large a database becomes, what goes first, and that looking after it holds nobody up."""

import json
import random
import sqlite3
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

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
