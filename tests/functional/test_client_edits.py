"""What a client asks to have taken out of its own requests by Anthropic's ``context_management``, on chat completions."""

import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from tests.functional.harness import (
    ALONE,
    COUNTER,
    Deployment,
    InTurns,
    Talk,
    answered,
    arrays_of,
    begins_with,
    opening,
)
from tests.upstream.app import RunningSimulator, serve_simulator
from tests.upstream.model import SimulatorSettings

WINDOW = 32_768


@dataclass(frozen=True, slots=True)
class Both:
    simulator: RunningSimulator
    target: InTurns

    def talk(self, *edits: Mapping[str, Any], seed: int = 1, **options: Any) -> "Edited":
        talk = Talk(self.target.client(), opening(seed=seed), seed=seed)
        return Edited(self, talk, {"context_management": {"edits": list(edits)}, **options})


@dataclass(frozen=True, slots=True)
class Edited:
    """A conversation that sends the same edits with every request."""

    both: Both
    talk: Talk
    extra: Mapping[str, Any]

    async def steps(self, count: int) -> list[list[dict[str, Any]]]:
        """What was forwarded of so many requests, a tool step after each."""
        begun = len(answered(self.both.simulator))
        for _ in range(count):
            await self.talk.ask(extra_body=dict(self.extra))
            self.talk.add_step()
        return arrays_of(answered(self.both.simulator)[begun:])


@pytest.fixture
async def both(deployment: Deployment) -> AsyncIterator[Both]:
    async with (
        serve_simulator(SimulatorSettings(window=WINDOW), counter=COUNTER) as simulator,
        deployment.serving(simulator.base_url, window=WINDOW) as target,
    ):
        yield Both(simulator, target)


def whole(array: list[dict[str, Any]]) -> list[str]:
    """The ids of the calls whose results stand in an array as they came."""
    return [m["tool_call_id"] for m in array if m["role"] == "tool" and "weir" not in m["content"].lower()[:80]]


def sent_ids(talk: Talk) -> list[str]:
    return [m["tool_call_id"] for m in talk.messages if m["role"] == "tool"]


CLEAR = {"type": "clear_tool_uses_20250919"}


@ALONE
@pytest.mark.requirement("P4")
async def test_above_the_clients_trigger_its_old_results_go_and_the_newest_that_it_keeps_stay(both: Both) -> None:
    trigger = {"type": "input_tokens", "value": 4_000}
    edited = both.talk({**CLEAR, "trigger": trigger, "keep": {"type": "tool_uses", "value": 2}})
    arrays = await edited.steps(14)
    actions = edited.talk.actions()
    first = next(n for n, action in enumerate(actions) if action != "none")
    cleared = [array for array in arrays[first:] if len(whole(array)) == 2]
    assert actions[first].startswith("evict=")
    assert cleared, "never brought down to the two newest"
    assert all(whole(array)[-2:] == sent_ids(edited.talk)[: n + first][-2:] for n, array in enumerate(arrays[first:]))
    assert int(edited.talk.headers[first]["x-weir-tokens"].split(";")[1].removeprefix("after=")) <= 4_000
    breaks = sum(not begins_with(new, old) for old, new in zip(arrays, arrays[1:], strict=False))
    assert breaks <= 3


@pytest.mark.requirement("P4")
@pytest.mark.parametrize("edits", [[{"type": "of_another_day"}], [], "all"])
async def test_what_is_not_known_here_is_left_to_the_upstream(edits: Any, both: Both) -> None:
    talk = Talk(both.target.client(), opening())
    await talk.ask(extra_body={"context_management": {"edits": edits}})
    assert json.loads(answered(both.simulator)[-1].body)["context_management"] == {"edits": edits}


@pytest.mark.requirement("P4")
async def test_thinking_of_earlier_turns_goes_and_a_history_is_summarised_where_the_client_says_so(both: Both) -> None:
    compact = {"type": "compact_20260112", "trigger": {"type": "input_tokens", "value": 3_000}}
    thinking = {"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns", "value": 1}}
    edited = both.talk(compact, thinking)
    for turn in range(9):
        edited.talk.add_question()
        await edited.talk.ask(extra_body=dict(edited.extra))
        edited.talk.add_answer()
        edited.talk.messages[-1]["reasoning_content"] = f"Thought of turn {turn}: " + "so and so. " * 20
    arrays = arrays_of(answered(both.simulator))
    assert any(action.startswith("compact=") for action in edited.talk.actions())
    assert all(json.dumps(array).count("Thought of turn") <= 1 for array in arrays)
    assert "Thought of turn" in json.dumps(arrays)
