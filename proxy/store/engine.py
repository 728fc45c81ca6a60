"""A database as the rest of the store sees it: synchronous functions over SQLAlchemy Core, run in transactions."""

import importlib
from collections.abc import Callable
from typing import Literal, Protocol, TypeVar

import sqlalchemy as sa

from proxy.store.errors import StoreError
from proxy.store.postgres_url import SCHEMES
from proxy.store.sqlite import SqliteDatabase

T = TypeVar("T")


class Database(Protocol):
    """Where transactions run.

    ``journal`` is ``wal``, ``delete``, ``memory`` or ``server``; ``notices`` is what an operator must read at start.
    """

    journal: str
    notices: tuple[str, ...]

    @property
    def shared(self) -> bool:
        """Whether other servers may write the same conversations."""
        ...

    @property
    def writable(self) -> bool:
        """Whether it was opened for writing."""
        ...

    async def ping(self) -> None:
        """Return if transactions can be begun, else raise :class:`StoreError`."""
        ...

    async def read(self, work: Callable[[sa.Connection], T]) -> T:
        """The result of ``work`` on one consistent view."""
        ...

    async def write(self, work: Callable[[sa.Connection], T]) -> T:
        """The result of ``work`` once it is committed; a cancelled caller leaves all of it or nothing."""
        ...

    async def tend(self, *, force: bool = False) -> bool:
        """Do what the files need from time to time, with ``force`` at once; whether anything was done."""
        ...

    async def close(self) -> None:
        """Finish what has begun and give everything back."""
        ...


async def open_database(
    url: str, *, mode: Literal["server", "worker", "visitor", "reader"], patience: float, connections: int
) -> Database:
    """The database behind ``url``, its schema at the newest version; SQLite and PostgreSQL are known."""
    scheme = url.partition("://")[0]
    if scheme in SCHEMES:
        # Loaded by name: SQLAlchemy's asyncio package costs 120 ms and 8 MB that a SQLite user need not pay.
        module = importlib.import_module("proxy.store.postgres")
        database: Database = await module.PostgresDatabase.open(
            url, mode=mode, patience=patience, connections=connections
        )
        return database
    try:
        parsed = sa.make_url(url)
    except sa.exc.ArgumentError:
        raise StoreError("the store's URL cannot be read", reason="url") from None
    if parsed.get_backend_name() == "sqlite":
        return await SqliteDatabase.open(parsed.database, mode=mode, patience=patience)
    raise StoreError(
        f"the store cannot be a {scheme} database: its URL begins with sqlite+aiosqlite:// or postgresql://",
        reason="url",
    )
