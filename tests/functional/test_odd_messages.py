"""Messages that nobody writes, and broken models do: everybody else is answered meanwhile, and they cost little."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.functional.harness import COUNTER, WeirProcess, free_port, prose
from tests.upstream import SimulatorSettings
from tests.upstream.app import serve_simulator

pytestmark = pytest.mark.slow

WINDOW = 8192
CPU_SECONDS = 5.0
HELD_SECONDS = 2.0
"""Seconds of the processor that Weir's own process takes at most before it answers somebody else."""
TICKS = os.sysconf("SC_CLK_TCK")


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[WeirProcess]:
    async with serve_simulator(SimulatorSettings(window=WINDOW), counter=COUNTER) as simulator:
        arguments = ["--upstream", simulator.base_url, "--window", str(WINDOW)]
        arguments += ["--store", f"sqlite+aiosqlite:///{tmp_path / 'odd.db'}"]
        async with WeirProcess(arguments, free_port()) as target:
            yield target


def children_of(pid: int) -> list[int]:
    return [*map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]


def cpu_of(pid: int) -> float:
    """Seconds of the processor that a process and those that it started have used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    own = sum(map(int, fields[11:15])) / TICKS
    return own + sum(map(cpu_of, children_of(pid)))


def own_cpu_of(pid: int) -> float:
    """Seconds of the processor that a process has used itself."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / TICKS


def with_history(message: dict[str, str]) -> list[dict[str, str]]:
    said = [{"role": "user", "content": "Start."}, message]
    for n in range(40):
        said.append({"role": "user", "content": prose(150, seed=n)})
        said.append({"role": "assistant", "content": f"Done {n}."})
    return [*said, {"role": "user", "content": "Go on."}]


def thousands_of_calls(number: int) -> list[dict[str, Any]]:
    calls = [
        {"id": f"c{n}", "type": "function", "function": {"name": "look", "arguments": f'{{"at": "c{n}"}}'}}
        for n in range(number)
    ]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "nothing"} for call in reversed(calls)]
    return [
        {"role": "user", "content": "Start."},
        {"role": "assistant", "content": None, "tool_calls": calls},
        *results,
        {"role": "assistant", "content": "Done."},
        {"role": "user", "content": "Go on."},
    ]


CASES: dict[str, list[dict[str, Any]]] = {
    "a run of exclamation marks": with_history({"role": "assistant", "content": f"Sure {'!' * 40_000}"}),
    "a run of blanks behind a full stop": with_history({"role": "assistant", "content": f"Sure.\u00a0{' ' * 40_000}"}),
    "short lines": [
        {"role": "user", "content": "Here is my list."},
        {"role": "assistant", "content": "Yes?"},
        {"role": "user", "content": "\n".join(f"p{n}" for n in range(6_250))},
        {"role": "assistant", "content": "Thanks."},
        {"role": "user", "content": "What next?"},
    ],
    "parts": [
        {"role": "user", "content": "Here is my list."},
        {"role": "assistant", "content": "Yes?"},
        {"role": "user", "content": [{"type": "text", "text": f"p{n}"} for n in range(20_000)]},
        {"role": "assistant", "content": "Thanks."},
        {"role": "user", "content": "What next?"},
    ],
    "thousands of calls": thousands_of_calls(4_000),
}


@pytest.mark.requirement("D21")
@pytest.mark.parametrize("case", CASES)
async def test_an_odd_message_costs_little_and_holds_nobody_up(case: str, served: WeirProcess) -> None:
    assert served.process is not None
    before = cpu_of(served.process.pid)
    body = {"model": "sim", "max_tokens": 20, "messages": CASES[case]}
    async with httpx.AsyncClient(timeout=60, headers={"authorization": "Bearer sk-test"}) as client:
        asked = asyncio.create_task(client.post(f"{served.base_url}/chat/completions", json=body))
        while not asked.done():
            own = own_cpu_of(served.process.pid)
            assert (await client.get(f"{served.root}/healthz")).status_code == 200
            assert own_cpu_of(served.process.pid) - own < HELD_SECONDS
            await asyncio.wait([asked], timeout=0.05)
        answer = await asked
    assert answer.status_code == 200
    assert answer.headers["x-weir-actions"] != "none"
    assert "degraded" not in answer.headers["x-weir-actions"]
    assert cpu_of(served.process.pid) - before < CPU_SECONDS


@pytest.mark.requirement("S.26")
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
async def test_a_process_that_plans_ends_with_weir_without_a_word(how: signal.Signals, served: WeirProcess) -> None:
    assert served.process is not None
    said = [{"role": ("user", "assistant")[n % 2], "content": prose(3_000, seed=n)} for n in range(28)]
    body = {"model": "sim", "max_tokens": 20, "messages": [*said, {"role": "user", "content": "Go on."}]}
    async with httpx.AsyncClient(timeout=60, headers={"authorization": "Bearer sk-test"}) as client:
        asked = asyncio.create_task(client.post(f"{served.base_url}/chat/completions", json=body))
        while not children_of(served.process.pid):
            await asyncio.wait([asked], timeout=0.01)
        await served.stop(how)
        await asyncio.gather(asked, return_exceptions=True)
    assert "Traceback" not in "\n".join(served.log)
