"""Work that nobody waits for any more ends: a client gives up while its history is read, the process is to stop."""

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from tests.functional.harness import COUNTER, WeirProcess, free_port, prose
from tests.upstream import SimulatorSettings
from tests.upstream.app import serve_simulator

pytestmark = pytest.mark.slow

WORDS = prose(400, seed=1).split()
GRACE = 0.2
STARTED = 0.9  # seconds of a processor: more than starting takes


def history(messages: int, *, seed: int) -> bytes:
    """A request with a history never seen, 3 KB of words a message."""
    said = [
        " ".join(f"{word}{seed}{n}" if w % 5 == 0 else word for w, word in enumerate(WORDS)) for n in range(messages)
    ]
    roles = ("user", "assistant")
    chat = [{"role": roles[n % 2], "content": f"{text}. That was {n}."} for n, text in enumerate(said)]
    return json.dumps({"model": "sim", "messages": [*chat, {"role": "user", "content": "Go on."}]}).encode()


def below(process: int) -> list[int]:
    """The processes that a process has started and that have not ended."""
    found: list[int] = []
    for task in Path(f"/proc/{process}/task").iterdir():
        with contextlib.suppress(FileNotFoundError):  # a thread may end meanwhile
            found += map(int, (task / "children").read_text().split())
    return found


def seconds_of(process: int) -> float:
    """The processor time that a process has taken, and all that it has started."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / 100 + sum(map(seconds_of, below(process)))


@asynccontextmanager
async def started(folder: Path, *, grace: float = 30) -> AsyncIterator[tuple[WeirProcess, httpx.AsyncClient, int]]:
    async with serve_simulator(SimulatorSettings(window=4_000_000), counter=COUNTER) as simulator:
        (folder / "weir.yaml").write_text(
            f"upstreams: {{sim: {{kind: openai, base_url: '{simulator.base_url}'}}}}\n"
            f"store: {{url: 'sqlite+aiosqlite:///{folder / 'w.db'}'}}\nlimits: {{grace: {grace}}}\n"
            "models: [{match: '*', window: 131072, tokenizer: o200k_base}]\n"
        )
        async with (
            WeirProcess(["--config", str(folder / "weir.yaml")], free_port()) as target,
            httpx.AsyncClient(base_url=target.base_url, timeout=60, trust_env=False) as client,
        ):
            assert target.process is not None
            yield target, client, target.process.pid


async def until_it_plans(process: int, before: float, seconds: float) -> None:
    """Return once the process has worked so long on a request."""
    while seconds_of(process) - before < seconds:
        await asyncio.sleep(0.01)


async def until_idle(process: int) -> None:
    """Return once none of its threads, nor of those that it has started, has wanted to run for a fifth of a second, however busy the machine is."""
    seen = 0
    while seen < 20:
        stats = list[str]()
        for place in [p for each in (process, *below(process)) for p in Path(f"/proc/{each}/task").glob("*/stat")]:
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # what was listed may have ended
                stats.append(place.read_text())
        seen = seen + 1 if all(stat.rpartition(")")[2].split()[0] == "S" for stat in stats) else 0
        await asyncio.sleep(0.01)


@pytest.mark.requirement("P5")
async def test_the_plan_of_a_client_that_gave_up_takes_no_more_time(tmp_path: Path) -> None:
    async with started(tmp_path) as (_, client, process):
        before = seconds_of(process)
        assert (await client.post("/chat/completions", content=history(250, seed=1))).status_code == 200
        whole = seconds_of(process) - before
        await until_idle(process)
        before = seconds_of(process)
        asking = asyncio.create_task(client.post("/chat/completions", content=history(250, seed=2)))
        await until_it_plans(process, before, whole / 4)
        given_up = seconds_of(process)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await until_idle(process)
        assert seconds_of(process) - given_up < whole / 8


@pytest.mark.requirement("R.73", "R.74")
async def test_a_process_that_is_to_stop_does_not_wait_for_a_plan_longer_than_it_promised(tmp_path: Path) -> None:
    async with started(tmp_path, grace=GRACE) as (target, client, process):
        before = seconds_of(process)
        asking = asyncio.create_task(client.post("/chat/completions", content=history(4_000, seed=3)))
        await until_it_plans(process, before, 1.5)
        assert target.process is not None
        target.process.terminate()
        async with asyncio.timeout(12):  # usually three seconds; the plan takes twenty
            answer = await asking
            assert await target.process.wait() == 0
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "shutting_down")


async def until_a_process_plans(process: int) -> int:
    """The process below that plans, once it has worked for a moment."""
    async with asyncio.timeout(60):
        while not (found := [each for each in below(process) if seconds_of(each) > STARTED]):
            await asyncio.sleep(0.01)
    return found[0]


@pytest.mark.requirement("S.26", "P6")
async def test_a_plan_whose_process_is_killed_costs_its_client_nothing(tmp_path: Path) -> None:
    async with started(tmp_path) as (_, client, process):
        asking = asyncio.create_task(client.post("/chat/completions", content=history(500, seed=4)))
        killed = await until_a_process_plans(process)
        os.kill(killed, signal.SIGKILL)
        answer = await asking
        assert answer.status_code == 200
        assert (answer.headers["x-weir-actions"], "x-weir-degraded" in answer.headers) == ("compact=1", False)
        assert below(process) != [killed]


@pytest.mark.requirement("S.26", "R.73")
async def test_no_process_that_plans_outlives_a_weir_that_was_killed(tmp_path: Path) -> None:
    async with started(tmp_path) as (target, client, process):
        asking = asyncio.create_task(client.post("/chat/completions", content=history(1_000, seed=5)))
        planning = await until_a_process_plans(process)
        assert target.process is not None
        target.process.kill()
        await asyncio.gather(asking, return_exceptions=True)
        async with asyncio.timeout(30):
            while Path(f"/proc/{planning}").exists():
                await asyncio.sleep(0.01)
