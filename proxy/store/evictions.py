"""What was evicted, for the audit: which call it answered, what it freed, and whether somebody asked for it again."""

from collections.abc import Sequence

import sqlalchemy as sa

from proxy.store.bulk import run_many
from proxy.store.paging import Place, ordered
from proxy.store.records import Change, ConversationRow, EvictionRow, EvictionSum, ExchangeRow
from proxy.store.tables import OF_BRANCH, branches, conversations, evictions

ADD = sa.insert(evictions)
SAME_NAME = (
    "digest",
    "occurrence",
    "kind",
    "layer",
    "policy",
    "scorer",
    "tool",
    "call_hash",
    "tokens_before",
    "tokens_after",
    "tokens_remaining",
)
# A fork inherits what its parents had evicted until it left them.
EVICTED = (
    sa.text(
        "WITH RECURSIVE line (branch, parent, until) AS ("
        "SELECT branch, parent, CAST(1e300 AS DOUBLE PRECISION) FROM branches "
        "WHERE tenant = :tenant AND branch = :branch "
        "UNION SELECT b.branch, b.parent, c.created FROM line l "
        "JOIN branches c ON c.tenant = :tenant AND c.branch = l.branch "
        "JOIN branches b ON b.tenant = :tenant AND b.branch = l.parent) "
        "SELECT DISTINCT e.call_hash, e.branch FROM line l "
        "JOIN evictions e ON e.tenant = :tenant AND e.branch = l.branch AND e.at <= l.until "
        "WHERE length(e.call_hash) > 0 AND e.asked_again_at IS NULL"
    )
    .bindparams(*OF_BRANCH)
    .columns(evictions.c.call_hash, evictions.c.branch)
)
_OTHERS = evictions.alias()
ASKED_AGAIN = (
    sa.update(evictions)
    .where(
        evictions.c.tenant == sa.bindparam("t"),
        evictions.c.branch == sa.bindparam("b"),
        evictions.c.call_hash == sa.bindparam("call"),
        evictions.c.version
        == sa.select(sa.func.max(_OTHERS.c.version))
        .where(
            _OTHERS.c.tenant == sa.bindparam("t"),
            _OTHERS.c.branch == sa.bindparam("b"),
            _OTHERS.c.call_hash == sa.bindparam("call"),
        )
        .scalar_subquery(),
    )
    .values(
        asked_again_at=sa.func.coalesce(evictions.c.asked_again_at, sa.bindparam("now")),
        asked_again_count=evictions.c.asked_again_count + 1,
    )
)


def add_evictions(connection: sa.Connection, change: Change, *, version: int) -> None:
    """Store what the batch of ``version`` evicted."""
    run_many(
        connection,
        ADD,
        [
            {name: getattr(row, name) for name in SAME_NAME}
            | {
                "tenant": change.tenant,
                "branch": change.branch,
                "version": version,
                "position": position,
                "at": change.at,
                "asked_again_at": None,
                "asked_again_count": 0,
            }
            for position, row in enumerate(change.evictions)
        ],
    )


def load_evicted(connection: sa.Connection, tenant: str, branch: str) -> tuple[tuple[bytes, str], ...]:
    """The calls whose results this branch or one that it came from has evicted, and which branch that was."""
    rows = connection.execute(EVICTED, {"tenant": tenant, "branch": branch})
    return tuple((bytes(call), where) for call, where in rows)


def mark_asked_again(connection: sa.Connection, rows: Sequence[ExchangeRow]) -> None:
    """Note on the newest eviction of each call that these exchanges asked for it again."""
    run_many(
        connection,
        ASKED_AGAIN,
        [
            {"t": row.tenant, "b": branch, "call": call, "now": row.at}
            for row in rows
            for branch, call in row.asked_again
        ],
    )


def sums(
    connection: sa.Connection, tenant: str | None, *, of: ConversationRow | None, policy: str | None
) -> list[EvictionSum]:
    """What each layer took from each tool, the most tokens first."""
    freed = sa.func.sum(evictions.c.tokens_before - evictions.c.tokens_after)
    query = (
        _asked(
            sa.select(
                evictions.c.layer,
                evictions.c.tool,
                sa.func.count().label("evicted"),
                sa.func.count(evictions.c.asked_again_at).label("asked_again"),
                sa.func.sum(evictions.c.tokens_before).label("tokens_before"),
                sa.func.sum(evictions.c.tokens_after).label("tokens_after"),
            ).select_from(evictions),
            tenant,
            of=of,
            policy=policy,
        )
        .group_by(evictions.c.layer, evictions.c.tool)
        .order_by(freed.desc(), evictions.c.layer, evictions.c.tool)
    )
    return [
        EvictionSum(
            layer=row.layer,
            tool=row.tool,
            evicted=int(row.evicted),
            asked_again=int(row.asked_again),
            tokens_before=int(row.tokens_before),
            tokens_after=int(row.tokens_after),
        )
        for row in connection.execute(query)
    ]


def listed(
    connection: sa.Connection,
    tenant: str | None,
    *,
    of: ConversationRow | None,
    policy: str | None,
    asked_again: bool,
    limit: int,
    after: Place | None = None,
) -> list[EvictionRow]:
    """The newest ``limit`` evictions, newest first; with ``asked_again`` only those that were asked for again.

    ``after`` leaves those behind one of which this is ``at``, ``branch``, ``version`` and ``position``.
    """
    query = _asked(sa.select(evictions, conversations.c.name), tenant, of=of, policy=policy)
    if asked_again:
        query = query.where(evictions.c.asked_again_at.is_not(None))
    columns = evictions.c
    order = ((columns.at, True), (columns.branch, False), (columns.version, True), (columns.position, False))
    query = ordered(query, order, after=after, limit=limit)
    return [
        EvictionRow(
            **{name: getattr(row, name) for name in SAME_NAME},
            tenant=row.tenant,
            conversation=row.name,
            branch=row.branch,
            version=row.version,
            position=row.position,
            at=row.at,
            asked_again_at=row.asked_again_at,
            asked_again_count=row.asked_again_count,
        )
        for row in connection.execute(query)
    ]


def _asked(
    query: sa.Select[*tuple[object, ...]], tenant: str | None, *, of: ConversationRow | None, policy: str | None
) -> sa.Select[*tuple[object, ...]]:
    """``query`` over evictions with their conversations, narrowed to what was asked about."""
    query = query.join(
        branches, sa.and_(branches.c.tenant == evictions.c.tenant, branches.c.branch == evictions.c.branch)
    ).join(
        conversations,
        sa.and_(conversations.c.tenant == branches.c.tenant, conversations.c.id == branches.c.conversation),
    )
    if tenant is not None:
        query = query.where(evictions.c.tenant == tenant)
    if of is not None:
        query = query.where(evictions.c.tenant == of.tenant, branches.c.conversation == of.id)
    return query if policy is None else query.where(evictions.c.policy == policy)
