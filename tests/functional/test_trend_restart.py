"""How a conversation grows is known to the next request, also after a restart."""

import asyncio
import json
import re
from itertools import pairwise
from pathlib import Path

import pytest
from click.testing import CliRunner
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from policies.ledger import Trend
from proxy.cli import main
from proxy.store.records import ExchangeRow
from proxy.telemetry.setup import OtelSettings, Telemetry
from tests.functional.harness import ALONE, COUNTER, Deployment, InTurns, Talk
from tests.upstream.app import serve_simulator
from tests.upstream.model import SimulatorSettings

WINDOW = 100_000


async def rows_of(target: InTurns, name: str) -> list[ExchangeRow]:
    """What was stored of a conversation."""
    await target.settled()
    row = await target.store.conversation(None, name)
    assert row is not None
    return await target.store.timeline(row)


async def trend_of(target: InTurns, branch: str) -> Trend:
    """The growth that is stored of a branch."""
    [row] = [r for r in await target.store.conversations(None) if r.branches]
    found = await target.store.branch(row.tenant, branch)
    assert found is not None
    assert found.trend is not None
    return found.trend


@pytest.mark.requirement("A0.25", "A0.22")
async def test_a_restart_between_two_requests_keeps_the_velocity(tmp_path: Path) -> None:
    async with serve_simulator(SimulatorSettings(window=WINDOW), counter=COUNTER) as simulator:
        rows: list[list[ExchangeRow]] = []
        trends: list[Trend] = []
        for stays in ((5,), (3, 2)):
            file, talk = tmp_path / f"{len(stays)}.db", Talk(None)
            for steps in stays:
                async with Deployment(file).serving(simulator.base_url, window=WINDOW) as target:
                    talk.client = target.client()
                    await talk.agent(steps)
                    found = await rows_of(target, talk.headers[-1]["x-weir-conversation"])
                    trends.append(await trend_of(target, found[-1].branch))
            rows.append(found)
    through, before, restarted = trends
    assert restarted.deltas[:2] == before.deltas
    assert restarted._replace(at=None, end="") == through._replace(at=None, end="")
    assert [r.velocity is None for r in rows[1]] == [True, False, False, False, False]
    speeds = [[r.velocity for r in each[1:]] for each in rows]
    assert speeds[1] == pytest.approx(speeds[0], rel=0.01)  # calibrated: only that goes on from another sample


@pytest.mark.requirement("A0.19", "A0.22")
async def test_the_first_request_of_a_conversation_has_no_velocity_and_the_second_has_one(
    deployment: Deployment,
) -> None:
    async with (
        serve_simulator(SimulatorSettings(window=WINDOW), counter=COUNTER) as simulator,
        deployment.serving(simulator.base_url, window=WINDOW) as target,
    ):
        for seed in (1, 2):
            talk = Talk(target.client(), seed=seed)
            talk.messages = [{"role": "user", "content": f"conversation {seed}"}]
            await talk.agent(2)
            rows = await rows_of(target, talk.headers[-1]["x-weir-conversation"])
            grown = rows[1].tokens_before - rows[0].tokens_before
            assert [r.velocity for r in rows] == [None, pytest.approx(grown, abs=1)]


@ALONE
@pytest.mark.requirement("A0.18", "A0.148", "P15")
async def test_a_change_of_zone_is_an_event_of_the_trace_a_count_and_part_of_the_row(deployment: Deployment) -> None:
    exporter = InMemorySpanExporter()
    telemetry = Telemetry.create(OtelSettings(), span_exporter=exporter)
    async with (
        serve_simulator(SimulatorSettings(window=8192), counter=COUNTER) as simulator,
        deployment.serving(simulator.base_url, telemetry=telemetry) as target,
    ):
        talk = Talk(target.client())
        await talk.agent(12)
        rows = await rows_of(target, talk.headers[-1]["x-weir-conversation"])
        metrics = telemetry.metrics.render()[0].decode()
    zones = [row.zone for row in rows]
    changed = [(old, new) for old, new in pairwise(zones) if old != new]
    stored = [
        (event["old"], event["new"])
        for row in rows
        for event in row.detail.get("events", ())  # type: ignore[attr-defined]
        if event["kind"] == "zone_change"
    ]
    roots = [span for span in exporter.get_finished_spans() if span.parent is None]
    told = [
        ((event.attributes or {})["weir.zone.old"], (event.attributes or {})["weir.zone.new"])
        for span in sorted(roots, key=lambda span: span.start_time or 0)
        for event in span.events
        if event.name == "weir.zone_change"
    ]
    assert len(changed) >= 2
    assert stored == changed == told
    assert f'weir_events_total{{weir_kind="zone_change"}} {len(changed)}' in metrics
    for row in rows:
        assert sum(row.detail["buckets"].values()) == row.tokens_after  # type: ignore[attr-defined]
        assert row.pressure_before is not None
        assert row.pressure_before >= row.pressure


def shown(*arguments: str, file: Path) -> str:
    given = ["conversations", "show", *arguments, "--store", f"sqlite+aiosqlite:///{file}"]
    result = CliRunner().invoke(main, given, env={"WEIR_CONFIG": ""})
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.requirement("A0.9", "A0.148")
async def test_show_prints_zone_pressure_growth_and_what_was_done(tmp_path: Path) -> None:
    file = tmp_path / "w.db"
    async with (
        serve_simulator(SimulatorSettings(window=8192), counter=COUNTER) as simulator,
        Deployment(file).serving(simulator.base_url) as target,
    ):
        talk = Talk(target.client(default_headers={"x-weir-conversation": "grown"}))
        await talk.agent(16)
        rows = await rows_of(target, "grown")
    page = await asyncio.to_thread(shown, "grown", file=file)
    table = (await asyncio.to_thread(shown, "grown", "--timeline", file=file)).splitlines()
    last, edited = rows[-1], next(n for n, row in enumerate(rows) if row.evicted)
    for name in ("pressure_before", "pressure", "velocity", "turns_until_red"):
        assert re.search(rf"^{name} +{getattr(last, name):,.2f} *$", page, re.MULTILINE), name
    assert re.search(rf"^zone +{last.zone} *$", page, re.MULTILINE)
    assert re.search(rf"^action +{last.action} *$", page, re.MULTILINE)
    for part in (f"{rows[edited].velocity:,.2f}", rows[edited].zone, rows[edited].action, rows[edited].actions):
        assert part in table[1 + edited]
    state = json.loads(await asyncio.to_thread(shown, "grown", "--json", file=file))
    assert (state["last"]["velocity"], state["last"]["action"]) == (last.velocity, last.action)
