"""What was seen and taken: tokens and dollars by key, health with its alerts, figures over time,
and the audit.

What goes through at this moment is told as it is stored: any replica tells of all of them.
"""

import asyncio
import csv
import dataclasses
import io
import json
import math
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from typing import Literal, get_args

from starlette.responses import Response, StreamingResponse

from policies.health import Level, Snapshot, trend_of
from proxy.access.budgets import BudgetUse
from proxy.access.destination import TENANT_SHOWN
from proxy.errors import Forbidden, InvalidRequest
from proxy.http.request import (
    DOLLAR_DIGITS,
    Json,
    ManagementRequest,
    cursor_of,
    fields_of,
    page,
    page_from,
    page_of_whole,
)
from proxy.store.chain import AuditRow, AuditType
from proxy.store.records import DAY, AlertRow, ConversationRow, EvictionRow, StoreError, UsageRow
from proxy.store.transaction import Place
from proxy.store.usage import ADDED, By, Figures, day_of

KINDS: tuple[By, ...] = get_args(By)
FORMATS = ("json", "csv")


TAKEN = (
    *(
        "requests",
        "failed",
        "tokens_before",
        "tokens_after",
        "prompt",
        "cached",
        "completion",
        "priced",
        "unpriced",
    ),
    *("estimated", "cost", "cost_saved", "summarizer_tokens", "summarizer_cost", "tokens_saved"),
)
"""What requests took, in the order of the JSON."""
TAKEN_BY = ("tenant", "key", "group", *TAKEN)


def taken_by(row: UsageRow, *, by: By | None, names: Mapping[str, str]) -> Json:
    """What the requests of one key took, or of one group of them."""
    group = row.group if by is not None else None
    if by == "key":
        group = names.get(row.group or "") or (row.group or "")[:TENANT_SHOWN]
    whose = {"tenant": row.tenant, "key": names.get(row.tenant), "group": group}
    return {**whose, **taken([row]), "first": row.first, "last": row.last}


def taken(rows: Sequence[UsageRow]) -> Json:
    """What requests took, all together."""
    sums: Json = {name: sum(getattr(row, name) for row in rows) for name in ADDED}
    for name in ("cost", "cost_saved"):
        sums[name] = round(sums[name], DOLLAR_DIGITS) if sums["priced"] else None
    sums["summarizer_cost"] = round(sums["summarizer_cost"], DOLLAR_DIGITS)
    sums["unpriced"] = max(0, sums["requests"] - sums["failed"] - sums["priced"])
    sums["tokens_saved"] = sums["tokens_before"] - sums["tokens_after"]
    return {name: sums[name] for name in TAKEN}


def beside_cost(*, unpriced: float, estimated: float) -> str:
    """What a sum of costs leaves out, and what in it is estimated, as words; empty where there is
    neither.
    """
    kinds = ((unpriced, "without a price"), (estimated, "by Weir's own count"))
    return ", ".join(
        f"{number:,.0f} request{'' if number == 1 else 's'} {kind}"
        for number, kind in kinds
        if number
    )


async def usage(asked: ManagementRequest) -> Json | Response:
    """What requests took since a day (30 days ago), by key and ``by`` team, model, policy, day or
    conversation.

    Days are those of UTC: the one of ``since`` is counted whole. Deleted conversations are counted,
    without a name. By team and by key (``by=key`` has a key's requests of all tenants together) it
    is of known keys. The most forwarded tokens come first; a caller sees its own, the operator
    every key's. ``format=csv`` gives all rows as a table.
    """
    if asked.word("format", FORMATS) != "csv":
        return await usage_page(asked)
    by, _, rows = await _used(asked)
    names = asked.runtime.keyring.names
    text = as_csv(taken_by(row, by=by, names=names) for row in rows)
    return Response(text, media_type="text/csv")


async def usage_page(asked: ManagementRequest) -> Json:
    """A page of what requests took."""
    limit = asked.limit()
    start = asked.start()
    by, since, rows = await _used(asked)
    names = asked.runtime.keyring.names
    found = page_from(rows, start, limit, lambda row: taken_by(row, by=by, names=names))
    return {"since": since, "by": by, "total": taken(rows), **found}


async def _used(asked: ManagementRequest) -> tuple[By | None, float, Sequence[UsageRow]]:
    by = asked.word("by", KINDS)
    since = day_of(asked.since("30d"))
    rows = await asked.store.usage(asked.tenant, since=since, by=by, key=asked.key)
    return by, since, rows


def as_csv(rows: Iterable[Json]) -> str:
    """What requests took as a table with a line for each row of :func:`taken_by`."""
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow(TAKEN_BY)
    for row in rows:
        writer.writerow([_cell(row[name]) for name in TAKEN_BY])
    return out.getvalue()


def _cell(value: object) -> object:
    """A cell that no program takes for a formula."""
    is_formula = isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t")
    return f"'{value}" if is_formula else value


async def budgets(asked: ManagementRequest) -> Json:
    """What is used of each budget in its present period, and what requests in flight have reserved.

    The operator sees those of all teams and keys, a caller its own and its team's.
    """
    wanted = (asked.limit(), asked.after(str, str, str, str))
    runtime = asked.runtime
    caller = asked.caller
    if asked.tenant is None:
        uses = await runtime.budgets.look_up(runtime.keyring.callers, runtime.config.teams)
    else:
        own = [] if caller is None else [caller]
        teams = {each.team: each.team_rules for each in own if each.team_rules is not None}
        uses = await runtime.budgets.look_up(own, teams)
    return page_of_whole(uses, wanted, budget_of, lambda use: use.labels)


def budget_of(use: BudgetUse) -> Json:
    """One budget in one unit, tokens or US dollars."""
    digits = 0 if use.unit == "tokens" else DOLLAR_DIGITS
    return {
        "of": use.scope,
        "name": use.label,
        "period": use.period,
        "unit": use.unit,
        "limit": round(use.limit, digits),
        "used": round(use.used, digits),
        "reserved": round(use.reserved, digits),
        "resets": use.resets,
        "hard": use.hard,
    }


LEVELS: tuple[Level, ...] = ("critical", "warning", "info")


def alert_of(row: AlertRow) -> Json:
    """One alert; closed is None while it is open."""
    return {
        "kind": row.kind,
        "level": row.level,
        "class": row.category,
        "conversation": row.conversation,
        "at": row.at,
        "closed": row.closed,
        "value": round(row.value, 4),
        "threshold": row.limit,
        "said": row.said,
    }


def reading_of(snapshot: Snapshot) -> Json:
    """The six health metrics after one request; what was not measured is None."""
    values: Json = snapshot._asdict()
    measured = {name: round(each, 3) for name, each in values.items() if isinstance(each, float)}
    return {**values, **measured, "at": snapshot.at}


def conversation_health(
    row: ConversationRow, snapshots: Sequence[Snapshot], alerts: Sequence[AlertRow], *, limit: int
) -> Json:
    """How well one conversation is kept, and where that is heading."""
    opened = {alert.level for alert in alerts if alert.closed is None}
    return {
        "conversation": row.name,
        "status": next((level for level in LEVELS if level in opened), "ok"),
        "snapshot": reading_of(snapshots[-1]) if snapshots else None,
        "trend": dataclasses.asdict(trend_of(snapshots)),
        "alerts": [alert_of(alert) for alert in alerts],
        "history": [reading_of(each) for each in snapshots[-limit:]],
    }


async def health(asked: ManagementRequest) -> Json:
    """The open alerts over the caller's conversations, the newest first, and how many there are of
    each level.
    """
    limit = asked.limit()
    after = asked.after(float, str, str, str)
    rows, counts = await asked.store.open_alerts(asked.tenant, limit=limit + 1, after=after)
    found = page(
        rows, limit, alert_of, lambda row: (row.at, row.kind, row.tenant, row.conversation)
    )
    status = next((level for level in LEVELS if counts.get(level)), "ok")
    return {"status": status, "open": {level: counts.get(level, 0) for level in LEVELS}, **found}


async def health_of(asked: ManagementRequest) -> Json:
    """The six metrics of one conversation, where they are heading, and its alerts."""
    limit = asked.limit()
    row = await asked.conversation()
    snapshots = await asked.store.snapshots(row)
    return conversation_health(row, snapshots, await asked.store.alerts(row), limit=limit)


ENDED = (0, "", 0, 0)
"""The place in a list of evictions that has come to its end before the list beside it."""


async def audit(asked: ManagementRequest) -> Json:
    """The rows of the caller's audit, newest first, those of deleted conversations included; for
    the operator of all.

    ``type`` leaves one kind of row.
    """
    limit = asked.limit()
    kind = asked.word("type", tuple(map(str, AuditType)))
    of_all = asked.tenant is None
    after = asked.after(float, str, int) if of_all else asked.after(int)
    rows = await asked.store.audit(asked.tenant, kind=kind, limit=limit + 1, after=after)

    def place(row: AuditRow) -> Place:
        return (row.at, row.tenant, row.seq) if of_all else (row.seq,)

    return page(rows, limit, _audited, place)


async def conversation_audit(asked: ManagementRequest) -> Json:
    """What batches took out of the conversation's window or made shorter, and its rows in the
    audit, newest first.
    """
    limit = asked.limit()
    given = asked.after(float, str, int, int, int)
    row = await asked.conversation()
    evicted, seen = (None, None) if given is None else (given[:4], given[4:])
    rows = list[EvictionRow]()
    told = list[AuditRow]()
    if evicted is None or evicted[1]:
        rows = await asked.store.evictions(
            row.tenant, conversation=row, limit=limit + 1, after=evicted
        )
    if seen is None or seen[0]:
        told = await asked.store.audit(row.tenant, conversation=row.id, limit=limit + 1, after=seen)
    following = None
    if len(rows) > limit or len(told) > limit:
        last = rows[limit - 1] if len(rows) > limit else None
        place = ENDED if last is None else (last.at, last.branch, last.version, last.position)
        following = cursor_of((*place, told[limit - 1].seq if len(told) > limit else 0))
    return {
        "data": [
            fields_of(each, ref=each.digest.hex()[:12], freed=each.freed) for each in rows[:limit]
        ],
        "events": [_audited(each) for each in told[:limit]],
        "next": following,
    }


def _audited(row: AuditRow) -> Json:
    return fields_of(row, facts=row.told)


Metric = Literal[
    "requests",
    "failed",
    "refused",
    "healed",
    "degraded",
    "batches",
    "tokens_before",
    "tokens_after",
    "tokens_saved",
    "prompt",
    "cached",
    "completion",
    "cost",
    "cost_saved",
    "cache_reuse",
    "overhead_ms",
    "store_bytes",
]
METRICS: tuple[Metric, ...] = get_args(Metric)
OPERATORS_METRICS: frozenset[Metric] = frozenset({"store_bytes"})
UNMEASURED_IS_NULL = frozenset({"cache_reuse", "overhead_ms", "cost", "cost_saved", "store_bytes"})
PERIODS = (("24h", DAY), ("7d", 7 * DAY), ("30d", 30 * DAY))
STEPS: Mapping[str, int] = {
    "1m": 60,
    "5m": 300,
    "15m": 900,
    "1h": 3_600,
    "6h": 21_600,
    "1d": 86_400,
}
MAX_POINTS = 2_000
POLLED_EVERY = 1.0
BEATS_EVERY = 15.0
ENDS_AFTER = 600.0
"""Seconds after which a listener has to come again, and to say again who it is."""
AT_ONCE = 50


Points = list[dict[str, float | None]]


VALUES: Mapping[str, tuple[str, Callable[[Figures], float | None]]] = {
    "tokens_saved": ("tokens", lambda row: row.tokens_before - row.tokens_after),
    "cost": ("USD", lambda row: row.cost if row.priced else None),
    "cost_saved": ("USD", lambda row: row.cost_saved if row.priced else None),
    "cache_reuse": ("share", lambda row: row.cached / row.prompt if row.prompt else None),
    "overhead_ms": ("ms", lambda row: row.overhead_ms / row.requests if row.requests else None),
}
COUNTED = frozenset({"tokens_before", "tokens_after", "prompt", "cached", "completion"})


async def series(asked: ManagementRequest) -> Json:
    """A metric of the caller's requests over time, step by step; the operator gets that of
    everybody's.

    ``store_bytes``, the size of the database, is for the operator.
    """
    metric = asked.word("metric", METRICS)
    if metric is None:
        raise InvalidRequest(f"metric must be one of {', '.join(METRICS)}.", param="metric")
    if metric in OPERATORS_METRICS and asked.tenant is not None:
        raise Forbidden(f"{metric} is for the operator: send the admin token (auth.admin_token).")
    step = STEPS[asked.word("step", tuple(STEPS)) or "1h"]
    since = asked.since("24h")
    now = asked.runtime.planner.clock()
    if (now - since) / step > MAX_POINTS:
        raise InvalidRequest(
            f"That is more than {MAX_POINTS} steps: ask for a longer step.", param="step"
        )
    if metric == "store_bytes":
        newest = {int(at // step): float(size) for at, size in await asked.store.sizes()}
        unit = "bytes"
        values = _points(newest, metric, since=since, until=now, step=step)
    else:
        rows = await asked.store.figures(asked.tenant, since=since, step=float(step))
        unit, values = values_of(rows, metric, since=since, until=now, step=step)
    return {"metric": metric, "unit": unit, "step": step, "since": since, "data": values}


def values_of(
    rows: Sequence[Figures], metric: Metric, *, since: float, until: float, step: int
) -> tuple[str, Points]:
    """The unit of a metric, and its value at each step between two moments."""
    fallback = ("tokens" if metric in COUNTED else "requests", lambda row: getattr(row, metric))
    unit, value = VALUES.get(metric, fallback)
    known = {round(row.at / step): value(row) for row in rows}
    return unit, _points(known, metric, since=since, until=until, step=step)


def _points(
    known: Mapping[int, float | None], metric: Metric, *, since: float, until: float, step: int
) -> Points:
    empty = None if metric in UNMEASURED_IS_NULL else 0
    places = range(math.floor(since / step), math.floor(until / step) + 1)
    return [{"at": float(step * n), "value": known.get(n, empty)} for n in places]


def store_growth(sizes: Sequence[tuple[float, int]], size: int, *, now: float) -> dict[str, int]:
    """Bytes by which the store grew in each period, as far as its size is known for so long;
    ``sizes`` oldest first.
    """
    known = ((period, [then for at, then in sizes if at <= now - ago]) for period, ago in PERIODS)
    return {period: size - then[-1] for period, then in known if then}


async def live(asked: ManagementRequest) -> Response:
    """The caller's requests as they are stored, as server-sent events: ``request``, whose data is
    the request as JSON.

    The operator hears of everybody's. The stream ends after ten minutes; whoever wants more comes
    again.
    """
    headers = {"cache-control": "no-transform", "x-accel-buffering": "no"}
    return StreamingResponse(events(asked), media_type="text/event-stream", headers=headers)


async def events(asked: ManagementRequest) -> AsyncIterator[bytes]:
    store = asked.store
    clock = asked.runtime.planner.clock
    loop = asyncio.get_running_loop()
    begun = quiet = loop.time()
    since = clock()
    seen = set[str]()
    yield b"retry: 3000\n\n"
    while loop.time() - begun < ENDS_AFTER and not asked.shutdown.draining.is_set():
        await asyncio.sleep(POLLED_EVERY)
        try:
            rows = await store.passed(asked.tenant, limit=AT_ONCE, since=since)
        except StoreError:
            continue
        fresh = [row for row in reversed(rows) if row["id"] not in seen]
        # A row is stored a moment after its time: look a little behind, and remember what was told.
        since = max(since, clock() - 10 * POLLED_EVERY)
        seen = {row["id"] for row in rows}
        for row in fresh:
            yield b"event: request\ndata: " + json.dumps(row).encode() + b"\n\n"
        if fresh:
            quiet = loop.time()
        if loop.time() - quiet > BEATS_EVERY:
            quiet = loop.time()
            yield b": still here\n\n"
