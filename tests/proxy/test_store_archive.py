import sqlite3
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from proxy.store import Store
from proxy.store.packing import Packed, pack, pack_message, unpack
from proxy.store.records import Change
from tests.proxy.store_rows import change, decided, exchange, original, sha, url


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


@pytest.mark.requirement("R.67", "P9")
async def test_a_damaged_frame_costs_the_messages_in_it_until_they_are_archived_again(
    store: Store, tmp_path: Path
) -> None:
    batches = [change(n, of=f"batch {n}") for n in range(3)]
    for each in batches:
        await store.commit(each)
    frames = raw(tmp_path / "w.db", "SELECT DISTINCT frame FROM originals ORDER BY 1")
    assert len(frames) == 3
    raw(tmp_path / "w.db", "UPDATE frames SET body = substr(body, 1, length(body) - 9) WHERE id = ?", *frames[1])
    for number, each in enumerate(batches):
        found = [await store.original("tenant-a", gone.ref) for gone in each.originals]
        assert found == ([None] * 3 if number == 1 else list(each.originals))
    assert store.damaged == 3
    await store.commit(msgspec.structs.replace(change(3), originals=batches[1].originals))
    assert [await store.original("tenant-a", gone.ref) for gone in batches[1].originals] == [*batches[1].originals]
    assert raw(tmp_path / "w.db", "SELECT count(*) FROM frames") == [(3,)]


@pytest.mark.requirement("P9")
async def test_what_is_deleted_goes_from_the_frame_that_others_are_in(store: Store, tmp_path: Path) -> None:
    mine = change(conversation="c1", branch="c1", of="c1")
    mine = msgspec.structs.replace(
        mine, originals=tuple(original(n, of="c1", text=f"{WORDS[n]} was read") for n in range(3))
    )
    await store.commit(mine)
    other = change(conversation="c2", branch="c2", of="c2")
    await store.commit(msgspec.structs.replace(other, originals=mine.originals[1:2], cut=None, edits=()))
    row = await store.conversation("tenant-a", "c1")
    assert row is not None
    assert await store.delete(row)
    assert [await store.original("tenant-a", each.ref) for each in mine.originals] == [None, mine.originals[1], None]
    [(frame,)] = raw(tmp_path / "w.db", "SELECT body FROM frames")
    assert isinstance(frame, bytes)
    assert list(unpack(frame, dict[str, Packed])) == [mine.originals[1].ref]
    left = await store.conversation("tenant-a", "c2")
    assert left is not None
    assert await store.delete(left)
    assert raw(tmp_path / "w.db", "SELECT count(*) FROM frames") == [(0,)]


WORDS = ("bassoon", "celesta", "dulcimer")


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


async def test_with_digests_only_no_body_reaches_the_disk(tmp_path: Path) -> None:
    store = await Store.open(url(tmp_path / "w.db"), content="digest")
    given = msgspec.structs.replace(change(), originals=(original(0, text="the canary sings at dawn"),))
    await store.commit(given)
    await store.record([exchange(1)])
    assert await store.original("tenant-a", given.originals[0].ref) is None
    assert await store.search("tenant-a", "canary") == []
    stored = raw(tmp_path / "w.db", "SELECT hex(sha), size, frame FROM originals")
    assert stored == [(sha(given.originals[0].body).upper(), len(given.originals[0].body), None)]
    assert b"canary" not in files(tmp_path / "w.db")
    await store.close()
    store = await Store.open(url(tmp_path / "w.db"))
    await store.commit(msgspec.structs.replace(given, expected=1, edits=(), cut=None))
    assert await store.original("tenant-a", given.originals[0].ref) == given.originals[0]
    assert len(await store.search("tenant-a", "canary")) == 1
    await store.close()


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
