"""Nobody waits for the log of a real process."""

import asyncio
import contextlib
import fcntl
import os
import select
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from tests.functional.canaries import SECRETS
from tests.functional.harness import ROOT, WeirProcess, free_port
from tests.functional.scripted import Asked, Reply, as_asked, completion, scripted

pytestmark = pytest.mark.slow

OTLP_QUERY = "canary7f3a-otlp-query-77"
CONFIG = """
upstreams: {{main: {{base_url: "{url}", api_key: "${{UPSTREAM_KEY}}", timeout: {{connect: 1s, first_byte: 500ms, idle: 500ms}}}}}}
auth: {{mode: keys}}
keys: [{{name: app, secret: "{client}"}}]
window: 8192
store: {{url: "sqlite+aiosqlite:///{store}"}}
limits: {{grace: 1s}}
telemetry: {{otlp_endpoint: "{url}?api_key={otlp_query}", alerts: {{webhook: "{url}/hook?token={webhook_query}", secret: "{webhook}"}}}}
"""
SET_PIPE = 1031  # F_SETPIPE_SZ of Linux


def configured(folder: Path, url: str) -> Path:
    path = folder / "weir.yaml"
    path.write_text(CONFIG.format(url=url, store=folder / "w.db", otlp_query=OTLP_QUERY, **SECRETS))
    return path


def answer_and_collect(asked: Asked) -> Reply:
    """A model, and a collector whose connections break."""
    return as_asked(asked, completion("yes")) if asked.target.startswith("/v1/chat") else Reply(cut=True)


@asynccontextmanager
async def process_with(folder: Path, url: str, stream: int) -> AsyncIterator[WeirProcess]:
    """A Weir whose output goes to a descriptor that takes nothing."""
    weir = WeirProcess(["--config", str(configured(folder, url)), "--log-format", "json"], free_port())
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("OPENAI_", "WEIR_", "OTEL_"))}
    weir.process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "proxy", "serve", "--port", str(weir.port), *weir.arguments),
        cwd=ROOT,
        env={**clean, "WEIR_DRAIN": "0", "UPSTREAM_KEY": SECRETS["upstream"]},
        stdout=stream,
        stderr=stream,
    )
    try:
        for _ in range(400):
            assert weir.process.returncode is None
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection("127.0.0.1", weir.port)
                writer.close()
                break
            await asyncio.sleep(0.05)
        yield weir
    finally:
        if weir.process.returncode is None:
            weir.process.kill()
            await weir.process.wait()


@pytest.mark.requirement("R.78", "A3.14")
@pytest.mark.parametrize("kind", ["blocked", "full"])
async def test_a_log_that_takes_nothing_holds_up_no_request_and_not_the_end(tmp_path: Path, kind: str) -> None:
    """A pipe that nobody reads, and a disk that is full."""
    if kind == "blocked":
        reading, stream = os.pipe()
        fcntl.fcntl(stream, SET_PIPE, 4_096)
    else:
        reading, stream = -1, os.open("/dev/full", os.O_WRONLY)
    try:
        async with (
            scripted(answer_and_collect) as upstream,
            process_with(tmp_path, upstream.base_url, stream) as weir,
            httpx.AsyncClient(timeout=20) as http,
        ):
            for number in range(60):
                headers = {"authorization": f"Bearer {SECRETS['client']}"}
                body = {"model": "m", "messages": [{"role": "user", "content": f"{number}"}], "stream": number % 2 == 0}
                answer = await http.post(f"{weir.base_url}/chat/completions", json=body, headers=headers)
                assert answer.status_code == 200
            if kind == "blocked":
                assert not select.select([], [stream], [], 0)[1], "the pipe is full"
            assert weir.process is not None
            weir.tell(signal.SIGTERM)
            assert await asyncio.wait_for(weir.process.wait(), 60) == 0
    finally:
        os.close(stream)
        if reading >= 0:
            os.close(reading)
