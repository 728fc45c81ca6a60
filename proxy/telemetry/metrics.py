"""What Weir counts, in a registry of prometheus_client, as ``GET /metrics`` shows it.

Calls of models have the names of the newest GenAI conventions, everything else begins with
``weir_``. The bounds of the GenAI histograms are those of the conventions; 25 ms and 5 ms are among
the others because they are promised.

What a label may hold is bounded, because some of it comes from outside, model names above all: a
value has at most 128 characters and nothing in it that looks like a credential, a label 200 values,
a metric 2,000 series (a histogram 500). What goes beyond that is counted under ``other``, so that
sums stay right.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, Self

import msgspec
import prometheus_client
from prometheus_client import (
    CollectorRegistry,
    ProcessCollector,
    disable_created_metrics,
    exposition,
)
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from proxy.errors import redact
from proxy.tap import NO_USAGE, ReportedUsage
from proxy.telemetry import names

disable_created_metrics()  # type: ignore[no-untyped-call]

MAX_SERIES: Final = 2_000
MAX_HISTOGRAM_SERIES: Final = 500
MAX_VALUES: Final = 200
MAX_LABEL_LEN: Final = 128
OTHER: Final = "other"
SCHEME: Final = "http"  # Weir itself serves no other; TLS ends in front of it
OPENMETRICS: Final = "application/openmetrics-text"

SECONDS: Final = (
    0.01,
    0.02,
    0.04,
    0.08,
    0.16,
    0.32,
    0.64,
    1.28,
    2.56,
    5.12,
    10.24,
    20.48,
    40.96,
    81.92,
)
TOKENS: Final = tuple(float(4**power) for power in range(14))
SHORT_SECONDS: Final = (
    0.0001,
    0.00025,
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    1.0,
)
WAITS: Final = (*SHORT_SECONDS, 2.5, 10.0, 40.0)
REQUEST_SECONDS: Final = (
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    20.0,
    40.0,
    80.0,
    300.0,
)
SHARES: Final = (0.25, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 1.0, 1.25)
RATIOS: Final = (0.5, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 15.0, 30.0, 100.0)

Labels = tuple[str, ...]
Read = Callable[[], Mapping[Labels, float]]
"""What returns the values of a metric by the values of its labels."""


class BoundedLabels(MetricWrapperBase):
    """A metric whose label values and number of series are bounded."""

    max_series = MAX_SERIES

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._values: tuple[set[str], ...] = tuple(set() for _ in self._labelnames)

    def labels(self, *labelvalues: str) -> Self:  # type: ignore[override]
        """The series of these label values, or the one that counts what is beyond the bounds."""
        # most are there: no need of the library's lock and checks
        known: Any = self._metrics.get(labelvalues)
        return known or super().labels(*self._admit(labelvalues))

    def collect(self) -> Iterable[Metric]:
        """The samples; a label without a value is left out, as Prometheus takes both for the same
        series.
        """
        for family in super().collect():
            family.samples = [
                s._replace(labels={k: v for k, v in s.labels.items() if v}) for s in family.samples
            ]
            yield family

    def _admit(self, labelvalues: Labels) -> Labels:
        admitted = tuple(map(_admitted, labelvalues, self._values))
        if admitted in self._metrics:
            return admitted
        if len(self._metrics) >= self.max_series - 1:
            return (OTHER,) * len(labelvalues)
        for value, seen in zip(admitted, self._values, strict=True):
            seen.add(value)
        return admitted


def _admitted(value: str, seen: set[str]) -> str:
    """The value as it may be shown: itself if known, made harmless if it is new, ``other`` if there
    is no room.
    """
    short = value[:MAX_LABEL_LEN]
    if short in seen:
        return short
    # a client's JSON may hold half a character
    harmless = redact(short).encode("utf-8", "replace").decode()
    return harmless if harmless in seen or len(seen) < MAX_VALUES else OTHER


class Counter(BoundedLabels, prometheus_client.Counter):
    """A counter with bounded labels."""


class Histogram(BoundedLabels, prometheus_client.Histogram):
    """A histogram with bounded labels."""

    max_series = MAX_HISTOGRAM_SERIES


class Watched(Collector):
    """A metric whose values are read when the page is; values of several sources for the same
    labels are added up.
    """

    def __init__(
        self,
        family: type[CounterMetricFamily | GaugeMetricFamily],
        name: str,
        documentation: str,
        *labelnames: str,
        registry: CollectorRegistry,
    ) -> None:
        self._family = family
        self._name = name
        self._documentation = documentation
        self._labelnames = labelnames
        self._reads: list[Read] = []
        registry.register(self)

    def watch(self, read: Read) -> None:
        """Show what ``read`` returns."""
        self._reads.append(read)

    def describe(self) -> Iterable[Metric]:
        """The metric without values."""
        return [self._family(self._name, self._documentation, labels=self._labelnames)]

    def collect(self) -> Iterable[Metric]:
        """The metric with its present values."""
        sums: dict[Labels, float] = {}
        for read in self._reads:
            for labels, value in read().items():
                sums[labels] = sums.get(labels, 0) + value
        family = self._family(self._name, self._documentation, labels=self._labelnames)
        for labels, value in sums.items():
            family.add_metric(labels, value)
        return [family]


class ModelCall(msgspec.Struct, frozen=True, kw_only=True):
    """One call of a model that has ended; times are seconds, ``error`` is empty where there was
    none.
    """

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


def _labels(*attributes: str) -> list[str]:
    return [attribute.replace(".", "_") for attribute in attributes]


class Metrics:
    """The metrics of one process. Counting is safe from any thread."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        call = (
            names.OPERATION_NAME,
            names.PROVIDER_NAME,
            names.REQUEST_MODEL,
            names.RESPONSE_MODEL,
            names.SERVER_ADDRESS,
            names.SERVER_PORT,
        )
        self.call_duration = self._histogram(
            "gen_ai_client_inference_duration_seconds",
            "Duration of a call to the upstream, to its last byte",
            *call,
            names.ERROR_TYPE,
            buckets=SECONDS,
        )
        self.call_first_chunk = self._histogram(
            "gen_ai_client_inference_time_to_first_chunk_seconds",
            "Time to the first chunk of a streamed answer",
            *call,
            buckets=SECONDS,
        )
        self.call_input = self._histogram(
            "gen_ai_client_inference_operation_input_tokens",
            "Tokens of the prompt that the upstream reported, cached ones included, per call",
            *call,
            buckets=TOKENS,
        )
        self.call_output = self._histogram(
            "gen_ai_client_inference_operation_output_tokens",
            "Tokens of the answer that the upstream reported, per call",
            *call,
            buckets=TOKENS,
        )
        self.input_tokens = self._counter(
            "gen_ai_client_inference_usage_input_tokens",
            "Tokens of prompts that the upstream reported, cached ones included",
            *call,
        )
        self.output_tokens = self._counter(
            "gen_ai_client_inference_usage_output_tokens",
            "Tokens of answers that the upstream reported",
            *call,
        )
        self.cache_read_tokens = self._counter(
            "gen_ai_client_inference_usage_cache_read_input_tokens",
            "Tokens of prompts that were read from the provider's cache",
            *call,
        )
        self.cache_write_tokens = self._counter(
            "gen_ai_client_inference_usage_cache_write_input_tokens",
            "Tokens of prompts that were written to the provider's cache",
            *call,
        )
        self.reasoning_tokens = self._counter(
            "gen_ai_client_inference_usage_reasoning_output_tokens",
            "Tokens of answers that were reasoning",
            *call,
        )
        self.server_duration = self._histogram(
            "http_server_request_duration_seconds",
            "Duration of a client's request, from its head to the end of its answer; probes and"
            " scrapes are left out",
            names.HTTP_METHOD,
            names.HTTP_ROUTE,
            names.HTTP_STATUS,
            names.ERROR_TYPE,
            names.URL_SCHEME,
            buckets=REQUEST_SECONDS,
        )
        self.requests = self._counter(
            "weir_requests", "Requests by outcome", names.OUTCOME, names.POLICY
        )
        self.tokens = self._counter(
            "weir_tokens", "Tokens as sent by clients, as forwarded, and saved", names.KIND
        )
        self.key_tokens = self._counter(
            "weir_key_tokens",
            "Which key takes what: tokens forwarded and saved by Weir's count; read from a cache"
            " and answered, as reported",
            names.KIND,
            names.TENANT,
            names.KEY_NAME,
        )
        self.cost = self._counter(
            "weir_cost",
            "List price of prompts and answers: forwarded, and what the clients' own arrays would"
            " have cost (unmanaged)",
            names.KIND,
            names.TENANT,
            names.KEY_NAME,
        )
        self.cache_tokens = self._counter(
            "weir_cache_tokens",
            "Prompts of requests whose upstream says what its cache gave: all of the prompt, and"
            " what was read and written",
            names.KIND,
        )
        self.cache_requests = self._counter(
            "weir_cache_requests",
            "Requests by who changed the beginning that a cache could have held, and whether it had"
            " had time to go cold",
            names.PREFIX_CHANGED,
            names.CACHE_COLD,
        )
        self.actions = self._counter(
            "weir_actions", "Units changed or removed, by layer", names.LAYER
        )
        self.events = self._counter(
            "weir_events", "What the planner reported of requests, by kind", names.KIND
        )
        self.pressure = self._histogram(
            "weir_pressure",
            "Forwarded tokens over the base of the policy",
            names.ZONE,
            buckets=SHARES,
        )
        self.overflows = self._counter(
            "weir_overflows", "Upstream said that the prompt does not fit"
        )
        self.retries = self._counter(
            "weir_retries", "Attempts after the first one, by reason", names.REASON
        )
        self.summarizer_calls = self._counter(
            "weir_summarizer_calls", "Calls of the summariser", names.RESULT
        )
        self.summarizer_tokens = self._counter(
            "weir_summarizer_tokens",
            "Tokens of the summariser's calls: asked, cached of these, and answered",
            names.KIND,
        )
        self.summarizer_cost = self._counter(
            "weir_summarizer_cost",
            "List price of the summariser's calls, which no other cost holds",
            names.TENANT,
        )
        self.preparations = self._counter(
            "weir_preparations",
            "Summaries written after an answer for a batch to come: prepared, used by one, or"
            " wasted",
            names.RESULT,
        )
        self.checkpoints = self._counter(
            "weir_checkpoints", "States of conversations that were saved, by reason", names.REASON
        )
        self.budget_refusals = self._counter(
            "weir_budget_refusals",
            "Requests that a budget of a key or a team had no room for",
            names.KEY_NAME,
            names.TEAM,
            names.PERIOD,
            names.UNIT,
        )
        self.degraded = self._counter(
            "weir_degraded", "Requests managed with a part missing", names.REASON
        )
        self.compression = self._histogram(
            "weir_compression_ratio",
            "Tokens before over tokens after, of each message or history that was condensed",
            buckets=RATIOS,
        )
        self.alerts = self._counter(
            "weir_alerts",
            "Alerts that opened, by level, class and kind",
            names.ALERT_LEVEL,
            names.ALERT_CLASS,
            names.ALERT_KIND,
        )
        self.alerts_undelivered = self._counter(
            "weir_alerts_undelivered",
            "Alerts that the webhook did not get, by reason",
            names.REASON,
        )
        self.store_latency = self._histogram(
            "weir_store_latency_seconds",
            "Time of a store operation",
            names.STORE_OPERATION,
            buckets=SHORT_SECONDS,
        )
        self.overhead = self._histogram(
            "weir_overhead_seconds",
            "Time that Weir itself added to a request; those that waited for a summariser are"
            " labelled as such",
            names.SUMMARIZER,
            buckets=WAITS,
        )
        self.settlement = self._histogram(
            "weir_settlement_seconds",
            "Time that watching a request took after its answer: health, metrics, trace, log, and"
            " its row",
            buckets=SHORT_SECONDS,
        )
        self.loop_lag = self._histogram(
            "weir_loop_lag_seconds",
            "How late the event loop wakes a task that sleeps, twice a second",
            buckets=SHORT_SECONDS,
        )
        self.active_requests = prometheus_client.Gauge(
            "http_server_active_requests",
            "Requests on the managed route that are being answered",
            registry=self.registry,
        )
        self.active_streams = prometheus_client.Gauge(
            "weir_streams_active",
            "Answers on the managed route that are being streamed",
            registry=self.registry,
        )
        self.build = prometheus_client.Gauge(
            "weir_build_info",
            "Always 1; the version is a label",
            _labels(names.VERSION),
            registry=self.registry,
        )
        self.health = self._watched(
            "weir_health",
            "Mean of each health metric over the conversations served last; one that was not"
            " measured is absent",
            names.HEALTH_METRIC,
        )
        self.unauthorised = self._watched(
            "weir_unauthorised",
            "Requests without a right key: it was missing, unknown, or one of too many (held_off)",
            names.REASON,
            family=CounterMetricFamily,
        )
        self.budget_used = self._watched(
            "weir_budget_used_ratio",
            "Share of their budgets that keys and teams have used, when it was looked up last",
            names.KEY_NAME,
            names.TEAM,
            names.PERIOD,
            names.UNIT,
        )
        self.store_waiting = self._watched(
            "weir_store_waiting",
            "What waits in memory to be stored: exchanges' rows, and changes that the store"
            " refused",
            names.KIND,
        )
        self.store_size = self._watched(
            "weir_store_size_bytes", "Bytes in use of the database, measured each hour"
        )
        self.store_growth = self._watched(
            "weir_store_growth_bytes",
            "Bytes by which the database grew in 24h, 7d and 30d; absent while it is not known for"
            " so long",
            names.PERIOD,
        )
        self.tasks = self._watched(
            "weir_tasks", "Asynchronous tasks that are under way; it rises with what is in flight"
        )
        self.windows_learned = self._watched(
            "weir_windows_learned",
            "Windows that hold because of an upstream's errors, stated there or inferred from"
            " refusals",
        )
        self.queue = self._watched(
            "weir_queue",
            "What waits: bodies for room, work for a thread, plans for a process, transactions,"
            " conversations to prepare",
            names.KIND,
        )
        self.bodies_held = self._watched(
            "weir_bodies_held_bytes", "Bytes of the bodies of requests that are being answered"
        )
        self.connections = self._watched(
            "weir_connections",
            "Connections to upstreams and PostgreSQL, processes that plan, busy and idle",
            names.KIND,
        )
        self.dropped = self._watched(
            "weir_telemetry_dropped",
            "Spans and log lines that were not delivered",
            names.KIND,
            family=CounterMetricFamily,
        )
        ProcessCollector(registry=self.registry)

    def observe_request(
        self,
        *,
        method: str,
        route: str,
        status: int | None,
        error: str,
        seconds: float,
        trace: str | None = None,
    ) -> None:
        """Count a client's request that was answered in ``seconds``; ``trace`` is shown as an
        example.
        """
        series = self.server_duration.labels(
            method, route, "" if status is None else str(status), error, SCHEME
        )
        series.observe(seconds, exemplar(trace))

    def observe_call(self, call: ModelCall) -> None:
        """Count a call of a model."""
        port = "" if call.port is None else str(call.port)
        labels = (
            call.operation,
            call.provider,
            call.model,
            call.response_model,
            call.address,
            port,
        )
        usage = call.usage
        self.call_duration.labels(*labels, call.error).observe(call.seconds)
        if call.first_chunk is not None:
            self.call_first_chunk.labels(*labels).observe(call.first_chunk)
        if usage.prompt is not None:
            self.call_input.labels(*labels).observe(usage.prompt)
            self.input_tokens.labels(*labels).inc(usage.prompt)
        if usage.completion is not None:
            self.call_output.labels(*labels).observe(usage.completion)
            self.output_tokens.labels(*labels).inc(usage.completion)
        if usage.cached is not None:
            self.cache_read_tokens.labels(*labels).inc(usage.cached)
        if usage.written is not None:
            self.cache_write_tokens.labels(*labels).inc(usage.written)
        if usage.reasoning is not None:
            self.reasoning_tokens.labels(*labels).inc(usage.reasoning)

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """The page and its content type: OpenMetrics, which has examples, where ``accept`` names
        it.
        """
        if OPENMETRICS in accept:
            page: bytes = openmetrics.generate_latest(self.registry)  # type: ignore[no-untyped-call]
            return page, openmetrics.CONTENT_TYPE_LATEST
        return exposition.generate_latest(self.registry), exposition.CONTENT_TYPE_PLAIN_0_0_4

    def _counter(self, name: str, documentation: str, *attributes: str) -> Counter:
        return Counter(name, documentation, _labels(*attributes), registry=self.registry)

    def _histogram(
        self, name: str, documentation: str, *attributes: str, buckets: tuple[float, ...]
    ) -> Histogram:
        return Histogram(
            name, documentation, _labels(*attributes), registry=self.registry, buckets=buckets
        )

    def _watched(
        self,
        name: str,
        documentation: str,
        *attributes: str,
        family: type[CounterMetricFamily | GaugeMetricFamily] = GaugeMetricFamily,
    ) -> Watched:
        return Watched(family, name, documentation, *_labels(*attributes), registry=self.registry)


def exemplar(trace: str | None) -> dict[str, str] | None:
    """The example that a value of a histogram has, None without a trace."""
    return None if trace is None else {"trace_id": trace}
