"""The metrics as their readers get them: scraped over HTTP and read by the official parser."""

import asyncio
import json
import math
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from proxy.telemetry.setup import Telemetry
from tests.functional.harness import (
    COUNTER,
    EVICTING,
    TOOLS,
    RunningWeir,
    Talk,
    WeirProcess,
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


@pytest.mark.requirement("S.16")
def test_no_label_holds_content_a_key_or_a_conversation(day: Day) -> None:
    page = day.page.text
    for secret in (CANARY, "axios", "sk-coder", "sk-writer", "sk-upstream", "conv-", "req_"):
        assert secret not in page, secret


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
