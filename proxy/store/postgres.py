"""PostgreSQL through SQLAlchemy's asyncio engine: for more than one process.

The same functions run here as on SQLite, inside ``run_sync``. Here a statement is a round trip and every one of them a
point of cancellation, so the transaction runs in a task of its own that nobody cancels.

No statement is waited for longer than the store's timeout: the server ends it, and where even that word does not come
the connection is thrown away. Once the server is known not to answer, nothing waits for it: every transaction fails at
once until a look at it, every moment in the background, finds it back.

A URL is read as libpq has it and providers print it, and put in the words of the driver. Parameters:
https://www.postgresql.org/docs/current/libpq-connect.html#LIBPQ-PARAMKEYWORDS. The driver takes whatever it does not
know for a setting of the server, which then refuses the connection; so every parameter is looked at here.
"""

import asyncio
import contextlib
import os
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar
from urllib.parse import parse_qsl, urlencode, urlsplit

import sqlalchemy as sa
from sqlalchemy import event, exc
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.pool import NullPool, QueuePool
from sqlalchemy.util import await_only

from proxy.store.records import StoreError, StoreUnavailable, is_disconnect, is_retried
from proxy.store.schema import check, ensure
from proxy.store.transaction import ASIDE, Database, translate

FILES = ("sslrootcert", "sslcert", "sslkey", "sslcrl", "passfile")
DRIVER = frozenset(
    (
        *("host", "port", "dbname", "database", "user", "password", "service", "krbsrvname", "gsslib", *FILES),
        *("sslmode", "sslpassword", "sslnegotiation", "ssl_min_protocol_version", "ssl_max_protocol_version"),
        "target_session_attrs",
    )
)
SERVER = frozenset({"application_name", "options"})
TUNING = frozenset(
    (
        *("keepalives", "keepalives_idle", "keepalives_interval", "keepalives_count", "tcp_user_timeout"),
        *("gssencmode", "sslsni", "sslcompression", "client_encoding", "fallback_application_name"),
    )
)
"""What only tunes a connection, or is so anyway: taken and left aside."""
OURS = frozenset({"connect_timeout", "channel_binding", "ssl"})
MODES = ("disable", "allow", "prefer", "require", "verify-ca", "verify-full")
SERVERS = ("any", "read-write", "read-only", "primary", "standby", "prefer-standby")
SWITCH = {"true": "require", "on": "require", "1": "require", "false": "disable", "off": "disable", "0": "disable"}
NOT_BOUND = (
    "channel_binding=require: the driver asyncpg cannot bind the channel; the connection is encrypted all the same, "
    "and sslmode=verify-full makes sure of the server"
)


@dataclass(frozen=True, slots=True)
class Address:
    dsn: str = field(repr=False)
    settings: dict[str, str]
    connect_timeout: float | None = None
    context: ssl.SSLContext | None = None
    notices: tuple[str, ...] = ()


def address_of(url: str) -> Address:
    try:
        parts = urlsplit(url)
        given = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)))
    except ValueError:
        raise StoreError("the store's URL cannot be read", reason="url") from None
    unknown = sorted(given.keys() - DRIVER - SERVER - TUNING - OURS)
    if unknown:
        raise StoreError(f"the store's URL has a parameter that Weir does not know: {unknown[0]}", reason="url")
    _check(given)
    mode, notices = _mode(given), tuple[str, ...]()
    if given.get("channel_binding") == "require":
        notices = (NOT_BOUND,)
        mode = mode if mode in MODES[3:] else "require"
    context = _system_context(given, mode)
    driver = {name: value for name, value in given.items() if name in DRIVER and name != "sslmode"}
    if context is not None:
        driver.pop("sslrootcert", None)
    elif mode is not None:
        driver["sslmode"] = mode
    return Address(
        dsn=parts._replace(
            scheme="postgresql", path=parts.path if parts.path != "/" else "", query=urlencode(driver), fragment=""
        ).geturl(),
        settings={"application_name": "weir"} | {name: given[name] for name in given if name in SERVER},
        connect_timeout=_seconds(given.get("connect_timeout")),
        context=context,
        notices=notices,
    )


def _check(given: dict[str, str]) -> None:
    wanted = given.get("target_session_attrs", "any")
    if wanted not in SERVERS:
        said = f"target_session_attrs in the store's URL is one of {', '.join(SERVERS)}, not {wanted}"
        raise StoreError(said, reason="url")
    for name in FILES:
        if given.get(name) not in {None, "system"} and not Path(given[name]).is_file():
            raise StoreError(f"{name} in the store's URL names a file that is not there: {given[name]}", reason="url")


def _mode(given: dict[str, str]) -> str | None:
    mode = given.get("sslmode")
    if mode is None and "ssl" in given:
        mode = SWITCH.get(given["ssl"].lower(), given["ssl"])
    if mode is not None and mode not in MODES:
        raise StoreError(f"sslmode in the store's URL is one of {', '.join(MODES)}, not {mode}", reason="url")
    return mode


def _system_context(given: dict[str, str], mode: str | None) -> ssl.SSLContext | None:
    named = given.get("sslrootcert") or os.environ.get("PGSSLROOTCERT")
    if mode not in {"verify-ca", "verify-full"} or "sslcert" in given or named not in {None, "system"}:
        return None
    if named is None and (Path.home() / ".postgresql" / "root.crt").exists():
        return None
    context = ssl.create_default_context()
    context.check_hostname = mode == "verify-full"
    return context


def _seconds(text: str | None) -> float | None:
    if not text:
        return None
    try:
        return float(text) or None
    except ValueError:
        raise StoreError("connect_timeout in the store's URL is a number of seconds", reason="url") from None


T = TypeVar("T")
ATTEMPTS = 3
MIGRATING = 0x57454952  # "WEIR", the key of the advisory lock that migrations hold
UNHURRIED = 60.0
GRACE = 0.5
"""Seconds that the server's own word, that a statement took too long, is waited for."""
IDLE = 5
"""Timeouts after which the server ends a transaction whose Weir has stopped within it, holding locks."""
LOOKS = 0.5
NO_DRIVER = "PostgreSQL needs the driver asyncpg: pip install 'weir-proxy[postgres]'"
UNREACHABLE = "unreachable"
LIMITS = sa.select(
    *(
        sa.func.set_config(name, sa.bindparam(name, type_=sa.Text), True)  # noqa: FBT003 - for this transaction
        for name in ("lock_timeout", "statement_timeout", "idle_in_transaction_session_timeout")
    )
)


class PostgresDatabase(Database):
    """A pool of connections to a database server; there is nothing to tend.

    Of the engine's options ``limits`` are what every transaction begins by setting: a pooler gives each transaction
    another connection of the server's, and takes none of them when a connection begins. ``patience`` is how many
    seconds a statement may have no answer.
    """

    journal = "server"
    shared = True

    def __init__(self, engine: AsyncEngine, *, writable: bool, notices: tuple[str, ...] = ()) -> None:
        event.listen(engine.sync_engine, "before_cursor_execute", _go_on)
        self._writes = writable
        self.notices = notices
        self._engine = engine
        self._reading = engine.execution_options(isolation_level="REPEATABLE READ")
        self._running: set[asyncio.Task[Any]] = set()
        self._down: StoreError | None = None
        self._looking: asyncio.Task[None] | None = None

    @classmethod
    async def open(
        cls, url: str, *, mode: Literal["server", "visitor", "reader"], patience: float, connections: int
    ) -> "PostgresDatabase":
        address = address_of(url)
        is_pooled = await _prepare(address, writes=mode != "reader", patience=patience)
        statement = patience if mode == "server" else UNHURRIED
        seconds = {
            "lock_timeout": patience,
            "statement_timeout": statement,
            "idle_in_transaction_session_timeout": IDLE * statement,
        }
        limits = {name: str(int(1000 * value)) for name, value in seconds.items()}
        engine = _engine(
            address,
            settings={} if is_pooled else limits,
            patience=patience,
            is_pooled=is_pooled,
            pool_size=connections,
            max_overflow=0,
            pool_timeout=patience,
            execution_options={"limits": limits if is_pooled else None, "patience": statement + GRACE},
        )
        database = cls(engine, writable=mode != "reader", notices=address.notices)
        await database.ping()
        return database

    @property
    def writable(self) -> bool:
        return self._writes

    def load(self) -> dict[str, int]:
        pool = self._engine.pool
        if not isinstance(pool, QueuePool):
            return {}
        busy, idle = pool.checkedout(), pool.checkedin()
        return {"waiting": max(0, len(self._running) - busy), "busy": busy, "idle": idle}

    async def ping(self) -> None:
        await self.read(_one)

    async def read(self, work: Callable[[sa.Connection], T]) -> T:
        return await self._run(self._reading, work)

    async def write(self, work: Callable[[sa.Connection], T]) -> T:
        """The result of ``work`` once it is committed; what the server gave up is tried again.

        That is a deadlock, a serialization failure, and a connection that was lost before it was told to commit.
        """
        if not self.writable:
            raise StoreUnavailable("the store is open for reading only", reason="read_only")
        return await self._run(self._engine, work)

    async def backup(self, path: Path) -> None:
        dump = f"pg_dump --format=custom --file={path} DATABASE"
        raise StoreError(f"PostgreSQL is backed up by its own tools, also while Weir runs: {dump}", reason="backup")

    async def close(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
        if self._running:
            await asyncio.wait(self._running)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(UNHURRIED if self._down is None else GRACE):
                await self._engine.dispose()

    async def _run(self, engine: AsyncEngine, work: Callable[[sa.Connection], T]) -> T:
        if self._down is not None:
            raise StoreUnavailable(str(self._down), reason=self._down.reason)
        task = asyncio.create_task(self._watched(engine, work))
        self._running.add(task)
        task.add_done_callback(self._forget)
        return await asyncio.shield(task)

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # seen, also when its caller was cancelled

    async def _watched(self, engine: AsyncEngine, work: Callable[[sa.Connection], T]) -> T:
        try:
            return await _transact(engine, work)
        except StoreUnavailable as error:
            if error.reason == UNREACHABLE and self._down is None:
                self._down = error
                self._looking = asyncio.create_task(self._look(), name="weir-postgres")
            raise

    async def _look(self) -> None:
        while self._down is not None:
            await asyncio.sleep(LOOKS)
            with contextlib.suppress(StoreError):
                await _transact(self._reading, _one)
                self._down = None


def _engine(
    address: Address, *, settings: dict[str, str], patience: float, is_pooled: bool, **options: Any
) -> AsyncEngine:
    arguments: dict[str, Any] = {
        "dsn": address.dsn,
        "timeout": address.connect_timeout or patience,
        "server_settings": {**address.settings, **settings},
    }
    if address.context is not None:
        arguments["ssl"] = address.context
    if is_pooled:  # a statement that was prepared lives in one connection of the server, the next one may be another
        arguments |= {"statement_cache_size": 0, "prepared_statement_cache_size": 0}
    try:
        return create_async_engine("postgresql+asyncpg://", hide_parameters=True, connect_args=arguments, **options)
    except ModuleNotFoundError:
        raise StoreError(NO_DRIVER, reason="url") from None


async def _prepare(address: Address, *, writes: bool, patience: float) -> bool:
    engine = _engine(address, settings={}, patience=patience, is_pooled=True, poolclass=NullPool)

    def work(connection: sa.Connection) -> bool:
        driver: Any = connection.connection.driver_connection
        found = connection.scalar(sa.select(sa.func.pg_backend_pid()))
        if writes:
            connection.execute(sa.select(sa.func.pg_advisory_xact_lock(MIGRATING)))
            ensure(connection)
        else:
            check(connection)
        return bool(found != driver.get_server_pid())

    try:
        return await _transact(engine, work)
    except ValueError:  # the driver reads ports and versions of TLS
        raise StoreError("the store's URL cannot be read", reason="url") from None
    finally:
        await engine.dispose()


async def _transact(engine: AsyncEngine, work: Callable[[sa.Connection], T]) -> T:
    attempt = 1
    while True:
        try:
            async with engine.connect() as connection:
                return await connection.run_sync(_whole, work)
        except StoreError:
            raise
        except (exc.SQLAlchemyError, OSError) as error:
            if attempt == ATTEMPTS or not (is_retried(error) or is_disconnect(error)):
                raise translate(error) from None
            attempt += 1


def _whole(connection: sa.Connection, work: Callable[[sa.Connection], T]) -> T:
    """One transaction, given up together with its connection once a statement has had no answer for too long."""
    options = connection.get_execution_options()
    watch = _Watch(connection.connection.driver_connection, options.get("patience"))
    connection.info.update({_Watch: watch, ASIDE: watch.aside})
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
            if is_disconnect(error):  # whether it is committed nobody knows: it must not be done twice
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
            for name in (_Watch, ASIDE):
                connection.info.pop(name, None)


class _Watch:
    """Throws a connection away that has not answered for ``patience`` seconds.

    The driver's own timeout first asks the server to cancel, and then waits for its answer to that.
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

    def aside(self, work: Callable[[], T]) -> T:
        self.stop()
        return await_only(asyncio.to_thread(work))

    def _end(self) -> None:
        self.has_ended = True
        self._driver.terminate()


def _go_on(connection: sa.Connection, *_: object) -> None:
    watch = connection.info.get(_Watch)
    if watch is not None:
        watch.renew()


def _one(connection: sa.Connection) -> None:
    connection.execute(sa.select(sa.literal(1))).scalar_one()
