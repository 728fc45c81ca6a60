"""The trace of a request reads as what happened to it: a plan with a child per layer, each attempt, no content."""

import re
from typing import Any

import aiohttp
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from proxy.simulator.serving import serve_simulator
from proxy.simulator.settings import SimulatorSettings
from proxy.telemetry import Telemetry, TelemetrySettings
from tests.functional.harness import COUNTER, TOOLS, opening, prose, tool_step, weir


def tree(spans: tuple[ReadableSpan, ...]) -> dict[str, list[str]]:
    """Names of the children of each span, in order of their start."""
    names = {s.context.span_id: s.name for s in spans if s.context is not None}
    found: dict[str, list[str]] = {}
    for span in sorted(spans, key=lambda s: s.start_time or 0):
        if span.parent is not None and span.parent.span_id in names:
            found.setdefault(names[span.parent.span_id], []).append(span.name)
    return found


async def traced(
    messages: list[Any], *, window: int, summarizer: str | None = None, believed: int = 8192
) -> tuple[ReadableSpan, ...]:
    """The spans of one request."""
    exporter = InMemorySpanExporter()
    telemetry = Telemetry.create(TelemetrySettings(), span_exporter=exporter)
    settings = SimulatorSettings(window=window, summary_model="notes")
    async with (
        serve_simulator(settings, counter=COUNTER) as simulator,
        weir(simulator.base_url, window=believed, summarizer=summarizer, telemetry=telemetry) as target,
    ):
        headers = {
            "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
            "baggage": "user.id=canary",
        }
        client = target.client("sk-test-canary", default_headers=headers)
        await client.chat.completions.create(model="sim", messages=messages, max_tokens=512, tools=TOOLS)
        seen = simulator.ledger[-1]
        assert (seen.header("traceparent") or "").startswith("00-0af7651916cd43dd8448eb211c80319c-")
        assert seen.header("traceparent") != headers["traceparent"]
        assert seen.header("baggage") is None
    telemetry.flush()
    spans = exporter.get_finished_spans()
    assert {f"{s.context.trace_id:032x}" for s in spans if s.context} == {"0af7651916cd43dd8448eb211c80319c"}
    text = repr(
        [(s.name, dict(s.attributes or {}), [(e.name, dict(e.attributes or {})) for e in s.events]) for s in spans]
    )
    assert "axios" not in text
    assert "sk-test-canary" not in text
    assert "canary" not in text
    return spans


@pytest.mark.requirement("P15")
async def test_a_request_that_passes_has_a_plan_and_one_attempt() -> None:
    assert tree(await traced(opening(), window=8192)) == {
        "POST /v1/chat/completions": ["weir context.plan", "chat sim"],
    }


@pytest.mark.requirement("P15", "A0.6")
async def test_a_batch_of_edits_has_a_child_per_layer() -> None:
    messages = opening()
    for number in range(18):
        messages += tool_step(number)
    spans = await traced(messages, window=8192)
    layers = tree(spans)["weir context.plan"]
    assert layers[0].endswith("ingest_cap")
    assert layers[-1].endswith("evict")
    attempt = next(s for s in spans if s.name == "chat sim")
    assert attempt.attributes is not None
    assert attempt.attributes["gen_ai.usage.input_tokens"] < 8192  # type: ignore[operator]
    assert attempt.attributes["session.id"] == attempt.attributes["gen_ai.conversation.id"]


@pytest.mark.requirement("P15", "P13")
async def test_the_summarisers_call_stands_under_the_plan() -> None:
    messages = opening()[:1]
    for number in range(26):
        messages += [
            {"role": "user", "content": prose(132, seed=2 * number)},
            {"role": "assistant", "content": prose(132, seed=2 * number + 1)},
        ]
    messages.append({"role": "user", "content": "and now?"})
    spans = await traced(messages, window=8192, summarizer="notes")
    assert "chat notes" in tree(spans)["weir context.plan"]
    attempt = next(s for s in spans if s.name == "chat sim")
    assert attempt.attributes is not None
    assert attempt.attributes["gen_ai.conversation.compacted"] is True


@pytest.mark.requirement("P15", "P16")
async def test_an_overflow_shows_the_failed_attempt_and_the_next_one() -> None:
    messages = opening()
    for number in range(22):
        messages += tool_step(number)
    spans = await traced(messages, window=8192, believed=32768)
    names = tree(spans)["POST /v1/chat/completions"]
    assert names == ["weir context.plan", "chat sim", "weir context.plan", "chat sim"]
    first, second = sorted((s for s in spans if s.name == "chat sim"), key=lambda s: s.start_time or 0)
    assert first.attributes is not None
    assert second.attributes is not None
    assert first.attributes["error.type"] == "context_length_exceeded"
    assert second.attributes["http.request.resend_count"] == 1


@pytest.mark.requirement("A0.139", "P15")
async def test_metrics_tell_what_was_done() -> None:
    messages = opening()
    for number in range(18):
        messages += tool_step(number)
    async with (
        serve_simulator(SimulatorSettings(window=8192), counter=COUNTER) as simulator,
        weir(simulator.base_url) as target,
        aiohttp.ClientSession() as session,
    ):
        await target.client().chat.completions.create(model="sim", messages=messages, max_tokens=512)
        async with session.get(f"{target.root}/metrics") as answer:
            text = await answer.text()
    assert re.search(r'^weir_requests_total\{[a-z_]*outcome="ok",[a-z_]*policy="balanced"\} 1$', text, re.MULTILINE)
    assert re.search(r'^weir_actions_total\{[a-z_]*layer="evict"\} ', text, re.MULTILINE)
