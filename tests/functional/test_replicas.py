"""Two Weirs on one PostgreSQL that a client reaches in turns are one Weir to it."""

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from proxy.store import Store
from tests.functional.harness import (
    COUNTER,
    EVICTING,
    NOTHING_RECALLED,
    TOOLS,
    Deployment,
    InTurns,
    Talk,
    WeirProcess,
    answered,
    arrays_of,
    batches,
    free_port,
    opening,
    ruled,
    weir,
)
from tests.functional.test_store_failures import until
from tests.postgres import Postgres
from tests.profile import soak
from tests.upstream.app import RunningSimulator, serve_simulator
from tests.upstream.model import SimulatorSettings

pytestmark = pytest.mark.slow

SETTINGS = SimulatorSettings(window=8192, summary_model="summariser")
STEPS = 42


@asynccontextmanager
async def replicas(count: int, url: str, simulator: RunningSimulator, *more: str) -> AsyncIterator[InTurns]:
    """``count`` Weirs on the database, with one worker each."""
    arguments = ["--upstream", simulator.base_url, "--window", "8192", "--store", url, *more]
    processes = [WeirProcess(list(arguments), free_port()) for _ in range(count)]
    try:
        for each in processes:
            await each.start()
        yield InTurns(processes)
    finally:
        for each in processes:
            for client in each.clients:
                await client.close()
            await each.stop()


def processes_of(both: InTurns) -> list[WeirProcess]:
    return [each for each in both.targets if isinstance(each, WeirProcess)]


async def step(talk: Talk) -> None:
    await talk.ask(tools=TOOLS)
    talk.add_step()


async def in_store(url: str) -> tuple[int, int]:
    """How many conversations there are, and how many branches they have."""
    store = await Store.open(url)
    rows = await store.conversations(None)
    await store.close()
    return len(rows), sum(row.branches for row in rows)


async def breaks_of_one(steps: int = STEPS) -> int:
    """How often a single Weir breaks the prefix of the same session."""
    async with serve_simulator(SETTINGS, counter=COUNTER) as simulator, weir(simulator.base_url) as target:
        talk = Talk(target.client())
        await talk.agent(steps)
        return batches(arrays_of(answered(simulator)))


@pytest.mark.requirement("P9", "P2", "S.3")
async def test_two_replicas_in_turns_break_the_prefix_no_oftener_than_one(postgres_url: str) -> None:
    alone = await breaks_of_one()
    async with serve_simulator(SETTINGS, counter=COUNTER) as simulator:
        async with replicas(2, postgres_url, simulator) as both:
            talk = Talk(both.client())
            for number in range(STEPS):
                if number == STEPS // 3:
                    await processes_of(both)[0].stop(signal.SIGKILL)
                if number == STEPS // 2:
                    await processes_of(both)[0].start()
                    await processes_of(both)[1].stop(signal.SIGKILL)
                    await processes_of(both)[1].start()
                await step(talk)
        seen = answered(simulator)
        assert [each.status for each in seen] == [200] * STEPS
        assert 0 < batches(arrays_of(seen)) <= alone
    assert await in_store(postgres_url) == (1, 1)


@soak
@pytest.mark.requirement("P9", "P2", "S.3")
async def test_agents_before_two_replicas_break_their_prefixes_no_oftener_than_before_one(postgres: Postgres) -> None:
    """All at the same time, each request to the next replica; a break is counted where it is seen, at the upstream."""
    found = []
    for count in (1, 2):
        name = await postgres.with_schema()
        async with (
            serve_simulator(SETTINGS, counter=COUNTER) as simulator,
            Deployment(postgres.url(name), count).serving(simulator.base_url) as both,
        ):
            talks = [Talk(both.client(), opening(seed=n), seed=n) for n in range(4)]
            for talk in talks:
                talk.grow(4, kind="agent")
            await asyncio.gather(*(talk.agent(25) for talk in talks))
            seen = answered(simulator)
        assert [each.status for each in seen] == [200] * 25 * len(talks)
        by_agent = [[a for a in arrays_of(seen) if talk.messages[1] in a[:3]] for talk in talks]
        assert [len(arrays) for arrays in by_agent] == [25] * len(talks)
        found.append([batches(arrays) for arrays in by_agent])
        await postgres.drop(name)
    one, two = found
    assert min(one) > 0
    assert sum(two) <= sum(one) + 1, found  # what others teach it of tokens moves a batch by a request or two


@pytest.mark.requirement("P9", "S.3")
async def test_a_request_is_known_to_the_other_replica_as_soon_as_it_is_answered(postgres_url: str) -> None:
    async with serve_simulator(SETTINGS, counter=COUNTER) as simulator:
        async with replicas(2, postgres_url, simulator) as both:
            for number in range(12):
                talk = Talk(both.client(), [{"role": "user", "content": f"Question {number}"}])
                for turn in range(4):
                    answer = await talk.ask()
                    talk.messages.append({"role": "assistant", "content": answer.choices[0].message.content})
                    talk.messages.append({"role": "user", "content": f"And {turn}?"})
                await talk.ask(talk.messages[:1])  # what was lost on its way and is sent again
        assert {each.status for each in answered(simulator)} == {200}
    assert await in_store(postgres_url) == (12, 12)


STATES = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND {}"
WAITING = "wait_event_type = 'Lock'"
HOLDING = "state = 'idle in transaction' AND query NOT LIKE 'LOCK%'"
TIMEOUT = 3
ATTEMPTS = 8


@dataclass(slots=True)
class Watched:
    """A database and who has which of its locks."""

    url: str
    connection: asyncpg.Connection

    async def some(self, which: str) -> bool:
        return bool(await self.connection.fetchval(STATES.format(which)))

    async def none(self, which: str) -> bool:
        return not await self.some(which)

    async def stop_within(self, worker: WeirProcess, talk: Talk) -> "asyncio.Task[Any] | None":
        """The request in whose transaction the worker is stopped now; None where it came out of that first."""
        blocker = await asyncpg.connect(self.url)
        try:
            async with blocker.transaction():
                await blocker.execute("LOCK TABLE edits IN EXCLUSIVE MODE")
                asked = asyncio.create_task(Talk(worker.client(), list(talk.messages)).ask(tools=TOOLS))
                while not asked.done() and await self.none(WAITING):
                    await asyncio.sleep(0.01)
                assert worker.process is not None
                worker.process.send_signal(signal.SIGSTOP)
        finally:
            await blocker.close()
        # the lock is given to whoever waits for it, unless it has given up before it was stopped
        with contextlib.suppress(TimeoutError):
            await until(partial(self.some, HOLDING), TIMEOUT, pause=0.01)
            return asked
        worker.process.send_signal(signal.SIGCONT)
        await asked
        return None


@pytest.mark.requirement("R.75")
async def test_a_worker_that_stops_within_its_transaction_holds_nobody_and_writes_nothing_twice(
    postgres: Postgres, postgres_url: str, tmp_path: Path
) -> None:
    """It stops for longer than any of the timeouts involved; that is fifteen seconds here."""
    name = postgres_url.rpartition("/")[2]
    config = tmp_path / "weir.yaml"
    async with serve_simulator(SETTINGS, counter=COUNTER) as simulator:
        store = f"store: {{url: '{postgres_url}', timeout: {TIMEOUT}s}}\n"
        config.write_text(ruled(simulator.base_url, EVICTING | NOTHING_RECALLED) + store)
        processes = [WeirProcess(["--config", str(config)], free_port()) for _ in range(2)]
        watched = Watched(postgres.url(name), await asyncpg.connect(postgres.url(name)))
        async with processes[0] as stopped, processes[1] as other:
            for attempt in range(ATTEMPTS):
                talk = Talk(InTurns(processes).client(), opening(seed=100 * attempt), seed=attempt)
                await talk.agent(12)
                talk.grow(4, kind="agent")
                if (first := await watched.stop_within(stopped, talk)) is not None:
                    break
            else:
                pytest.fail("it was never stopped within a transaction")
            try:
                again = Talk(other.client(), list(talk.messages))
                await again.ask(tools=TOOLS)
                await until(partial(watched.none, HOLDING), 60)
                await again.ask(tools=TOOLS)
            finally:
                assert stopped.process is not None
                stopped.process.send_signal(signal.SIGCONT)
            await first
            talk.add_step()
            await talk.agent(4)
        await watched.connection.close()
        assert {each.status for each in answered(simulator)} == {200}
    opened = await Store.open(postgres_url)
    rows = await opened.conversations(None)
    assert [row.branches for row in rows] == [1] * (attempt + 1)
    once = "SELECT count(*), count(DISTINCT (branch, digest, occurrence)) FROM edits"
    ((edits, different),) = await postgres.run(once, database=name)
    assert edits == different > 0
    audited = await opened.verify()
    await opened.close()
    assert [chain.broken for chain in audited] == [None]
