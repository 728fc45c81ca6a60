"""A transaction as the functions of the store see it, and the conversions between a record and its
row.

A function of the store takes a :class:`Transaction` first, so that they call each other within one.
It is synchronous.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import lru_cache
from itertools import islice
from operator import attrgetter
from typing import Any, Literal, TypeVar

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import Insert, insert  # SQLite's dialect compiles them as well
from sqlalchemy.util import await_only

from proxy.store.packing import Packed

R = TypeVar("R")
T = TypeVar("T")
Content = Literal["full", "digest"]
Damage = Callable[[str, str, str], None]
"""Called for a row that is not what was written, with its kind, tenant and key."""
Place = Sequence[str | int | float]
"""Where a page ended: what its last row has in the columns that the list is ordered by."""
Rows = sa.Select[*tuple[Any, ...]]
AT_ONCE = 500


def keep_first(table: sa.TableClause) -> Insert:
    return insert(table).on_conflict_do_nothing()


def overwriting(
    table: sa.Table,
    changes: Callable[[Any, Any], dict[str, Any]],
    taken: sa.Select[Any] | None = None,
) -> Insert:
    """An INSERT, of rows or what a query has ``taken``, that changes a row which is there
    already.
    """
    statement = insert(table)
    if taken is not None:
        statement = statement.from_select(list(table.c.keys()), taken)
    values = changes(statement.excluded, table.c)
    return statement.on_conflict_do_update(
        index_elements=list(table.primary_key.columns), set_=values
    )


def keep_last(table: sa.Table, *names: str) -> Insert:
    """An INSERT that overwrites some columns of a row which is there already, without any named all
    but its key.
    """
    names = names or tuple(column.key for column in table.c if not column.primary_key)
    return overwriting(table, lambda new, _: {name: new[name] for name in names})


def larger(one: sa.ColumnElement[Any], other: sa.ColumnElement[Any]) -> sa.ColumnElement[Any]:
    return sa.case((one > other, one), else_=other)


def of(table: sa.FromClause, *names: str) -> sa.ColumnElement[bool]:
    """A condition that columns equal a statement's parameters, named ``of_NAME``, because those of
    an UPDATE would otherwise be set.
    """
    return sa.and_(*(table.c[name] == sa.bindparam(f"of_{name}") for name in names))


def owned(table: sa.FromClause, tenant: str | None, **values: object) -> sa.ColumnElement[bool]:
    """A condition that rows belong to a tenant (None: to any) and have these values; for a list or
    a query, one of them.
    """
    whose = sa.true() if tenant is None else table.c.tenant == tenant
    return sa.and_(whose, *(_is(table.c[name], value) for name, value in values.items()))


def _is(column: sa.ColumnElement[Any], value: Any) -> sa.ColumnElement[bool]:
    return column.in_(value) if isinstance(value, list | sa.Select) else column == value


def among(column: sa.Column[Any]) -> sa.ColumnElement[bool]:
    """A condition that a column is one of the ``ids`` that :meth:`Transaction.ask` is given."""
    return sa.and_(of(column.table, "tenant"), column.in_(sa.bindparam("ids", expanding=True)))


def same(one: sa.FromClause, other: sa.FromClause, *names: str) -> sa.ColumnElement[bool]:
    return sa.and_(*(one.c[name] == other.c[name] for name in names))


def total(value: sa.ColumnElement[Any]) -> sa.ColumnElement[Any]:
    return sa.func.coalesce(sa.func.sum(value), 0)


def stored(table: sa.Table, record: Any, **more: object) -> dict[str, Any]:
    """A row of what a record has of a table's columns."""
    names = _shared(table, record.__class__)
    return dict(zip(names, attrgetter(*names)(record), strict=True)) | more


def recorded(
    kind: Callable[..., R], table: sa.Table, row: sa.Row[*tuple[Any, ...]], **more: object
) -> R:
    found = row._mapping  # noqa: SLF001 - SQLAlchemy's public name
    return kind(
        **{key: found[table.c[key].name] for key in _shared(table, kind) if key not in more}, **more
    )


@lru_cache(maxsize=64)
def _shared(table: sa.Table, kind: Any) -> tuple[str, ...]:
    names = (
        getattr(kind, "_fields", None)
        or getattr(kind, "__struct_fields__", None)
        or [f.name for f in fields(kind)]
    )
    return tuple(key for key in table.c.keys() if key in names)  # noqa: SIM118 - iterating gives the columns


ASIDE = 32 << 10  # bytes: work on fewer takes less time than a thread's turn


class Transaction:
    """A connection within a transaction. ``full`` is whether content may be stored."""

    def __init__(self, connection: sa.Connection, *, full: bool, damage: Damage) -> None:
        self.connection = connection
        self.dialect = connection.dialect.name
        self.execute = connection.execute
        self.scalar = connection.scalar
        self.scalars = connection.scalars
        self.full = full
        self.damage = damage
        self.frames: dict[int, dict[str, Packed]] = {}

    def many(self, statement: sa.Executable, rows: Sequence[Mapping[str, object]]) -> None:
        """Execute a statement once for each row, all of which have the same keys."""
        if rows:
            self.execute(statement, rows)

    def ask(
        self, statement: sa.Executable, tenant: str, ids: Iterable[str]
    ) -> list[sa.Row[*tuple[Any, ...]]]:
        """The rows of a statement about some ids of a tenant's, whose condition has
        :func:`among`.
        """
        found: list[sa.Row[*tuple[Any, ...]]] = []
        for some in chunks(ids):
            result = self.execute(statement, {"of_tenant": tenant, "ids": some})
            found += result.all() if result.returns_rows else ()
        return found

    def ask_each(
        self, statement: sa.Executable, keys: Iterable[tuple[str, str]]
    ) -> list[tuple[str, sa.Row[*tuple[Any, ...]]]]:
        """The same about ids of several tenants: each row with its tenant, tenants and ids in their
        order.
        """
        ids: dict[str, list[str]] = {}
        for tenant, its in sorted(set(keys)):
            ids.setdefault(tenant, []).append(its)
        return [
            (tenant, row)
            for tenant, some in ids.items()
            for row in self.ask(statement, tenant, some)
        ]

    def aside(self, work: Callable[[], T], *, size: int = ASIDE) -> T:
        """The result of ``work``, which needs no database, off the event loop if ``size``, its
        bytes, is large.
        """
        return (
            await_only(asyncio.to_thread(work))
            if size >= ASIDE and self.dialect != "sqlite"
            else work()
        )

    def is_new(self, statement: Insert, row: Mapping[str, object]) -> bool:
        return self.execute(statement, row).rowcount == 1


def chunks(items: Iterable[T], size: int = AT_ONCE) -> Iterator[list[T]]:
    iterator = iter(items)
    while chunk := list(islice(iterator, size)):
        yield chunk


def ordered(
    query: Rows,
    order: Sequence[tuple[sa.ColumnElement[Any], bool]],
    *,
    after: Place | None,
    limit: int,
) -> Rows:
    if after is not None:
        query = query.where(_behind(order, after))
    by = [column.desc() if is_descending else column.asc() for column, is_descending in order]
    return query.order_by(*by).limit(limit)


def _behind(
    order: Sequence[tuple[sa.ColumnElement[Any], bool]], after: Place
) -> sa.ColumnElement[bool]:
    choices: list[sa.ColumnElement[bool]] = []
    for at, ((column, is_descending), value) in enumerate(zip(order, after, strict=True)):
        equal = [other == known for (other, _), known in zip(order[:at], after, strict=False)]
        choices.append(sa.and_(*equal, column < value if is_descending else column > value))
    return sa.or_(*choices)
