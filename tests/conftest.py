"""Settings for every test: examples are the same in every run, and no example is timed."""

import ast
import asyncio
import contextlib
import functools
import gc
import importlib
import os
import ssl
import sys
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, settings
from sqlalchemy.util import LRUCache

from proxy.cli.serve import COLLECT_AFTER
from proxy.models import facts
from proxy.store import schema, sqlite
from proxy.telemetry.process import collect_seldom
from proxy.wire import counting
from tests.forked import built_once, forked_processes
from tests.postgres import Missing, Postgres, postgres_server
from tests.profile import SOAK, each_once, soak, tried

SLOW_FOLDERS = frozenset({"browser", "real"})
SLOW_FIXTURES = frozenset({"postgres", "postgres_url"})

settings.register_profile(
    "weir",
    derandomize=True,
    deadline=None,
    max_examples=tried(25, 100),
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("weir")


def pytest_xdist_auto_num_workers() -> int:
    """One process more than there are cores, four at most: a test often waits for a process that it has started."""
    return min(4, len(os.sched_getaffinity(0)) + 1 if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Each worker imports another part of the tests first: what pytest has rewritten of it, the others read.

    To rewrite assertions is two thirds of what a fresh clone's first collection takes.
    """
    gc.set_threshold(COLLECT_AFTER)
    worker, roots = getattr(session.config, "workerinput", None), [Path(each) for each in session.config.args]
    if worker is None or sys.dont_write_bytecode or not all(each.is_dir() for each in roots):
        return
    top = Path(__file__).parents[1]
    names = sorted(".".join(path.relative_to(top).with_suffix("").parts) for each in roots for path in _tests_in(each))
    for name in names[int(worker["workerid"].removeprefix("gw")) :: worker["workercount"]]:
        with contextlib.suppress(Exception):  # what is wrong with it the collection says
            importlib.import_module(name)


def _tests_in(folder: Path) -> Iterator[Path]:
    return folder.resolve().rglob("test_*.py")


def pytest_collection_finish() -> None:
    """What was imported and collected stays: look for garbage as seldom as a served Weir, and never in that."""
    gc.collect()
    collect_seldom(COLLECT_AFTER)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Those that wait longest, or for something real, come first: no worker is left alone with them at the end."""
    items.sort(key=lambda item: [item.get_closest_marker(name) is None for name in ("waits", "real")])
    for item in items:
        if isinstance(item, pytest.Function) and _is_slow(item):
            item.add_marker(pytest.mark.slow)
    forms: dict[object, list[pytest.Function]] = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker(each_once.name):
            forms[item.parent, item.originalname].append(item)
    for each in forms.values():
        for item in [] if SOAK else _beyond_each_once([form for form in each if soak.mark not in form.own_markers]):
            item.add_marker(soak)


def _is_slow(item: pytest.Function) -> bool:
    """Whether it needs what a newcomer may not have: PostgreSQL, a browser, clients from registries."""
    folder = item.path.relative_to(Path(__file__).parent).parts[0]
    shared = getattr(item, "callspec", None) is not None and item.callspec.params.get("deployment") == 2
    return folder in SLOW_FOLDERS or shared or not SLOW_FIXTURES.isdisjoint(item.fixturenames)


def _beyond_each_once(forms: list[pytest.Function]) -> Iterator[pytest.Function]:
    """Those whose parameters have all been met with before."""
    met: set[tuple[int, str]] = set()
    left = {item: set(enumerate(item.callspec._idlist)) for item in forms}
    while left:
        chosen = max(left, key=lambda item: len(left[item] - met))
        if left[chosen] <= met:
            yield from left
            return
        met |= left.pop(chosen)


@pytest.fixture(scope="session", autouse=True)
def authorities_read_once() -> Iterator[None]:
    """One TLS context for all clients that name none: to read the authorities' certificates costs 30 ms each time."""
    with pytest.MonkeyPatch.context() as patch:
        for library in ("httpx", "httpx2"):  # the SDKs have either
            with contextlib.suppress(ImportError):
                make = importlib.import_module(library).create_ssl_context
                patch.setattr(f"{library}._transports.default.create_ssl_context", _made_once(make))
        yield


def _made_once(make: Callable[..., ssl.SSLContext]) -> Callable[..., ssl.SSLContext]:
    @functools.cache
    def made(trust_env: bool, *_: str | None) -> ssl.SSLContext:
        return make(trust_env=trust_env)

    def context(verify: Any = True, cert: Any = None, trust_env: bool = True) -> ssl.SSLContext:
        if verify is not True or cert is not None:
            return make(verify, cert, trust_env)
        return made(trust_env, os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR"))

    return context


@pytest.fixture(scope="session", autouse=True)
def clients_are_patient() -> Iterator[None]:
    """A client that names no time waits a minute for an answer, not five seconds: a busy machine is no fault."""
    with pytest.MonkeyPatch.context() as patch:
        for what in ("connect", "read", "write", "pool"):
            patch.setattr(f"httpx._config.DEFAULT_TIMEOUT_CONFIG.{what}", 60.0)
        yield


@pytest.fixture(scope="session", autouse=True)
def histories_go_up_as_they_are() -> Iterator[None]:
    """What is JSON already an SDK does not compare with each type that it might be: nine tenths of a long test's time."""

    def quick(transform: Any) -> Any:
        @functools.wraps(transform)
        async def transformed(data: Any, expected_type: object) -> Any:
            kept = {name: data[name] for name in ("input", "messages") if name in data and _is_json(data[name])}
            made = await transform({**data, **dict.fromkeys(kept, ())}, expected_type)
            return {name: kept.get(name, value) for name, value in made.items()}

        return transformed

    with pytest.MonkeyPatch.context() as patch:
        for sdk in ("openai", "anthropic"):
            if (module := sys.modules.get(f"{sdk}._utils._transform")) is not None:
                patch.setattr(module, "async_transform", quick(module.async_transform))
        yield


def _is_json(value: object) -> bool:
    if isinstance(value, dict):
        return all(map(_is_json, value.values()))
    return (
        all(map(_is_json, value)) if isinstance(value, list) else value is None or isinstance(value, str | int | float)
    )


@pytest.fixture(scope="session", autouse=True)
def models_read_once() -> Iterator[None]:
    """The table of models that litellm brings is read once in each of its states: every Weir that starts needs it."""
    load = facts.ModelRegistry.load

    @functools.cache
    def read(path: Path, _changed: int) -> facts.ModelRegistry:
        registry = facts.ModelRegistry(table=path)
        load(registry)
        return registry

    def copied(registry: facts.ModelRegistry) -> int:
        path = registry._path or facts.table_path()
        if registry._table is None and path is not None and path.is_file():
            of_path = read(path, path.stat().st_mtime_ns)
            registry._table, registry._bare = of_path._table, of_path._bare
        return load(registry)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(facts.ModelRegistry, "load", copied)
        yield


@pytest.fixture(scope="session", autouse=True)
def vocabularies_read_once() -> Iterator[None]:
    """A vocabulary of the same places is read once: each tokenizer of its own would take half a second of a core."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(counting, "_build", built_once(counting._build))
        yield


@pytest.fixture(scope="session", autouse=True)
def parsed_in_one_go() -> Iterator[None]:
    """No collection within ``ast.parse``: below Python 3.11.8 it fails where another parse begins meanwhile.

    One begins where what is collected has a traceback written, such as a task whose error nobody took.
    """

    def quietly(parse: Any) -> Any:
        @functools.wraps(parse)
        def parsed(*args: Any, **named: Any) -> Any:
            collects = gc.isenabled()
            gc.disable()
            try:
                return parse(*args, **named)
            finally:
                if collects:
                    gc.enable()

        return parsed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ast, "parse", quietly(ast.parse))
        yield


class _Compiled(LRUCache[Any, Any]):
    """Statements as SQL, for all engines whose dialects say the same."""

    def get(self, key: Any, default: Any = None) -> Any:
        return super().get(self._of_all(key), default)

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(self._of_all(key), value)

    def _of_all(self, key: Any) -> Any:
        return (_says(key[0]), *key[1:])


def _says(dialect: sa.Dialect) -> tuple[object, ...]:
    return (type(dialect), dialect.server_version_info, dialect.paramstyle)


@pytest.fixture(scope="session", autouse=True)
def statements_compiled_once() -> Iterator[None]:
    """Each store has an engine of its own, and would compile every statement anew."""
    compiled = _Compiled(5_000)
    shared = property(lambda _: compiled, lambda *_: None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sa.Engine, "_compiled_cache", shared, raising=False)
        yield


class _Sooner:
    """``asyncio``, of which nobody sleeps long."""

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(min(seconds, 0.02))


@pytest.fixture(scope="session", autouse=True)
def simulators_stop_at_once() -> Iterator[None]:
    """Uvicorn gives open connections a tenth of a second when it stops, and looks as often: suites stop thousands."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("uvicorn.server.asyncio", _Sooner())
        yield


@pytest.fixture(scope="session", autouse=True)
def processes_are_forked() -> Iterator[None]:
    """A ``python -m proxy`` that a test starts is forked from one that has imported everything."""
    with forked_processes():
        yield


@pytest.fixture(scope="session", autouse=True)
def schema_made_once() -> Iterator[None]:
    """An empty SQLite database gets the schema that was made in the first one: suites open thousands."""
    made: list[tuple[str, tuple[Any, ...]]] = []
    ensure = schema.ensure

    @functools.wraps(ensure)
    def copied(connection: sa.Connection) -> None:
        is_empty = connection.dialect.name == "sqlite" and schema.known(connection) is None
        if is_empty and made:
            for statement, values in made:
                connection.exec_driver_sql(statement, values)
            return
        ensure(connection)
        if is_empty:
            made.extend(_whole(connection))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schema, "ensure", copied)
        patch.setattr(sqlite, "ensure", copied)
        yield


def _whole(connection: sa.Connection) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """What makes the same tables, indexes and triggers with the same rows; SQLite makes its own by itself."""
    own = "name NOT LIKE 'sqlite!_%' ESCAPE '!'"
    for (statement,) in connection.exec_driver_sql(
        f"SELECT sql FROM sqlite_master WHERE sql IS NOT NULL AND {own} AND "
        "name NOT IN (SELECT name FROM pragma_table_list WHERE type = 'shadow') ORDER BY rowid"
    ):
        yield statement, ()
    for (table,) in connection.exec_driver_sql(f"SELECT name FROM pragma_table_list WHERE type = 'table' AND {own}"):
        for row in connection.exec_driver_sql(f"SELECT * FROM {table}"):
            yield f"INSERT INTO {table} VALUES ({', '.join('?' * len(row))})", tuple(row)


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """A PostgreSQL server for the whole session."""
    try:
        with postgres_server() as server:
            yield server
    except Missing as reason:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(reason))


@pytest.fixture
async def postgres_url(postgres: Postgres) -> AsyncIterator[str]:
    """The URL of an empty database for one test."""
    name = await postgres.database()
    yield postgres.url(name)
    await postgres.drop(name)
