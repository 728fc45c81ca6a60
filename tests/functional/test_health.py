"""The health of a conversation through a whole Weir: alerts when they are due, once, and known after a restart."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from proxy.telemetry.setup import OtelSettings, Telemetry
from tests.functional.harness import ALONE, COUNTER, SHARED, TOOLS, Deployment, InTurns, Talk, prose, tool_step
from tests.proxy.test_alerts import webhook
from tests.upstream import SimulatorSettings
from tests.upstream.app import RunningSimulator, serve_simulator

ADMIN = "admin-0123456789"
NAME = "support-4711"
WINDOW = 8_192
YAML = """
upstreams: {{main: {{base_url: "{upstream}", api_key: pass}}}}
auth: {{admin_token: {admin}}}
default_policy: watched
policies:
  watched: {{preset: balanced, window: {window}, {policy}}}
telemetry: {{alerts: {{webhook: "{hook}", level: info}}}}
"""


@asynccontextmanager
async def watched(
    folder: Path,
    simulator: RunningSimulator,
    policy: str = "mode: observe",
    *,
    deployment: Deployment,
    window: int = WINDOW,
    hook: str = "http://127.0.0.1:9/",
    telemetry: Telemetry | None = None,
) -> AsyncIterator[InTurns]:
    yaml = YAML.format(upstream=simulator.base_url, admin=ADMIN, window=window, policy=policy, hook=hook)
    async with deployment.serving("", yaml=yaml, folder=folder, window=None, telemetry=telemetry) as target:
        yield target


def talk(target: InTurns, *, key: str = "sk-test", name: str = NAME, seed: int = 0) -> Talk:
    return Talk(target.client(key, default_headers={"x-weir-conversation": name}), seed=seed)


async def ask(target: InTurns, path: str, *, key: str = "sk-test", status: int = 200) -> Any:
    await target.settled()
    async with httpx.AsyncClient() as http:
        found = await http.get(f"{target.root()}/weir/{path}", headers={"authorization": f"Bearer {key}"})
    assert found.status_code == status, found.text
    return found.json()


def due(found: Any) -> list[tuple[str, bool]]:
    """The kinds of a conversation's alerts, oldest first, and whether they are open."""
    return [(alert["kind"], alert["closed"] is None) for alert in reversed(found["alerts"])]


FULL = "mode: observe, health: {utilization: 0.20, tool_bloat: 1}"


@SHARED
@pytest.mark.requirement("A0.118", "A0.124", "A0.127", "A0.128")
async def test_a_conversation_alerts_on_its_third_request_above_the_mark_once_and_over_a_restart(
    tmp_path: Path, deployment: Deployment
) -> None:
    async with serve_simulator(SimulatorSettings(window=100_000), counter=COUNTER) as simulator, webhook() as hook:
        chat = Talk(None)
        counts: list[int] = []
        levels: list[float] = []
        for _ in range(7):
            async with watched(tmp_path, simulator, FULL, deployment=deployment, hook=hook.url) as target:
                chat.client = target.client(default_headers={"x-weir-conversation": NAME})
                await chat.chat(1)
                found = await ask(target, f"conversations/{NAME}/health")
                levels.append(found["snapshot"]["utilization"])
                counts.append(len(found["alerts"]))
                assert found["status"] == ("critical" if found["alerts"] else "ok")
        third = next(n for n, level in enumerate(levels) if level > 0.20) + 2
        assert 2 < third < 6
        assert counts == [0] * third + [1] * (7 - third)
        assert due(found) == [("utilization", True)]
        assert (found["trend"]["trend"], found["trend"]["samples"]) == ("rising", 7)
        assert found["trend"]["utilization_delta"] == pytest.approx(levels[-1] - levels[0], abs=0.002)
        assert [each["utilization"] for each in found["history"]] == levels
        assert found["snapshot"]["fidelity_score"] is None
    assert [json.loads(body)["data"]["kind"] for _, _, body in hook.got] == ["utilization"]


@ALONE
@pytest.mark.requirement("A0.121", "A3.17")
async def test_a_model_that_asks_the_same_again_and_again_is_a_loop_at_the_third_call(
    tmp_path: Path, deployment: Deployment
) -> None:
    async with (
        serve_simulator(SimulatorSettings(window=100_000), counter=COUNTER) as simulator,
        watched(tmp_path, simulator, "mode: enforce", deployment=deployment, window=100_000) as target,
    ):
        chat = talk(target)
        seen = []
        for number in range(4):
            step = tool_step(7, words=20)
            step[0]["tool_calls"][0]["id"] = step[1]["tool_call_id"] = f"call_{number}"
            await chat.ask(tools=TOOLS)
            seen.append(due(await ask(target, f"conversations/{NAME}/health")))
            chat.messages += step
        await chat.ask(tools=TOOLS)
        seen.append(due(await ask(target, f"conversations/{NAME}/health")))
        assert seen == [[], [], [], [("loop", True)], [("loop", True)]]
        await chat.ask(chat.messages, tools=TOOLS)  # a retry
        chat.add_question()
        await chat.ask(tools=TOOLS)
        assert due(await ask(target, f"conversations/{NAME}/health")) == [("loop", False)]
        timeline = await ask(target, f"conversations/{NAME}/timeline")
        found = [row["detail"].get("tools") for row in timeline["data"]]
        assert found[0] is None
        assert [each["read_file"][0] for each in found[1:5]] == [1, 1, 1, 1]
        history = (await ask(target, f"conversations/{NAME}/health"))["history"]
        assert len(history) == len(timeline["data"]) - 1


@ALONE
@pytest.mark.requirement("P15", "A0.124", "A0.126")
async def test_an_alert_is_on_the_trace_and_in_the_metrics_and_a_dead_webhook_costs_nothing(
    tmp_path: Path, deployment: Deployment
) -> None:
    exporter = InMemorySpanExporter()
    telemetry = Telemetry.create(OtelSettings(), span_exporter=exporter)
    async with (
        serve_simulator(SimulatorSettings(window=100_000), counter=COUNTER) as simulator,
        watched(tmp_path, simulator, FULL, deployment=deployment, telemetry=telemetry) as target,
    ):
        chat = talk(target)
        for _ in range(8):
            await chat.chat(1)
            await target.settled()  # an alert is on the trace of each that does not know of another's yet
        async with asyncio.timeout(10):
            while 'weir_alerts_undelivered_total{weir_reason="failed"} 1' not in (
                metrics := telemetry.metrics.render()[0].decode()
            ):
                await asyncio.sleep(0.05)
        assert all(headers["x-weir-actions"] == "observe=1" for headers in chat.headers)
    opened = (
        'weir_alerts_total{weir_alert_class="overflow",weir_alert_kind="utilization",weir_alert_level="critical"} 1'
    )
    assert opened in metrics
    assert 'weir_alerts_undelivered_total{weir_reason="failed"} 1' in metrics
    assert 'weir_health{weir_health_metric="utilization"} 0.' in metrics
    assert 'weir_health_metric="fidelity' not in metrics
    await asyncio.to_thread(telemetry.shutdown)
    events = [e for span in exporter.get_finished_spans() for e in span.events if e.name == "weir.alert"]
    assert [dict(event.attributes or {}) for event in events] == [
        {
            "weir.alert.kind": "utilization",
            "weir.alert.level": "critical",
            "weir.alert.class": "overflow",
            "weir.alert.value": pytest.approx(0.3, abs=0.1),
            "weir.alert.threshold": 0.2,
        }
    ]


SIZES = (60, 520, 280, 30, 400, 120, 640, 90)
"""Words of tool results, one after the other: as uneven as an agent's are."""


async def small(folder: Path, deployment: Deployment, *, sizes: tuple[int, ...], fixed: int = 0) -> tuple[Any, Any]:
    """45 steps in a window of 8,192 tokens: the conversation's health, and its timeline."""
    async with (
        serve_simulator(SimulatorSettings(window=WINDOW), counter=COUNTER) as simulator,
        watched(folder, simulator, "mode: enforce", deployment=deployment) as target,
    ):
        chat = talk(target)
        chat.messages[0]["content"] += "x y " * fixed
        for step in range(45):
            await chat.agent(1)
            chat.messages[-1]["content"] = prose(sizes[step % len(sizes)], seed=step)
        health = await ask(target, f"conversations/{NAME}/health")
        return health, (await ask(target, f"conversations/{NAME}/timeline"))["data"]


@ALONE
@pytest.mark.requirement("A0.119", "A0.126", "A0.130", "A0.148")
@pytest.mark.parametrize("sizes", [SIZES, (280,)])
async def test_a_small_window_that_is_kept_well_has_one_episode_at_most(
    tmp_path: Path, deployment: Deployment, sizes: tuple[int, ...]
) -> None:
    found, timeline = await small(tmp_path, deployment, sizes=sizes)
    assert len(found["alerts"]) <= 1, [alert["said"] for alert in found["alerts"]]
    batches = [row for row in timeline if row["evicted"]]
    assert len(batches) >= 4
    assert {row["action"] for row in batches} == {"evict_and_compress"}
    assert {row["decision"]["recommendation"] for row in batches} == {"none"}
    assert "enlarge" not in {row["decision"]["recommendation"] for row in timeline}


@ALONE
@pytest.mark.requirement("A0.119", "A0.126", "A3.16")
async def test_a_window_that_its_prompt_fills_thrashes_once(tmp_path: Path, deployment: Deployment) -> None:
    found, _ = await small(tmp_path, deployment, sizes=(120,), fixed=3_000)
    assert [kind for kind, _ in due(found)].count("thrash") == 1
    assert dict(due(found))["thrash"], "it is open"
