"""``weir replay``: the command as people and programs use it, and whether it tells what a real Weir would do."""

import json
import os
import re
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from proxy.cli import main
from proxy.cli.evaluate import Models
from proxy.config.values import Config
from proxy.features.replay.scenarios import Conditions, Managed, store_in_memory
from proxy.features.replay.script import Script, recording_of
from tests.functional.harness import COUNTER, TOOLS, answered, apart, arrays_of, opening, prose, tool_step, weir
from tests.upstream.app import serve_simulator
from tests.upstream.model import SimulatorSettings

pytestmark = pytest.mark.slow

STEPS = 30
MARKER = "invoice-88231-zulu"


def session(steps: int = STEPS, *, seed: int = 0) -> list[dict[str, Any]]:
    messages = opening(seed=seed + 1)
    for number in range(steps - 1):
        messages += tool_step(number, text=f"{MARKER if not number else ''} {prose(280, seed=seed + number)}")
    return [*messages, {"role": "assistant", "content": "Done."}]


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with two conversations, in an environment without anything of Weir's."""
    for name in list(os.environ):
        if name.startswith(("WEIR_", "OPENAI_", "OTEL_")):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    facts = [{"value": MARKER, "needed_at": [2 * STEPS]}]
    lines = [
        {"messages": session(), "tools": TOOLS, "meta": {"id": "first", "facts": facts}},
        {"messages": session(6, seed=50)},
    ]
    path = tmp_path / "runs.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines), encoding="utf-8")
    return path


def replay(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["replay", *map(str, arguments)])


@pytest.mark.requirement("P14", "A0.95")
@pytest.mark.parametrize("summarizer", [None, "summariser"], ids=["extracted", "prepared by a model"])
async def test_what_is_replayed_is_what_a_real_weir_forwards(summarizer: str | None) -> None:
    messages, settings = session(STEPS), SimulatorSettings(window=8_192, summary_model="summariser")
    script = Script(recording_of(messages, name="one"), counter=COUNTER, model="sim")

    async with (
        serve_simulator(settings, counter=COUNTER) as simulator,
        weir(simulator.base_url, window=8_192, summarizer=summarizer) as target,
        target.client() as client,
        aclosing(asking(target.runtime.config)) as models,
        store_in_memory() as store,
    ):
        for request in script.requests:
            await client.chat.completions.create(model="sim", messages=messages[: request.length], max_tokens=256)
            await target.runtime.preparation.settled()
        served, asked = arrays_of(answered(simulator)), len(answered(simulator, "summariser"))
        conditions = Conditions(counter=COUNTER, model="sim", window=8_192, max_tokens=256)
        policy = target.runtime.config.policy("balanced")
        replayed = await arrays_in(Managed(policy, conditions, store, ask=models), script)

    assert len(served) == STEPS
    assert served[-1] != messages[: script.requests[-1].length]
    assert unaddressed(served) == unaddressed(replayed)
    assert models.spent.calls == asked
    assert (asked > 0) == (summarizer is not None)


def asking(config: Config) -> Models:
    return Models(config=config, default="summariser")


async def arrays_in(scenario: Managed, script: Script) -> list[list[dict[str, Any]]]:
    arrays = []
    for request in script.requests:
        pieces = (await scenario.forward(script, request.length)).pieces
        assert pieces is not None
        arrays.append(apart([json.loads(bytes(raw)) for raw in script.rendered(pieces)]))
    return arrays


def unaddressed(arrays: list[list[dict[str, Any]]]) -> str:
    """Arrays without the names of fences."""
    return re.sub(r"weir-\d{6}", "weir", json.dumps(arrays))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("missing.jsonl",), "missing.jsonl: No such file"),
        (("bad.jsonl",), "bad.jsonl, line 2: "),
        (("empty.jsonl",), "no conversations"),
        (("runs.jsonl", "--policy", "balancd"), "did you mean balanced"),
        (("runs.jsonl", "--prices", "gold"), "four dollar prices"),
        (("runs.jsonl", "--window", "1"), "--window"),
        ((), "FILE"),
    ],
)
def test_wrong_usage_is_one_line_on_stderr_and_exit_2(
    recorded: Path, arguments: tuple[str, ...], says: str, tmp_path: Path
) -> None:
    (tmp_path / "bad.jsonl").write_text('{"messages": [{"role": "user", "content": "hi"}]}\n{"messages"', "utf-8")
    (tmp_path / "empty.jsonl").write_text("", encoding="utf-8")

    result = replay(*arguments)

    assert result.exit_code == 2
    assert says in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""
