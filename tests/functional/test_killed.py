"""A whole Weir, killed again and again while it compacts: what it has shown is there afterwards, whole."""

import asyncio
import json
import random
import signal
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from policies.memory.checkpoint import Checkpoint
from proxy.store import Store
from tests.functional.harness import COUNTER, Talk, WeirProcess, answered, free_port, opening
from tests.profile import tried
from tests.upstream import SimulatorSettings
from tests.upstream.app import serve_simulator

pytestmark = pytest.mark.slow

KILLS = tried(4, 200)
MAX_DELAY = 1.6
KILLS_A_TALK = 8
WINDOW = 8192


@dataclass(slots=True)
class Shown:
    """What Weir has said of a conversation's checkpoints: the state of each version, by its number."""

    name: str
    states: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    answered: asyncio.Event = field(default_factory=asyncio.Event)


async def talk_on(talk: Talk, root: str, shown: Shown) -> None:
    """Go on with a conversation until Weir is gone, and look at its newest checkpoint after each answer."""
    header = {"x-weir-conversation": shown.name}
    async with httpx.AsyncClient(timeout=10, headers={"authorization": "Bearer sk-test"}) as client:
        try:
            while True:
                if talk.messages[-1]["role"] != "user":
                    talk.add_question()
                await talk.ask(extra_headers=header)
                talk.add_answer()
                shown.answered.set()
                found = await client.get(f"{root}/weir/conversations/{shown.name}/checkpoint")
                if found.status_code == 200:
                    told = found.json()
                    shown.states[told["version"]] = told["state"]
        except (openai.APIConnectionError, httpx.HTTPError):
            return


async def stored_states(database: Path) -> dict[tuple[str, str, int], Mapping[str, Any]]:
    """Every checkpoint of a database that nobody has open, which is sound and holds only whole ones."""
    with closing(sqlite3.connect(database)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        rows = connection.execute("SELECT count(*) FROM checkpoints").fetchone()[0]
    store = await Store.open(f"sqlite+aiosqlite:///{database}", read_only=True)
    found, count = {}, 0
    for conversation in await store.conversations(None, limit=1000):
        for each in await store.checkpoints(conversation):
            Checkpoint.from_json(each.body)
            found[conversation.name, each.branch, each.version] = json.loads(each.body)
            count += 1
    assert (count, store.damaged) == (rows, 0)
    await store.close()
    return found


@pytest.mark.requirement("A0.112", "R.60", "P9")
@pytest.mark.timeout(60 + 8 * KILLS)
async def test_a_weir_that_is_killed_at_any_moment_has_every_checkpoint_that_it_showed(tmp_path: Path) -> None:
    rng, database = random.Random(20), tmp_path / "w.db"
    settings = SimulatorSettings(window=WINDOW, summary_model="summariser", summary_seconds=0.05, latency=0.01)
    everything: list[Shown] = []
    async with serve_simulator(settings, counter=COUNTER) as simulator:
        arguments = ["--upstream", simulator.base_url, "--window", str(WINDOW), "--summarizer", "summariser"]
        arguments += ["--store", f"sqlite+aiosqlite:///{database}"]
        process = WeirProcess(arguments, free_port())
        client = process.client(timeout=10)
        talk = Talk(client)
        try:
            for number in range(KILLS):
                if number % KILLS_A_TALK == 0:
                    talk = Talk(client, opening(seed=number + 1), seed=number)
                    talk.grow(12)
                    everything.append(Shown(f"killed-{number}"))
                await process.start()
                going = asyncio.create_task(talk_on(talk, process.root, everything[-1]))
                await everything[-1].answered.wait()
                await asyncio.sleep(rng.uniform(0.0, MAX_DELAY))
                await process.stop(signal.SIGKILL)
                everything[-1].answered.clear()
                await going
                await stored_states(database)
        finally:
            await process.stop()
            await client.close()
        served, asked = answered(simulator), answered(simulator, "summariser")
    states = await stored_states(database)
    for shown in everything:
        for version, state in shown.states.items():
            kept = [s for (name, _, v), s in states.items() if name == shown.name and v == version]
            assert state in kept, (shown.name, version)
    store = await Store.open(f"sqlite+aiosqlite:///{database}")
    try:
        chains = await store.verify()
        assert [chain.broken for chain in chains] == [None] * len(chains)
        assert sum(chain.last for chain in chains) >= sum(len(shown.states) for shown in everything)
    finally:
        await store.close()
    assert {seen.status for seen in served} == {200}, "an upstream saw more than its window"
    assert sum(len(shown.states) for shown in everything) >= KILLS // 4
    assert asked
