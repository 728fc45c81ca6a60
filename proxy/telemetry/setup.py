"""Telemetry as a whole: created once by the application, asked for a trace per request, shut down at the end.

Without an OTLP endpoint there are no spans and no threads; metrics are counted all the same, for ``/metrics``.
Exporting happens in threads behind bounded queues: a collector that is down, slow or silent costs spans, which
are counted, and never a request.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from os import urandom
from typing import Final
from urllib.parse import unquote
from uuid import uuid4

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics.export import MetricExporter, MetricsData
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.sdk.version import __version__ as sdk_version

from proxy.telemetry import instruments
from proxy.telemetry.metrics import Metrics
from proxy.telemetry.spans import NULL_TRACE, ExchangeTrace, Header, NullTrace, Parent, Recording, Trace

SHUTDOWN_SECONDS: Final = 2.0
LONGEST_STATE: Final = 2_048
_HEX: Final = frozenset(b"0123456789abcdef")


@dataclass(frozen=True, slots=True, kw_only=True)
class TelemetrySettings:
    """What the operator configured.

    ``otlp_endpoint`` is the collector's base URL (``http://collector:4318``) or the full URL of its traces;
    ``environment`` holds the standard ``OTEL_*`` variables, which stand above these settings except for the
    endpoint. ``capture_content`` allows message text in spans.
    """

    service_name: str = "weir"
    service_version: str = ""
    otlp_endpoint: str | None = None
    capture_content: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)

    def endpoint(self, signal: str) -> str | None:
        """The URL for ``traces`` or ``metrics``; None when the signal is switched off or has no destination."""
        env = self.environment
        if env.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
            return None
        if env.get(f"OTEL_{signal.upper()}_EXPORTER", "").strip().lower() == "none":
            return None
        if self.otlp_endpoint is None and (own := env.get(f"OTEL_EXPORTER_OTLP_{signal.upper()}_ENDPOINT")):
            return own
        base = (self.otlp_endpoint or env.get("OTEL_EXPORTER_OTLP_ENDPOINT") or "").rstrip("/")
        return f"{base.removesuffix('/v1/traces')}/v1/{signal}" if base else None

    def number(self, name: str, default: int) -> int:
        """A positive integer variable, else ``default``."""
        text = self.environment.get(name, "").strip()
        return int(text) if text.isdecimal() and int(text) > 0 else default

    @property
    def newest_names(self) -> bool:
        """Whether the operator opted in to the newest GenAI conventions (``OTEL_SEMCONV_STABILITY_OPT_IN``)."""
        chosen = self.environment.get("OTEL_SEMCONV_STABILITY_OPT_IN", "").split(",")
        return "gen_ai_latest_experimental" in {name.strip() for name in chosen}

    def resource(self) -> Resource:
        """Who emits: service, SDK, what ``OTEL_RESOURCE_ATTRIBUTES`` adds, and an id of this process."""
        pairs = (p.partition("=") for p in self.environment.get("OTEL_RESOURCE_ATTRIBUTES", "").split(",") if "=" in p)
        return Resource(
            {
                "service.name": self.service_name,
                "service.version": self.service_version,
                "service.instance.id": str(uuid4()),
                "telemetry.sdk.language": "python",
                "telemetry.sdk.name": "opentelemetry",
                "telemetry.sdk.version": sdk_version,
                **{name.strip(): unquote(value.strip()) for name, _, value in pairs},
                **({"service.name": name} if (name := self.environment.get("OTEL_SERVICE_NAME")) else {}),
            }
        )


@dataclass(frozen=True, slots=True)
class Sampler:
    """Which traces are recorded: a share of those that start here, and the client's word for those that do not."""

    share: float = 1.0
    parent_based: bool = True

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> "Sampler":
        """``OTEL_TRACES_SAMPLER`` and its ``_ARG``; unknown values sample everything, like the SDK's."""
        name = environment.get("OTEL_TRACES_SAMPLER", "parentbased_always_on").strip().lower()
        kind = name.removeprefix("parentbased_")
        share = 0.0 if kind == "always_off" else 1.0
        if kind == "traceidratio":
            try:
                share = min(1.0, max(0.0, float(environment.get("OTEL_TRACES_SAMPLER_ARG", "1"))))
            except ValueError:
                share = 1.0
        return cls(share, parent_based=name not in {"always_on", "always_off", "traceidratio"})

    def keeps(self, trace: int, sampled: bool | None) -> bool:  # noqa: FBT001 - the caller's flag as it came
        """Whether to record ``trace``; ``sampled`` is the parent's flag, None without a parent."""
        if self.parent_based and sampled is not None:
            return sampled
        return (trace & 0xFFFF_FFFF_FFFF_FFFF) < self.share * 2**64


class Delivery(SpanExporter):
    """The exporter behind the queue, counting: at most ``room`` spans wait, whole exchanges above that are dropped."""

    def __init__(self, exporter: SpanExporter, *, room: int, batch: int, delay_ms: int) -> None:
        self.dropped = 0
        self.failed = 0
        self._exporter = exporter
        self._room = room
        self._entered = 0
        self._taken = 0
        self._batches: SpanProcessor = BatchSpanProcessor(
            self, max_queue_size=room, schedule_delay_millis=delay_ms, max_export_batch_size=batch
        )

    def emit(self, spans: Sequence[ReadableSpan]) -> None:
        """Queue the spans of one exchange, or count them as dropped; never waits."""
        if self._entered - self._taken + len(spans) > self._room:
            self.dropped += len(spans)
            return
        self._entered += len(spans)
        for span in spans:
            self._batches.on_end(span)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Called by the queue's thread with one batch."""
        self._taken += len(spans)
        result = self._exporter.export(spans)
        if result is not SpanExportResult.SUCCESS:
            self.failed += len(spans)
        return result

    def flush(self) -> None:
        """Export what waits; blocks."""
        self._batches.force_flush()

    def stop(self) -> None:
        """Export what waits and close; blocks as long as the exporter does."""
        self._batches.shutdown()

    def shutdown(self) -> None:
        """Close the exporter, which also ends its retries."""
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """What the exporter says."""
        return self._exporter.force_flush(timeout_millis)


class MetricPush:
    """Exports the metrics every ``seconds`` in a thread of its own, and once more when stopped."""

    def __init__(self, exporter: MetricExporter, collect: Callable[[], MetricsData], *, seconds: float) -> None:
        self._exporter = exporter
        self._collect = collect
        self._seconds = seconds
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="weir-metrics", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopping.wait(self._seconds):
            self._exporter.export(self._collect())
        self._exporter.export(self._collect())

    def stop(self) -> None:
        """Export a last time and close; blocks as long as the exporter does."""
        self._stopping.set()
        self._thread.join()
        self._exporter.shutdown()


class Telemetry:
    """Traces and metrics of one process; :meth:`create` makes one."""

    def __init__(
        self,
        metrics: Metrics,
        *,
        recording: Recording | None = None,
        sampler: Sampler | None = None,
        delivery: Delivery | None = None,
        push: MetricPush | None = None,
        capture_content: bool = False,
    ) -> None:
        self.metrics = metrics
        self.capture_content = capture_content
        self._recording = recording
        self._sampler = sampler or Sampler()
        self._delivery = delivery
        self._push = push

    @classmethod
    def create(
        cls,
        settings: TelemetrySettings,
        *,
        span_exporter: SpanExporter | None = None,
        metric_exporter: MetricExporter | None = None,
        clock: Callable[[], int] = time.time_ns,
    ) -> "Telemetry":
        """Telemetry as configured; an exporter that is given stands for the endpoint of its signal."""
        metrics = Metrics(newest=settings.newest_names)
        metrics.watch(instruments.BUILD, lambda: {(settings.service_version,): 1.0})
        resource = settings.resource()
        scope = InstrumentationScope("weir", settings.service_version)
        traces, points = settings.endpoint("traces"), settings.endpoint("metrics")
        if span_exporter is None and traces is not None:
            span_exporter = OTLPSpanExporter(endpoint=traces)
        if metric_exporter is None and points is not None:
            metric_exporter = OTLPMetricExporter(endpoint=points)
        delivery = recording = push = None
        if span_exporter is not None:
            delivery = _delivery(settings, span_exporter)
            recording = Recording(resource, scope, delivery.emit, clock)
            metrics.watch(instruments.DROPPED, lambda: _losses(delivery))
        if metric_exporter is not None:
            since = clock()
            push = MetricPush(
                metric_exporter,
                lambda: metrics.collect(resource, scope, since=since, now=clock()),
                seconds=settings.number("OTEL_METRIC_EXPORT_INTERVAL", 60_000) / 1000,
            )
        return cls(
            metrics,
            recording=recording,
            sampler=Sampler.of(settings.environment),
            delivery=delivery,
            push=push,
            capture_content=settings.capture_content,
        )

    @property
    def dropped(self) -> int:
        """Spans that were not delivered so far."""
        return 0 if self._delivery is None else self._delivery.dropped + self._delivery.failed

    def exchange(
        self,
        method: str,
        route: str,
        headers: Sequence[Header],
        *,
        client: str | None = None,
        scheme: str = "http",
        request_id: str | None = None,
    ) -> Trace:
        """The trace of one request, joined to the W3C context in its lower-case headers; baggage is not read."""
        if self._recording is None:
            return NULL_TRACE
        parent, sampled, user_agent = _context(headers)
        if not self._sampler.keeps(parent.trace, sampled):
            return NullTrace(f"{parent.trace:032x}")
        return ExchangeTrace(
            self._recording,
            parent,
            method=method,
            route=route,
            scheme=scheme,
            client=client,
            user_agent=user_agent,
            request_id=request_id,
        )

    def flush(self) -> None:
        """Export the spans that wait; blocks, so not for the event loop."""
        if self._delivery is not None:
            self._delivery.flush()

    def shutdown(self, timeout: float = SHUTDOWN_SECONDS) -> bool:
        """Export what waits for at most ``timeout`` seconds, then leave; True if everything was tried."""
        ends = time.monotonic() + timeout
        threads = [
            threading.Thread(target=part.stop, name="weir-telemetry-stop", daemon=True)
            for part in (self._delivery, self._push)
            if part is not None
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, ends - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)


def _delivery(settings: TelemetrySettings, exporter: SpanExporter) -> Delivery:
    """The queue with the ``OTEL_BSP_*`` bounds; batches are small because encoding one holds the interpreter."""
    room = settings.number("OTEL_BSP_MAX_QUEUE_SIZE", 4_096)
    batch = min(room, settings.number("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", 32))
    return Delivery(exporter, room=room, batch=batch, delay_ms=settings.number("OTEL_BSP_SCHEDULE_DELAY", 5_000))


def _losses(delivery: Delivery) -> dict[tuple[str, ...], float]:
    return {("span_queue_full",): delivery.dropped, ("span_export_failed",): delivery.failed}


def _context(headers: Sequence[Header]) -> tuple[Parent, bool | None, bytes]:
    """The context to continue or a new one, the parent's sampled flag (None without a parent), the user agent."""
    given = state = user_agent = b""
    for name, value in headers:
        if name == b"traceparent":
            given = value if not given else b"twice"
        elif name == b"tracestate":
            state = state + b"," + value if state else value
        elif name == b"user-agent":
            user_agent = value
    fields = given.strip().split(b"-")
    if _well_formed(fields):
        trace, span = int(fields[1], 16), int(fields[2], 16)
        if trace and span:
            kept = state if len(state) <= LONGEST_STATE else b""
            return Parent(trace, span, kept), bool(int(fields[3], 16) & 1), user_agent
    return Parent(int.from_bytes(urandom(16), "big") or 1), None, user_agent


def _well_formed(fields: Sequence[bytes]) -> bool:
    """W3C Trace Context: version 00 has exactly four fields, later ones may have more, ff is invalid."""
    if len(fields) < 4 or tuple(map(len, fields[:4])) != (2, 32, 16, 2) or fields[0] == b"ff":
        return False
    return (fields[0] != b"00" or len(fields) == 4) and all(_HEX.issuperset(part) for part in fields[:4])
