"""Everything that Weir counts, from any thread: recorded in half a microsecond, read as Prometheus text or as OTLP.

Every metric that leaves the process stands in one table: its name, unit, labels and bounds (those of the conventions).
The GenAI metrics have two sets of names: :data:`FIRST_NAMES` of the conventions 1.37 to 1.41, which dashboards read
today, and :data:`NEWEST_NAMES`, which the operator has to opt in to. No process reports both. A histogram of times that
are Weir's own has bounds of its own; 25 ms and 5 ms are among them because they are promised.

The aggregates are Weir's own, because ``GET /metrics`` must work without any exporter, OpenTelemetry has no histogram
that can be observed from outside, and prometheus-client costs three times as much and does not keep the extremes that
OTLP has.

What a label may hold is bounded, because some of it comes from outside, model names above all: a text has at most 128
characters and nothing in it that looks like a credential, a label 200 values, an instrument 2,000 series (a histogram
500). What goes beyond that is counted under ``other``, so that sums stay right.
"""

import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from math import inf
from typing import Final, Literal, cast

import msgspec
from msgspec.structs import replace

from proxy.errors import redact
from proxy.tap import NO_USAGE, ReportedUsage
from proxy.telemetry import names


class Instrument(msgspec.Struct, frozen=True, eq=False):
    """One metric: OpenTelemetry name, unit, what it says, attribute names in order, upper bounds of buckets."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    unit: str
    help: str
    labels: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()

    @property
    def prometheus(self) -> str:
        unit = {"s": "_seconds", "By": "_bytes"}.get(self.unit, "")
        return self.name.replace(".", "_") + unit + ("_total" if self.kind == "counter" else "")


Labels = tuple[str, ...]
Exemplar = tuple[str, float, float]
"""The trace of one value in a bucket, the value, and when it was, s since the epoch."""


class Series(msgspec.Struct, array_like=True):
    """One series: a sum or a value; of a histogram also counts per bucket (the last one is +Inf), the extremes, and by
    bucket the newest value that has a trace."""

    total: float = 0
    counts: list[int] = []
    low: float = 0.0
    high: float = 0.0
    exemplars: dict[int, Exemplar] = {}

    def copy(self) -> "Series":
        return Series(self.total, list(self.counts), self.low, self.high, dict(self.exemplars))


Family = tuple[Instrument, Mapping[Labels, Series]]

SECONDS: Final = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
TOKENS: Final = tuple(float(4**power) for power in range(14))
SHORT_SECONDS: Final = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)
WAITS: Final = (*SHORT_SECONDS, 2.5, 10.0, 40.0)
REQUEST_SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 300.0)
SHARES: Final = (0.25, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 1.0, 1.25)
RATIOS: Final = (0.5, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 15.0, 30.0, 100.0)


def _counter(name: str, unit: str, said: str, *labels: str) -> Instrument:
    return Instrument(name, "counter", unit, said, labels)


def _gauge(name: str, unit: str, said: str, *labels: str) -> Instrument:
    return Instrument(name, "gauge", unit, said, labels)


def _histogram(name: str, unit: str, said: str, *labels: str, bounds: tuple[float, ...]) -> Instrument:
    return Instrument(name, "histogram", unit, said, labels, bounds)


_CALL = (
    *(names.OPERATION_NAME, names.PROVIDER_NAME, names.REQUEST_MODEL, names.RESPONSE_MODEL),
    *(names.SERVER_ADDRESS, names.SERVER_PORT),
)

# fmt: off
TOKEN_USAGE = _histogram(
    "gen_ai.client.token.usage", "{token}", "Tokens that the upstream reported, per call",
    *_CALL, names.TOKEN_TYPE, bounds=TOKENS,
)
OPERATION_DURATION = _histogram(
    "gen_ai.client.operation.duration", "s", "Duration of a call to the upstream, to its last byte",
    *_CALL, names.ERROR_TYPE, bounds=SECONDS,
)
TIME_TO_FIRST_CHUNK = _histogram(
    "gen_ai.client.operation.time_to_first_chunk", "s", "Time to the first chunk of a streamed answer",
    *_CALL, bounds=SECONDS,
)

FIRST_NAMES: Final = (TOKEN_USAGE, OPERATION_DURATION, TIME_TO_FIRST_CHUNK)
NEWEST_NAMES: Final = (
    replace(OPERATION_DURATION, name="gen_ai.client.inference.duration"),
    replace(TIME_TO_FIRST_CHUNK, name="gen_ai.client.inference.time_to_first_chunk"),
    _histogram(
        "gen_ai.client.inference.operation.input_tokens", "{token}",
        "Tokens of the prompt that the upstream reported, cached ones included, per call", *_CALL, bounds=TOKENS,
    ),
    _histogram(
        "gen_ai.client.inference.operation.output_tokens", "{token}",
        "Tokens of the answer that the upstream reported, per call", *_CALL, bounds=TOKENS,
    ),
    _counter(
        "gen_ai.client.inference.usage.input_tokens", "{token}",
        "Tokens of prompts that the upstream reported, cached ones included", *_CALL,
    ),
    _counter(
        "gen_ai.client.inference.usage.output_tokens", "{token}",
        "Tokens of answers that the upstream reported", *_CALL,
    ),
    _counter(
        "gen_ai.client.inference.usage.cache_read.input_tokens", "{token}",
        "Tokens of prompts that were read from the provider's cache", *_CALL,
    ),
    _counter(
        "gen_ai.client.inference.usage.cache_write.input_tokens", "{token}",
        "Tokens of prompts that were written to the provider's cache", *_CALL,
    ),
    _counter(
        "gen_ai.client.inference.usage.reasoning.output_tokens", "{token}",
        "Tokens of answers that were reasoning", *_CALL,
    ),
)
"""In the order in which a call is told."""

SERVER_DURATION = _histogram(
    "http.server.request.duration", "s",
    "Duration of a client's request, from its head to the end of its answer; probes and scrapes are left out",
    names.HTTP_METHOD, names.HTTP_ROUTE, names.HTTP_STATUS, names.ERROR_TYPE, names.URL_SCHEME, bounds=REQUEST_SECONDS,
)
REQUESTS = _counter("weir.requests", "{request}", "Requests by outcome", names.OUTCOME, names.POLICY)
TOKENS_SEEN = _counter("weir.tokens", "{token}", "Tokens as sent by clients, as forwarded, and saved", names.KIND)
KEY_TOKENS = _counter(
    "weir.key.tokens", "{token}",
    "Which key takes what: tokens forwarded and saved by Weir's count; read from a cache and answered, as reported",
    names.KIND, names.TENANT, names.KEY_NAME,
)
COST = _counter(
    "weir.cost", "USD",
    "List price of prompts and answers: forwarded, and what the clients' own arrays would have cost (unmanaged)",
    names.KIND, names.TENANT, names.KEY_NAME,
)
CACHE_TOKENS = _counter(
    "weir.cache.tokens", "{token}",
    "Prompts of requests whose upstream says what its cache gave: all of the prompt, and what was read and written",
    names.KIND,
)
CACHE_REQUESTS = _counter(
    "weir.cache.requests", "{request}",
    "Requests by who changed the beginning that a cache could have held, and whether it had had time to go cold",
    names.PREFIX_CHANGED, names.CACHE_COLD,
)
ACTIONS = _counter("weir.actions", "{action}", "Units changed or removed, by layer", names.LAYER)
EVENTS = _counter("weir.events", "{event}", "What the planner reported of requests, by kind", names.KIND)
PRESSURE = _histogram("weir.pressure", "1", "Forwarded tokens over the base of the policy", names.ZONE, bounds=SHARES)
OVERFLOWS = _counter("weir.overflows", "{overflow}", "Upstream said that the prompt does not fit")
RETRIES = _counter("weir.retries", "{attempt}", "Attempts after the first one, by reason", names.REASON)
SUMMARIZER_CALLS = _counter("weir.summarizer.calls", "{call}", "Calls of the summariser", names.RESULT)
SUMMARIZER_TOKENS = _counter(
    "weir.summarizer.tokens", "{token}", "Tokens of the summariser's calls: asked, cached of these, and answered",
    names.KIND,
)
SUMMARIZER_COST = _counter(
    "weir.summarizer.cost", "USD", "List price of the summariser's calls, which no other cost holds", names.TENANT,
)
PREPARATIONS = _counter(
    "weir.preparations", "{summary}",
    "Summaries written after an answer for a batch to come: prepared, used by one, or wasted", names.RESULT,
)
CHECKPOINTS = _counter(
    "weir.checkpoints", "{checkpoint}", "States of conversations that were saved, by reason", names.REASON,
)
DEGRADED = _counter("weir.degraded", "{request}", "Requests managed with a part missing", names.REASON)
COMPRESSION = _histogram(
    "weir.compression.ratio", "1", "Tokens before over tokens after, of each message or history that was condensed",
    bounds=RATIOS,
)
ALERTS = _counter(
    "weir.alerts", "{alert}", "Alerts that opened, by level, class and kind",
    names.ALERT_LEVEL, names.ALERT_CLASS, names.ALERT_KIND,
)
ALERTS_UNDELIVERED = _counter(
    "weir.alerts.undelivered", "{alert}", "Alerts that the webhook did not get, by reason", names.REASON,
)
STORE_LATENCY = _histogram(
    "weir.store.latency", "s", "Time of a store operation", names.STORE_OPERATION, bounds=SHORT_SECONDS,
)
OVERHEAD = _histogram(
    "weir.overhead", "s",
    "Time that Weir itself added to a request; those that waited for a summariser are labelled as such",
    names.SUMMARIZER, bounds=WAITS,
)
SETTLEMENT = _histogram(
    "weir.settlement", "s",
    "Time that watching a request took after its answer: health, metrics, trace, log, and its row",
    bounds=SHORT_SECONDS,
)

ACTIVE_REQUESTS = _gauge(
    "http.server.active_requests", "{request}", "Requests on the managed route that are being answered",
)
ACTIVE_STREAMS = _gauge("weir.streams.active", "{stream}", "Answers on the managed route that are being streamed")
BUILD = _gauge("weir.build.info", "1", "Always 1; the version is a label", names.VERSION)
HEALTH = _gauge(
    "weir.health", "1",
    "Mean of each health metric over the conversations served last; one that was not measured is absent",
    names.HEALTH_METRIC
)
UNAUTHORISED = _counter(
    "weir.unauthorised", "{request}",
    "Requests without a right key: it was missing, unknown, or one of too many (held_off)", names.REASON,
)
STORE_WAITING = _gauge(
    "weir.store.waiting", "{row}",
    "What waits in memory to be stored: exchanges' rows, and changes that the store refused", names.KIND,
)
STORE_SIZE = _gauge("weir.store.size", "By", "Bytes in use of the database, measured each hour")
STORE_GROWTH = _gauge(
    "weir.store.growth", "By",
    "Bytes by which the database grew in 24h, 7d and 30d; absent while it is not known for so long",
    names.PERIOD
)
TASKS = _gauge("weir.tasks", "{task}", "Asynchronous tasks that are under way; it rises with what is in flight")
WINDOWS_LEARNED = _gauge(
    "weir.windows.learned", "{window}",
    "Windows that hold because of an upstream's errors, stated there or inferred from refusals"
)
LOOP_LAG = _histogram(
    "weir.loop.lag", "s", "How late the event loop wakes a task that sleeps, twice a second", bounds=SHORT_SECONDS,
)
QUEUE = _gauge(
    "weir.queue", "{item}",
    "What waits: bodies for room, work for a thread, plans for a process, transactions, conversations to prepare",
    names.KIND,
)
BODIES_HELD = _gauge("weir.bodies.held", "By", "Bytes of the bodies of requests that are being answered")
CONNECTIONS = _gauge(
    "weir.connections", "{connection}", "Connections to upstreams and PostgreSQL, processes that plan, busy and idle",
    names.KIND,
)
PROCESS_CPU = _counter("process.cpu", "s", "Time of processors that this process took")
PROCESS_RESIDENT = _gauge("process.resident.memory", "By", "Memory that is resident")
PROCESS_VIRTUAL = _gauge("process.virtual.memory", "By", "Memory that is mapped")
PROCESS_FDS = _gauge("process.open_fds", "{fd}", "File descriptors that are open")
PROCESS_MAX_FDS = _gauge("process.max_fds", "{fd}", "File descriptors that may be open")
PROCESS_START = _gauge("process.start.time", "s", "When the process began, since the epoch")
DROPPED = _counter("weir.telemetry.dropped", "{record}", "Spans and log lines that were not delivered", names.KIND)
# fmt: on

_NAMED = tuple(found for found in globals().values() if isinstance(found, Instrument))
OWN: Final = tuple(found for found in _NAMED if found not in FIRST_NAMES)
"""What is reported under either set of names."""


MAX_SUMS = 2_000
MAX_DISTRIBUTIONS = 500
MAX_VALUES = 200
MAX_LABEL_LEN = 128
OTHER = "other"
TRACED = frozenset({SERVER_DURATION, OVERHEAD})
Count = tuple[Instrument, float, Labels]
"""What is counted, how much of it, and the values of its labels."""
Named = tuple[Instrument, Labels]
_Told = tuple[tuple[Named, ...], list[tuple[float | None, ...]]]
MAX_TOLD = 2_000
MAX_WAITING = 64
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"
OPENMETRICS_TYPE = b"application/openmetrics-text"
SCHEME = "http"  # Weir itself serves no other; TLS ends in front of it


class ModelCall(msgspec.Struct, frozen=True, kw_only=True):
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
        recorded = (*(NEWEST_NAMES if newest else FIRST_NAMES), *OWN)
        self._series: dict[Instrument, dict[Labels, Series]] = {each: {} for each in recorded}
        self._values: dict[Instrument, tuple[set[str], ...]] = {
            each: tuple(set() for _ in each.labels) for each in recorded
        }
        self._watched: dict[Instrument, list[Callable[[], Mapping[Labels, float]]]] = {}
        self._told: dict[tuple[object, Hashable], _Told] = {}
        self._calls = _newest_of_call if newest else _first_of_call
        self.watch(ACTIVE_REQUESTS, lambda: {(): self.active})
        self.watch(ACTIVE_STREAMS, lambda: {(): self.streams})

    def tell(self, counts: Iterable[Count]) -> None:
        """Add each value to its sum, or count it in its bucket (upper bounds are inclusive), where it is one at all."""
        with self._lock:
            for instrument, value, labels in counts:
                if 0 <= value < inf:
                    self._count(instrument, labels, (value,), None)

    def told(
        self,
        names: Callable[..., Iterable[Named]],
        *key: Hashable,
        values: tuple[float | None, ...],
        trace: str | None = None,
    ) -> None:
        """The same of what ``names`` says of ``key``, which is asked once for each key; None is no value.

        ``trace`` is the one that they are from, kept as an example of a request's times.
        What is told without a trace is added up with what comes after it: that takes a tenth of the time.
        """
        with self._lock:
            told = self._told.get((names, key))
            if told is None:
                if len(self._told) >= MAX_TOLD:
                    self._add_up(self._told.values())
                    self._told.clear()
                told = self._told[names, key] = (tuple(names(*key)), [])
                self._add_up([(told[0], [values])], trace)  # its series begin now, not when they are read
            elif trace is not None:
                self._add_up([(told[0], [values])], trace)
            else:
                told[1].append(values)
                if len(told[1]) >= MAX_WAITING:
                    self._add_up([told])

    def _add_up(self, told: "Iterable[_Told]", trace: str | None = None) -> None:
        for places, rows in told:
            for (instrument, labels), *column in zip(places, *rows, strict=True):
                if found := _counted(column):
                    self._count(instrument, labels, found, trace)
            rows.clear()

    def _count(self, instrument: Instrument, labels: Labels, values: Sequence[float], trace: str | None) -> None:
        series = self._series[instrument].get(labels) or self._begun(instrument, labels, values[0])
        series.total = sum(values, series.total)
        if not instrument.bounds:
            return
        counts, buckets = series.counts, [*map(partial(bisect_left, instrument.bounds), values)]
        for bucket in buckets:
            counts[bucket] += 1
        if trace is not None and instrument in TRACED:
            series.exemplars |= {b: (trace, value, time.time()) for b, value in zip(buckets, values, strict=True)}
        series.low, series.high = min(series.low, *values), max(series.high, *values)

    def add(self, counter: Instrument, *labels: str, value: float = 1) -> None:
        self.tell(((counter, value, labels),))

    def record(self, histogram: Instrument, value: float, *labels: str) -> None:
        self.told(_alone, histogram, labels, values=(value,))

    def served(self, *, method: str, route: str, status: int | None, error: str, seconds: float) -> None:
        self.record(SERVER_DURATION, seconds, method, route, "" if status is None else str(status), error, SCHEME)

    def called(self, call: ModelCall) -> None:
        used, port = call.usage, "" if call.port is None else str(call.port)
        values: tuple[float | None, ...] = (call.seconds, call.first_chunk, used.prompt, used.completion)
        if self._newest:
            values += (used.prompt, used.completion, used.cached, used.written, used.reasoning)
        labels = (call.operation, call.provider, call.model, call.response_model, call.address, port)
        self.told(self._calls, labels, call.error, values=values)

    def watch(self, instrument: Instrument, read: Callable[[], Mapping[Labels, float]]) -> None:
        self._watched.setdefault(instrument, []).append(read)

    def read(self) -> list[Family]:
        with self._lock:
            self._add_up(self._told.values())
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

    def render(self, *, openmetrics: bool = False) -> bytes:
        return as_text(self.read(), openmetrics=openmetrics)

    def _begun(self, instrument: Instrument, labels: Labels, value: float) -> Series:
        bounds = instrument.bounds
        key = self._admitted(instrument, labels, MAX_DISTRIBUTIONS if bounds else MAX_SUMS)
        empty = Series(0.0, [0] * (len(bounds) + 1), value, value) if bounds else Series()
        return self._series[instrument].setdefault(key, empty)

    def _admitted(self, instrument: Instrument, labels: Labels, most: int) -> Labels:
        known, values = self._series[instrument], self._values[instrument]
        key = tuple(map(_admitted, labels, values))
        if key in known:
            return key
        if len(known) >= most - 1:
            return (OTHER,) * len(labels)
        for each, seen in zip(key, values, strict=True):
            seen.add(each)
        return key


def _alone(instrument: Instrument, labels: Labels) -> tuple[Named, ...]:
    return ((instrument, labels),)


def _counted(column: Sequence[float | None]) -> Sequence[float]:
    """The values among them that can be added up: looked for one by one only where one cannot."""
    if column.count(None) == len(column):
        return ()
    found = cast("Sequence[float]", [v for v in column if v is not None] if None in column else column)
    if min(found) >= 0 and sum(found) < inf:
        return found
    return [value for value in found if 0 <= value < inf]


def _first_of_call(labels: Labels, error: str) -> tuple[Named, ...]:
    used = [(TOKEN_USAGE, (*labels, kind)) for kind in ("input", "output")]
    return (OPERATION_DURATION, (*labels, error)), (TIME_TO_FIRST_CHUNK, labels), *used


def _newest_of_call(labels: Labels, error: str) -> tuple[Named, ...]:
    duration, *others = NEWEST_NAMES
    return (duration, (*labels, error)), *((each, labels) for each in others)


def _admitted(label: str, seen: set[str]) -> str:
    """The label as it may be shown: itself if known, made harmless if it is new, ``other`` if there is no room."""
    label = label[:MAX_LABEL_LEN]
    if label in seen:
        return label
    harmless = redact(label).encode("utf-8", "replace").decode()  # a client's JSON may hold half a character
    return harmless if harmless in seen or len(seen) < MAX_VALUES else OTHER


def as_text(families: Iterable[Family], *, openmetrics: bool = False) -> bytes:
    lines: list[str] = []
    for instrument, found in families:
        if found:
            name, said = instrument.prometheus, instrument.help.replace("\\", r"\\").replace("\n", r"\n")
            name = name.removesuffix("_total") if openmetrics else name
            lines += (f"# HELP {name} {said}", f"# TYPE {name} {instrument.kind}")
        for labels, series in found.items():
            lines += _samples(instrument, labels, series, openmetrics=openmetrics)
    lines += ["# EOF"] if openmetrics else []
    return "".join(line + "\n" for line in lines).encode("utf-8", "replace")


def _samples(instrument: Instrument, labels: Labels, series: Series, *, openmetrics: bool) -> Iterator[str]:
    name, named = instrument.prometheus, zip(instrument.labels, labels, strict=True)
    pairs = [f'{label.replace(".", "_")}="{_escape(value)}"' for label, value in named if value]
    braced, running = f"{{{','.join(pairs)}}}" if pairs else "", 0
    if not series.counts:
        yield f"{name}{braced} {_number(series.total)}"
        return
    bounds = map(repr if openmetrics else _number, instrument.bounds)
    for place, (bound, count) in enumerate(zip((*bounds, "+Inf"), series.counts, strict=True)):
        running += count
        bucket = ",".join((*pairs, f'le="{bound}"'))
        exemplar = _exemplar(series.exemplars.get(place)) if openmetrics else ""
        yield f"{name}_bucket{{{bucket}}} {running}{exemplar}"
    yield f"{name}_sum{braced} {_number(series.total)}"
    yield f"{name}_count{braced} {running}"


def _exemplar(given: Exemplar | None) -> str:
    return "" if given is None else f' # {{trace_id="{given[0]}"}} {given[1]!r} {given[2]:.3f}'


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(value)
