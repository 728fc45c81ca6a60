"""One statement over many rows, compiled once: SQLAlchemy's work per row is most of what a batch costs."""

from collections.abc import Mapping, Sequence
from functools import lru_cache

import sqlalchemy as sa


def run_many(connection: sa.Connection, statement: sa.Insert | sa.Update, rows: Sequence[Mapping[str, object]]) -> None:
    """Execute ``statement`` once a row. All rows have the same keys, and values that the driver takes as they are."""
    if not rows:
        return
    text, order, fixed = _compiled(statement, connection.dialect, tuple(rows[0]))
    if order is None:
        connection.execute(statement, list(rows))
        return
    connection.exec_driver_sql(
        text, [tuple(row[name] if name in row else fixed[name] for name in order) for row in rows]
    )


@lru_cache(maxsize=64)
def _compiled(
    statement: sa.Insert | sa.Update, dialect: sa.Dialect, keys: tuple[str, ...]
) -> tuple[str, tuple[str, ...] | None, Mapping[str, object]]:
    """The SQL text, the order of its parameters (None where the driver has none), and those with a fixed value."""
    compiled = statement.compile(dialect=dialect, column_keys=list(keys) if isinstance(statement, sa.Insert) else None)
    order = tuple(compiled.positiontup) if compiled.positiontup else None
    return str(compiled), order, dict(compiled.params)
