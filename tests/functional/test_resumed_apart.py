"""A resumed state belongs to the conversation that asked for it, whoever else begins with the same words."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.functional.harness import ALONE, COUNTER, SHARED, Deployment, InTurns, Talk, arrays_of, prose
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


@pytest.mark.requirement("P1", "P9", "A0.5")
@ON
async def test_it_is_so_after_a_restart_too(stranger: str, place: Place) -> None:
    sent, _, _ = await place.ask(OPENING, extra_headers=OLD)
    answer = await place.stream(OPENING, extra_headers=OLD)
    assert arrays_of(place.simulator.answered())[-1] == sent, "a retry is the same conversation"
    await place.flushed()
    await place.restart()
    begun, other, _ = await place.ask(OPENING, extra_headers=STRANGERS[stranger])
    gone_on, _, _ = await place.ask(OPENING, other, MORE, extra_headers=STRANGERS[stranger])
    retried, _, actions = await place.ask(OPENING, extra_headers=OLD)
    again, _, _ = await place.ask(OPENING, answer, MORE, extra_headers=OLD)
    assert begun == [OPENING]
    assert gone_on == [OPENING, other, MORE]
    assert retried == sent
    assert actions == "resume=1"
    assert again == [*sent, answer, MORE]


@ALONE
@pytest.mark.requirement("P1", "A0.5")
async def test_a_resumed_conversation_that_sends_other_words_for_its_answer_is_known_by_header_or_name(
    place: Place,
) -> None:
    altered = {"role": "assistant", "content": "In other words."}
    await place.ask(OPENING)
    for headers in ({}, {"x-weir-conversation": "new"}):
        sent, _, _ = await place.ask(OPENING, extra_headers={**OLD, **headers})
        again, _, _ = await place.ask(OPENING, altered, MORE, extra_headers=headers or OLD)
        assert again == [*sent, altered, MORE]
    foreign = [OPENING, {"role": "assistant", "content": "Never given to anybody here."}, MORE]
    for headers in ({}, {"x-weir-conversation": "mine"}):
        sent, _, _ = await place.ask(*foreign, extra_headers=headers)
        assert sent == foreign


@SHARED
@pytest.mark.requirement("P1", "A0.5")
async def test_where_everybody_is_given_the_same_answer_nobody_gets_what_another_resumed(
    tmp_path: Path, deployment: Deployment
) -> None:
    settings = SimulatorSettings(window=WINDOW, answer=lambda _: "ok")
    async with serve_simulator(settings, counter=COUNTER) as simulator:
        place = Place(simulator, tmp_path, deployment)
        await place.restart()
        await prepare(place)
        named = {"x-weir-conversation": "new"}
        sent, answer, _ = await place.ask(OPENING, extra_headers={**OLD, **named})
        for headers in STRANGERS.values():
            await place.ask(OPENING, extra_headers=headers)
            foreign, _, _ = await place.ask(OPENING, answer, MORE, extra_headers=headers)
            assert foreign == [OPENING, answer, MORE]
        await place.stack.aclose()
    assert GOAL in sent[0]["content"]


@pytest.mark.requirement("P1", "P8", "A0.5")
async def test_conversations_that_resume_the_same_at_once_and_one_that_does_not_stay_three(place: Place) -> None:
    heads = [OLD, OLD, {}]
    first = await asyncio.gather(*(place.stream(OPENING, extra_headers=h, seed=n) for n, h in enumerate(heads)))
    assert first[0] == first[1] != first[2]
    answers = [*first[:1], {"role": "assistant", "content": "Another answer."}, first[2]]
    marks = ("zebra", "gnu", "okapi")
    talks = [[OPENING, answer] for answer in answers]
    for turn in range(5):
        for talk, mark, head in zip(talks, marks, heads, strict=True):
            talk.append({"role": "user", "content": f"The {mark} is what I decided on, turn {turn}."})
            sent, said, _ = await place.ask(*talk, extra_headers=head)
            text = json.dumps(sent)
            assert [m for m in marks if m in text] == [mark]
            assert (GOAL in text) == (head is OLD)
            talk.append(said)
    await place.flushed()
    assert place.target is not None
    memories = [each.runtime.planner.conversations._threads.values() for each in place.target.weirs]
    states = [thread.known.checkpoint or "" for threads in memories for thread in threads]
    assert all(sum(mark in state for mark in marks) <= 1 for state in states)


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


@ALONE
@pytest.mark.requirement("P1", "R.25", "A0.5")
async def test_a_fork_of_a_resumed_conversation_keeps_what_it_resumed_and_nothing_of_the_other_future(
    place: Place,
) -> None:
    sent, answer, _ = await place.ask(OPENING, extra_headers=OLD)
    talk = [OPENING, answer]
    for turn in range(4):
        talk.append({"role": "user", "content": f"The zebra is what I decided on, turn {turn}."})
        _, said, _ = await place.ask(*talk, extra_headers=OLD)
        talk.append(said)
    forked, _, _ = await place.ask(OPENING, answer, MORE, extra_headers=OLD)
    anew, _, actions = await place.ask(OPENING, extra_headers=OLD)
    plain, _, _ = await place.ask(OPENING)
    assert forked == [*sent, answer, MORE]
    assert GOAL in anew[0]["content"]
    assert "zebra" not in json.dumps([forked, anew])
    assert actions == "resume=1"
    assert plain == [OPENING]
