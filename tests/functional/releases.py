"""A database as a released version of Weir leaves it: ``python -m tests.functional.releases VERSION`` makes it.

It is made once, by the version that is released, and kept in tests/data/releases: VERSION.db.gz is the database, VERSION.json
what its clients know. Every later version opens it (test_upgrade.py).
"""

import asyncio
import gzip
import json
import sqlite3
import sys
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import openai

from tests.functional.harness import COUNTER, ROOT, Talk, WeirProcess, free_port
from tests.upstream.app import serve_simulator
from tests.upstream.model import SimulatorSettings

RELEASES = ROOT / "tests" / "data" / "releases"
ADMIN = "admin-token-of-a-release"
NAME = "kept-since-then"
STEPS = 12


def released(database: Path, upstream: str) -> WeirProcess:
    """A Weir over a database of a release."""
    arguments = ["--upstream", upstream, "--window", "4096", "--store", f"sqlite+aiosqlite:///{database}"]
    return WeirProcess(arguments, free_port(), {"WEIR_ADMIN_TOKEN": ADMIN})


async def made(database: Path) -> dict[str, Any]:
    """What the clients know of a database that this version has written."""
    async with (
        serve_simulator(SimulatorSettings(window=4096), counter=COUNTER) as simulator,
        released(database, simulator.base_url) as weir,
        httpx.AsyncClient(base_url=weir.root) as http,
    ):
        own = {"authorization": f"Bearer {ADMIN}"}
        body = {"name": "kept", "requests_per_minute": 1_000, "budgets": ["month,tokens=100000000"]}
        key = (await http.post("/weir/keys", json=body, headers=own)).json()["secret"]
        client = openai.AsyncOpenAI(base_url=weir.base_url, api_key=key, default_headers={"x-weir-conversation": NAME})
        talk = Talk(client)
        await talk.agent(STEPS)
        note = {"text": "Deploys wait for Priya.", "category": "constraints", "importance": "high"}
        mine = {"authorization": f"Bearer {key}"}
        answered = await http.post(f"/weir/conversations/{NAME}/notes", json=note, headers=mine)
        answered.raise_for_status()
        removed = (await http.get(f"/weir/conversations/{NAME}/removed", headers=mine)).json()["data"]
        usage = (await http.get("/weir/usage", headers=mine)).json()["total"]
        await client.close()
    with closing(sqlite3.connect(database)) as file:
        file.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        file.execute("VACUUM")
    return {
        "key": key,
        "messages": talk.messages,
        "removed": {each["ref"]: each["begins"] for each in removed},
        "requests": usage["requests"],
        "tokens_after": usage["tokens_after"],
    }


def main(version: str) -> None:
    """Write the files of a version."""
    RELEASES.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        database = Path(folder) / "weir.db"
        known = asyncio.run(made(database))
        (RELEASES / f"{version}.db.gz").write_bytes(gzip.compress(database.read_bytes(), 9, mtime=0))
    (RELEASES / f"{version}.json").write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
