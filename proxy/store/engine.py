"""The engine of a store: SQLAlchemy's asyncio engine, over aiosqlite or asyncpg.

A transaction is a synchronous function over a connection, which runs from BEGIN to COMMIT: on
PostgreSQL under ``run_sync``, on SQLite as a whole in the thread of its connection. It can be
cancelled at every point where it waits, so each runs in a task of its own, which is not cancelled
once it has begun: a caller that is cancelled leaves a whole transaction or none.
"""

import asyncio
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy import exc
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from proxy.store.errors import is_disconnect, is_retried, translate
from proxy.store.records import StoreError, StoreUnavailable

T = TypeVar("T")
Work = Callable[[sa.Connection], T]
ATTEMPTS = 3


class Database:
    """Where transactions run: ``writer`` is None where the store is open for reading only.

    Attributes:
        journal: ``wal``, ``delete``, ``memory`` or ``server``.
        notices: what an operator must read at start.
        shared: whether other servers may write the same conversations.
    """

    journal = "server"
    notices: tuple[str, ...] = ()
    shared = False

    def __init__(self, reader: AsyncEngine, writer: AsyncEngine | None) -> None:
        self._reader = reader
        self._writer = writer
        self._running: set[asyncio.Task[Any]] = set()
        self._begun: set[asyncio.Task[Any] | None] = set()
        self._is_closed = False

    @property
    def writable(self) -> bool:
        return self._writer is not None

    def load(self) -> dict[str, int]:
        """How many transactions wait for a connection and, of a database server, how many
        connections are in use.
        """
        return {"waiting": max(0, len(self._running) - self._busy())}

    async def ping(self) -> None:
        await self.read(lambda connection: connection.scalar(sa.select(sa.literal(1))))

    async def read(self, work: Work[T]) -> T:
        """The result of ``work``, all of whose statements see one moment."""
        return await self._run(self._reader, work)

    async def write(self, work: Work[T]) -> T:
        """The result of ``work`` once it is committed; a transaction that the server aborted is
        retried.
        """
        if self._writer is None:
            raise StoreUnavailable("the store is open for reading only", reason="read_only")
        return await self._run(self._writer, work)

    async def checkpoint(self) -> bool:
        """Whether the write-ahead log is empty now, and what was deleted gone from the disk."""
        return False

    async def backup(self, path: Path) -> None:
        raise NotImplementedError

    async def close(self) -> None:
        self._is_closed = True
        if self._running:
            await asyncio.wait(self._running)
        await self._dispose()

    async def _dispose(self) -> None:
        for engine in {self._reader, self._writer} - {None}:
            await engine.dispose()  # type: ignore[union-attr]

    def _busy(self) -> int:
        return sum(
            engine.pool.checkedout()  # type: ignore[attr-defined]
            for engine in {self._reader, self._writer}
            if engine is not None
        )

    async def _run(self, engine: AsyncEngine, work: Work[T]) -> T:
        """The result of a transaction, which ends once it has begun, even where its caller is
        cancelled.
        """
        if self._is_closed:
            raise StoreUnavailable("the store is closed", reason="closed")
        task = asyncio.create_task(self._transact(engine, work))
        self._running.add(task)
        task.add_done_callback(self._forget)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task not in self._begun:  # it waits for its turn and is no longer needed
                task.cancel()
            raise

    def _forget(self, task: "asyncio.Task[Any]") -> None:
        self._running.discard(task)
        self._begun.discard(task)
        if not task.cancelled():
            task.exception()  # retrieved, also when the caller was cancelled

    async def _transact(self, engine: AsyncEngine, work: Work[T]) -> T:
        attempt = 1
        while True:
            try:
                async with engine.connect() as connection:
                    self._begun.add(asyncio.current_task())
                    return await self._perform(connection, work)
            except StoreError:
                raise
            except (exc.SQLAlchemyError, sqlite3.Error, OSError) as error:
                if attempt == ATTEMPTS or not (is_retried(error) or is_disconnect(error)):
                    raise translate(error) from None
                attempt += 1

    async def _perform(self, connection: AsyncConnection, work: Work[T]) -> T:
        return await connection.run_sync(self._whole, work)

    def _whole(self, connection: sa.Connection, work: Work[T]) -> T:
        with connection.begin():
            return work(connection)
