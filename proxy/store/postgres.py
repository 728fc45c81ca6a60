"""PostgreSQL through asyncpg: for more than one process.

No statement is waited for longer than the store's timeout: the server ends it, and where even that
answer does not come the connection is thrown away. Once the server is known not to answer, nothing
waits for it: every transaction fails at once until a background check finds it available again.

A URL is what the driver reads of it. What else libpq knows only tunes a connection, and is left
out: the driver would take it for a setting of the server, which then refuses the connection.
"""

import asyncio
import contextlib
import ssl
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import parse_qsl, urlencode, urlsplit

import sqlalchemy as sa
from sqlalchemy import event, exc
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.pool import NullPool, QueuePool

from proxy.store.engine import Database, Work
from proxy.store.errors import is_disconnect, translate
from proxy.store.records import StoreError, StoreUnavailable
from proxy.store.schema import check, ensure

T = TypeVar("T")
LEFT_OUT = frozenset(
    (
        *(
            "keepalives",
            "keepalives_idle",
            "keepalives_interval",
            "keepalives_count",
            "tcp_user_timeout",
        ),
        *("gssencmode", "sslsni", "sslcompression", "client_encoding", "fallback_application_name"),
    )
)
FILES = ("sslrootcert", "sslcert", "sslkey", "sslcrl", "passfile")
SWITCH = {
    "true": "require",
    "on": "require",
    "1": "require",
    "false": "disable",
    "off": "disable",
    "0": "disable",
}
NOT_BOUND = (
    "channel_binding=require: the driver asyncpg cannot bind the channel; the connection is"
    " encrypted all the same, and sslmode=verify-full makes sure of the server"
)
MIGRATING = 0x57454952  # "WEIR", the key of the advisory lock that migrations hold
GRACE = 0.5
"""Seconds to wait for the server's own timeout error of a statement."""
IDLE = 5
"""Timeouts after which the server ends a transaction whose Weir has died while holding locks.
"""
LOOKS = 0.5
CLOSING = 60.0
NO_DRIVER = "PostgreSQL needs the driver asyncpg: pip install 'weir-proxy[postgres]'"
UNREACHABLE = "unreachable"
WATCH = "watch"
LIMITS = sa.select(
    *(
        sa.func.set_config(name, sa.bindparam(name, type_=sa.Text), True)  # noqa: FBT003 - for this transaction
        for name in ("lock_timeout", "statement_timeout", "idle_in_transaction_session_timeout")
    )
)


class PostgresDatabase(Database):
    """A pool of connections to a database server.

    Of the engine's options ``limits`` are what every transaction begins by setting: a pooler gives
    each transaction another connection of the server's, and takes none of them when a connection
    begins. ``patience`` is how many seconds a statement may have no answer.
    """

    shared = True

    def __init__(
        self, engine: AsyncEngine, *, writable: bool, notices: tuple[str, ...] = ()
    ) -> None:
        reader = engine.execution_options(isolation_level="REPEATABLE READ")
        super().__init__(reader, engine if writable else None)
        event.listen(engine.sync_engine, "before_cursor_execute", _begin_watch)
        event.listen(engine.sync_engine, "after_cursor_execute", _end_watch)
        self.notices = notices
        self._engine = engine
        self._down: StoreError | None = None
        self._looking: asyncio.Task[None] | None = None

    @classmethod
    async def open(
        cls,
        url: str,
        *,
        read_only: bool = False,
        patience: float,
        statement: float | None = None,
        connections: int,
    ) -> "PostgresDatabase":
        """A database that has answered; a ``statement`` may take so many seconds, ``patience``
        without a number.
        """
        arguments, notices = connecting(url, patience)
        statement = statement or patience
        is_pooled = await _prepare(arguments, writes=not read_only)
        seconds = {
            "lock_timeout": patience,
            "statement_timeout": statement,
            "idle_in_transaction_session_timeout": IDLE * statement,
        }
        limits = {name: str(int(1000 * value)) for name, value in seconds.items()}
        if not is_pooled:
            arguments["server_settings"] |= limits
        engine = _engine(
            arguments,
            is_pooled=is_pooled,
            pool_size=connections,
            max_overflow=0,
            pool_timeout=patience,
            execution_options={
                "limits": limits if is_pooled else None,
                "patience": statement + GRACE,
            },
        )
        database = cls(engine, writable=not read_only, notices=notices)
        await database.ping()
        return database

    def load(self) -> dict[str, int]:
        pool = self._engine.pool
        if not isinstance(pool, QueuePool):
            return {}
        busy = pool.checkedout()
        return {
            "waiting": max(0, len(self._running) - busy),
            "busy": busy,
            "idle": pool.checkedin(),
        }

    async def backup(self, path: Path) -> None:
        dump = f"pg_dump --format=custom --file={path} DATABASE"
        raise StoreError(
            f"PostgreSQL is backed up by its own tools, also while Weir runs: {dump}",
            reason="backup",
        )

    async def _dispose(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSING if self._down is None else GRACE):
                await self._engine.dispose()

    async def _run(self, engine: AsyncEngine, work: Work[T]) -> T:
        if self._down is not None:
            raise StoreUnavailable(str(self._down), reason=self._down.reason)
        return await super()._run(engine, work)

    async def _transact(self, engine: AsyncEngine, work: Work[T]) -> T:
        try:
            return await super()._transact(engine, work)
        except StoreUnavailable as error:
            if error.reason == UNREACHABLE and self._down is None:
                self._down = error
                self._looking = asyncio.create_task(self._look(), name="weir-postgres")
            raise

    async def _look(self) -> None:
        while self._down is not None:
            await asyncio.sleep(LOOKS)
            with contextlib.suppress(StoreError):
                await super()._transact(self._reader, _answers)
                self._down = None

    def _whole(self, connection: sa.Connection, work: Work[T]) -> T:
        """One transaction, given up together with its connection once a statement has had no answer
        for too long.
        """
        options = connection.get_execution_options()
        watch = _Watch(connection.connection.driver_connection, options.get("patience"))
        connection.info[WATCH] = watch
        try:
            transaction = connection.begin()
            try:
                if options.get("limits") is not None:
                    connection.execute(LIMITS, options["limits"])
                result = work(connection)
            except BaseException:
                watch.renew()
                transaction.rollback()
                raise
            watch.renew()
            try:
                transaction.commit()
            except exc.DBAPIError as error:
                # it is unknown whether it was committed: it must not be done twice
                if is_disconnect(error):
                    raise translate(error) from None
                raise
            else:
                return result
        except (exc.DBAPIError, StoreError):
            if watch.has_ended:
                raise StoreUnavailable("the database does not answer", reason=UNREACHABLE) from None
            raise
        finally:
            watch.stop()
            if not connection.invalidated:
                connection.info.pop(WATCH, None)


class _Watch:
    """Throws a connection away that has not answered for ``patience`` seconds.

    The driver's own timeout first sends the server a cancel request, and then waits for its answer.
    """

    def __init__(self, driver: Any, patience: float | None) -> None:
        self.has_ended = False
        self._driver = driver
        self._patience = patience
        self._timer: asyncio.TimerHandle | None = None

    def renew(self) -> None:
        self.stop()
        if self._patience is not None:
            self._timer = asyncio.get_running_loop().call_later(self._patience, self._end)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _end(self) -> None:
        self.has_ended = True
        self._driver.terminate()


def _begin_watch(connection: sa.Connection, *_: object) -> None:
    if (watch := connection.info.get(WATCH)) is not None:
        watch.renew()


def _end_watch(connection: sa.Connection, *_: object) -> None:
    if (watch := connection.info.get(WATCH)) is not None:
        watch.stop()


def _answers(connection: sa.Connection) -> None:
    connection.execute(sa.select(sa.literal(1))).scalar_one()


def connecting(url: str, patience: float) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The driver's arguments for a URL, and what an operator must know of it."""
    try:
        parts = urlsplit(url)
    except ValueError:
        raise StoreError("the store's URL cannot be read", reason="url") from None
    given = {name: value for name, value in parse_qsl(parts.query) if name not in LEFT_OUT}
    try:
        timeout = float(given.pop("connect_timeout", "") or patience)
    except ValueError:
        raise StoreError(
            "connect_timeout in the store's URL is a number of seconds", reason="url"
        ) from None
    for name in FILES:
        if given.get(name, "system") != "system" and not Path(given[name]).is_file():
            raise StoreError(
                f"{name} in the store's URL names a file that is not there: {given[name]}",
                reason="url",
            )
    notices: tuple[str, ...] = ()
    if "ssl" in given:
        said = given.pop("ssl")
        given.setdefault("sslmode", SWITCH.get(said.lower(), said))
    if given.pop("channel_binding", None) == "require":
        notices = (NOT_BOUND,)
        given.setdefault("sslmode", "require")
    arguments: dict[str, Any] = {
        "timeout": timeout,
        "server_settings": {"application_name": "weir"},
    }
    if (
        given.get("sslmode") in {"verify-ca", "verify-full"}
        and given.get("sslrootcert", "system") == "system"
    ):
        given.pop("sslrootcert", None)
        arguments["ssl"] = ssl.create_default_context()
        arguments["ssl"].check_hostname = given.pop("sslmode") == "verify-full"
    path = "" if parts.path == "/" else parts.path
    arguments["dsn"] = parts._replace(
        scheme="postgresql", path=path, query=urlencode(given), fragment=""
    ).geturl()
    return arguments, notices


def _engine(arguments: dict[str, Any], *, is_pooled: bool, **options: Any) -> AsyncEngine:
    # a statement that was prepared lives in one connection of the server, the next one may be
    # another
    if is_pooled:
        arguments = {**arguments, "statement_cache_size": 0, "prepared_statement_cache_size": 0}
    try:
        return create_async_engine(
            "postgresql+asyncpg://", hide_parameters=True, connect_args=arguments, **options
        )
    except ModuleNotFoundError:
        raise StoreError(NO_DRIVER, reason="url") from None


async def _prepare(arguments: dict[str, Any], *, writes: bool) -> bool:
    """Bring the schema up to date; whether a pooler is in front of the server."""
    engine = _engine(arguments, is_pooled=True, poolclass=NullPool)

    def work(connection: sa.Connection) -> bool:
        driver: Any = connection.connection.driver_connection
        found = connection.scalar(sa.select(sa.func.pg_backend_pid()))
        if writes:
            connection.execute(sa.select(sa.func.pg_advisory_xact_lock(MIGRATING)))
            ensure(connection)
        else:
            check(connection)
        return bool(found != driver.get_server_pid())

    database = Database(engine, engine)
    try:
        return await database.write(work)
    except ValueError:  # the driver's, of a port that is no number
        raise StoreError("the store's URL cannot be read", reason="url") from None
    finally:
        await database.close()
