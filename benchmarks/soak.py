"""A Weir under a seeded mix of traffic of which three requests in ten go wrong: what grows that
should not?

    python -m benchmarks.soak [--minutes 20] [--clients 6] [--pause 0] [--conversations 60]
    [--faults 0.3]
        [--seed 1] [--json FILE]

Weir runs as its users start it, in front of the simulator with a window of 8K. Every client plays
agent conversations that overflow it, out of a fixed set, so that caches fill once and then stay as
they are. Each row says what the process holds; the last lines are what it grew by per 10,000
requests after the first third, and how the latency of answers without a fault moved: by itself,
over that of the same machine without Weir, and in processor time.
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
from rich.console import Console
from rich.table import Table

from benchmarks.processes import Cores, Running, weir
from proxy.wire.counting import Tokenizer
from tests.upstream.app import serve_simulator
from tests.upstream.model import SimulatorSettings

WINDOW = 8_192
STEPS = 30
FAULTS = (
    "500",
    "429:0",
    "html",
    "empty_200",
    "truncated_json",
    "cut_stream:2",
    "end_early",
    "error_in_stream",
    "error_in_stream_after_content:2",
    "no_done",
    "wrong_window",
    "wording:bedrock",
    "latency:0.3",
)
GONE = "client leaves"
NONSENSE = "no JSON"
SLOWEST = 30.0
WORDS = (
    "server",
    "request",
    "file",
    "module",
    "path",
    "value",
    "index",
    "error",
    "result",
    "function",
    "buffer",
)


@dataclass(frozen=True, slots=True)
class Held:
    """What the process holds at one moment; bytes, counts, and milliseconds since the row before.

    The milliseconds are those of answers, of answers without Weir, and of processor time for a
    request.
    """

    minute: float
    requests: int
    rss_mb: float
    descriptors: int
    tasks: int
    database_kb: int
    wal_kb: int
    p50_ms: float
    p99_ms: float
    direct_ms: float
    cpu_ms: float

    @property
    def slower(self) -> float:
        """How many times as long an answer takes as without Weir, on the same machine at the same
        time.
        """
        return self.p50_ms / max(0.01, self.direct_ms)


@dataclass(slots=True)
class Report:
    """A whole run; ``answers`` by status or by what went wrong on the wire."""

    rows: list[Held] = field(default_factory=list)
    answers: dict[str, int] = field(default_factory=dict)

    def settled(self) -> list[Held]:
        """The rows after the first third, which fills caches and pools."""
        return self.rows[len(self.rows) // 3 :]

    def growth(self, name: str) -> float:
        """The slope of one figure per 10,000 requests, least squares over the settled rows."""
        points = [(row.requests / 10_000, float(getattr(row, name))) for row in self.settled()]
        x, y = (sum(values) / len(points) for values in zip(*points, strict=True))
        spread = sum((at - x) ** 2 for at, _ in points)
        return sum((at - x) * (value - y) for at, value in points) / spread if spread else 0.0

    def drift(self, name: str = "p50_ms") -> float:
        """The median of one figure in the last third over that in the middle third."""
        figures = [float(getattr(row, name)) for row in self.settled()]
        half = len(figures) // 2
        return median(figures[half:]) / max(0.01, median(figures[:half]))


@dataclass(slots=True)
class Soak:
    """The load, and what it has seen so far."""

    target: Running
    home: Path
    http: aiohttp.ClientSession
    faults: float
    pause: float
    conversations: int
    report: Report = field(default_factory=Report)
    requests: int = 0
    taken: list[float] = field(default_factory=list)
    direct: list[float] = field(default_factory=list)
    read: tuple[int, float] = (0, 0.0)

    async def client(self, number: int, ends: float, seed: int) -> None:
        """Play conversations one after the other until the time is up."""
        rng = random.Random(f"{seed}/{number}")
        while time.monotonic() < ends:
            await self._converse(rng.randrange(self.conversations), rng, ends)

    async def _converse(self, which: int, rng: random.Random, ends: float) -> None:
        messages = _opening(which)
        for step in range(STEPS):
            if time.monotonic() >= ends:
                return
            fault = rng.choice((*FAULTS, GONE, NONSENSE)) if rng.random() < self.faults else ""
            outcome = await self._ask(messages, which=which, fault=fault, stream=rng.random() < 0.5)
            self.requests += 1
            self.report.answers[outcome] = self.report.answers.get(outcome, 0) + 1
            messages += _step(which, step)
            await asyncio.sleep(rng.uniform(0, 2 * self.pause))

    async def _ask(
        self, messages: list[dict[str, Any]], *, which: int, fault: str, stream: bool
    ) -> str:
        """Send one request; the status of its answer, or what became of the connection."""
        body = json.dumps(
            {"model": "sim", "messages": messages, "max_tokens": 256, "stream": stream}
        ).encode()
        headers = {"authorization": f"Bearer sk-{which % 5}", "content-type": "application/json"}
        if fault and fault not in (GONE, NONSENSE):
            headers["x-sim-fault"] = fault
        patience = aiohttp.ClientTimeout(total=0.02 if fault == GONE else SLOWEST)
        begun = time.perf_counter()
        try:
            async with self.http.post(
                f"http://127.0.0.1:{self.target.port}/v1/chat/completions",
                data=body[:-20] if fault == NONSENSE else body,
                headers=headers,
                timeout=patience,
            ) as answer:
                await answer.read()
        except TimeoutError:
            return GONE if fault == GONE else "hung"
        except aiohttp.ClientError:
            return "cut"
        if not fault:
            self.taken.append(1000 * (time.perf_counter() - begun))
            return str(answer.status)
        return f"{answer.status} after a fault"

    async def compare(self, upstream: str, ends: float) -> None:
        """Ask the upstream itself now and then, which says what the machine can do at the time."""
        body = {"model": "sim", "messages": [*_opening(0), *_step(0, 0)], "max_tokens": 256}
        while time.monotonic() < ends:
            begun = time.perf_counter()
            async with self.http.post(f"{upstream}/chat/completions", json=body) as answer:
                await answer.read()
            self.direct.append(1000 * (time.perf_counter() - begun))
            await asyncio.sleep(0.2)

    async def watch(self, begun: float, ends: float, every: float) -> None:
        """A row every ``every`` seconds."""
        at = begun
        while (at := at + every) <= ends + 0.01:
            await asyncio.sleep(max(0.0, at - time.monotonic()))
            self.report.rows.append(await self._held((time.monotonic() - begun) / 60))

    async def _held(self, minute: float) -> Held:
        pid = self.target.pid
        taken = sorted(self.taken) or [0.0]
        requests = self.requests - self.read[0]
        used = self.target.cpu() - self.read[1]
        direct = median(self.direct or [0.0])
        self.taken = []
        self.direct = []
        self.read = (self.requests, self.target.cpu())
        database = self.home / "soaked.db"
        return Held(
            minute=round(minute, 2),
            requests=self.requests,
            rss_mb=round(self.target.rss_mb(), 1),
            descriptors=len(list(Path(f"/proc/{pid}/fd").iterdir())),
            tasks=await self._tasks(),
            database_kb=_size(database),
            wal_kb=_size(database.with_name("soaked.db-wal")),
            p50_ms=round(taken[len(taken) // 2], 2),
            p99_ms=round(taken[min(len(taken) - 1, int(0.99 * len(taken)))], 2),
            direct_ms=round(direct, 2),
            cpu_ms=round(1000 * used / max(1, requests), 2),
        )

    async def _tasks(self) -> int:
        async with self.http.get(f"http://127.0.0.1:{self.target.port}/metrics") as page:
            lines = (await page.text()).splitlines()
        return int(float(next(line.split()[-1] for line in lines if line.startswith("weir_tasks"))))


def _size(file: Path) -> int:
    return file.stat().st_size // 1024 if file.exists() else 0


def _prose(words: int, seed: str) -> str:
    rng = random.Random(seed)
    return " ".join(f"{rng.choice(WORDS)} {rng.randint(10, 9_999)}" for _ in range(words))


def _opening(which: int) -> list[dict[str, Any]]:
    return [
        {"role": "system", "content": "You are a careful coding agent."},
        {
            "role": "user",
            "content": f"Task {which}: move the module. Never touch src/keep_{which}.py.",
        },
    ]


def _step(which: int, step: int) -> list[dict[str, Any]]:
    call = {"id": f"c{step}", "type": "function"}
    read = {"name": "read_file", "arguments": json.dumps({"path": f"src/{which}_{step}.py"})}
    return [
        {"role": "assistant", "content": None, "tool_calls": [{**call, "function": read}]},
        {"role": "tool", "tool_call_id": f"c{step}", "content": _prose(120, f"{which}/{step}")},
    ]


async def soak(
    *,
    seconds: float,
    clients: int = 6,
    pause: float = 0.0,
    conversations: int = 60,
    faults: float = 0.3,
    seed: int = 1,
    rows: int = 10,
    extra: Sequence[str] = (),
) -> Report:
    """Run the load for so long against a Weir of its own; what it held, row by row.

    Each client waits ``pause`` seconds before it asks again.
    """
    with tempfile.TemporaryDirectory(prefix="weir-soak-") as folder:
        home = Path(folder)
        settings = SimulatorSettings(window=WINDOW, ledger_bytes=1024 * 1024)
        async with serve_simulator(settings, counter=Tokenizer().counter("o200k_base")) as upstream:
            cores = Cores(frozenset(range(256)), frozenset())
            port = int(upstream.base_url.rsplit(":", 1)[1].split("/")[0])
            with weir(
                "soaked", upstream=port, window=WINDOW, cores=cores.tested, home=home, extra=extra
            ) as target:
                async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
                    load = Soak(target, home, http, faults, pause, conversations)
                    begun = time.monotonic()
                    ends = begun + seconds
                    watching = asyncio.create_task(load.watch(begun, ends, seconds / rows))
                    comparing = asyncio.create_task(load.compare(upstream.base_url, ends))
                    await asyncio.gather(
                        comparing, *(load.client(n, ends, seed) for n in range(clients))
                    )
                    with suppress(asyncio.CancelledError):
                        await watching
                    return load.report


def main() -> int:
    """Run it as the command line says and print what was held."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument("--conversations", type=int, default=60)
    parser.add_argument("--faults", type=float, default=0.3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    asked = {
        name: getattr(given, name)
        for name in ("clients", "pause", "conversations", "faults", "seed")
    }
    report = asyncio.run(soak(seconds=60 * given.minutes, rows=20, **asked))
    columns = (
        "minute",
        "requests",
        "RSS MB",
        "fds",
        "tasks",
        "DB KB",
        "WAL KB",
        "p50 ms",
        "p99 ms",
        "direct",
        "CPU",
    )
    table = Table(*columns)
    for row in report.rows:
        table.add_row(*(str(value) for value in asdict(row).values()))
    console = Console()
    console.print(table)
    for name in ("rss_mb", "descriptors", "tasks", "database_kb", "wal_kb"):
        console.print(f"{name} per 10,000 requests: {report.growth(name):+.2f}")
    for name in ("p50_ms", "slower", "cpu_ms"):
        console.print(f"median {name}, last third over middle third: {report.drift(name):.2f}")
    console.print(f"answers: {dict(sorted(report.answers.items()))}")
    if given.json:
        found = {"rows": [asdict(row) for row in report.rows], "answers": report.answers}
        given.json.write_text(json.dumps(found, indent=1))
    return 1 if report.answers.get("hung") else 0


if __name__ == "__main__":
    sys.exit(main())
