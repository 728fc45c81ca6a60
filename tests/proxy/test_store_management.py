"""What the planning leaves behind: growth, evictions, policies."""

import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from policies.ledger import Trend
from policies.pressure import advance
from policies.settings import ContextSettings
from proxy.store import Store
from proxy.store.exchanges import DAY, By
from proxy.store.records import ExchangeRow, PolicyRow
from tests.proxy.store_rows import chain, change, eviction, exchange, saved, url

RULES = ContextSettings().trend


def trend(*sizes: int) -> Trend:
    """A conversation after requests of these sizes, one a second."""
    state = Trend()
    for at, size in enumerate(sizes):
        buckets = {"history": size}
        state = advance(state, raw=size, length=at + 1, buckets=buckets, zone="green", at=float(at + 1), rules=RULES)
    return state


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    opened = await Store.open(url(tmp_path / "w.db"))
    yield opened
    await opened.close()


@pytest.mark.requirement("A0.25")
async def test_a_branch_is_found_with_the_growth_of_its_last_exchange(store: Store) -> None:
    hashes = chain(3)
    grown = [trend(1000), trend(1000, 3000), trend(1000, 3000, 3500)]
    for number, state in enumerate(grown[:2]):
        await store.record(
            [msgspec.structs.replace(exchange(number, end=hashes[number], length=number + 1), trend=state)]
        )
    found = await store.find("tenant-a", hashes)
    assert found is not None
    assert found.trend == grown[1]
    await store.record([exchange(7, end=hashes[1], length=2)])
    await store.record([msgspec.structs.replace(exchange(2, end=hashes[2], length=3, at=5000.0), trend=grown[2])])
    await store.record([msgspec.structs.replace(exchange(3, end=hashes[2], length=3, at=4000.0), trend=grown[0])])
    found = await store.branch("tenant-a", "b1")
    assert found is not None
    assert found.trend == grown[2]


@pytest.mark.requirement("A0.25")
async def test_what_was_saved_after_an_answer_does_not_hide_the_growth_that_it_ended(store: Store) -> None:
    """Whatever else was done with the branch meanwhile, it is the newer reading that is kept."""
    grown = [trend(1000), trend(1000, 3000), trend(1000, 3000, 3500)]
    await store.record([msgspec.structs.replace(exchange(0, at=10.0), trend=grown[0])])
    await store.commit(saved(0, at=5000.0))
    await store.record([msgspec.structs.replace(exchange(1, at=20.0), trend=grown[1])])
    found = await store.branch("tenant-a", "b1")
    assert found is not None
    assert found.trend == grown[1]
    await store.record(
        [
            msgspec.structs.replace(exchange(2, at=30.0), trend=grown[2]),
            msgspec.structs.replace(exchange(3, at=40.0), trend=grown[0]),
        ]
    )
    await store.record([msgspec.structs.replace(exchange(4, at=6000.0), trend=grown[1])])
    found = await store.branch("tenant-a", "b1")
    assert found is not None
    assert found.trend == grown[2]


@pytest.mark.requirement("A0.25")
async def test_of_a_batch_the_newest_growth_is_kept_and_a_damaged_one_is_none(store: Store, tmp_path: Path) -> None:
    rows = [msgspec.structs.replace(exchange(n), trend=trend(*range(1000, 2000 + n, 100))) for n in range(1, 4)]
    await store.record([*rows, exchange(9)])
    found = await store.branch("tenant-a", "b1")
    assert found is not None
    assert found.trend == rows[-1].trend
    with sqlite3.connect(tmp_path / "w.db") as connection:
        connection.execute("UPDATE branches SET trend = '{]'")
    connection.close()
    found = await store.branch("tenant-a", "b1")
    assert found is not None
    assert found.trend == Trend()


@pytest.mark.requirement("A0.148")
async def test_an_exchange_keeps_what_was_decided(store: Store) -> None:
    detail = {"buckets": {"system": 40, "history": 900}, "events": [{"kind": "zone_change", "new": "red"}]}
    given = msgspec.structs.replace(
        exchange(1),
        action="emergency_compaction",
        observed=True,
        evicted=4,
        strategy="evict+compact",
        pressure_before=0.93,
        velocity=12000.0,
        turns_until_red=3.9,
        detail=detail,
    )
    await store.record([given, exchange(2)])
    row = await store.conversation("tenant-a", "c1")
    assert row is not None
    assert await store.timeline(row) == [given, exchange(2)]


@pytest.mark.requirement("A0.43", "P7", "S.1", "S.3")
async def test_evictions_are_listed_and_counted_for_their_own_tenant(store: Store) -> None:
    rows = (eviction(1), eviction(2), eviction(3, tool="search", before=900))
    await store.commit(msgspec.structs.replace(change(0), evictions=rows))
    await store.commit(msgspec.structs.replace(change(0, tenant="tenant-b"), evictions=(eviction(1),)))
    listed = await store.evictions("tenant-a", limit=2)
    assert [(row.freed, row.conversation, row.tokens_remaining) for row in listed] == [(270, "c1", 4000)] * 2
    row = await store.conversation("tenant-a", "c1")
    assert row is not None
    assert await store.count_evictions(row) == 3
    assert len(await store.evictions("tenant-b")) == 1
    assert len(await store.evictions(None)) == 4


async def test_evictions_go_with_their_conversation(store: Store, tmp_path: Path) -> None:
    await store.commit(msgspec.structs.replace(change(0), evictions=(eviction(1),)))
    row = await store.conversation("tenant-a", "c1")
    assert row is not None
    await store.delete(row)
    connection = sqlite3.connect(tmp_path / "w.db")
    assert connection.execute("SELECT count(*) FROM evictions").fetchone() == (0,)
    connection.close()


@pytest.mark.requirement("A0.45")
async def test_a_saved_policy_is_given_back_word_for_word_and_replaced_by_name(store: Store) -> None:
    await store.save_policy("support", "window: 1\n", 1.0)
    await store.save_policy("audit", "when_full: reject  # \ud83d\ude00 \x00\n", 2.0)
    await store.save_policy("support", "window: 2\n", 3.0)
    assert await store.policies() == [
        PolicyRow(name="audit", document="when_full: reject  # \ud83d\ude00 \x00\n", at=2.0),
        PolicyRow(name="support", document="window: 2\n", at=3.0),
    ]


@pytest.fixture(params=["sqlite", "postgresql"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return url(tmp_path / "w.db") if request.param == "sqlite" else str(request.getfixturevalue("postgres_url"))


@pytest.fixture
async def either(address: str) -> AsyncIterator[Store]:
    opened = await Store.open(address)
    yield opened
    await opened.close()


@pytest.mark.requirement("P7")
async def test_what_days_took_is_told_from_any_moment_on_and_forgotten_with_the_requests(either: Store) -> None:
    """Of three conversations in five days, one of another key; whatever was stored together or alone."""
    rows = []
    for number in range(40):
        tenant, name = ("tenant-b", "theirs") if number % 8 == 3 else ("tenant-a", f"c{number % 2}")
        row = exchange(number, tenant=tenant, conversation=name, branch=name, at=0.5 * DAY + 0.1 * DAY * number)
        detail = {"cost": 0.25, "cost_saved": 0.125} if number % 3 else {}
        rows.append(
            msgspec.structs.replace(row, model=f"m{number % 3}", status=500 if number == 17 else 200, detail=detail)
        )
    await either.record(rows[::2])
    for row in rows[1::2]:
        await either.record([row])
    await either.record(rows[:5])

    deleted = set[str]()

    async def check(since: float) -> None:
        for by in (None, *get_args(By)):
            for tenant in (None, "tenant-a"):
                mine = [row for row in rows if row.at >= since // DAY * DAY and tenant in (None, row.tenant)]
                expected: dict[tuple[str, str | None], list[ExchangeRow]] = {}
                for row in mine:
                    day = f"1970-01-0{1 + int(row.at // DAY)}"
                    home = None if row.conversation in deleted else row.conversation
                    groups: dict[By | None, str | None] = {
                        None: None,
                        "day": day,
                        "model": row.model,
                        "policy": row.policy,
                    }
                    expected.setdefault((row.tenant, groups.get(by, home)), []).append(row)
                found = {(row.tenant, row.group): row for row in await either.usage(tenant, since=since, by=by)}
                assert found.keys() == expected.keys()
                for key, its in expected.items():
                    told = found[key]
                    answered = [row for row in its if row.status == 200]
                    assert (told.requests, told.failed) == (len(its), len(its) - len(answered))
                    assert told.tokens_after == sum(row.tokens_after for row in answered)
                    assert told.cost == sum(float(row.detail.get("cost", 0)) for row in its)
                    assert told.priced == sum("cost" in row.detail for row in its)
                    assert (told.first, told.last) == (min(row.at for row in its), max(row.at for row in its))

    for since in (0.0, 1.0 * DAY, 1.05 * DAY, 2.95 * DAY, 4.0 * DAY, 9.0 * DAY):
        await check(since)
    await either.prune(2.25 * DAY, 5 * DAY)
    for since in (0.0, 2.0 * DAY, 2.5 * DAY, 4.0 * DAY):
        await check(since)
    gone = await either.conversation("tenant-a", "c1")
    assert gone is not None
    assert await either.delete(gone)
    deleted.add("c1")
    for since in (0.0, 3.0 * DAY):
        await check(since)
    await either.prune_usage(3.0 * DAY)
    rows = [row for row in rows if row.at >= 3.0 * DAY]
    await check(0.0)
