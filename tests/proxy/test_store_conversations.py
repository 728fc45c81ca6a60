import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from proxy.store import Store
from proxy.store.records import Arrival, StaleVersion, StoreError
from tests.proxy.store_rows import chain, change, cut, decided, edit, exchange, url


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    opened = await Store.open(url(tmp_path / "w.db"), busy_timeout=60)  # what waits behind fifty others, waits long
    yield opened
    await opened.close()


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


async def test_an_arrival_that_cannot_be_written_costs_no_other(store: Store) -> None:
    given = [arrival(0, length=1 << 80), *(arrival(n) for n in range(1, 4))]  # more than SQLite's integers hold
    ended = await asyncio.gather(*(store.arrive(each) for each in given), return_exceptions=True)
    assert isinstance(ended[0], OverflowError)
    assert ended[1:] == ["c1", "c2", "c3"]
