"""What waits to be written when a server stops is written once, with the store still busy on what came before."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import asyncpg
import msgspec
import pytest

from policies.messages import HASH_SIZE, Message
from proxy.store import Store, WriteBehindQueue
from proxy.store.records import AnswerRow, ExchangeRow, Inspection, RelayedRow
from proxy.store.write_queue import HEAVY, MAX_HELD
from tests.proxy.store_rows import exchange, url


@pytest.mark.requirement("R.60", "P9")
async def test_a_server_that_stops_while_it_writes_loses_no_row_and_counts_none_twice(postgres_url: str) -> None:
    store, degraded = await Store.open(postgres_url), list[str]()
    write_queue = WriteBehindQueue(store, degraded=degraded.append)
    write_queue.start()
    blocker = await asyncpg.connect(postgres_url)
    transaction = blocker.transaction()
    await transaction.start()
    await blocker.execute("LOCK TABLE exchanges IN SHARE MODE")  # rows are read and not written
    write_queue.put(exchange(1))
    waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
    watcher = await asyncpg.connect(postgres_url)
    while not await watcher.fetchval(waiting):
        await asyncio.sleep(0.01)
    write_queue.put(exchange(2))
    closing = asyncio.create_task(write_queue.close())
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


@pytest.mark.requirement("P9")
async def test_long_histories_are_not_written_in_one_go_with_everything_else(tmp_path: Path) -> None:
    store, batches = await Store.open(url(tmp_path / "w.db")), list[int]()
    write_queue = WriteBehindQueue(store, degraded=lambda _: None)
    record = store.record

    async def recording(rows: Sequence[ExchangeRow | RelayedRow | AnswerRow]) -> Sequence[ExchangeRow]:
        batches.append(len(rows))
        return await record(rows)

    store.record = recording  # type: ignore[method-assign]
    long = Inspection(keep=1, messages=(), pieces=None, raws=(b"x" * (HEAVY // 2),), first=0)
    for number in range(5):
        write_queue.put(msgspec.structs.replace(exchange(number), inspection=long if number < 4 else None))
    await write_queue.flush()
    assert batches == [2, 2, 1]
    await store.close()


@pytest.mark.requirement("P9")
async def test_no_more_bytes_of_histories_wait_than_there_is_room_for(tmp_path: Path) -> None:
    store = await Store.open(url(tmp_path / "w.db"))
    write_queue = WriteBehindQueue(store, degraded=lambda _: None)
    said = [Message(role="user", digest=b"d" * HASH_SIZE, tokens=9)]
    raws = (b'{"content":"%s"}' % (b"x" * (MAX_HELD // 2)),)
    half = Inspection(keep=9, messages=said, pieces=None, raws=raws, first=0)
    full = [write_queue.is_full]
    for number in range(2):
        write_queue.put(msgspec.structs.replace(exchange(number), inspection=half))
        full.append(write_queue.is_full)
    await write_queue.flush()
    full.append(write_queue.is_full)
    [row] = await store.conversations(None)
    kept = [(await store.inspection(row, exchange(number).id))[1] is not None for number in range(2)]
    await store.close()
    assert full == [False, False, True, False]
    assert kept == [True, True]


@pytest.mark.requirement("P9")
async def test_rows_that_come_while_others_are_written_are_written_together(tmp_path: Path) -> None:
    store, batches = await Store.open(url(tmp_path / "w.db")), list[int]()
    write_queue = WriteBehindQueue(store, degraded=lambda _: None)
    record = store.record

    async def recording(rows: Sequence[ExchangeRow | RelayedRow | AnswerRow]) -> Sequence[ExchangeRow]:
        batches.append(len(rows))
        if len(batches) == 1:
            write_queue.put(exchange(2))
            write_queue.put(exchange(3))
        return await record(rows)

    store.record = recording  # type: ignore[method-assign]
    write_queue.put(exchange(1))
    await write_queue.flush()
    assert batches == [1]
    await write_queue.close()
    assert batches == [1, 2]
    [row] = await store.conversations(None)
    await store.close()
    assert row.requests == 3
