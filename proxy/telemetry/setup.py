"""Telemetry as a whole: created once by the application, called for a trace per request, shut down
at the end.

Without an OTLP endpoint there are no spans and no threads; metrics are counted all the same, for
``/metrics``. Spans are exported in a thread from a bounded queue: a collector that is down, slow or
silent costs spans, which are counted, and never a request. Sampler, queue, exporter and resource
have OpenTelemetry's environment variables.
"""

import importlib
import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal
from urllib.parse import urlsplit
from uuid import uuid4

import msgspec
from opentelemetry.baggage import get_baggage
from opentelemetry.baggage.propagation import W3CBaggagePropagator
from opentelemetry.context import Context
from opentelemetry.sdk.environment_variables import OTEL_BSP_MAX_QUEUE_SIZE
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import SpanKind

from proxy.telemetry import names
from proxy.telemetry.metrics import Metrics
from proxy.telemetry.names import Value, clean, session_id
from proxy.telemetry.trace import NULL_TRACE, PROPAGATOR, ExchangeTrace

Protocol = Literal["http/protobuf", "grpc"]

GRPC: Final[Protocol] = "grpc"
HTTP: Final[Protocol] = "http/protobuf"
PORTS: Final[Mapping[str, int]] = {HTTP: 4318, GRPC: 4317}
"""Where a collector listens (OTLP specification, "OTLP exporter configuration")."""
PROPAGATED: Final = frozenset({b"traceparent", b"tracestate", b"baggage"})
SHUTDOWN_SECONDS: Final = 2.0
GIVE_UP_SECONDS: Final = 0.2


class TelemetryError(ValueError):
    """The telemetry cannot be exported as configured; the text says why and what to do."""


class CountingExporter(SpanExporter):
    """An exporter that counts the spans which it could not deliver."""

    def __init__(self, exporter: SpanExporter) -> None:
        self.failed = 0
        self.received = 0
        self._exporter = exporter

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Export the spans."""
        self.received += len(spans)
        result = self._exporter.export(spans)
        if result is not SpanExportResult.SUCCESS:
            self.failed += len(spans)
        return result

    def shutdown(self) -> None:
        """Shut down."""
        self._exporter.shutdown()


class CountingProcessor(BatchSpanProcessor):
    """A batch processor that counts the spans for which its queue has no room."""

    def __init__(self, exporter: CountingExporter) -> None:
        self.ended = 0
        self.dropped = 0
        self._counted = exporter
        self._room = int(os.environ.get(OTEL_BSP_MAX_QUEUE_SIZE) or 2_048)
        self._lock = threading.Lock()
        super().__init__(exporter, max_queue_size=self._room)

    def on_end(self, span: ReadableSpan) -> None:
        """Have the span exported."""
        with self._lock:
            waiting = self.ended - self.dropped - self._counted.received
            self.ended += 1
            self.dropped += waiting >= self._room
        super().on_end(span)

    def losses(self) -> dict[tuple[str, ...], float]:
        """Spans that were not delivered, by reason."""
        return {("span_queue_full",): self.dropped, ("span_export_failed",): self._counted.failed}


class OtelSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What the operator configured; OpenTelemetry's environment variables take precedence.

    Attributes:
        otlp_endpoint: The collector's base URL (``http://collector:4318``) or the full URL of its
            traces.
        otlp_protocol: ``http/protobuf`` or ``grpc``.
        deployment: ``deployment.environment.name`` of the resource.
        capture_content: Whether spans may hold message text.
        read_baggage: Whether ``session.id`` and ``user.id`` are taken from the client's baggage.
    """

    service_name: str = "weir"
    service_version: str = ""
    otlp_endpoint: str | None = None
    otlp_protocol: Protocol = HTTP
    deployment: str | None = None
    capture_content: bool = False
    read_baggage: bool = False

    def exporter(self) -> SpanExporter | None:
        """What sends spans, None where they have no destination.

        Traces that are requested by name (``OTEL_TRACES_EXPORTER=otlp``) go to the collector of
        this machine. Raises TelemetryError for a protocol or an endpoint that cannot be used.
        """
        chosen = _variable("OTEL_TRACES_EXPORTER")
        own = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
        base = self.otlp_endpoint or os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT")
        if _variable("OTEL_SDK_DISABLED") == "true" or chosen == "none":
            return None
        if not own and not base and "otlp" not in chosen.split(","):
            return None
        protocol = self._protocol()
        endpoint = own or (base or f"http://localhost:{PORTS[protocol]}").rstrip("/").removesuffix(
            "/v1/traces"
        )
        if protocol == HTTP and not own:
            endpoint = f"{endpoint}/v1/traces"
        return _exporter(protocol, _checked(protocol, endpoint))

    def captures(self) -> bool:
        """Whether spans may hold message text; the standard variable, where it is set, decides."""
        chosen = _variable("OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT")
        return chosen in {"true", "span_only", "span_and_event"} if chosen else self.capture_content

    def resource(self) -> Resource:
        """The resource that the spans come from."""
        attributes = {
            "service.name": self.service_name,
            "service.version": self.service_version,
            "service.instance.id": str(uuid4()),
        }
        if self.deployment:
            attributes[names.DEPLOYMENT] = self.deployment
        return Resource.create(attributes).merge(OTELResourceDetector().detect())

    def _protocol(self) -> str:
        for name in ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
            chosen = _variable(name)
            if chosen and chosen not in PORTS:
                raise TelemetryError(
                    f"{name} is {chosen[:40]!r}; Weir exports by {' or '.join(PORTS)}"
                )
            if chosen:
                return chosen
        return self.otlp_protocol


def _variable(name: str) -> str:
    return os.environ.get(name, "").strip().lower()


def _exporter(protocol: str, endpoint: str) -> SpanExporter:
    package = "grpc" if protocol == GRPC else "http"
    try:
        module = importlib.import_module(
            f"opentelemetry.exporter.otlp.proto.{package}.trace_exporter"
        )
    except ImportError as error:
        text = (
            "OTLP over gRPC needs a package that is not installed: pip install"
            " 'weir-proxy[otlp-grpc]'"
        )
        raise TelemetryError(f"{text} (or use the protocol {HTTP})") from error
    exporter: SpanExporter = module.OTLPSpanExporter(endpoint=endpoint)
    return exporter


def _checked(protocol: str, endpoint: str) -> str:
    """What an exporter takes: over HTTP the URL as it is, over gRPC a host with its port, and a
    scheme if named.
    """
    is_bare = protocol == GRPC and "://" not in endpoint
    try:
        parts = urlsplit(f"//{endpoint}" if is_bare else endpoint)
        has_port = parts.port is not None
    except ValueError:
        raise TelemetryError("the OTLP endpoint is no address") from None
    if not parts.hostname or (parts.scheme not in ("http", "https") and not is_bare):
        raise TelemetryError(
            f"the OTLP endpoint should be an address like http://collector:{PORTS[protocol]}"
        )
    if protocol == HTTP:
        return endpoint
    host = parts.netloc.rpartition("@")[2]
    if not has_port:
        host = f"{host.rstrip(':')}:{PORTS[GRPC]}"
    return f"{parts.scheme}://{host}" if parts.scheme else host


class Telemetry:
    """Metrics, and traces where they are exported."""

    def __init__(self, settings: OtelSettings, exporter: SpanExporter | None = None) -> None:
        self.metrics = Metrics()
        self.metrics.build.labels(settings.service_version).set(1)
        self.exports_traces = exporter is not None
        self._read_baggage = settings.read_baggage
        self._captures = settings.captures()
        if exporter is not None:
            self._processor = CountingProcessor(CountingExporter(exporter))
            self.metrics.dropped.watch(self._processor.losses)
            provider = TracerProvider(resource=settings.resource(), shutdown_on_exit=False)
            provider.add_span_processor(self._processor)
            self._tracer = provider.get_tracer("weir", settings.service_version)

    @classmethod
    def create(
        cls, settings: OtelSettings, *, span_exporter: SpanExporter | None = None
    ) -> "Telemetry":
        """Telemetry as configured; a given exporter is used instead of the endpoint. Raises
        TelemetryError.
        """
        return cls(settings, span_exporter or settings.exporter())

    def exchange(
        self,
        scope: Mapping[str, Any],
        route: str,
        *,
        path: str | None = None,
        request_id: str | None = None,
    ) -> ExchangeTrace:
        """The trace of one request (its ASGI scope), joined to the W3C context in its lower-case
        headers.

        ``path`` is given where it is not the route's. Baggage is read where the settings say so.
        """
        if not self.exports_traces:
            return NULL_TRACE
        carrier: dict[str, list[str]] = {}
        for name, value in scope["headers"]:
            if name in PROPAGATED:
                carrier.setdefault(name.decode(), []).append(value.decode("latin-1"))
        identity = _identity_in(carrier) if self._read_baggage else {}
        attributes = {
            **identity,
            **_http_attributes(scope, route, path=path, request_id=request_id),
        }
        parent = PROPAGATOR.extract(carrier, Context())
        root = self._tracer.start_span(
            f"{scope['method']} {route}", parent, SpanKind.SERVER, attributes
        )
        return ExchangeTrace(self._tracer, root, identity=identity, captures=self._captures)

    def flush(self) -> None:
        """Export what waits."""
        if self.exports_traces:
            self._processor.force_flush()

    def shutdown(self, timeout: float = SHUTDOWN_SECONDS) -> bool:
        """Export what waits for at most ``timeout`` seconds, then leave; True if everything was
        tried.
        """
        if not self.exports_traces or _done(self._processor.shutdown, timeout):
            return True
        _done(self._processor.span_exporter.shutdown, GIVE_UP_SECONDS)
        return False


def _http_attributes(
    scope: Mapping[str, Any], route: str, *, path: str | None, request_id: str | None
) -> dict[str, Value]:
    address, port = scope.get("server") or (None, None)
    client = scope.get("client")
    agent = next(
        (value for name, value in reversed(scope["headers"]) if name == b"user-agent"), b""
    )
    found = {
        names.SPAN_KIND: names.CHAIN,
        names.HTTP_METHOD: scope["method"],
        names.HTTP_ROUTE: route,
        names.URL_PATH: route if path is None else clean(path),
        names.URL_SCHEME: scope.get("scheme", "http"),
        names.SERVER_ADDRESS: None if address is None else clean(address),
        names.SERVER_PORT: port,
        names.CLIENT_ADDRESS: clean(client[0]) if client and client[0] else None,
        names.USER_AGENT: clean(agent.decode("latin-1")) if agent else None,
        names.REQUEST_ID: clean(request_id) if request_id else None,
    }
    return {name: value for name, value in found.items() if value is not None}


def _identity_in(carrier: Mapping[str, list[str]]) -> dict[str, Value]:
    """The session and the user that the client's baggage names."""
    baggage = W3CBaggagePropagator().extract(
        {"baggage": ",".join(carrier.get("baggage", ()))}, Context()
    )
    session = _without_properties(get_baggage(names.SESSION_ID, baggage))
    user = _without_properties(get_baggage(names.USER_ID, baggage))
    found: dict[str, Value] = {}
    if session:
        found[names.SESSION_ID] = session_id(session)
    if user:
        found[names.USER_ID] = clean(user)
    return found


def _without_properties(value: object) -> str:
    """A member of baggage without what follows its value, which the propagator leaves there."""
    return str(value or "").partition(";")[0].strip()


def _done(call: Any, timeout: float) -> bool:
    """Whether a call returns within ``timeout`` seconds."""
    thread = threading.Thread(target=call, name="weir-telemetry-stop", daemon=True)
    thread.start()
    thread.join(timeout)
    return not thread.is_alive()
