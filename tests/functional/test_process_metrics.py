"""What one process takes, how late its loop is, what waits, and examples: read as OpenMetrics by the official parser."""

import asyncio

import httpx
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families as plain

from tests.functional.harness import RunningWeir, opening
from tests.functional.test_traces import TRACE, ask, scene

BOTH = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.3,*/*;q=0.1"


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
