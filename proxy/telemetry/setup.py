"""Telemetry as a whole: created once by the application, asked for a trace per request, shut down at the end.

Without an OTLP endpoint there are no spans and no threads; metrics are counted all the same, for ``/metrics``.
Exporting happens in threads behind bounded queues: a collector that is down, slow or silent costs spans, which
are counted, and never a request.
"""

import importlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal
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
from proxy.telemetry.metrics import Metrics
from proxy.telemetry.names import clean
from proxy.telemetry.trace import NULL_TRACE, ExchangeTrace, NullTrace, Trace, TraceSettings

Protocol = Literal["http/protobuf", "grpc"]

GRPC: Final[Protocol] = "grpc"
HTTP: Final[Protocol] = "http/protobuf"
PORTS: Final[Mapping[Protocol, int]] = {HTTP: 4318, GRPC: 4317}
"""Where a collector listens (OTLP specification, "OTLP exporter configuration")."""


class TelemetryError(ValueError): ...


def _exporter(protocol: Protocol) -> Callable[..., Any]:
    package = "grpc" if protocol == GRPC else "http"
    try:
        module = importlib.import_module(f"opentelemetry.exporter.otlp.proto.{package}.trace_exporter")
    except ImportError as error:
        text = "OTLP over gRPC needs a package that is not installed: pip install 'weir-proxy[otlp-grpc]'"
        raise TelemetryError(f"{text} (or use the protocol {HTTP})") from error
    exporter: Callable[..., Any] = module.OTLPSpanExporter
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


SHUTDOWN_SECONDS: Final = 2.0
GIVE_UP_SECONDS: Final = 0.2


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

    def endpoint(self) -> str | None:
        """The URL that spans go to; None when traces are switched off or have no destination.

        Traces that are asked for by name (``OTEL_TRACES_EXPORTER=otlp``) go to the collector of this machine.
        """
        if self._word("OTEL_SDK_DISABLED") == "true":
            return None
        chosen = self._word("OTEL_TRACES_EXPORTER")
        if chosen == "none":
            return None
        if own := self.environment.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"):
            return own
        protocol = self.protocol()
        base = self.otlp_endpoint or self.environment.get("OTEL_EXPORTER_OTLP_ENDPOINT") or ""
        if not base and "otlp" in chosen.split(","):
            base = f"http://localhost:{PORTS[protocol]}"
        base = base.rstrip("/").removesuffix("/v1/traces")
        return f"{base}/v1/traces" if base and protocol != GRPC else base or None

    def protocol(self) -> Protocol:
        for name in ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
            if said := self._word(name):
                known = next((protocol for protocol in PORTS if protocol == said), None)
                if known is None:
                    raise TelemetryError(f"{name} is {said[:40]!r}; Weir exports by {' or '.join(PORTS)}")
                return known
        return self.otlp_protocol

    def exporter(self) -> Callable[[], Any] | None:
        """What makes the exporter of spans, None where they have no destination.

        Raises TelemetryError for a protocol or an endpoint that cannot be used.
        """
        endpoint = self.endpoint()
        if endpoint is None:
            return None
        protocol = self.protocol()
        return partial(_exporter(protocol), endpoint=_address(protocol, endpoint))

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

    @classmethod
    def create(
        cls,
        settings: OtelSettings,
        *,
        span_exporter: SpanExporter | None = None,
        clock: Callable[[], int] = time.time_ns,
    ) -> "Telemetry":
        """Telemetry as configured; a given exporter is used instead of the endpoint. Raises TelemetryError."""
        metrics = Metrics()
        made = cls(metrics=metrics, _sampler=Sampler.of(settings.environment), _read_baggage=settings.read_baggage)
        metrics.build.labels(settings.service_version).set(1)
        resource, scope = settings.resource(), InstrumentationScope("weir", settings.service_version)
        if span_exporter is None and (make := settings.exporter()) is not None:
            span_exporter = make()
        if span_exporter is not None:
            made._delivery = delivery = SpanQueue(span_exporter, settings)
            made.recording = TraceSettings(
                resource, scope, delivery.emit, clock, content=settings.captures, newest=settings.newest_names
            )
            metrics.dropped.watch(delivery.losses)
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
        if self._delivery is None or _done(self._delivery.stop, timeout):
            return True
        _done(self._delivery.shutdown, GIVE_UP_SECONDS)
        return False


def _done(call: Callable[[], None], timeout: float) -> bool:
    thread = threading.Thread(target=call, name="weir-telemetry-stop", daemon=True)
    thread.start()
    thread.join(timeout)
    return not thread.is_alive()
