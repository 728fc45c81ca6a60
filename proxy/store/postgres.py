"""PostgreSQL through SQLAlchemy's asyncio engine: for more than one host, or several workers.

The same functions run here as on SQLite, inside ``run_sync``. Here a statement is a round trip and every one of them a
point of cancellation, so the transaction runs in a task of its own that nobody cancels.
"""

import asyncio
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import sqlalchemy as sa
from sqlalchemy import exc
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from proxy.store.errors import StoreError, StoreUnavailable, is_retried, translate
from proxy.store.schema import check, ensure

T = TypeVar("T")
CONNECTIONS = 8
ATTEMPTS = 3
MIGRATING = 0x57454952  # "WEIR", the key of the advisory lock that migrations hold


class PostgresDatabase:
    """A pool of connections to a database server; there is nothing to tend."""

    journal = "server"
    notices: tuple[str, ...] = ()

    def __init__(self, engine: AsyncEngine, *, writable: bool) -> None:
        self.writable = writable
        self._engine = engine
        self._reading = engine
        if engine.dialect.name == "postgresql":
            self._reading = engine.execution_options(isolation_level="REPEATABLE READ")
        self._running: set[asyncio.Task[Any]] = set()

    @classmethod
    async def open(
        cls, url: sa.URL, *, mode: Literal["server", "worker", "visitor", "reader"], patience: float
    ) -> "PostgresDatabase":
        """The database behind ``url``, migrated unless ``mode`` is reader."""
        wait = str(int(patience * 1000))
        try:
            engine = create_async_engine(
                url.set(drivername="postgresql+asyncpg"),
                hide_parameters=True,
                pool_size=CONNECTIONS,
                max_overflow=0,
                pool_timeout=patience,
                pool_pre_ping=True,
                connect_args={"timeout": patience, "server_settings": {"lock_timeout": wait}},
            )
        except ModuleNotFoundError:
            raise StoreError("PostgreSQL needs the package asyncpg: pip install asyncpg", reason="url") from None
        database = cls(engine, writable=mode != "reader")
        try:
            await (database.read(check) if mode == "reader" else database.write(_migrate))
        except BaseException:
            await database.close()
            raise
        return database

    async def ping(self) -> None:
        """Return if the server answers."""
        await self.read(lambda connection: connection.execute(sa.select(sa.literal(1))).scalar_one())

    async def read(self, work: Callable[[sa.Connection], T]) -> T:
        """The result of ``work`` on one snapshot."""
        return await self._run(self._reading, work)

    async def write(self, work: Callable[[sa.Connection], T]) -> T:
        """The result of ``work`` once it is committed; deadlocks and serialization failures are tried again."""
        if not self.writable:
            raise StoreUnavailable("the store is open for reading only", reason="read_only")
        return await self._run(self._engine, work)

    async def tend(self, *, force: bool = False) -> bool:  # noqa: ARG002 - the server looks after itself
        """Nothing to do; False."""
        return False

    async def close(self) -> None:
        """Let running transactions finish, then close every connection."""
        if self._running:
            await asyncio.wait(self._running)
        await self._engine.dispose()

    async def _run(self, engine: AsyncEngine, work: Callable[[sa.Connection], T]) -> T:
        task = asyncio.create_task(_transact(engine, work))
        self._running.add(task)
        task.add_done_callback(self._forget)
        return await asyncio.shield(task)

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # seen, also when its caller was cancelled


async def _transact(engine: AsyncEngine, work: Callable[[sa.Connection], T]) -> T:
    attempt = 1
    while True:
        try:
            async with engine.begin() as connection:
                return await connection.run_sync(work)
        except StoreError:
            raise
        except (exc.SQLAlchemyError, OSError) as error:
            if attempt == ATTEMPTS or not is_retried(error):
                raise translate(error) from None
            attempt += 1


def _migrate(connection: sa.Connection) -> None:
    if connection.dialect.name == "postgresql":
        connection.execute(sa.select(sa.func.pg_advisory_xact_lock(MIGRATING)))
    ensure(connection)
