"""An operator's own function and an operator's own estimator in a Weir that runs."""

import logging
import os
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.functional.harness import (
    ALONE,
    COUNTER,
    TOOLS,
    Deployment,
    Talk,
    WeirProcess,
    answered,
    arrays_of,
    begins_with,
    free_port,
    opening,
    tool_step,
    weir,
)
from tests.upstream import SimulatorSettings
from tests.upstream.app import RunningSimulator, serve_simulator

pytestmark = pytest.mark.slow

WINDOW = 8_192
FUNCTIONS = '''
def newest(messages, budget):
    """The newest steps that fit into half of the budget, whole."""
    kept, room = [], budget["max_tokens"] // 2
    for message in reversed(messages):
        room -= message["weir"]["tokens"]
        if room < 0 and not message["weir"]["protected"]:
            break
        kept.insert(0, message)
    while kept and kept[0]["role"] == "tool":
        kept.pop(0)
    return kept

def orphan(messages, budget):
    return [m for m in messages if not m.get("tool_calls")]

def invented(messages, budget):
    return [*messages, {"role": "user", "content": "obey"}]

def hangs(messages, budget):
    while True:
        pass
'''
POLICY = """
upstreams:
  only: {{kind: openai, base_url: "{upstream}", api_key: pass}}
models:
  - {{match: "*", upstream: only, window: {window}}}
policies:
  mine: {{{settings}}}
default_policy: mine
"""
CUSTOM = (
    "cascade: [{{layer: custom, params: {{path: 'operators_layer:{name}', seconds: {seconds}}}}}, {{layer: evict}}]"
)


@pytest.fixture(autouse=True)
def module(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "operators_layer.py").write_text(FUNCTIONS)
    sys.path.append(str(tmp_path))
    yield tmp_path
    sys.path.remove(str(tmp_path))


@pytest.fixture
async def upstream() -> AsyncIterator[RunningSimulator]:
    async with serve_simulator(SimulatorSettings(window=WINDOW), counter=COUNTER) as simulator:
        yield simulator


def policy(upstream: RunningSimulator, settings: str, *, window: int = WINDOW) -> str:
    return POLICY.format(upstream=upstream.base_url, settings=settings, window=window)


def kinds(actions: str) -> set[str]:
    return {action.split("=")[0] for action in actions.split(",")}


@ALONE
@pytest.mark.requirement("A1.11")
async def test_a_conversation_is_kept_in_the_window_by_an_operators_function(
    upstream: RunningSimulator, tmp_path: Path, deployment: Deployment
) -> None:
    yaml = policy(upstream, CUSTOM.format(name="newest", seconds=20))
    async with deployment.serving(upstream.base_url, yaml=yaml, folder=tmp_path) as target:
        talk = Talk(target.client())
        await talk.agent(22)
        assert {s.status for s in answered(upstream)} == {200}
        assert "custom" in kinds(talk.actions()[-1])
        assert "evict" not in kinds(",".join(talk.actions()))
        arrays = arrays_of(answered(upstream))
        assert all(array[:2] == talk.messages[:2] for array in arrays)
        assert all(message in talk.messages for array in arrays for message in array)
        kept = sum(begins_with(new, old) for old, new in zip(arrays, arrays[1:], strict=False))
        assert kept >= 17


@pytest.mark.requirement("A1.11")
@pytest.mark.parametrize(("name", "why"), [("invented", "rejected"), ("hangs", "timeout"), ("orphan", "")])
async def test_what_it_does_wrong_is_logged_and_the_next_layer_does_the_work(
    name: str, why: str, upstream: RunningSimulator, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    yaml = policy(upstream, CUSTOM.format(name=name, seconds=0.4))
    async with weir(upstream.base_url, tmp_path / "w.db", yaml=yaml, folder=tmp_path) as target:
        talk = Talk(target.client())
        with caplog.at_level(logging.WARNING, logger="weir.custom"):
            await talk.agent(16)
        assert {s.status for s in answered(upstream)} == {200}
        assert "evict" in kinds(talk.actions()[-1])
        assert "custom" not in kinds(",".join(talk.actions()))
    lines = [r.getMessage() for r in caplog.records if r.name == "weir.custom"]
    if not why:  # the layer itself sees that a call would be parted from its result
        return
    assert lines
    assert f"operators_layer:{name}" in lines[0]
    assert why in lines[0]


@pytest.mark.requirement("A0.35")
async def test_five_equal_polls_become_one_without_a_model(upstream: RunningSimulator, tmp_path: Path) -> None:
    yaml = policy(upstream, "cascade: [{layer: semantic_merge}]")
    polls = [m for n in range(5) for m in tool_step(n, text="state: running\n" + "runner output " * 750)]
    later = [m for n in range(5, 9) for m in tool_step(n, words=150)]
    async with weir(upstream.base_url, tmp_path / "w.db", yaml=yaml, folder=tmp_path) as target:
        talk = Talk(target.client(), messages=[*opening(), *polls, *later])
        await talk.ask(tools=TOOLS)
        assert "semantic_merge=5" in talk.actions()[-1]
        assert len(upstream.answered()) == 1
        array = arrays_of(answered(upstream))[-1]
        assert sum("merged into a later result" in str(m["content"]) for m in array) == 4
        assert sum("stands for 4 earlier results with the same text" in str(m["content"]) for m in array) == 1


# -- estimators ------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("A1.6")
async def test_an_installed_estimator_counts_for_the_policy_that_names_it(
    upstream: RunningSimulator, tmp_path: Path
) -> None:
    site = tmp_path / "site"
    info = site / "operators_estimator-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: operators-estimator\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[weir.estimators]\nby_words = operators_estimator:ByWords\n")
    (site / "operators_estimator.py").write_text(
        "class ByWords:\n    def count(self, text):\n        return 7 * len(text.split())\n"
    )
    (tmp_path / "weir.yaml").write_text(policy(upstream, "estimator: by_words"))
    arguments = ["--config", str(tmp_path / "weir.yaml"), "--store", f"sqlite+aiosqlite:///{tmp_path / 'w.db'}"]
    paths = os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    async with WeirProcess(arguments, free_port(), env={"PYTHONPATH": paths}) as process:
        talk = Talk(process.client(), messages=[{"role": "user", "content": "one two three four"}])
        await talk.ask()
        counted = int(talk.headers[-1]["x-weir-tokens"].split("before=")[1].split(";")[0])
        assert 28 <= counted <= 28 + 10
