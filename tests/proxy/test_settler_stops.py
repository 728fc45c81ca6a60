"""What waits to be written when a server stops is written once, with the store still busy on what came before."""

import asyncio

import asyncpg
import pytest

from proxy.store import Store, WriteBehindQueue
from tests.proxy.store_rows import exchange


@pytest.mark.requirement("R.60", "P9")
async def test_a_server_that_stops_while_it_writes_loses_no_row_and_counts_none_twice(postgres_url: str) -> None:
    store, degraded = await Store.open(postgres_url), list[str]()
    settler = WriteBehindQueue(store, degraded=degraded.append)
    settler.start()
    blocker = await asyncpg.connect(postgres_url)
    transaction = blocker.transaction()
    await transaction.start()
    await blocker.execute("LOCK TABLE exchanges IN SHARE MODE")  # rows are read and not written
    settler.put(exchange(1))
    waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
    watcher = await asyncpg.connect(postgres_url)
    while not await watcher.fetchval(waiting):
        await asyncio.sleep(0.01)
    settler.put(exchange(2))
    closing = asyncio.create_task(settler.close())
    await asyncio.sleep(0.3)
    await transaction.rollback()
    await blocker.close()
    await closing
    ids = [row["id"] for row in await watcher.fetch("SELECT id FROM exchanges")]
    requests = await watcher.fetchval("SELECT sum(requests) FROM conversations")
    await watcher.close()
    await store.close()
    assert degraded == []
    assert len(ids) == requests == 2
