"""More connections than there are file descriptors for are answered 503, and the process recovers."""

import asyncio
import contextlib
import sys
from pathlib import Path

import pytest

from tests.functional.harness import ROOT, free_port

pytestmark = pytest.mark.slow

LIMITED = 'ulimit -n 128; exec "$@"'
REQUEST = b"GET /healthz HTTP/1.1\r\nHost: weir\r\nConnection: close\r\n\r\n"


async def asked(port: int) -> bytes:
    """The answer on a new connection; empty where there is none."""
    with contextlib.suppress(OSError):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(REQUEST)
            return await asyncio.wait_for(reader.read(), 60)
        finally:
            writer.close()
    return b""


@pytest.mark.requirement("R.27")
async def test_connections_for_which_there_are_no_descriptors_get_503_and_the_process_recovers(tmp_path: Path) -> None:
    port = free_port()
    arguments = ["--port", str(port), "--upstream", "http://127.0.0.1:9/v1", "--store"]
    process = await asyncio.create_subprocess_exec(
        "sh", "-c", LIMITED, "sh", sys.executable, "-m", "proxy", "serve", *arguments,
        f"sqlite+aiosqlite:///{tmp_path / 'w.db'}", cwd=ROOT, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    open_: list[asyncio.StreamWriter] = []
    try:
        async with asyncio.timeout(60):
            while not (await asked(port)).startswith(b"HTTP/1.1 200"):
                assert process.returncode is None
                await asyncio.sleep(0.05)
        for _ in range(40):
            open_.append((await asyncio.open_connection("127.0.0.1", port))[1])
        assert (await asked(port)).startswith(b"HTTP/1.1 503")
        assert process.returncode is None
        for writer in open_:
            writer.close()
        async with asyncio.timeout(60):
            while not (await asked(port)).startswith(b"HTTP/1.1 200"):
                await asyncio.sleep(0.05)
    finally:
        for writer in open_:
            writer.close()
        if process.returncode is None:
            process.terminate()
        await asyncio.wait_for(process.wait(), 60)
