"""What outlives a window: checkpoints, the way back, notes, summaries, what is out of the window."""

import asyncio
import base64
import json
import sqlite3
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from random import Random

import msgspec
import pytest
import sqlalchemy as sa

from policies.draft import ConversationState
from policies.ledger import EVERY_WINDOW, Edit, EditKind, Prepared
from proxy.conversation.thread import Thread
from proxy.store import Store, memory
from proxy.store.memory import MAX_NOTES, MAX_SUMMARIES
from proxy.store.packing import pack_text
from proxy.store.records import Branch, Change, ConversationRow, NoSuchVersion, ProviderIdsRow, StaleVersion
from proxy.store.sqlite import SqliteDatabase
from tests.proxy.store_rows import (
    chain,
    change,
    cut,
    decided,
    digest,
    edit,
    eviction,
    exchange,
    note,
    original,
    saved,
    summary,
    url,
)


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


@pytest.mark.requirement("A0.100", "A0.101", "A0.108", "D23")
async def test_a_checkpoint_is_a_row_of_its_own_with_or_without_a_cut(store: Store) -> None:
    await store.commit(msgspec.structs.replace(saved(0, reason="milestone"), window_id=1, length=4))
    await store.commit(msgspec.structs.replace(change(1), window_id=2, length=9))
    rows = await store.checkpoints(await only(store))
    assert [(r.version, r.reason, r.window_id, r.length, r.body) for r in rows] == [
        (1, "milestone", 1, 4, '{"goal": "g0"}'),
        (2, "compaction", 2, 9, '{"goal": "g1"}'),
    ]
    assert (rows[0].cut, rows[0].covered) == (None, ())
    assert (rows[1].cut, rows[1].covered) == (change(1).cut, change(1).covered)
    branch = await store.branch("tenant-a", "b1")
    assert branch is not None
    assert (branch.version, branch.known.checkpoint, branch.known.checkpoint_length) == (2, '{"goal": "g1"}', 9)


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


@pytest.mark.requirement("R.67", "A0.114", "P9")
async def test_checkpoints_are_stored_by_what_they_have_not_in_common_and_damage_costs_a_few(
    store: Store, tmp_path: Path
) -> None:
    random = Random(3)
    words = [f"{random.getrandbits(40):x}" for _ in range(900)]
    said = [" ".join(words[n : n + 800]) for n in range(60)]
    for version, each in enumerate(said):
        await store.commit(saved(version, said=each))
    row = await only(store)
    assert [each.body for each in await store.checkpoints(row)] == said
    stored = raw(tmp_path / "w.db", "SELECT version, base, length(body) FROM checkpoints ORDER BY version")
    whole = [version for version, base, _ in stored if base is None]
    assert whole[-2:] == [59, 60]
    assert 4 <= len(whole) <= 2 + 60 // 16
    assert sum(int(str(size)) for *_, size in stored) < 0.15 * 60 * len(pack_text(said[0]))
    raw(tmp_path / "w.db", "UPDATE checkpoints SET body = x'00' WHERE version = 30")
    left = [each.version for each in await store.checkpoints(row)]
    below = max(version for version in whole if int(str(version)) < 30)
    assert left == [n for n in range(1, 61) if not int(str(below)) < n <= 30]
    assert await store.checkpoint_at(row, 31) is not None


@pytest.mark.requirement("A0.114", "P9")
async def test_what_stays_of_older_checkpoints_is_read_without_those_that_went(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "VERSIONS_KEPT", 3)
    await store.commit(msgspec.structs.replace(change(0), checkpoint="at the cut", reason="compaction"))
    for version in range(1, 9):
        await store.commit(saved(version, said=f"at the cut, and {version} later"))
    told = await store.checkpoints(await only(store))
    assert [(each.version, each.body) for each in told] == [
        (1, "at the cut"),
        *((n, f"at the cut, and {n - 1} later") for n in (7, 8, 9)),
    ]


@pytest.mark.requirement("R.67", "A0.114")
async def test_a_damaged_checkpoint_counts_as_absent_and_the_one_before_it_holds(store: Store, tmp_path: Path) -> None:
    for version in range(3):
        await store.commit(saved(version))
    raw(tmp_path / "w.db", 'UPDATE checkpoints SET body = CAST(\'{"goal": "g9"}\' AS BLOB) WHERE version = 3')
    branch = await store.branch("tenant-a", "b1")
    assert branch is not None
    assert branch.known.checkpoint == '{"goal": "g1"}'
    row = await only(store)
    assert [r.version for r in await store.checkpoints(row)] == [1, 2]
    assert await store.checkpoint_at(row, 3) is None
    found = await store.latest_checkpoint("tenant-a", "c1")
    assert found is not None
    assert (found[0], found[1].version) == (row, 2)
    assert store.damaged == 1
    raw(tmp_path / "w.db", "UPDATE checkpoints SET sha = x'00'")
    branch = await store.branch("tenant-a", "b1")
    assert branch is not None
    assert (branch.known.checkpoint, branch.known.checkpoint_length) == (None, 0)
    assert await store.latest_checkpoint("tenant-a", "c1") is None


async def test_the_newest_checkpoint_of_a_conversation_is_that_of_the_branch_used_last(store: Store) -> None:
    await store.commit(saved(0, said="old line"))
    await store.commit(saved(1, said="old line, later"))
    await store.commit(msgspec.structs.replace(saved(0, said="new line", at=3000.0), branch="b2"))
    row = await only(store)
    assert await store.newest_branch(row) == "b2"
    assert [(r.branch, r.version) for r in await store.checkpoints(row)] == [("b1", 1), ("b1", 2), ("b2", 1)]
    found, old = await store.checkpoint_at(row, 1), await store.checkpoint_at(row, 2)
    assert found is not None
    assert old is not None
    assert (found.body, old.body) == ("new line", "old line, later")
    latest = await store.latest_checkpoint("tenant-a", row.id)
    assert latest is not None
    assert latest[1].body == "new line"
    assert await store.checkpoint_at(row, 3) is None
    assert await store.latest_checkpoint("tenant-a", "nobody") is None
    assert await store.newest_branch(msgspec.structs.replace(row, id="nothing")) is None


@pytest.mark.requirement("R.71")
async def test_versions_stay_in_order_where_the_clock_went_back(store: Store) -> None:
    for version, at in enumerate((5000.0, 1400.0, 1500.0)):
        await store.commit(saved(version, at=at))
    await store.commit(msgspec.structs.replace(saved(0, at=2000.0), branch="b2"))
    rows = await store.checkpoints(await only(store))
    assert [(r.branch, r.version) for r in rows] == [("b2", 1), ("b1", 1), ("b1", 2), ("b1", 3)]


@pytest.mark.requirement("P1")
async def test_a_fork_goes_on_from_the_newest_checkpoint_that_fits_it(store: Store) -> None:
    await store.commit(msgspec.structs.replace(saved(0), length=4, resumed="from elsewhere"))
    await store.commit(msgspec.structs.replace(change(1), length=9))
    await store.commit(msgspec.structs.replace(saved(2), length=20))
    parent = await store.branch("tenant-a", "b1")
    assert parent is not None
    known = decided(parent)
    given = (
        ("all", known.cuts, 20, '{"goal": "g2"}', 20),
        ("short", known.cuts, 9, '{"goal": "g1"}', 9),
        ("shorter", known.cuts, 8, '{"goal": "g0"}', 4),
        ("none", known.cuts, 3, None, 0),
        ("uncut", (), 20, '{"goal": "g0"}', 4),
    )
    for name, kept, length, body, saved_at in given:
        forked = msgspec.structs.replace(
            parent, branch=name, views={EVERY_WINDOW: known._replace(cuts=kept)}, length=length
        )
        await store.fork(parent, forked, at=3000.0)
        stored = await store.branch("tenant-a", name)
        assert stored is not None
        state = stored.known
        assert (state.checkpoint, state.checkpoint_length, state.resumed) == (body, saved_at, "from elsewhere")
        assert (stored.version, *decided(stored)) == (3, known.edits, kept)


@pytest.mark.requirement("A0.112")
async def test_old_checkpoints_go_but_never_that_of_the_newest_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "VERSIONS_KEPT", 3)
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


@pytest.mark.requirement("P2", "P9")
async def test_what_waits_on_a_branch_is_cleared_by_what_it_waited_for(tmp_path: Path) -> None:
    store = await Store.open(url(tmp_path / "w.db"))
    waiting = Prepared(7, b"\x00\xff", "so far: \ud800 é", purpose="compact-2")
    assert await store.prepare("tenant-a", "b1", waiting) is False
    assert await store.want("tenant-a", "b1", "compact", 1.0) is False
    await store.record([exchange(1)])
    assert await store.prepare("tenant-a", "b1", waiting) is True
    assert await store.want("tenant-a", "b1", "compact", 1.0) is True
    assert await store.prepare("tenant-b", "b1", None) is False
    await store.close()
    store = await Store.open(url(tmp_path / "w.db"))

    async def state() -> tuple[Prepared | None, str | None, str | None]:
        branch = await store.branch("tenant-a", "b1")
        assert branch is not None
        return branch.known.prepared, branch.known.wanted, branch.known.resumed

    assert await state() == (waiting, "compact", None)
    await store.commit(msgspec.structs.replace(saved(0), resumed="state of another"))
    assert await state() == (waiting, "compact", "state of another")
    await store.commit(msgspec.structs.replace(change(1, with_cut=False), checkpoint=None))
    assert await state() == (waiting, None, "state of another")
    assert await store.want("tenant-a", "b1", "compact", 1.0) is True
    await store.commit(msgspec.structs.replace(change(2), prepared=Prepared(1, b"p", "older")))
    assert await state() == (waiting, None, "state of another"), "it came while the batch was planned without it"
    await store.commit(msgspec.structs.replace(change(3), prepared=waiting))
    assert await state() == (None, None, "state of another")
    await store.prepare("tenant-a", "b1", waiting)
    await store.prepare("tenant-a", "b1", None)
    assert await state() == (None, None, "state of another")
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


async def test_a_branch_without_edits_is_found_with_no_more_queries_than_before_and_one_more_with(
    store: Store,
) -> None:
    hashes = chain(3)
    await store.record([exchange(1, end=hashes[2], length=3)])
    seen: list[str] = []
    database = store._database
    assert isinstance(database, SqliteDatabase)
    assert database._reader is not None
    sa.event.listen(database._reader._engine, "before_cursor_execute", lambda *a: seen.append(a[2]))
    await store.find("tenant-a", hashes)
    assert len(seen) == 2
    await store.commit(change(0))
    seen.clear()
    await store.find("tenant-a", hashes)
    assert len(seen) == 5
    assert sum("checkpoints" in each for each in seen) == 1


async def history(store: Store) -> list[Change]:
    """Four batches, the second and the fourth with a cut, the third only with a save."""
    given = [
        msgspec.structs.replace(change(0, with_cut=False, at=1.0), evictions=(eviction(1),)),
        msgspec.structs.replace(change(1, at=2.0), evictions=(eviction(2),)),
        saved(2, at=3.0),
        msgspec.structs.replace(change(3, at=4.0), evictions=(eviction(4),), resumed="kept"),
    ]
    for each in given:
        await store.commit(each)
    return given


@pytest.mark.requirement("A2.11", "D14")
def test_a_summary_that_comes_while_a_batch_is_planned_without_it_is_for_the_next_one() -> None:
    late = Prepared(2, b"prefix", "Two messages, in words.")
    known = ConversationState(prepared=late)
    thread = Thread(Branch(tenant="tenant-a", conversation="c1", name="c1", branch="b1", version=0, known=known))
    thread.apply(msgspec.structs.replace(change(0), edits=(), cut=cut(1)), 1)
    assert thread.known.prepared == late
    thread.apply(msgspec.structs.replace(change(1), edits=(), cut=cut(2), prepared=late), 2)
    assert thread.known.prepared is None


@pytest.mark.requirement("A2.20", "P9")
async def test_a_rollback_brings_a_branch_back_to_what_it_was(store: Store) -> None:
    given = await history(store)
    was = {0: ((), ()), 1: (given[0].edits, ()), 2: ((*given[0].edits, *given[1].edits), (given[1].cut,))}
    row = await only(store)
    await store.prepare("tenant-a", "b1", Prepared(1, b"p", "t"))
    await store.want("tenant-a", "b1", "compact", 1.0)
    assert await store.rollback(row, version=2, at=5.0) == 5
    branch = await store.branch("tenant-a", "b1")
    assert branch is not None
    assert (tuple(decided(branch).edits.values()), decided(branch).cuts) == was[2]
    assert (branch.version, branch.known.checkpoint) == (5, '{"goal": "g1"}')
    assert (branch.known.prepared, branch.known.wanted, branch.known.resumed) == (None, None, "kept")
    rows = await store.checkpoints(row)
    assert [(r.version, r.reason, r.body) for r in rows] == [
        (2, "compaction", '{"goal": "g1"}'),
        (3, "safety", '{"goal": "g2"}'),
        (4, "compaction", '{"goal": "g3"}'),
        (5, "rollback", '{"goal": "g1"}'),
    ]
    for gone in given[3].originals:
        assert await store.original("tenant-a", gone.ref) == gone
    assert await store.rollback(row, version=1, at=6.0) == 6
    branch = await store.branch("tenant-a", "b1")
    assert branch is not None
    assert ((tuple(decided(branch).edits.values()), decided(branch).cuts), branch.known.checkpoint) == (was[1], None)
    assert await store.commit(change(6, of="again")) == 7


@pytest.mark.requirement("A0.105")
async def test_nothing_goes_on_from_what_a_rollback_has_taken_back(store: Store) -> None:
    await history(store)
    row = await only(store)
    assert await store.rollback(row, version=0, at=5.0) == 5
    branch = await store.branch("tenant-a", "b1")
    assert branch is not None
    assert (tuple(decided(branch).edits.values()), decided(branch).cuts, branch.known.checkpoint) == ((), (), None)
    assert await store.latest_checkpoint("tenant-a", "c1") is None
    assert await store.removed(row) == []
    for gone in (-1, 1, 2, 4, 6):
        with pytest.raises(NoSuchVersion):
            await store.rollback(row, version=gone, at=6.0)
    with pytest.raises(StaleVersion):
        await store.commit(change(4, of="late"))
    await store.commit(saved(5))
    assert await store.rollback(row, version=5, at=7.0) == 7
    assert await store.rollback(row, version=7, at=8.0) == 8
    for at_all in (msgspec.structs.replace(row, id="nothing"), msgspec.structs.replace(row, tenant="tenant-b")):
        with pytest.raises(NoSuchVersion):
            await store.rollback(at_all, version=0, at=9.0)


@pytest.mark.requirement("A2.20", "P8", "P9")
async def test_batches_of_longer_requests_are_taken_back_and_what_they_replaced_holds_again(store: Store) -> None:
    first = change(0, with_cut=False, at=1.0)
    first = msgspec.structs.replace(first, edits=tuple(replace(edit, length=10) for edit in first.edits))
    longer = msgspec.structs.replace(change(1, at=2.0), evictions=(eviction(2),))
    assert longer.cut is not None
    again = tuple(replace(edit, text="shorter still", length=20) for edit in first.edits)
    longer = msgspec.structs.replace(longer, edits=again, cut=replace(longer.cut, length=20))
    pin = msgspec.structs.replace(
        change(2, with_cut=False, at=3.0), edits=(Edit(b"d" * 16, 0, EditKind.PIN, "", "r", 0),)
    )
    for each in (first, longer, pin):
        await store.commit(each)
    known = await store.branch("tenant-a", "b1")
    assert known is not None
    with pytest.raises(StaleVersion):
        await store.take_back(msgspec.structs.replace(known, version=2), 19, 4.0, window=8_192)
    back = await store.take_back(known, 19, 4.0, window=8_192)
    assert back == await store.branch("tenant-a", "b1")
    assert back is not None
    assert (back.version, decided(back).cuts) == (4, ())
    assert set(decided(back).edits.values()) == {*first.edits, *pin.edits}
    told = await store.audit("tenant-a", kind="rollback")
    assert [row.told for row in told] == [{"from": 3, "batches": 1, "messages": 19, "version": 4}]
    with pytest.raises(NoSuchVersion):
        await store.rollback(await only(store), version=2, at=5.0)
    assert await store.rollback(await only(store), version=1, at=6.0) == 5
    back = await store.branch("tenant-a", "b1")
    assert back is not None
    before = back.known
    for _ in range(60):
        longer = msgspec.structs.replace(longer, expected=back.version)
        await store.commit(longer)
        back = await store.take_back(msgspec.structs.replace(back, version=back.version + 1), 19, 5.0, window=8_192)
        assert back is not None
    assert back.known == before
    (row,) = (await store.export(await only(store)))["branches"]
    assert len(row["undone"]) <= 50, "it grows with every request that is counted and then taken back"


async def test_a_fork_can_go_back_to_what_its_parent_was(store: Store) -> None:
    given = await history(store)
    parent = await store.branch("tenant-a", "b1")
    assert parent is not None
    await store.fork(parent, msgspec.structs.replace(parent, branch="b2"), at=10.0)
    await store.commit(change(4, branch="b2", of="own", at=11.0))
    assert await store.rollback(await only(store), version=2, at=12.0) == 6
    branch = await store.branch("tenant-a", "b2")
    assert branch is not None
    assert tuple(decided(branch).edits.values()) == (*given[0].edits, *given[1].edits)
    assert decided(branch).cuts == (given[1].cut,)
    assert await store.branch("tenant-a", "b1") == parent


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


@pytest.mark.requirement("A0.63")
async def test_the_same_note_is_stored_once_and_the_oldest_normal_ones_go_first(store: Store) -> None:
    assert await store.add_notes("tenant-a", "c1", [note(1)]) == 0
    await store.record([exchange(1)])
    assert await store.add_notes("tenant-a", "c1", []) == 0
    odd = msgspec.structs.replace(note(0), text="lone \ud800, NUL \0, 漢字", importance="critical")
    assert await store.add_notes("tenant-a", "c1", [note(1), odd, note(1)]) == 2
    assert await store.add_notes("tenant-a", "c1", [msgspec.structs.replace(note(1), at=1.0)]) == 0
    assert await store.notes("tenant-a", "c1") == [odd, note(1)]
    most = MAX_NOTES
    critical = [note(n, importance="critical") for n in range(2, 12)]
    assert await store.add_notes("tenant-a", "c1", critical) == 10
    assert await store.add_notes("tenant-a", "c1", [note(n) for n in range(12, most)]) == most - 12
    assert len(await store.notes("tenant-a", "c1")) == most
    assert await store.add_notes("tenant-a", "c1", [note(most), note(most + 1)]) == 2
    kept = await store.notes("tenant-a", "c1")
    assert [n.id for n in kept[:12]] == [odd.id, *(n.id for n in critical), note(13).id]
    assert (len(kept), kept[-1]) == (most, note(most + 1))
    assert await store.notes("tenant-b", "c1") == []


async def test_of_critical_notes_only_the_oldest_go_last_of_all(store: Store) -> None:
    await store.record([exchange(1)])
    await store.add_notes("tenant-a", "c1", [note(n, importance="critical") for n in range(MAX_NOTES)])
    await store.add_notes("tenant-a", "c1", [note(9000)])
    assert note(9000) not in await store.notes("tenant-a", "c1")
    await store.add_notes("tenant-a", "c1", [note(9001, importance="critical")])
    kept = await store.notes("tenant-a", "c1")
    assert (len(kept), kept[0].id, kept[-1].id) == (MAX_NOTES, note(1).id, note(9001).id)


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


@pytest.mark.requirement("P9")
async def test_a_summary_is_asked_for_once_kept_by_its_address_and_pruned_by_age(store: Store) -> None:
    assert await store.summary("tenant-a", summary(1).key) is None
    await store.keep_summary("tenant-a", summary(1, text="first \ud800"))
    await store.keep_summary("tenant-a", summary(2, at=300.0))
    assert await store.summary("tenant-a", summary(1).key) == summary(1, text="first \ud800")
    await store.keep_summary("tenant-a", summary(1, at=200.0))
    assert await store.summary("tenant-a", summary(1).key) == summary(1, at=200.0)
    assert await store.prune(300.0) == 1
    assert await store.summary("tenant-a", summary(1).key) is None
    assert await store.summary("tenant-a", summary(2).key) == summary(2, at=300.0)


async def test_a_tenant_has_so_many_summaries_at_most_and_the_newest_stay(store: Store, tmp_path: Path) -> None:
    connection = sqlite3.connect(tmp_path / "w.db")
    connection.executemany(
        "INSERT INTO summaries (tenant, key, at, purpose, model, tokens_in, tokens_out, text, sha) "
        "VALUES (?, ?, ?, 'p', 'm', 1, 1, x'', x'')",
        [(t, digest(n), float(n)) for t in ("tenant-a", "tenant-b") for n in range(MAX_SUMMARIES)],
    )
    connection.commit()
    connection.close()
    for number in range(2):
        await store.keep_summary("tenant-a", summary(number, at=50_000.0))
    count = "SELECT tenant, count(*), min(at) FROM summaries GROUP BY tenant"
    assert raw(tmp_path / "w.db", count) == [
        ("tenant-a", MAX_SUMMARIES, 2.0),
        ("tenant-b", MAX_SUMMARIES, 0.0),
    ]
    assert await store.summary("tenant-a", summary(1).key) == summary(1, at=50_000.0)


@pytest.mark.requirement("A4.25", "A4.30", "A0.26")
async def test_what_is_out_of_the_window_is_listed_with_why_and_when(store: Store) -> None:
    long = original(0, of="x", text="a" * 5000)
    first = msgspec.structs.replace(
        change(0, of="x", with_cut=False, at=10.0),
        originals=(long, original(1, of="x"), original(2, of="x")),
        evictions=(msgspec.structs.replace(eviction(1, tool="search"), digest=edit(1, of="x").digest),),
    )
    await store.commit(first)
    row = await only(store)
    rows = await store.removed(row)
    assert [(r.ref, r.how, r.version) for r in rows] == [(edit(n, of="x").ref, "evict", 1) for n in (2, 1, 0)]
    assert (rows[1].tool, rows[1].tokens, rows[1].kept, rows[1].at) == ("search", 300, 30, 10.0)
    assert (rows[2].tool, rows[2].tokens, rows[2].kept, rows[2].at) == ("", 50, 7, 10.0)
    assert (rows[2].role, rows[2].text) == ("tool", "a" * 2000)
    assert rows[0].text == original(2, of="x").text
    other = (original(7, of="y"), original(8, of="y"))
    refs = (edit(1, of="x").ref, *(o.ref for o in other))
    second = msgspec.structs.replace(change(1, count=0, at=20.0), originals=other, covered=refs, cut=cut(2, of="y"))
    await store.commit(second)
    third = msgspec.structs.replace(change(2, count=0, at=30.0), covered=(*refs, original(2, of="x").ref))
    await store.commit(msgspec.structs.replace(third, cut=replace(cut(3, of="z"), origin="sliding_window")))
    rows = await store.removed(row)
    assert [(r.ref, r.how, r.version, r.at) for r in rows] == [
        (original(2, of="x").ref, "sliding_window", 3, 30.0),
        (other[1].ref, "compact", 2, 20.0),
        (other[0].ref, "compact", 2, 20.0),
        (refs[0], "compact", 2, 20.0),
        (long.ref, "evict", 1, 10.0),
    ]
    assert (rows[3].tool, rows[3].tokens, rows[3].kept) == ("search", 50, 0)
    assert [r.ref for r in await store.removed(row, limit=2)] == [r.ref for r in rows[:2]]


async def test_what_was_pinned_or_only_added_to_is_not_out_of_the_window(store: Store) -> None:
    await store.commit(change(0, of="x"))
    pin = replace(edit(0, of="x"), digest=b"123456", kind=EditKind.PIN, text="", tokens=0)
    recalled = replace(edit(9, of="x"), kind=EditKind.RECALL)
    await store.commit(msgspec.structs.replace(change(1, count=0, with_cut=False), edits=(pin, recalled)))
    rows = await store.removed(await only(store))
    assert [(r.ref, r.how) for r in rows] == [(edit(n, of="x").ref, "evict") for n in (2, 1)]


async def test_only_what_the_newest_cut_hides_and_nobody_pinned_is_out(store: Store) -> None:
    gone = [original(n, of="x") for n in range(4)]
    a, b, c, d = (each.ref for each in gone)
    for version, covered in enumerate(((a, b), (a, c), (a, d))):
        given = change(version, count=0)
        await store.commit(msgspec.structs.replace(given, originals=tuple(gone), covered=covered))
    row = await only(store)
    assert [(r.ref, r.version) for r in await store.removed(row)] == [(d, 3), (a, 1)]
    pin = replace(edit(3, of="x"), digest=b"123456", kind=EditKind.PIN, text="", tokens=0)
    await store.commit(msgspec.structs.replace(change(3, count=0, with_cut=False), edits=(pin,)))
    assert [(r.ref, r.version) for r in await store.removed(row)] == [(c, 2), (a, 1)]


async def test_with_digests_only_what_is_out_is_listed_without_its_words(tmp_path: Path) -> None:
    store = await Store.open(url(tmp_path / "w.db"), content="digest")
    await store.commit(change(0))
    rows = await store.removed(await only(store))
    assert [(r.tokens, r.text) for r in rows] == [(50, "")] * 3
    told = await store.export(await only(store))
    assert [each["body"] for each in told["originals"]] == [None] * 3
    await store.close()


@pytest.mark.requirement("A4.25")
async def test_a_search_can_be_narrowed_to_what_one_conversation_lost(store: Store) -> None:
    for name in ("c1", "c2"):
        await store.commit(change(0, conversation=name, branch=name, of=name))
    parent = await store.branch("tenant-a", "c1")
    assert parent is not None
    await store.fork(parent, msgspec.structs.replace(parent, branch="c1-fork"), at=3000.0)
    found = await store.search("tenant-a", "output tool", conversation="c1")
    assert {o.ref for o in found} == {original(n, of="c1").ref for n in range(3)}
    assert len(found) == 3
    assert len(await store.search("tenant-a", "output tool")) == 6
    assert await store.search("tenant-a", "output tool", conversation="c3") == []
    assert await store.search("tenant-b", "output tool", conversation="c1") == []


@pytest.mark.requirement("A0.112")
async def test_a_closed_conversation_opens_again_with_its_next_exchange(store: Store) -> None:
    await store.record([exchange(1, at=1000.0)])
    assert await store.close_conversation(await only(store), 2000.0) is True
    assert (await only(store)).closed == 2000.0
    await store.record([exchange(2, at=1900.0)])
    assert [r.closed for r in await store.conversations("tenant-a")] == [2000.0]
    await store.record([exchange(3, at=2001.0)])
    assert (await only(store)).closed is None
    assert await store.close_conversation(msgspec.structs.replace(await only(store), id="nothing"), 1.0) is False


async def test_the_first_parent_that_a_client_names_stays(store: Store) -> None:
    await store.record([exchange(1)])
    assert (await only(store)).parent is None
    named = [
        msgspec.structs.replace(exchange(n), parent_conversation=name) for n, name in ((2, "main\0"), (3, "other"))
    ]
    await store.record([exchange(4), *named])
    await store.record([msgspec.structs.replace(exchange(5), parent_conversation="third")])
    assert (await only(store)).parent == "main\ufffd"


@pytest.mark.requirement("S.24", "A0.117")
async def test_an_export_has_everything_of_a_conversation_and_nothing_of_another(store: Store, tmp_path: Path) -> None:
    for name in ("c1", "c2"):
        own = change(0, conversation=name, branch=name, of=name)
        odd = tuple(replace(e, text=f"{e.text} \ud800") for e in own.edits)
        await store.commit(
            msgspec.structs.replace(own, edits=odd, evictions=(eviction(1),), checkpoint='{"goal": "\\ud800"}')
        )
        await store.record([exchange(1, conversation=name, branch=name, end=digest(name), length=1)])
        await store.add_notes("tenant-a", name, [note(1)])
    raw(tmp_path / "w.db", "UPDATE originals SET body = x'00', frame = NULL WHERE ref = ?", original(2, of="c1").ref)
    told = json.loads(json.dumps(await store.export(await only(store))))
    assert told["conversation"]["name"] == "c1"
    assert {name: len(rows) for name, rows in told.items() if name != "conversation"} == {
        "branches": 1,
        "exchanges": 1,
        "notes": 1,
        "health_snapshots": 0,
        "alerts": 0,
        "edits": 3,
        "cuts": 1,
        "checkpoints": 1,
        "evictions": 1,
        "chains": 1,
        "answers": 0,
        "audit": 4,
        "originals": 3,
        "inspected": 0,
        "inspected_parts": 0,
    }
    bodies = [each["body"] for each in told["originals"]]
    assert [base64.b64decode(body) for body in bodies[:2]] == [original(n, of="c1").body for n in range(2)]
    assert bodies[2] is None
    assert told["cuts"][0]["covered"] == list(change(0, of="c1").covered)
    assert told["exchanges"][0]["detail"] == {"buckets": {"system": 12}}
    assert told["edits"][0]["digest"] == edit(0, of="c1").digest.hex()
    assert "tenant-a" not in json.dumps(told).replace("tenant-a-c1", "")
    assert store.damaged == 1
    assert await store.delete(await only(store)) is True
    for table in ("notes", "checkpoints"):
        assert raw(tmp_path / "w.db", f"SELECT count(*) FROM {table}") == [(1,)]


@pytest.mark.requirement("A0.117")
async def test_fifty_conversations_at_once_keep_their_own_state_and_notes(store: Store) -> None:
    async def live(number: int) -> None:
        name = f"c{number}"
        for step in range(4):
            given = (
                saved(step, said=f"{name} {step}") if step % 2 else change(step, conversation=name, of=f"{name}.{step}")
            )
            await store.commit(
                msgspec.structs.replace(given, conversation=name, name=name, branch=name, checkpoint=f"{name} {step}")
            )
        await store.add_notes("tenant-a", name, [note(number), note(number + 1)])

    await asyncio.gather(*(live(n) for n in range(50)))
    for number in range(50):
        name = f"c{number}"
        row = await only(store, name)
        assert [r.body for r in await store.checkpoints(row)] == [f"{name} {step}" for step in range(4)]
        assert [n.id for n in await store.notes("tenant-a", name)] == [note(number).id, note(number + 1).id]
        assert {r.ref for r in await store.removed(row)} == {
            o.ref for step in (0, 2) for o in change(step, of=f"{name}.{step}").originals
        }


async def test_a_tenant_keeps_the_newest_ids_of_its_provider_and_each_has_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "MAX_PROVIDER_IDS", 10)
    store = await Store.open(f"sqlite+aiosqlite:///{tmp_path / 'ids.db'}")
    digests = [bytes([0, number]) * 8 for number in range(30)]
    for number, each in enumerate(digests):
        await store.record([ProviderIdsRow(tenant="a" * 32, digests=(each,), at=float(number))])
    assert await store.own_provider_ids("a" * 32, digests) == set(digests[-10:])
    assert await store.own_provider_ids("b" * 32, digests) == set()
    assert await store.prune(25.0) > 0
    assert await store.own_provider_ids("a" * 32, digests) == set(digests[25:])
    await store.close()
