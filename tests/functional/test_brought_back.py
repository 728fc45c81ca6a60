"""What left the window and the newest user message asks for goes up in front of it, and stays there."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from policies.strategies.recall import HEADING
from tests.functional.harness import (
    COUNTER,
    TOOLS,
    RunningWeir,
    Talk,
    answered,
    arrays_of,
    begins_with,
    tool_step,
    weir,
)
from tests.policies.tongues import TONGUES
from tests.upstream.app import RunningSimulator, serve_simulator
from tests.upstream.model import SimulatorSettings

WINDOW = 8192
ROUNDS = 80
CONFIG = """
upstreams: {sim: {base_url: URL, api_key: pass}}
models: [{match: '*', upstream: sim, window: 8192}]
policies: {mine: {cascade: [{layer: drop_oldest}]}}
default_policy: mine
"""
"""As by default, but nothing stands in place of what is removed: else most of it can be read there."""


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Path | str:
    if request.param == "postgresql":
        return str(request.getfixturevalue("postgres_url"))
    return tmp_path / "w.db"


@asynccontextmanager
async def serving(store: Path | str, folder: Path) -> AsyncIterator[tuple[RunningSimulator, RunningWeir]]:
    async with serve_simulator(SimulatorSettings(window=WINDOW), counter=COUNTER) as simulator:
        text = CONFIG.replace("URL", simulator.base_url)
        async with weir(simulator.base_url, store, yaml=text, folder=folder, window=None) as target:
            yield simulator, target


def recalls(array: list[dict[str, Any]]) -> list[str]:
    return [m["content"] for m in array if isinstance(m["content"], str) and m["content"].startswith(HEADING)]


def say(talk: Talk, text: str) -> None:
    talk.messages.append({"role": "user", "content": text})


@pytest.mark.requirement("A4.25", "P2")
async def test_a_question_is_answerable_in_its_own_language_and_later_requests_begin_alike(
    store: Path | str, tmp_path: Path
) -> None:
    async with serving(store, tmp_path) as (simulator, target):
        for tongue in TONGUES.values():
            said, question, answer = tongue.facts[0]
            talk = Talk(target.client(), tongue.talk(ROUNDS))
            say(talk, tongue.chat[0][0])
            await talk.ask()
            assert recalls(arrays_of(answered(simulator))[-1]) == []
            talk.messages.append({"role": "assistant", "content": tongue.chat[0][1]})
            say(talk, question)
            await talk.ask()
            first = arrays_of(answered(simulator))[-1]
            [text] = recalls(first)
            assert said in text
            assert answer in text
            assert COUNTER.count(text) <= 500
            assert first[-2]["content"] == text
            before = first
            for reply, further in ((answer, tongue.thanks), ("…", tongue.chat[1][0]), ("…", tongue.thanks)):
                talk.messages.append({"role": "assistant", "content": reply})
                say(talk, further)
                await talk.ask()
                now = arrays_of(answered(simulator))[-1]
                assert begins_with(now, before)
                assert recalls(now)[0] == text
                before = now


@pytest.mark.requirement("A4.25")
async def test_in_the_midst_of_a_tool_loop_nothing_is_put_anywhere(tmp_path: Path) -> None:
    english = TONGUES["en"]
    async with serving(tmp_path / "w.db", tmp_path) as (simulator, target):
        talk = Talk(target.client(), english.talk(ROUNDS))
        say(talk, english.facts[0][1])
        talk.messages += tool_step(1, text="nothing of the kind")
        await talk.ask(tools=TOOLS)
        talk.messages += tool_step(2, text="nothing here either")
        await talk.ask(tools=TOOLS)
        assert talk.actions()[0] != "none"
        assert [recalls(array) for array in arrays_of(answered(simulator))] == [[], []]
