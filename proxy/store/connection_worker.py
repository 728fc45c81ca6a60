"""One SQLite connection in its own thread, and transactions that run there whole.

A statement through SQLAlchemy's asyncio layer crosses threads four times, a transaction of five statements
more than twenty times, and a task cancelled between two of them leaves the lock behind. So a transaction is
one synchronous function over SQLAlchemy Core that runs in the connection's thread from BEGIN to COMMIT in one
call: there is nothing in between where a cancellation could strike. Reads that wait together cross together.
"""

import asyncio
import sqlite3
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar, cast

import aiosqlite
import sqlalchemy as sa
from sqlalchemy import exc
from sqlalchemy.pool import StaticPool

from proxy.store.errors import StoreError, StoreUnavailable, translate

T = TypeVar("T")
Begin = Literal["BEGIN", "BEGIN IMMEDIATE"]
READS_AT_ONCE = 16


@dataclass(slots=True, eq=False, repr=False)  # aiosqlite logs what it runs, and a result is somebody's conversation
class _Job:
    work: Callable[[], object]
    future: "asyncio.Future[Any]"
    result: object = None
    error: BaseException | None = None

    def run(self) -> None:
        try:
            self.result = self.work()
        except Exception as error:  # noqa: BLE001 - whatever it is, it belongs to the task that waits for it
            self.error = error

    def settle(self) -> None:
        if self.future.done():
            return
        if self.error is not None:
            self.future.set_exception(self.error)
        else:
            self.future.set_result(self.result)


class _Thread(aiosqlite.Connection):
    def __init__(self, connector: Callable[[], sqlite3.Connection]) -> None:
        super().__init__(connector, 64)
        self._thread.daemon = True  # a store that nobody closed must not keep the process alive

    async def call(self, jobs: list[_Job]) -> None:
        """Run every job in the connection's thread, in order."""
        await self._execute(_run_all, jobs)  # type: ignore[no-untyped-call]  # aiosqlite leaves it bare

    @property
    def driver(self) -> sqlite3.Connection:
        return self._conn


def _set(driver: sqlite3.Connection, *, pragma: str) -> None:
    driver.execute(f"PRAGMA {pragma}").fetchall()


def _run_all(jobs: list[_Job]) -> None:
    for job in jobs:
        job.run()


class ConnectionWorker:
    """One connection, used by one transaction at a time, in the order of asking."""

    def __init__(self, thread: _Thread, *, begin: Begin, patience: float) -> None:
        self._thread = thread
        self._patience = patience
        self._waiting: deque[_Job] = deque()
        self._worker: asyncio.Task[None] | None = None
        self._closed = False
        self._at_once = READS_AT_ONCE if begin == "BEGIN" else 1
        self._begin = begin
        self._engine = sa.create_engine(
            "sqlite://",
            creator=lambda: thread.driver,
            poolclass=StaticPool,
            pool_reset_on_return=None,
            hide_parameters=True,
        )

    @classmethod
    async def connect(
        cls, uri: str, *, begin: Begin, patience: float, pragmas: tuple[str, ...] = ()
    ) -> "ConnectionWorker":
        """The connection to the SQLite ``uri``; a lock is waited for ``patience`` seconds at most."""
        thread = _Thread(
            lambda: sqlite3.connect(uri, uri=True, isolation_level=None, timeout=patience, cached_statements=256)
        )
        try:
            await thread
        except sqlite3.Error as error:
            raise translate(error) from None
        worker = cls(thread, begin=begin, patience=patience)
        try:
            for pragma in pragmas:
                await worker.raw(partial(_set, pragma=pragma))
        except BaseException:
            await worker.close()
            raise
        return worker

    async def transaction(
        self, work: Callable[[sa.Connection], T], *, committed: Callable[[], None] | None = None
    ) -> T:
        """The result of ``work`` once its transaction is committed, and after ``committed`` ran in the same thread.

        A task that is cancelled here leaves either a whole transaction or none. Waiting for the connection and for
        the lock together takes ``patience`` seconds at most, then :class:`StoreUnavailable`.
        """
        deadline = time.monotonic() + self._patience

        def whole() -> T:
            self._hurry(deadline)
            result = self._transact(work)
            if committed is not None:
                committed()
            return result

        return await self._run(whole)

    async def raw(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """The result of ``work`` on the driver's connection, outside any transaction."""
        return await self._run(lambda: work(self._thread.driver))

    async def close(self) -> None:
        """Finish what is waiting, then close the connection and end its thread."""
        if self._closed:
            return
        self._closed = True
        if self._worker is not None:
            await asyncio.wait([self._worker])
        await self._thread.close()

    def _transact(self, work: Callable[[sa.Connection], T]) -> T:
        driver = self._thread.driver
        with self._engine.connect() as connection:
            driver.execute(self._begin)
            try:
                result = work(connection)
                driver.execute("COMMIT")
            except BaseException:
                if driver.in_transaction:
                    driver.execute("ROLLBACK")
                raise
            return result

    def _hurry(self, deadline: float) -> None:
        left = deadline - time.monotonic()
        if left <= 0:
            raise StoreUnavailable("the database was busy for too long", reason="busy")
        self._thread.driver.execute(f"PRAGMA busy_timeout = {max(1, int(left * 1000))}")

    async def _run(self, work: Callable[[], T]) -> T:
        if self._closed:
            raise StoreUnavailable("the store is closed", reason="closed")
        job = _Job(work, asyncio.get_running_loop().create_future())
        self._waiting.append(job)
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work())
        try:
            return cast("T", await job.future)
        except StoreError:
            raise
        except (exc.SQLAlchemyError, sqlite3.Error, OSError) as error:
            raise translate(error) from None

    async def _work(self) -> None:
        while self._waiting:
            jobs: list[_Job] = []
            while self._waiting and len(jobs) < self._at_once:
                job = self._waiting.popleft()
                if not job.future.done():
                    jobs.append(job)
            try:
                await self._thread.call(jobs)
            except BaseException as error:
                for job in (*jobs, *self._waiting):
                    job.error = StoreUnavailable("the store's thread has ended", reason="closed")
                    job.settle()
                if isinstance(error, Exception):
                    return
                raise
            for job in jobs:
                job.settle()
