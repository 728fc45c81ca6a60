"""What the provider's cache made of each request is told: hits, cold starts, who changed the prefix, what it cost."""

import asyncio
import json
import logging
import sqlite3
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from aiohttp import web
from click.testing import CliRunner
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from proxy.cli import main
from proxy.telemetry.setup import OtelSettings, Telemetry
from proxy.wire.counting import count_message
from tests.functional.harness import (
    COUNTER,
    EVICTING,
    NOTHING_RECALLED,
    SHARED,
    TOOLS,
    Deployment,
    InTurns,
    RunningWeir,
    Talk,
    answered,
    prose,
    weir,
)
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
READING = {
    *("current_tokens", "max_tokens", "utilization_pct", "zone"),
    *("velocity_tokens_per_turn", "velocity_class", "turns_until_red", "source"),
}


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


def set_clock(target: RunningWeir, clock: Callable[[], float]) -> None:
    target.runtime.planner = msgspec.structs.replace(target.runtime.planner, clock=clock)


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


def tools_of(count: int) -> list[dict[str, Any]]:
    about = [f"Does job {n}: {prose(30, seed=n)}." for n in range(count)]
    return [
        {"type": "function", "function": {"name": f"job_{n:02}", "description": text, "parameters": {"type": "object"}}}
        for n, text in enumerate(about)
    ]


@pytest.mark.requirement("A4.15", "D17")
async def test_tools_that_weir_leaves_out_are_its_own_doing(upstream: RunningSimulator, tmp_path: Path) -> None:
    own = "{enforce: bucket, buckets: {tools: {cap: 2000, on_overflow: prune-unused}}}"
    yaml = policy(upstream.base_url, own)
    async with weir(upstream.base_url, tmp_path / "w.db", yaml=yaml, folder=tmp_path, window=None) as target:
        talk = named(target)
        few, many = tools_of(10), tools_of(60)
        for tools in (few, few, many, many):
            await talk.ask(tools=tools)
        pruned = answered(upstream)[-1].json()["tools"]
        lost = next(tool for tool in many if tool not in pruned)
        choice = {"type": "function", "function": {"name": lost["function"]["name"]}}
        await talk.ask(tools=many, tool_choice=choice)
        rows = await timeline(target)
    assert [row["prefix_changed"] for row in rows] == ["none", "none", "proxy", "none", "client"]


@pytest.mark.requirement("A4.14")
async def test_a_rest_longer_than_the_cache_lives_makes_a_request_cold_even_after_a_restart(
    upstream: RunningSimulator, tmp_path: Path
) -> None:
    now, talk = [1_000_000.0], Talk(None)
    spans: list[dict[str, Any]] = []
    for rests in ((0.0, 300.0, 300.5), (301.0, 10.0)):
        exporter = InMemorySpanExporter()
        telemetry = Telemetry.create(OtelSettings(), span_exporter=exporter)
        async with weir(upstream.base_url, tmp_path / "w.db", window=100_000, telemetry=telemetry) as target:
            set_clock(target, lambda: now[0])
            talk.client = named(target).client
            for rest in rests:
                now[0] += rest
                await talk.agent(1)
            rows = await timeline(target)
        spans += roots(exporter)
    assert [row["cold"] for row in rows] == [False, False, True, True, False]
    assert [row["detail"].get("cold", False) for row in rows] == [row["cold"] for row in rows]
    assert [span["weir.cache.cold"] for span in spans] == [row["cold"] for row in rows]


@pytest.mark.requirement("A4.16")
async def test_cached_tokens_count_as_used(tmp_path: Path) -> None:
    said = []
    for cached in (0, 100_000):
        settings = SimulatorSettings(window=8192, cache_minimum=100_000 - cached)
        async with (
            serve_simulator(settings, counter=COUNTER) as simulator,
            weir(simulator.base_url, tmp_path / f"{cached}.db", balanced=EVICTING | NOTHING_RECALLED) as target,
        ):
            talk = named(target)
            await talk.agent(20)
            rows = await timeline(target)
            assert (max(seen.cached_tokens for seen in answered(simulator)) > 0) is bool(cached)
        said.append([[h["x-weir-tokens"], h["x-weir-pressure"], h["x-weir-actions"]] for h in talk.headers])
        for row in rows:
            assert row["tokens_after"] == pytest.approx(row["usage_prompt"], rel=0.02, abs=16)
            assert row["pressure"] == pytest.approx(row["tokens_after"] / row["detail"]["base"])
    assert said[0] == said[1]
    assert any("evict" in actions for _, _, actions in said[0])


class Reporting:
    """An upstream that reports what it is told to: ``factor`` times the tokens of the messages."""

    def __init__(self) -> None:
        self.factor = 1.0

    async def answer(self, request: web.Request) -> web.Response:
        messages = json.loads(await request.read())["messages"]
        exact = 3 + sum(count_message(m, COUNTER, model="sim") for m in messages)
        said = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "Well."}}
        usage = {"prompt_tokens": round(self.factor * exact), "completion_tokens": 2}
        body = {"id": "c", "object": "chat.completion", "created": 1, "model": "sim", "choices": [said]}
        hits = {"prompt_cache_hit_tokens": usage["prompt_tokens"] // 2}
        return web.json_response(body | {"usage": usage | hits})


@asynccontextmanager
async def reporting() -> AsyncIterator[tuple[str, Reporting]]:
    said, app = Reporting(), web.Application()
    app.router.add_post("/v1/chat/completions", said.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1", said
    finally:
        await runner.cleanup()


@pytest.mark.requirement("A0.16", "A4.14")
async def test_an_upstream_that_counts_otherwise_is_told_once_and_believed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    exporter = InMemorySpanExporter()
    telemetry = Telemetry.create(OtelSettings(), span_exporter=exporter)
    async with (
        reporting() as (url, said),
        weir(url, tmp_path / "w.db", window=100_000, telemetry=telemetry) as target,
    ):
        talk = named(target)
        with caplog.at_level(logging.WARNING, logger="weir.settlement"):
            for factor in (1.0, 1.10, 1.10, 1.40, 1.40, 1.40, 1.40, 1.40):
                said.factor = factor
                talk.add_question()
                talk.add_question()
                talk.add_question()
                await talk.ask()
                talk.add_answer()
        rows = await timeline(target)
        page = target.runtime.telemetry.metrics.render()[0].decode()
    events = [[e for e in row["detail"].get("events", ()) if e["kind"] == "estimate_drift"] for row in rows]
    assert [len(found) for found in events] == [0, 0, 0, 1, 0, 0, 0, 0]
    (drift,) = events[3]
    assert drift["reported"] == rows[3]["usage_prompt"]
    assert drift["ratio"] == pytest.approx(1.40 / 1.10, abs=0.01)
    assert drift["estimated"] == pytest.approx(drift["reported"] / drift["ratio"], rel=0.01)
    assert 'weir_events_total{weir_kind="estimate_drift"} 1' in page
    assert [r.getMessage() for r in caplog.records] == [
        f"sim counted {drift['reported']} tokens where {drift['estimated']} were predicted"
    ]
    told = [e for s in exporter.get_finished_spans() for e in s.events if e.name == "weir.estimate_drift"]
    assert [(e.attributes or {})["weir.tokens.reported"] for e in told] == [drift["reported"]]
    assert rows[-1]["tokens_after"] == pytest.approx(rows[-1]["usage_prompt"], rel=0.02), "and the next estimate shifts"
    assert rows[-1]["hit_ratio"] == pytest.approx(0.5, abs=0.01)
    assert rows[-1]["cost"] is None, "nobody knows a price of this model"


@pytest.mark.requirement("A0.17", "A0.92")
async def test_a_conversation_shows_its_last_reading_its_buckets_and_how_long_it_has(
    upstream: RunningSimulator, tmp_path: Path
) -> None:
    async with weir(upstream.base_url, tmp_path / "w.db") as target:
        talk = named(target)
        await talk.agent(5)
        shown, rows = await get(target, ""), await timeline(target)
        await target.client().chat.completions.create(
            model="sim", messages=[{"role": "user", "content": "hello"}], max_tokens=16
        )
    reading, last = shown["pressure"], rows[-1]
    assert set(reading) == READING
    level, zone, _ = talk.headers[-1]["x-weir-pressure"].split(";")
    assert reading["zone"] == zone
    assert reading["utilization_pct"] == pytest.approx(100 * float(level), abs=0.6)
    assert reading["current_tokens"] == last["tokens_after"]
    assert reading["max_tokens"] == int(talk.headers[-1]["x-weir-tokens"].rpartition("limit=")[2])
    assert reading["utilization_pct"] == round(100 * reading["current_tokens"] / reading["max_tokens"], 1)
    assert reading["velocity_tokens_per_turn"] == last["velocity"] > 0
    assert reading["source"] == "model_reported"
    assert shown["turns_until_red"] == reading["turns_until_red"] == last["turns_until_red"]
    assert sum(shown["buckets"].values()) == last["tokens_after"]
    assert shown["requests"] == 5
    assert rows[0]["detail"]["source"] == "client_estimated"


@pytest.mark.requirement("A0.148")
async def test_the_timeline_says_what_happened_and_nothing_of_what_is_kept_for_planning(
    upstream: RunningSimulator, tmp_path: Path
) -> None:
    async with weir(upstream.base_url, tmp_path / "w.db") as target:
        await named(target).agent(2)
        rows = await timeline(target)
    for row in rows:
        assert not {"trend"} & set(row)
        assert {"id", "tokens_before", "tokens_after", "zone", "actions", "chain_end", "detail"} <= set(row)
        assert {"hit_ratio", "cold", "prefix_changed", "cost", "cost_saved"} <= set(row)


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


def shown_by_cli(*arguments: str, file: Path) -> dict[str, Any]:
    given = ["conversations", "show", NAME, *arguments, "--json", "--store", f"sqlite+aiosqlite:///{file}"]
    result = CliRunner().invoke(main, given, env={"WEIR_CONFIG": ""})
    assert result.exit_code == 0, result.output
    return dict(json.loads(result.stdout))


@pytest.mark.requirement("A0.101")
async def test_the_newest_checkpoint_is_the_newest_with_a_body_whatever_was_dropped_since(
    upstream: RunningSimulator, tmp_path: Path
) -> None:
    file = tmp_path / "w.db"
    async with weir(upstream.base_url, file, balanced=EVICTING) as target:
        await (talk := named(target)).chat(24)
        first = await get(target, "/checkpoint")
    own = "{preset: balanced, cascade: [{layer: window, at: 0.60, stop_at: 0.40}]}"
    yaml = policy(upstream.base_url, own)
    async with weir(upstream.base_url, file, yaml=yaml, folder=tmp_path, window=None) as target:
        talk.client = named(target).client
        await talk.chat(12)
        store, name = target.runtime.store, talk.headers[-1]["x-weir-conversation"]
        assert store is not None
        row = await store.conversation(None, name)
        assert row is not None
        await target.runtime.preparation.settled()
        cuts = await store.checkpoints(row)
        branch = await store.branch(row.tenant, await store.newest_branch(row) or "")
        newest = await get(target, "/checkpoint")
    assert branch is not None
    [ledger] = branch.views.values()
    assert ledger.cuts[-1].origin == "sliding_window"
    assert ledger.cuts[-1].version not in [each.version for each in cuts]
    assert newest["version"] == max(each.version for each in cuts if each.body) > first["version"]
    assert newest["state"]
    assert first["summary"]
    by_cli = await asyncio.to_thread(shown_by_cli, "--checkpoint", file=file)
    assert (by_cli["version"], by_cli["state"]) == (newest["version"], newest["state"])
    listed = await asyncio.to_thread(shown_by_cli, file=file)
    assert listed["checkpoints"] == [each.version for each in cuts if each.body]
