"""The process as an operator sees it: reload, stop, keys made while it runs."""

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import aiohttp
import httpx
import openai
import pytest

from tests.functional.harness import COUNTER, ROOT, WeirProcess, free_port, opening
from tests.upstream.app import serve_simulator
from tests.upstream.model import SimulatorSettings

pytestmark = pytest.mark.slow

CONFIG = """
upstreams: {{main: {{base_url: "{upstream}"}}}}
window: 8192
default_policy: {policy}
store: {{url: "sqlite+aiosqlite:///{store}"}}
limits: {{grace: 1s}}
"""


def configured(tmp_path: Path, upstream: str, policy: str = "balanced") -> Path:
    path = tmp_path / "weir.yaml"
    path.write_text(CONFIG.format(upstream=upstream, policy=policy, store=tmp_path / "w.db"))
    return path


@pytest.mark.requirement("R.73")
async def test_a_stream_that_outlives_the_grace_ends_with_an_error_event(tmp_path: Path) -> None:
    async with serve_simulator(SimulatorSettings(chunk_delay=0.4), counter=COUNTER) as simulator:
        path = configured(tmp_path, simulator.base_url)
        body = {"model": "sim", "messages": opening(), "stream": True, "max_tokens": 60}
        async with WeirProcess(["--config", str(path)], free_port()) as weir, aiohttp.ClientSession() as session:
            received = b""
            async with session.post(f"{weir.base_url}/chat/completions", json=body) as answer:
                try:
                    async for chunk in answer.content.iter_any():
                        if not received and weir.process is not None:
                            weir.tell(signal.SIGTERM)
                        received += chunk
                except aiohttp.ClientPayloadError:
                    pass
            assert b"[DONE]" not in received
            last = received.strip().split(b"\n\n")[-1]
            assert json.loads(last.removeprefix(b"data: "))["error"]["weir"] == {"code": "shutting_down"}
            assert weir.process is not None
            assert await weir.process.wait() == 0


@pytest.mark.requirement("P7", "S.2")
async def test_a_key_made_while_weir_runs_is_accepted_and_a_revoked_one_is_not(tmp_path: Path) -> None:
    async with serve_simulator(SimulatorSettings(), counter=COUNTER) as simulator:
        path = configured(tmp_path, simulator.base_url)
        path.write_text(path.read_text() + "auth: {mode: keys}\n")
        async with WeirProcess(["--config", str(path)], free_port()) as weir:
            with pytest.raises(openai.AuthenticationError):
                await weir.client("sk-nobody").models.list()
            secret = await command("keys", "create", "--name", "bot", "--config", str(path))
            await asyncio.sleep(2.5)
            assert (await weir.client(secret).models.list()).data
            assert simulator.ledger[-1].header("authorization") is None
            await command("keys", "revoke", "bot", "--config", str(path))
            await asyncio.sleep(2.5)
            with pytest.raises(openai.AuthenticationError):
                await weir.client(secret).models.list()
        assert secret.encode() not in b"".join(p.read_bytes() for p in tmp_path.glob("w.db*"))


async def command(*arguments: str) -> str:
    """What a weir command prints on its first line."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "proxy",
        *arguments,
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    assert process.returncode == 0, err
    return out.decode().splitlines()[0].strip() if out else ""


async def until_draining(weir: WeirProcess, http: httpx.AsyncClient) -> None:
    """Return once readiness fails, or nothing listens any more."""
    with suppress(httpx.TransportError):
        while (await http.get(f"{weir.root}/readyz")).status_code == 200:
            await asyncio.sleep(0.02)


@asynccontextmanager
async def draining(folder: Path, seconds: float, *signals: signal.Signals) -> AsyncIterator[WeirProcess]:
    """A Weir that was sent these signals while it was ready."""
    async with serve_simulator(SimulatorSettings(), counter=COUNTER) as simulator:
        path = configured(folder, simulator.base_url)
        weir = WeirProcess(["--config", str(path)], free_port(), env={"WEIR_DRAIN": str(seconds)})
        async with weir, httpx.AsyncClient() as http:
            assert (await http.get(f"{weir.root}/readyz")).status_code == 200
            for each in signals:
                weir.tell(each)
                # a second signal of the same number is lost while the first is pending: readiness shows its arrival
                await until_draining(weir, http)
            yield weir


@pytest.mark.requirement("R.73")
async def test_after_sigterm_readiness_fails_while_everything_is_still_taken(tmp_path: Path) -> None:
    async with draining(tmp_path, 3.0, signal.SIGTERM) as weir, httpx.AsyncClient() as http:
        while (ready := await http.get(f"{weir.root}/readyz")).status_code == 200:
            await asyncio.sleep(0.02)
        assert (ready.status_code, ready.json()["status"]) == (503, "draining")
        for _ in range(2):
            async with httpx.AsyncClient() as another:
                body = {"model": "sim", "messages": opening()}
                answer = await another.post(f"{weir.base_url}/chat/completions", json=body)
                assert (answer.status_code, answer.headers["connection"]) == (200, "close")
        assert weir.process is not None
        assert await asyncio.wait_for(weir.process.wait(), 60) == 0
