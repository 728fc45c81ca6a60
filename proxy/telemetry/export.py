"""Where telemetry goes: OTLP over HTTP or gRPC, in threads behind bounded queues."""

import importlib
import threading
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Final, Literal
from urllib.parse import SplitResult, urlsplit

from opentelemetry.sdk.metrics.export import MetricExporter, MetricsData
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

Protocol = Literal["http/protobuf", "grpc"]
Signal = Literal["traces", "metrics"]

GRPC: Final[Protocol] = "grpc"
HTTP: Final[Protocol] = "http/protobuf"
PROTOCOLS: Final[tuple[Protocol, ...]] = (HTTP, GRPC)
GRPC_PORT: Final = 4317
HTTP_PORT: Final = 4318


class TelemetryError(ValueError):
    """Telemetry cannot be set up as it was asked for; the message says what to do."""


def default_endpoint(protocol: Protocol) -> str:
    """Where a collector on this machine listens (OTLP specification, "OTLP exporter configuration")."""
    return f"http://localhost:{GRPC_PORT if protocol == GRPC else HTTP_PORT}"


def check(protocol: Protocol, endpoint: str) -> None:
    """Nothing, or TelemetryError where no exporter could be made."""
    _module(protocol, "trace")
    _address(protocol, endpoint)


def span_exporter(protocol: Protocol, endpoint: str) -> SpanExporter:
    """An exporter of spans; TelemetryError where the protocol needs a package that is missing, or another address."""
    exporter: SpanExporter = _module(protocol, "trace").OTLPSpanExporter(endpoint=_address(protocol, endpoint))
    return exporter


def metric_exporter(protocol: Protocol, endpoint: str) -> MetricExporter:
    """An exporter of metrics, like :func:`span_exporter`."""
    exporter: MetricExporter = _module(protocol, "metric").OTLPMetricExporter(endpoint=_address(protocol, endpoint))
    return exporter


def _module(protocol: Protocol, signal: str) -> ModuleType:
    """The library's exporters; the optional package of gRPC is imported only here."""
    package = "grpc" if protocol == GRPC else "http"
    try:
        return importlib.import_module(f"opentelemetry.exporter.otlp.proto.{package}.{signal}_exporter")
    except ImportError as error:
        text = "OTLP over gRPC needs a package that is not installed: pip install 'weir-proxy[otlp-grpc]'"
        raise TelemetryError(f"{text} (or use the protocol {HTTP})") from error


def _address(protocol: Protocol, endpoint: str) -> str:
    return _authority(endpoint) if protocol == GRPC else _url(endpoint)


def _url(endpoint: str) -> str:
    parts = _split(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise TelemetryError(f"the OTLP endpoint should be an address like http://collector:{HTTP_PORT}")
    return endpoint


def _authority(endpoint: str) -> str:
    """The endpoint without a path, and with gRPC's port where it names none."""
    parts = _split(endpoint if "://" in endpoint else f"//{endpoint}")
    if parts.scheme not in ("http", "https", "") or not parts.hostname:
        raise TelemetryError(f"the OTLP endpoint should be an address like http://collector:{GRPC_PORT}")
    where = parts.netloc.rpartition("@")[2]
    where = where if parts.port is not None else f"{where.rstrip(':')}:{GRPC_PORT}"
    return f"{parts.scheme}://{where}" if parts.scheme else where


def _split(endpoint: str) -> SplitResult:
    try:
        parts = urlsplit(endpoint)
        parts.port  # noqa: B018 - raises for what is no port
    except ValueError:
        raise TelemetryError("the OTLP endpoint is no address") from None
    return parts


class SpanQueue(SpanExporter):
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

    def losses(self) -> dict[tuple[str, ...], float]:
        """The spans that were not delivered so far, for a metric."""
        return {("span_queue_full",): self.dropped, ("span_export_failed",): self.failed}

    def flush(self) -> None:
        """Export what waits; blocks."""
        self._batches.force_flush()

    def stop(self) -> None:
        """Export what waits and close; blocks as long as the exporter does."""
        self._batches.shutdown()

    def give_up(self) -> None:
        """End what :meth:`stop` still waits for."""
        self._exporter.shutdown()

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

    def give_up(self) -> None:
        """End what :meth:`stop` still waits for."""
        self._exporter.shutdown()
