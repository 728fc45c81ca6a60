"""``weir evaluate``: scores of recorded conversations, a gate for CI, and what the models took."""

import asyncio
import json
import os
import re
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from proxy.cli import main
from tests.functional.harness import COUNTER
from tests.policies.judging import fenced
from tests.upstream import Request, SimulatorSettings
from tests.upstream.app import serve_simulator

pytestmark = pytest.mark.slow

DEMO = str(files("proxy.cli").joinpath("data", "recorded_run.jsonl"))
ONE_BATCH = ("--window", 8192, "--max-tokens", 512)


@pytest.fixture(autouse=True)
def clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment and a folder without anything of Weir's."""
    for name in list(os.environ):
        if name.startswith(("WEIR_", "OPENAI_", "OTEL_")):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["evaluate", *map(str, arguments)])


async def run_beside(*arguments: object) -> Result:
    """The command while this loop serves what it asks."""
    return await asyncio.to_thread(run, *arguments)


def prompt_of(request: Request) -> str:
    return str(request["messages"][-1]["content"])


def panel(wrong: int) -> tuple[Callable[[Request], str], list[Request]]:
    """Answers every question, and judges all but ``wrong`` of the questions of one compaction consistent."""
    seen: list[Request] = []
    bad: dict[str, bool] = {}

    def answer(request: Request) -> str:
        seen.append(request)
        parts = fenced(prompt_of(request))
        if "question" in parts:
            question = parts["question"]
            bad.setdefault(question, len(bad) < wrong)
            return "not yes" if bad[question] else "Yes."
        side = "short" if "[notes on earlier messages]" in parts.get("transcript", "") else "long"
        many = len(re.findall(r"^\d+: ", parts["questions"], re.MULTILINE))
        return "\n".join(f"{n}: {side} answer number {n}" for n in range(1, many + 1))

    return answer, seen


@pytest.fixture
def generated(tmp_path: Path) -> Path:
    """One conversation with one batch, about which twenty questions can be asked."""
    return conversation(tmp_path, 20)


def conversation(folder: Path, turns: int) -> Path:
    facts, messages = [], [{"role": "system", "content": "Help."}, {"role": "user", "content": "Keep a list of parts."}]
    for n in range(turns):
        messages.append({"role": "user", "content": f"Part number {n} has the label quux{n}zed in our store."})
        messages.append(
            {"role": "assistant", "content": "I see. " + f"That is entry {n} of the list, thank you. " * 18}
        )
        facts.append({"value": f"quux{n}zed"})
    path = folder / "runs.jsonl"
    path.write_text(json.dumps({"messages": messages, "meta": {"id": "parts", "facts": facts}}), encoding="utf-8")
    return path


@pytest.mark.requirement("A0.125", "A0.71", "A0.56")
@pytest.mark.parametrize(("wrong", "score", "code"), [(4, 0.80, 1), (3, 0.85, 0)])
async def test_a_job_fails_below_the_gate_of_085(generated: Path, wrong: int, score: float, code: int) -> None:
    answer, seen = panel(wrong)
    async with serve_simulator(SimulatorSettings(window=32_768, answer=answer), counter=COUNTER) as simulator:
        options = ("--window", 5_000, "--max-tokens", 256, "--count", 20, "--gate", 0.85)
        models = ("--model", "sim", "--upstream", simulator.base_url, "--model-window", 32_768)
        result = await run_beside(generated, *options, *models, "--json")

    report = json.loads(result.stdout)
    (one,) = report["compactions"]
    assert report["total"]["score"] == one["score"] == pytest.approx(score)
    assert (result.exit_code, report["passed"]) == (code, code == 0)
    assert ("below the gate" in result.stderr) == bool(code)
    assert len(one["answers"]) == 20
    assert {"key_facts", "state", "decisions", "compression_ratio"} <= set(one)
    assert report["spent"]["calls"] == len(seen) == 28
    assert report["spent"]["asked"] > 0


@pytest.mark.requirement("A0.71", "A0.56")
async def test_the_shipped_recording_is_judged_and_shown_with_three_columns() -> None:
    answer, _ = panel(1)
    async with serve_simulator(SimulatorSettings(window=16_384, answer=answer), counter=COUNTER) as simulator:
        models = ("--model", "sim", "--judge", "sim-judge", "--upstream", simulator.base_url, "--model-window", 16_384)
        result = await run_beside(DEMO, *ONE_BATCH, *models, "--count", 8)
        asked = {each.model for each in simulator.answered()}

    assert result.exit_code == 0, result.stderr
    head, *rows = result.stdout.splitlines()
    assert all(name in head for name in ("ratio", "fidelity", "key facts", "state", "decisions"))
    whole = next(row for row in rows if row.startswith("all "))
    assert re.search(r"\d\.\d\dx", whole)
    assert re.search(r" [1-9]\d*/[1-9]\d*/0$", whole.rstrip())
    assert asked == {"sim", "sim-judge"}
    assert re.search(r"The models took \d+ calls", result.stdout)


@pytest.mark.requirement("A0.125")
@pytest.mark.parametrize(("task", "expected"), [("coding", 2), ("support", 1)])
async def test_own_questions_are_asked_by_the_task_of_a_conversation(
    tmp_path: Path, generated: Path, task: str, expected: int
) -> None:
    recorded = json.loads(generated.read_text(encoding="utf-8"))
    recorded["meta"]["task"] = task
    generated.write_text(json.dumps(recorded), encoding="utf-8")
    suite = tmp_path / "suite.yaml"
    suite.write_text(
        "coding:\n  - What was the decision about error handling?\n"
        "  - {ask: What step is in progress?, dimension: state, expected: [quux3zed]}\n"
        "default: [What does the user want?]\n"
    )
    answer, _ = panel(0)
    async with serve_simulator(SimulatorSettings(window=32_768, answer=answer), counter=COUNTER) as simulator:
        models = ("--model", "sim", "--upstream", simulator.base_url, "--model-window", 32_768)
        result = await run_beside(generated, "--window", 5_000, *models, "--questions", suite, "--json")

    (one,) = json.loads(result.stdout)["compactions"]
    asked = [each["question"]["text"] for each in one["answers"]]
    assert len(asked) == expected
    assert ("What step is in progress?" in asked) == (task == "coding")
    assert (one["state"] is not None) == (task == "coding")
