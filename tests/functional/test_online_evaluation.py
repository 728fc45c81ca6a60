"""A sample of summaries is measured after the answer, at the summariser's expense and at no request's time."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from policies.quality.fidelity import ANSWER, JUDGE
from proxy.planning.preparation import is_sampled
from proxy.store.chain import AuditType
from proxy.telemetry.names import EVALUATE_SPAN, FIDELITY_FIELDS
from proxy.telemetry.setup import OtelSettings, Telemetry
from tests.functional.harness import COUNTER, RunningWeir, Talk, answered, weir
from tests.policies.judging import fenced
from tests.upstream import Request, SimulatorSettings
from tests.upstream.app import RunningSimulator, serve_simulator

YAML = """
upstreams: {sim: {base_url: URL, api_key: pass}, other: {base_url: OTHER, api_key: pass}}
models: [{match: 'judge*', upstream: other, window: 16384}, {match: '*', upstream: sim, window: 4096}]
policies: {mine: {evaluate: EVALUATE, health: HEALTH, summaries: {seconds: 60}}}
default_policy: mine
"""
ALL = "{sample: 1.0, questions: 4, model: judge-a, judge: judge-b}"


def answer(request: Request) -> str:
    """Answers alike in any context, and judges by the question: what blocks is lost."""
    parts = fenced(str(request["messages"][-1]["content"]))
    if "question" in parts:
        return "no" if "blocks" in parts["question"] else "yes"
    if "questions" not in parts:
        return "All right."
    side = len(parts["transcript"])
    return "\n".join(f"{n}: answer {n} of {side}" for n in re.findall(r"^(\d+): ", parts["questions"], re.MULTILINE))


@asynccontextmanager
async def running(
    folder: Path,
    *,
    evaluate: str = ALL,
    health: str = "{}",
    other: str | None = None,
    exporter: InMemorySpanExporter | None = None,
) -> AsyncIterator[tuple[RunningSimulator, RunningWeir]]:
    settings = SimulatorSettings(window=4_096, windows={"judge-a": 16_384, "judge-b": 16_384}, answer=answer)
    telemetry = Telemetry.create(OtelSettings(), span_exporter=exporter) if exporter is not None else None
    async with serve_simulator(settings, counter=COUNTER) as simulator:
        text = YAML.replace("URL", simulator.base_url).replace("OTHER", other or simulator.base_url)
        text = text.replace("EVALUATE", evaluate).replace("HEALTH", health)
        options: dict[str, Any] = {"yaml": text, "folder": folder, "window": None, "telemetry": telemetry}
        async with weir(simulator.base_url, folder / "w.db", **options) as target:
            yield simulator, target


async def until_compacted(target: RunningWeir) -> Talk:
    """A conversation that has just been answered behind a new summary."""
    talk = Talk(target.client())
    for _ in range(20):
        talk.add_question()
        await talk.ask(max_tokens=256)
        if "compact" in talk.actions()[-1]:
            return talk
        talk.add_answer()
    raise AssertionError("nothing was compacted")


async def timeline(target: RunningWeir, talk: Talk) -> list[dict[str, Any]]:
    await target.stored()
    name = talk.headers[-1]["x-weir-conversation"]
    async with httpx.AsyncClient(headers={"authorization": "Bearer sk-test"}) as client:
        answer = await client.get(f"{target.root}/weir/conversations/{name}/timeline")
    rows: list[dict[str, Any]] = answer.json()["data"]
    return rows


@pytest.mark.requirement("A0.125", "A0.122", "A0.71", "A0.56")
async def test_a_sampled_summary_is_judged_and_the_score_is_in_row_gauge_and_span(tmp_path: Path) -> None:
    exporter = InMemorySpanExporter()
    async with running(tmp_path, exporter=exporter) as (simulator, target):
        talk = await until_compacted(target)
        await target.runtime.evaluation.settled()
        rows = await timeline(target, talk)
        async with httpx.AsyncClient() as client:
            metrics = (await client.get(f"{target.root}/metrics")).text
        asked = [len(answered(simulator, model)) for model in ("judge-a", "judge-b")]
        target.runtime.telemetry.flush()

        assert target.runtime.store is not None
        audited = await target.runtime.store.audit(None, kind=AuditType.EVALUATION)

    found = rows[-1]["fidelity"]
    (row,) = audited
    assert (row.request, row.told) == (rows[-1]["id"], found)
    assert found["prompts"] == {prompt.purpose: prompt.digest for prompt in (ANSWER, JUDGE)}
    assert found["score"] == 0.75
    assert (found["key_facts"], found["state"], found["decisions"]) == (None, pytest.approx(2 / 3), 1.0)
    assert found["compression_ratio"] > 1
    assert found["tokens_asked"] > 0
    assert asked == [2, 4]
    assert all(row["fidelity"] is None for row in rows[:-1])
    assert 'weir_fidelity{weir_policy="mine",weir_kind="score"} 0.75' in metrics
    (span,) = [each for each in exporter.get_finished_spans() if each.name == EVALUATE_SPAN]
    assert span.attributes is not None
    assert span.attributes[FIDELITY_FIELDS["score"]] == 0.75
    assert span.attributes[FIDELITY_FIELDS["compression_ratio"]] == pytest.approx(found["compression_ratio"], abs=0.01)
    assert span.parent is not None


@pytest.mark.requirement("A0.122", "A0.124", "A0.127")
async def test_a_fidelity_too_low_is_an_alert_on_the_next_request_also_after_a_restart(tmp_path: Path) -> None:
    """.75 is what is asked at least, so that the score of the judge here is too low where .76 is asked."""
    async with running(tmp_path, health="{fidelity: 0.76}") as (_, target):
        talk = await until_compacted(target)
        await target.runtime.evaluation.settled()
        before = await health_of(target, talk)
    assert before["snapshot"]["fidelity_score"] is None
    assert "fidelity" not in {alert["kind"] for alert in before["alerts"]}
    async with running(tmp_path, health="{fidelity: 0.76}", evaluate="{model: judge-a}") as (_, target):
        talk.client = target.client()
        found = []
        for _ in range(2):
            talk.add_answer()
            talk.add_question()
            await talk.ask(max_tokens=256)
            found.append(await health_of(target, talk))
    assert [each["snapshot"]["fidelity_score"] for each in found] == [0.75, 0.75]
    for each in found:
        (alert,) = [alert for alert in each["alerts"] if alert["kind"] == "fidelity"]
        assert (alert["value"], alert["threshold"], alert["closed"]) == (0.75, 0.76, None)


async def health_of(target: RunningWeir, talk: Talk) -> dict[str, Any]:
    await target.stored()
    name = talk.headers[-1]["x-weir-conversation"]
    async with httpx.AsyncClient(headers={"authorization": "Bearer sk-test"}) as client:
        found: dict[str, Any] = (await client.get(f"{target.root}/weir/conversations/{name}/health")).json()
    return found


@pytest.mark.requirement("A0.122")
async def test_it_is_off_by_default_and_null(tmp_path: Path) -> None:
    async with running(tmp_path, evaluate="{model: judge-a}") as (simulator, target):
        talk = await until_compacted(target)
        await target.runtime.evaluation.settled()
        rows = await timeline(target, talk)
        async with httpx.AsyncClient() as client:
            metrics = (await client.get(f"{target.root}/metrics")).text
        assert answered(simulator, "judge-a") == []
    assert [row["fidelity"] for row in rows] == [None] * len(rows)
    assert "weir_fidelity{" not in metrics


async def test_without_a_summarizer_and_a_model_nobody_is_asked(tmp_path: Path) -> None:
    async with running(tmp_path, evaluate="{sample: 1.0}") as (simulator, target):
        talk = await until_compacted(target)
        await target.runtime.evaluation.settled()
        assert {each.model for each in simulator.answered()} == {"sim"}
        assert (await timeline(target, talk))[-1]["fidelity"] is None


async def test_a_judge_that_never_answers_delays_no_request_and_no_shutdown(tmp_path: Path) -> None:
    reached = asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        reached.set()
        await reader.read()
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        async with asyncio.timeout(20), running(tmp_path, other=f"http://127.0.0.1:{port}/v1") as (_, target):
            talk = await until_compacted(target)
            await reached.wait()
            for _ in range(3):
                talk.add_answer()
                talk.add_question()
                await talk.ask(max_tokens=256)
            assert (await timeline(target, talk))[-1]["fidelity"] is None


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 1.0])
def test_the_sample_is_the_same_for_the_same_ids_and_as_large_as_it_should_be(share: float) -> None:
    ids = [f"req_{n:08x}" for n in range(4_000)]
    chosen = [one for one in ids if is_sampled(one, share)]

    assert chosen == [one for one in ids if is_sampled(one, share)]
    assert abs(len(chosen) / len(ids) - share) < 0.03
    assert json.dumps(chosen) == json.dumps(sorted(chosen))
