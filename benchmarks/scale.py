"""How cost grows: with replicas on one PostgreSQL, with stored conversations, with keys.

    python -m benchmarks.scale [--replicas 1,2,4] [--conversations 10,1000,100000] [--keys 10,1000]
    [--seconds N]

Agents in a window of 16,384 tokens send each request to the next replica, without stickiness, to an
upstream in this process that compares what it is sent with what the same agent sent before. All
processes share this machine's cores: CPU per request says what one core carries, requests per
second only what this machine did. Then the case ``small`` of ``benchmarks.speed``, with ever more
conversations in a SQLite file and ever more keys. Needs PostgreSQL's programs.
"""

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import aiohttp
import uvloop
from aiohttp import web
from rich.console import Console
from rich.table import Table

from benchmarks.processes import Cores, Running, companion, weir
from benchmarks.speed import CONNECTIONS, WINDOW
from benchmarks.stub import completion
from benchmarks.traffic import Conversation
from proxy.store import Store
from proxy.store.records import KeyRow
from tests.postgres import Postgres, postgres_server
from tests.proxy.store_rows import exchange

AGENTS = 8
OPENING = 20
STEPS = 40
AGENT_WINDOW = 16_384
ROUNDS = 5
ROUND_S = 1.5
AT_ONCE = 500
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(slots=True)
class Upstream:
    """Answers at once; counts the requests of an agent that do not begin with the one before, or
    nearly so.
    """

    before: dict[str, list[str]] = field(default_factory=dict)
    breaks: Counter[str] = field(default_factory=Counter)

    async def answer(self, request: web.Request) -> web.Response:
        """One completion."""
        body = await request.read()
        messages = [json.dumps(m, sort_keys=True) for m in json.loads(body)["messages"]]
        agent = request.headers["x-agent"]
        known = self.before.get(agent, [])
        self.breaks[agent] += messages[: len(known)] != known
        self.before[agent] = messages
        return web.Response(body=completion(len(body)), content_type="application/json")


async def play(ports: Sequence[int], *, seconds: float) -> tuple[int, list[str]]:
    """Agents for so long, each request to the next port; how many were answered, and which
    conversations ended.
    """
    until = time.monotonic() + seconds
    turn = 0
    done = 0
    begun = 0
    ended = list[str]()

    async def agent(session: aiohttp.ClientSession, number: int) -> None:
        nonlocal turn, done, begun
        rng = random.Random(number)
        while time.monotonic() < until:
            talk = Conversation(rng, messages=OPENING)
            begun = begun + 1
            name = f"{number}.{begun}"
            for _ in range(STEPS):
                head, _, body = talk.next().data.partition(b"\r\n\r\n")
                del head
                turn += 1
                headers = {"x-agent": name, "content-type": "application/json"}
                url = f"http://127.0.0.1:{ports[turn % len(ports)]}/v1/chat/completions"
                async with session.post(url, data=body, headers=headers) as answer:
                    text = await answer.text()
                    if answer.status != 200:
                        raise RuntimeError(text[:300])
                done += 1
                if time.monotonic() >= until:
                    return
            ended.append(name)

    async with aiohttp.ClientSession() as session:
        await asyncio.gather(*(agent(session, number) for number in range(AGENTS)))
    return done, ended


async def replicas(
    number: int, server: Postgres, *, seconds: float, place: Path
) -> dict[str, float]:
    """The figures of so many replicas on one database."""
    upstream = Upstream()
    app = web.Application(client_max_size=1 << 26)
    app.router.add_post("/v1/chat/completions", upstream.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]  # noqa: SLF001 - said nowhere else
    name = await server.database()
    cores = Cores(frozenset(os.sched_getaffinity(0)), frozenset())
    with ExitStack() as stack:
        extra = ("--store", server.url(name))
        tested: list[Running] = []
        for n in range(number):
            starting = weir(
                f"r{number}.{n}",
                upstream=port,
                window=AGENT_WINDOW,
                cores=cores.tested,
                home=place,
                extra=extra,
            )
            tested.append(await asyncio.to_thread(stack.enter_context, starting))
        ports = [each.port for each in tested]
        await play(ports, seconds=2.0)
        upstream.before.clear()
        upstream.breaks.clear()
        before = (sum(each.cpu() for each in tested), _cpu(server), await _counters(server, name))
        began = time.monotonic()
        requests, ended = await play(ports, seconds=seconds)
        took = time.monotonic() - began
        await asyncio.sleep(1.0)
        after = (sum(each.cpu() for each in tested), _cpu(server), await _counters(server, name))
    await runner.cleanup()
    transactions, log = (b - a for a, b in zip(before[2], after[2], strict=True))
    return {
        "requests/s": requests / took,
        "Weir, CPU ms": 1000 * (after[0] - before[0]) / requests,
        "PostgreSQL, CPU ms": 1000 * (after[1] - before[1]) / requests,
        "transactions": transactions / requests,
        "log, KB": log / 1024 / requests,
        "breaks a conversation": sum(upstream.breaks[name] for name in ended) / max(1, len(ended)),
    }


def _cpu(server: Postgres) -> float:
    """CPU seconds of the server's processes so far, of those that ended too."""
    spent = 0
    for pid in server.pids():
        stat = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        spent += sum(map(int, stat[11:15] if pid == server.process.pid else stat[11:13]))
    return spent / TICKS


async def _counters(server: Postgres, database: str) -> tuple[float, float]:
    """Transactions of a database, and bytes of the server's log, so far."""
    [row] = await server.run(
        "SELECT xact_commit + xact_rollback AS n FROM pg_stat_database WHERE datname ="
        f" '{database}'"
    )
    [log] = await server.run("SELECT pg_wal_lsn_diff(pg_current_wal_lsn(), '0/0')::float AS n")
    return float(row["n"]), float(log["n"])


async def fill(url: str, *, conversations: int = 0, keys: int = 0) -> None:
    """A database with so many conversations of one request, and so many keys."""
    store = await Store.open(url)
    now = time.time()
    for start in range(0, conversations, AT_ONCE):
        rows = [
            exchange(
                n,
                conversation=f"conv-{n:x}",
                branch=f"br-{n:x}",
                end=n.to_bytes(16, "big"),
                length=3,
                at=now,
            )
            for n in range(start, min(start + AT_ONCE, conversations))
        ]
        await store.record(rows)
    for n in range(keys):
        row = KeyRow(
            name=f"key{n}", digest=f"{n:064x}", policy=None, models=(), allow=(), created=now
        )
        await store.add_key(row)
    await store.close()


def small(url: str, *, place: Path) -> dict[str, float]:
    """CPU per request of small chats before a database, and what it holds in memory."""
    cores = Cores.split()
    store = ("--store", url, "--auth-mode", "open")
    with (
        companion("stub", name="direct", cores=cores.others, home=place) as stub,
        companion("load", name="load", cores=cores.others, home=place) as load,
        weir(
            "weir", upstream=stub.port, window=WINDOW, cores=cores.tested, home=place, extra=store
        ) as tested,
    ):
        figures = []
        for turn in range(ROUNDS + 1):
            before = tested.cpu()
            job = {
                "name": "weir",
                "case": "small",
                "connections": CONNECTIONS["small"],
                "seconds": ROUND_S,
            }
            report = load.ask({**job, "port": tested.port})
            tested.settle()
            if turn:
                figures.append(1000 * (tested.cpu() - before) / max(1, report["requests"]))
        return {
            "CPU ms": median(figures),
            "best": min(figures),
            "start, s": tested.ready_s,
            "MB": tested.rss_mb(),
        }


def show(title: str, first: str, rows: dict[int, dict[str, float]], console: Console) -> None:
    """Print one table."""
    table = Table(title=title)
    table.add_column(first, justify="right")
    for name in next(iter(rows.values())):
        table.add_column(name, justify="right")
    for number, row in rows.items():
        table.add_row(f"{number:,}", *(f"{value:.2f}" for value in row.values()))
    console.print(table)


def _numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",") if word]


def main() -> int:
    """Measure and show."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scale",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--replicas", type=_numbers, default=[1, 2, 4])
    parser.add_argument("--conversations", type=_numbers, default=[10, 1_000, 100_000])
    parser.add_argument("--keys", type=_numbers, default=[10, 1_000])
    parser.add_argument(
        "--seconds", type=float, default=15.0, help="of each number of replicas (15)"
    )
    asked = parser.parse_args()
    console = Console(width=120)
    with tempfile.TemporaryDirectory(prefix="weir-bench-") as home:
        place = Path(home)
        if asked.replicas:
            with postgres_server() as server:
                rows = {
                    n: uvloop.run(replicas(n, server, seconds=asked.seconds, place=place))
                    for n in asked.replicas
                }
            show("Replicas on one PostgreSQL, requests in turns", "replicas", rows, console)
        for what in ("conversations", "keys"):
            found = {}
            for number in getattr(asked, what):
                url = f"sqlite+aiosqlite:///{place}/{what}{number}.db"
                uvloop.run(fill(url, **{what: number}))
                found[number] = small(url, place=place)
            if found:
                show(f"Small chats by stored {what}", what, found, console)
    return 0


if __name__ == "__main__":
    sys.exit(main())
