"""Lists in pages: ``limit`` is how many rows, ``cursor`` what the page before said comes next."""

import json
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable, Sequence
from typing import TypeVar

from proxy.errors import InvalidRequest
from proxy.routes.question import Answer, as_json
from proxy.store.transaction import Place

Row = TypeVar("Row")
LONGEST_CURSOR = 1_024
GREATEST = 2**53


def cursor_of(place: Place) -> str:
    """A place in a list as a word for the query string."""
    return urlsafe_b64encode(json.dumps(list(place), separators=(",", ":")).encode()).rstrip(b"=").decode()


def place_in(cursor: str | None, *kinds: type[str] | type[int] | type[float]) -> Place | None:
    """The place that a list of this kind gave as its cursor, None without one. Raises InvalidRequest for another."""
    if cursor is None:
        return None
    try:
        given = cursor[: LONGEST_CURSOR + 1].encode("ascii")
        place = json.loads(urlsafe_b64decode(given + b"=" * (-len(given) % 4)))
    except (ValueError, RecursionError):
        place = None
    if len(cursor) > LONGEST_CURSOR or not isinstance(place, list) or len(place) != len(kinds):
        raise _not_mine()
    return [_part(part, kind) for part, kind in zip(place, kinds, strict=True)]


def listed(
    rows: Sequence[Row],
    limit: int,
    show: Callable[[Row], object],
    place: Callable[[Row], Place],
    **more: object,
) -> Answer:
    """A page of ``rows``, of which there is one beyond ``limit`` where another page follows."""
    shown = rows[:limit]
    following = cursor_of(place(shown[-1])) if len(rows) > limit else None
    return as_json({**more, "data": [show(row) for row in shown], "next": following})


def part_of(rows: Sequence[Row], limit: int, after: Place | None, place: Callable[[Row], Place]) -> Sequence[Row]:
    """What :func:`listed` wants of a list that is there as a whole. Raises InvalidRequest for a place that is gone."""
    start = 0
    if after is not None:
        found = [at for at, row in enumerate(rows) if list(place(row)) == list(after)]
        if not found:
            raise gone()
        start = found[0] + 1
    return rows[start : start + limit + 1]


def gone() -> InvalidRequest:
    """The error of a cursor whose row is not in the list any more."""
    return InvalidRequest("What cursor points at is not in the list any more: begin again without it.", param="cursor")


def _part(given: object, kind: type[str] | type[int] | type[float]) -> str | int | float:
    if isinstance(given, str):
        is_right = kind is str and "\0" not in given and given.encode("utf-8", "replace").decode() == given
    elif isinstance(given, int | float) and not isinstance(given, bool):
        is_right = (kind is float or (kind is int and isinstance(given, int))) and abs(given) < GREATEST
    else:
        is_right = False
    if not is_right or not isinstance(given, str | int | float):
        raise _not_mine()
    return given


def _not_mine() -> InvalidRequest:
    return InvalidRequest("cursor must be the next of the page before, as it was given.", param="cursor")
