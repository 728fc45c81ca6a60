"""SQLite: one file, written by one connection at a time, read by others.

SQLite 3.7.0 to 3.51.2 can corrupt a WAL database when one connection checkpoints while another one
writes (sqlite.org/wal.html, "The WAL-reset bug"), and most systems ship such a version. A process
has one writing connection, and checkpoints happen in its commits. Between processes (a second
server, ``weir keys create``) ``FILE.lock`` is locked for each write. Readers open ``mode=ro`` and
do neither.

Every writing transaction begins IMMEDIATE: a deferred one that turns into a writer fails at once,
whatever the busy timeout (SQLITE_BUSY_SNAPSHOT).
"""

import asyncio
import fcntl
import logging
import math
import os
import sqlite3
from collections.abc import Coroutine, Iterator
from contextlib import closing, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from time import monotonic, sleep
from typing import Any, TypeVar

import aiosqlite
import sqlalchemy as sa
from sqlalchemy.dialects.sqlite.aiosqlite import (
    AsyncAdapt_aiosqlite_connection,
    SQLiteDialect_aiosqlite,
)
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine
from sqlalchemy.pool import AsyncAdaptedQueuePool
from sqlalchemy.util import await_only

from proxy.store.engine import Database, Work
from proxy.store.errors import translate
from proxy.store.records import CorruptStore, StoreUnavailable
from proxy.store.schema import check, ensure

T = TypeVar("T")
READERS = 2
LOCK_PAUSE = 0.01
OF_A_NEW_FILE = "auto_vacuum=INCREMENTAL"
PRAGMAS = (
    "journal_mode=WAL",
    "synchronous=FULL",
    "foreign_keys=ON",
    "secure_delete=ON",
    f"journal_size_limit={4 << 20}",
)
GONE = "the database file was deleted, moved or replaced while it was open: start Weir anew"
NOWHERE = (-1, -1)
# at DEBUG it writes every statement with what is in it
logging.getLogger("aiosqlite").setLevel(logging.INFO)


class SqliteDatabase(Database):
    """A SQLite file, or a database in memory that lives as long as this object.

    A file that is deleted, moved or replaced while it is open is noticed at the next write or ping,
    which then fail: what SQLite would write goes to a file that has no name any more.
    """

    journal = "memory"

    def __init__(
        self, reader: AsyncEngine, writer: AsyncEngine | None, *, path: Path | None, patience: float
    ) -> None:
        super().__init__(reader, writer)
        self._path = path
        self._patience = patience
        self._inode = NOWHERE if path is None else _inode(path)
        self._lock: int | None = None

    @classmethod
    async def open(cls, name: str | None, *, read_only: bool, patience: float) -> "SqliteDatabase":
        if not name or name == ":memory:":
            engine = _engine("file::memory:", patience=patience, pragmas=("foreign_keys=ON",))
            database = cls(engine, engine, path=None, patience=patience)
            await database.write(ensure)
            return database
        path = _absolute(name)
        if read_only and _inode(path) == NOWHERE:
            raise StoreUnavailable(f"there is no database at {path}", reason="absent")
        if not read_only:
            _create(path)
        reader = _engine(f"{path.as_uri()}?mode=ro", patience=patience, size=READERS)
        writer = None
        if not read_only:
            writer = _engine(f"{path.as_uri()}?mode=rw", patience=patience, pragmas=PRAGMAS)
        database = cls(reader, writer, path=path, patience=patience)
        try:
            if read_only:
                await database.read(check)
            else:
                database._lock = _open(path.with_name(f"{path.name}.lock"))
                await database.write(ensure)
            database.journal = await database.read(_journal)
        except BaseException:
            await database.close()
            raise
        return database

    async def ping(self) -> None:
        await (self.read(check) if self._writer is None else self.write(lambda _: None))

    async def checkpoint(self) -> bool:
        if self._writer is None or self._path is None:
            return False
        return await self._run(self._writer, _truncate)

    async def backup(self, path: Path) -> None:
        """Write a copy of one moment to a new file that only its owner can read; it is there whole
        or not at all.
        """
        try:
            await asyncio.to_thread(_back_up, f"{(self._path or Path()).as_uri()}?mode=ro", path)
        except sqlite3.Error as error:
            raise translate(error) from None

    async def _dispose(self) -> None:
        await super()._dispose()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    async def _perform(self, connection: AsyncConnection, work: Work[T]) -> T:
        driver: Any = (await connection.get_raw_connection()).driver_connection
        whole: Coroutine[Any, Any, T] = driver._execute(  # noqa: SLF001
            self._whole, connection.sync_connection, work
        )
        return await whole

    def _whole(self, connection: sa.Connection, work: Work[T]) -> T:
        is_writing = self._writer is not None and connection.engine is self._writer.sync_engine
        with self._locked() if is_writing else nullcontext():
            if work is _truncate:
                return work(connection)
            with connection.begin():
                connection.connection.cursor().execute("BEGIN IMMEDIATE" if is_writing else "BEGIN")
                return work(connection)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the file's write lock, after waiting for other processes for ``patience`` seconds at
        most.
        """
        if self._path is not None and _inode(self._path) != self._inode:
            raise StoreUnavailable(GONE, reason="gone")
        deadline = monotonic() + self._patience
        while not self._takes_file():
            if monotonic() > deadline:
                raise StoreUnavailable("another process writes to the database", reason="locked")
            sleep(LOCK_PAUSE)
        try:
            yield
        finally:
            if self._lock is not None:
                fcntl.flock(self._lock, fcntl.LOCK_UN)

    def _takes_file(self) -> bool:
        if self._lock is not None:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                return False
        return True


def _truncate(connection: sa.Connection) -> bool:
    busy, *_ = connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)").one()
    return bool(busy == 0)


class _Connection(AsyncAdapt_aiosqlite_connection):
    """A connection that is used in the thread which aiosqlite has for it, a whole transaction at a
    time.

    SQLAlchemy's own crosses to the thread and back for each cursor, statement, fetch and close:
    storing a request took 4.7 ms of CPU so.
    """

    def cursor(self, server_side: bool = False) -> Any:  # noqa: ARG002, FBT001, FBT002 - signature
        return self._driver.cursor()

    def commit(self) -> None:
        self._driver.commit()

    def rollback(self) -> None:
        self._driver.rollback()

    @property
    def _driver(self) -> Any:
        return self._connection._conn  # noqa: SLF001


def _engine(
    uri: str, *, patience: float, pragmas: tuple[str, ...] = (), size: int = 1
) -> AsyncEngine:
    dialect: Any = SQLiteDialect_aiosqlite

    def connect() -> _Connection:
        thread: Any = aiosqlite.Connection(partial(_connect, uri, patience, pragmas), 64)
        thread._thread.daemon = True  # noqa: SLF001 - an unclosed store must not keep the process alive
        return _Connection(dialect.import_dbapi(), await_only(thread))

    return create_async_engine(
        "sqlite+aiosqlite://",
        creator=connect,
        poolclass=AsyncAdaptedQueuePool,
        pool_size=size,
        max_overflow=0,
        pool_timeout=patience,
        hide_parameters=True,
    )


def _connect(uri: str, patience: float, pragmas: tuple[str, ...]) -> sqlite3.Connection:
    # isolation_level: the driver begins no transaction implicitly
    connection = sqlite3.connect(
        uri, uri=True, timeout=patience, isolation_level=None, check_same_thread=False
    )
    # not every SQLite has one
    connection.create_function("floor", 1, math.floor, deterministic=True)
    try:
        is_new = pragmas and connection.execute("PRAGMA page_count").fetchone() == (0,)
        for each in (OF_A_NEW_FILE, *pragmas) if is_new else pragmas:
            connection.execute(f"PRAGMA {each}")
    except BaseException:
        connection.close()
        raise
    return connection


def _absolute(name: str) -> Path:
    return Path(name).absolute()


def _create(path: Path) -> None:
    try:
        os.close(_open(path))
    except StoreUnavailable as error:
        said = f"{error}; choose one that can be written, with --store or store.url"
        raise StoreUnavailable(said, reason=error.reason) from None


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise StoreUnavailable(
            f"{path} cannot be written ({error.strerror})", reason="read_only"
        ) from None


def _inode(path: Path) -> tuple[int, int]:
    try:
        found = os.stat(path)  # noqa: PTH116 - a Path costs four times as much, on every write
    except OSError:
        return NOWHERE
    return found.st_dev, found.st_ino


def _journal(connection: sa.Connection) -> str:
    return str(connection.exec_driver_sql("PRAGMA journal_mode").scalar_one())


def _back_up(source: str, path: Path) -> None:
    unfinished = path.with_name(f"{path.name}.part")
    try:
        os.close(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    except OSError as error:
        raise StoreUnavailable(
            f"{unfinished} cannot be made ({error.strerror})", reason="backup"
        ) from None
    try:
        with (
            closing(sqlite3.connect(source, uri=True)) as original,
            closing(sqlite3.connect(unfinished)) as copy,
        ):
            original.backup(copy)
            (said,) = copy.execute("PRAGMA quick_check").fetchone()
        if said != "ok":
            raise CorruptStore(
                f"the copy is not whole, so the database is damaged: {said}", reason="damaged"
            )
        os.link(unfinished, path)  # unlike a rename it replaces nothing
    except OSError as error:
        raise StoreUnavailable(
            f"{path} cannot be made ({error.strerror})", reason="backup"
        ) from None
    finally:
        for each in (unfinished, path.with_name(f"{unfinished.name}-journal")):
            each.unlink(missing_ok=True)
