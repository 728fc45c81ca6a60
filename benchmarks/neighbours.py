"""What one key's heavy requests cost the others: latency beside them, memory, and what is answered
when it is too much.

    python -m benchmarks.neighbours

Weir is served as its users start it, with SQLite and spans sent out; the load is another process's.
All figures are taken from outside: times by the client, memory as the resident set of all of Weir's
processes together.
"""

import argparse
import asyncio
import json
import os
import random
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, Self

from benchmarks.load import percentile
from benchmarks.processes import Running, companion, weir
from benchmarks.traffic import line

WINDOW = 32_768
HEAVY = 8
HEAVY_BYTES = 1_600_000
COMPACTED_BYTES = 120_000
HUGE = 20
HUGE_BYTES = 30_000_000
MANY = 1_000
MANY_BYTES = 400_000
AT_ONCE = 8
MANY_WINDOW = 400_000
SECONDS = 8.0
ROUNDS = 3
PATIENCE = 90.0
SETTLED = 40.0
PAUSE = 0.01
_HEAD = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: w\r\nAuthorization: Bearer %s\r\nContent-Length:"
    b" %d\r\n\r\n"
)


@dataclass(slots=True)
class Answer:
    """An answer: its status, 0 for none, and the seconds that it took."""

    status: int
    seconds: float
    retry_after: bool = False


def chat(size: int, *, seed: int, each: int = 3_000) -> bytes:
    """The body of a chat that nobody has seen before, of about so many bytes in messages of
    ``each``.
    """
    rng = random.Random(seed)
    lines = [f"{line(rng)} {seed}-{n}." for n in range(400)]
    said = list[dict[str, str]]()
    held = 0
    while held < size:
        text = []
        length = 0
        while length < each:
            text.append(f"{rng.choice(lines)} {rng.randrange(10**6)}")
            length += len(text[-1]) + 1
        said.append({"role": ("user", "assistant")[len(said) % 2], "content": " ".join(text)})
        held += length
    if len(said) % 2 == 0:
        said.append({"role": "user", "content": "And now?"})
    return json.dumps({"model": "gpt-4o-mini", "messages": said}).encode()


async def ask(port: int, key: str, body: bytes) -> Answer:
    """One request on a connection of its own."""
    started = time.perf_counter()

    def answer(status: int, head: bytes = b"") -> Answer:
        return Answer(status, time.perf_counter() - started, b"retry-after" in head.lower())

    try:
        async with asyncio.timeout(PATIENCE):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                writer.write(_HEAD % (key.encode(), len(body)))
                sending = asyncio.ensure_future(_send(writer, body))
                head = await reader.readuntil(b"\r\n\r\n")
                sending.cancel()
                await asyncio.gather(sending, return_exceptions=True)
                return answer(int(head[9:12]), head)
            finally:
                writer.transport.abort()
    except (OSError, EOFError):  # none within its time is one of them
        return answer(0)


async def _send(writer: asyncio.StreamWriter, body: bytes) -> None:
    writer.write(body)
    await writer.drain()


@dataclass(slots=True)
class Memory:
    """The resident set of a process and all below it, looked at all the time."""

    pid: int
    peak: float = 0.0
    most_processes: int = 0
    _task: "asyncio.Task[None] | None" = None

    def now(self) -> float:
        """Megabytes; a process that has not begun its own program yet has its parent's pages, and
        none itself.
        """
        began = _begun_as(self.pid)
        pids = [pid for pid in tree(self.pid) if pid == self.pid or _begun_as(pid) != began]
        self.most_processes = max(self.most_processes, len(pids))
        return sum(map(_resident, pids)) / 2**20

    async def _watch(self) -> None:
        while True:
            self.peak = max(self.peak, self.now())
            await asyncio.sleep(0.02)

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()


def tree(pid: int) -> list[int]:
    """A process and all below it."""
    try:
        below = [
            child
            for task in Path(f"/proc/{pid}/task").iterdir()
            for child in _words(task / "children")
        ]
    except OSError:
        return [pid]
    return [pid, *(each for child in below for each in tree(int(child)))]


def _words(path: Path) -> list[str]:
    return path.read_text().split()


def _begun_as(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


@dataclass(slots=True)
class Figures:
    """What one key was answered while others were there, or nobody; seconds."""

    small: list[float] = field(default_factory=list)
    compaction: list[float] = field(default_factory=list)
    odd: list[int] = field(default_factory=list)


async def _small(port: int, figures: Figures, until: asyncio.Event, seed: int) -> None:
    """Small requests one after the other, each of a conversation that goes on."""
    bodies = [chat(800, seed=seed + n, each=300) for n in range(64)]
    for n in range(10**6):
        if until.is_set():
            return
        said = await ask(port, "sk-small", bodies[n % 64])
        figures.small.append(said.seconds)
        figures.odd += [said.status] * (said.status != 200)
        await asyncio.sleep(PAUSE)


async def measure(port: int, *, heavy: int, seed: int) -> tuple[Figures, list[Answer]]:
    """Small requests, and three compactions one after the other, while another key's heavy ones are
    answered.

    Alone, small requests come after the compactions.
    """
    figures = Figures()
    done = asyncio.Event()
    bodies = [chat(HEAVY_BYTES, seed=seed * 1_000 + n) for n in range(heavy)]
    smaller = [chat(COMPACTED_BYTES, seed=seed * 1_000 + 500 + n) for n in range(3)]
    tasks = [asyncio.create_task(ask(port, "sk-heavy", body)) for body in bodies]
    small = partial(_small, port, figures, done, seed * 1_000 + 700)
    steady = asyncio.create_task(small()) if heavy else None
    await asyncio.sleep(0.5)
    for body in smaller:
        said = await ask(port, "sk-other", body)
        figures.compaction.append(said.seconds)
        figures.odd += [said.status] * (said.status != 200)
    if tasks:
        await asyncio.wait(tasks)
    steady = steady or asyncio.create_task(small())
    if not heavy:
        await asyncio.sleep(SECONDS)
    done.set()
    await steady
    return figures, [task.result() for task in tasks]


async def beside(running: Running) -> dict[str, Any]:
    """The same requests alone and beside heavy ones of one key, in turns."""
    alone = Figures()
    crowded = Figures()
    answers = list[Answer]()
    async with Memory(running.pid) as memory:
        for number in range(ROUNDS):
            figures, _ = await measure(running.port, heavy=0, seed=2 * number + 1)
            _add(alone, figures)
            figures, heavy = await measure(running.port, heavy=HEAVY, seed=2 * number + 2)
            _add(crowded, figures)
            answers += heavy
    return {
        "small_alone": _shown(alone.small),
        "small_beside": _shown(crowded.small),
        "small_p99_ratio": round(_p99(crowded.small) / _p99(alone.small), 2),
        "compaction_alone_ms": [round(1_000 * s) for s in alone.compaction],
        "compaction_beside_ms": [round(1_000 * s) for s in crowded.compaction],
        "compaction_ratio": round(sum(crowded.compaction) / sum(alone.compaction), 2),
        "odd": Counter(map(str, [*alone.odd, *crowded.odd])),
        **_heavy(answers),
        "peak_mb": round(memory.peak),
        "processes": memory.most_processes,
    }


async def huge(running: Running) -> dict[str, Any]:
    """Many bodies of 30 MB at once, each of a key of its own."""
    whole = chat(HUGE_BYTES, seed=99)
    bodies: Iterator[bytes] = (whole.replace(b" 99-", b" %d-" % (100 + n)) for n in range(HUGE))
    ready = [*bodies]
    async with Memory(running.pid) as memory:
        before = memory.now()
        answers = await asyncio.gather(
            *(ask(running.port, f"sk-huge-{n}", body) for n, body in enumerate(ready))
        )
        ends = time.monotonic() + SETTLED
        while time.monotonic() < ends:
            await asyncio.sleep(1.0)
        after = memory.now()
    bare = sum(a.status in (429, 503) and not a.retry_after for a in answers)
    figures = {"before_mb": round(before), "peak_mb": round(memory.peak), "after_mb": round(after)}
    return {
        **_heavy(list(answers)),
        "without_retry_after": bare,
        **figures,
        "processes": memory.most_processes,
    }


async def many(running: Running) -> dict[str, Any]:
    """Many long histories, each seen once and below the trigger: what is remembered of them."""
    statuses = Counter[str]()
    async with Memory(running.pid) as memory:
        before = memory.now()
        for start in range(0, MANY, AT_ONCE):
            bodies = [
                chat(MANY_BYTES, seed=10**6 + n, each=2_000) for n in range(start, start + AT_ONCE)
            ]
            answers = await asyncio.gather(*(ask(running.port, "sk-many", body) for body in bodies))
            statuses.update(str(answer.status) for answer in answers)
        done = memory.now()
        await asyncio.sleep(SETTLED)
        figures = {
            "before_mb": before,
            "peak_mb": memory.peak,
            "done_mb": done,
            "after_mb": memory.now(),
        }
    return {"statuses": statuses, **{name: round(figure) for name, figure in figures.items()}}


def _add(to: Figures, more: Figures) -> None:
    to.small += more.small
    to.compaction += more.compaction
    to.odd += more.odd


def _p99(values: list[float]) -> float:
    return percentile(values, 0.99) or 0.0


def _shown(values: list[float]) -> dict[str, Any]:
    return {
        "n": len(values),
        "p50_ms": percentile(values, 0.5),
        "p99_ms": _p99(values),
        "max_ms": percentile(values, 1),
    }


def _heavy(answers: list[Answer]) -> dict[str, Any]:
    """Seconds of every answer, by its status."""
    seconds: dict[str, list[float]] = {}
    for answer in sorted(answers, key=attrgetter("status", "seconds")):
        seconds.setdefault(str(answer.status), []).append(round(answer.seconds, 2))
    return {"seconds": seconds}


def main() -> None:
    """Print the figures as JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.neighbours", description="Heavy requests' neighbours."
    )
    parser.add_argument("--cases", default="beside,huge,many")
    chosen = parser.parse_args().cases.split(",")
    cores = frozenset(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        with companion("stub", "--any", name="stub", cores=cores, home=home) as upstream:
            for name, case, window in (
                ("beside", beside, WINDOW),
                ("huge", huge, WINDOW),
                ("many", many, MANY_WINDOW),
            ):
                if name not in chosen:
                    continue
                port = upstream.port
                with weir(
                    name, upstream=port, window=window, cores=cores, home=home, otlp=port
                ) as running:
                    print(json.dumps({name: asyncio.run(case(running))}, indent=1), flush=True)


if __name__ == "__main__":
    main()
