"""Everything that Weir counts, from any thread: recorded in half a microsecond, read as Prometheus text or as OTLP.

The aggregates are Weir's own, because ``GET /metrics`` must work without any exporter, OpenTelemetry has no histogram
that can be observed from outside, and prometheus-client's children cost twice as much (three times with its files for
several processes) and keep neither the extremes that OTLP has nor the means that gauges are merged by.

What a label may hold is bounded, because some of it comes from outside, model names above all: a text has at most 128
characters and nothing in it that looks like a credential, a label 200 values, an instrument 2,000 series (a histogram
500). What goes beyond that is counted under ``other``, so that sums stay right.
"""

import threading
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf
from pathlib import Path

from opentelemetry.sdk.metrics import export as otlp
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from proxy.redaction import redact
from proxy.tap import NO_USAGE, ReportedUsage
from proxy.telemetry import instruments, names
from proxy.telemetry.exposition import Family, Labels, Series, WorkerReadings, as_otlp, as_text
from proxy.telemetry.instruments import Instrument

MAX_SUMS = 2_000
MAX_DISTRIBUTIONS = 500
MAX_VALUES = 200
MAX_LABEL_LEN = 128
OTHER = "other"
SCHEME = "http"  # Weir itself serves no other; TLS ends in front of it


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCall:
    """One call to a model that has ended: seconds it took, its answer's model and usage, seconds to the first chunk."""

    provider: str
    model: str
    seconds: float
    operation: str = names.OPERATION
    response_model: str = ""
    address: str = ""
    port: int | None = None
    error: str = ""
    usage: ReportedUsage = NO_USAGE
    first_chunk: float | None = None


class Metrics:
    """The metrics of one process, by the instruments of the table.

    ``active`` and ``streams`` are the requests that are being answered and the answers that are being streamed; the
    event loop alone changes them. With ``newest`` calls to models have the names of the newest GenAI conventions.
    """

    def __init__(self, *, newest: bool = False) -> None:
        self.active = 0
        self.streams = 0
        self._newest = newest
        self._lock = threading.Lock()
        self._shared: WorkerReadings | None = None
        recorded = (*(instruments.NEWEST_NAMES if newest else instruments.FIRST_NAMES), *instruments.OWN)
        self._series: dict[Instrument, dict[Labels, Series]] = {each: {} for each in recorded}
        self._values: dict[Instrument, tuple[set[str], ...]] = {
            each: tuple(set() for _ in each.labels) for each in recorded
        }
        self._watched: dict[Instrument, list[Callable[[], Mapping[Labels, float]]]] = {}
        self.watch(instruments.ACTIVE_REQUESTS, lambda: {(): self.active})
        self.watch(instruments.ACTIVE_STREAMS, lambda: {(): self.streams})

    def add(self, counter: Instrument, *labels: str, value: float = 1) -> None:
        """Count; negative values, NaN and infinity are ignored."""
        if not 0 <= value < inf:
            return
        of = self._series[counter]
        with self._lock:
            series = of.get(labels)
            if series is None:
                series = of.setdefault(self._admitted(counter, labels, MAX_SUMS), Series())
            series.total += value

    def record(self, histogram: Instrument, value: float, *labels: str) -> None:
        """Count ``value`` in its bucket (upper bounds are inclusive); negative values, NaN and infinity are ignored."""
        if not 0 <= value < inf:
            return
        of = self._series[histogram]
        with self._lock:
            series = of.get(labels)
            if series is None:
                empty = Series(0.0, [0] * (len(histogram.bounds) + 1), value, value)
                series = of.setdefault(self._admitted(histogram, labels, MAX_DISTRIBUTIONS), empty)
            series.counts[bisect_left(histogram.bounds, value)] += 1
            series.total += value
            if value < series.low:
                series.low = value
            if value > series.high:
                series.high = value

    def served(self, *, method: str, route: str, status: int | None, error: str, seconds: float) -> None:
        """A client's request ended; ``status`` None where no answer was begun, ``error`` a code or empty."""
        shown = "" if status is None else str(status)
        self.record(instruments.SERVER_DURATION, seconds, method, route, shown, error, SCHEME)

    def called(self, call: ModelCall) -> None:
        """Count a call to a model under the names that the operator chose."""
        port = "" if call.port is None else str(call.port)
        labels = (call.operation, call.provider, call.model, call.response_model, call.address, port)
        duration, first_chunk = instruments.OPERATION_DURATION, instruments.TIME_TO_FIRST_CHUNK
        if self._newest:
            duration, first_chunk = instruments.INFERENCE_DURATION, instruments.INFERENCE_FIRST_CHUNK
        self.record(duration, call.seconds, *labels, call.error)
        if call.first_chunk is not None:
            self.record(first_chunk, call.first_chunk, *labels)
        self._used(call.usage, labels)

    def _used(self, usage: ReportedUsage, labels: Labels) -> None:
        if not self._newest:
            for kind, tokens in (("input", usage.prompt), ("output", usage.completion)):
                if tokens is not None:
                    self.record(instruments.TOKEN_USAGE, tokens, *labels, kind)
            return
        for histogram, tokens in (
            (instruments.INPUT_TOKENS, usage.prompt),
            (instruments.OUTPUT_TOKENS, usage.completion),
        ):
            if tokens is not None:
                self.record(histogram, tokens, *labels)
        for counter, tokens in (
            (instruments.INPUT_USAGE, usage.prompt),
            (instruments.OUTPUT_USAGE, usage.completion),
            (instruments.CACHE_READ_USAGE, usage.cached),
            (instruments.CACHE_WRITE_USAGE, usage.written),
            (instruments.REASONING_USAGE, usage.reasoning),
        ):
            if tokens is not None:
                self.add(counter, *labels, value=tokens)

    def watch(self, instrument: Instrument, read: Callable[[], Mapping[Labels, float]]) -> None:
        """Read a counter or gauge that someone else keeps, whenever the metrics are read."""
        self._watched.setdefault(instrument, []).append(read)

    def read(self) -> list[Family]:
        """Everything at this moment; what two watched ones say of the same labels is added up."""
        with self._lock:
            recorded = ((each, of) for each, of in self._series.items() if each not in self._watched)
            found: list[Family] = [
                (each, {labels: series.copy() for labels, series in of.items()}) for each, of in recorded
            ]
        for instrument, reads in self._watched.items():
            sums: dict[Labels, Series] = {}
            for read in reads:
                for labels, value in read().items():
                    sums.setdefault(labels, Series()).total += value
            found.append((instrument, sums))
        return found

    def share(self, folder: Path) -> None:
        """Have this process be one of several that leave their readings in ``folder``."""
        self._shared = WorkerReadings(folder)

    def leave(self) -> None:
        """Leave the readings for the other processes, if there are any; blocks."""
        if self._shared is not None:
            self._shared.leave(self.read())

    def render(self) -> bytes:
        """Prometheus text format 0.0.4, of all processes that share; blocks for milliseconds."""
        found = self.read()
        return as_text(found if self._shared is None else self._shared.together(found))

    def collect(self, resource: Resource, scope: InstrumentationScope, *, since: int, now: int) -> otlp.MetricsData:
        """The same as cumulative OTLP data points from ``since`` to ``now``, ns since the epoch."""
        found = [as_otlp(instrument, series, since, now) for instrument, series in self.read() if series]
        return otlp.MetricsData([otlp.ResourceMetrics(resource, [otlp.ScopeMetrics(scope, found, "")], "")])

    def _admitted(self, instrument: Instrument, labels: Labels, most: int) -> Labels:
        """The labels to count under; values that are too many, or all of them, are ``other``."""
        known, values = self._series[instrument], self._values[instrument]
        key = tuple(map(_admitted, labels, values))
        if key in known:
            return key
        if len(known) >= most - 1:
            return (OTHER,) * len(labels)
        for each, seen in zip(key, values, strict=True):
            seen.add(each)
        return key


def _admitted(label: str, seen: set[str]) -> str:
    """The label as it may be shown: itself if known, made harmless if it is new, ``other`` if there is no room."""
    label = label[:MAX_LABEL_LEN]
    if label in seen:
        return label
    harmless = redact(label).encode("utf-8", "replace").decode()  # a client's JSON may hold half a character
    return harmless if harmless in seen or len(seen) < MAX_VALUES else OTHER
