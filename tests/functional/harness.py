"""Weir on a real port in front of a real upstream, inside the test's loop or as a process of its own."""

import asyncio
import contextlib
import dataclasses
import json
import os
import random
import re
import signal
import socket
import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, Self

import openai
import pytest

from proxy.app import create_app
from proxy.config.loading import load_config
from proxy.config.presets import with_policy
from proxy.config.values import Flags
from proxy.effects.summarizer import Summarizer
from proxy.features.plugins import Plugin
from proxy.runtime import Runtime
from proxy.server import ServerLimits, serve
from proxy.store import Store
from proxy.telemetry.setup import OtelSettings, Telemetry
from proxy.wire.chat import digest_of
from proxy.wire.counting import Tokenizer
from tests.profile import soak
from tests.upstream import RecordedRequest
from tests.upstream.app import RunningSimulator

ROOT = Path(__file__).parents[2]
TOKENIZER = Tokenizer()
COUNTER = TOKENIZER.counter("o200k_base")
EVICTING: Mapping[str, Any] = {
    "cascade": [
        {"layer": "ingest_cap"},
        {"layer": "dedupe"},
        {"layer": "evict", "min_savings": 0.10, "must_reach": 0.5},
        {"layer": "compact"},
    ],
    "shapes": [{"window": None, "trigger": 0.90, "low_water": 0.50, "extract": 0.44, "tail": 0.18}],
}
"""A policy that puts placeholders for old results before it summarises."""
NOTHING_RECALLED: Mapping[str, Any] = {"recall": {"auto_tokens": 0}}
"""A policy that puts nothing of what was removed in front of a request by itself."""
EARLY: Mapping[str, Any] = {
    "shapes": [{"window": None, "trigger": 0.80, "low_water": 0.30, "extract": 0.22, "tail": 0.16}]
}
"""A trigger at which a summariser with the same window still reads the history at once."""


BY_KEY: Mapping[str, str] = {"WEIR_AUTH_TENANT": "key"}
"""Where tests play several people, each has a key of his own, though all of them are on this machine."""


@dataclass(slots=True)
class RunningWeir:
    """A Weir that runs in this loop."""

    base_url: str
    runtime: Runtime
    clients: list[openai.AsyncOpenAI] = field(default_factory=list)

    @property
    def root(self) -> str:
        """The address without ``/v1``."""
        return self.base_url.removesuffix("/v1")

    def client(self, key: str = "sk-test", **options: Any) -> Any:
        """A real client of it that does not retry; it is closed with it."""
        self.clients.append(openai.AsyncOpenAI(base_url=self.base_url, api_key=key, **{"max_retries": 0, **options}))
        return self.clients[-1]

    async def stored(self) -> None:
        """Return once every request is stored: a client may have its answer a little before its record is put."""
        async with asyncio.timeout(60):
            while self.runtime.telemetry.metrics.registry.get_sample_value("http_server_active_requests"):
                await asyncio.sleep(0.002)
            await self.runtime.write_queue.flush()
            while self.runtime.store._database._running:  # a transaction goes on in this loop, which a test may block
                await asyncio.sleep(0.002)


@dataclass(slots=True)
class InTurns:
    """Several Weirs, of which a client has each in turn: every request goes to the next one that runs."""

    targets: "Sequence[RunningWeir | WeirProcess]"
    made: int = 0
    asked: int = 0

    @property
    def weirs(self) -> list[RunningWeir]:
        """Those that run in this loop."""
        return [each for each in self.targets if isinstance(each, RunningWeir)]

    @property
    def store(self) -> Store:
        """The database that they share."""
        store = self.weirs[0].runtime.store
        assert store is not None
        return store

    def client(self, key: str = "sk-test", **options: Any) -> Any:
        """A real client of all of them."""
        self.made += 1
        return _Turns(self.targets, key, options, count=self.made - 1)

    def root(self) -> str:
        """The address of the next one, without ``/v1``: for what is asked of Weir itself."""
        self.asked += 1
        return self.targets[-self.asked % len(self.targets)].root

    async def crash(self) -> None:
        """Kill those in processes of their own, and start them again: ``kill -9``, or a node that fails."""
        processes = [each for each in self.targets if isinstance(each, WeirProcess)]
        await asyncio.gather(*(each.stop(signal.SIGKILL) for each in processes))
        await asyncio.gather(*(each.start() for each in processes))

    async def settled(self) -> None:
        """Return once everything is written."""
        for each in self.weirs:
            await each.runtime.preparation.settled()
            await each.stored()


@dataclass(slots=True)
class _Turns:
    targets: "Sequence[RunningWeir | WeirProcess]"
    key: str
    options: Mapping[str, Any]
    clients: dict[str, Any] = field(default_factory=dict)
    count: int = 0

    @property
    def chat(self) -> Any:
        """The next one's."""
        running = [each for each in self.targets if isinstance(each, RunningWeir) or each.process is not None]
        chosen = running[self.count % len(running)]
        self.count += 1
        if chosen.base_url not in self.clients:
            self.clients[chosen.base_url] = chosen.client(self.key, **self.options)
        return self.clients[chosen.base_url].chat


@asynccontextmanager
async def weir(
    upstream: str,
    store: Path | str | None = None,
    *,
    yaml: str | None = None,
    folder: Path | None = None,
    window: int | None = 8192,
    summarizer: str | None = None,
    policy: str | None = None,
    balanced: Mapping[str, Any] = {},
    env: Mapping[str, str] = BY_KEY,
    telemetry: Telemetry | None = None,
    limits: ServerLimits = ServerLimits(),
    asking: Summarizer | None = None,
    patience: float | None = None,
    hooks: Sequence[Plugin] = (),
) -> AsyncIterator[RunningWeir]:
    """Weir in front of ``upstream``, with a database file, or in memory without one; a text is a database's URL.

    Its policy ``balanced`` has the keys of that name otherwise.
    ``asking`` takes the place of its summarizer, for another patience or another clock. The database may take
    ``patience`` seconds for an answer where the configuration does not decide that.
    """
    file = f"sqlite+aiosqlite:///{store}" if store is not None else "sqlite+aiosqlite:///:memory:"
    url = store if isinstance(store, str) else file
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
    if balanced:
        config = with_policy(config, "balanced", balanced)
    if patience is not None:
        config = dataclasses.replace(config, store=dataclasses.replace(config.store, timeout=patience))
    app = create_app(config, telemetry=telemetry or Telemetry.create(OtelSettings()), tokenizer=TOKENIZER, hooks=hooks)
    async with serve(app, limits=limits) as server:
        runtime = app.runtime
        assert runtime is not None
        if asking is not None:
            runtime.summarizer = asking
        running = RunningWeir(f"http://127.0.0.1:{server.port}/v1", runtime)
        try:
            yield running
        finally:
            for client in running.clients:
                await client.close()


def ruled(upstream: str, rules: Mapping[str, Any], *, window: int = 8192) -> str:
    """A configuration in which ``rules`` are the policy of every request."""
    return (
        f"upstreams: {{main: {{base_url: '{upstream}', api_key: pass}}}}\n"
        f"window: {window}\npolicies: {{mine: {json.dumps(rules)}}}\ndefault_policy: mine\n"
    )


PATIENCE = 30.0
"""Seconds for a database that nothing is wrong with, however busy the machine is."""


@dataclass(frozen=True, slots=True)
class Deployment:
    """A database, and how many Weirs share it."""

    store: Path | str
    count: int = 1

    @property
    def url(self) -> str:
        """The database, as a command is given it."""
        return self.store if isinstance(self.store, str) else f"sqlite+aiosqlite:///{self.store}"

    @asynccontextmanager
    async def started(self, *arguments: str) -> AsyncIterator[InTurns]:
        """As many in processes of their own."""
        async with AsyncExitStack() as stack:
            ones = [WeirProcess([*arguments, "--store", self.url], free_port()) for _ in range(self.count)]
            yield InTurns([await stack.enter_async_context(each) for each in ones])

    @asynccontextmanager
    async def serving(self, upstream: str, **options: Any) -> AsyncIterator[InTurns]:
        """As many Weirs in front of ``upstream``, each with the options of :func:`weir`."""
        async with AsyncExitStack() as stack:
            given = {"patience": PATIENCE, **options}
            opened = [weir(upstream, self.store, **given) for _ in range(self.count)]
            yield InTurns([await stack.enter_async_context(each) for each in opened])


def _deployments(*ordinary: int) -> pytest.MarkDecorator:
    names = {1: "one on SQLite", 2: "two in turns on PostgreSQL"}
    forms = [pytest.param(n, id=name, marks=() if n in ordinary else soak) for n, name in names.items()]
    return pytest.mark.parametrize("deployment", forms, indirect=True)


EITHER = _deployments(1, 2)
"""For a test that has to hold however many Weirs share the database."""
ALONE, SHARED = _deployments(1), _deployments(2)
"""The same, of which an ordinary run takes one: two in turns where what is shown has to come from the database."""


@dataclass(slots=True)
class WeirProcess:
    """A Weir in a process of its own, for restarts and ``kill -9``; ``within`` is a command that starts it."""

    arguments: list[str]
    port: int
    env: Mapping[str, str] = field(default_factory=dict)
    within: tuple[str, ...] = ()
    process: asyncio.subprocess.Process | None = None
    log: list[str] = field(default_factory=list)
    reader: asyncio.Task[None] | None = None
    clients: list[openai.AsyncOpenAI] = field(default_factory=list)

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    @property
    def root(self) -> str:
        """The address without ``/v1``."""
        return self.base_url.removesuffix("/v1")

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        for client in self.clients:
            await client.close()
        await self.stop()

    async def _read(self, stream: asyncio.StreamReader) -> None:
        async for line in stream:
            self.log.append(line.decode(errors="replace").rstrip())

    async def start(self) -> None:
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("OPENAI_", "WEIR_", "OTEL_"))}
        self.process = await asyncio.create_subprocess_exec(
            *self.within,
            sys.executable,
            "-m",
            "proxy",
            "serve",
            "--port",
            str(self.port),
            *self.arguments,
            cwd=ROOT,
            env={**clean, **BY_KEY, "WEIR_DRAIN": "0", **self.env},
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        assert self.process.stderr is not None
        self.reader = asyncio.create_task(self._read(self.process.stderr))
        for _ in range(1_200):
            assert self.process.returncode is None, f"weir ended while starting: {self.log}"
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", self.port)
            except OSError:
                await asyncio.sleep(0.05)
            else:
                writer.close()
                await writer.wait_closed()
                return
        raise AssertionError("weir did not start")

    def tell(self, what: signal.Signals) -> None:
        """Send a signal, if it runs still.

        ``Popen.send_signal`` looks first whether the process has ended, and takes its status from whoever waits for it.
        """
        assert self.process is not None
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, what)

    async def stop(self, how: signal.Signals = signal.SIGTERM) -> None:
        if self.process is not None and self.process.returncode is None:
            self.tell(how)
            await self.process.wait()
        if self.reader is not None:
            await self.reader
        self.process = self.reader = None

    def client(self, key: str = "sk-test", **options: Any) -> Any:
        """A real client of it that does not retry; it outlives a restart."""
        self.clients.append(openai.AsyncOpenAI(base_url=self.base_url, api_key=key, **{"max_retries": 0, **options}))
        return self.clients[-1]


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


@cache
def prose(count: int, *, seed: int) -> str:
    """``count`` words, some of them numbers; the same seed gives the same text."""
    rng = random.Random(seed)
    return " ".join(
        rng.choice(WORDS) + (f" {rng.randint(10, 9999)}" if rng.random() < 0.2 else "") for _ in range(count)
    )


def tool_step(number: int, *, words: int = 280, text: str | None = None) -> list[dict[str, Any]]:
    """An assistant message that calls a tool, and the tool's result."""
    call: dict[str, Any] = {"id": f"call_{number}", "type": "function"}
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


@dataclass(slots=True)
class Talk:
    """One conversation as its client has it: the client resends everything and adds about 450 tokens a turn."""

    client: Any
    messages: list[dict[str, Any]] = field(default_factory=opening)
    model: str = "sim"
    seed: int = 0
    mark: str = ""
    turns: int = 0
    headers: list[Mapping[str, str]] = field(default_factory=list)

    async def ask(self, messages: list[dict[str, Any]] | None = None, **options: Any) -> Any:
        """The parsed answer to one request; its headers are kept.

        The messages stand in ``extra_body``: the same bytes, without the types of the SDK tried on each of them.
        """
        given = {"max_tokens": 512, "model": self.model, **options}
        body = {**given.pop("extra_body", {}), "messages": messages or self.messages}
        raw = await self.client.chat.completions.with_raw_response.create(messages=[], extra_body=body, **given)
        self.headers.append(dict(raw.headers))
        return raw.parse()

    async def agent(self, steps: int, **options: Any) -> None:
        """``steps`` requests, a tool step after each."""
        for _ in range(steps):
            await self.ask(tools=TOOLS, **options)
            self.add_step()

    async def chat(self, turns: int, **options: Any) -> None:
        """``turns`` requests, each with a new user message, an answer after each."""
        for _ in range(turns):
            self.add_question()
            await self.ask(**options)
            self.add_answer()

    def grow(self, turns: int, *, kind: str = "chat") -> None:
        """Add ``turns`` turns that Weir has not been asked about."""
        for _ in range(turns):
            if kind == "chat":
                self.add_question()
                self.add_answer()
            else:
                self.add_step()

    def add_step(self, *, words: int = 280) -> None:
        """A tool step, as if the model had made it."""
        self.turns += 1
        text = f"{self.mark} {prose(words, seed=100_000 + 1000 * self.seed + self.turns)}"
        self.messages += tool_step(1000 * self.seed + self.turns, text=text)

    def add_question(self) -> None:
        """A user message."""
        self.turns += 1
        text = f"{self.mark} {prose(132, seed=200_000 + 1000 * self.seed + self.turns)}"
        self.messages.append({"role": "user", "content": text})

    def add_answer(self) -> None:
        """An assistant message."""
        text = f"{self.mark} {prose(132, seed=300_000 + 1000 * self.seed + self.turns)}"
        self.messages.append({"role": "assistant", "content": text})

    def actions(self) -> list[str]:
        """``x-weir-actions`` of every answer, in order."""
        return [h["x-weir-actions"] for h in self.headers]


def answered(simulator: RunningSimulator, model: str = "sim") -> list[RecordedRequest]:
    """The requests of one model that reached the upstream, in order."""
    return [s for s in simulator.answered() if s.model == model]


def arrays_of(seen: list[RecordedRequest]) -> list[list[dict[str, Any]]]:
    """The message arrays of requests, what Weir wrote apart."""
    return [apart(json.loads(s.body)["messages"]) for s in seen]


WRITTEN = re.compile(
    r"(?:\[weir: brought back from what was removed\]\n)?<(?P<tag>weir-\d{6})>\n.*?\n</(?P=tag)>", re.DOTALL
)
"""What Weir writes, in its fence."""


def apart(array: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """An array with what Weir wrote in messages of their own, where it joined a user's text."""
    found: list[dict[str, Any]] = []
    for message in array:
        content = message.get("content")
        if message.get("role") != "user" or not WRITTEN.search(json.dumps(content).replace("\\n", "\n")):
            found.append(message)
        elif isinstance(content, str):
            found += [{**message, "content": said} for said in _by_whom(content)]
        else:
            for is_ours, group in groupby(content or [], key=lambda part: bool(WRITTEN.search(part.get("text", "")))):
                parts = [*group]
                found += [{**message, "content": each} for each in ([[part] for part in parts] if is_ours else [parts])]
    return found


def _by_whom(text: str) -> Iterator[str]:
    at = 0
    for match in WRITTEN.finditer(text):
        if before := text[at : match.start()].removesuffix("\n\n").removeprefix("\n\n"):
            yield before
        yield match.group()
        at = match.end()
    if after := text[at:].removeprefix("\n\n"):
        yield after


def begins_with(array: list[dict[str, Any]], before: list[dict[str, Any]]) -> bool:
    """Whether a forwarded array begins with an earlier one."""
    return array[: len(before)] == before


def batches(arrays: list[list[dict[str, Any]]]) -> int:
    """How often a forwarded request did not begin with the one before."""
    return sum(not begins_with(new, old) for old, new in pairwise(arrays))


def canonical(arrays: list[list[dict[str, Any]]]) -> list[list[bytes]]:
    """The same arrays as digests that ignore what clients change between turns."""
    return [[digest_of(m) for m in array] for array in arrays]


@asynccontextmanager
async def tcp_tap(port: int) -> AsyncIterator[tuple[int, list[bytearray]]]:
    """A port that leads to ``port``, and what each connection to it has sent."""
    sent: list[bytearray] = []

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, into: bytearray | None) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                if into is not None:
                    into += data
                writer.write(data)
                await writer.drain()
        writer.close()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        record = bytearray()
        sent.append(record)
        there, back = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(pump(reader, back, record), pump(there, writer, None))

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1], sent
    finally:
        server.close()
