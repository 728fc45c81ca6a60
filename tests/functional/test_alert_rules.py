"""The alert rules of deploy/rules.yml in a real Prometheus: each fires when what it is about happens, none before.

``promtool`` evaluates the rules as they are printed over pages that a Weir gave before and after an event, in its own
time; a Prometheus scrapes a Weir with the same rules and shorter times.
"""

import asyncio
import json
import os
import shutil
import subprocess
from pathlib import Path

import openai
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.functional.harness import ROOT, RunningWeir, opening
from tests.functional.test_traces import NAMED, TOO_LONG, ask, scene

pytestmark = pytest.mark.slow

RULES = (ROOT / "deploy/rules.yml").read_text()
NAMES = [rule["alert"] for rule in yaml.safe_load(RULES)["groups"][0]["rules"]]
QUIET, LASTING = 30, 60
"""Minutes before the event, and after it."""


def tool(name: str) -> str:
    """A program of the distribution's package prometheus."""
    found = shutil.which(name)
    if found is None:
        assert not os.environ.get("CI"), f"{name} is missing: apt-get install prometheus"
        pytest.skip(f"{name} is missing: apt-get install prometheus")
    return found


def samples(page: str) -> dict[str, float]:
    """The page's values by name and labels, as PromQL writes them."""
    return {
        s.name + "{" + ",".join(f"{n}={json.dumps(v)}" for n, v in sorted(s.labels.items())) + "}": s.value
        for family in text_string_to_metric_families(page)
        for s in family.samples
    }


def happen(name: str, target: RunningWeir) -> None:
    """What a rule is about, as the product counts it, where a request cannot bring it about at will."""
    runtime = target.runtime
    metrics = runtime.telemetry.metrics
    match name:
        case "WeirAnswersErrors":
            metrics.requests.labels("upstream_unreachable", "balanced").inc()
        case "WeirWindowsAreWrong":
            metrics.overflows.inc(11)
        case "WeirStoreFails":
            metrics.degraded.labels("store").inc()
        case "WeirIsSlow":
            metrics.overhead.labels("").observe(0.08)
        case "WeirWatchingIsSlow":
            metrics.settlement.observe(0.02)
        case "WeirConversationCritical":
            metrics.alerts.labels("critical", "overflow", "utilization").inc()
        case "WeirBudgetIsUsedUp":
            metrics.budget_used.watch(lambda: {("bot", "", "day", "tokens"): 1.0})
        case "WeirSummariserFails":
            metrics.summarizer_calls.labels("timeout").inc()


LASTS = {"WeirAnswersErrors", "WeirIsSlow", "WeirWatchingIsSlow", "WeirSummariserFails"}
"""Rules about a share or a quantile: the event goes on. The others fire on a single one."""


async def pages(name: str) -> list[dict[str, float]]:
    """What a Weir's page has after ordinary requests, and after each of two events that a rule is about."""
    found = []
    async with scene() as started:
        await ask(started, opening())
        for event in range(3):
            if event and name == "WeirRefusesRequests":
                with pytest.raises(openai.BadRequestError):
                    await ask(started, TOO_LONG, headers=NAMED | {"x-weir-policy": "advised"})
            elif event and name == "WeirTelemetryIsLost":
                started.receiver.status = 400
                await ask(started, opening())
                await started.spans()
            elif event:
                happen(name, started.weir)
            found.append(samples(started.weir.runtime.telemetry.metrics.render()[0].decode()))
    return found


def series(before: float | None, first: float, second: float, *, lasts: bool) -> str:
    """The values of a series minute by minute: as before, then the event, once or once a minute."""
    quiet = f"_x{QUIET + 1}" if before is None else f"{before}+0x{QUIET}"
    return f"{quiet} {first}{second - first if lasts else 0:+}x{LASTING}"


@pytest.mark.requirement("P15", "A0.139")
@pytest.mark.parametrize("name", NAMES)
async def test_each_rule_fires_on_its_first_event_and_on_nothing_before(name: str, tmp_path: Path) -> None:
    promtool = tool("promtool")
    before, first, second = await pages(name)
    values = [
        {"series": key, "values": series(before.get(key), value, second[key], lasts=name in LASTS)}
        for key, value in first.items()
    ]
    firing = 'count(ALERTS{alertstate="firing"%s})'
    test = {
        "interval": "1m",
        "input_series": values,
        "promql_expr_test": [
            {"expr": firing % "", "eval_time": f"{QUIET}m", "exp_samples": []},
            {
                "expr": "max_over_time(" + (firing % f',alertname="{name}"') + f"[{LASTING}m:1m])",
                "eval_time": f"{QUIET + LASTING}m",
                "exp_samples": [{"labels": "{}", "value": 1}],
            },
        ],
    }
    (tmp_path / "rules.yml").write_text(RULES)
    document = {"rule_files": ["rules.yml"], "evaluation_interval": "1m", "tests": [test]}
    (tmp_path / "test.yml").write_text(yaml.safe_dump(document))
    done = await asyncio.to_thread(
        subprocess.run,
        [promtool, "test", "rules", "test.yml"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr
