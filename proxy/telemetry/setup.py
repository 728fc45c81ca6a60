"""Telemetry as a whole: created once by the application, asked for a trace per request, shut down at the end.

Without an OTLP endpoint there are no spans and no threads; metrics are counted all the same, for ``/metrics``.
Exporting happens in threads behind bounded queues: a collector that is down, slow or silent costs spans, which
are counted, and never a request.
"""

import importlib
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal
from urllib.parse import unquote, urlsplit
from uuid import uuid4

import msgspec
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.sdk.version import __version__ as sdk_version

from proxy.telemetry import names
from proxy.telemetry.logs import context_in
from proxy.telemetry.metrics import BUILD, DROPPED, Family, Instrument, Labels, Metrics, Series
from proxy.telemetry.names import clean
from proxy.telemetry.trace import NULL_TRACE, ExchangeTrace, NullTrace, Trace, TraceSettings

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics.export import MetricExporter, MetricsData

Protocol = Literal["http/protobuf", "grpc"]
Signal = Literal["traces", "metrics"]

GRPC: Final[Protocol] = "grpc"
HTTP: Final[Protocol] = "http/protobuf"
PORTS: Final[Mapping[Protocol, int]] = {HTTP: 4318, GRPC: 4317}
"""Where a collector listens (OTLP specification, "OTLP exporter configuration")."""


class TelemetryError(ValueError): ...


def _exporter(signal: Signal, protocol: Protocol) -> Callable[..., Any]:
    package, kind = "grpc" if protocol == GRPC else "http", "Span" if signal == "traces" else "Metric"
    try:
        module = importlib.import_module(f"opentelemetry.exporter.otlp.proto.{package}.{signal[:-1]}_exporter")
    except ImportError as error:
        text = "OTLP over gRPC needs a package that is not installed: pip install 'weir-proxy[otlp-grpc]'"
        raise TelemetryError(f"{text} (or use the protocol {HTTP})") from error
    exporter: Callable[..., Any] = getattr(module, f"OTLP{kind}Exporter")
    return exporter


def _address(protocol: Protocol, endpoint: str) -> str:
    """What an exporter takes: over HTTP the URL as it is, over gRPC a host with its port, and a scheme if named."""
    is_bare = protocol == GRPC and "://" not in endpoint
    try:
        parts = urlsplit(f"//{endpoint}" if is_bare else endpoint)
        has_port = parts.port is not None
    except ValueError:
        raise TelemetryError("the OTLP endpoint is no address") from None
    if not parts.hostname or (parts.scheme not in ("http", "https") and not is_bare):
        raise TelemetryError(f"the OTLP endpoint should be an address like http://collector:{PORTS[protocol]}")
    if protocol == HTTP:
        return endpoint
    where = parts.netloc.rpartition("@")[2]
    where = where if has_port else f"{where.rstrip(':')}:{PORTS[GRPC]}"
    return f"{parts.scheme}://{where}" if parts.scheme else where


class SpanQueue(SpanExporter):
    """The exporter behind the queue, counting: at most ``room`` spans wait, whole exchanges above that are dropped."""

    def __init__(self, exporter: SpanExporter, settings: "OtelSettings") -> None:
        """With the ``OTEL_BSP_*`` bounds; batches are small because encoding one holds the interpreter."""
        self.dropped = 0
        self.failed = 0
        self._exporter = exporter
        self._room = room = settings.number("OTEL_BSP_MAX_QUEUE_SIZE", 4_096)
        self._entered = 0
        self._taken = 0
        self._batches: SpanProcessor = BatchSpanProcessor(
            self,
            max_queue_size=room,
            schedule_delay_millis=settings.number("OTEL_BSP_SCHEDULE_DELAY", 5_000),
            max_export_batch_size=min(room, settings.number("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", 32)),
        )

    def emit(self, spans: Sequence[ReadableSpan]) -> None:
        if self._entered - self._taken + len(spans) > self._room:
            self.dropped += len(spans)
            return
        self._entered += len(spans)
        for span in spans:
            self._batches.on_end(span)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self._taken += len(spans)
        result = self._exporter.export(spans)
        if result is not SpanExportResult.SUCCESS:
            self.failed += len(spans)
        return result

    def losses(self) -> dict[tuple[str, ...], float]:
        return {("span_queue_full",): self.dropped, ("span_export_failed",): self.failed}

    def flush(self) -> None:
        self._batches.force_flush()

    def stop(self) -> None:
        self._batches.shutdown()

    def shutdown(self) -> None:
        self._exporter.shutdown()


def as_otlp(
    families: Iterable[Family], resource: Resource, scope: InstrumentationScope, *, since: int, now: int
) -> "MetricsData":
    from opentelemetry.sdk.metrics import export as otlp  # noqa: PLC0415 - a tenth of a second, and few export metrics

    cumulative = otlp.AggregationTemporality.CUMULATIVE

    def point(attributes: dict[str, str], series: Series, bounds: Sequence[float]) -> otlp.HistogramDataPoint:
        count, counts = sum(series.counts), series.counts
        return otlp.HistogramDataPoint(
            attributes, since, now, count, series.total, counts, bounds, min=series.low, max=series.high
        )

    def metric(instrument: Instrument, found: Mapping[Labels, Series]) -> otlp.Metric:
        labels = instrument.labels
        named = [({k: v for k, v in zip(labels, key, strict=True) if v}, each) for key, each in found.items()]
        data: otlp.Gauge | otlp.Sum | otlp.Histogram
        if instrument.kind == "histogram":
            data = otlp.Histogram([point(*each, instrument.bounds) for each in named], cumulative)
        else:
            numbers = [otlp.NumberDataPoint(attributes, since, now, series.total) for attributes, series in named]
            is_sum = instrument.kind == "counter"
            data = otlp.Sum(numbers, cumulative, is_monotonic=True) if is_sum else otlp.Gauge(numbers)
        return otlp.Metric(instrument.name, instrument.help, instrument.unit, data)

    found = [metric(instrument, series) for instrument, series in families if series]
    return otlp.MetricsData([otlp.ResourceMetrics(resource, [otlp.ScopeMetrics(scope, found, "")], "")])


class MetricPush:
    def __init__(self, exporter: "MetricExporter", collect: "Callable[[], MetricsData]", *, seconds: float) -> None:
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
        self._stopping.set()
        self._thread.join()
        self._exporter.shutdown()

    def shutdown(self) -> None:
        self._exporter.shutdown()


SHUTDOWN_SECONDS: Final = 2.0
GIVE_UP_SECONDS: Final = 0.2
SIGNALS: Final[tuple[Signal, ...]] = ("traces", "metrics")


class OtelSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What the operator configured.

    ``otlp_endpoint`` is the collector's base URL (``http://collector:4318``) or the full URL of its traces;
    ``environment`` holds the standard ``OTEL_*`` variables, which stand above these settings, except that
    ``otlp_endpoint`` stands above the one variable that it is also read from.

    Attributes:
        otlp_protocol: ``http/protobuf`` or ``grpc``.
        deployment: ``deployment.environment.name`` of the resource.
        capture_content: allows message text in spans.
        read_baggage: takes ``session.id`` and ``user.id`` from the client's baggage.
    """

    service_name: str = "weir"
    service_version: str = ""
    otlp_endpoint: str | None = None
    otlp_protocol: Protocol = HTTP
    deployment: str | None = None
    capture_content: bool = False
    read_baggage: bool = False
    environment: Mapping[str, str] = msgspec.field(default_factory=dict)

    def endpoint(self, signal: Signal) -> str | None:
        """The URL for ``traces`` or ``metrics``; None when the signal is switched off or has no destination.

        A signal that is asked for by name (``OTEL_TRACES_EXPORTER=otlp``) has the collector of this machine.
        """
        if self._word("OTEL_SDK_DISABLED") == "true":
            return None
        chosen = self._word(f"OTEL_{signal.upper()}_EXPORTER")
        if chosen == "none":
            return None
        if own := self.environment.get(f"OTEL_EXPORTER_OTLP_{signal.upper()}_ENDPOINT"):
            return own
        protocol = self.protocol(signal)
        base = self.otlp_endpoint or self.environment.get("OTEL_EXPORTER_OTLP_ENDPOINT") or ""
        if not base and "otlp" in chosen.split(","):
            base = f"http://localhost:{PORTS[protocol]}"
        base = base.rstrip("/").removesuffix("/v1/traces")
        return f"{base}/v1/{signal}" if base and protocol != GRPC else base or None

    def protocol(self, signal: Signal) -> Protocol:
        for name in (f"OTEL_EXPORTER_OTLP_{signal.upper()}_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
            if said := self._word(name):
                known = next((protocol for protocol in PORTS if protocol == said), None)
                if known is None:
                    raise TelemetryError(f"{name} is {said[:40]!r}; Weir exports by {' or '.join(PORTS)}")
                return known
        return self.otlp_protocol

    def exporter(self, signal: Signal) -> Callable[[], Any] | None:
        """What makes the exporter of a signal, None where it has no destination.

        Raises TelemetryError for a protocol or an endpoint that cannot be used.
        """
        endpoint = self.endpoint(signal)
        if endpoint is None:
            return None
        protocol = self.protocol(signal)
        return partial(_exporter(signal, protocol), endpoint=_address(protocol, endpoint))

    def check(self) -> None:
        for signal in SIGNALS:
            self.exporter(signal)

    @property
    def captures(self) -> bool:
        """Whether spans may hold message text; the standard variable, where it is set, decides."""
        said = self._word("OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT")
        return said in {"true", "span_only", "span_and_event"} if said else self.capture_content

    def _word(self, name: str) -> str:
        return self.environment.get(name, "").strip().lower()

    def number(self, name: str, default: int) -> int:
        text = self.environment.get(name, "").strip()
        return int(text) if text.isdecimal() and int(text) > 0 else default

    @property
    def newest_names(self) -> bool:
        """Whether the operator opted in to the newest GenAI conventions (``OTEL_SEMCONV_STABILITY_OPT_IN``)."""
        chosen = self.environment.get("OTEL_SEMCONV_STABILITY_OPT_IN", "").split(",")
        return "gen_ai_latest_experimental" in {name.strip() for name in chosen}

    def resource(self) -> Resource:
        pairs = (p.partition("=") for p in self.environment.get("OTEL_RESOURCE_ATTRIBUTES", "").split(",") if "=" in p)
        return Resource(
            {
                "service.name": self.service_name,
                "service.version": self.service_version,
                "service.instance.id": str(uuid4()),
                "telemetry.sdk.language": "python",
                "telemetry.sdk.name": "opentelemetry",
                "telemetry.sdk.version": sdk_version,
                **({names.DEPLOYMENT: self.deployment} if self.deployment else {}),
                **{name.strip(): unquote(value.strip()) for name, _, value in pairs},
                **({"service.name": name} if (name := self.environment.get("OTEL_SERVICE_NAME")) else {}),
            }
        )


class Sampler(msgspec.Struct, frozen=True):
    """Which traces are recorded: a share of those that start here, and the client's word for those that do not."""

    share: float = 1.0
    parent_based: bool = True

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> "Sampler":
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
        if self.parent_based and sampled is not None:
            return sampled
        return (trace & 0xFFFF_FFFF_FFFF_FFFF) < self.share * 2**64


@dataclass(slots=True, kw_only=True)
class Telemetry:
    metrics: Metrics
    _sampler: Sampler
    _read_baggage: bool
    recording: TraceSettings | None = None
    _delivery: SpanQueue | None = None
    _push: MetricPush | None = None

    @classmethod
    def create(
        cls,
        settings: OtelSettings,
        *,
        span_exporter: SpanExporter | None = None,
        metric_exporter: "MetricExporter | None" = None,
        clock: Callable[[], int] = time.time_ns,
    ) -> "Telemetry":
        """Telemetry as configured; an exporter that is given stands for the endpoint of its signal. TelemetryError."""
        metrics = Metrics(newest=settings.newest_names)
        made = cls(metrics=metrics, _sampler=Sampler.of(settings.environment), _read_baggage=settings.read_baggage)
        metrics.watch(BUILD, lambda: {(settings.service_version,): 1.0})
        resource, scope = settings.resource(), InstrumentationScope("weir", settings.service_version)
        if span_exporter is None and (make := settings.exporter("traces")) is not None:
            span_exporter = make()
        if metric_exporter is None and (make := settings.exporter("metrics")) is not None:
            metric_exporter = make()
        if span_exporter is not None:
            made._delivery = delivery = SpanQueue(span_exporter, settings)
            made.recording = TraceSettings(
                resource, scope, delivery.emit, clock, content=settings.captures, newest=settings.newest_names
            )
            metrics.watch(DROPPED, delivery.losses)
        if metric_exporter is not None:
            since = clock()
            made._push = MetricPush(
                metric_exporter,
                lambda: as_otlp(metrics.read(), resource, scope, since=since, now=clock()),
                seconds=settings.number("OTEL_METRIC_EXPORT_INTERVAL", 60_000) / 1000,
            )
        return made

    def exchange(
        self, scope: Mapping[str, Any], route: str, *, path: str | None = None, request_id: str | None = None
    ) -> Trace:
        """The trace of one request (its ASGI scope), joined to the W3C context in its lower-case headers.

        ``path`` is told where it is not the route's. Baggage is read where the settings say so.
        """
        if self.recording is None:
            return NULL_TRACE
        context = context_in(scope["headers"], baggage=self._read_baggage)
        if not self._sampler.keeps(context.parent.trace, context.sampled):
            return NullTrace(f"{context.parent.trace:032x}")
        trace = ExchangeTrace(self.recording, context, f"{scope['method']} {route}")
        note, (address, port), client = trace.root.set, scope.get("server") or (None, None), scope.get("client")
        note(names.HTTP_METHOD, scope["method"])
        note(names.HTTP_ROUTE, route)
        note(names.URL_PATH, route if path is None else clean(path))
        note(names.URL_SCHEME, scope.get("scheme", "http"))
        note(names.SERVER_ADDRESS, None if address is None else clean(address))
        note(names.SERVER_PORT, port)
        note(names.CLIENT_ADDRESS, clean(client[0]) if client and client[0] else None)
        note(names.USER_AGENT, clean(context.user_agent.decode("latin-1")) if context.user_agent else None)
        note(names.REQUEST_ID, request_id and clean(request_id))
        return trace

    def flush(self) -> None:
        if self._delivery is not None:
            self._delivery.flush()

    def shutdown(self, timeout: float = SHUTDOWN_SECONDS) -> bool:
        """Export what waits for at most ``timeout`` seconds, then leave; True if everything was tried."""
        parts = [part for part in (self._delivery, self._push) if part is not None]
        if _all_done([part.stop for part in parts], timeout):
            return True
        _all_done([part.shutdown for part in parts], GIVE_UP_SECONDS)
        return False


def _all_done(calls: Sequence[Callable[[], None]], timeout: float) -> bool:
    ends = time.monotonic() + timeout
    threads = [threading.Thread(target=call, name="weir-telemetry-stop", daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, ends - time.monotonic()))
    return not any(thread.is_alive() for thread in threads)
