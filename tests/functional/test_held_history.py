"""Histories that the provider holds: followed while there is room, begun anew when there is none."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from proxy.simulator import SimulatedAnswer, SimulatedCall, SimulatorSettings
from proxy.simulator.app import RunningSimulator, serve_simulator
from tests.functional.harness import COUNTER, prose, weir

STEPS = 40
READ = {
    "type": "function",
    "name": "read_file",
    "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
}
TASK = "Migrate the project from axios to fetch. " + prose(60, seed=2)


def say(request: dict[str, Any]) -> SimulatedAnswer:
    """Another file to read, told by how many tool results there are so far, until the task is done."""
    newest = request["messages"][-1]
    step = int(str(newest["content"]).split()[0]) if newest["role"] == "tool" else 0
    if step >= STEPS:
        return SimulatedAnswer(reasoning="That was all.", text="It is done.")
    call = SimulatedCall("read_file", json.dumps({"path": f"src/module_{step + 1}.py"}))
    return SimulatedAnswer(reasoning="One more file.", calls=(call,))


@asynccontextmanager
async def upstream(window: int = 8192) -> AsyncIterator[RunningSimulator]:
    async with serve_simulator(SimulatorSettings(window=window, answer=say), counter=COUNTER) as running:
        yield running


def result_of(call: Any, step: int) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call.call_id, "output": f"{step} {prose(280, seed=step)}"}


class Chained:
    """An agent that sends its provider only what is new."""

    def __init__(self, client: Any, *, streams: bool = False) -> None:
        self.client = client
        self.streams = streams
        self.actions: list[str] = []
        self.last: Any = None

    async def ask(self, given: Any, **options: Any) -> Any:
        asked = {"model": "sim", "tools": [READ], "input": given, "max_output_tokens": 512, **options}
        if self.last is not None:
            asked.setdefault("previous_response_id", self.last.id)
        responses = self.client.responses
        if self.streams:
            async with responses.stream(**asked) as stream:
                self.last = await stream.get_final_response()
                self.actions.append(stream._raw_stream.response.headers["x-weir-actions"])
        else:
            raw = await responses.with_raw_response.create(**asked)
            self.last = raw.parse()
            self.actions.append(raw.headers["x-weir-actions"])
        return self.last

    async def steps(self, until: int, *, start: int = 0) -> Any:
        answer = await self.ask(TASK) if start == 0 else self.last
        for step in range(start + 1, until + 1):
            calls = [item for item in answer.output if item.type == "function_call"]
            answer = await self.ask([result_of(call, step) for call in calls])
        return answer


def restarts(actions: list[str]) -> int:
    return sum("restart=1" in each for each in actions)


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
async def test_a_chain_of_forty_steps_goes_through_a_small_window(streams: bool) -> None:
    async with upstream() as simulator, weir(simulator.base_url) as running:
        agent = Chained(running.client(), streams=streams)
        answer = await agent.steps(STEPS)
        assert answer.output_text == "It is done."
        assert 1 <= restarts(agent.actions) <= 4
        sent = [json.loads(each.body) for each in simulator.answered()]
        assert sum("previous_response_id" not in body for body in sent) == 1 + restarts(agent.actions)
        assert [each.status for each in simulator.answered()] == [200] * len(sent)
