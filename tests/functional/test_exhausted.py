"""A process that has little memory answers what it can and refuses the rest in words."""

import asyncio
import io
import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from tests.functional.harness import COUNTER, WeirProcess, free_port, opening
from tests.upstream.app import serve_simulator
from tests.upstream.model import SimulatorSettings

pytestmark = pytest.mark.slow


async def post(http: aiohttp.ClientSession, target: WeirProcess, body: bytes, key: str = "sk-test") -> int | str:
    """The status of an answer, or what became of the connection."""
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    try:
        async with http.post(f"{target.base_url}/chat/completions", data=io.BytesIO(body), headers=headers) as answer:
            await answer.read()
            assert answer.status in (200, 400, 413) or "retry-after" in answer.headers
            return answer.status
    except aiohttp.ClientError as error:
        return type(error).__name__


def asking(content: str = "Hello.") -> bytes:
    messages = [*opening(), {"role": "user", "content": content}]
    return json.dumps({"model": "sim", "messages": messages, "max_tokens": 64}).encode()


@asynccontextmanager
async def unpooled() -> AsyncIterator[aiohttp.ClientSession]:
    """A client whose connections are gone when it ends: a refused body may leave one that is still closing."""
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(60)) as http:
        yield http
    await asyncio.sleep(0.25)


@pytest.mark.requirement("R.28")
async def test_with_little_memory_bodies_wait_or_are_refused_and_the_process_lives(tmp_path: Path) -> None:
    config = tmp_path / "weir.yaml"
    config.write_text("limits: {bytes_in_flight: 16MiB, bytes_in_flight_per_key: 16MiB}\n")
    async with serve_simulator(SimulatorSettings(ledger_bytes=1024), counter=COUNTER) as simulator:
        arguments = ["--config", str(config), "--upstream", simulator.base_url, "--window", "8192"]
        arguments += ["--store", f"sqlite+aiosqlite:///{tmp_path}/w.db"]
        async with WeirProcess(arguments, free_port(), within=("prlimit", "--as=2000000000")) as target:
            body = asking("data:image/png;base64," + "A" * 4_000_000)
            async with unpooled() as http:
                found = Counter(await asyncio.gather(*(post(http, target, body, f"sk-{n}") for n in range(8))))
                assert set(found) <= {200, 400, 413, 429, 503}
                assert await post(http, target, asking()) == 200
            assert target.process is not None
            assert target.process.returncode is None
