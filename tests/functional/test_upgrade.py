"""A database of every released version is opened, goes on, and can be read: what an upgrade must not lose."""

import asyncio
import gzip
import json
from pathlib import Path

import httpx
import openai
import pytest
from click.testing import CliRunner

from proxy.cli import main
from tests.functional.harness import COUNTER, Talk
from tests.functional.releases import NAME, RELEASES, released
from tests.upstream.app import serve_simulator
from tests.upstream.model import SimulatorSettings

pytestmark = pytest.mark.slow

VERSIONS = sorted(path.stem for path in RELEASES.glob("*.json"))


def test_every_release_since_the_first_is_kept() -> None:
    assert VERSIONS[0] == "1.0.0"


@pytest.mark.parametrize("version", VERSIONS)
async def test_a_database_of_a_release_goes_on(version: str, tmp_path: Path) -> None:
    known = json.loads((RELEASES / f"{version}.json").read_text())
    database = tmp_path / "weir.db"
    database.write_bytes(gzip.decompress((RELEASES / f"{version}.db.gz").read_bytes()))
    mine = {"authorization": f"Bearer {known['key']}"}
    async with (
        serve_simulator(SimulatorSettings(window=4096), counter=COUNTER) as simulator,
        released(database, simulator.base_url) as weir,
        httpx.AsyncClient(base_url=weir.root) as http,
    ):
        client = openai.AsyncOpenAI(
            base_url=weir.base_url, api_key=known["key"], default_headers={"x-weir-conversation": NAME}
        )
        talk = Talk(client, messages=known["messages"], turns=len(known["messages"]))
        await talk.agent(3)
        assert all("compact=" in headers["x-weir-actions"] for headers in talk.headers)
        assert all("degraded" not in headers["x-weir-actions"] for headers in talk.headers)
        removed = (await http.get(f"/weir/conversations/{NAME}/removed?limit=500", headers=mine)).json()["data"]
        now = {each["ref"]: each["begins"] for each in removed}
        assert known["removed"].items() <= now.items()
        for ref in known["removed"]:
            assert (await http.get(f"/weir/blobs/{ref}.txt", headers=mine)).status_code == 200
        notes = (await http.get(f"/weir/conversations/{NAME}/notes", headers=mine)).json()["data"]
        assert [note["text"] for note in notes] == ["Deploys wait for Priya."]
        total = (await http.get("/weir/usage?since=0", headers=mine)).json()["total"]
        assert total["requests"] == known["requests"] + 3
        assert total["tokens_after"] > known["tokens_after"]
        await client.close()
    url = f"sqlite+aiosqlite:///{database}"
    verified = await asyncio.to_thread(CliRunner().invoke, main, ["audit", "verify", "--store", url])
    assert verified.exit_code == 0, verified.output
    current = await asyncio.to_thread(CliRunner().invoke, main, ["db", "migrate", "--store", url])
    assert current.exit_code == 0, current.output
