"""Transactions: synchronous functions over SQLAlchemy Core that a database runs whole, from BEGIN to COMMIT.

A function of the store takes a :class:`Transaction` first. :func:`reading` and :func:`writing` make methods of a store
of such functions, which are told to ``took`` under the name that is given; they call each other within one transaction.
"""

import re
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import lru_cache, wraps
from itertools import chain, islice
from operator import itemgetter
from pathlib import Path
from typing import Any, Concatenate, Literal, ParamSpec, Protocol, TypeVar, cast

import sqlalchemy as sa

from proxy.store.records import StoreError
from proxy.store.schema import Id, StoredText, Upsert, of, originals

P = ParamSpec("P")
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
QUARANTINE = sa.update(originals).where(of(originals, "tenant", "ref")).values(quarantined=True)
AT_ONCE = 500
_VALUES = re.compile(r"(?<= VALUES )\((?:\?, )*\?\)")
_SIZES = (128, 32, 8, 2, 1)
"""How many rows one INSERT has: few lengths, so that each is prepared once."""
ASIDE = "aside"
"""Where a connection whose transactions run on the event loop has what runs work apart from it."""


class Database(Protocol):
    """Where transactions run.

    ``journal`` is ``wal``, ``delete``, ``memory`` or ``server``; ``notices`` is what an operator must read at start.
    Others may write the same conversations where it is ``shared``. ``opened`` counts how often another file was opened
    in the place of one that was gone, ``seed`` is what a new one is to begin with.
    """

    journal: str
    notices: tuple[str, ...]
    shared: bool
    opened: int = 0
    seed: Callable[[sa.Connection], None] | None = None

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
        self.frames: dict[int, dict[str, tuple[bytes, str]]] = {}

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
        """What a statement that is about some of a tenant's gives: whose condition has :func:`~schema.among`.

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


class Transactions:
    """A :class:`Database`, and what was found damaged in it.

    ``took`` is told operations that requests wait for, and the seconds of each.
    """

    took: Callable[[str, float], None] = staticmethod(lambda _name, _seconds: None)

    def __init__(self, database: Database, *, content: Content) -> None:
        self.journal = database.journal
        self.notices = database.notices
        self.shared = database.shared
        self.keeps_content = content == "full"
        self._database = database
        self._damaged: set[tuple[str, str, str]] = set()
        self._unmarked: set[tuple[str, str]] = set()

    @contextmanager
    def telling(self, name: str) -> Iterator[None]:
        begun = time.perf_counter()
        try:
            yield
        finally:
            self.took(name, time.perf_counter() - begun)

    async def _read(self, work: Callable[[Transaction], T]) -> T:
        found = await self._database.read(lambda c: work(Transaction(c, full=self.keeps_content, damage=self._damage)))
        if self._unmarked and self._database.writable:
            fresh, self._unmarked = self._unmarked, set()
            with suppress(StoreError):  # what was read is absent either way; the next read marks it
                await self._write(lambda tx: tx.many(QUARANTINE, [{"of_tenant": t, "of_ref": ref} for t, ref in fresh]))
        return found

    async def _write(self, work: Callable[[Transaction], T]) -> T:
        return await self._database.write(lambda c: work(Transaction(c, full=self.keeps_content, damage=self._damage)))

    def _damage(self, kind: str, tenant: str, key: str) -> None:
        self._damaged.add((kind, tenant, key))
        if kind == "original":
            self._unmarked.add((tenant, key))


def reading(
    work: Callable[Concatenate[Transaction, P], T], told: str = ""
) -> Callable[Concatenate[Transactions, P], Coroutine[Any, Any, T]]:
    return _method(work, told, Transactions._read)  # noqa: SLF001 - of this module


def writing(
    work: Callable[Concatenate[Transaction, P], T], told: str = ""
) -> Callable[Concatenate[Transactions, P], Coroutine[Any, Any, T]]:
    return _method(work, told, Transactions._write)  # noqa: SLF001 - of this module


def _method(
    work: Callable[Concatenate[Transaction, P], T],
    told: str,
    run: Callable[[Transactions, Callable[[Transaction], T]], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Transactions, P], Coroutine[Any, Any, T]]:

    @wraps(work)
    async def method(self: Transactions, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with self.telling(told) if told else nullcontext():
            return await run(self, lambda tx: work(tx, *args, **kwargs))

    return method


def chunks(items: Iterable[T], size: int = AT_ONCE) -> Iterator[list[T]]:
    iterator = iter(items)
    while chunk := list(islice(iterator, size)):
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
