"""Weir on a real port in front of a real upstream, inside the test's loop or as a process of its own."""

import asyncio
import os
import random
import signal
import socket
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai

from proxy.app import create_app
from proxy.config import Flags, load_config
from proxy.runtime import Runtime
from proxy.server import ServerLimits, serve
from proxy.telemetry import Telemetry, TelemetrySettings
from proxy.tokenizer import Tokenizer

ROOT = Path(__file__).parents[2]
TOKENIZER = Tokenizer()
COUNTER = TOKENIZER.counter("o200k_base")


@dataclass(slots=True)
class RunningWeir:
    """A Weir that runs in this loop."""

    base_url: str
    runtime: Runtime

    @property
    def root(self) -> str:
        """The address without ``/v1``."""
        return self.base_url.removesuffix("/v1")

    def client(self, key: str = "sk-test", **options: Any) -> openai.AsyncOpenAI:
        """A real client of it that does not retry."""
        return openai.AsyncOpenAI(base_url=self.base_url, api_key=key, **{"max_retries": 0, **options})


@asynccontextmanager
async def weir(
    upstream: str,
    store: Path | None = None,
    *,
    yaml: str | None = None,
    folder: Path | None = None,
    window: int | None = 8192,
    summarizer: str | None = None,
    policy: str | None = None,
    env: Mapping[str, str] = {},
    telemetry: Telemetry | None = None,
    limits: ServerLimits = ServerLimits(),
) -> AsyncIterator[RunningWeir]:
    """Weir in front of ``upstream``, with a database file, or in memory without one."""
    url = f"sqlite+aiosqlite:///{store}" if store is not None else "sqlite+aiosqlite:///:memory:"
    path = None
    if yaml is not None:
        assert folder is not None
        path = folder / "weir.yaml"
        path.write_text(yaml)
    flags = Flags(
        upstream=None if yaml is not None else upstream,
        window=window,
        store=url,
        summarizer=summarizer,
        policy=policy,
    )
    config = load_config(path, env=env, flags=flags)
    app = create_app(config, telemetry=telemetry or Telemetry.create(TelemetrySettings()), tokenizer=TOKENIZER)
    async with serve(app, limits=limits) as server:
        yield RunningWeir(f"http://127.0.0.1:{server.port}/v1", app.state.runtime)


@dataclass(slots=True)
class WeirProcess:
    """A Weir in a process of its own, for restarts and ``kill -9``."""

    arguments: list[str]
    port: int
    env: Mapping[str, str] = field(default_factory=dict)
    process: asyncio.subprocess.Process | None = None

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    async def start(self) -> None:
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("OPENAI_", "WEIR_", "OTEL_"))}
        self.process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "proxy",
            "serve",
            "--port",
            str(self.port),
            *self.arguments,
            cwd=ROOT,
            env={**clean, **self.env},
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        for _ in range(400):
            assert self.process.returncode is None, "weir ended while starting"
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", self.port)
            except OSError:
                await asyncio.sleep(0.05)
            else:
                writer.close()
                await writer.wait_closed()
                return
        raise AssertionError("weir did not start")

    async def stop(self, how: signal.Signals = signal.SIGTERM) -> None:
        if self.process is not None and self.process.returncode is None:
            self.process.send_signal(how)
            await self.process.wait()
        self.process = None

    def client(self, key: str = "sk-test", **options: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=self.base_url, api_key=key, **{"max_retries": 0, **options})


def free_port() -> int:
    """A port that nothing listens on right now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


WORDS = [
    "alpha",
    "bravo",
    "charlie",
    "delta",
    "server",
    "request",
    "file",
    "module",
    "path",
    "value",
    "index",
    "error",
    "result",
    "class",
    "function",
    "import",
    "token",
    "window",
    "buffer",
    "stream",
    "client",
    "proxy",
    "cache",
    "ledger",
    "archive",
    "commit",
    "branch",
    "table",
    "query",
    "schema",
    "field",
    "number",
]


def prose(count: int, *, seed: int) -> str:
    """``count`` words, some of them numbers; the same seed gives the same text."""
    rng = random.Random(seed)
    return " ".join(
        rng.choice(WORDS) + (f" {rng.randint(10, 9999)}" if rng.random() < 0.2 else "") for _ in range(count)
    )


def tool_step(number: int, *, words: int = 280, text: str | None = None) -> list[dict[str, Any]]:
    """An assistant message that calls a tool, and the tool's result."""
    call = {"id": f"call_{number}", "type": "function"}
    call["function"] = {"name": "read_file", "arguments": f'{{"path": "src/module_{number}.py"}}'}
    return [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": f"call_{number}", "content": text or prose(words, seed=1000 + number)},
    ]


TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "read_file",
            "description": "Read a file of the project.",
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
        },
    }
]


def opening(*, seed: int = 1) -> list[dict[str, Any]]:
    """System rules and the task."""
    return [
        {"role": "system", "content": "You are a careful coding agent. " + prose(60, seed=seed)},
        {"role": "user", "content": "Migrate the project from axios to fetch. " + prose(60, seed=seed + 1)},
    ]


def prefix_reuse(bodies: list[list[dict[str, Any]]], count: Any) -> float:
    """Tokens of the longest common message prefix with the request before, over tokens forwarded."""
    reused = total = 0
    before: list[dict[str, Any]] = []
    for messages in bodies:
        tokens = [count(m) for m in messages]
        total += sum(tokens)
        for size, old, new in zip(tokens, before, messages, strict=False):
            if old != new:
                break
            reused += size
        before = messages
    return reused / total if total else 1.0
