import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from policies.ledger import EVERY_WINDOW, EditKind, Ledger
from proxy.store import Store
from proxy.store.records import Arrival, CalibrationRow, KeyRow, LimitRow, NameTaken, StaleVersion, StoreError
from proxy.store.sqlite import SqliteDatabase
from tests.proxy.store_rows import chain, change, cut, decided, edit, exchange, original, url


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    opened = await Store.open(url(tmp_path / "w.db"), busy_timeout=60)  # what waits behind fifty others, waits long
    yield opened
    await opened.close()


@pytest.mark.requirement("P1")
async def test_the_longest_stored_prefix_is_found_wherever_it_ends(store: Store) -> None:
    hashes = chain(1200)
    await store.record([exchange(n, end=hashes[n - 1], length=n) for n in (1, 5, 9, 600)])
    for length, expected in ((1, 1), (4, 1), (5, 5), (8, 5), (12, 9), (599, 9), (600, 600), (609, 600), (1200, 600)):
        found = await store.find("tenant-a", hashes[:length])
        assert found is not None
        assert (found.length, found.longest, found.branch, found.conversation) == (expected, 600, "b1", "c1")
    assert await store.find("tenant-a", chain(9, of="other")) is None
    assert await store.find("tenant-a", []) is None


@pytest.mark.requirement("P1")
async def test_of_two_branches_with_the_same_past_the_newest_is_found(store: Store) -> None:
    hashes = chain(4)
    await store.record([exchange(2, branch="old", end=hashes[3], length=4)])
    await store.record([exchange(3, branch="new", end=hashes[3], length=4)])
    found = await store.find("tenant-a", hashes)
    assert found is not None
    assert found.branch == "new"
    await store.record([exchange(4, branch="old", end=hashes[3], length=4)])
    found = await store.find("tenant-a", hashes)
    assert found is not None
    assert found.branch == "old"


@pytest.mark.requirement("P1", "P7", "S.1", "S.3")
async def test_one_tenant_never_sees_what_another_has(store: Store) -> None:
    hashes = chain(3)
    await store.record([exchange(1, tenant="tenant-a", end=hashes[2], length=3)])
    await store.commit(change(tenant="tenant-a"))
    mine = change(tenant="tenant-a")
    row = await store.conversation("tenant-a", "c1")
    assert row is not None
    assert await store.find("tenant-b", hashes) is None
    assert await store.named("tenant-b", "c1") is None
    assert await store.branch("tenant-b", "b1") is None
    assert await store.original("tenant-b", mine.originals[0].ref) is None
    assert mine.cut is not None
    assert await store.covered("tenant-b", mine.cut.ref) == []
    assert await store.search("tenant-b", "output tool") == []
    assert await store.conversations("tenant-b") == []
    assert await store.conversation("tenant-b", "c1") is None
    assert await store.timeline(msgspec.structs.replace(row, tenant="tenant-b")) == []
    assert await store.checkpoints(msgspec.structs.replace(row, tenant="tenant-b")) == []
    assert await store.delete(msgspec.structs.replace(row, tenant="tenant-b")) is False
    assert await store.search("tenant-a", "output tool") != []
    await store.commit(change(tenant="tenant-b"))
    assert (await store.find("tenant-a", hashes)) == (await store.find("tenant-a", hashes[:3]))
    assert {r.tenant for r in await store.conversations(None)} == {"tenant-a", "tenant-b"}


@pytest.mark.requirement("P2", "P9", "A0.26", "A2.1")
async def test_a_committed_change_is_there_after_a_restart(tmp_path: Path) -> None:
    store = await Store.open(url(tmp_path / "w.db"))
    hashes = chain(3)
    await store.record([exchange(1, end=hashes[2], length=3)])
    first, second = change(0), change(1)
    assert await store.commit(first) == 1
    assert await store.commit(second) == 2
    before = await store.find("tenant-a", hashes)
    await store.close()

    store = await Store.open(url(tmp_path / "w.db"))
    found = await store.find("tenant-a", hashes)
    assert found == before
    assert found is not None
    assert found.version == 2
    assert tuple(decided(found).edits.values()) == (*first.edits, *second.edits)
    assert decided(found).cuts == (first.cut, second.cut)
    row = await store.conversation("tenant-a", "c1")
    assert row is not None
    checkpoints = await store.checkpoints(row)
    assert [(c.version, c.cut, c.covered, c.body) for c in checkpoints] == [
        (n + 1, c.cut, c.covered, c.checkpoint) for n, c in enumerate((first, second))
    ]
    await store.close()


async def test_a_later_edit_of_the_same_message_replaces_the_earlier(store: Store) -> None:
    truncated = replace(edit(1), kind=EditKind.TRUNCATE, text="half")
    await store.commit(msgspec.structs.replace(change(0, with_cut=False), edits=(truncated, edit(2))))
    await store.commit(msgspec.structs.replace(change(1, with_cut=False), edits=(edit(1),)))
    branch = await store.branch("tenant-a", "b1")
    assert branch is not None
    assert tuple(decided(branch).edits.values()) == (edit(2), edit(1))


async def test_text_that_no_database_takes_comes_back_exactly(store: Store) -> None:
    odd = "lone \ud800 surrogate, NUL \0, é, 漢字"
    told = replace(cut(), text=odd, narrative=odd)
    await store.commit(
        msgspec.structs.replace(change(0), edits=(edit(1, text=odd),), cut=told, originals=(), checkpoint=odd)
    )
    branch = await store.branch("tenant-a", "b1")
    assert branch is not None
    assert next(iter(decided(branch).edits.values())).text == odd
    assert decided(branch).cuts == (told,)
    row = await store.conversation("tenant-a", "c1")
    assert row is not None
    assert (await store.checkpoints(row))[0].body == odd


@pytest.mark.requirement("A0.105", "P8", "R.24")
async def test_of_two_concurrent_commits_one_wins_and_the_other_stores_nothing(postgres_url: str) -> None:
    here = await Store.open(postgres_url)
    there = await Store.open(postgres_url)
    await here.commit(change(0))
    results = await asyncio.gather(
        here.commit(change(1, of="x")), there.commit(change(1, of="y")), return_exceptions=True
    )
    lost = [r for r in results if isinstance(r, StaleVersion)]
    assert [r for r in results if not isinstance(r, StaleVersion)] == [2]
    assert [error.current for error in lost] == [2]
    winner, loser = ("x", "y") if results[0] == 2 else ("y", "x")
    branch = await there.branch("tenant-a", "b1")
    assert branch is not None
    assert branch.version == 2
    assert tuple(decided(branch).edits.values())[3:] == change(1, of=winner).edits
    assert await here.original("tenant-a", change(1, of=loser).originals[0].ref) is None
    await here.close()
    await there.close()


@pytest.mark.requirement("A0.105", "P8", "R.24")
async def test_forty_racing_appends_are_all_kept_with_retries(store: Store) -> None:
    async def append(number: int) -> None:
        expected = 0
        while True:
            try:
                await store.commit(
                    msgspec.structs.replace(change(expected, with_cut=False, count=0), edits=(edit(number),))
                )
            except StaleVersion as stale:
                expected = stale.current
            else:
                return

    await asyncio.gather(*(append(n) for n in range(40)))
    branch = await store.branch("tenant-a", "b1")
    assert branch is not None
    assert branch.version == 40
    assert len(decided(branch).edits) == 40


@pytest.mark.requirement("A0.105")
async def test_a_lower_version_is_refused(store: Store) -> None:
    await store.commit(change(0))
    await store.commit(change(1))
    with pytest.raises(StaleVersion) as stale:
        await store.commit(change(1))
    assert stale.value.current == 2
    with pytest.raises(StoreError, match="not newer"):
        await store.commit(msgspec.structs.replace(change(2), cut=cut(version=2)))
    with pytest.raises(StaleVersion) as unknown:
        await store.commit(change(3, branch="never"))
    assert unknown.value.current == 0
    branch = await store.branch("tenant-a", "b1")
    assert branch is not None
    assert branch.version == 2


@pytest.mark.requirement("A0.117")
async def test_fifty_concurrent_conversations_are_isolated(store: Store) -> None:
    async def live(number: int) -> None:
        name = f"c{number}"
        hashes = chain(6, of=name)
        for step in range(3):
            await store.commit(change(step, conversation=name, branch=name, of=f"{name}.{step}"))
            await store.record([exchange(step, conversation=name, branch=name, end=hashes[step], length=step + 1)])

    await asyncio.gather(*(live(n) for n in range(50)))
    for number in range(50):
        name = f"c{number}"
        found = await store.find("tenant-a", chain(6, of=name))
        assert found is not None
        assert (found.conversation, found.version, found.length) == (name, 3, 3)
        assert tuple(decided(found).edits.values()) == tuple(
            e for step in range(3) for e in change(step, of=f"{name}.{step}").edits
        )


@pytest.mark.requirement("P1")
async def test_a_fork_shares_the_past_and_goes_its_own_way(store: Store) -> None:
    hashes = chain(8)
    await store.record([exchange(1, end=hashes[7], length=8)])
    await store.commit(change(0))
    await store.commit(change(1))
    parent = await store.find("tenant-a", hashes)
    assert parent is not None
    edits, cuts = dict(list(decided(parent).edits.items())[:3]), decided(parent).cuts[:1]
    shared = msgspec.structs.replace(parent, branch="b2", views={EVERY_WINDOW: Ledger(edits, cuts)})
    await store.fork(parent, shared, at=3000.0)
    stored = await store.branch("tenant-a", "b2")
    assert stored is not None
    assert (stored.version, stored.conversation) == (2, "c1")
    assert (decided(stored).edits, decided(stored).cuts) == (edits, cuts)
    assert await store.commit(msgspec.structs.replace(change(2, branch="b2"), cut=cut(3, of="fork"))) == 3
    assert await store.branch("tenant-a", "b1") == msgspec.structs.replace(parent, length=0)
    row = await store.conversation("tenant-a", "c1")
    assert row is not None
    assert row.branches == 2
    copied = [c for c in await store.checkpoints(row) if c.branch == "b2"]
    assert copied[0].body == change(0).checkpoint
    forked = await store.branch("tenant-a", "b2")
    await store.fork(parent, msgspec.structs.replace(shared, views={}), at=3001.0)
    assert forked is not None
    assert await store.branch("tenant-a", "b2") == forked


@pytest.mark.requirement("P1")
async def test_two_first_requests_of_one_name_end_in_one_conversation(store: Store) -> None:
    await store.record([exchange(1, conversation="id1", name="deploy", branch="b1")])
    await store.record([exchange(2, conversation="id2", name="deploy", branch="b2", end=chain(1)[0], length=1)])
    await store.commit(msgspec.structs.replace(change(0, conversation="id3", branch="b3"), name="deploy"))
    assert await store.named("tenant-a", "deploy") == "id1"
    rows = await store.conversations("tenant-a")
    assert [(r.id, r.branches, r.requests) for r in rows] == [("id1", 3, 2)]
    assert len(await store.timeline(rows[0])) == 2
    found = await store.find("tenant-a", chain(1))
    assert found is not None
    assert (found.conversation, found.name) == ("id1", "deploy")


def arrival(number: int, *, length: int = 1) -> Arrival:
    return Arrival(
        id=f"req-{number}",
        tenant="tenant-a",
        conversation=f"c{number}",
        name=f"c{number}",
        branch=f"b{number}",
        parent=None,
        at=1000.0,
        model="m",
        ends=((chain(1, of=f"{number}")[0], 1),),
        length=length,
        trend=None,
    )


def commits(store: Store) -> int:
    database = store._database
    assert isinstance(database, SqliteDatabase)
    return database._commits


@pytest.mark.requirement("P9")
async def test_requests_that_arrive_while_others_are_stored_are_stored_together(store: Store) -> None:
    before = commits(store)
    homes = await asyncio.gather(*(store.arrive(arrival(n)) for n in range(20)))
    assert homes == [f"c{n}" for n in range(20)]
    assert commits(store) - before == 2
    for n in range(20):
        found = await store.find("tenant-a", chain(1, of=f"{n}"))
        assert found is not None
        assert found.branch == f"b{n}"


async def test_an_arrival_that_cannot_be_written_costs_no_other(store: Store) -> None:
    given = [arrival(0, length=1 << 80), *(arrival(n) for n in range(1, 4))]  # more than SQLite's integers hold
    ended = await asyncio.gather(*(store.arrive(each) for each in given), return_exceptions=True)
    assert isinstance(ended[0], OverflowError)
    assert ended[1:] == ["c1", "c2", "c3"]


async def test_an_arrival_whose_request_is_given_up_costs_no_other(store: Store) -> None:
    first, *others = [asyncio.create_task(store.arrive(arrival(n))) for n in range(4)]
    await asyncio.sleep(0)
    first.cancel()
    assert await asyncio.gather(*others) == ["c1", "c2", "c3"]


async def test_a_batch_counts_every_request_once(store: Store) -> None:
    rows = [exchange(n, conversation=f"c{n % 4}", branch=f"b{n % 4}") for n in range(64)]
    await store.record(rows)
    await store.record(rows[:10])
    await store.record([])
    listed = await store.conversations("tenant-a", limit=3)
    assert [r.id for r in listed] == ["c3", "c2", "c1"]
    assert all(r.requests == 16 for r in listed)
    assert (listed[0].updated, listed[0].tokens_before, listed[0].limit) == (1063.0, 1063, 8000)
    timeline = await store.timeline(listed[0], limit=2)
    assert timeline == [rows[59], rows[63]]


async def test_an_exchange_without_a_chain_end_is_never_found_by_one(store: Store) -> None:
    await store.record([exchange(1, end=b"", length=0)])
    assert await store.find("tenant-a", chain(2)) is None
    branch = await store.branch("tenant-a", "b1")
    assert branch is not None
    assert (branch.version, branch.longest) == (0, 0)


async def test_keys_have_unique_names_and_can_be_revoked(store: Store) -> None:
    bot = KeyRow(name="bot", digest="d1", policy="support", models=("gpt-*",), allow=("mode",), created=1.0)
    await store.add_key(bot)
    with pytest.raises(NameTaken, match="bot"):
        await store.add_key(msgspec.structs.replace(bot, digest="d2"))
    with pytest.raises(NameTaken):
        await store.add_key(msgspec.structs.replace(bot, name="other"))
    assert await store.list_keys() == [bot]
    assert await store.revoke_key("bot", 5.0) is True
    assert await store.revoke_key("bot", 6.0) is False
    assert await store.revoke_key("nobody", 6.0) is False
    assert await store.list_keys() == [msgspec.structs.replace(bot, revoked=5.0)]


async def test_the_secret_is_made_once(tmp_path: Path) -> None:
    store = await Store.open(url(tmp_path / "w.db"))
    made = await store.secret()
    assert len(made) == 32
    await store.close()
    store = await Store.open(url(tmp_path / "w.db"))
    assert await store.secret() == made
    await store.close()


async def test_what_upstreams_taught_is_replaced_not_added(store: Store) -> None:
    await store.learn(limits=[LimitRow(scope="o|m|k", limit=8192, seen=1, expires=10.0)])
    await store.learn(limits=[LimitRow(scope="o|m|k", limit=4096, seen=2, expires=20.0)])
    images = LimitRow(scope="o|m|k", kind="images", limit=20, seen=1, expires=10.0)
    await store.learn(limits=[images])
    assert await store.limits() == [images, LimitRow(scope="o|m|k", limit=4096, seen=2, expires=20.0)]
    exact = CalibrationRow(scope="s", ratio=1.2, samples=2, recent=(1.1, 1.3), drift=-0.1)
    await store.learn(calibrations=[CalibrationRow(scope="s", ratio=1.1, samples=1)])
    await store.learn(calibrations=[exact])
    await store.learn()
    assert await store.calibrations() == [exact]


@pytest.mark.requirement("P9")
async def test_retention_removes_old_conversations_and_keeps_what_others_need(store: Store) -> None:
    for number in range(25):
        name = f"c{number}"
        await store.commit(change(0, conversation=name, branch=name, of=name, at=100.0 + number))
        at = 100.0 + number if number < 20 else 900.0
        await store.record(
            [exchange(number, conversation=name, branch=name, end=chain(1, of=name)[0], length=1, at=at)]
        )
    await store.commit(
        msgspec.structs.replace(
            change(0, conversation="c24", branch="c24b", of="c24b"), originals=(original(0, of="c3"),)
        )
    )
    await store.record([exchange(99, conversation="c24", branch="c24", at=120.0)])
    assert await store.prune(500.0) == 20 + 1
    assert {r.id for r in await store.conversations("tenant-a")} == {f"c{n}" for n in range(20, 25)}
    assert await store.find("tenant-a", chain(1, of="c7")) is None
    assert await store.original("tenant-a", original(0, of="c7").ref) is None
    assert await store.original("tenant-a", original(0, of="c3").ref) is not None
    assert await store.original("tenant-a", original(0, of="c22").ref) is not None
    assert len(await store.search("tenant-a", "output", limit=100)) == 5 * 3 + 1
    assert await store.prune(500.0) == 0
