"""An OTLP receiver for tests, on real ports: HTTP and gRPC, decoded with the official messages.

What came is kept as protobuf messages; :func:`tree` prints spans as their children stand under them.
"""

import gzip
import re
import threading
from collections.abc import Iterable, Iterator
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc  # type: ignore[import-untyped]
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span

PART = re.compile(r"weir context\.(?!plan$|layer |prepare$)")
TRACES = "/v1/traces"
NAMES = {"http.response.status_code": "status", "error.type": "error", "gen_ai.usage.input_tokens": "input"}


@dataclass(slots=True)
class Receiver:
    """What was received; ``encodings`` are the content encodings of the HTTP requests, None for plain ones."""

    http: str = ""
    grpc: str = ""
    traces: list[ExportTraceServiceRequest] = field(default_factory=list)
    encodings: list[str | None] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    status: int = 200

    def spans(self, *, parts: bool = False) -> list[Span]:
        """Every span so far in the order of their starts; with ``parts`` those too that only a slow request has."""
        received = [
            span
            for message in self.traces
            for resource in message.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
            if parts or not PART.match(span.name)
        ]
        return sorted(received, key=lambda span: span.start_time_unix_nano)

    def resource(self) -> dict[str, Any]:
        """The attributes of the resource that sent the first spans."""
        return attributes(self.traces[0].resource_spans[0].resource.attributes)

    def take(self, body: bytes) -> bytes:
        """Keep one message; the answer's bytes."""
        self.traces.append(ExportTraceServiceRequest.FromString(body))
        return bytes(ExportTraceServiceResponse().SerializeToString())


def value_of(value: AnyValue) -> Any:
    """A protobuf value as Python's."""
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [value_of(each) for each in value.array_value.values]
    return None if kind is None else getattr(value, kind)


def attributes(pairs: Iterable[KeyValue]) -> dict[str, Any]:
    """Attributes by name."""
    return {pair.key: value_of(pair.value) for pair in pairs}


def short(name: str) -> str:
    """An attribute's name as trees show it: its last part, unless that says too little."""
    return NAMES.get(name) or name.rsplit(".", 1)[-1]


def tree(spans: Iterable[Span], *shown: str, events: bool = True, hidden: Iterable[str] = (), about: int = 1) -> str:
    """Spans as indented text: kind, name, ``ERROR``, those of ``shown`` that are there, links; events below.

    Of an attribute that is in ``hidden`` only its presence is shown; numbers from 1,000 on are rounded to ``about``.
    """
    hidden = frozenset(hidden)

    def plain(value: Any) -> str:
        if isinstance(value, int) and value >= 1000:
            return str(about * round(value / about))
        return "+".join(map(str, value)) if isinstance(value, list) else str(value)

    every = sorted(spans, key=lambda span: (span.start_time_unix_nano, span.name))
    by_id = {span.span_id: span for span in every}
    lines: list[str] = []

    def show(span: Span, depth: int) -> None:
        found = attributes(span.attributes)
        kind = Span.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_")
        words = [kind, span.name, *(["ERROR"] if span.status.code == 2 else [])]
        words += [f"{short(n)}={'…' if n in hidden else plain(found[n])}" for n in shown if n in found]
        for link in span.links:
            reason = attributes(link.attributes).get("weir.reason", "?")
            before = by_id[link.span_id]
            words.append(f"after={before.name.split()[-1]}:{reason}")
        lines.append("  " * depth + " ".join(words))
        for event in span.events if events else ():
            facts = attributes(event.attributes)
            said = " ".join(f"{short(name)}={plain(value)}" for name, value in sorted(facts.items()))
            lines.append("  " * (depth + 1) + f"* {event.name} {said}".rstrip())
        for child in every:
            if child.parent_span_id == span.span_id:
                show(child, depth + 1)

    for span in every:
        if span.parent_span_id not in by_id:
            show(span, 0)
    return "\n".join(lines)


class _Posted(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        receiver: Receiver = self.server.receiver  # type: ignore[attr-defined]
        body, encoding = self.rfile.read(int(self.headers["content-length"])), self.headers["content-encoding"]
        receiver.encodings.append(encoding)
        receiver.headers.append({name.lower(): value for name, value in self.headers.items()})
        answer = b""
        if receiver.status == 200:
            assert self.path == TRACES
            assert self.headers["content-type"] == "application/x-protobuf"
            answer = receiver.take(gzip.decompress(body) if encoding == "gzip" else body)
        self.send_response(receiver.status)
        self.send_header("content-type", "application/x-protobuf")
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *args: object) -> None:
        pass


class _Traces(TraceServiceServicer):
    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver

    def Export(self, request: Any, context: Any) -> Any:  # noqa: N802 - the service's name
        if self._receiver.status != 200:
            context.abort(grpc.StatusCode.UNAVAILABLE, "not now")
        self._receiver.traces.append(request)
        return ExportTraceServiceResponse()


@contextmanager
def receiving(status: int = 200) -> Iterator[Receiver]:
    """A receiver on two ports of this machine; ``http`` and ``grpc`` are their base URLs."""
    receiver = Receiver(status=status)
    web = ThreadingHTTPServer(("127.0.0.1", 0), _Posted)
    web.receiver = receiver  # type: ignore[attr-defined]
    web.daemon_threads = True
    thread = threading.Thread(target=web.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    rpc = grpc.server(futures.ThreadPoolExecutor(max_workers=2))
    add_TraceServiceServicer_to_server(_Traces(receiver), rpc)  # type: ignore[no-untyped-call]
    port = rpc.add_insecure_port("127.0.0.1:0")
    rpc.start()
    receiver.http = f"http://127.0.0.1:{web.server_port}"
    receiver.grpc = f"http://127.0.0.1:{port}"
    try:
        yield receiver
    finally:
        rpc.stop(None).wait()
        web.shutdown()
        thread.join()
        web.server_close()
