"""What leaves Weir of a few requests: spans, log lines, rows, the page of metrics; what differs by run masked.

``python -m tests.golden.telemetry`` writes the texts anew.
"""

import asyncio
import contextlib
import io
import json
import logging
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from policies.ledger import Trend
from policies.messages import Message
from proxy.tap import ReportedUsage
from proxy.telemetry.logs import QueuedLog
from proxy.telemetry.metrics import Metrics, ModelCall
from proxy.telemetry.setup import OtelSettings, Telemetry
from tests.functional.harness import (
    COUNTER,
    EVICTING,
    NOTHING_RECALLED,
    TOOLS,
    RunningWeir,
    opening,
    prose,
    tool_step,
    weir,
)
from tests.receiver import PART
from tests.upstream.app import serve_simulator
from tests.upstream.model import SimulatorSettings

HERE = Path(__file__).parent
EXCHANGES, METRICS = HERE / "telemetry_exchanges.txt", HERE / "telemetry_metrics.txt"
YAML = """
upstreams:
  sim: {{kind: openai, base_url: "{upstream}", api_key: sk-upstream}}
models:
  - {{match: "tight", window: 32768, tokenizer: o200k_base, prices: {{input: 2.0, output: 8.0, cache_read: 0.2}}}}
  - {{match: "*", window: 8192, tokenizer: o200k_base, prices: {{input: 2.0, output: 8.0, cache_read: 0.2}}}}
auth: {{mode: keys}}
keys: [{{name: coder, secret: sk-coder, policy: evicting, allow: [policy, mode]}}]
policies:
  evicting: {evicting}
  alarmed: {{preset: balanced, health: {{utilization: 0.01, utilization_requests: 1}}}}
"""
CONTEXT = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "tracestate": "vendor=a:1"}
ACCEPTED = (
    "*/*",
    "text/plain",
    "application/openmetrics-text; version=1.0.0; charset=utf-8",
    "application/openmetrics-text;version=1.0.0;q=0.9,text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
)
VOLATILE = {
    *("gen_ai.response.time_to_first_chunk", "server.port", "user_agent.original", "overhead_ms", "duration_ms"),
    *("time", "trace", "tenant", "weir.tenant", "at", "weir.ref", "ref", "trend", "health"),
}
MASKS = (
    *((r"\breq_[0-9a-f]+", "REQUEST"), (r"127\.0\.0\.1:\d+", "HOST"), (r"\bchatcmpl-[\w-]+", "chatcmpl-ID")),
    *((r"\b[0-9a-f]{16,}\b", "HEX"), (r'(tenant="?)[0-9a-f]{8}\b', r"\1TENANT"), (r'(?<=server_port=")\d+', "PORT")),
)
UNSTEADY = (
    *("weir_store_waiting", "weir_tasks", "weir_checkpoints_total", "weir_health", "weir_loop_lag", "weir_connections"),
    *("weir_queue", "process_"),
)


def _bare(row: dict[str, Any]) -> dict[str, Any]:
    """A row without what the messages of its arrays say."""
    kept = row.get("inspection")
    return {**row, "inspection": {**kept, "raws": len(kept["raws"])}} if kept else row


def masked(value: object, name: str = "") -> Any:
    """A value as JSON has it, without what differs by run."""
    if name in VOLATILE and value:
        return "…"
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: masked(getattr(value, f.name), f.name) for f in fields(value)}
    if isinstance(value, msgspec.Struct):
        return {name: masked(getattr(value, name), name) for name in value.__struct_fields__}
    if isinstance(value, Trend | Message):
        return {name: masked(each, name) for name, each in value._asdict().items()}
    if isinstance(value, Mapping):
        return {str(key): masked(each, str(key)) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [masked(each) for each in value]
    if isinstance(value, bytes):
        return "bytes"
    if isinstance(value, float):
        return round(value, 6)
    if isinstance(value, str):
        for pattern, shown in MASKS:
            value = re.sub(pattern, shown, value)
    return value


def line(kind: str, value: object) -> str:
    return f"{kind} {json.dumps(masked(value), ensure_ascii=False, default=str, sort_keys=kind == 'SPAN')}"


def span_line(span: ReadableSpan, named: Mapping[int, str]) -> str:
    return line(
        "SPAN",
        {
            "name": span.name,
            "kind": span.kind.name,
            "status": span.status.status_code.name,
            "parent": named.get(span.parent.span_id, "remote") if span.parent is not None else None,
            "links": [dict(link.attributes or {}) for link in span.links],
            "attributes": dict(span.attributes or {}),
            "events": [[event.name, dict(event.attributes or {})] for event in span.events],
        },
    )


def page_lines(page: str) -> Iterator[str]:
    """The page without buckets, with numbers only where every run has the same ones."""
    for text in page.splitlines():
        if "weir_store_size" in text:  # there from the first measurement on, some seconds after the start
            continue
        name, _, _ = text.rpartition(" ")
        timed = "_seconds_sum" in name or name.startswith(UNSTEADY)
        if "_bucket{" not in name and not name.startswith("weir_store_latency"):  # which was first is chance
            yield masked(f"{name} …" if timed else text)


@contextmanager
def logged() -> Iterator[tuple[io.StringIO, io.StringIO, Callable[[], object]]]:
    """What Weir's logger writes while the block runs, as lines for people and as JSON; the last writes what waits."""
    people, machines = io.StringIO(), io.StringIO()
    handlers = [QueuedLog(people), QueuedLog(machines, form="json")]
    logger = logging.getLogger("weir")
    level = logger.level
    logger.setLevel(logging.INFO)
    for handler in handlers:
        logger.addHandler(handler)
    try:
        yield people, machines, lambda: [handler.stop() for handler in handlers]
    finally:
        logger.setLevel(level)
        for handler in handlers:
            logger.removeHandler(handler)


def agent(steps: int, seed: int = 1) -> list[Any]:
    return [*opening(seed=seed), *(message for number in range(steps) for message in tool_step(number))]


async def requests(target: RunningWeir) -> None:
    """One of each kind: pass, stream, batch, overflow, refusal, error, observed, off, alert, relayed."""
    client = target.client("sk-coder", default_headers=CONTEXT | {"user-agent": "golden"})

    async def ask(messages: Sequence[Any], name: str, model: str = "sim", stream: bool = False, **headers: str) -> None:
        named = {"x-weir-conversation": name} | {key.replace("_", "-"): value for key, value in headers.items()}
        more = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        with contextlib.suppress(openai.BadRequestError, openai.RateLimitError):
            answer = await client.chat.completions.create(
                model=model,
                messages=messages,
                tools=TOOLS,
                max_tokens=512,
                temperature=0.5,
                extra_headers=named,
                **more,
            )
            if stream:
                assert [chunk async for chunk in answer]
        await target.runtime.preparation.settled()

    await ask(opening(), "pass")
    await ask(opening(), "stream", stream=True)
    await ask(agent(18), "batch")
    await ask(agent(18), "batch", stream=True)
    await ask(agent(22, seed=7), "overflow", model="tight")
    await ask([{"role": "system", "content": prose(9_000, seed=1)}, *opening()], "refused")
    await ask(opening(), "limited", x_sim_fault="429")
    await ask(agent(18), "observed", x_weir_mode="observe")
    await ask(opening(), "off", x_weir_policy="off")
    await ask(agent(3), "alarmed", x_weir_policy="alarmed")
    await client.models.list()
    await client.embeddings.create(model="sim", input="words", encoding_format="float")


async def exchanges() -> str:
    """What leaves of these requests."""
    exporter, rows, out = InMemorySpanExporter(), list[object](), list[str]()
    telemetry = Telemetry.create(OtelSettings(service_version="1.2.3", capture_content=False), span_exporter=exporter)
    with tempfile.TemporaryDirectory() as home, logged() as (people, machines, stop):
        folder = Path(home)
        async with serve_simulator(SimulatorSettings(window=8192), counter=COUNTER) as simulator:
            evicting = json.dumps({**EVICTING, **NOTHING_RECALLED})
            yaml = YAML.format(upstream=simulator.base_url, evicting=evicting)
            async with weir("", folder / "w.db", yaml=yaml, folder=folder, window=None, telemetry=telemetry) as target:
                put = target.runtime.write_queue.put
                target.runtime.write_queue.put = lambda row: (rows.append(row), put(row))[1]  # type: ignore[method-assign]
                await requests(target)
                async with httpx.AsyncClient() as client:
                    page = ""
                    for accept in ACCEPTED:
                        answer = await client.get(f"{target.root}/metrics", headers={"accept": accept})
                        page = answer.text if answer.text[-6:] != "# EOF\n" else page
                        out.append(f"ACCEPT {accept} -> {answer.status_code} {answer.headers['content-type']}")
        await asyncio.to_thread(telemetry.flush)
        stop()
        finished = sorted(exporter.get_finished_spans(), key=lambda span: span.start_time or 0)
        spans = [span for span in finished if not PART.match(span.name)]
        named = {span.context.span_id: span.name for span in spans}
        out += [span_line(span, named) for span in spans]
        out += [line("ROW", {"type": type(row).__name__} | _bare(masked(row))) for row in rows]
        said = [json.loads(text) for text in machines.getvalue().splitlines()]
        out += [
            line("JSON", each) for each in said if each["message"] in ("ctx", "alert")
        ]  # a slow disk is told of, too
        lines = (masked(each) for each in people.getvalue().splitlines() if re.search(" (ctx|alert) ", each))
        out += ["LINE " + re.sub(r"^\S+|(?<=_ms=)[\d.]+|(?<=trace=)\w+", "…", each) for each in lines]
        out += [f"PAGE {each}" for each in page_lines(page)]
    await asyncio.to_thread(telemetry.shutdown)
    return "\n".join(out) + "\n"


def counted() -> Metrics:
    """Metrics in which everything has happened that they know, with fixed numbers and labels that are hard to write."""
    metrics = Metrics()
    metrics.requests.labels('a"b\\c\ndé', "support").inc()
    metrics.requests.labels("ok", "x" * 300).inc()
    chat = {"method": "POST", "route": "/v1/chat/completions"}
    metrics.observe_request(**chat, status=200, error="", seconds=0.25)
    metrics.observe_request(**chat, status=None, error="client_disconnect", seconds=400.5)
    for kind, tokens in (("before", 900), ("after", 300), ("saved", 600)):
        metrics.tokens.labels(kind).inc(tokens)
    for kind, key, tokens in (("forwarded", "", 300), ("saved", "", 600), ("answered", "", 7)):
        metrics.key_tokens.labels(kind, "t", key).inc(tokens)
    for kind, key, tokens in (("forwarded", "k", 300), ("saved", "k", 0), ("cached", "k", 100)):
        metrics.key_tokens.labels(kind, "t", key).inc(tokens)
    metrics.cost.labels("forwarded", "t", "sk-canary0123456789").inc(0.125)
    metrics.cost.labels("unmanaged", "t", "sk-canary0123456789").inc(1.5e-7)
    metrics.cache_requests.labels("proxy", "true").inc()
    for kind, tokens in (("prompt", 900), ("read", 100), ("written", 3)):
        metrics.cache_tokens.labels(kind).inc(tokens)
    metrics.actions.labels("evict").inc(12)
    metrics.events.labels("zone_change").inc()
    metrics.pressure.labels("orange").observe(0.88)
    metrics.overflows.inc()
    metrics.retries.labels("overflow").inc()
    metrics.summarizer_calls.labels("ok").inc()
    for kind, tokens in (("asked", 100), ("cached", 5), ("answered", 10)):
        metrics.summarizer_tokens.labels(kind).inc(tokens)
    metrics.summarizer_cost.labels("t").inc(0.5)
    metrics.preparations.labels("used").inc()
    metrics.checkpoints.labels("batch").inc()
    metrics.compression.observe(4.0)
    metrics.alerts.labels("warning", "anomaly", "loop").inc()
    metrics.alerts_undelivered.labels("failed").inc()
    metrics.degraded.labels("store").inc()
    metrics.store_latency.labels("commit").observe(0.002)
    metrics.overhead.labels("").observe(0.0005)
    metrics.overhead.labels("true").observe(3.0)
    metrics.settlement.observe(0.00025)
    used = ReportedUsage(prompt=70_000_000, completion=9, cached=5, written=6, reasoning=7)
    metrics.observe_call(
        ModelCall(
            provider="openai",
            model="m",
            response_model="m-1",
            seconds=1.28,
            address="h",
            port=443,
            usage=used,
            first_chunk=0.2,
        )
    )
    metrics.observe_call(ModelCall(provider="openai", model="m", seconds=0.5, error="503"))
    metrics.active_requests.inc(3)
    metrics.active_streams.inc(2)
    return metrics


def metrics_text() -> str:
    """The page, without what the process takes."""
    page, _ = counted().render()
    return "".join(f"{text}\n" for text in page.decode().splitlines() if "process_" not in text)


if __name__ == "__main__":
    METRICS.write_text(metrics_text(), encoding="utf-8")
    EXCHANGES.write_text(asyncio.run(exchanges()), encoding="utf-8")
