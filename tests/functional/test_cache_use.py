"""What the provider's cache made of each request is told: hits, cold starts, who changed the prefix, what it cost."""

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from proxy.telemetry.setup import OtelSettings, Telemetry
from tests.functional.harness import COUNTER, SHARED, TOOLS, Deployment, InTurns, RunningWeir, Talk, answered, weir
from tests.upstream.app import RunningSimulator, serve_simulator
from tests.upstream.model import SimulatorSettings

NAME = "paid-talk"
PRICES = "{input: 2.0, output: 8.0}"
POLICY = """
upstreams: {{sim: {{kind: openai, base_url: "{upstream}", api_key: sk-upstream}}}}
models: [{{match: "*", upstream: sim, window: 8192, prices: {prices}}}]
policies:
  own: {own}
default_policy: own
"""


def policy(upstream: str, own: str = "{preset: balanced}", prices: str = PRICES) -> str:
    return POLICY.format(upstream=upstream, own=own, prices=prices)


@pytest.fixture
async def upstream() -> AsyncIterator[RunningSimulator]:
    async with serve_simulator(SimulatorSettings(window=8192), counter=COUNTER) as simulator:
        yield simulator


async def get(target: RunningWeir, path: str) -> Any:
    await target.stored()
    async with httpx.AsyncClient(headers={"authorization": "Bearer sk-test"}) as http:
        found = await http.get(f"{target.root}/weir/conversations/{NAME}{path}")
    found.raise_for_status()
    return found.json()


async def timeline(target: RunningWeir) -> list[dict[str, Any]]:
    return list((await get(target, "/timeline"))["data"])


def named(target: RunningWeir | InTurns, **options: Any) -> Talk:
    return Talk(target.client(default_headers={"x-weir-conversation": NAME}), **options)


def roots(exporter: InMemorySpanExporter) -> list[dict[str, Any]]:
    """The attributes of each exchange, in order."""
    spans = [span for span in exporter.get_finished_spans() if span.parent is None]
    return [dict(span.attributes or {}) for span in sorted(spans, key=lambda span: span.start_time or 0)]


@pytest.mark.requirement("A4.14", "A0.2", "A0.148")
async def test_hits_and_costs_of_fifty_steps_equal_a_recomputation(upstream: RunningSimulator, tmp_path: Path) -> None:
    exporter = InMemorySpanExporter()
    telemetry = Telemetry.create(OtelSettings(), span_exporter=exporter)
    yaml = policy(upstream.base_url)
    async with weir(
        upstream.base_url, tmp_path / "w.db", yaml=yaml, folder=tmp_path, window=None, telemetry=telemetry
    ) as target:
        await named(target).agent(50)
        rows = await timeline(target)
        page = target.runtime.telemetry.metrics.render()[0].decode()
    seen, spans = answered(upstream), roots(exporter)
    assert len(rows) == len(seen) == len(spans) == 50
    price, cached_price, answer_price, last = 2e-6, 0.2e-6, 8e-6, 0.0
    for row, one, span in zip(rows, seen, spans, strict=True):
        prompt, hits = one.prompt_tokens, one.cached_tokens
        assert row["hit_ratio"] == pytest.approx(hits / prompt, abs=1e-4)
        assert span["weir.cache.hit_ratio"] == row["hit_ratio"]
        answer = one.completion_tokens * answer_price
        cost = (prompt - hits) * price + hits * cached_price + answer
        share = max(last, hits / prompt) if row["prefix_changed"] == "proxy" else hits / prompt
        whole = prompt + row["tokens_before"] - row["tokens_after"]
        unmanaged = whole * ((1 - share) * price + share * cached_price) + answer
        assert row["cost"] == pytest.approx(cost, abs=1e-8)
        assert row["cost_saved"] == pytest.approx(unmanaged - cost, abs=1e-8)
        last = hits / prompt
    assert sum(row["cost_saved"] for row in rows) > 0
    assert min(row["cost_saved"] for row in rows) < 0, "a batch pays for what it makes the cache forget"
    counted = {line.rpartition(" ")[0]: line for line in page.splitlines() if line.startswith("weir_cost_total")}
    kinds = {kind: float(line.rpartition(" ")[2]) for line in counted.values() for kind in [line.split('"')[1]]}
    assert kinds["forwarded"] == pytest.approx(sum(row["cost"] for row in rows), rel=1e-4)
    assert kinds["unmanaged"] == pytest.approx(sum(row["cost"] + row["cost_saved"] for row in rows), rel=1e-4)


@SHARED
@pytest.mark.requirement("A4.15", "D25", "P2")
async def test_the_prefix_is_changed_by_the_proxy_in_a_batch_and_in_no_other_request(
    upstream: RunningSimulator, deployment: Deployment
) -> None:
    exporter = InMemorySpanExporter()
    telemetry = Telemetry.create(OtelSettings(), span_exporter=exporter)
    async with deployment.serving(upstream.base_url, telemetry=telemetry) as target:
        await named(target).agent(30)
        await target.settled()
        rows = await timeline(target.weirs[0])
    arrays = [seen.json()["messages"] for seen in answered(upstream)]
    expected = ["none", *("none" if new[: len(old)] == old else "proxy" for old, new in pairwise(arrays))]
    assert [row["prefix_changed"] for row in rows] == expected
    assert expected.count("proxy") >= 2
    assert [span["weir.prefix_changed"] for span in roots(exporter)] == expected


@pytest.mark.requirement("A4.15")
async def test_a_client_that_changes_system_tools_or_history_is_named_as_the_cause(
    upstream: RunningSimulator, tmp_path: Path
) -> None:
    async with weir(upstream.base_url, tmp_path / "w.db", window=100_000) as target:
        talk = named(target)
        await talk.agent(3)
        talk.messages[0] = {"role": "system", "content": "You are somebody else now. It is Tuesday."}
        await talk.agent(2)
        more = [*TOOLS, {"type": "function", "function": {"name": "write_file", "parameters": {"type": "object"}}}]
        for tools in (more, more, TOOLS):
            await talk.ask(tools=tools)
            talk.add_step()
        talk.messages[-1] = talk.messages[-1] | {"content": "another result"}
        await talk.agent(1)
        talk.messages[7] = talk.messages[7] | {"content": "an old result, rewritten"}
        await talk.agent(2)
        found = await get(target, "")
        rows = await timeline(target)
    cause = [row["prefix_changed"] for row in rows]
    assert cause[:5] == ["none", "none", "none", "client", "none"]
    assert cause[5:8] == ["client", "none", "client"]
    assert cause[8] == "none", "the last result was new in both spellings"
    assert cause[9:] == ["client", "none"]
    assert found["name"] == NAME


@contextmanager
def held(file: Path) -> Iterator[None]:
    """Somebody else writes to the database: whoever wants to, waits."""
    connection = sqlite3.connect(file, isolation_level=None)
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
    finally:
        connection.rollback()
        connection.close()


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)


@pytest.mark.requirement("A0.101", "P8")
async def test_a_cut_that_is_planned_while_a_state_is_saved_has_a_version_of_its_own(
    upstream: RunningSimulator, tmp_path: Path
) -> None:
    file = tmp_path / "w.db"
    own = "{checkpoints: {save_at: 0.3}, cascade: [{layer: window, at: 0.60, stop_at: 0.40}]}"
    yaml = policy(upstream.base_url, own)
    async with weir(upstream.base_url, file, yaml=yaml, folder=tmp_path, window=None) as target:
        talk = named(target)
        talk.grow(5)
        with held(file):
            await talk.chat(1)
            [thread] = target.runtime.planner.conversations._threads.values()
            await until(thread.lock.locked)  # the state after that answer waits for the database
            talk.grow(12)
            asked = asyncio.create_task(talk.chat(1))
            await until(lambda: thread.lock._waiters)  # and the cut for the state
        await asked
        await target.runtime.preparation.settled()
        store = target.runtime.store
        assert store is not None
        row = await store.conversation(None, NAME)
        assert row is not None
        saved = await store.checkpoints(row)
        [removed] = {each.version for each in await store.removed(row, limit=100)}
    assert saved[0].reason == "safety"
    assert talk.actions()[-1] == "sliding_window=1"
    assert [cut.version for view in thread.views.values() for cut in view.ledger.cuts] == [removed]
    assert removed not in [each.version for each in saved]
