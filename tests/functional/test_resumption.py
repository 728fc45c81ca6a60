"""A fresh window that begins with a checkpoint goes on at the right subtask and works nothing out anew."""

import json
import re
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.functional.harness import COUNTER, SHARED, Deployment, Talk, arrays_of, prose
from tests.upstream import Request, SimulatedAnswer, SimulatedCall, SimulatorSettings
from tests.upstream.app import serve_simulator

YAML = """
upstreams: {sim: {base_url: URL, api_key: pass}}
policies: {balanced: {checkpoints: {save_at: 0.2}}}
"""
STEPS = ("read the axios calls", "write the fetch wrapper", "port the login page", "port the basket", "delete axios")
DONE = 2
TOOL = {
    "type": "function",
    "function": {"name": "TodoWrite", "description": "Keep the list.", "parameters": {"type": "object"}},
}
PORT = {"type": "function", "function": {"name": "work_on", "parameters": {"type": "object"}}}


def todo(done: int) -> str:
    """The list with so many subtasks done and the next one under way."""
    states = ["completed"] * done + ["in_progress"] + ["pending"] * len(STEPS)
    return json.dumps({"todos": [{"content": text, "status": s} for text, s in zip(STEPS, states, strict=False)]})


def history() -> list[dict[str, Any]]:
    """The first two subtasks at work, long enough to fill half a window."""
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "You are a careful coding agent."},
        {"role": "user", "content": "Migrate the project from axios to fetch. Never touch src/legacy/billing.ts."},
    ]
    for number in range(DONE + 1):
        for name, arguments in (("TodoWrite", todo(number)), ("work_on", json.dumps({"task": STEPS[number]}))):
            call = {"id": f"{name}_{number}", "type": "function", "function": {"name": name, "arguments": arguments}}
            messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": prose(260, seed=number)})
    return messages


def next_step(request: Request) -> SimulatedAnswer | str:
    """A model that has nothing but its window: it goes on with what is in progress, else it begins at the beginning."""
    said = "\n".join(str(m.get("content") or "") for m in request["messages"])
    under_way = re.search(r"In progress:\n- (.+)", said)
    finished = re.search(r"Done:\n((?:- .+\n?)+)", said)
    task = under_way.group(1).strip() if under_way else STEPS[0]
    redone = [t for t in STEPS if finished and t in finished.group(1) and t == task]
    assert not redone
    return SimulatedAnswer(calls=(SimulatedCall("work_on", json.dumps({"task": task})),))


@SHARED
@pytest.mark.requirement("A0.113")
async def test_a_checkpoint_in_a_fresh_window_goes_on_at_the_right_subtask(
    tmp_path: Path, deployment: Deployment
) -> None:
    settings = SimulatorSettings(window=8192, answer=next_step)
    async with AsyncExitStack() as stack:
        simulator = await stack.enter_async_context(serve_simulator(settings, counter=COUNTER))
        text = YAML.replace("URL", simulator.base_url)
        options: dict[str, Any] = {"yaml": text, "folder": tmp_path, "window": 8192}
        target = await stack.enter_async_context(deployment.serving(simulator.base_url, **options))
        first = Talk(target.client(default_headers={"x-weir-conversation": "one"}), history())
        await first.ask(tools=[TOOL, PORT])
        first.add_answer()
        first.messages.append({"role": "user", "content": "Stop for today."})
        await first.ask(tools=[TOOL, PORT])
        await target.settled()
        async with httpx.AsyncClient(headers={"authorization": "Bearer sk-test"}) as http:
            (await http.post(f"{target.root()}/weir/conversations/one/close")).raise_for_status()

        headers = {"x-weir-conversation": "two", "x-weir-resume": "one"}
        fresh = [{"role": "user", "content": "Go on where you stopped."}]
        second = Talk(target.client(default_headers=headers), fresh)
        resumed = await second.ask(tools=[TOOL, PORT])
        stranger = Talk(target.client(key="sk-other"), [*fresh])
        without = await stranger.ask(tools=[TOOL, PORT])
        window = arrays_of(simulator.answered())[-2]

    text = json.dumps(window)
    assert second.actions()[0] == "resume=1"
    assert json.loads(resumed.choices[0].message.tool_calls[0].function.arguments) == {"task": STEPS[DONE]}
    assert json.loads(without.choices[0].message.tool_calls[0].function.arguments) == {"task": STEPS[0]}
    assert all(task in text for task in STEPS)
    assert "Never touch src/legacy/billing.ts." in text
    assert len(window) <= 3
