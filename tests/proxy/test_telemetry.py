"""Traces, metrics and the log, as their readers see them: a collector, a scraper, an operator's eye."""

import io
import logging
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind

from policies.ledger import PressureReading, TokenUsage, WindowPressure
from proxy.errors import redact
from proxy.tap import ReportedUsage, Tap
from proxy.telemetry.logs import ExchangeLine, QueuedLog, log_exchange
from proxy.telemetry.setup import OtelSettings, Telemetry
from proxy.telemetry.trace import NULL_TRACE, ExchangeTrace

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


@pytest.mark.requirement("A0.139")
def test_without_an_endpoint_a_trace_does_nothing_costs_nothing_and_starts_no_thread() -> None:
    before = threading.active_count()
    telemetry = Telemetry.create(OtelSettings())
    assert telemetry.exchange(asked(), CHAT) is NULL_TRACE
    a_pass(telemetry.exchange(asked([(b"traceparent", CLIENT_CONTEXT)]), CHAT))
    assert telemetry.exchange(asked(), "/").attempt("m", "openai").propagation() == ()
    assert threading.active_count() == before
    assert telemetry.shutdown()


def line(before: int, after: int, **more: object) -> ExchangeLine:
    known = {"request": "req-1", "usable": 168_000, "zone": "orange", "status": 200, "outcome": "managed"}
    return ExchangeLine(tokens_before=before, tokens_after=after, **{**known, **more})  # type: ignore[arg-type]


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


@pytest.mark.requirement("S.27")
@pytest.mark.parametrize(
    "piece", ["sk-", "key=", "bearer ", "://", "api-key:'", "a", " ", '\\"', "basic A", "sk", "://a"]
)
def test_redact_is_linear_in_hostile_text(piece: str) -> None:
    redact((piece * 200_000)[:200_000], limit=200_000)  # quadratic would take hours
    assert len(redact(piece * 100_000)) <= 8192
