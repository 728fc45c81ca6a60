"""Activity: figures of requests over time, and requests as they are stored.

The latter are server-sent events, which any replica sends for all of them.
"""

import asyncio
import json
import math
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Literal, get_args

from starlette.responses import Response, StreamingResponse

from proxy.errors import Forbidden, InvalidRequest
from proxy.http.request import Json, ManagementRequest
from proxy.http.routes import ManagementRoute
from proxy.store.records import DAY, StoreError
from proxy.store.usage import Figures

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


Points = list[dict[str, float | None]]


VALUES: Mapping[str, tuple[str, Callable[[Figures], float | None]]] = {
    "tokens_saved": ("tokens", lambda row: row.tokens_before - row.tokens_after),
    "cost": ("USD", lambda row: row.cost if row.priced else None),
    "cost_saved": ("USD", lambda row: row.cost_saved if row.priced else None),
    "cache_reuse": ("share", lambda row: row.cached / row.prompt if row.prompt else None),
    "overhead_ms": ("ms", lambda row: row.overhead_ms / row.requests if row.requests else None),
}
COUNTED = frozenset({"tokens_before", "tokens_after", "prompt", "cached", "completion"})


async def metric_series(request: ManagementRequest) -> Json:
    """A metric of the caller's requests over time, step by step; the operator gets that of
    everybody's.

    ``store_bytes``, the size of the database, is for the operator.
    """
    metric = request.word("metric", METRICS)
    if metric is None:
        raise InvalidRequest(f"metric must be one of {', '.join(METRICS)}.", param="metric")
    if metric in OPERATORS_METRICS and request.tenant is not None:
        raise Forbidden(f"{metric} is for the operator: send the admin token (auth.admin_token).")
    step = STEPS[request.word("step", tuple(STEPS)) or "1h"]
    since = request.since("24h")
    now = request.runtime.planner.clock()
    if (now - since) / step > MAX_POINTS:
        raise InvalidRequest(
            f"That is more than {MAX_POINTS} steps: ask for a longer step.", param="step"
        )
    if metric == "store_bytes":
        newest = {int(at // step): float(size) for at, size in await request.store.sizes()}
        unit = "bytes"
        values = _points(newest, metric, since=since, until=now, step=step)
    else:
        rows = await request.store.figures(request.tenant, since=since, step=float(step))
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


POLLED_EVERY = 1.0
BEATS_EVERY = 15.0
ENDS_AFTER = 600.0
"""Seconds after which a listener has to reconnect and authenticate again."""
AT_ONCE = 50


async def live_requests(request: ManagementRequest) -> Response:
    """The caller's requests as they are stored, as server-sent events: ``request``, whose data is
    the request as JSON.

    The operator hears of everybody's. The stream ends after ten minutes; whoever wants more comes
    again.
    """
    headers = {"cache-control": "no-transform", "x-accel-buffering": "no"}
    return StreamingResponse(events(request), media_type="text/event-stream", headers=headers)


async def events(request: ManagementRequest) -> AsyncIterator[bytes]:
    store = request.store
    clock = request.runtime.planner.clock
    loop = asyncio.get_running_loop()
    begun = quiet = loop.time()
    since = clock()
    seen = set[str]()
    yield b"retry: 3000\n\n"
    while loop.time() - begun < ENDS_AFTER and not request.shutdown.draining.is_set():
        await asyncio.sleep(POLLED_EVERY)
        try:
            rows = await store.passed(request.tenant, limit=AT_ONCE, since=since)
        except StoreError:
            continue
        fresh = [row for row in reversed(rows) if row["id"] not in seen]
        # A row is stored a moment after its time: look back a little, and remember what was sent.
        since = max(since, clock() - 10 * POLLED_EVERY)
        seen = {row["id"] for row in rows}
        for row in fresh:
            yield b"event: request\ndata: " + json.dumps(row).encode() + b"\n\n"
        if fresh:
            quiet = loop.time()
        if loop.time() - quiet > BEATS_EVERY:
            quiet = loop.time()
            yield b": still here\n\n"


ROUTES = (
    ManagementRoute("GET", "series", metric_series, ("metric", "step", "since")),
    ManagementRoute("GET", "live", live_requests),
)
