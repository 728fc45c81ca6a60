"""Traces, metrics and the log, as their readers see them: a collector, a scraper, an operator's eye."""

import io
import json
import logging
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind

from policies.ledger import PressureReading, TokenUsage, WindowPressure
from proxy.errors import redact
from proxy.tap import ReportedUsage, Tap
from proxy.telemetry import names
from proxy.telemetry.logs import ExchangeLine, QueuedLog, log_exchange
from proxy.telemetry.names import service_at
from proxy.telemetry.setup import OtelSettings, Protocol, Telemetry
from proxy.telemetry.trace import NULL_TRACE, ExchangeTrace

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
CLIENT_CONTEXT = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
CANARIES = (
    "sk-canary0123456789abcdef",
    "weir-sk-canary_0123456789",
    "AIzaSyCANARYcanaryCANARYcanary-0123456",
    "canary.token.value-123",
    "Y2FuYXJ5OmNhbmFyeXNlY3JldA==",
)

CHAT = "/v1/chat/completions"


def asked(headers: Sequence[tuple[bytes, bytes]] = (), **scope: object) -> dict[str, Any]:
    return {"method": "POST", "headers": headers, **scope}


class Spans:
    """Telemetry with an exporter in memory."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.telemetry = Telemetry.create(OtelSettings(service_version="1.2.3"), span_exporter=self.exporter)

    def start(self, *headers: tuple[bytes, bytes]) -> ExchangeTrace:
        return self.telemetry.exchange(asked(headers, client=("192.0.2.7", 4711)), CHAT, request_id="req-1")

    def finished(self) -> tuple[ReadableSpan, ...]:
        self.telemetry.flush()
        return self.exporter.get_finished_spans()

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.finished() if span.name == name]

    @property
    def root(self) -> ReadableSpan:
        (root,) = (span for span in self.finished() if span.kind is SpanKind.SERVER)
        return root


@pytest.fixture
def spans() -> Iterator[Spans]:
    found = Spans()
    yield found
    assert found.telemetry.shutdown()


def identify(trace: ExchangeTrace, **changed: object) -> None:
    known = {"conversation": "chat-7", "tenant": "t1", "policy": "support", "model": "gpt-5-mini", "derived": False}
    trace.identify(**{**known, **changed})  # type: ignore[arg-type]


def a_pass(trace: ExchangeTrace) -> None:
    identify(trace)
    with trace.plan() as plan:
        plan.decide("pass", TokenUsage(500, 500, 8000, WindowPressure(0.0625, "green", "active")), base=8000)
    attempt = trace.attempt("gpt-5-mini", "openai", "api.openai.com", 443, request={"stream": True, "n": 1})
    attempt.first_chunk(0.2)
    seen = Tap(model="gpt-5-mini-2026", id="c-1", finish_reasons=["stop"], usage=ReportedUsage(prompt=500))
    attempt.end_call(200, seen=seen)
    trace.end(200)


@pytest.mark.parametrize(
    ("status", "error", "failed"),
    [(200, None, False), (400, "context_length_exceeded", False), (502, "upstream_empty", True), (503, None, True)],
)
def test_a_server_span_is_an_error_only_from_500(spans: Spans, status: int, error: str | None, failed: bool) -> None:
    trace = spans.start()
    trace.end(status, error)
    assert (spans.root.status.status_code.name == "ERROR") is failed
    assert (spans.root.attributes or {}).get("error.type") == (error or (str(status) if failed else None))


def test_what_is_still_open_ends_with_the_exchange(spans: Spans) -> None:
    trace = spans.start()
    trace.attempt("gpt-5-mini", "openai")
    trace.end(500)
    (call,) = spans.named("chat gpt-5-mini")
    assert call.end_time == spans.root.end_time


@pytest.mark.parametrize("name", ["x" * 201, "gespräch", "a\nb"])
def test_a_name_that_viewers_would_drop_is_hashed(spans: Spans, name: str) -> None:
    trace = spans.start()
    identify(trace, conversation=name)
    trace.end(200)
    assert re.fullmatch("[0-9a-f]{32}", str((spans.root.attributes or {})["session.id"]))


@pytest.mark.requirement("A0.17")
def test_all_seven_pressure_values_are_on_every_trace(spans: Spans) -> None:
    trace = spans.start()
    with trace.plan() as plan:
        pressure = WindowPressure(0.53125, "yellow", "active")
        reading = PressureReading(
            current_tokens=68_000,
            max_tokens=128_000,
            utilization_pct=53.1,
            zone="yellow",
            velocity_tokens_per_turn=12_000.04,
            turns_until_red=None,
            source="client_estimated",
            last_delta=None,
            velocity_class="high",
            spike=False,
            rot_guard=False,
        )
        plan.decide("pass", TokenUsage(68_000, 68_000, 128_000, pressure), base=128_000, reading=reading)
    trace.end(200)
    found = {k: v for k, v in (spans.root.attributes or {}).items() if k.startswith("ctx.pressure.")}
    assert found == {
        "ctx.pressure.current_tokens": 68_000,
        "ctx.pressure.max_tokens": 128_000,
        "ctx.pressure.utilization_pct": 53.1,
        "ctx.pressure.zone": "yellow",
        "ctx.pressure.velocity_tokens_per_turn": 12_000.0,
        "ctx.pressure.turns_until_red": -1.0,
        "ctx.pressure.source": "client_estimated",
    }


@pytest.mark.requirement("A0.18")
def test_events_carry_the_fields_of_the_table_and_no_others(spans: Spans) -> None:
    trace = spans.start()
    trace.event("zone_change", old="green", new="orange", body="the user's words")
    trace.end(200)
    (event,) = spans.root.events
    assert event.name == "weir.zone_change"
    assert dict(event.attributes or {}) == {"weir.zone.old": "green", "weir.zone.new": "orange"}


def test_a_client_that_does_not_sample_is_not_recorded_but_keeps_its_trace_id(spans: Spans) -> None:
    trace = spans.start((b"traceparent", CLIENT_CONTEXT[:-2] + b"00"))
    assert trace.attempt("gpt-5-mini", "openai").propagation() == ()
    trace.end(200)
    assert trace.trace_id == "0af7651916cd43dd8448eb211c80319c"
    assert spans.finished() == ()


@pytest.mark.parametrize(
    ("sampler", "argument", "kept"),
    [("always_off", "", 0), ("parentbased_traceidratio", "0.0", 0), ("traceidratio", "1.0", 50), ("nonsense", "", 50)],
)
def test_the_standard_sampler_variables_decide_for_new_traces(
    sampler: str, argument: str, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", sampler)
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", argument)
    spans = Spans()
    for _ in range(50):
        spans.start().end(200)
    assert len(spans.finished()) == kept
    assert spans.telemetry.shutdown()


@pytest.mark.requirement("S.16")
def test_no_span_carries_an_attribute_outside_the_table_or_a_secret(spans: Spans) -> None:
    for secret in (*CANARIES[:3], f"Bearer {CANARIES[3]}"):
        trace = spans.start((b"user-agent", f"agent {secret}".encode()), (b"authorization", secret.encode()))
        identify(trace, model=secret, policy=secret, conversation=secret)
        request = {"temperature": 0.5, "stop": [secret], "messages": [secret], "api_key": secret, "user": secret}
        attempt = trace.attempt(secret, secret, secret, 443, request=request)
        attempt.end_call(401, seen=Tap(model=secret, id=secret, finish_reasons=[secret]), error_type=secret)
        trace.event(secret, reason=secret)
        trace.end(500, secret)
    for span in spans.finished():
        assert set(span.attributes or {}) <= names.ATTRIBUTES
        everything = span.to_json() + repr(span.events)
        assert not any(secret in everything for secret in CANARIES)
        assert all(set(event.attributes or {}) <= names.ATTRIBUTES for event in span.events)


def test_attribute_values_are_bounded(spans: Spans) -> None:
    trace = spans.start((b"user-agent", b"x" * 100_000))
    identify(trace, model="m" * 100_000)
    with trace.plan() as plan:
        for _ in range(500):
            plan.layer("evict", before=2, after=1, units=1)
            trace.event("degraded", reason="r" * 10_000)
    trace.captures = True  # stop sequences are the client's own words
    trace.attempt("m", "openai", request={"stop": ["s" * 9_000] * 99, "seed": 2**70}).end_call(200)
    trace.end(200)
    found = spans.finished()
    assert max(len(str(v)) for span in found for v in (span.attributes or {}).values()) <= 8 * 300


@pytest.mark.requirement("A0.139")
def test_without_an_endpoint_a_trace_does_nothing_costs_nothing_and_starts_no_thread() -> None:
    before = threading.active_count()
    telemetry = Telemetry.create(OtelSettings())
    assert telemetry.exchange(asked(), CHAT) is NULL_TRACE
    a_pass(telemetry.exchange(asked([(b"traceparent", CLIENT_CONTEXT)]), CHAT))
    assert telemetry.exchange(asked(), "/").attempt("m", "openai").propagation() == ()
    assert threading.active_count() == before
    assert telemetry.shutdown()


class Collector(BaseHTTPRequestHandler):
    """An OTLP/HTTP receiver that decodes with the official messages."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.received.append((self.path, body))  # type: ignore[attr-defined]
        self.send_response(self.server.status)  # type: ignore[attr-defined]
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


@contextmanager
def collector(status: int = 200) -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    server.received = []  # type: ignore[attr-defined]
    server.status = status  # type: ignore[attr-defined]
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.requirement("P15")
def test_half_a_character_in_a_clients_json_costs_no_batch_of_spans() -> None:
    with collector() as server:
        telemetry = Telemetry.create(OtelSettings(otlp_endpoint=f"http://127.0.0.1:{server.server_port}"))
        for model in (json.loads('"m\\ud800"'), "gpt-5-mini"):
            trace = telemetry.exchange(asked(), CHAT)
            identify(trace, model=model)
            trace.attempt(model, "openai").end_call(200)
            trace.end(200)
        assert telemetry.shutdown()
        received: list[tuple[str, bytes]] = server.received  # type: ignore[attr-defined]
    traces = [ExportTraceServiceRequest.FromString(body) for path, body in received if path == "/v1/traces"]
    spans = [s for t in traces for r in t.resource_spans for scope in r.scope_spans for s in scope.spans]
    assert sorted(s.name for s in spans if s.name.startswith("chat")) == ["chat gpt-5-mini", "chat m?"]


@contextmanager
def black_hole() -> Iterator[int]:
    """A port that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:
        yield server.getsockname()[1]


@contextmanager
def closed_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    yield port


@contextmanager
def failing() -> Iterator[int]:
    with collector(500) as server:
        yield server.server_port


@pytest.mark.requirement("R.77", "A0.139")
@pytest.mark.parametrize("protocol", ["http/protobuf", "grpc"])
@pytest.mark.parametrize("where", [black_hole, closed_port, failing])
def test_a_collector_that_is_gone_costs_spans_and_no_request(
    where: object, protocol: Protocol, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert callable(where)
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "600")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
    with where() as port:
        endpoint = f"http://127.0.0.1:{port}"
        telemetry = Telemetry.create(OtelSettings(otlp_endpoint=endpoint, otlp_protocol=protocol))
        slowest = 0.0
        for _ in range(1000):
            started = time.thread_time()
            a_pass(telemetry.exchange(asked(), CHAT))
            slowest = max(slowest, time.thread_time() - started)
        telemetry.shutdown()
        assert slowest < 0.5
    samples = next(iter(telemetry.metrics.dropped.collect())).samples
    dropped = sum(sample.value for sample in samples)
    assert dropped >= (1 if where is failing else 3000 - 600 - 512)


@pytest.mark.requirement("A0.139")
def test_a_missing_grpc_exporter_is_said_with_what_to_install_and_nothing_else_loads_it() -> None:
    script = (
        "import sys\nfrom proxy.telemetry.setup import Telemetry, TelemetryError, OtelSettings\n"
        "assert not [m for m in sys.modules if m.startswith('grpc')]\n"
        "sys.modules['grpc'] = None\n"
        "Telemetry.create(OtelSettings(otlp_endpoint='http://127.0.0.1:9')).shutdown(0.1)\n"
        "try:\n  OtelSettings(otlp_endpoint='http://127.0.0.1:9', otlp_protocol='grpc').exporter()\n"
        "except TelemetryError as error:\n  print(error)\n"
    )
    root = str(Path(__file__).parents[2])
    run = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
        env={**os.environ, "PYTHONPATH": root},
    )
    assert "pip install 'weir-proxy[otlp-grpc]'" in run.stdout


def test_the_deployment_is_in_the_resource_and_the_standard_variable_takes_precedence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    resource = OtelSettings(deployment="staging").resource()
    assert resource.attributes["deployment.environment.name"] == "staging"
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=live")
    resource = OtelSettings(deployment="staging").resource()
    assert resource.attributes["deployment.environment.name"] == "live"


@pytest.mark.parametrize(
    ("said", "setting", "captured"),
    [
        *(("", False, False), ("", True, True), ("true", False, True), ("SPAN_ONLY", False, True)),
        *(("SPAN_AND_EVENT", False, True), ("NO_CONTENT", True, False), ("EVENT_ONLY", True, False)),
    ],
)
def test_the_standard_variable_decides_about_content_where_it_is_set(
    said: str, setting: bool, captured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT", said)
    assert OtelSettings(capture_content=setting).captures() is captured


@pytest.mark.parametrize(
    ("host", "provider", "name"),
    [
        *(("api.openai.com", None, "openai"), ("eu.openai.azure.com", None, "azure.ai.openai")),
        *(("127.0.0.1", None, "main"), ("api.openai.com.evil.example", None, "main")),
        *(("", "bedrock", "aws.bedrock"), ("", "ollama", "ollama")),
    ],
)
def test_a_known_provider_has_the_conventions_name(host: str, provider: str | None, name: str) -> None:
    assert service_at(f"https://{host}:8443/v1" if host else "", "main", provider) == (
        name,
        host,
        8443 if host else None,
    )


def test_an_attempt_after_one_that_failed_is_counted_and_linked_and_one_after_an_answer_is_not(spans: Spans) -> None:
    trace = spans.start()
    first = trace.attempt("m", "openai")
    first.end_call(200)
    second = trace.attempt("m", "openai")
    second.end_call(429, error_type="rate_limit_exceeded")
    third = trace.attempt("m", "openai")
    third.end_call(503)
    trace.attempt("m", "openai").end_call(200)
    trace.end(200)
    found = spans.named("chat m")
    assert [(s.attributes or {}).get("http.request.resend_count") for s in found] == [None, None, 1, 2]
    linked = [[(link.context.span_id, dict(link.attributes or {})) for link in s.links] for s in found]
    ids = [s.context.span_id for s in found]
    reasons = [{"weir.reason": "rate_limit_exceeded"}, {"weir.reason": "503"}]
    assert linked == [[], [], [(ids[1], reasons[0])], [(ids[2], reasons[1])]]


def line(before: int, after: int, **more: object) -> ExchangeLine:
    known = {"request": "req-1", "usable": 168_000, "zone": "orange", "status": 200, "outcome": "managed"}
    return ExchangeLine(tokens_before=before, tokens_after=after, **{**known, **more})  # type: ignore[arg-type]


CTX = re.compile(
    r"ctx received=(\d+) received_pct=(\d+\.\d) forwarded=(\d+) forwarded_pct=(\d+\.\d) usable=(\d+) zone=\w+( overflow=yes)?"
    r"(?: scan=(\d+)/(\d+))?(?: removed=(\d+))? request=req-1 .*"
)


@pytest.mark.requirement("A3.14", "A3.15")
def test_the_log_line_has_the_numbers_of_each_step() -> None:
    calm = CTX.fullmatch(str(line(45_000, 45_000)))
    more = CTX.fullmatch(str(line(125_000, 125_000)))
    full = CTX.fullmatch(
        str(line(148_000, 93_000, overflow=True, scanned=95_000, prunable=55_000, removed=12, trace="ab"))
    )
    assert calm
    assert more
    assert full
    assert (calm[2], more[2], full[2]) == ("26.8", "74.4", "88.1")
    assert calm[7] is None
    assert full.groups()[:4] == ("148000", "88.1", "93000", "55.4")
    assert full.groups()[5:] == (" overflow=yes", "95000", "55000", "12")
    assert "trace=ab" in full[0]


@contextmanager
def logger_to(stream: io.StringIO, **options: object) -> Iterator[tuple[logging.Logger, QueuedLog]]:
    handler = QueuedLog(stream, **options)  # type: ignore[arg-type]
    logger = logging.getLogger("weir.test.exchange")
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logger.addHandler(handler)
    yield logger, handler
    logger.removeHandler(handler)
    handler.stop()


def test_a_value_cannot_forge_a_field_or_a_line() -> None:
    stream = io.StringIO()
    with logger_to(stream) as (logger, _):
        log_exchange(logger, line(1, 1, conversation="x status=500\nctx tokens=9", model='a"b'))
        logger.warning("upstream said: %s", "no\n2026-01-01 ERROR forged\rx")
    lines = stream.getvalue().splitlines()
    assert len(lines) == 3
    assert r'conversation="x status=500\nctx tokens=9"' in lines[0]
    assert lines[2].startswith("    ")


@pytest.mark.requirement("A3.14")
def test_the_json_log_has_request_conversation_and_trace_ids_and_no_unknown_field() -> None:
    stream = io.StringIO()
    with logger_to(stream, form="json") as (logger, _):
        log_exchange(logger, line(148_000, 93_000, conversation="chat-7", trace="0af7", overhead_ms=0.7))
        log_exchange(logger, line(1, 1, status=502, error="upstream_empty"))
    first, second = (json.loads(text) for text in stream.getvalue().splitlines())
    assert (first["request"], first["conversation"], first["trace"]) == ("req-1", "chat-7", "0af7")
    assert (first["received_pct"], first["forwarded_pct"]) == (88.1, 55.4)
    assert (first["level"], second["level"]) == ("info", "warning")
    assert second["error"] == "upstream_empty"
    allowed = {"time", "level", "logger", "message", "received_pct", "forwarded_pct", *ExchangeLine.__slots__}
    assert set(first) | set(second) <= allowed


class Stuck(io.StringIO):
    """A stream that nobody reads."""

    def __init__(self) -> None:
        super().__init__()
        self.released = threading.Event()

    def write(self, text: str) -> int:
        self.released.wait()
        return super().write(text)


def test_a_log_that_nobody_reads_drops_lines_and_holds_up_nobody() -> None:
    stream = Stuck()
    with logger_to(stream, capacity=50) as (logger, handler):
        for _ in range(1000):
            log_exchange(logger, line(1, 1))
        assert handler.dropped >= 1000 - 2 * 51  # one batch in hand, one queue full
        assert not handler.stop(timeout=0.1)
        stream.released.set()
    assert len(stream.getvalue().splitlines()) == 1000 - handler.dropped


@pytest.mark.requirement("S.16")
@pytest.mark.parametrize(
    "text",
    [
        "Incorrect API key provided: {0}. You can find yours at",
        '{{"error": {{"message": "invalid x-api-key: {0}"}}}}',
        "Authorization: Bearer {3}",
        "headers={{'authorization': 'Bearer {3}', 'x-api-key': '{3}'}}",
        "headers=[(b'authorization', b'Bearer {3}'), (b'x-api-key', b'{3}')]",
        "authorization: Basic {4}",
        "GET https://generativelanguage.googleapis.com/v1?key={3}&alt=sse failed",
        "cannot connect to https://user:{3}@host/v1",
        "AIza in text {2}!",
        "key {1} is revoked; {0}, {2}",
        '{{"api_key": "{3}"}}',
        '"{{\\"api_key\\": \\"{3}\\"}}"',
        "password={3} client_secret: {3}",
        "BEARER  {3}",
    ],
)
def test_redact_finds_every_canary(text: str) -> None:
    shown = redact(text.format(*CANARIES))
    assert "canary" not in shown.lower()
    assert "Y2FuYXJ5" not in shown
    assert "[redacted]" in shown


@pytest.mark.parametrize(
    "text", ["risk-based task-force", "tokens=148000", "the key: window", "https://host/v1?a=b", "disk-1"]
)
def test_redact_leaves_ordinary_words_alone(text: str) -> None:
    assert redact(text) == text


@pytest.mark.requirement("S.16")
@pytest.mark.parametrize("form", ["line", "json"])
def test_a_traceback_with_a_key_in_it_is_written_without_the_key(form: str) -> None:
    stream = io.StringIO()
    with logger_to(stream, form=form) as (logger, _):
        try:
            int(f"https://u:{CANARIES[3]}@host?key={CANARIES[0]}")
        except ValueError:
            logger.exception("failed with %s", {"x-api-key": CANARIES[3], "k": CANARIES[2]})
        log_exchange(logger, line(1, 1, error=f"Bearer {CANARIES[3]}", model=CANARIES[1]))
    text = stream.getvalue()
    assert "ValueError" in text
    assert not any(secret in text for secret in CANARIES)


@pytest.mark.requirement("S.27")
@pytest.mark.parametrize(
    "piece", ["sk-", "key=", "bearer ", "://", "api-key:'", "a", " ", '\\"', "basic A", "sk", "://a"]
)
def test_redact_is_linear_in_hostile_text(piece: str) -> None:
    redact((piece * 200_000)[:200_000], limit=200_000)  # quadratic would take hours
    assert len(redact(piece * 100_000)) <= 8192
