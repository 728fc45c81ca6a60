"""Statements over many rows: compiled once, since SQLAlchemy's work per row is most of what a batch costs."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import sqlalchemy as sa

from proxy.store.tables import Id, Packed

PRUNED_AT_ONCE = 500


def run_many(connection: sa.Connection, statement: sa.Insert | sa.Update, rows: Sequence[Mapping[str, object]]) -> None:
    """Execute ``statement`` once a row. All rows have the same keys, and values that the driver takes as they are."""
    if not rows:
        return
    text, order, fixed, kept = _compiled(statement, connection.dialect, tuple(rows[0]))
    if order is None:
        connection.execute(statement, list(rows))
        return
    if kept:
        dialect = connection.dialect
        rows = [
            {**row, **{name: each.process_bind_param(row[name], dialect) for name, each in kept.items() if name in row}}
            for row in rows
        ]
    connection.exec_driver_sql(
        text, [tuple(row[name] if name in row else fixed[name] for name in order) for row in rows]
    )


def prune(connection: sa.Connection, key: sa.Column[Any], before: float) -> int:
    """Delete some rows from before ``before``, by tenant and ``key``; how many, 0 when none is left."""
    table = key.table
    old = sa.select(table.c.tenant, key).where(table.c.at < before).limit(PRUNED_AT_ONCE)
    rows = connection.execute(old).all()
    for tenant in {row.tenant for row in rows}:
        keys = [found for of, found in rows if of == tenant]
        connection.execute(sa.delete(table).where(table.c.tenant == tenant, key.in_(keys)))
    return len(rows)


@lru_cache(maxsize=64)
def _compiled(
    statement: sa.Insert | sa.Update, dialect: sa.Dialect, keys: tuple[str, ...]
) -> tuple[str, tuple[str, ...] | None, Mapping[str, object], Mapping[str, Id | Packed]]:
    """The SQL text, the order of its parameters (None where the driver has none), those with a fixed value, and types.

    The types are of the parameters that are not stored as they are given.
    """
    compiled = statement.compile(dialect=dialect, column_keys=list(keys) if isinstance(statement, sa.Insert) else None)
    order = tuple(compiled.positiontup) if compiled.positiontup else None
    kept = {name: bind.type for name, bind in compiled.binds.items() if isinstance(bind.type, Id | Packed)}
    return str(compiled), order, dict(compiled.params), kept
