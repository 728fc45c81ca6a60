"""A Weir that ends in the middle of a session, in order or killed, and the session that goes on without noticing."""

import asyncio
import json
import signal
from pathlib import Path

import pytest

from tests.functional.harness import (
    COUNTER,
    SHARED,
    TOOLS,
    Deployment,
    Talk,
    WeirProcess,
    answered,
    arrays_of,
    batches,
    begins_with,
    free_port,
    opening,
    tool_step,
)
from tests.profile import soak
from tests.upstream.app import serve_simulator
from tests.upstream.model import SimulatorSettings

pytestmark = pytest.mark.slow

SETTINGS = SimulatorSettings(window=8192, summary_model="summariser")
MAX_TURNS = 24


async def until_the_first_batch(talk: Talk, kind: str) -> None:
    """Go on until the newest request was the first that Weir has edited."""
    step = talk.agent if kind == "agent" else talk.chat
    for _ in range(MAX_TURNS):
        await step(1)
        if talk.actions()[-1] != "none":
            return
    raise AssertionError("nothing was ever edited")


@pytest.mark.requirement("P9", "P2", "S.3", "R.60")
@pytest.mark.parametrize("how", [pytest.param(signal.SIGTERM, marks=soak), signal.SIGKILL])
async def test_a_session_goes_on_after_its_weir_was_ended_right_after_a_batch(
    how: signal.Signals, tmp_path: Path
) -> None:
    async with serve_simulator(SETTINGS, counter=COUNTER) as simulator:
        port = free_port()
        file = tmp_path / "weir.yaml"
        file.write_text("policies: {balanced: {summaries: {wait: 20}}}\n")
        arguments = ["--config", str(file), "--upstream", simulator.base_url, "--window", "8192"]
        arguments += ["--summarizer", "summariser"]
        arguments += ["--store", f"sqlite+aiosqlite:///{tmp_path}/w.db"]
        async with WeirProcess(arguments, port) as process:
            talks = {
                "agent": Talk(process.client(), opening(seed=5), model="agent", seed=1),
                "chat": Talk(process.client(), opening(seed=9)[:1], model="chat", seed=2),
            }
            for kind, talk in talks.items():
                await until_the_first_batch(talk, kind)
            summaries = len(answered(simulator, "summariser"))
            await process.stop(how)
            await process.start()
            before = {kind: arrays_of(answered(simulator, kind))[-1] for kind in talks}
            for kind, talk in talks.items():
                await (talk.agent(3) if kind == "agent" else talk.chat(3))
        for kind in talks:
            seen = answered(simulator, kind)
            after = arrays_of(seen)[-3:]
            assert [s.status for s in seen] == [200] * len(seen)
            assert begins_with(after[0], before[kind]), kind
            assert batches(after) == 0, kind
        asked = [s.json()["messages"][-1]["content"] for s in answered(simulator, "summariser")]
        assert summaries == len(talks)
        assert all("> notes so far\n" in later for later in asked[summaries:]), "what was summed up was read anew"


@pytest.mark.requirement("P9", "R.60")
async def test_a_weir_that_is_killed_while_the_upstream_answers_knows_the_batch_it_has_just_made(
    tmp_path: Path,
) -> None:
    """Edits are durable before the request is forwarded, so what the client sends again gets the same cut."""
    async with serve_simulator(SimulatorSettings(window=8192), counter=COUNTER) as simulator:
        store = f"sqlite+aiosqlite:///{tmp_path}/w.db"
        arguments = ["--upstream", simulator.base_url, "--window", "8192", "--store", store]
        async with WeirProcess(arguments, free_port()) as process:
            talk = Talk(process.client(), opening()[:1])
            await talk.chat(12)
            for _ in range(MAX_TURNS):
                talk.add_question()
                simulator.forget()
                stalled = asyncio.create_task(talk.ask(extra_headers={"x-sim-fault": "stall"}))
                while not simulator.ledger:
                    await asyncio.sleep(0.01)
                edited = arrays_of(simulator.ledger)[0] != talk.messages
                await (process.stop(signal.SIGKILL) if edited else asyncio.sleep(0))
                stalled.cancel()
                await asyncio.gather(stalled, return_exceptions=True)
                if edited:
                    break
                talk.add_answer()
            assert edited
            await process.start()
            await talk.ask()
        first, again = arrays_of(simulator.ledger)
        assert again == first
        assert again != talk.messages


@SHARED
@pytest.mark.requirement("P1", "P9")
async def test_a_fork_keeps_the_edits_that_it_has_inherited_after_a_restart(deployment: Deployment) -> None:
    async with serve_simulator(SimulatorSettings(window=8192), counter=COUNTER) as simulator:
        async with deployment.serving(simulator.base_url) as target:
            talk = Talk(target.client())
            await talk.agent(18)
            fork = Talk(target.client(), talk.messages[:-8], seed=7)
            fork.add_step()
            await talk.agent(1)
            await fork.agent(4)
        before = arrays_of(simulator.answered())[-1]
        assert before != fork.messages[:-2], "the fork came before anything was edited"
        async with deployment.serving(simulator.base_url) as target:
            fork.client = target.client()
            await fork.agent(1)
        assert begins_with(arrays_of(simulator.answered())[-1], before)


@pytest.mark.requirement("A2.20", "R.60")
async def test_a_kill_right_after_a_batch_does_not_orphan_the_conversation(tmp_path: Path) -> None:
    messages = opening()
    for number in range(17):
        messages += tool_step(number)
    async with serve_simulator(SimulatorSettings(window=8192), counter=COUNTER) as simulator:
        arguments = [
            "--upstream",
            simulator.base_url,
            "--window",
            "8192",
            "--store",
            f"sqlite+aiosqlite:///{tmp_path / 'w.db'}",
        ]
        port = free_port()
        async with WeirProcess(arguments, port) as first:
            raw = await first.client().chat.completions.with_raw_response.create(
                model="sim", messages=messages, max_tokens=512, tools=TOOLS
            )
            assert "compact=" in raw.headers["x-weir-actions"]
            await first.stop(signal.SIGKILL)
        async with WeirProcess(arguments, port) as second:
            after = await second.client().chat.completions.with_raw_response.create(
                model="sim", messages=messages + tool_step(17), max_tokens=512, tools=TOOLS
            )
        assert after.headers["x-weir-conversation"] == raw.headers["x-weir-conversation"]
        before, then = (json.loads(s.body)["messages"] for s in simulator.answered()[-2:])
        assert then[: len(before)] == before
