"""What one process takes, how late its loop is, what waits, and examples: read as OpenMetrics by the official parser."""

import asyncio
import time

import httpx
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families as plain

from tests.functional.harness import RunningWeir, opening
from tests.functional.test_traces import TRACE, ask, scene
from tests.upstream import SimulatorSettings

BOTH = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.3,*/*;q=0.1"
LATE = 0.3


async def scrape(target: RunningWeir, accept: str = "") -> httpx.Response:
    async with httpx.AsyncClient(trust_env=False) as client:
        return await client.get(
            target.base_url.removesuffix("/v1") + "/metrics", headers={"accept": accept} if accept else {}
        )


def values(text: str) -> dict[str, float]:
    """Samples by name, with the kind behind it where they have one."""
    return {
        " ".join((s.name, *(v for n, v in s.labels.items() if n == "weir_kind"))): s.value
        for family in plain(text)
        for s in family.samples
    }


@pytest.mark.requirement("P15", "A0.139")
async def test_who_accepts_openmetrics_gets_the_trace_of_an_example_in_each_bucket() -> None:
    async with scene() as started:
        await ask(started, opening())
        await started.weir.stored()  # or the first write of the store is measured between the two
        async with asyncio.timeout(20):  # or the event loop is for the first time
            while "weir_loop_lag" not in (await scrape(started.weir)).text:
                await asyncio.sleep(0.02)
        answer = await scrape(started.weir, BOTH)
        other = await scrape(started.weir)
    families = {family.name: family for family in openmetrics(answer.text)}
    assert answer.headers["content-type"] == "application/openmetrics-text; version=1.0.0; charset=utf-8"
    for name in ("weir_overhead_seconds", "http_server_request_duration_seconds"):
        examples = [s.exemplar for s in families[name].samples if s.exemplar]
        assert [example.labels for example in examples] == [{"trace_id": TRACE}]
    assert families["weir_requests"].type == "counter"
    assert {f.name for f in plain(other.text)} == set(families)
    assert "trace_id" not in other.text
    assert other.headers["content-type"].startswith("text/plain; version=0.0.4")


@pytest.mark.requirement("P15")
async def test_the_process_and_its_event_loop_are_measured() -> None:
    async with scene() as started:
        await asyncio.sleep(0)
        time.sleep(LATE + 0.6)
        for _ in range(100):
            await asyncio.sleep(0.02)
            found = values((await scrape(started.weir)).text)
            if found.get("weir_loop_lag_seconds_sum", 0) >= LATE:
                break
    assert found["weir_loop_lag_seconds_sum"] >= LATE
    assert found["process_resident_memory_bytes"] > 10_000_000
    assert found["process_virtual_memory_bytes"] >= found["process_resident_memory_bytes"]
    assert 0 < found["process_open_fds"] < found["process_max_fds"]
    assert found["process_cpu_seconds_total"] > 0
    assert time.time() - 86_400 < found["process_start_time_seconds"] <= time.time()


@pytest.mark.requirement("P15")
async def test_what_waits_and_what_is_held_is_told_while_it_is() -> None:
    async with scene(simulated=SimulatorSettings(latency=30.0)) as started:
        asking = asyncio.create_task(ask(started, opening()))
        for _ in range(250):
            await asyncio.sleep(0.02)
            busy = values((await scrape(started.weir)).text)
            if busy["weir_connections upstream_busy"]:
                break
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        for _ in range(250):
            await asyncio.sleep(0.02)
            idle = values((await scrape(started.weir)).text)
            if not idle["weir_bodies_held_bytes"]:
                break
    assert busy["weir_bodies_held_bytes"] > 500
    assert busy["weir_connections upstream_busy"] == 1
    assert idle["weir_bodies_held_bytes"] == idle["weir_connections upstream_busy"] == 0
    assert {"bodies", "threads", "tokens", "store", "preparations", "plans"} == {
        name.split()[1] for name in idle if name.startswith("weir_queue ")
    }
