"""Four hooks for an operator's own code, called in order and never at a request's expense."""

import asyncio
import sys
from collections.abc import Sequence
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from proxy.cli import Failure
from proxy.cli.serve import installed_plugins
from proxy.features.feature import Overflow, Turn, TurnEnd
from proxy.features.plugins import NewResult, Plugin, Plugins
from tests.functional.harness import (
    ALONE,
    COUNTER,
    SHARED,
    TOOLS,
    Deployment,
    WeirProcess,
    free_port,
    opening,
    tool_step,
)
from tests.upstream.app import serve_simulator
from tests.upstream.model import SimulatorSettings


class Noting(Plugin):
    """Notes what it is told."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, Turn, Any]] = []

    @property
    def names(self) -> list[str]:
        return [name for name, _, _ in self.seen]

    async def turn_start(self, turn: Turn) -> None:
        self.seen.append(("turn_start", turn, None))

    async def tool_result(self, turn: Turn, result: NewResult) -> None:
        self.seen.append(("tool_result", turn, result))

    async def overflow(self, turn: Turn, overflow: Overflow) -> None:
        self.seen.append(("overflow", turn, overflow))

    async def turn_end(self, turn: Turn, end: TurnEnd) -> None:
        self.seen.append(("turn_end", turn, end))


@ALONE
@pytest.mark.requirement("A0.132")
async def test_a_plugin_sees_the_four_hooks_in_their_order(deployment: Deployment) -> None:
    plugin = Noting()
    messages = [*opening(), *tool_step(0), *tool_step(1)]
    async with (
        serve_simulator(SimulatorSettings(window=8192), counter=COUNTER) as simulator,
        deployment.serving(simulator.base_url, hooks=[plugin]) as target,
    ):
        client = target.client()
        await client.chat.completions.create(model="sim", messages=messages, tools=TOOLS, max_tokens=64)
        messages += tool_step(2)
        await client.chat.completions.create(
            model="sim", messages=messages, tools=TOOLS, max_tokens=64,
            extra_headers={"x-sim-fault": "wrong_window"},
        )  # fmt: skip
        stream = await client.chat.completions.create(
            model="sim", messages=messages, tools=TOOLS, max_tokens=64, stream=True
        )
        async for _ in stream:
            pass
    first, second, third = turns(plugin)
    assert first == ["turn_start", "tool_result", "tool_result", "turn_end"]
    assert (second[:2], second[-1]) == (["turn_start", "tool_result"], "turn_end")
    assert third == ["turn_start", "turn_end"]
    results = [fact for name, _, fact in plugin.seen if name == "tool_result"]
    assert [r.text for r in results] == [m["content"] for m in messages if m["role"] == "tool"]
    assert [r.call_id for r in results] == ["call_0", "call_1", "call_2"]
    named = {turn.conversation for name, turn, _ in plugin.seen if name != "turn_start"}
    assert len(named) == 1
    assert None not in named
    ends = [fact for name, _, fact in plugin.seen if name == "turn_end"]
    assert (ends[0].status, ends[0].outcome, ends[0].actions) == (200, "ok", "none")
    assert ends[0].tokens_before == ends[0].tokens_after > 500


def turns(plugin: Noting) -> list[list[str]]:
    """The names of the hooks of each request, in order."""
    by_request: dict[str, list[str]] = {}
    for name, turn, _ in plugin.seen:
        by_request.setdefault(turn.request, []).append(name)
    return list(by_request.values())


class Failing(Noting):
    """Raises in the first two, sleeps in the last; ``ended`` counts those that were ended in their sleep."""

    ended = 0

    async def turn_start(self, turn: Turn) -> None:
        raise RuntimeError("no start")

    async def tool_result(self, turn: Turn, result: NewResult) -> None:
        raise KeyError("no result")

    async def turn_end(self, turn: Turn, end: TurnEnd) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            self.ended += 1


@SHARED
@pytest.mark.requirement("A0.132", "P6")
async def test_a_plugin_that_fails_or_sleeps_costs_neither_the_request_nor_another_plugin(
    caplog: pytest.LogCaptureFixture, deployment: Deployment
) -> None:
    noting, failing = Noting(), Failing()
    async with (
        asyncio.timeout(30),
        serve_simulator(SimulatorSettings(window=8192), counter=COUNTER) as simulator,
        deployment.serving(simulator.base_url, hooks=[failing, noting]) as target,
    ):
        client = target.client()
        for _ in range(3):
            await client.chat.completions.create(
                model="sim", messages=[*opening(), *tool_step(0)], tools=TOOLS, max_tokens=64
            )
        assert failing.ended < 3, "requests waited for a plugin"
        while noting.names.count("turn_end") < 3:
            await asyncio.sleep(0.01)
    assert "the plugin Failing failed in turn_start" in caplog.text
    assert "no result" in caplog.text
    assert "the plugin Failing took more than 1 s for a turn_end" in caplog.text


async def test_what_comes_while_a_plugins_queue_is_full_is_missed_and_said(caplog: pytest.LogCaptureFixture) -> None:
    noting = Noting()
    plugins = Plugins([noting], most=2)
    turns_of: Sequence[Turn] = [Turn(request=str(n), tenant="t", model="m", policy="p") for n in range(3)]
    for turn in turns_of:
        plugins.on_read(turn)
    plugins.start()
    await plugins.close()
    assert [turn.request for _, turn, _ in noting.seen] == ["0", "1"]
    assert "too slow: it misses a turn_start" in caplog.text


PLUGIN = """
from pathlib import Path

class Noted:
    async def turn_start(self, turn): note("turn_start")
    async def tool_result(self, turn, result): note("tool_result")
    async def overflow(self, turn, overflow): note("overflow")
    async def turn_end(self, turn, end): note("turn_end")

def note(name):
    with Path(__file__).with_name("noted.txt").open("a") as file:
        file.write(name + "\\n")

def broken():
    raise RuntimeError("not today")
"""


def install(folder: Path, target: str) -> None:
    """A distribution that names ``target`` in the group of hooks."""
    (folder / "weirplugin.py").write_text(PLUGIN)
    about = folder / "weirplugin-1.0.dist-info"
    about.mkdir(exist_ok=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: weirplugin\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(f"[weir.hooks]\nnoted = {target}\n")
    assert EntryPoint("noted", target, "weir.hooks").group == "weir.hooks"


@pytest.mark.requirement("A0.132")
async def test_weir_serve_loads_the_plugins_that_are_installed(tmp_path: Path) -> None:
    install(tmp_path, "weirplugin:Noted")
    async with serve_simulator(SimulatorSettings(window=8192), counter=COUNTER) as simulator:
        arguments = [
            "--upstream",
            simulator.base_url,
            "--window",
            "8192",
            "--store",
            f"sqlite+aiosqlite:///{tmp_path}/w.db",
        ]
        async with WeirProcess(arguments, free_port(), env={"PYTHONPATH": str(tmp_path)}) as process:
            await process.client().chat.completions.create(
                model="sim", messages=[*opening(), *tool_step(0)], tools=TOOLS, max_tokens=64
            )
    assert (tmp_path / "noted.txt").read_text().split() == ["turn_start", "tool_result", "turn_end"]


def test_a_plugin_that_cannot_be_made_stops_the_start_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "weirplugin:broken")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "weirplugin", raising=False)
    with pytest.raises(Failure, match=r"plugin noted \(weirplugin:broken\) cannot be used: not today"):
        installed_plugins()
