"""What the management API tells of usage: which key took how many tokens and dollars."""

from collections.abc import Mapping, Sequence
from typing import get_args

from proxy.routes.pages import listed, place_in
from proxy.routes.question import Answer, Question
from proxy.store.exchanges import ADDED, By
from proxy.store.records import UsageRow

DAYS = 30
DAY = 86_400.0
KINDS: tuple[By, ...] = get_args(By)
DIGITS = 6


async def usage(question: Question) -> Answer:
    """What requests took since a moment (30 days ago), by key and ``by`` model, policy, day or conversation.

    The most forwarded tokens come first; a caller sees its own, the operator every key's.
    """
    limit, by = question.limit(), question.word("by", KINDS)
    since = question.since()
    since = question.runtime.planner.clock() - DAYS * DAY if since is None else since
    place = place_in(question.query.get("cursor"), int)
    start = 0 if place is None else max(0, int(place[0]))
    rows = await question.store.usage(question.tenant, since=since, by=by)
    numbered = list(enumerate(rows))[start : start + limit + 1]
    names = question.runtime.keyring.names
    return listed(
        numbered,
        limit,
        lambda each: usage_json(each[1], by=by, names=names),
        lambda each: (each[0] + 1,),
        since=since,
        by=by,
        total=total_json(rows),
    )


def usage_json(row: UsageRow, *, by: By | None, names: Mapping[str, str]) -> dict[str, object]:
    """What one key took, or one part of it: ``key`` is its name, null where it has none, ``group`` the part."""
    whose = {"tenant": row.tenant, "key": names.get(row.tenant), "group": row.group if by is not None else None}
    return {**whose, **_figures([row]), "first": row.first, "last": row.last}


def total_json(rows: Sequence[UsageRow]) -> dict[str, object]:
    """All rows together."""
    return _figures(rows)


def _figures(rows: Sequence[UsageRow]) -> dict[str, object]:
    """Sums of rows; dollars are null where no request has a price."""
    figures: dict[str, object] = {name: sum(getattr(row, name) for row in rows) for name in ADDED}
    priced, before, after = (sum(getattr(r, n) for r in rows) for n in ("priced", "tokens_before", "tokens_after"))
    figures["tokens_saved"] = before - after
    for name in ("cost", "cost_saved"):
        figures[name] = round(sum(getattr(row, name) for row in rows), DIGITS) if priced else None
    figures["summarizer_cost"] = round(sum(row.summarizer_cost for row in rows), DIGITS)
    return figures
