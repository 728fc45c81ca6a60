"""Conversations: how full they are, what was done to each request, and what callers do to one."""

import dataclasses
from collections.abc import Mapping

from policies.ledger import Burn
from policies.pressure import STATUSES, bucket_report, turns_remaining, velocity_class
from proxy.errors import NotFound
from proxy.http.request import (
    ZONES,
    Json,
    ManagementRequest,
    cursor_of,
    exchange_of,
    fields_of,
    page,
)
from proxy.http.routes import CONVERSATION, PAGED, ManagementRoute
from proxy.store.conversations import Narrowing
from proxy.store.records import ConversationRow, ExchangeRow


def status_of(
    row: ConversationRow,
    last: ExchangeRow | None,
    *,
    windows: int,
    events: int,
    soft: Mapping[str, float],
) -> Json:
    """A conversation with its status report (requirements A0.136 and A0.92).

    ``windows`` is how many windows it has had, ``events`` how often something was taken out of
    them; ``soft`` are the shares of their caps at which buckets warn.
    """
    return fields_of(
        row,
        pressure=None if last is None else _pressure(last),
        buckets={} if last is None else last.detail.get("buckets", {}),
        turns_until_red=None if last is None else last.turns_until_red,
        window_status="healthy" if last is None else _window_status(last),
        turn=row.requests,
        windows_created=windows,
        utilization=0.0 if last is None else round(last.pressure, 2),
        budget_report=None if last is None else _budget(last, soft),
        audit_events=events,
    )


def _pressure(last: ExchangeRow) -> Json:
    return {
        "current_tokens": last.tokens_after,
        "max_tokens": last.detail.get("base"),
        "utilization_pct": round(100 * last.pressure, 1),
        "zone": last.zone,
        "velocity_tokens_per_turn": last.velocity,
        "turns_until_red": last.turns_until_red,
        "velocity_class": velocity_class(last.velocity),
        "source": last.detail.get("source"),
    }


def _window_status(last: ExchangeRow) -> str:
    status = last.detail.get("status")
    return status if isinstance(status, str) else STATUSES.get(last.zone, "active")


def _budget(last: ExchangeRow, soft: Mapping[str, float]) -> Json:
    used = tokens_by_bucket(last.detail.get("buckets"))
    caps = tokens_by_bucket(last.detail.get("caps"))
    burns = tuple(
        Burn(name, 0, (rate,)) for name, rate in tokens_by_bucket(last.detail.get("burn")).items()
    )
    base = last.detail.get("base")
    limit = base if isinstance(base, int) else last.limit  # what pressure is a share of
    report = bucket_report(dict.fromkeys(caps, 0) | used, caps, burns, limit=limit, soft=soft)
    left = turns_remaining(report.total_used, last.limit, last.velocity)
    return {
        **dataclasses.asdict(report),
        "burn_rate_tokens_per_turn": None if last.velocity is None else round(last.velocity, 1),
        "turns_until_exhausted": None if left is None else round(left, 1),
    }


def tokens_by_bucket(found: object) -> dict[str, int]:
    return (
        {str(name): int(tokens) for name, tokens in found.items()}
        if isinstance(found, Mapping)
        else {}
    )


async def listing(request: ManagementRequest) -> Json:
    """The caller's conversations, the one used last first; ``closed`` leaves those that are, or are
    not.

    So do ``name`` (a part of it), ``model``, ``zone`` and ``policy``, which is that of the newest
    request; with ``key`` the operator sees those of one key, by its name or tenant.
    """
    limit = request.limit()
    after = request.after(float, str, str)
    query = request.query
    only = Narrowing(
        name=query.get("name"),
        model=query.get("model"),
        zone=request.word("zone", ZONES),
        policy=query.get("policy"),
        closed=request.flag("closed"),
    )
    rows = await request.store.conversations(
        _tenant_of(request), limit=limit + 1, only=only, after=after
    )
    return page(rows, limit, fields_of, lambda row: (row.updated, row.id, row.tenant))


def _tenant_of(request: ManagementRequest) -> str | None:
    key = request.query.get("key")
    if request.tenant is not None or key is None:
        return request.tenant
    return next(
        (tenant for tenant, name in request.runtime.keyring.names.items() if name == key), key
    )


async def one(request: ManagementRequest) -> Json:
    """One conversation: its row, the reading of its last request, and the status report."""
    row = await request.conversation()
    last = next(iter(await request.store.timeline(row, limit=1)), None)
    newest = await request.store.latest_checkpoint(row.tenant, row.id)
    events = await request.store.count_evictions(row)
    soft = {} if last is None else request.runtime.config.soft_shares(last.policy)
    windows = 1 if newest is None else newest[1].window_id
    return status_of(row, last, windows=windows, events=events, soft=soft)


async def timeline(request: ManagementRequest) -> Json:
    """The newest requests of a conversation, oldest first; ``cursor`` leads to older ones,
    ``since`` leaves newer.
    """
    limit = request.limit()
    since = request.since("") if "since" in request.query else None
    after = request.after(float, str)
    row = await request.conversation()
    found = await request.store.timeline(row, limit=limit + 1, since=since, after=after)
    rows = found[-limit:]
    following = cursor_of((rows[0].at, rows[0].id)) if len(found) > limit else None
    return {"data": [exchange_of(row) for row in rows], "next": following}


async def compact(request: ManagementRequest) -> Json:
    """Have the conversation's next request compacted, whatever its size."""
    await request.fields(())
    await request.runtime.planner.conversations.want(await request.only_conversation(), "compact")
    return {"wanted": "compact"}


async def close(request: ManagementRequest) -> Json:
    """Archive the conversation; closing it again changes nothing."""
    await request.fields(())
    row = await request.only_conversation()
    if row.closed is not None:
        return {"closed": row.closed}
    return {"closed": await request.runtime.planner.conversations.close(row)}


async def delete(request: ManagementRequest) -> Json:
    """Delete the conversation for good: rows, bodies, and what memory holds of it."""
    row = await request.only_conversation()
    if not await request.store.delete(row, request.runtime.planner.clock()):
        raise NotFound(f"There is no conversation {row.name[:80]!r}.")
    request.runtime.summarizer.forget(row.tenant)
    request.runtime.planner.conversations.forget(row)
    request.runtime.features.forget(row)
    return {"deleted": True}


NARROWED = ("name", "model", "policy", "zone", "key", "closed")

ROUTES = (
    ManagementRoute("GET", "conversations", listing, (*NARROWED, *PAGED), rows=50),
    ManagementRoute("GET", CONVERSATION, one),
    ManagementRoute("DELETE", CONVERSATION, delete),
    ManagementRoute("GET", f"{CONVERSATION}/timeline", timeline, ("since", *PAGED)),
    ManagementRoute("POST", f"{CONVERSATION}/compact", compact, statuses=(202,)),
    ManagementRoute("POST", f"{CONVERSATION}/close", close),
)
