"""A resumed state belongs to the conversation that asked for it, whoever else begins with the same words."""

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.functional.harness import COUNTER, Deployment, InTurns, Talk, arrays_of, prose
from tests.profile import each_once
from tests.upstream import Request, SimulatorSettings
from tests.upstream.app import RunningSimulator, serve_simulator

pytestmark = pytest.mark.slow

WINDOW = 8192
CONFIG = """
upstreams: {sim: {base_url: URL, api_key: pass}}
models: [{match: '*', upstream: sim, window: 8192}]
policies: {mine: {checkpoints: {save_at: 0.02}}}
default_policy: mine
"""
GOAL = "Migrate the billing service to Rust."
OPENING = {"role": "user", "content": "Go on where you stopped."}
MORE = {"role": "user", "content": "And then?"}
OLD = {"x-weir-resume": "old"}
SAID = "Resuming from checkpoint"


@dataclass(slots=True)
class Place:
    """What serves one finished conversation, ``old``, and the upstream behind it; both outlive a restart of it."""

    simulator: RunningSimulator
    folder: Path
    deployment: Deployment
    stack: AsyncExitStack = field(default_factory=AsyncExitStack)
    target: InTurns | None = None
    client: Any = None

    async def ask(self, *messages: dict[str, Any], **options: Any) -> tuple[list[dict[str, Any]], dict[str, Any], str]:
        """What was forwarded, the assistant message that came back, and what Weir did."""
        talk = Talk(self.client, list(messages))
        answer = await talk.ask(**options)
        said = answer.choices[0].message.model_dump(exclude_none=True)
        return arrays_of(self.simulator.answered())[-1], said, talk.actions()[0]

    async def stream(self, *messages: dict[str, Any], **options: Any) -> dict[str, Any]:
        """The assistant message of a streamed answer."""
        options = {"model": "sim", "max_tokens": 64, "stream": True, **options}
        chunks = await self.client.chat.completions.create(messages=list(messages), **options)
        text = "".join([c.choices[0].delta.content or "" async for c in chunks if c.choices])
        return {"role": "assistant", "content": text}

    async def flushed(self) -> None:
        assert self.target is not None
        await self.target.settled()

    async def restart(self) -> None:
        """Have another Weir serve from the same database."""
        await self.stack.aclose()
        text, url = CONFIG.replace("URL", self.simulator.base_url), self.simulator.base_url
        opened = self.deployment.serving(url, yaml=text, folder=self.folder, window=None)
        self.target = await self.stack.enter_async_context(opened)
        self.client = self.target.client()


def told(request: Request) -> str:
    """An answer that depends on everything that is in the window."""
    return "Answer " + str(abs(hash(json.dumps(request["messages"]))) % 10**9)


async def prepare(place: Place) -> None:
    """The conversation ``old``, with a checkpoint."""
    start = [{"role": "user", "content": f"{GOAL} {prose(300, seed=1)}"}]
    await place.ask(*start, extra_headers={"x-weir-conversation": "old"})
    await place.flushed()


@pytest.fixture
async def place(tmp_path: Path, deployment: Deployment) -> AsyncIterator[Place]:
    async with serve_simulator(SimulatorSettings(window=WINDOW, answer=told), counter=COUNTER) as simulator:
        place = Place(simulator, tmp_path, deployment)
        await place.restart()
        await prepare(place)
        await place.restart()
        yield place
        await place.stack.aclose()


STRANGERS: dict[str, dict[str, str]] = {
    "without the header": {},
    "under a name of its own": {"x-weir-conversation": "mine"},
    "with an unknown name": {"x-weir-resume": "never-heard-of"},
}
ON = pytest.mark.parametrize(
    ("stranger", "deployment"), [*((each, 1) for each in STRANGERS), ("without the header", 2)], indirect=["deployment"]
)


@each_once
@pytest.mark.requirement("P1", "A0.5")
@ON
@pytest.mark.parametrize("resumed_as", [{}, {"x-weir-conversation": "new"}], ids=["unnamed", "named"])
async def test_the_same_opening_gets_nothing_of_what_another_conversation_resumed(
    stranger: str, resumed_as: dict[str, str], place: Place
) -> None:
    sent, answer, actions = await place.ask(OPENING, extra_headers={**OLD, **resumed_as})
    assert actions == "resume=1"
    assert SAID in sent[0]["content"]
    assert GOAL in sent[0]["content"]
    begun, other, _ = await place.ask(OPENING, extra_headers=STRANGERS[stranger])
    assert begun == [OPENING]
    gone_on, _, _ = await place.ask(OPENING, other, MORE, extra_headers=STRANGERS[stranger])
    assert gone_on == [OPENING, other, MORE]
    again, _, _ = await place.ask(OPENING, answer, MORE, extra_headers=resumed_as or OLD)
    assert again == [*sent, answer, MORE], "its own conversation has lost it"


@each_once
@pytest.mark.requirement("P1", "A0.5")
@pytest.mark.parametrize("headers", [OLD, {**OLD, "x-weir-conversation": "new"}], ids=["unnamed", "named"])
@ON
async def test_two_that_say_the_same_word_for_word_are_told_apart_by_what_they_ask_for(
    stranger: str, headers: dict[str, str], place: Place
) -> None:
    script = [
        OPENING,
        {"role": "assistant", "content": "I go on."},
        MORE,
        {"role": "assistant", "content": "So."},
        MORE,
    ]
    for length in (1, 3, 5):
        sent, _, _ = await place.ask(*script[:length], extra_headers=headers)
        assert GOAL in sent[0]["content"]
    for length in (1, 3, 5):
        sent, _, _ = await place.ask(*script[:length], extra_headers=STRANGERS[stranger])
        assert sent == script[:length]
    sent, _, _ = await place.ask(*script, MORE, extra_headers=headers)
    assert GOAL in sent[0]["content"]
