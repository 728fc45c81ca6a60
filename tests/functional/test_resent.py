"""A request that is sent again after a crash goes up as it went up before, whatever was learned shortly before."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.functional.harness import ALONE, COUNTER, EVICTING, Deployment, InTurns, Talk, answered, opening, ruled
from tests.functional.test_store_failures import until
from tests.upstream.app import RunningSimulator, serve_simulator
from tests.upstream.model import SimulatorSettings

pytestmark = pytest.mark.slow

STALLED = {"x-sim-fault": "stall"}


@dataclass(slots=True)
class Scaled:
    """An upstream whose vocabulary counts another number of tokens."""

    share: float

    def count(self, text: str) -> int:
        """Tokens of ``text``."""
        return round(COUNTER.count(text) * self.share)


def newest(simulator: RunningSimulator) -> object:
    """The body of the newest request that was answered."""
    return json.loads(answered(simulator)[-1].body)


@ALONE
@pytest.mark.requirement("R.60", "P9", "A0.16")
async def test_a_request_that_is_sent_again_after_a_kill_goes_up_as_before(deployment: Deployment) -> None:
    """The upstream counts less: without what it taught a minute ago the same request would be cut."""
    settings = SimulatorSettings(window=8192)
    async with (
        serve_simulator(settings, counter=Scaled(0.7)) as simulator,
        deployment.started("--upstream", simulator.base_url, "--window", "8192") as target,
    ):
        talk = Talk(target.client())
        talk.grow(6, kind="agent")
        await talk.agent(3)
        for _ in range(2):
            talk.grow(2, kind="agent")
            await talk.ask()
            before, actions = newest(simulator), talk.actions()[-1]
            await target.crash()
            await talk.ask()
            assert newest(simulator) == before
            assert talk.actions()[-1] == actions
            talk.add_step()


@asynccontextmanager
async def running(
    deployment: Deployment, folder: Path, upstream: str, rules: Mapping[str, Any]
) -> AsyncIterator[InTurns]:
    config = folder / "weir.yaml"
    config.write_text(ruled(upstream, rules))
    async with deployment.started("--config", str(config)) as target:
        yield target


async def are_written(target: InTurns, requests: int) -> bool:
    """Whether the database has so many requests: they are written behind their answers."""
    async with httpx.AsyncClient(headers={"authorization": "Bearer sk-test"}, timeout=60) as http:
        found = (await http.get(f"{target.root()}/weir/conversations")).json()
    return sum(row["requests"] for row in found["data"]) == requests


async def in_flight(talk: Talk, simulator: RunningSimulator) -> "asyncio.Task[Any]":
    """A request of the talk that has gone up, and is not answered."""
    before = len(answered(simulator))
    task = asyncio.create_task(talk.ask(extra_headers=STALLED))
    while len(answered(simulator)) == before:
        await asyncio.sleep(0.005)
    return task


async def killed(target: InTurns, waiting: "asyncio.Task[Any]") -> None:
    await target.crash()
    with contextlib.suppress(openai.APIError):
        await waiting


def last(simulator: RunningSimulator) -> list[dict[str, Any]]:
    """The messages of the newest request of the talk about axios."""
    arrays = (json.loads(each.body)["messages"] for each in reversed(answered(simulator)))
    return next(array for array in arrays if array[0] == opening()[0])


@pytest.mark.parametrize("deployment", [pytest.param(2, id="two in turns on PostgreSQL")], indirect=True)
@pytest.mark.requirement("R.60", "P9", "A0.16")
async def test_a_kill_right_after_the_answer_before_changes_nothing_about_a_request(
    tmp_path: Path, deployment: Deployment
) -> None:
    """Two requests grow by more than any before them, neither by so much that room would be made in advance."""
    async with (
        serve_simulator(SimulatorSettings(window=8192), counter=COUNTER) as simulator,
        running(
            deployment, tmp_path, simulator.base_url, {"preset": "balanced", **EVICTING, "preempt": True}
        ) as target,
    ):
        talk = Talk(target.client())
        talk.grow(6, kind="agent")
        for _ in range(4):
            talk.add_step(words=120)
            await talk.ask()
        await until(partial(are_written, target, 4), 60)
        for words in (380, 600):
            assert last(simulator) == talk.messages
            talk.add_step(words=words)
            if words == 380:
                await talk.ask()
        waiting = await in_flight(talk, simulator)
        before = last(simulator)
        assert before == talk.messages, "nothing was done with it"
        await killed(target, waiting)
        await talk.ask()
        assert last(simulator) == before
