"""Counters and histograms as plain numbers: recorded in a microsecond, read as Prometheus text or as OTLP.

The aggregates are Weir's own, because ``GET /metrics`` must work without any exporter and OpenTelemetry has no
histogram that can be observed from outside. Recording and reading are safe from any thread.
"""

import threading
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import inf

from opentelemetry.sdk.metrics import export as otlp
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from proxy.telemetry import instruments, names
from proxy.telemetry.instruments import Instrument

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
MOST_SERIES = 2_000
LONGEST_LABEL = 128
OTHER = "other"
Labels = tuple[str, ...]


@dataclass(slots=True)
class Distribution:
    """One series of a histogram: counts per bucket (not cumulative, the last one is +Inf), sum and extremes."""

    counts: list[int]
    total: float = 0.0
    low: float = inf
    high: float = 0.0


class Counter:
    """Sums by labels; the series above ``most`` share one whose labels are all ``other``."""

    def __init__(self, instrument: Instrument, *, most: int = MOST_SERIES) -> None:
        self.instrument = instrument
        self._most = most
        self._series: dict[Labels, float] = {}
        self._lock = threading.Lock()

    def add(self, value: float, labels: Labels = ()) -> None:
        """Add ``value``; negative values and NaN are ignored."""
        if not value >= 0:
            return
        with self._lock:
            series = self._series
            key = labels if labels in series else _admit(labels, series, self._most)
            series[key] = series.get(key, 0) + value

    def read(self) -> dict[Labels, float]:
        """The sums at this moment."""
        with self._lock:
            return dict(self._series)


class Histogram:
    """Distributions by labels; the series above ``most`` share one whose labels are all ``other``."""

    def __init__(self, instrument: Instrument, *, most: int = MOST_SERIES) -> None:
        self.instrument = instrument
        self._bounds = instrument.bounds
        self._most = most
        self._series: dict[Labels, Distribution] = {}
        self._lock = threading.Lock()

    def record(self, value: float, labels: Labels = ()) -> None:
        """Count ``value`` in its bucket (upper bounds are inclusive); negative values and NaN are ignored."""
        if not value >= 0:
            return
        with self._lock:
            series = self._series.get(labels)
            if series is None:
                key = _admit(labels, self._series, self._most)
                series = self._series.setdefault(key, Distribution([0] * (len(self._bounds) + 1)))
            series.counts[bisect_left(self._bounds, value)] += 1
            series.total += value
            if value < series.low:
                series.low = value
            if value > series.high:
                series.high = value

    def read(self) -> dict[Labels, Distribution]:
        """Copies of the distributions at this moment."""
        with self._lock:
            return {key: replace(found, counts=list(found.counts)) for key, found in self._series.items()}


class Metrics:
    """Everything that Weir counts, with one method per thing that happens."""

    def __init__(self, *, most_series: int = MOST_SERIES) -> None:
        def counter(instrument: Instrument) -> Counter:
            return Counter(instrument, most=most_series)

        def histogram(instrument: Instrument) -> Histogram:
            return Histogram(instrument, most=most_series)

        self._usage = histogram(instruments.TOKEN_USAGE)
        self._duration = histogram(instruments.OPERATION_DURATION)
        self._first_chunk = histogram(instruments.TIME_TO_FIRST_CHUNK)
        self._requests = counter(instruments.REQUESTS)
        self._tokens = counter(instruments.TOKENS_SEEN)
        self._cost = counter(instruments.COST)
        self._actions = counter(instruments.ACTIONS)
        self._events = counter(instruments.EVENTS)
        self._pressure = histogram(instruments.PRESSURE)
        self._overflows = counter(instruments.OVERFLOWS)
        self._retries = counter(instruments.RETRIES)
        self._summarizer = counter(instruments.SUMMARIZER_CALLS)
        self._summarizer_tokens = counter(instruments.SUMMARIZER_TOKENS)
        self._summarizer_cost = counter(instruments.SUMMARIZER_COST)
        self._degraded = counter(instruments.DEGRADED)
        self._compression = histogram(instruments.COMPRESSION)
        self._alerts = counter(instruments.ALERTS)
        self._undelivered = counter(instruments.ALERTS_UNDELIVERED)
        self._store = histogram(instruments.STORE_LATENCY)
        self._overhead = histogram(instruments.OVERHEAD)
        self._all: tuple[Counter | Histogram, ...] = tuple(
            i for i in vars(self).values() if isinstance(i, Counter | Histogram)
        )
        self._watched: list[tuple[Instrument, Callable[[], Mapping[Labels, float]]]] = []

    def request(self, *, outcome: str, policy: str) -> None:
        """One request ended."""
        self._requests.add(1, (outcome, policy))

    def tokens(self, *, before: int, after: int) -> None:
        """Tokens of one request as the client sent it and as it was forwarded."""
        self._tokens.add(before, ("before",))
        self._tokens.add(after, ("after",))
        self._tokens.add(max(0, before - after), ("saved",))

    def cost(self, *, forwarded: float, unmanaged: float, tenant: str) -> None:
        """US dollars that one request cost, and that the client's own array would have cost; ``tenant`` is the hash."""
        self._cost.add(forwarded, ("forwarded", tenant))
        self._cost.add(unmanaged, ("unmanaged", tenant))

    def action(self, layer: str, *, count: int = 1) -> None:
        """A layer changed or removed ``count`` units."""
        self._actions.add(count, (layer,))

    def event(self, kind: str) -> None:
        """The planner reported something of a request, such as a change of zone."""
        self._events.add(1, (kind,))

    def pressure(self, value: float, *, zone: str) -> None:
        """Forwarded tokens over the base of the policy, and the zone."""
        self._pressure.record(value, (zone,))

    def overflow(self) -> None:
        """The upstream said that the prompt does not fit."""
        self._overflows.add(1)

    def retry(self, reason: str) -> None:
        """A further attempt, and why."""
        self._retries.add(1, (reason,))

    def summarizer(self, result: str) -> None:
        """A call of the summariser: ``ok`` or why it was of no use; ``kept`` or ``shared`` where none was made."""
        self._summarizer.add(1, (result,))

    def summarized(self, *, asked: int, answered: int, cached: int, dollars: float | None, tenant: str) -> None:
        """What one call of the summariser took; ``dollars`` None for a model without a price."""
        self._summarizer_tokens.add(asked, ("asked",))
        self._summarizer_tokens.add(cached, ("cached",))
        self._summarizer_tokens.add(answered, ("answered",))
        if dollars is not None:
            self._summarizer_cost.add(dollars, (tenant,))

    def compression(self, ratio: float) -> None:
        """Something was condensed to a ``ratio``-th of its tokens."""
        self._compression.record(ratio)

    def alert(self, *, level: str, category: str) -> None:
        """An alert opened."""
        self._alerts.add(1, (level, category))

    def undelivered(self, reason: str) -> None:
        """The webhook did not get an alert: it ``failed``, or too many waited (``dropped``)."""
        self._undelivered.add(1, (reason,))

    def degraded(self, reason: str) -> None:
        """A request was managed with a part missing."""
        self._degraded.add(1, (reason,))

    def store(self, operation: str, seconds: float) -> None:
        """Time of a store operation."""
        self._store.record(seconds, (operation,))

    def overhead(self, seconds: float) -> None:
        """Time that Weir itself added to one request."""
        self._overhead.record(seconds)

    def answered(
        self,
        *,
        provider: str,
        model: str,
        seconds: float,
        response_model: str = "",
        address: str = "",
        port: int | None = None,
        error_type: str = "",
        input_tokens: int | None = None,
        output_tokens: int | None = None,
        first_chunk: float | None = None,
    ) -> None:
        """One call to an upstream ended: its duration, usage where reported, time to first chunk if streamed."""
        where = address, "" if port is None else str(port)
        call = (names.OPERATION, provider, model, response_model, *where)
        self._duration.record(seconds, (*call, error_type))
        if input_tokens is not None:
            self._usage.record(input_tokens, (*call, "input"))
        if output_tokens is not None:
            self._usage.record(output_tokens, (*call, "output"))
        if first_chunk is not None:
            self._first_chunk.record(first_chunk, call)

    def watch(self, instrument: Instrument, read: Callable[[], Mapping[Labels, float]]) -> None:
        """Read a counter or gauge that someone else keeps, whenever the metrics are read."""
        self._watched.append((instrument, read))

    def render(self) -> bytes:
        """Prometheus text format 0.0.4; thousands of series take milliseconds, so call it in a thread."""
        lines: list[str] = []
        for part in self._all:
            lines.extend(_head(part.instrument))
            lines.extend(_sums(part.instrument, part.read()) if isinstance(part, Counter) else _buckets(part))
        for instrument, read in self._watched:
            lines.extend(_head(instrument))
            lines.extend(_sums(instrument, read()))
        return ("\n".join(lines) + "\n").encode()

    def collect(self, resource: Resource, scope: InstrumentationScope, *, since: int, now: int) -> otlp.MetricsData:
        """The same as cumulative OTLP data points from ``since`` to ``now``, ns since the epoch."""
        found: list[otlp.Metric] = []
        for part in self._all:
            if isinstance(part, Counter):
                found.append(_otlp_sums(part.instrument, part.read(), since, now))
            else:
                found.append(_otlp_histogram(part.instrument, part.read(), since, now))
        found.extend(_otlp_sums(instrument, read(), since, now) for instrument, read in self._watched)
        scoped = otlp.ScopeMetrics(scope, [m for m in found if m.data.data_points], "")
        return otlp.MetricsData([otlp.ResourceMetrics(resource, [scoped], "")])


def _admit(labels: Labels, series: Mapping[Labels, object], most: int) -> Labels:
    """The key under which new labels are kept: bounded in length, and ``other`` when there are too many."""
    key = tuple(label[:LONGEST_LABEL] for label in labels)
    return key if key in series or len(series) < most - 1 else (OTHER,) * len(labels)


def _head(instrument: Instrument) -> tuple[str, str]:
    said = instrument.help.replace("\\", r"\\").replace("\n", r"\n")
    return f"# HELP {instrument.prometheus} {said}", f"# TYPE {instrument.prometheus} {instrument.kind}"


def _pairs(instrument: Instrument, labels: Labels) -> str:
    """``a="1",b="2"`` with backslash, quote and line feed escaped; empty labels are left out."""
    return ",".join(
        f'{name.replace(".", "_")}="{_escape(value)}"'
        for name, value in zip(instrument.labels, labels, strict=True)
        if value
    )


def _escape(value: str) -> str:
    escaped = value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
    return escaped.encode("utf-8", "replace").decode()


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(value)


def _sums(instrument: Instrument, series: Mapping[Labels, float]) -> Iterator[str]:
    for labels, value in series.items():
        pairs = _pairs(instrument, labels)
        yield (
            f"{instrument.prometheus}{{{pairs}}} {_number(value)}"
            if pairs
            else (f"{instrument.prometheus} {_number(value)}")
        )


def _buckets(part: Histogram) -> Iterator[str]:
    name = part.instrument.prometheus
    bounds = (*(_number(bound) for bound in part.instrument.bounds), "+Inf")
    for labels, series in part.read().items():
        pairs = _pairs(part.instrument, labels)
        before = pairs + "," if pairs else ""
        braced = f"{{{pairs}}}" if pairs else ""
        running = 0
        for bound, count in zip(bounds, series.counts, strict=True):
            running += count
            yield f'{name}_bucket{{{before}le="{bound}"}} {running}'
        yield f"{name}_sum{braced} {_number(series.total)}"
        yield f"{name}_count{braced} {running}"


def _attributes(instrument: Instrument, labels: Labels) -> dict[str, str]:
    return {name: value for name, value in zip(instrument.labels, labels, strict=True) if value}


def _otlp_sums(instrument: Instrument, series: Mapping[Labels, float], since: int, now: int) -> otlp.Metric:
    points = [otlp.NumberDataPoint(_attributes(instrument, k), since, now, v) for k, v in series.items()]
    data: otlp.Gauge | otlp.Sum = otlp.Gauge(points)
    if instrument.kind == "counter":
        data = otlp.Sum(points, otlp.AggregationTemporality.CUMULATIVE, is_monotonic=True)
    return otlp.Metric(instrument.name, instrument.help, instrument.unit, data)


def _otlp_histogram(instrument: Instrument, series: Mapping[Labels, Distribution], since: int, now: int) -> otlp.Metric:
    points = [
        otlp.HistogramDataPoint(
            _attributes(instrument, labels),
            since,
            now,
            sum(found.counts),
            found.total,
            found.counts,
            instrument.bounds,
            min=found.low,
            max=found.high,
        )
        for labels, found in series.items()
    ]
    data = otlp.Histogram(points, otlp.AggregationTemporality.CUMULATIVE)
    return otlp.Metric(instrument.name, instrument.help, instrument.unit, data)
