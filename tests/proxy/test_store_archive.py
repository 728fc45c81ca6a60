import sqlite3
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from proxy.store import Store
from proxy.store.packing import Packed, pack, pack_message, unpack
from proxy.store.records import Change
from tests.proxy.store_rows import change, decided, exchange, original, url


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    opened = await Store.open(url(tmp_path / "w.db"))
    yield opened
    await opened.close()


def raw(path: Path, statement: str, *values: object) -> list[tuple[object, ...]]:
    connection = sqlite3.connect(path, isolation_level=None, timeout=5)
    try:
        return connection.execute(statement, values).fetchall()
    finally:
        connection.close()


def files(path: Path) -> bytes:
    return b"".join(p.read_bytes() for p in sorted(path.parent.glob(f"{path.name}*")))


@pytest.mark.parametrize(
    "query",
    ['"', "'", "*", "a OR", "NEAR(", "text:", "-x", "^", "(", "\0", "   ", "", '"""" AND', "a" * 5000, "{x}: y"],
)
async def test_nothing_in_a_search_is_an_operator(store: Store, query: str) -> None:
    await store.commit(change())
    assert isinstance(await store.search("tenant-a", query), list)


@pytest.mark.requirement("R.67")
async def test_a_flipped_bit_in_a_body_is_noticed_and_the_row_set_aside(store: Store, tmp_path: Path) -> None:
    given = change()
    await store.commit(given)
    hurt = given.originals[1]
    [(frame,)] = raw(tmp_path / "w.db", "SELECT body FROM frames")
    assert isinstance(frame, bytes)
    held = unpack(frame, dict[str, Packed])
    held[hurt.ref] = pack_message(bytes([hurt.body[0] ^ 1]) + hurt.body[1:], hurt.text)
    raw(tmp_path / "w.db", "UPDATE frames SET body = ?", pack(held))
    assert raw(tmp_path / "w.db", "PRAGMA integrity_check") == [("ok",)]
    assert await store.original("tenant-a", hurt.ref) is None
    assert store.damaged == 1
    assert await store.original("tenant-a", hurt.ref) is None
    assert store.damaged == 1
    assert raw(tmp_path / "w.db", "SELECT ref FROM originals WHERE quarantined") == [(hurt.ref,)]
    assert given.cut is not None
    assert [o.ref for o in await store.covered("tenant-a", given.cut.ref)] == [
        given.originals[0].ref,
        given.originals[2].ref,
    ]
    assert hurt.ref not in {o.ref for o in await store.search("tenant-a", "output")}
    await store.commit(msgspec.structs.replace(change(1), originals=(hurt,)))
    assert await store.original("tenant-a", hurt.ref) == hurt
    assert hurt.ref in {o.ref for o in await store.search("tenant-a", "output")}


@pytest.mark.requirement("R.67")
@pytest.mark.parametrize(
    ("statement", "edits", "cuts", "checkpoints"),
    [
        ("UPDATE edits SET text = CAST('[evicted 7]' AS BLOB) WHERE position = 1", 2, 1, 1),
        ("UPDATE edits SET tokens = tokens + 1 WHERE position = 0", 2, 1, 1),
        ("UPDATE cuts SET text = CAST('summary 9' AS BLOB)", 3, 0, 1),
        ("UPDATE cuts SET covers = covers + 1", 3, 0, 1),
        ("UPDATE cuts SET stays = 'nonsense'", 3, 0, 1),
        ("UPDATE checkpoints SET body = CAST('{}' AS BLOB)", 3, 1, 0),
    ],
)
async def test_a_damaged_edit_or_cut_counts_as_absent(
    store: Store, tmp_path: Path, statement: str, edits: int, cuts: int, checkpoints: int
) -> None:
    await store.commit(change())
    raw(tmp_path / "w.db", statement)
    branch = await store.branch("tenant-a", "b1")
    row = await store.conversation("tenant-a", "c1")
    assert branch is not None
    assert row is not None
    assert (len(decided(branch).edits), len(decided(branch).cuts), len(await store.checkpoints(row))) == (
        edits,
        cuts,
        checkpoints,
    )
    assert store.damaged >= 1


@pytest.mark.requirement("S.6")
async def test_a_deleted_conversation_leaves_no_trace_in_any_file(store: Store, tmp_path: Path) -> None:
    def told(conversation: str, word: str) -> Change:
        given = change(conversation=conversation, branch=conversation, of=conversation)
        return msgspec.structs.replace(
            given,
            edits=tuple(replace(e, text=f"[{word} was here]") for e in given.edits),
            originals=tuple(original(n, of=conversation, text=f"{word} {n}") for n in range(3)),
            checkpoint=f'{{"goal": "{word}"}}',
        )

    await store.commit(told("c1", "xylophone"))
    await store.commit(told("c2", "bassoon"))
    shared = original(0, of="c2", text="bassoon 0")
    await store.commit(
        msgspec.structs.replace(told("c1", "xylophone"), expected=1, cut=None, originals=(shared,), edits=())
    )
    await store.record([exchange(1, conversation="c1", branch="c1"), exchange(2, conversation="c2", branch="c2")])
    assert len(await store.search("tenant-a", "xylophone")) == 3
    assert b"xylophone" in files(tmp_path / "w.db")
    row = await store.conversation("tenant-a", "c1")
    assert row is not None
    assert await store.delete(row) is True
    assert await store.delete(row) is False
    assert b"xylophone" not in files(tmp_path / "w.db")
    assert await store.branch("tenant-a", "c1") is None
    assert await store.original("tenant-a", shared.ref) == shared
    assert len(await store.search("tenant-a", "bassoon")) == 3
    for table in ("conversations", "branches", "edits", "cuts", "checkpoints", "exchanges"):
        assert len(raw(tmp_path / "w.db", f"SELECT DISTINCT tenant FROM {table}")) == 1
    assert raw(tmp_path / "w.db", "SELECT count(*) FROM exchanges") == [(1,)]
    assert raw(tmp_path / "w.db", "INSERT INTO originals_fts (originals_fts) VALUES ('integrity-check')") == []
