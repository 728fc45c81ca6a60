"""Thinking that is signed for what stood before it: what Weir takes out takes with it what was signed behind it."""

import json
from typing import Any

import anthropic
import pytest

from tests.functional.harness import ALONE, COUNTER, Deployment, InTurns
from tests.profile import each_once
from tests.upstream import Dialect, SimulatedAnswer, SimulatedCall, SimulatorSettings, run_simulator
from tests.upstream.app import RunningSimulator

TOOLS = [{"name": "read", "description": "Read", "input_schema": {"type": "object", "properties": {}}}]
ADAPTIVE = {"type": "adaptive"}
STEPS = 26


def settings(**more: Any) -> SimulatorSettings:
    def answer(request: Any) -> SimulatedAnswer:
        number = sum(each.get("role") == "assistant" for each in request["messages"])
        call = SimulatedCall("read", "{}", id=f"toolu_{number}")
        return SimulatedAnswer(text=f"Step {number}.", reasoning=f"I think of step {number}.", calls=(call,))

    return SimulatorSettings(dialect=Dialect.ANTHROPIC, window=8192, bound=True, answer=answer, **more)


class Agent:
    """A loop over the real SDK that sends back all that it got."""

    def __init__(self, *, model: str, thinking: dict[str, Any]) -> None:
        self.asked = {"model": model, "max_tokens": 1500, "tools": TOOLS, "thinking": thinking}
        self.messages: list[Any] = [{"role": "user", "content": "Audit the files."}]
        self.actions: list[str] = []

    async def go_on(self, turns: InTurns, steps: int) -> None:
        for _ in range(steps):
            async with anthropic.AsyncAnthropic(base_url=turns.root(), api_key="k", max_retries=0) as client:
                await self._step(client)

    async def _step(self, client: anthropic.AsyncAnthropic) -> None:
        raw = await client.messages.with_raw_response.create(messages=self.messages, **self.asked)
        answer = await raw.parse()
        self.actions.append(raw.headers["x-weir-actions"])
        self.messages.append(
            {"role": "assistant", "content": [b.model_dump(exclude_none=True) for b in answer.content]}
        )
        number = len(self.messages)
        said = " ".join(f"line {n}: value {number * 1000 + n}," for n in range(90))
        calls = [block.id for block in answer.content if block.type == "tool_use"]
        results = [{"type": "tool_result", "tool_use_id": call, "content": said} for call in calls]
        self.messages.append({"role": "user", "content": results})


def thoughts(simulator: RunningSimulator, number: int) -> list[str]:
    """What the model thought, as far as a request still holds it."""
    body = json.loads(simulator.ledger[number].body)
    blocks = [b for m in body["messages"] for b in m["content"] if isinstance(b, dict)]
    return [block["thinking"] for block in blocks if block["type"] == "thinking"]


def refusals(simulator: RunningSimulator) -> list[int]:
    return [n for n, request in enumerate(simulator.ledger) if request.status >= 400]


@each_once
@ALONE
@pytest.mark.parametrize("model", ["claude-sonnet-5-5", "claude-of-another-name"])
async def test_no_thinking_stands_behind_an_edit_that_it_was_not_signed_for(model: str, deployment: Deployment) -> None:
    agent = Agent(model=model, thinking=ADAPTIVE)
    with run_simulator(settings(), counter=COUNTER) as simulator:
        for _ in range(2):  # new processes, which read what was stored
            async with deployment.serving(simulator.base_url) as turns:
                await agent.go_on(turns, STEPS // 2)
    learned = 0 if "5-5" in model else deployment.count  # once in each of the first processes
    batches = [n for n, action in enumerate(agent.actions) if "unbound_reasoning" in action]
    assert batches, "the window was never full"
    assert sum("retry" in action for action in agent.actions) <= learned
    assert len(refusals(simulator)) <= learned
    sent = [n for n in range(len(simulator.ledger)) if n not in refusals(simulator)]
    assert len(sent) == STEPS
    for before, after in zip(sent, sent[1:], strict=False):  # what was thought behind the edits stays as it was
        kept = thoughts(simulator, after)
        assert (
            kept == [] or set(thoughts(simulator, before)) <= set(kept) or len(kept) < len(thoughts(simulator, before))
        )
    assert max(len(thoughts(simulator, n)) for n in sent[batches[0] + 3 :]) >= 3


@ALONE
async def test_what_was_seen_to_bind_its_thinking_is_known_after_a_restart(deployment: Deployment) -> None:
    with run_simulator(settings(), counter=COUNTER) as simulator:
        for number in range(2):
            agent = Agent(model="claude-of-another-name", thinking=ADAPTIVE)
            agent.messages = [{"role": "user", "content": f"Audit the files of part {number}."}]
            async with deployment.serving(simulator.base_url) as turns:
                await agent.go_on(turns, STEPS // 2)
            assert any("unbound_reasoning" in action for action in agent.actions)
            assert len(refusals(simulator)) == 1


@ALONE
async def test_where_a_loop_has_to_begin_with_thinking_the_provider_drops_it(deployment: Deployment) -> None:
    with run_simulator(settings(), counter=COUNTER) as simulator:
        async with deployment.serving(simulator.base_url) as turns:
            enabled = {"type": "enabled", "budget_tokens": 1024}
            agent = Agent(model="claude-sonnet-5-5", thinking=enabled)
            await agent.go_on(turns, STEPS // 2)
        last = simulator.ledger[-1]
        asked = json.loads(last.body)
    assert refusals(simulator) == []
    assert "drop_block=1" in agent.actions[-1]
    assert asked["thinking"] == {**enabled, "block_binding": {"prefix_mismatch_behavior": "drop_block"}}
    assert "thinking-binding-controls-2026-08-01" in dict(last.headers)["anthropic-beta"]
