"""Going on in a list where the last page of it ended, whatever came in at its beginning meanwhile."""

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

Place = Sequence[str | int | float]
"""Where a page ended: what its last row has in the columns that the list is ordered by."""


def ordered(
    query: sa.Select[*tuple[Any, ...]],
    order: Sequence[tuple[sa.ColumnElement[Any], bool]],
    *,
    after: Place | None,
    limit: int,
) -> sa.Select[*tuple[Any, ...]]:
    """``limit`` rows of ``query`` by ``order`` (columns that no two rows share, and whether each is descending).

    ``after`` is the place that they come behind, None for the first page.
    """
    if after is not None:
        query = query.where(_behind(order, after))
    by = [column.desc() if is_descending else column.asc() for column, is_descending in order]
    return query.order_by(*by).limit(limit)


def _behind(order: Sequence[tuple[sa.ColumnElement[Any], bool]], after: Place) -> sa.ColumnElement[bool]:
    """Whether a row comes behind the place: beyond it in one column, and equal in all before that one."""
    choices: list[sa.ColumnElement[bool]] = []
    for at, ((column, is_descending), value) in enumerate(zip(order, after, strict=True)):
        equal = [other == known for (other, _), known in zip(order[:at], after, strict=False)]
        choices.append(sa.and_(*equal, column < value if is_descending else column > value))
    return sa.or_(*choices)
