"""Health in the store: the newest hundred snapshots, alerts as episodes, the state that a restart goes on from."""

from collections.abc import Iterable
from pathlib import Path

import msgspec
import pytest

from policies.health import Checkup, Episode, Health, HealthAlert, HealthRules, Sample, check
from proxy.store import Store
from proxy.store.records import ConversationRow, ExchangeRow
from tests.proxy.store_rows import chain, exchange, url

RULES = HealthRules()


def session(levels: Iterable[float], *, start: int = 1, health: Health | None = None, **of: str) -> list[ExchangeRow]:
    """The rows of requests with these pressures."""
    rows: list[ExchangeRow] = []
    for number, level in enumerate(levels, start=start):
        checkup = check(health, Sample(at=1000.0 + number, utilization=level), RULES)
        health = checkup.health
        rows.append(msgspec.structs.replace(exchange(number, **of), health=checkup))  # type: ignore[arg-type]
    return rows


async def row_of(store: Store, name: str = "c1", tenant: str = "tenant-a") -> ConversationRow:
    found = await store.conversation(tenant, name)
    assert found is not None
    return found


@pytest.mark.requirement("A0.127")
async def test_the_hundred_and_first_snapshot_takes_the_place_of_the_first(tmp_path: Path) -> None:
    async def kept(levels: list[float]) -> list[float]:
        store = await Store.open(url(tmp_path / f"{len(levels)}.db"))
        rows = session(levels)
        for start in range(0, len(rows), 40):
            await store.record(rows[start : start + 40])
        found = await store.snapshots(await row_of(store), limit=500)
        await store.close()
        return [each.at for each in found]

    assert await kept([0.1] * 100) == [1001.0 + n for n in range(100)]
    assert await kept([0.1] * 101) == [1002.0 + n for n in range(100)]
    assert await kept([0.1] * 250) == [1151.0 + n for n in range(100)]


@pytest.mark.requirement("A0.124", "A0.127")
async def test_a_batch_is_written_with_its_state_its_snapshots_and_its_episodes(tmp_path: Path) -> None:
    store = await Store.open(url(tmp_path / "w.db"))
    [end] = chain(1)
    rows = session((0.95, 0.95, 0.95, 0.95, 0.5))
    await store.record([msgspec.structs.replace(row, chain_end=end, length=1) for row in rows[:4]])

    [opened], counts = await store.open_alerts("tenant-a")
    assert (opened.kind, opened.level, opened.category, opened.at, opened.closed) == (
        *("utilization", "critical", "overflow"), 1003.0, None,
    )  # fmt: skip
    assert (opened.conversation, opened.value, opened.limit, counts) == ("c1", 0.95, 0.9, {"critical": 1})
    assert await store.open_alerts("tenant-b") == ([], {})
    assert (await store.open_alerts(None))[1] == {"critical": 1}
    found = await store.find("tenant-a", [end])
    assert found is not None
    assert rows[3].health is not None
    assert found.health == rows[3].health.health.to_json()

    await store.record([rows[4]])
    assert await store.open_alerts(None) == ([], {})
    [closed] = await store.alerts(await row_of(store))
    assert closed == msgspec.structs.replace(opened, closed=rows[4].at)
    assert [s.utilization for s in await store.snapshots(await row_of(store))] == [0.95] * 4 + [0.5]
    await store.close()


@pytest.mark.requirement("A0.124")
async def test_an_exchange_that_is_written_twice_is_one_snapshot_and_one_alert(tmp_path: Path) -> None:
    store = await Store.open(url(tmp_path / "w.db"))
    rows = session((0.95, 0.95, 0.95))
    await store.record(rows)
    await store.record(rows)
    assert len(await store.snapshots(await row_of(store))) == 3
    assert len(await store.alerts(await row_of(store))) == 1
    await store.close()


@pytest.mark.requirement("A0.124")
async def test_what_is_open_of_a_conversation_that_nobody_knows_any_more_is_closed(tmp_path: Path) -> None:
    store = await Store.open(url(tmp_path / "w.db"))
    await store.record(session((0.95, 0.95, 0.95)))
    await store.record(session((0.1,), start=10))
    [alert] = await store.alerts(await row_of(store))
    assert alert.closed == 1010.0
    await store.close()


async def test_closing_a_conversation_closes_its_alerts_and_deleting_it_leaves_nothing(tmp_path: Path) -> None:
    store = await Store.open(url(tmp_path / "w.db"))
    await store.record(session((0.95, 0.95, 0.95)))
    await store.record(session((0.95, 0.95, 0.95), tenant="tenant-b", branch="b2"))
    row = await row_of(store)
    await store.close_conversation(row, 2000.0)
    assert [a.closed for a in await store.alerts(row)] == [2000.0]
    assert [a.tenant for a in (await store.open_alerts(None))[0]] == ["tenant-b"]

    exported = await store.export(row)
    assert len(exported["health_snapshots"]) == 3
    assert [each["kind"] for each in exported["alerts"]] == ["utilization"]
    await store.delete(row)
    assert (await store.snapshots(row), await store.alerts(row)) == ([], [])
    assert len(await store.snapshots(await row_of(store, tenant="tenant-b"))) == 3
    await store.close()


async def test_the_newest_two_hundred_episodes_are_kept(tmp_path: Path) -> None:
    store = await Store.open(url(tmp_path / "w.db"))

    def episode(number: int) -> ExchangeRow:
        at = 1000.0 + number
        alert = HealthAlert("loop", "warning", "anomaly", at, 3.0, 3.0, "the same call")
        [plain] = session((0.1,), start=number, health=Health(requests=5))
        assert plain.health is not None
        closed = (Episode("loop", at - 1),)
        return msgspec.structs.replace(
            plain, health=Checkup(plain.health.health, plain.health.snapshot, (alert,), closed)
        )

    rows = [episode(number) for number in range(1, 251)]
    for start in range(0, 250, 50):
        await store.record(rows[start : start + 50])
    found = await store.alerts(await row_of(store), limit=500)
    assert [a.at for a in found] == [1250.0 - n for n in range(200)]
    assert [a.closed is None for a in found] == [True] + [False] * 199
    await store.close()
