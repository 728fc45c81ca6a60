"""Health in the store: the newest hundred snapshots, alerts as episodes, the state that a restart goes on from."""

from collections.abc import Iterable
from pathlib import Path

import msgspec
import pytest

from policies.health import Checkup, Episode, Health, HealthAlert, HealthRules, Sample, check
from proxy.store import Store
from proxy.store.records import ConversationRow, ExchangeRow
from tests.proxy.store_rows import exchange, url

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
