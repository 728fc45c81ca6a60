"""Figures over time, and what goes through at this moment, as it is stored: any replica tells of all of them."""

import asyncio
import json
import math
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Literal, get_args

import msgspec
from msgspec import Meta

from proxy.errors import InvalidRequest
from proxy.http.request import ManagementAnswer, ManagementRequest, Moment, Shape, moment_in
from proxy.store.overview import Figures, Passed
from proxy.store.records import StoreError

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
]
METRICS: tuple[Metric, ...] = get_args(Metric)
STEPS: Mapping[str, int] = MappingProxyType({"1m": 60, "5m": 300, "15m": 900, "1h": 3_600, "6h": 21_600, "1d": 86_400})
MAX_POINTS = 2_000
EVENTS = b"text/event-stream; charset=utf-8"
POLLED_EVERY = 1.0
BEATS_EVERY = 15.0
ENDS_AFTER = 600.0
"""Seconds after which a listener has to come again, and to say again who it is."""
AT_ONCE = 50


class Point(Shape):
    """One step of a series."""

    at: Moment
    value: Annotated[float | None, Meta(description="null where nothing was measured")]


class MetricSeries(Shape):
    """A metric over time, oldest first; a step without a request is there with 0, or null where there is nothing."""

    metric: Metric
    unit: str
    step: Annotated[int, Meta(ge=1, description="seconds")]
    since: Moment
    data: list[Point]


def _reuse(row: Figures) -> float | None:
    return row.cached / row.prompt if row.prompt else None


def _overhead(row: Figures) -> float | None:
    return row.overhead_ms / row.requests if row.requests else None


VALUES: Mapping[str, tuple[str, Callable[[Figures], float | None]]] = MappingProxyType(
    {
        "tokens_before": ("tokens", lambda row: row.before),
        "tokens_after": ("tokens", lambda row: row.after),
        "tokens_saved": ("tokens", lambda row: row.before - row.after),
        "cost": ("USD", lambda row: row.cost if row.priced else None),
        "cost_saved": ("USD", lambda row: row.cost_saved if row.priced else None),
        "cache_reuse": ("share", _reuse),
        "overhead_ms": ("ms", _overhead),
    }
)
COUNTED = frozenset({"prompt", "cached", "completion"})


async def series(asked: ManagementRequest) -> MetricSeries:
    """A metric of the caller's requests over time, step by step; the operator gets that of everybody's."""
    metric = asked.word("metric", METRICS)
    if metric is None:
        raise InvalidRequest(f"metric must be one of {', '.join(METRICS)}.", param="metric")
    step = STEPS[asked.word("step", tuple(STEPS)) or "1h"]
    now = asked.runtime.planner.clock()
    since = moment_in(asked.query.get("since", "24h"), now=now)
    if (now - since) / step > MAX_POINTS:
        raise InvalidRequest(f"That is more than {MAX_POINTS} steps: ask for a longer step.", param="step")
    rows = await asked.store.figures(asked.tenant, since=since, step=float(step))
    unit, values = values_of(rows, metric, since=since, until=now, step=step)
    return MetricSeries(metric=metric, unit=unit, step=step, since=since, data=values)


def values_of(
    rows: Sequence[Figures], metric: Metric, *, since: float, until: float, step: int
) -> tuple[str, list[Point]]:
    """The unit of a metric, and its value at each step between two moments."""
    fallback = ("tokens" if metric in COUNTED else "requests", lambda row: getattr(row, metric))
    unit, value = VALUES.get(metric, fallback)
    known = {round(row.at / step): value(row) for row in rows}
    empty = None if metric in {"cache_reuse", "overhead_ms", "cost", "cost_saved"} else 0
    places = range(math.floor(since / step), math.floor(until / step) + 1)
    return unit, [Point(at=float(step * n), value=known.get(n, empty)) for n in places]


async def live(asked: ManagementRequest) -> ManagementAnswer:
    """The caller's requests as they are stored, as server-sent events: ``request``, whose data is the request as JSON.

    The operator hears of everybody's. The stream ends after ten minutes; whoever wants more comes again.
    """
    return ManagementAnswer(b"", kind=EVENTS, stream=events(asked))


async def events(asked: ManagementRequest) -> AsyncIterator[bytes]:
    """What :func:`live` sends."""
    store, clock, loop = asked.store, asked.runtime.planner.clock, asyncio.get_running_loop()
    begun = quiet = loop.time()
    since, seen = clock(), set[str]()
    yield b"retry: 3000\n\n"
    while loop.time() - begun < ENDS_AFTER:
        await asyncio.sleep(POLLED_EVERY)
        rows: list[Passed] = []
        try:
            rows = await store.passed(asked.tenant, limit=AT_ONCE, since=since)
        except StoreError:
            continue
        fresh = [row for row in reversed(rows) if row.id not in seen]
        # A row is stored a moment after its time: look a little behind, and remember what was told.
        since = max(since, clock() - 10 * POLLED_EVERY)
        seen = {row.id for row in rows}
        for row in fresh:
            yield b"event: request\ndata: " + json.dumps(msgspec.to_builtins(row)).encode() + b"\n\n"
        if fresh:
            quiet = loop.time()
        else:
            yield b""  # whether the process stops is looked at
        if loop.time() - quiet > BEATS_EVERY:
            quiet = loop.time()
            yield b": still here\n\n"
