"""Agents that ``weir run`` gives Weir's MCP server find in it what was removed from their conversation."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.profile import soak
from tests.real.clients import Client, through_weir
from tests.real.drivers.common import TASK
from tests.real.drivers.step import result
from tests.real.scripted import DONE, Call, Json, Script, Turn, scripted
from tests.real.test_clients import AGENTS, unavailable_skips

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]

STEPS = 30
WINDOWS = {"Codex": 28_672, "Claude Code": 36_864}
"""Little more than what the client always sends and a few steps."""
LOST = "2"
"""A step whose result is long out of the window when the last one is done."""
LINE = result(LOST).splitlines()[0]


def recalling(tools: Sequence[Json], query: str, *, namespace: str = "") -> Call | None:
    """A call of Weir's recall as the client has its model make it; Codex has a script call MCP tools."""
    for tool in tools:
        name = str(tool.get("name"))
        if tool.get("type") == "namespace":
            found = recalling(tool["tools"], query, namespace=name)
        elif name == "mcp__weir__recall":
            found = Call(name, {"query": query}, namespace=namespace)
        elif name == "exec":
            script = f"text((await tools.mcp__weir__recall({json.dumps({'query': query})})).content[0].text)"
            found = Call(name, script, namespace=namespace)
        else:
            found = None
        if found is not None:
            return found
    return None


@dataclass(slots=True)
class Forgetful(Script):
    """Has all steps run, then looks up what the second one found."""

    looked: bool = False
    found: str = ""

    def turn(self, said: Sequence[str], tools: Sequence[Json], *, called: bool) -> Turn:
        """The next step, the lookup, or the end."""
        if self.looked:
            self.found = self.found or said[-1]
            return Turn(text=DONE)
        turn = Script.turn(self, said, tools, called=called)
        call = recalling(tools, LINE.partition(":")[0])
        if turn.text != DONE or call is None:
            return turn
        self.looked = True
        return Turn(thought="What did step 2 find?", calls=[call])


@pytest.mark.parametrize("client", [pytest.param(AGENTS[0], marks=soak), AGENTS[-1]], ids=lambda client: client.name)
async def test_an_agent_looks_up_what_was_removed(client: Client, tmp_path: Path) -> None:
    window = WINDOWS[client.name]
    script = Forgetful(window=window, steps=STEPS)
    with unavailable_skips():
        async with through_weir(client, tmp_path, scripted, script, window=window) as setting:
            place = setting.place
            (place.folder / ".codex" / "config.toml").unlink(missing_ok=True)
            place.led = (sys.executable, "-m", "proxy", "run", "--url", setting.weir.root, "--key", "sk-test", "--")
            said = await place.run(*client.ask, TASK, timeout=500)
    assert said.strip() == DONE
    assert script.refused == []
    assert script.looked
    assert LINE in script.found, script.found
    assert LINE not in json.dumps(script.main[-2].body)
