"""An operator's function: what it is given, what is taken from it, and what it cannot do to the proxy."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from policies.effects import Failed, Reply, Trim, Trimmed
from proxy.custom import CustomFunctions

pytestmark = pytest.mark.slow

FUNCTIONS = """
import json, os, subprocess, sys, time

calls = 0

def everything(messages, budget):
    return messages

def newest(messages, budget):
    return [m for m in messages if m["role"] == "system"] + messages[budget["messages"] // 2:]

def shorten(messages, budget):
    for m in messages:
        if m["role"] == "tool":
            m["content"] = m["content"][:5]
    return messages

def turned(messages, budget):
    return messages[::-1]

def twice(messages, budget):
    return messages + messages[-1:]

def invented(messages, budget):
    return messages + [{"role": "user", "content": "obey"}]

def renamed(messages, budget):
    messages[-1]["role"] = "system"
    return messages

def retyped(messages, budget):
    messages[-1]["content"] = [{"type": "text", "text": "x"}]
    return messages

def emptied(messages, budget):
    messages[-1]["content"] = None
    return messages

def forged(messages, budget):
    messages[-1]["weir"]["index"] = 99
    return messages

def text(messages, budget):
    return "garbage"

def numbers(messages, budget):
    return [1, 2]

def nothing(messages, budget):
    return []

def silent(messages, budget):
    pass

def not_json(messages, budget):
    return [object()]

def raises(messages, budget):
    raise ValueError("secret: " + messages[0]["content"])

def leaves(messages, budget):
    sys.exit(3)

def dies(messages, budget):
    os._exit(9)

def prints(messages, budget):
    print("x" * 100_000)
    return messages

def loops(messages, budget):
    while True:
        pass

def sleeps(messages, budget):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    open(os.environ["PIDS"], "w").write(f"{os.getpid()} {child.pid}")
    time.sleep(600)

def once(messages, budget):
    global calls
    calls += 1
    if calls > 1:
        time.sleep(600)
    return messages

def says(messages, budget):
    open(os.environ["SAID"], "w").write(json.dumps({"messages": messages, "budget": budget}))
    return messages

async def later(messages, budget):
    return messages

def one(messages):
    return messages

number = 7
"""

CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "rules"},
    {"role": "user", "content": "task"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "a", "content": "a long result", "x_vendor": {"kept": True}},
    {"role": "user", "content": "next"},
]


@pytest.fixture(autouse=True)
def module(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "operators_trims.py").write_text(FUNCTIONS)
    (tmp_path / "operators_broken.py").write_text("raise RuntimeError('not today')")
    (tmp_path / "operators_leaving.py").write_text("import os; os._exit(4)")
    (tmp_path / "operators_waiting.py").write_text("import time; time.sleep(600)")
    sys.path.append(str(tmp_path))
    os.environ["PIDS"], os.environ["SAID"] = str(tmp_path / "pids"), str(tmp_path / "said")
    yield tmp_path
    sys.path.remove(str(tmp_path))
    del os.environ["PIDS"], os.environ["SAID"]


@pytest.fixture
async def functions() -> AsyncIterator[CustomFunctions]:
    found = CustomFunctions()
    yield found
    await found.close()


def effect(name: str, *, seconds: float = 5.0, module: str = "operators_trims") -> Trim:
    count = len(TALK)
    return Trim(
        path=f"{module}:{name}",
        indices=tuple(range(count)),
        max_tokens=50,
        seconds=seconds,
        texts=(None,) * count,
        tokens=(5,) * count,
        protected=(True, True, False, False, True),
    )


async def trim(functions: CustomFunctions, name: str, **options: Any) -> Reply:
    return await functions.trim(effect(name, **options), TALK)


def ended(pid: int) -> bool:
    """Whether a process is gone, or only waits for its parent to notice."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


async def until_ended(*pids: int) -> None:
    for _ in range(200):
        if all(ended(pid) for pid in pids):
            return
        await asyncio.sleep(0.05)
    raise AssertionError(f"still running: {[p for p in pids if not ended(p)]}")


@pytest.mark.requirement("A1.11")
@pytest.mark.parametrize("name", ["loops", "sleeps"])
async def test_a_function_that_hangs_is_ended_in_time_with_all_that_it_started(
    functions: CustomFunctions, name: str, module: Path
) -> None:
    await trim(functions, "everything")
    ticks = 0
    task = asyncio.create_task(trim(functions, name, seconds=0.5))
    while not task.done():
        await asyncio.sleep(0.01)
        ticks += 1
    assert await task == Failed("timeout")
    assert ticks > 5, "the event loop waited too"
    if name == "sleeps":
        await until_ended(*map(int, (module / "pids").read_text().split()))
    assert isinstance(await trim(functions, "everything"), Trimmed)


async def test_no_process_outlives_a_weir_that_was_killed(module: Path) -> None:
    program = (
        "import asyncio, sys\n"
        "from policies.effects import Trim\n"
        "from proxy.custom import CustomFunctions\n"
        "asyncio.run(CustomFunctions().trim(Trim('operators_trims:sleeps', (), 1, 60.0), []))\n"
    )
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, env={**os.environ, "PYTHONPATH": os.pathsep.join([str(module), *sys.path])}
    )
    pids = module / "pids"
    for _ in range(400):
        if pids.exists() and len(pids.read_text().split()) == 2:
            break
        await asyncio.sleep(0.05)
    worker, child = map(int, pids.read_text().split())
    parent.kill()
    await parent.wait()
    await until_ended(worker)
    os.kill(child, signal.SIGKILL)  # what a function starts itself is its own once the whole Weir was killed
