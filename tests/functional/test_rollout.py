"""Two replicas behind a real nginx: a rollout under load loses nothing, pages open, and events arrive as they are sent."""

import asyncio
import contextlib
import os
import shutil
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.functional.harness import COUNTER, ROOT, WeirProcess, free_port
from tests.upstream.app import serve_simulator
from tests.upstream.model import SimulatorSettings

pytestmark = pytest.mark.slow

CLIENTS, REQUESTS = 16, 1_000
SITE = (ROOT / "deploy" / "compose" / "nginx.conf").read_text()
MAIN = """
daemon off;
pid {folder}/nginx.pid;
events {{}}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    {site}
}}
"""


def nginx() -> str:
    """The program of the distribution's package."""
    found = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin")
    if found is None:
        assert not os.environ.get("CI"), "nginx is missing: apt-get install nginx"
        pytest.skip("nginx is missing: apt-get install nginx")
    return found


@asynccontextmanager
async def balanced(replicas: list[WeirProcess], folder: Path, *, ready: str = "/v1/models") -> AsyncIterator[int]:
    """The port of an nginx in front of the replicas, configured as deploy/compose has it."""
    port = free_port()
    site = SITE.replace("listen 8400", f"listen 127.0.0.1:{port}")
    for name, replica in zip(("weir-a", "weir-b"), replicas, strict=True):
        site = site.replace(f"{name}:8400", f"127.0.0.1:{replica.port}")
    path = folder / "nginx.conf"
    path.write_text(MAIN.format(folder=folder, site=site))
    process = await asyncio.create_subprocess_exec(nginx(), "-e", str(folder / "error.log"), "-c", str(path))
    try:
        await until_ready(port, ready)
        yield port
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGQUIT)
        await process.wait()


async def until_ready(port: int, path: str = "/readyz") -> None:
    """Returns when what listens on the port answers 200."""
    async with httpx.AsyncClient() as http:
        for _ in range(600):
            with contextlib.suppress(httpx.TransportError):
                if (await http.get(f"http://127.0.0.1:{port}{path}")).status_code == 200:
                    return
            await asyncio.sleep(0.05)
    raise AssertionError(f"nothing is ready on {port}")


class Load:
    """Clients that ask one request after the other until they are stopped; what went wrong is kept."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}/v1"
        self.seen: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.ends = False

    async def run(self, number: int) -> None:
        async with openai.AsyncOpenAI(base_url=self._url, api_key=f"sk-{number}", max_retries=0) as client:
            turn = 0
            while not self.ends or sum(self.seen.values()) < REQUESTS:
                turn += 1
                said: list[Any] = [{"role": "user", "content": f"client {number}, turn {turn}"}]
                try:
                    await (self._stream if turn % 4 == 0 else self._ask)(client, said)
                except openai.OpenAIError as error:
                    self.wrong.append(f"{type(error).__name__}: {error}"[:200])

    async def _ask(self, client: openai.AsyncOpenAI, said: list[Any]) -> None:
        answer = await client.chat.completions.create(model="sim", messages=said)
        assert answer.choices[0].message.content
        self.seen["whole"] += 1

    async def _stream(self, client: openai.AsyncOpenAI, said: list[Any]) -> None:
        ended = False
        async for chunk in await client.chat.completions.create(model="sim", messages=said, stream=True):
            ended |= any(choice.finish_reason for choice in chunk.choices)
        if not ended:
            self.wrong.append("a stream ended without a finish_reason")
        self.seen["stream"] += 1


@pytest.mark.timeout(180)
async def test_a_restart_of_each_replica_loses_no_request_and_no_stream(postgres_url: str, tmp_path: Path) -> None:
    async with serve_simulator(SimulatorSettings(window=8192), counter=COUNTER) as simulator:
        arguments = ["--upstream", simulator.base_url, "--window", "8192", "--store", postgres_url]
        own = {"WEIR_DRAIN": ""}  # the default is what is tried
        async with contextlib.AsyncExitStack() as stack:
            replicas = [await stack.enter_async_context(WeirProcess(arguments, free_port(), own)) for _ in "ab"]
            load = Load(await stack.enter_async_context(balanced(replicas, tmp_path)))
            clients = [asyncio.create_task(load.run(number)) for number in range(CLIENTS)]
            await asyncio.sleep(1)
            for replica in replicas:
                await replica.stop()
                await replica.start()
                await until_ready(replica.port)
            await asyncio.sleep(1)
            load.ends = True
            await asyncio.gather(*clients)
        assert load.wrong == []
        assert sum(load.seen.values()) >= REQUESTS
        assert load.seen["stream"] > REQUESTS // 5


async def test_sign_in_works_behind_nginx_and_events_arrive_as_they_are_sent(postgres_url: str, tmp_path: Path) -> None:
    """Each page may come from another replica, and the site is what a plain nginx makes of it."""
    settings = SimulatorSettings(window=8192, chunk_delay=0.2)
    async with serve_simulator(settings, counter=COUNTER) as simulator:
        arguments = ["--upstream", simulator.base_url, "--window", "8192", "--store", postgres_url]
        own = {"WEIR_ADMIN_TOKEN": "admin-token-0001", "WEIR_KEYS": "team=sk-team-0001"}
        async with contextlib.AsyncExitStack() as stack:
            replicas = [await stack.enter_async_context(WeirProcess(arguments, free_port(), own)) for _ in "ab"]
            port = await stack.enter_async_context(balanced(replicas, tmp_path, ready="/weir/ui/login"))
            site = httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", follow_redirects=True, timeout=20)
            http = await stack.enter_async_context(site)
            page = await http.get("/weir/ui")
            token = page.text.partition('name="token" value="')[2].partition('"')[0]
            form = {"token": token, "key": "sk-team-0001"}
            signed = await http.post("/weir/ui/login", data=form, headers={"origin": f"http://127.0.0.1:{port}"})
            assert signed.status_code == 200
            for _ in range(4):  # nginx goes from one replica to the other
                assert "Overview" in (await http.get("/weir/ui")).text
            live = asyncio.create_task(first_event(http))
            await asyncio.sleep(0.5)
            client = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="sk-team-0001", max_retries=0)
            said: list[Any] = [{"role": "user", "content": "Count to twelve in words, slowly."}]
            arrived = []
            async for _ in await client.chat.completions.create(model="sim", messages=said, stream=True):
                arrived.append(time.monotonic())
            await client.close()
            assert len(arrived) > 3
            gaps = [later - earlier for earlier, later in zip(arrived, arrived[1:], strict=False)]
            assert sum(gap > 0.1 for gap in gaps) >= len(gaps) // 2, gaps
            assert "event: request" in await asyncio.wait_for(live, 10)


async def first_event(http: httpx.AsyncClient) -> str:
    """The beginning of the dashboard's stream, as far as the first request in it."""
    text = ""
    async with http.stream("GET", "/weir/ui/live", timeout=15) as answer:
        assert answer.status_code == 200
        async for piece in answer.aiter_text():
            text += piece
            if "event: request" in text:
                break
    return text
