"""The log of a real process: what it never says, and that nobody waits for it."""

import asyncio
import contextlib
import fcntl
import json
import os
import select
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.functional.canaries import SECRETS, columns, files, leaked, request, spelled
from tests.functional.harness import ROOT, WeirProcess, free_port
from tests.functional.scripted import Asked, Reply, ScriptedUpstream, as_asked, completion, events, scripted, whole
from tests.functional.test_leaks import echo
from tests.profile import soak

pytestmark = pytest.mark.slow

OTLP = "canary7f3a-otlp-header-0b"
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


ENV = {
    "UPSTREAM_KEY": SECRETS["upstream"],
    "WEIR_ADMIN_TOKEN": SECRETS["admin"],
    "OTEL_EXPORTER_OTLP_HEADERS": f"x-team={OTLP}",
    "OTEL_BSP_SCHEDULE_DELAY": "50",
}


async def command(path: Path, *arguments: str) -> str:
    """All that a command prints."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "proxy", *arguments),
        cwd=ROOT,
        env={**os.environ, **ENV, "WEIR_CONFIG": str(path)},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    out, _ = await process.communicate()
    return out.decode()


def hidden(text: str) -> list[str]:
    """The secrets and the content in a text, those of the exporter too."""
    return [*leaked(text), *(w for w in (OTLP, OTLP_QUERY) if any(each in text for each in spelled(w)))]


@pytest.mark.requirement("S.2", "S.16", "S.17", "A3.14", "P7")
@pytest.mark.parametrize("form", [pytest.param("line", marks=soak), "json"])
async def test_a_process_never_logs_a_secret_and_its_commands_never_print_one(tmp_path: Path, form: str) -> None:
    """Its collector and its webhook quote what they are sent, its upstream does, too, or breaks off."""

    def say(asked: Asked) -> Reply:
        if asked.target.startswith("/v1/chat"):
            return as_asked(asked, completion("yes"))
        return whole({"quoted": f"{asked.target} {asked.headers}"}, status=400)

    async with scripted(say) as upstream, httpx.AsyncClient(timeout=10) as http:
        path = configured(tmp_path, upstream.base_url)
        arguments = ["--config", str(path), "--log-format", form]
        async with WeirProcess(arguments, free_port(), env=ENV) as weir:
            shown = await do_everything(weir, upstream, http)
            good = path.read_text()
            for bad in (
                good.replace("grace: 1s", f"grace: {SECRETS['upstream']}"),
                good.replace("window: 8192", f"window: 8192\nsk-{SECRETS['client']}: 1"),
                good.replace("mode: keys", f"mode: sk-{SECRETS['client']}"),
                good.replace("window: 8192", f"window: *sk-{SECRETS['client']}"),
            ):
                path.write_text(bad)
                assert weir.process is not None
                weir.tell(signal.SIGHUP)
                if form == "line":
                    assert not hidden(await command(path, "doctor", "--values"))
                await asyncio.sleep(0.3)
            path.write_text(good)
            commands = (
                ("doctor", "--values"),
                ("doctor", "--values", "--json"),
                ("keys", "list"),
                ("conversations", "list"),
            )
            for words in commands if form == "line" else ():
                assert not hidden(await command(path, *words)), words
            stream = asyncio.create_task(read(http, weir, request(stream=True, mark="last")))
            upstream.say = slow
            await asyncio.sleep(0.3)
        shown += await stream
    log = "\n".join(weir.log)
    assert "export" in log.lower(), "the exporter had something to say"
    assert "not used" in log
    assert hidden(log) == []
    assert not [word for word in (SECRETS["upstream"], SECRETS["admin"], OTLP) if word in shown]
    assert not [t for t, text in columns(tmp_path / "w.db").items() if leaked(text, content=False)]
    assert not leaked(files(tmp_path / "w.db"), content=False)
    if form == "json":
        lines = [json.loads(line) for line in weir.log if line.startswith("{")]
        assert all({"request", "trace"} <= set(line) for line in lines if line["message"] == "ctx")


def answer_and_collect(asked: Asked) -> Reply:
    """A model, and a collector whose connections break."""
    return as_asked(asked, completion("yes")) if asked.target.startswith("/v1/chat") else Reply(cut=True)


def slow(_: Asked) -> Reply:
    chunk = b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'
    return Reply(kind="text/event-stream", chunks=(chunk,) * 100, between=0.1)


async def do_everything(weir: WeirProcess, upstream: ScriptedUpstream, http: httpx.AsyncClient) -> str:
    """What clients see of requests that fail in many ways."""
    good, shown = upstream.say, ""
    shown += await read(http, weir, request())
    shown += await read(http, weir, request(), key="wrong")
    shown += await read(http, weir, b"{" + json.dumps(request()).encode())
    failures = (
        lambda asked: whole(echo(asked), status=401, headers=(("x-echo", asked.headers["authorization"]),)),
        lambda asked: whole(echo(asked), status=500),
        lambda asked: events(echo(asked), done=False),
        lambda _: Reply(cut=True),
        lambda _: Reply(silent=True),
    )
    for fails in failures:
        upstream.say = lambda asked, fails=fails: fails(asked) if asked.target.startswith("/v1/chat") else good(asked)  # type: ignore[misc]
        shown += await read(http, weir, request())
        shown += await read(http, weir, request(stream=True))
    upstream.say = good
    return shown


async def read(http: httpx.AsyncClient, weir: WeirProcess, body: Any, *, key: str = "client") -> str:
    """The head and the body of an answer, as far as they came."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"authorization": f"Bearer {SECRETS[key]}", "content-type": "application/json"}
    text = ""
    with contextlib.suppress(httpx.HTTPError):
        url = f"{weir.base_url}/chat/completions?key={SECRETS['query']}"
        async with http.stream("POST", url, content=content, headers=headers) as answer:
            text = str(answer.headers.raw)
            async for chunk in answer.aiter_bytes():
                text += chunk.decode("utf-8", "replace")
    return text


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
