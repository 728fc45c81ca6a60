"""An upstream that is frozen: its machine accepts connections for it, and nobody answers."""

import asyncio
import signal
import sys

import httpx
import pytest

from proxy.http import probes
from tests.functional.harness import ROOT, free_port, weir


async def ready(root: str, wanted: int) -> bool:
    """Whether ``/readyz`` answers so within a while."""
    async with httpx.AsyncClient(trust_env=False, timeout=30) as client:
        for _ in range(100):
            if (await client.get(f"{root}/readyz")).status_code == wanted:
                return True
            await asyncio.sleep(0.05)
    return False


@pytest.mark.requirement("A0.139", "P6")
async def test_readiness_knows_that_an_upstream_is_frozen_and_that_it_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "GOOD_FOR", 0.1)
    monkeypatch.setattr(probes, "PROBE_PATIENCE", 1.0)
    port = free_port()
    upstream = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "proxy", "simulate", "--port", str(port)), cwd=ROOT, stdout=asyncio.subprocess.DEVNULL
    )
    try:
        async with weir(f"http://127.0.0.1:{port}/v1", window=8192) as target:
            assert await ready(target.root, 200)
            upstream.send_signal(signal.SIGSTOP)
            assert await ready(target.root, 503)
            upstream.send_signal(signal.SIGCONT)
            assert await ready(target.root, 200)
    finally:
        upstream.kill()
        await upstream.wait()
