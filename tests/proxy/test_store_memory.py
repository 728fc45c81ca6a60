"""What outlives a window: checkpoints, the way back, notes, summaries, what is out of the window."""

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from policies.ledger import Prepared
from proxy.store import Store, checkpoints
from proxy.store.records import ConversationRow, StaleVersion
from tests.proxy.store_rows import change, decided, exchange, note, saved, summary, url


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    opened = await Store.open(url(tmp_path / "w.db"), busy_timeout=60)  # what waits behind fifty others, waits long
    yield opened
    await opened.close()


def raw(path: Path, statement: str, *values: object) -> list[tuple[object, ...]]:
    connection = sqlite3.connect(path, isolation_level=None, timeout=5)
    try:
        return connection.execute(statement, values).fetchall()
    finally:
        connection.close()


async def only(store: Store, name: str = "c1", tenant: str = "tenant-a") -> ConversationRow:
    row = await store.conversation(tenant, name)
    assert row is not None
    return row


@pytest.mark.requirement("A0.105", "A0.114")
async def test_of_two_concurrent_saves_one_wins_and_no_higher_version_is_lost(postgres_url: str) -> None:
    """Two servers on one database, twenty rounds: the loser is told the version, saves again, and both states are there."""
    here = await Store.open(postgres_url)
    there = await Store.open(postgres_url)

    async def save(store: Store, said: str, expected: int) -> tuple[int, int]:
        losses = 0
        while True:
            try:
                return await store.commit(saved(expected, said=said)), losses
            except StaleVersion as stale:
                expected, losses = stale.current, losses + 1

    version = lost = 0
    for step in range(20):
        both = await asyncio.gather(save(here, f"h{step}", version), save(there, f"t{step}", version))
        assert sorted(made for made, _ in both) == [version + 1, version + 2]
        version, lost = version + 2, lost + sum(losses for _, losses in both)
    assert lost == 20
    rows = await here.checkpoints(await only(here))
    assert [row.version for row in rows] == list(range(1, 41))
    assert {row.body for row in rows} == {f"{who}{step}" for step in range(20) for who in "ht"}
    with pytest.raises(StaleVersion):
        await there.commit(saved(39, said="stale"))
    assert await here.checkpoint_at(await only(here), 40) == rows[-1]
    await here.close()
    await there.close()


@pytest.mark.requirement("R.71")
async def test_versions_stay_in_order_where_the_clock_went_back(store: Store) -> None:
    for version, at in enumerate((5000.0, 1400.0, 1500.0)):
        await store.commit(saved(version, at=at))
    await store.commit(msgspec.structs.replace(saved(0, at=2000.0), branch="b2"))
    rows = await store.checkpoints(await only(store))
    assert [(r.branch, r.version) for r in rows] == [("b2", 1), ("b1", 1), ("b1", 2), ("b1", 3)]


@pytest.mark.requirement("A0.112")
async def test_old_checkpoints_go_but_never_that_of_the_newest_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "VERSIONS_KEPT", 3)
    store = await Store.open(url(tmp_path / "w.db"))
    await store.commit(change(0))
    await store.commit(change(1))
    for version in range(2, 8):
        await store.commit(saved(version))
    rows = await store.checkpoints(await only(store))
    assert [r.version for r in rows] == [2, 6, 7, 8]
    assert rows[0].cut == change(1).cut
    await store.commit(change(8))
    assert [r.version for r in await store.checkpoints(await only(store))] == [7, 8, 9]
    branch = await store.branch("tenant-a", "b1")
    assert branch is not None
    assert [each.version for each in decided(branch).cuts] == [1, 2, 9]
    await store.close()


@pytest.mark.requirement("R.67")
@pytest.mark.parametrize(
    "damaged", ["{]", "[]", "7", "{}", '{"covers": 7}', None], ids=["cut", "list", "number", "empty", "part", "word"]
)
async def test_a_damaged_prepared_summary_counts_as_none(store: Store, tmp_path: Path, damaged: str | None) -> None:
    await store.record([exchange(1)])
    await store.prepare("tenant-a", "b1", Prepared(7, b"p", "we went on"))
    if damaged is None:
        [(body,)] = raw(tmp_path / "w.db", "SELECT CAST(prepared AS TEXT) FROM branches")
        damaged = str(body).replace("went", "want")
    raw(tmp_path / "w.db", "UPDATE branches SET prepared = CAST(? AS BLOB)", damaged)
    branch = await store.branch("tenant-a", "b1")
    assert branch is not None
    assert branch.known.prepared is None
    assert store.damaged == 1


@pytest.mark.requirement("A0.105", "P8")
async def test_rollbacks_and_commits_at_once_leave_one_line_of_versions(postgres_url: str) -> None:
    here = await Store.open(postgres_url)
    there = await Store.open(postgres_url)
    await here.commit(saved(0))
    row = await only(here)
    heads: list[int] = []

    async def go_on(store: Store, number: int) -> None:
        expected = 0
        while True:
            try:
                if number % 3 == 0:
                    heads.append(await store.rollback(row, version=1, at=100.0))
                else:
                    heads.append(await store.commit(saved(expected, said=str(number))))
            except StaleVersion as stale:
                expected = stale.current
            else:
                return

    await asyncio.gather(*(go_on((here, there)[n % 2], n) for n in range(30)))
    assert sorted(heads) == list(range(2, 32))
    branch = await here.branch("tenant-a", "b1")
    assert branch is not None
    assert branch.version == 31
    await here.close()
    await there.close()


@pytest.mark.requirement("R.67")
async def test_a_damaged_note_or_summary_counts_as_absent(store: Store, tmp_path: Path) -> None:
    await store.record([exchange(1)])
    await store.add_notes("tenant-a", "c1", [note(1), note(2)])
    await store.keep_summary("tenant-a", summary(1))
    raw(tmp_path / "w.db", "UPDATE notes SET importance = 'critical' WHERE id = ?", note(1).id)
    raw(tmp_path / "w.db", "UPDATE summaries SET text = CAST('other' AS BLOB)")
    assert await store.notes("tenant-a", "c1") == [note(2)]
    assert await store.summary("tenant-a", summary(1).key) is None
    assert store.damaged == 2
    await store.keep_summary("tenant-a", summary(1))
    assert await store.summary("tenant-a", summary(1).key) == summary(1)


@pytest.mark.requirement("P7", "S.1", "S.3")
async def test_one_tenant_never_sees_what_another_keeps(store: Store) -> None:
    await store.commit(change(0))
    await store.record([exchange(1)])
    await store.add_notes("tenant-a", "c1", [note(1)])
    await store.keep_summary("tenant-a", summary(1))
    theirs = msgspec.structs.replace(await only(store), tenant="tenant-b")
    assert await store.checkpoints(theirs) == []
    assert await store.checkpoint_at(theirs, 1) is None
    assert await store.latest_checkpoint("tenant-b", "c1") is None
    assert await store.removed(theirs) == []
    assert await store.newest_branch(theirs) is None
    assert await store.summary("tenant-b", summary(1).key) is None
    assert await store.notes("tenant-b", "c1") == []
    assert await store.add_notes("tenant-b", "c1", [note(1)]) == 0
    assert await store.close_conversation(theirs, 1.0) is False
    assert await store.want("tenant-b", "b1", "compact", 1.0) is False
    assert await store.search("tenant-b", "output", conversation="c1") == []
    told = await store.export(theirs)
    assert told["conversation"] is None
    assert not any(rows for rows in told.values())
