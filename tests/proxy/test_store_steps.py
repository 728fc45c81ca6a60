"""What the pages ask of the store costs what they show, and not what the store holds beside it."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import aiosqlite
import pytest

from proxy.store import Store, conversations, exchanges, usage
from proxy.store.conversations import Narrowing
from proxy.store.transaction import Transaction
from tests.proxy.store_rows import exchange, url

NEW, SINCE, PER = 20, 1_000_000.0, 100


def steps(work: Callable[[Transaction], Any], tx: Transaction) -> int:
    """Hundreds of instructions of SQLite's machine that it takes."""
    driver, counted = tx.connection.connection.driver_connection, 0

    def count() -> int:
        nonlocal counted
        counted += 1
        return 0

    assert isinstance(driver, aiosqlite.Connection)
    driver._conn.set_progress_handler(count, PER)
    try:
        work(tx)
    finally:
        driver._conn.set_progress_handler(None, 0)
    return counted


@pytest.mark.requirement("P8")
async def test_a_conversation_is_found_by_its_own_requests_alone(tmp_path: Path) -> None:
    store = await Store.open(url(tmp_path / "w.db"))
    await store.record([exchange(n, at=SINCE + n, conversation="quiet") for n in range(3)])
    (row,) = await store.conversations("tenant-a")
    asked = {
        "timeline": partial(exchanges.timeline, conversation=row, limit=10),
        "of a policy": partial(conversations.listed, tenant="tenant-a", limit=10, only=Narrowing(policy="other")),
        "beside": partial(usage.beside, keys=[(row.tenant, row.id)]),
    }
    few = {name: await store._read(partial(steps, work)) for name, work in asked.items()}
    await store.record([exchange(3 + n, at=2 * SINCE + n, conversation="busy") for n in range(2_000)])
    many = {name: await store._read(partial(steps, work)) for name, work in asked.items()}
    await store.close()
    assert {name: many[name] for name in asked if many[name] > 2 * few[name] + 5} == {}
