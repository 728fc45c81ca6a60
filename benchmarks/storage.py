"""What a request leaves on the disk: bytes of the database for each, by table.

    python -m benchmarks.storage [--conversations N] [--requests M] [--json]

N agents read Python's standard library file by file, a part of one with each request, through a
real Weir in front of the simulator in a window of 16,384 tokens; every fourth conversation is a
chat that never fills it. Shown are the bytes of the database file, its log brought in and free
pages left out, over the number of requests; and the tables and indexes that they belong to, where
SQLite can tell.
"""

import argparse
import asyncio
import json
import random
import sqlite3
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import openai

from proxy.app import create_app
from proxy.config.loading import load_config
from proxy.config.values import Flags
from proxy.server import serve
from proxy.telemetry.setup import OtelSettings, Telemetry
from proxy.wire.counting import Tokenizer
from tests.upstream.app import serve_simulator
from tests.upstream.model import SimulatorSettings

WINDOW = 16_384
PART = 3_600
SHOWN = 12


def parts(seed: int) -> Iterator[tuple[str, str]]:
    """Files of the standard library in parts of 3,600 characters, in an order of the seed's.

    This repository's own would be another text with each commit, of which a request leaves up to 8
    % more or less.
    """
    library = Path(sysconfig.get_path("stdlib"))
    files = sorted(library.glob("*.py"))
    random.Random(seed).shuffle(files)
    for file in files:
        text = file.read_text(encoding="utf-8")
        for start in range(0, len(text), PART):
            yield f"{file.relative_to(library)}:{start}", text[start : start + PART]


def opening(seed: int) -> list[dict[str, Any]]:
    """What a conversation begins with."""
    return [
        {"role": "system", "content": "You are a careful reviewer. Read before you judge."},
        {
            "role": "user",
            "content": f"Review run {seed}: find what is wrong in this repository and say where.",
        },
    ]


async def talk(client: Any, seed: int, requests: int) -> int:
    """One conversation; how many requests it made."""
    messages = opening(seed)
    read = parts(seed)
    for number in range(requests):
        await client.chat.completions.create(model="sim", messages=messages, max_tokens=256)
        name, text = next(read)
        if seed % 4 == 3:
            messages += [
                {"role": "assistant", "content": f"I have looked at {name}."},
                {"role": "user", "content": f"And what of the next one? {text[:80]}"},
            ]
            continue
        call = {"id": f"call_{seed}_{number}", "type": "function"}
        call["function"] = {"name": "read_file", "arguments": json.dumps({"path": name})}  # type: ignore[assignment]
        messages += [
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call["id"], "content": text},
        ]
    return requests


async def play(url: str, *, conversations: int, requests: int) -> int:
    """All conversations, four at a time; how many requests there were."""
    tokenizer = Tokenizer()
    async with serve_simulator(
        SimulatorSettings(window=WINDOW), counter=tokenizer.counter("o200k_base")
    ) as simulator:
        config = load_config(
            None, env={}, flags=Flags(upstream=simulator.base_url, window=WINDOW, store=url)
        )
        app = create_app(config, telemetry=Telemetry.create(OtelSettings()), tokenizer=tokenizer)
        async with (
            serve(app) as server,
            openai.AsyncOpenAI(
                base_url=f"http://127.0.0.1:{server.port}/v1", api_key="sk-bench"
            ) as client,
        ):
            done = 0
            for start in range(0, conversations, 4):
                going = range(start, min(start + 4, conversations))
                done += sum(await asyncio.gather(*(talk(client, seed, requests) for seed in going)))
            return done


def sizes(database: Path) -> tuple[int, dict[str, int]]:
    """Bytes of a database file that are in use, and of its tables and indexes."""
    with closing(sqlite3.connect(database)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        pages, free, size = (
            connection.execute(f"PRAGMA {name}").fetchone()[0]
            for name in ("page_count", "freelist_count", "page_size")
        )
        try:
            rows = connection.execute(
                "SELECT name, sum(pgsize) FROM dbstat GROUP BY name ORDER BY 2 DESC"
            ).fetchall()
        except sqlite3.OperationalError:
            rows = []
    return (pages - free) * size, dict(rows)


def main() -> None:
    """Play, measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--conversations", type=int, default=12)
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        database = Path(folder) / "weir.db"
        url = f"sqlite+aiosqlite:///{database}"
        made = asyncio.run(play(url, conversations=given.conversations, requests=given.requests))
        whole, tables = sizes(database)
    each = {name: round(size / made) for name, size in tables.items()}
    if given.json:
        print(
            json.dumps(
                {
                    "requests": made,
                    "bytes": whole,
                    "bytes_a_request": round(whole / made),
                    "tables": each,
                }
            )
        )
        return
    print(f"{made} requests, {whole:,} bytes: {whole / made:,.0f} bytes a request")
    for name, size in list(each.items())[:SHOWN]:
        print(f"{size:8,}  {name}")


if __name__ == "__main__":
    main()
