"""What befalls a PostgreSQL server befalls no client: killed backends, a server that freezes, ends, or has no room."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import product
from typing import Any

import httpx
import pytest
import sqlalchemy as sa

from proxy.store import Store, WriteBehindQueue
from proxy.store.postgres import PostgresDatabase
from proxy.store.records import StoreError, StoreUnavailable
from tests.functional.harness import COUNTER, RunningWeir, Talk, answered, arrays_of, batches, weir
from tests.functional.test_store_failures import until
from tests.postgres import Postgres, pgbouncer, postgres_server
from tests.proxy.store_rows import change, decided, exchange
from tests.upstream.app import RunningSimulator, serve_simulator
from tests.upstream.model import SimulatorSettings

pytestmark = pytest.mark.slow

TIMEOUT = 2.0
PATIENCE = 120.0
"""For eight requests while the server is away: a single one took 60 s where nothing limited its statements."""
BUMP = sa.text("UPDATE counted SET number = number + 1")
READ = sa.text("SELECT number FROM counted")


def name_of(url: str) -> str:
    return url.rpartition("/")[2]


@pytest.fixture
async def database(postgres_url: str) -> AsyncIterator[PostgresDatabase]:
    """A pool of two connections, and a table with a number in it."""
    opened = await PostgresDatabase.open(postgres_url, patience=TIMEOUT, connections=2)
    await opened.write(lambda c: c.execute(sa.text("CREATE TABLE counted AS SELECT 0 AS number")))
    yield opened
    await opened.close()


def number(connection: sa.Connection) -> int:
    return int(connection.execute(READ).scalar_one())


@pytest.mark.requirement("R.70")
async def test_a_killed_backend_is_replaced_and_its_transaction_done_once(
    database: PostgresDatabase, postgres: Postgres, postgres_url: str
) -> None:
    begun: list[int] = []

    def work(connection: sa.Connection) -> None:
        pid = connection.execute(sa.text("SELECT pg_backend_pid()")).scalar_one()
        connection.execute(BUMP)
        begun.append(pid)
        if len(begun) == 1:
            connection.execute(sa.text("SELECT pg_terminate_backend(pg_backend_pid())"))
        connection.execute(BUMP)

    await database.write(work)
    assert len(set(begun)) == 2
    assert await database.read(number) == 2
    gone = f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{name_of(postgres_url)}'"
    await postgres.run(gone)  # idle in the pool
    assert await database.read(number) == 2


@pytest.mark.requirement("R.70")
async def test_a_serialization_failure_is_tried_again(database: PostgresDatabase) -> None:
    tries: list[int] = []

    def work(connection: sa.Connection) -> None:
        connection.execute(sa.text("SET TRANSACTION ISOLATION LEVEL SERIALIZABLE"))
        tries.append(number(connection))
        if len(tries) <= 2:
            barrier.set()
            connection.execute(sa.text("SELECT pg_sleep(0.3)"))
        connection.execute(BUMP)

    barrier = asyncio.Event()

    async def other() -> None:
        await barrier.wait()
        await database.write(lambda c: c.execute(BUMP))

    await asyncio.gather(database.write(work), other())
    assert await database.read(number) == 2
    assert tries[0] == 0
    assert tries[-1] == 1


@pytest.mark.requirement("R.70")
async def test_two_transactions_that_wait_for_each_other_are_both_done(database: PostgresDatabase) -> None:
    await database.write(
        lambda c: c.execute(sa.text("CREATE TABLE pair AS SELECT n, 0 AS v FROM generate_series(1, 2) n"))
    )
    tries: list[int] = []

    def work(connection: sa.Connection, first: int) -> None:
        tries.append(first)
        looks = "100ms" if first == 1 else "60s"  # where both look at once, the server ends both
        connection.execute(sa.text(f"SET LOCAL deadlock_timeout = '{looks}'"))
        connection.execute(sa.text(f"UPDATE pair SET v = v + 1 WHERE n = {first}"))
        if tries.count(first) == 1:  # whoever is tried again does not meet the other once more
            connection.execute(sa.text("SELECT pg_sleep(0.3)"))
        connection.execute(sa.text(f"UPDATE pair SET v = v + 1 WHERE n = {3 - first}"))

    await asyncio.gather(*(database.write(lambda c, n=n: work(c, n)) for n in (1, 2)))
    assert await database.read(lambda c: c.execute(sa.text("SELECT v FROM pair")).scalars().all()) == [2, 2]
    assert len(tries) == 3


@pytest.mark.requirement("R.70")
async def test_a_transaction_that_was_left_idle_for_too_long_is_ended_and_done_again(
    database: PostgresDatabase,
) -> None:
    tries: list[float] = []

    def work(connection: sa.Connection) -> None:
        connection.execute(BUMP)
        tries.append(number(connection))
        if len(tries) == 1:
            connection.execute(sa.text("SET LOCAL idle_in_transaction_session_timeout = '50ms'"))
            time.sleep(0.3)  # as a process does that was stopped
        connection.execute(BUMP)

    await database.write(work)
    assert await database.read(number) == 2
    assert len(tries) == 2
    limit = sa.text("SHOW idle_in_transaction_session_timeout")
    assert await database.read(lambda c: c.execute(limit).scalar_one()) == "10s"


@pytest.mark.requirement("R.70")
async def test_a_pool_without_a_free_connection_says_so_in_time_and_is_free_again(postgres_url: str) -> None:
    database = await PostgresDatabase.open(postgres_url, patience=0.3, connections=2)
    held = [asyncio.create_task(database.read(lambda c: c.execute(sa.text("SELECT pg_sleep(0.29)")))) for _ in range(2)]
    slow = [asyncio.create_task(database.read(lambda c: c.execute(sa.text("SELECT pg_sleep(30)")))) for _ in range(3)]
    found = await asyncio.gather(*held, *slow, return_exceptions=True)
    reasons = {error.reason for error in found if isinstance(error, StoreUnavailable)}
    assert reasons <= {"busy", "slow"}
    assert all(isinstance(error, StoreUnavailable) for error in found[2:])
    await database.ping()
    await database.close()


@pytest.mark.requirement("R.70")
async def test_a_pooler_without_a_free_connection_is_a_store_that_is_away_for_a_moment(
    postgres: Postgres, postgres_url: str
) -> None:
    with pgbouncer(postgres, size=1, query_wait_timeout="1") as port:
        store = await Store.open(postgres_url.replace(str(postgres.port), str(port)), busy_timeout=5.0)
        blocker = await postgres_connection(port, name_of(postgres_url))
        transaction = blocker.transaction()
        await transaction.start()
        await blocker.execute("SELECT 1")
        with pytest.raises(StoreUnavailable):
            await store.ping()
        await transaction.rollback()
        await blocker.close()

        async def back() -> bool:
            with contextlib.suppress(StoreError):
                await store.ping()
                return True
            return False

        await until(back)
        await store.close()


async def postgres_connection(port: int, database: str) -> Any:
    import asyncpg

    return await asyncpg.connect(f"postgresql://weir@127.0.0.1:{port}/{database}", statement_cache_size=0)


@pytest.mark.requirement("R.65", "R.70")
async def test_a_task_that_is_cancelled_leaves_a_whole_transaction_or_none(postgres_url: str) -> None:
    store = await Store.open(postgres_url, connections=1)
    for step in range(24):
        branch = await store.branch("tenant-a", "b1")
        task = asyncio.create_task(store.commit(change(branch.version if branch else 0)))
        for _ in range(step):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    await store.record([exchange(1)])
    found = await store.branch("tenant-a", "b1")
    assert found is not None
    assert found.version > 0
    assert (len(decided(found).edits), len(decided(found).cuts)) == (3 * found.version, found.version)
    await store.close()


@asynccontextmanager
async def session(url: str) -> AsyncIterator[tuple[RunningWeir, Talk, RunningSimulator]]:
    async with (
        serve_simulator(SimulatorSettings(window=8192), counter=COUNTER) as simulator,
        weir(simulator.base_url, url) as target,
    ):
        yield target, Talk(target.client()), simulator


@pytest.mark.requirement("R.70", "P6")
async def test_two_processes_that_write_at_once_what_waited_lose_no_original(postgres_url: str) -> None:
    """Both have batches of the same conversations: one process's hold, the originals are kept of both."""
    stores = [await Store.open(postgres_url) for _ in range(2)]
    queues = [WriteBehindQueue(store, degraded=lambda _: None) for store in stores]
    refs = set()
    for who, queue in enumerate(queues):
        for branch, expected in product(range(60), range(3)):
            of = f"b{branch}, batch {expected} of process {who}"
            waits = change(expected, conversation=f"c{branch}", branch=f"b{branch}", of=of, count=1)
            refs |= {original.ref for original in waits.originals}
            queue.keep(waits)
    await asyncio.gather(*(queue.flush() for queue in queues))
    assert [queue.waiting()["changes",] for queue in queues] == [0, 0]
    assert len(refs) == 2 * 60 * 3
    assert {ref for ref in refs if await stores[0].original("tenant-a", ref) is None} == set()
    for store in stores:
        await store.close()


async def ready(target: RunningWeir) -> int:
    async with httpx.AsyncClient(timeout=60) as http:
        return (await http.get(f"{target.root}/readyz")).status_code


@pytest.mark.requirement("R.70", "R.63", "P6")
@pytest.mark.parametrize("trouble", ["frozen", "ended"])
async def test_answers_go_on_while_the_server_is_away_and_what_was_done_is_stored_after_it(
    trouble: str,
) -> None:
    with postgres_server() as server:
        url = server.url(await server.database())
        async with session(url) as (target, talk, simulator):
            await talk.agent(12)
            await target.stored()
            with contextlib.ExitStack() as stack:
                if trouble == "frozen":
                    stack.enter_context(server.frozen())
                else:
                    server.stop()
                async with asyncio.timeout(PATIENCE):
                    await talk.agent(8)
                assert await ready(target) == 503
            if trouble == "ended":
                await asyncio.to_thread(server.start)

            async def back() -> bool:
                return await ready(target) == 200 and not target.runtime.write_queue.failing

            await until(back, 60)
            await talk.agent(2)
            await target.stored()
            assert {seen.status for seen in answered(simulator)} == {200}
            assert any("evict" in actions or "compact" in actions for actions in talk.actions()[12:20])
            assert batches(arrays_of(answered(simulator))) <= 2
            async with httpx.AsyncClient() as http:
                text = (await http.get(f"{target.root}/metrics")).text
            assert 'weir_degraded_total{weir_reason="store"}' in text
        store = await Store.open(url)
        (row,) = await store.conversations(None)
        assert row.requests == 22
        assert row.branches == 1
        assert row.version > 0
        await store.close()
