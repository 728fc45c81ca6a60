"""The metrics as their readers get them: scraped over HTTP and read by the official parser."""

import asyncio
import inspect
import json
import math
import re
import sys
import threading
from collections.abc import AsyncIterator, Mapping, MutableMapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from proxy.access.admission import credentials_in
from proxy.exchange.plan import plan_request
from proxy.exchange.read import read_request
from proxy.exchange.run import ExchangeHandler
from proxy.exchange.sinks import record_exchange
from proxy.tap import ReportedUsage, Tap
from proxy.telemetry.metrics import Metrics, ModelCall
from proxy.telemetry.setup import Telemetry
from tests.functional.harness import (
    COUNTER,
    EVICTING,
    TOOLS,
    RunningWeir,
    Talk,
    WeirProcess,
    answered,
    free_port,
    opening,
    weir,
)
from tests.upstream.app import RunningSimulator, serve_simulator
from tests.upstream.model import SimulatorSettings

pytestmark = pytest.mark.slow

YAML = """
upstreams:
  sim: {{kind: openai, base_url: "{upstream}", api_key: sk-upstream}}
models:
  - {{match: "tight", window: 32768, tokenizer: o200k_base, prices: {{input: 2.0, output: 8.0, cache_read: 0.2}}}}
  - {{match: "*", window: 8192, tokenizer: o200k_base, prices: {{input: 2.0, output: 8.0, cache_read: 0.2}}}}
auth: {{mode: keys}}
keys:
  - {{name: coder, secret: sk-coder-canary, policy: balanced, allow: [policy]}}
  - {{name: writer, secret: sk-writer-canary, policy: notes}}
policies:
  evicting: {evicting}
  notes: {{preset: balanced, summarizer: summariser, summaries: {{prepare_at: null, wait: 20}}, cascade: [{{layer: compact}}]}}
"""
CANARY = "xylophone"
CALL = {"gen_ai_operation_name": "chat", "gen_ai_provider_name": "sim"}


def configured(upstream: str) -> str:
    """The configuration in front of an upstream."""
    return YAML.format(upstream=upstream, evicting=json.dumps(EVICTING))


@dataclass(frozen=True, slots=True)
class Page:
    """What one scrape gave."""

    text: str
    families: Mapping[str, Metric]

    @classmethod
    def read(cls, text: str) -> "Page":
        """A text as the official parser reads it."""
        found = list(text_string_to_metric_families(text))
        assert len({family.name for family in found}) == len(found)
        return cls(text, {family.name: family for family in found})

    def total(self, name: str, **labels: str) -> float:
        """The sum of the samples of that name which have these labels."""
        samples = [s for family in self.families.values() for s in family.samples if s.name == name]
        return sum(s.value for s in samples if labels.items() <= s.labels.items())

    def labels(self, name: str, label: str) -> set[str]:
        """The values of one label of a family."""
        return {s.labels[label] for s in self.families[name].samples if label in s.labels}


async def scraped(root: str) -> Page:
    """What ``GET /metrics`` says now."""
    async with httpx.AsyncClient() as client:
        answer = await client.get(f"{root}/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    return Page.read(answer.text)


async def settled(target: RunningWeir, requests: int) -> Page:
    """The page once so many requests of the managed route have ended, and nothing is stored any more."""
    stored = -1.0
    async with asyncio.timeout(10):
        while True:
            await target.runtime.preparation.settled()
            await target.stored()
            page, before = await scraped(target.root), stored
            stored = page.total("weir_store_latency_seconds_count")
            if page.total("weir_settlement_seconds_count") >= requests and stored == before:
                return page
            await asyncio.sleep(0.02)


@dataclass(frozen=True, slots=True)
class Day:
    """Everything that can happen to requests, once: the page after it, and what really was."""

    page: Page
    simulator: RunningSimulator
    answers: tuple[Mapping[str, str], ...]
    requests: int


@asynccontextmanager
async def a_day(folder: Path, telemetry: Telemetry | None = None) -> AsyncIterator[Day]:
    """Pass, stream, evict, compact by a summariser, overflow and retry, refusal, 429, a client that leaves, relays."""
    settings = SimulatorSettings(window=8192, windows={"summariser": 32768}, summary_model="summariser")
    async with (
        serve_simulator(settings, counter=COUNTER) as simulator,
        weir(
            "", folder / "w.db", yaml=configured(simulator.base_url), folder=folder, window=None,
            telemetry=telemetry,
        ) as target,
    ):  # fmt: skip
        coder, writer = target.client("sk-coder-canary"), target.client("sk-writer-canary")
        named = {"x-weir-conversation": f"the {CANARY} files"}
        short = Talk(coder, [{"role": "user", "content": f"Play the {CANARY}."}])
        await short.ask(extra_headers=named)
        stream = await coder.chat.completions.create(model="sim", messages=short.messages, stream=True)
        assert [chunk async for chunk in stream]
        agent = Talk(coder, opening(seed=3), seed=3)
        agent.grow(10, kind="agent")
        await agent.agent(6)
        wrote = Talk(writer, opening(seed=5)[:1], seed=5)
        wrote.grow(20)
        await wrote.chat(2)
        tight = Talk(coder, opening(seed=7), model="tight", seed=7)
        tight.grow(24, kind="agent")
        await tight.ask(tools=TOOLS, extra_headers={"x-weir-policy": "evicting"})
        with pytest.raises(openai.BadRequestError, match="context"):
            await coder.chat.completions.create(
                model="sim", messages=[{"role": "system", "content": "never " * 9000}, *short.messages]
            )
        with pytest.raises(openai.RateLimitError):
            await coder.chat.completions.create(
                model="sim", messages=short.messages, extra_headers={"x-sim-fault": "429"}
            )
        await leave(target)
        await coder.models.list()
        async with httpx.AsyncClient(headers={"authorization": "Bearer sk-coder-canary"}) as client:
            assert (await client.get(f"{target.root}/weir/conversations")).status_code == 200
        requests = 2 + 6 + 2 + 1 + 3
        headers = tuple(h for talk in (short, agent, wrote, tight) for h in talk.headers)
        yield Day(await settled(target, requests), simulator, headers, requests)


async def leave(target: RunningWeir) -> None:
    """A client that closes its connection in the middle of a stream."""
    body = {"model": "sim", "messages": opening(seed=11), "stream": True, "max_tokens": 400}
    headers = {"authorization": "Bearer sk-coder-canary", "x-sim-fault": "slow_chunks:0.05"}
    async with httpx.AsyncClient() as client:
        request = client.build_request("POST", f"{target.base_url}/chat/completions", json=body, headers=headers)
        answer = await client.send(request, stream=True)
        async for _ in answer.aiter_raw():
            page = await scraped(target.root)
            assert page.total("http_server_active_requests") == page.total("weir_streams_active") == 1
            break
        await answer.aclose()


@pytest.fixture(scope="module")
def day(tmp_path_factory: pytest.TempPathFactory) -> Day:
    """One day for every test that only reads it; its upstream is gone by then."""

    async def spend() -> Day:
        async with a_day(tmp_path_factory.mktemp("day")) as found:
            found.simulator.answered()
            return found

    return asyncio.run(spend())


@pytest.mark.requirement("P15", "A0.139")
def test_the_official_parser_reads_every_family_with_its_type_and_its_help(day: Day) -> None:
    for family in day.page.families.values():
        assert family.type in {"counter", "gauge", "histogram"}
        assert family.documentation
        assert all(math.isfinite(s.value) and s.value >= 0 for s in family.samples)
        keys = [(s.name, tuple(sorted(s.labels.items()))) for s in family.samples]
        assert len(keys) == len(set(keys)), "a series may come once"


@pytest.mark.requirement("P15")
def test_the_buckets_of_every_histogram_are_cumulative_and_end_with_its_count(day: Day) -> None:
    histograms = [f for f in day.page.families.values() if f.type == "histogram"]
    assert len(histograms) >= 8
    for family in histograms:
        series: dict[tuple[tuple[str, str], ...], dict[str, Any]] = {}
        for sample in family.samples:
            rest = tuple(sorted((k, v) for k, v in sample.labels.items() if k != "le"))
            of = series.setdefault(rest, {"buckets": []})
            if sample.name.endswith("_bucket"):
                of["buckets"].append((float(sample.labels["le"]), sample.value))
            else:
                of[sample.name.removeprefix(family.name)] = sample.value
        for of in series.values():
            bounds, counts = zip(*of["buckets"], strict=True)
            assert list(bounds) == sorted(set(bounds))
            assert bounds[-1] == math.inf
            assert list(counts) == sorted(counts)
            assert counts[-1] == of["_count"]
            least = sum((b - a) * low for a, b, low in zip((0, *counts), counts, (0.0, *bounds), strict=False))
            assert of["_sum"] >= least * (1 - 1e-9)


@pytest.mark.requirement("P15")
def test_requests_are_counted_by_outcome_policy_and_status(day: Day) -> None:
    total = day.page.total
    assert total("weir_requests_total", weir_outcome="ok", weir_policy="balanced") == 8
    assert total("weir_requests_total", weir_outcome="ok", weir_policy="evicting") == 1
    assert total("weir_requests_total", weir_outcome="ok", weir_policy="notes") == 2
    for outcome in ("context_length_exceeded", "upstream_429", "client_disconnect"):
        assert total("weir_requests_total", weir_outcome=outcome, weir_policy="balanced") == 1, outcome
    assert total("weir_requests_total", weir_outcome="relayed", weir_policy="none") == 1
    assert total("weir_requests_total") == day.requests + 1
    served = "http_server_request_duration_seconds_count"
    chat = {"http_route": "/v1/chat/completions", "http_request_method": "POST"}
    assert total(served, **chat) == total("weir_settlement_seconds_count") == day.requests
    assert total(served, **chat, http_response_status_code="200") == 12
    assert total(served, **chat, http_response_status_code="400", error_type="context_length_exceeded") == 1
    assert total(served, **chat, http_response_status_code="429", error_type="upstream_429") == 1
    assert total(served, **chat, error_type="client_disconnect") == 1
    assert total(served, http_route="/v1/{rest}", http_request_method="GET", http_response_status_code="200") == 1
    assert total(served, http_route="/weir/{rest}", http_response_status_code="200") == 1
    assert total(served) == day.requests + 2, "probes and scrapes are not counted"
    assert total("http_server_active_requests") == total("weir_streams_active") == 0


@pytest.mark.requirement("P15", "A0.126")
def test_each_call_upstream_is_one_sample_with_its_own_time_and_usage(day: Day) -> None:
    total, seen = day.page.total, [s for s in day.simulator.answered() if s.path.endswith("/chat/completions")]
    duration = "gen_ai_client_inference_duration_seconds_count"
    assert total(duration) == len(seen) == 13 + 1 + day.page.total("weir_summarizer_calls_total", weir_result="ok")
    for model in ("sim", "tight", "summariser"):
        assert total(duration, gen_ai_request_model=model, **CALL) == len([s for s in seen if s.model == model])
    assert total(duration, gen_ai_request_model="tight", error_type="context_length_exceeded") == 1
    assert total(duration, gen_ai_request_model="tight", gen_ai_response_model="tight") == 1
    assert total(duration, error_type="rate_limit_exceeded") == total(duration, error_type="client_disconnect") == 1
    answers = [s for s in seen if s.status == 200 and not s.client_gone and s.header("x-sim-fault") is None]
    whole = [s for s in answers if not s.json().get("stream")]
    prompts = sum(s.prompt_tokens for s in whole)
    answered_tokens = sum(s.completion_tokens for s in whole)
    assert total("gen_ai_client_inference_usage_input_tokens_total") == prompts
    assert total("gen_ai_client_inference_operation_input_tokens_sum") == prompts
    assert total("gen_ai_client_inference_usage_output_tokens_total") == answered_tokens
    assert total("gen_ai_client_inference_operation_output_tokens_sum") == answered_tokens
    cached = total("gen_ai_client_inference_usage_cache_read_input_tokens_total")
    assert cached == sum(s.cached_tokens for s in whole)
    first = "gen_ai_client_inference_time_to_first_chunk_seconds_count"
    assert total(first) == 2, "of the two streams, also of the one that its client left"


@pytest.mark.requirement("P15", "A0.2", "A1.14")
def test_tokens_are_counted_before_after_and_saved_and_by_key(day: Day) -> None:
    total = day.page.total
    told = [dict(part.split("=") for part in h["x-weir-tokens"].split(";")) for h in day.answers]
    before, after = (sum(int(t[name]) for t in told) for name in ("before", "after"))
    others = total("weir_tokens_total", weir_kind="before") - before
    assert 0 < others < 1_500, "the stream, the limited and the abandoned request; the refused one was not forwarded"
    assert total("weir_tokens_total", weir_kind="after") == after + others
    assert total("weir_tokens_total", weir_kind="saved") == before - after > 0
    keys = "weir_key_tokens_total"
    assert day.page.labels("weir_key_tokens", "weir_key") == {"coder", "writer"}
    assert total(keys, weir_kind="saved") == before - after
    assert total(keys, weir_kind="forwarded") == after + others
    assert total(keys, weir_kind="saved", weir_key="writer") > 0
    assert total(keys, weir_kind="answered", weir_key="coder") > 0
    cost = "weir_cost_total"
    assert total(cost, weir_kind="unmanaged", weir_key="coder") > total(cost, weir_kind="forwarded", weir_key="coder")


@pytest.mark.requirement("P15", "A0.118", "A0.119", "A0.120")
def test_what_weir_did_is_counted_by_layer_zone_and_reason(day: Day) -> None:
    total = day.page.total
    assert total("weir_actions_total", weir_layer="evict") > 0
    assert total("weir_actions_total", weir_layer="compact") >= 1
    assert total("weir_overflows_total") == total("weir_retries_total", weir_reason="overflow") == 1
    assert total("weir_pressure_count") == day.requests
    assert total("weir_cache_requests_total") == day.requests - 1, "all but the one that was refused"
    assert total("weir_pressure_count", weir_zone="green") >= 4
    assert total("weir_compression_ratio_count") >= 1
    assert total("weir_summarizer_calls_total", weir_result="ok") >= 1
    assert total("weir_summarizer_tokens_total", weir_kind="asked") == sum(
        s.prompt_tokens for s in answered(day.simulator, "summariser")
    )
    assert total("weir_checkpoints_total", weir_reason="batch") >= 1
    assert total("weir_checkpoints_total", weir_reason="before_model") == 1
    assert total("weir_windows_learned") == 1
    assert total("weir_build_info") == 1
    assert total("weir_health", weir_health_metric="utilization") > 0
    waited = total("weir_overhead_seconds_count", weir_summarizer="true")
    assert 1 <= waited <= 2
    assert total("weir_overhead_seconds_count") == day.requests


@pytest.mark.requirement("P15", "A4.15")
def test_cache_use_is_what_the_upstream_reported(day: Day) -> None:
    total = day.page.total
    seen = [s for s in day.simulator.answered() if s.model in ("sim", "tight") and s.status == 200]
    whole = [s for s in seen if s.path.endswith("completions") and not s.json().get("stream")]
    assert total("weir_cache_tokens_total", weir_kind="prompt") == sum(s.prompt_tokens for s in whole)
    assert total("weir_cache_tokens_total", weir_kind="read") == sum(s.cached_tokens for s in whole) > 0
    assert total("weir_cache_requests_total", weir_prefix_changed="proxy") >= 1
    assert total("weir_cache_requests_total", weir_prefix_changed="none", weir_cache_cold="false") >= 4


@pytest.mark.requirement("P15")
def test_the_store_is_timed_by_operation(day: Day) -> None:
    count = "weir_store_latency_seconds_count"
    batches = day.page.total("weir_checkpoints_total", weir_reason="batch")
    assert day.page.total(count, weir_store_operation="record") >= 1
    assert day.page.total(count, weir_store_operation="commit") >= batches
    assert day.page.total(count, weir_store_operation="find") >= 1
    assert {s.value for s in day.page.families["weir_store_waiting"].samples} == {0.0}


@pytest.mark.requirement("S.16")
def test_no_label_holds_content_a_key_or_a_conversation(day: Day) -> None:
    page = day.page.text
    for secret in (CANARY, "axios", "sk-coder", "sk-writer", "sk-upstream", "conv-", "req_"):
        assert secret not in page, secret


@pytest.mark.requirement("P15", "S.16")
def test_ten_thousand_made_up_names_leave_a_bounded_page_and_right_sums() -> None:
    metrics = Metrics()
    for number in range(10_000):
        model = f"made-up-{number}" + "x" * 500
        metrics.observe_call(
            ModelCall(
                provider="p", model=model, response_model=model, seconds=0.1, error=f"e{number}", usage=ReportedUsage(5, 7),
                first_chunk=0.01,
            )
        )  # fmt: skip
        metrics.requests.labels(f"upstream_{number}", f"policy-{number}").inc()
        for kind in ("forwarded", "saved", "cached", "answered"):
            metrics.key_tokens.labels(kind, f"t{number}", f"k{number}").inc(3)
        metrics.observe_request(method="POST", route=f"/{number}", status=number, error="", seconds=0.1)
        for kind in ("forwarded", "unmanaged"):
            metrics.cost.labels(kind, f"t{number}", f"k{number}").inc()
    metrics.observe_call(ModelCall(provider="p", model="sk-canary0123456789abcdef", seconds=0.1))
    page = Page.read(metrics.render()[0].decode())
    assert page.total("weir_requests_total") == 10_000
    assert page.total("weir_key_tokens_total", weir_kind="forwarded") == 30_000
    assert page.total("gen_ai_client_inference_duration_seconds_count") == 10_001
    for family in page.families.values():
        series = {tuple(sorted((k, v) for k, v in s.labels.items() if k != "le")) for s in family.samples}
        assert len(series) <= (500 if family.type == "histogram" else 2_000)
        for label in {name for s in family.samples for name in s.labels} - {"le"}:
            assert len(page.labels(family.name, label)) <= 201
    assert len(page.labels("weir_requests", "weir_policy")) == 201
    assert page.labels("weir_requests", "weir_policy") >= {"policy-0", "other"}
    assert len(page.text.splitlines()) < 30_000
    assert "sk-canary" not in page.text


@pytest.mark.requirement("P15", "A0.139")
async def test_what_alert_rules_ask_for_an_increase_of_is_there_before_its_first_event(tmp_path: Path) -> None:
    """Prometheus takes a series that begins at 1 for one that has not grown."""
    rules = (Path(__file__).parents[2] / "deploy" / "rules.yml").read_text()
    asked = re.findall(r"increase\((\w+)(?:\{([^}]*)\})?\[", rules)
    assert len(asked) > 4
    store = f"sqlite+aiosqlite:///{tmp_path / 'w.db'}"
    async with WeirProcess(["--upstream", "http://127.0.0.1:9/v1", "--store", store], free_port()) as target:
        page = await scraped(target.root)
    samples = [s for family in page.families.values() for s in family.samples]
    for name, given in asked:
        labels = dict(re.findall(r'(\w+)="([^"]*)"', given))
        found = [s for s in samples if s.name == name and labels.items() <= s.labels.items()]
        assert found, (name, labels)
        assert {s.value for s in found} == {0.0}


FORBIDDEN = ("open", "socket.", "sqlite3.", "subprocess.", "os.", "time.sleep", "_winapi", "shutil.")


@dataclass(slots=True)
class Ears:
    """Hears what one thread asks of the system while it is ``open``; a hook of the interpreter cannot be taken back."""

    thread: int = 0
    heard: list[str] | None = None

    def __call__(self, event: str, _: tuple[object, ...]) -> None:
        if self.heard is not None and threading.get_ident() == self.thread and event.startswith(FORBIDDEN):
            self.heard.append(event)


EARS = Ears()


@pytest.mark.requirement("A0.126")
async def test_watching_a_request_waits_for_nothing_and_touches_neither_disk_nor_network(tmp_path: Path) -> None:
    sys.addaudithook(EARS)
    talk = Talk(None, opening())
    talk.grow(16, kind="agent")
    async with weir("http://127.0.0.1:9/v1", tmp_path / "w.db") as target:
        runtime = target.runtime
        await asyncio.sleep(0)
        headers = [(b"authorization", b"Bearer sk-test")]
        handler = ExchangeHandler(runtime, {"headers": headers}, nothing_received, nothing_sent)
        progress = handler.exchange
        progress.caller = runtime.keyring.identify(credentials_in(headers))
        request = await read_request(runtime, progress, openai_body(talk.messages), progress.caller)
        plan = await plan_request(runtime, progress, request)
        progress.status = 200
        progress.seen = Tap(
            usage=ReportedUsage(prompt=5000, completion=10, cached=100), finish_reasons=["stop"], model="sim"
        )
        assert plan.decision is not None
        assert plan.decision.is_new
        assert not inspect.iscoroutinefunction(record_exchange)
        EARS.thread, EARS.heard = threading.get_ident(), []
        try:
            record_exchange(runtime, progress)
            heard = list(EARS.heard)
        finally:
            EARS.heard = None
        assert heard == []
        page = Page.read(runtime.telemetry.metrics.render()[0].decode())
    assert page.total("weir_requests_total") == page.total("weir_settlement_seconds_count") == 1


async def nothing_received() -> dict[str, Any]:
    """What a client sends whose body was read already."""
    return {"type": "http.request", "body": b"", "more_body": False}


async def nothing_sent(message: MutableMapping[str, Any]) -> None:
    """A client that listens to nothing."""


def openai_body(messages: list[dict[str, Any]]) -> bytes:
    """A request as its bytes."""
    request = httpx.Request("POST", "http://weir", json={"model": "sim", "messages": messages, "tools": TOOLS})
    return request.content


@pytest.mark.requirement("P15")
async def test_the_metrics_need_no_key_and_hold_none(tmp_path: Path) -> None:
    yaml = configured("http://127.0.0.1:9/v1")
    async with weir("", tmp_path / "w.db", yaml=yaml, folder=tmp_path, window=None) as target:
        async with httpx.AsyncClient() as client:
            assert (await client.get(f"{target.root}/weir/conversations")).status_code == 401
        page = await scraped(target.root)
    assert page.total("weir_build_info") == 1


@pytest.mark.requirement("P15")
def test_a_label_with_half_a_character_is_shown_like_any_other() -> None:
    metrics = Metrics()
    metrics.observe_call(ModelCall(provider="p", model=json.loads('"m\\ud800"'), seconds=0.1))
    page = Page.read(metrics.render()[0].decode())
    assert page.total("gen_ai_client_inference_duration_seconds_count", gen_ai_request_model="m?") == 1
