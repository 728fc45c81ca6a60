"""The embedded default: one SQLite file, one writer, one reader, and who may checkpoint when.

SQLite 3.7.0 to 3.51.2 can corrupt a WAL database when one connection checkpoints while another one writes
(sqlite.org/wal.html, "The WAL-reset bug"). Most systems ship such a version, so Weir keeps the two apart:

* A *server* (one process) uses WAL. It is the only one: it holds ``FILE-server`` for life. SQLite's automatic
  checkpoints are off; the server checkpoints on its own writing connection, where it cannot write meanwhile, and only
  while it holds the lock on ``FILE.lock``. Its second connection is opened ``mode=ro`` and can do neither.
* A *visitor* (``weir keys create`` beside a running server) holds that lock while it is open and never checkpoints: two
  writers without a checkpointer are safe. SQLite's own checkpoint at the last close runs under its exclusive lock.
* A *reader* opens ``mode=ro`` and takes no lock.

``synchronous=FULL``, ``secure_delete`` and foreign keys are on everywhere; every writing transaction begins IMMEDIATE,
because a deferred one that turns into a writer fails at once, whatever the busy timeout (SQLITE_BUSY_SNAPSHOT).
"""

import asyncio
import contextlib
import fcntl
import logging
import os
import sqlite3
import threading
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Literal, TypeVar, cast

import sqlalchemy as sa
from sqlalchemy import exc
from sqlalchemy.pool import StaticPool

from proxy.store.records import CorruptStore, StoreError, StoreUnavailable
from proxy.store.schema import check, ensure
from proxy.store.transaction import Database, translate

Begin = Literal["BEGIN", "BEGIN IMMEDIATE"]
T = TypeVar("T")
READS_AT_ONCE = 16


@dataclass(slots=True, eq=False, repr=False)
class _Job:
    work: Callable[[], object]
    future: "asyncio.Future[Any]"
    result: object = None
    error: BaseException | None = None

    def run(self) -> None:
        try:
            self.result = None if self.future.done() else self.work()
        except BaseException as error:  # noqa: BLE001 - whatever it is, it belongs to the task that waits for it
            self.error = error

    def settle(self) -> None:
        if self.future.done():
            return
        if self.error is not None:
            self.future.set_exception(self.error)
        else:
            self.future.set_result(self.result)


class ConnectionWorker:
    """One connection in its own thread, used by one transaction at a time, in the order of asking.

    A transaction is one synchronous function that runs in the connection's thread from BEGIN to COMMIT, so that no
    cancellation can strike in between and leave the lock behind. A busy event loop is crossed twice and no oftener:
    whoever asks hands over a job, and the thread hands back its result, with those of reads that waited behind it.
    """

    def __init__(self, *, begin: Begin, patience: float) -> None:
        self._patience = patience
        self._jobs: SimpleQueue[_Job] = SimpleQueue()
        self._unfinished = self._waits = 0
        self._closed = self._ended = False
        self._at_once = READS_AT_ONCE if begin == "BEGIN" else 1
        self._begin = begin
        self._driver: sqlite3.Connection
        self._engine = sa.create_engine(
            "sqlite://",
            creator=lambda: self._driver,
            poolclass=StaticPool,
            pool_reset_on_return=None,
            hide_parameters=True,
        )
        # a store that nobody closed must not keep the process alive
        threading.Thread(target=self._work, name="store", daemon=True).start()

    @classmethod
    async def connect(
        cls, uri: str, *, begin: Begin, patience: float, pragmas: tuple[str, ...] = ()
    ) -> "ConnectionWorker":
        worker = cls(begin=begin, patience=patience)
        try:
            await worker._run(lambda: worker._open(uri, pragmas))
        except BaseException:
            await worker.close()
            raise
        return worker

    @property
    def waiting(self) -> int:
        return self._jobs.qsize()

    async def transaction(
        self, work: Callable[[sa.Connection], T], *, committed: Callable[[], None] | None = None
    ) -> T:
        """The result of ``work`` once its transaction is committed, and after ``committed`` ran in the same thread.

        A task that is cancelled here leaves either a whole transaction or none. Waiting for others that have the
        connection and for the lock takes ``patience`` seconds at most, then :class:`StoreUnavailable`.
        """
        deadline = time.monotonic() + self._patience if self._unfinished else None

        def whole() -> T:
            self._hurry(deadline or time.monotonic() + self._patience)
            result = self._transact(work)
            if committed is not None:
                committed()
            return result

        return await self._run(whole)

    async def raw(self, work: Callable[[sqlite3.Connection], T]) -> T:
        return await self._run(lambda: work(self._driver))

    async def close(self) -> None:
        if self._closed:
            return
        closed, self._closed = self._submit(self._close), True
        await closed

    def _open(self, uri: str, pragmas: tuple[str, ...]) -> None:
        self._driver = sqlite3.connect(
            uri, uri=True, isolation_level=None, timeout=self._patience, cached_statements=256
        )
        for each in pragmas:
            self._driver.execute(f"PRAGMA {each}").fetchall()

    def _close(self) -> None:
        self._ended = True
        if hasattr(self, "_driver"):
            self._driver.close()

    def _transact(self, work: Callable[[sa.Connection], T]) -> T:
        driver = self._driver
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
        eighth = self._patience / 8
        waits = max(1, int(1000 * (left // eighth * eighth or left)))
        if waits != self._waits:  # in few steps, so that it is hardly ever set: most wait for nobody
            self._driver.execute(f"PRAGMA busy_timeout = {waits}")
            self._waits = waits

    async def _run(self, work: Callable[[], T]) -> T:
        try:
            return cast("T", await self._submit(work))
        except StoreError:
            raise
        except (exc.SQLAlchemyError, sqlite3.Error, OSError) as error:
            raise translate(error) from None

    def _submit(self, work: Callable[[], object]) -> "asyncio.Future[Any]":
        if self._closed:
            raise StoreUnavailable("the store is closed", reason="closed")
        job = _Job(work, asyncio.get_running_loop().create_future())
        self._unfinished += 1
        self._jobs.put(job)
        return job.future

    def _work(self) -> None:
        done = list[_Job]()
        while not self._ended:
            job = self._jobs.get()
            job.run()
            done.append(job)
            if self._jobs.empty() or len(done) == self._at_once:
                with contextlib.suppress(RuntimeError):  # the loop is closed, and whoever waited is gone with it
                    job.future.get_loop().call_soon_threadsafe(self._settle, done)
                done = []

    def _settle(self, done: list[_Job]) -> None:
        self._unfinished -= len(done)
        for job in done:
            job.settle()


PAGES_AT_ONCE = 256
log = logging.getLogger("weir.store")

Mode = Literal["server", "visitor", "reader", "copier"]
SqliteVersion = tuple[int, int, int]

CHECKPOINT_BYTES = 4 << 20
CHECKPOINT_COMMITS = 1000
WRITER = (
    "auto_vacuum=INCREMENTAL",  # only a file that is made now takes it, and only before its journal is set
    "synchronous=FULL",
    "foreign_keys=ON",
    "secure_delete=ON",
    "wal_autocheckpoint=0",
    f"journal_size_limit={CHECKPOINT_BYTES}",
)
GONE = "the database file was deleted, moved or replaced while it was open: start Weir anew"
NOWHERE = (-1, -1)


def has_wal_reset_bug(version: SqliteVersion) -> bool:
    """Whether this SQLite may corrupt a WAL database that two connections write and checkpoint at once.

    sqlite.org/wal.html, "The WAL-reset bug": 3.7.0 to 3.51.2, corrected in 3.51.3, 3.50.7 and 3.44.6.
    """
    if (3, 44, 6) <= version < (3, 45, 0) or (3, 50, 7) <= version < (3, 51, 0):
        return False
    return (3, 7, 0) <= version < (3, 51, 3)


class LockFile:
    """An advisory lock on a file of its own."""

    def __init__(self, path: Path) -> None:
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StoreUnavailable(f"{path} cannot be opened ({error.strerror})", reason="read_only") from None
        self._path = path

    def take(self) -> bool:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True

    async def wait(self, patience: float) -> None:
        deadline = time.monotonic() + patience
        while not self.take():
            if time.monotonic() > deadline:
                raise StoreUnavailable(f"another weir command holds {self._path.name}", reason="locked")
            await asyncio.sleep(0.01)

    def release(self) -> None:
        fcntl.flock(self._file, fcntl.LOCK_UN)

    def close(self) -> None:
        os.close(self._file)


class SqliteDatabase(Database):
    """A SQLite file, or a database in memory that lives as long as this object.

    A file that is deleted, moved or replaced while it is open is noticed at the next write or ping, which then fail:
    what SQLite would write goes to a file that has no name any more.
    """

    def __init__(self, path: Path | None, *, mode: Mode) -> None:
        self.journal = "memory"
        self.notices: tuple[str, ...] = ()
        self._path = None if path is None else path.absolute()
        self._mode = mode
        self.shared = False
        self._lock: LockFile | None = None
        self._owner: LockFile | None = None
        self._writer: ConnectionWorker | None = None
        self._reader: ConnectionWorker | None = None
        self._inode = NOWHERE
        self._commits = 0
        self._checkpointed = 0

    @classmethod
    async def open(cls, name: str | None, *, mode: Mode, patience: float) -> "SqliteDatabase":
        if not name or name == ":memory:":
            database = cls(None, mode=mode)
            database._writer = await ConnectionWorker.connect(
                "file::memory:", begin="BEGIN IMMEDIATE", patience=patience
            )
            await database._writer.transaction(ensure)
            return database
        database = cls(Path(name), mode=mode)
        try:
            looks = mode in ("reader", "copier")
            await (database._open_reader(patience) if looks else database._open_writer(patience))
        except BaseException:
            await database.close()
            raise
        return database

    @property
    def writable(self) -> bool:
        return self._writer is not None

    def load(self) -> dict[str, int]:
        return {"waiting": sum(worker.waiting for worker in (self._reader, self._writer) if worker is not None)}

    async def ping(self) -> None:
        if self._mode == "reader":
            await self.read(check)
        else:
            await self._writing().transaction(lambda _: self._same_file())

    async def read(self, work: Callable[[sa.Connection], T]) -> T:
        return await self._reading().transaction(work)

    async def write(self, work: Callable[[sa.Connection], T]) -> T:
        def checked(connection: sa.Connection) -> T:
            self._same_file()
            return work(connection)

        return await self._writing().transaction(checked, committed=self._count)

    async def tend(self, *, force: bool = False) -> bool:
        if self._writer is None or self._path is None or self.journal != "wal" or self._mode == "visitor":
            return False
        if not force and self._commits - self._checkpointed < CHECKPOINT_COMMITS and self._wal() <= CHECKPOINT_BYTES:
            return False
        return await self._writer.raw(lambda driver: self._checkpoint(driver, "TRUNCATE" if force else "PASSIVE"))

    async def shrink(self) -> bool:
        if self._writer is None or self._path is None:
            return False
        return await self._writer.raw(shrink)

    async def backup(self, path: Path) -> None:
        await self._reading().raw(partial(back_up, path=path))

    async def close(self) -> None:
        workers, self._reader, self._writer = (self._reader, self._writer), None, None
        for worker in workers:
            if worker is not None:
                await worker.close()
        for lock in (self._lock, self._owner):
            if lock is not None:
                lock.close()
        self._lock = self._owner = None

    def _reading(self) -> ConnectionWorker:
        worker = self._reader or self._writer
        if worker is None:
            raise StoreUnavailable("the store is closed", reason="closed")
        return worker

    def _writing(self) -> ConnectionWorker:
        if self._writer is None:
            reason = "read_only" if self._mode == "reader" else "closed"
            raise StoreUnavailable("the store is open for reading only", reason=reason)
        return self._writer

    async def _open_reader(self, patience: float) -> None:
        if self._path is None or not self._path.is_file():
            raise StoreUnavailable(f"there is no database at {self._path}", reason="absent")
        self._reader = await ConnectionWorker.connect(
            f"{self._path.as_uri()}?mode=ro", begin="BEGIN", patience=patience
        )
        self.journal = await self._reader.raw(lambda driver: pragma(driver, "journal_mode"))
        if self._mode == "reader":
            await self._reader.transaction(check)

    async def _open_writer(self, patience: float) -> None:
        path = self._create()
        self._lock = LockFile(path.with_name(f"{path.name}.lock"))
        await self._lock.wait(patience)
        self._own(path)
        self._writer = await ConnectionWorker.connect(
            f"{path.as_uri()}?mode=rw", begin="BEGIN IMMEDIATE", patience=patience, pragmas=WRITER
        )
        self.journal = await self._writer.raw(self._set_journal)
        await self._writer.transaction(_refuse_foreign)
        await self._writer.transaction(ensure)
        if self._mode != "visitor":
            self._reader = await ConnectionWorker.connect(f"{path.as_uri()}?mode=ro", begin="BEGIN", patience=patience)
            self._lock.release()

    def _own(self, path: Path) -> None:
        if self._mode == "visitor" or not has_wal_reset_bug(sqlite3.sqlite_version_info):
            return
        self._owner = LockFile(path.with_name(f"{path.name}-server"))
        if not self._owner.take():
            raise StoreUnavailable(
                f"another Weir serves from {path.name}, and SQLite {sqlite3.sqlite_version} is not safe for two: "
                "stop it, or use PostgreSQL",
                reason="locked",
            )

    def _create(self) -> Path:
        path = self._path or Path()
        try:
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        except OSError as error:
            said = f"{path} cannot be written ({error.strerror}); choose one that can be, with --store or store.url"
            raise StoreUnavailable(said, reason="read_only") from None
        self._inode = _inode(path)
        return path

    def _set_journal(self, driver: sqlite3.Connection) -> str:
        if self._mode == "visitor":
            return pragma(driver, "journal_mode")
        mode = pragma(driver, "journal_mode=wal")
        if mode != "wal":
            raise StoreUnavailable(f"the journal mode cannot be set to wal: it is {mode}", reason="locked")
        return mode

    def _count(self) -> None:
        self._commits += 1

    def _same_file(self) -> None:
        if self._path is not None and _inode(self._path) != self._inode:
            raise StoreUnavailable(GONE, reason="gone")

    def _wal(self) -> int:
        try:
            return os.stat(f"{self._path}-wal").st_size  # noqa: PTH116 - a Path costs four times as much
        except OSError:
            return 0

    def _checkpoint(self, driver: sqlite3.Connection, kind: Literal["PASSIVE", "TRUNCATE"]) -> bool:
        if self._lock is None or not self._lock.take():
            return False
        try:
            busy, *_ = driver.execute(f"PRAGMA wal_checkpoint({kind})").fetchone()
        finally:
            self._lock.release()
        self._checkpointed = self._commits
        return not busy


def _inode(path: Path) -> tuple[int, int]:
    try:
        found = os.stat(path)  # noqa: PTH116 - a Path costs four times as much, on every write
    except OSError:
        return NOWHERE
    return found.st_dev, found.st_ino


def _refuse_foreign(connection: sa.Connection) -> None:
    names = set(connection.scalars(sa.text("SELECT name FROM sqlite_master WHERE type = 'table'")))
    if names and "alembic_version" not in names:
        raise CorruptStore("the file is a database of some other program", reason="foreign")


def pragma(driver: sqlite3.Connection, name: str) -> str:
    return str(driver.execute(f"PRAGMA {name}").fetchone()[0])


def back_up(driver: sqlite3.Connection, *, path: Path) -> None:
    """Write a copy of one moment to a new file that only its owner can read; it is there whole or not at all."""
    unfinished = path.with_name(f"{path.name}.part")
    try:
        os.close(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    except OSError as error:
        raise StoreUnavailable(f"{unfinished} cannot be made ({error.strerror})", reason="backup") from None
    try:
        with closing(sqlite3.connect(unfinished)) as copy:
            driver.backup(copy)
            if (said := pragma(copy, "quick_check")) != "ok":
                raise CorruptStore(f"the copy is not whole, so the database is damaged: {said}", reason="damaged")
        os.link(unfinished, path)  # unlike a rename it replaces nothing
    except OSError as error:
        raise StoreUnavailable(f"{path} cannot be made ({error.strerror})", reason="backup") from None
    finally:
        for each in (unfinished, path.with_name(f"{unfinished.name}-journal")):
            each.unlink(missing_ok=True)


def shrink(driver: sqlite3.Connection) -> bool:
    before = int(pragma(driver, "freelist_count"))
    driver.execute(f"PRAGMA incremental_vacuum({PAGES_AT_ONCE})").fetchall()
    return 0 < int(pragma(driver, "freelist_count")) < before
