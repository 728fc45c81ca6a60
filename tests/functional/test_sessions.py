"""Thirty-step sessions of about 450 tokens a step against an 8,192-token window: the main job."""

import json
from itertools import pairwise
from typing import Any

import openai
import pytest

from proxy.wire.counting import count_message
from tests.functional.harness import (
    ALONE,
    COUNTER,
    TOOLS,
    Deployment,
    InTurns,
    opening,
    prefix_reuse,
    prose,
    tool_step,
)
from tests.profile import each_once
from tests.upstream.app import serve_simulator
from tests.upstream.model import SimulatorSettings

pytestmark = pytest.mark.slow

STEPS = 30
MIN_REUSE = 0.82


async def drive_agent(
    target: InTurns, *, steps: int = STEPS, start: int = 0, messages: list[Any] | None = None
) -> list[Any]:
    """One user message and a tool step per request; the messages afterwards."""
    client = target.client()
    messages = messages if messages is not None else opening()
    for number in range(start, start + steps):
        await client.chat.completions.create(model="sim", messages=messages, max_tokens=512, tools=TOOLS)
        await target.settled()  # a tool takes longer than what is prepared meanwhile
        messages += tool_step(number)
    return messages


async def drive_chat(target: InTurns, *, steps: int = STEPS) -> list[Any]:
    client = target.client()
    messages = opening()[:1]
    for number in range(steps):
        messages.append({"role": "user", "content": prose(132, seed=2 * number)})
        await client.chat.completions.create(model="sim", messages=messages, max_tokens=512)
        await target.settled()  # so does whoever reads the answer
        messages.append({"role": "assistant", "content": prose(132, seed=2 * number + 1)})
    return messages


def batches(arrays: list[list[dict[str, Any]]]) -> int:
    """How often a forwarded request did not begin with the one before."""
    return sum(new[: len(old)] != old for old, new in pairwise(arrays))


def reuse(arrays: list[list[dict[str, Any]]]) -> float:
    return prefix_reuse(arrays, lambda m: count_message(m, COUNTER, model="sim"))


@each_once
@pytest.mark.requirement("A0.3", "A1.1", "P2", "D25")
@ALONE
@pytest.mark.parametrize("summarizer", [None, "summariser"])
@pytest.mark.parametrize("kind", ["agent", "chat"])
async def test_a_session_that_would_overflow_is_answered_with_few_batches(
    kind: str, summarizer: str | None, deployment: Deployment, record_property: Any
) -> None:
    settings = SimulatorSettings(window=8192, summary_model="summariser")
    async with (
        serve_simulator(settings, counter=COUNTER) as simulator,
        deployment.serving(simulator.base_url, window=8192, summarizer=summarizer) as target,
    ):
        await (drive_agent(target) if kind == "agent" else drive_chat(target))
        seen = [s for s in simulator.ledger if b'"summariser"' not in s.body]
        summaries = [s for s in simulator.ledger if b'"summariser"' in s.body]
        arrays = [json.loads(s.body)["messages"] for s in seen]
    assert [s.status for s in seen] == [200] * STEPS
    assert batches(arrays) <= 3
    assert reuse(arrays) >= MIN_REUSE
    first = [s for s in summaries if b"An earlier answer to this was refused" not in s.body]
    assert len(first) <= batches(arrays) + 1, "one is for a batch to come"
    assert len(summaries) <= 2 * len(first)
    if kind == "chat" and summarizer:
        assert summaries
    record_property(
        "figures", f"{kind} {summarizer}: batches {batches(arrays)}, reuse {reuse(arrays):.3f}, calls {len(summaries)}"
    )


DECISIONS = {
    6: "We decided to wrap fetch in src/http/client.ts, because the interceptors need one place.",
    12: "Timeouts use AbortController with 8,000 ms; CancelToken is not to be used any more.",
    18: "Never change the public type HttpError: the mobile team imports it.",
}
"""What the user says before these steps."""


@ALONE
@pytest.mark.requirement("A0.8", "A0.3")
async def test_a_migration_of_fifty_steps_ends_with_its_goal_and_its_decisions_in_sight(deployment: Deployment) -> None:
    async with serve_simulator(SimulatorSettings(window=8192), counter=COUNTER) as simulator:
        async with deployment.serving(simulator.base_url, window=8192) as target:
            messages = opening()
            for start, end in pairwise((0, *DECISIONS, 50)):
                if start in DECISIONS:
                    messages.append({"role": "user", "content": DECISIONS[start]})
                await drive_agent(target, steps=end - start, start=start, messages=messages)
        seen = simulator.answered()
        direct: Any = openai.AsyncOpenAI(base_url=simulator.base_url, api_key="sk-test", max_retries=0)
        with pytest.raises(openai.BadRequestError, match="maximum context length"):
            await direct.chat.completions.create(model="sim", messages=messages[:36], max_tokens=512, tools=TOOLS)
        await direct.close()
    assert [each.status for each in seen] == [200] * 50
    last = seen[-1].json()["messages"]
    assert last[0] == messages[0]
    assert last[1]["content"].startswith(messages[1]["content"]), "the goal is there word for word"
    text = json.dumps(last)
    assert [said for said in DECISIONS.values() if json.dumps(said)[1:-1] not in text] == []
    assert len(last) < len(messages) / 2
