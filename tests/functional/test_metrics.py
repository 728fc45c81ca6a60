"""The metrics as their readers get them: scraped over HTTP and read by the official parser."""

import re
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.functional.harness import WeirProcess, free_port

pytestmark = pytest.mark.slow


@pytest.mark.requirement("P15", "A0.139")
async def test_what_alert_rules_ask_for_an_increase_of_is_there_before_its_first_event(tmp_path: Path) -> None:
    """Prometheus takes a series that begins at 1 for one that has not grown."""
    rules = (Path(__file__).parents[2] / "deploy" / "rules.yml").read_text()
    asked = re.findall(r"increase\((\w+)(?:\{([^}]*)\})?\[", rules)
    assert len(asked) > 4
    store = f"sqlite+aiosqlite:///{tmp_path / 'w.db'}"
    async with (
        WeirProcess(["--upstream", "http://127.0.0.1:9/v1", "--store", store], free_port()) as target,
        httpx.AsyncClient(base_url=target.root) as client,
    ):
        answer = await client.get("/metrics")
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    families = list(text_string_to_metric_families(answer.text))
    assert all(family.documentation for family in families)
    samples = [sample for family in families for sample in family.samples]
    for name, given in asked:
        labels = dict(re.findall(r'(\w+)="([^"]*)"', given))
        found = [s for s in samples if s.name == name and labels.items() <= s.labels.items()]
        assert found, (name, labels)
        assert {s.value for s in found} == {0.0}
