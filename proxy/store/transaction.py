"""Transactions: synchronous functions over SQLAlchemy Core that a database runs whole, from BEGIN to COMMIT.

A function of the store takes a :class:`Transaction` first, so that they call each other within one. Before that
stand what a database's errors mean, the statements that are executed, and what lies between a record and its row.
"""

import importlib
import re
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import lru_cache
from itertools import chain, islice
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar, cast

import sqlalchemy as sa
from sqlalchemy import exc

from proxy.store.packing import Id, StoredText
from proxy.store.records import CorruptStore, StoreError, StoreUnavailable, is_disconnect

R = TypeVar("R")
T = TypeVar("T")
Content = Literal["full", "digest"]
Damage = Callable[[str, str, str], None]
"""Told of a row that is not what was written: its kind, tenant and key."""
Place = Sequence[str | int | float]
"""Where a page ended: what its last row has in the columns that the list is ordered by."""
Statement = sa.Insert | sa.Update | sa.Delete
Columns = Mapping[str, Sequence[object]]
Taking = Callable[[Columns], list[tuple[object, ...]]]
Asking = Callable[[str, Sequence[str]], tuple[object, ...]]
Rows = sa.Select[*tuple[Any, ...]]
AT_ONCE = 500
_VALUES = re.compile(r"(?<= VALUES )\((?:\?, )*\?\)")
_SIZES = (128, 32, 8, 2, 1)
"""How many rows one INSERT has: few lengths, so that each is prepared once."""
ASIDE = "aside"
"""Where a connection whose transactions run on the event loop has what runs work apart from it."""
UNAVAILABLE = {
    sqlite3.SQLITE_BUSY: ("locked", "the database is locked by another connection"),
    sqlite3.SQLITE_LOCKED: ("locked", "the database is locked by another connection"),
    sqlite3.SQLITE_FULL: ("full", "the disk is full: make room first, for deleting takes some too"),
    sqlite3.SQLITE_READONLY: ("read_only", "the database is read-only"),
    sqlite3.SQLITE_PERM: ("read_only", "the database may not be written"),
    sqlite3.SQLITE_IOERR: ("io", "the disk failed while reading or writing the database"),
    sqlite3.SQLITE_CANTOPEN: ("open", "the database file cannot be opened"),
    sqlite3.SQLITE_NOMEM: ("memory", "out of memory"),
    sqlite3.SQLITE_INTERRUPT: ("interrupted", "the statement was interrupted"),
}
CORRUPT = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}
SERVER = {
    "25006": ("read_only", "the server is a standby, or read-only"),
    "42501": ("refused", "the user of the database lacks a right"),
    "53100": ("full", "the server's disk is full"),
    "53300": ("busy", "the server has no free connection"),
    "55P03": ("locked", "the database is locked by another connection"),
    "57014": ("slow", "a statement took longer than the store's timeout"),
}
"""By SQLSTATE: https://www.postgresql.org/docs/current/errcodes-appendix.html"""
ENTRANCE = ("08", "28", "3D")
"""Classes of SQLSTATE in which a server says why it lets nobody in; its words name user and database, no content."""
LOST = ("57P", "25P03")


def translate(error: Exception) -> StoreError:
    cause = error.orig if isinstance(error, exc.DBAPIError) and error.orig is not None else error
    code = getattr(cause, "sqlite_errorcode", None)
    if code is not None:
        primary = code & 0xFF
        if primary in CORRUPT:
            return CorruptStore("the file is not a database, or it is damaged", reason="corrupt")
        if primary in UNAVAILABLE:
            reason, words = UNAVAILABLE[primary]
            return StoreUnavailable(words, reason=reason)
    state = getattr(cause, "sqlstate", None) or ""
    if state in SERVER:
        reason, words = SERVER[state]
        return StoreUnavailable(words, reason=reason)
    if state.startswith(ENTRANCE):
        return StoreUnavailable(f"the database server says: {_plain(cause)}", reason="unreachable")
    if isinstance(error, exc.TimeoutError):
        return StoreUnavailable("no free connection to the database", reason="busy")
    if isinstance(cause, TimeoutError):
        return StoreUnavailable("the database does not answer", reason="unreachable")
    if isinstance(cause, ConnectionError) and "SSL" in str(cause):
        return StoreUnavailable("the database takes no encrypted connection, as sslmode wants it", reason="unreachable")
    if isinstance(cause, OSError):
        return StoreUnavailable(f"the database cannot be reached: {_plain(cause)}", reason="unreachable")
    if is_disconnect(error) or state.startswith(LOST) or _is_drivers(error, cause):
        return StoreUnavailable(f"the database cannot be reached ({type(cause).__name__})", reason="unreachable")
    return StoreError(f"the database refused a statement ({type(cause).__name__})", reason="refused")


def _is_drivers(error: Exception, cause: BaseException) -> bool:
    kinds = exc.OperationalError | exc.InterfaceError | exc.InternalError
    return isinstance(error, kinds) and not isinstance(cause.__cause__, ValueError)


def _plain(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]


class Upsert(dict[str, sa.Insert]):
    """An INSERT for every dialect by name, made when it is asked for: the other dialect is imported by nobody."""

    def __init__(self, make: Callable[[Callable[[sa.TableClause], Any]], sa.Insert]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, dialect: str) -> sa.Insert:
        made = self[dialect] = self._make(importlib.import_module(f"sqlalchemy.dialects.{dialect}").insert)
        return made


def keep_first(table: sa.Table) -> Upsert:
    return Upsert(lambda insert: insert(table).on_conflict_do_nothing())


def overwriting(
    table: sa.Table, changes: Callable[[Any, Any], dict[str, Any]], taken: Callable[[str], Any] | None = None
) -> Upsert:
    """An INSERT, of rows or what a query has ``taken``, that changes a row which is there already."""

    def made(insert: Callable[[sa.Table], Any]) -> sa.Insert:
        statement = insert(table)
        if taken is not None:
            statement = statement.from_select(list(table.c.keys()), taken(statement.stringify_dialect))
        key, new = list(table.primary_key.columns), statement.excluded
        overwritten: sa.Insert = statement.on_conflict_do_update(index_elements=key, set_=changes(new, table.c))
        return overwritten

    return Upsert(made)


def keep_last(table: sa.Table, *names: str) -> Upsert:
    """An INSERT that overwrites some columns of a row which is there already, without any named all but its key."""
    names = names or tuple(column.key for column in table.c if not column.primary_key)
    return overwriting(table, lambda new, _: {name: new[name] for name in names})


def larger(one: sa.ColumnElement[Any], other: sa.ColumnElement[Any]) -> sa.ColumnElement[Any]:
    return sa.case((one > other, one), else_=other)


def of(table: sa.FromClause, *names: str) -> sa.ColumnElement[bool]:
    """That columns are what a statement is given: parameters ``of_NAME``, for those of an UPDATE would be set else."""
    return sa.and_(*(table.c[name] == sa.bindparam(f"of_{name}") for name in names))


def owned(table: sa.FromClause, tenant: str | None, **values: object) -> sa.ColumnElement[bool]:
    """That rows are a tenant's, or with None anybody's, and have these values: of a list or a query, one of them."""
    whose = sa.true() if tenant is None else table.c.tenant == tenant
    return sa.and_(whose, *(_is(table.c[name], value) for name, value in values.items()))


def _is(column: sa.ColumnElement[Any], value: Any) -> sa.ColumnElement[bool]:
    return column.in_(value) if isinstance(value, list | sa.Select) else column == value


def among(column: sa.Column[Any]) -> sa.ColumnElement[bool]:
    """That a column is one of the ``ids`` that :meth:`Transaction.ask` is given."""
    return sa.and_(of(column.table, "tenant"), column.in_(sa.bindparam("ids", expanding=True)))


def same(one: sa.FromClause, other: sa.FromClause, *names: str) -> sa.ColumnElement[bool]:
    return sa.and_(*(one.c[name] == other.c[name] for name in names))


def total(value: sa.ColumnElement[Any]) -> sa.ColumnElement[Any]:
    return sa.func.coalesce(sa.func.sum(value), 0)


def stored(table: sa.Table, record: Any, **more: object) -> dict[str, Any]:
    keys, values = _taking(table, record.__class__)
    return {**dict(zip(keys, values(record), strict=True)), **more}


def columns_of(table: sa.Table, records: Sequence[Any]) -> dict[str, Sequence[Any]]:
    """The columns of records of one kind, of which there is at least one."""
    keys, values = _taking(table, records[0].__class__)
    return dict(zip(keys, zip(*map(values, records), strict=True), strict=True))


def recorded(kind: Callable[..., R], table: sa.Table, row: sa.Row[*tuple[Any, ...]], **more: object) -> R:
    found = row._mapping  # noqa: SLF001 - SQLAlchemy's public name
    return kind(**{key: found[name] for key, name in _shared(table, kind) if key not in more}, **more)


@lru_cache(maxsize=64)
def _taking(table: sa.Table, kind: Any) -> tuple[tuple[str, ...], Callable[[object], Sequence[Any]]]:
    keys = tuple(key for key, _ in _shared(table, kind))
    return keys, attrgetter(*keys)


@lru_cache(maxsize=64)
def _shared(table: sa.Table, kind: Any) -> tuple[tuple[str, str], ...]:
    names = getattr(kind, "_fields", None) or getattr(kind, "__struct_fields__", None) or [f.name for f in fields(kind)]
    return tuple((key, column.name) for key, column in table.c.items() if key in names)


class Database(Protocol):
    """Where transactions run.

    ``journal`` is ``wal``, ``delete``, ``memory`` or ``server``; ``notices`` is what an operator must read at start.
    Others may write the same conversations where it is ``shared``.
    """

    journal: str
    notices: tuple[str, ...]
    shared: bool

    @property
    def writable(self) -> bool: ...

    def load(self) -> dict[str, int]: ...

    async def ping(self) -> None: ...

    async def read(self, work: Callable[[sa.Connection], T]) -> T: ...

    async def write(self, work: Callable[[sa.Connection], T]) -> T: ...

    async def tend(self, *, force: bool = False) -> bool:  # noqa: ARG002 - a server looks after itself
        return False

    async def shrink(self) -> bool:
        return False

    async def backup(self, path: Path) -> None: ...

    async def close(self) -> None: ...


class Transaction:
    def __init__(self, connection: sa.Connection, *, full: bool, damage: Damage) -> None:
        self.connection = connection
        self.dialect = connection.dialect.name
        self.execute = connection.execute
        self.scalar = connection.scalar
        self.scalars = connection.scalars
        self.full = full
        self.damage = damage
        self._driver: Any = connection.connection.driver_connection
        self._apart: Callable[[Callable[[], object]], object] | None = connection.info.get(ASIDE)
        self.frames: dict[int, dict[str, list[bytes]]] = {}

    def many(self, statement: Statement | Upsert, rows: Sequence[Mapping[str, object]]) -> None:
        """Execute a statement once a row; all rows have the same keys."""
        if rows:
            names = tuple(rows[0])
            take = itemgetter(*names) if len(names) > 1 else lambda row: (row[names[0]],)
            self.columns(statement, dict(zip(names, zip(*map(take, rows), strict=True), strict=True)))

    def columns(self, statement: Statement | Upsert, columns: Columns) -> None:
        """The same of rows by their columns, of which there may be many: no row has to be a mapping first.

        It is compiled once: SQLAlchemy's work per row is most of what a batch costs.
        """
        if not isinstance(statement, Statement):
            statement = statement[self.dialect]
        begin, one, end, values = _compiled(statement, self.connection.dialect, tuple(columns))
        given = values(columns)
        if not one:
            if given:
                self.connection.exec_driver_sql(begin, given)
            return
        for size in _SIZES:  # sqlite3 lets go of the interpreter for each execution, and waits for it after each
            while len(given) >= size:
                some, given = given[:size], given[size:]
                self._execute(begin + ", ".join([one] * size) + end, tuple(chain.from_iterable(some)))

    def ask(self, statement: sa.Select[Any] | Upsert, tenant: str, ids: Iterable[str]) -> list[tuple[Any, ...]]:
        """What a statement that is about some of a tenant's gives: whose condition has :func:`among`.

        It is made for few lengths, so that each is compiled and prepared once.
        """
        asked = statement[self.dialect] if isinstance(statement, Upsert) else statement
        dialect, found = self.connection.dialect, list[tuple[Any, ...]]()
        for some in chunks(ids):
            size = 1 << (len(some) - 1).bit_length()
            text, values = _asking(asked, dialect, size)
            found += self._execute(text, values(tenant, some + some[-1:] * (size - len(some))))
        for at, column in enumerate(asked.selected_columns if isinstance(asked, sa.Select) else ()):
            if isinstance(column.type, Id):
                found = [(*row[:at], column.type.shown(row[at]), *row[at + 1 :]) for row in found]
        return found

    def ask_each(
        self, statement: sa.Select[Any] | Upsert, keys: Iterable[tuple[str, str]]
    ) -> list[tuple[str, tuple[Any, ...]]]:
        """The same about ids of several tenants: each row with whose it is, tenants and ids in their order."""
        ids: dict[str, list[str]] = {}
        for tenant, its in sorted(set(keys)):
            ids.setdefault(tenant, []).append(its)
        return [(tenant, row) for tenant, some in ids.items() for row in self.ask(statement, tenant, some)]

    def _execute(self, text: str, values: tuple[object, ...]) -> Sequence[Any]:
        if self.dialect == "sqlite":
            return cast("list[Any]", self._driver.execute(text, values).fetchall())
        found = self.connection.exec_driver_sql(text, values)
        return found.all() if found.returns_rows else ()

    def aside(self, work: Callable[[], T]) -> T:
        """What ``work`` returns, which takes long and asks no database: off the event loop, where this runs on it."""
        return work() if self._apart is None else cast("T", self._apart(work))

    def is_new(self, statement: Upsert, row: Mapping[str, object]) -> bool:
        return self.execute(statement[self.dialect], row).rowcount == 1


def _bound(kind: object, given: Sequence[Any], dialect: sa.Dialect) -> Sequence[Any]:
    bind = kind.binding(dialect) if isinstance(kind, StoredText) else None
    if bind is None:
        return given
    return [None if each is None else bind(each) for each in given] if None in given else [*map(bind, given)]


@lru_cache(maxsize=128)
def _asking(statement: sa.Select[Any] | sa.Insert, dialect: sa.Dialect, size: int) -> tuple[str, Asking]:
    compiled = statement.compile(dialect=dialect)
    expanded = compiled.construct_expanded_state({"of_tenant": "", "ids": [""] * size})
    names, kinds = expanded.parameter_expansion["ids"], {name: each.type for name, each in compiled.binds.items()}
    fixed = {name: _bound(kinds.get(name), [value], dialect)[0] for name, value in expanded.parameters.items()}
    take = itemgetter(*(expanded.positiontup or ()))

    def values(tenant: str, ids: Sequence[str]) -> tuple[object, ...]:
        (owner,) = _bound(kinds["of_tenant"], [tenant], dialect)
        own = dict(zip(names, _bound(kinds["ids"], ids, dialect), strict=True))
        return cast("tuple[object, ...]", take({**fixed, **own, "of_tenant": owner}))

    return expanded.statement, values


@lru_cache(maxsize=64)
def _compiled(statement: Statement, dialect: sa.Dialect, keys: tuple[str, ...]) -> tuple[str, str, str, Taking]:
    """What stands before one row's values, these, and what stands behind them: all before where it takes no more."""
    compiled = statement.compile(dialect=dialect, column_keys=list(keys) if isinstance(statement, sa.Insert) else None)
    text, order, found = str(compiled), compiled.positiontup or [], None
    kinds = {name: each.type for name, each in compiled.binds.items() if name in keys}
    fixed = {name: compiled.params[name] for name in order if name not in keys}

    def values(columns: Columns) -> list[tuple[object, ...]]:
        size = len(next(iter(columns.values())))
        given = (_bound(kinds.get(n), columns[n], dialect) if n in columns else (fixed[n],) * size for n in order)
        return [*zip(*given, strict=True)]

    if dialect.name == "sqlite":  # PostgreSQL takes no row twice in one INSERT
        found = _VALUES.search(text)
    if found is None or found.group().count("?") != len(order):
        return text, "", "", values
    return text[: found.start()], found.group(), text[found.end() :], values


def chunks(items: Iterable[T]) -> Iterator[list[T]]:
    iterator = iter(items)
    while chunk := list(islice(iterator, AT_ONCE)):
        yield chunk


def ordered(
    query: Rows, order: Sequence[tuple[sa.ColumnElement[Any], bool]], *, after: Place | None, limit: int
) -> Rows:
    if after is not None:
        query = query.where(_behind(order, after))
    by = [column.desc() if is_descending else column.asc() for column, is_descending in order]
    return query.order_by(*by).limit(limit)


def _behind(order: Sequence[tuple[sa.ColumnElement[Any], bool]], after: Place) -> sa.ColumnElement[bool]:
    choices: list[sa.ColumnElement[bool]] = []
    for at, ((column, is_descending), value) in enumerate(zip(order, after, strict=True)):
        equal = [other == known for (other, _), known in zip(order[:at], after, strict=False)]
        choices.append(sa.and_(*equal, column < value if is_descending else column > value))
    return sa.or_(*choices)
