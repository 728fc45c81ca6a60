"""What keys and teams have used of their budgets, and what requests in flight have reserved.

Used is what :mod:`proxy.store.usage` adds up by key, team and day. A reservation is deleted in the
transaction that stores its request's row, so that each request counts once: before as what it was
estimated to take, after as what it took. One whose process has died ends at ``expires``.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec
import sqlalchemy as sa

from proxy.store.schema import key_days, meta, reservations
from proxy.store.transaction import Transaction, chunks, keep_first, total

Scope = Literal["key", "team"]
LOCK = sa.select(
    sa.func.pg_advisory_xact_lock(sa.func.hashtextextended(sa.bindparam("scope", type_=sa.Text), 0))
)
ADD = keep_first(reservations)
SETTLE = sa.delete(reservations).where(reservations.c.id.in_(sa.bindparam("ids", expanding=True)))
RENEW = (
    sa.update(reservations)
    .where(reservations.c.id.in_(sa.bindparam("ids", expanding=True)))
    .values(expires=sa.bindparam("until"))
)
NOTICE = "notice:"
TELL = keep_first(meta)
USED: Mapping[str, sa.ColumnElement[Any]] = {
    "tokens": total(key_days.c.prompt + key_days.c.completion + key_days.c.summarizer_tokens),
    "dollars": total(key_days.c.cost + key_days.c.summarizer_cost),
}


class Limit(msgspec.Struct, frozen=True, kw_only=True):
    """The most that a key or a team may use from ``since`` on; None for any number."""

    scope: Scope
    name: str
    since: float
    tokens: int | None = None
    dollars: float | None = None
    hard: bool = True


class Spent(msgspec.Struct, frozen=True, kw_only=True):
    """What was used, and what requests in flight have reserved in addition; in US dollars."""

    tokens: int = 0
    dollars: float = 0.0
    reserved_tokens: int = 0
    reserved_dollars: float = 0.0


class Reservation(msgspec.Struct, frozen=True, kw_only=True):
    """The most that a request may take, as far as it is known beforehand."""

    id: str
    key: str
    team: str
    tokens: int
    dollars: float
    expires: float


def reserve(
    tx: Transaction, row: Reservation, limits: Sequence[Limit], *, at: float
) -> tuple[list[Spent], bool]:
    """What each limit had used before the request, and whether the request is reserved.

    It is not where something hard is used up, by what was answered or by what is in flight.
    """
    if tx.dialect != "sqlite":  # which writes one transaction at a time
        for name in sorted({f"{limit.scope}:{limit.name}" for limit in limits}):
            tx.execute(LOCK, {"scope": name})
    found = spent(tx, limits, at=at)
    if any(limit.hard and is_reached(limit, use) for limit, use in zip(limits, found, strict=True)):
        return found, False
    tx.execute(ADD, msgspec.structs.asdict(row))
    return found, True


def is_reached(limit: Limit, use: Spent) -> bool:
    tokens = limit.tokens is not None and use.tokens + use.reserved_tokens >= limit.tokens
    return tokens or (
        limit.dollars is not None and use.dollars + use.reserved_dollars >= limit.dollars
    )


def spent(tx: Transaction, limits: Sequence[Limit], *, at: float) -> list[Spent]:
    """What each limit has used; one statement, so that what is settled meanwhile counts once."""
    if not limits:
        return []
    parts = []
    for number, limit in enumerate(limits):
        mine = key_days.c[limit.scope] == limit.name
        used = sa.select(sa.literal(number).label("number"), sa.literal(0).label("held"))
        used = used.add_columns(
            sa.cast(USED["tokens"], sa.BigInteger).label("tokens"),
            sa.cast(USED["dollars"], sa.Double).label("dollars"),
        )
        parts.append(used.where(mine, key_days.c.at >= limit.since))
        r = reservations.c
        held = sa.select(sa.literal(number), sa.literal(1))
        held = held.add_columns(
            sa.cast(total(r.tokens), sa.BigInteger), sa.cast(total(r.dollars), sa.Double)
        )
        parts.append(held.where(r[limit.scope] == limit.name, r.expires > at))
    rows = tx.execute(sa.union_all(*parts)).mappings()
    sums = {
        (row["number"], row["held"]): (int(row["tokens"]), float(row["dollars"])) for row in rows
    }
    found = []
    for number in range(len(limits)):
        tokens, dollars = sums[number, 0]
        reserved_tokens, reserved_dollars = sums[number, 1]
        found.append(
            Spent(
                tokens=tokens,
                dollars=dollars,
                reserved_tokens=reserved_tokens,
                reserved_dollars=reserved_dollars,
            )
        )
    return found


def settle(tx: Transaction, ids: Sequence[str]) -> None:
    """End the reservations of requests whose rows are stored in this transaction."""
    for some in chunks(ids):
        tx.execute(SETTLE, {"ids": some})


def renew(tx: Transaction, ids: Sequence[str], *, until: float, at: float) -> None:
    """Let reservations hold until a moment, and delete those that have expired."""
    for some in chunks(sorted(ids)):
        tx.execute(RENEW, {"ids": some, "until": until})
    tx.execute(sa.delete(reservations).where(reservations.c.expires <= at))


def is_first(tx: Transaction, name: str, *, until: float, at: float) -> bool:
    """Whether ``name`` is reported for the first time; it is remembered until a moment."""
    old = meta.c.name.startswith(NOTICE, autoescape=True)
    tx.execute(sa.delete(meta).where(old, meta.c.number < int(at)))
    return tx.is_new(TELL, {"name": NOTICE + name, "number": int(until)})
