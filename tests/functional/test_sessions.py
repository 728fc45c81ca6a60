"""Thirty-step sessions of about 450 tokens a step against an 8,192-token window: the main job."""

import json
from itertools import pairwise
from typing import Any

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
