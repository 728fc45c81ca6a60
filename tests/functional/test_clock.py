"""A clock that jumps between two runs of Weir: what is kept stays."""

import asyncio
import os
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import httpx
import pytest

from proxy.store import Store
from tests.functional.harness import COUNTER, Talk, WeirProcess, free_port
from tests.functional.test_store_failures import until
from tests.proxy.store_rows import change, url
from tests.upstream.app import serve_simulator
from tests.upstream.model import SimulatorSettings

pytestmark = pytest.mark.slow

LIBRARY = next(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"), None)
HOUR, DAY = 3_600, 86_400


def set_clock(file: Path, seconds: int) -> None:
    """Have a process that looks at ``file`` live so many seconds ahead."""
    fresh = file.with_suffix(".new")
    fresh.write_text(f"{seconds:+d}")
    fresh.rename(file)


def faked(file: Path) -> Mapping[str, str]:
    """The environment in which only the time of day is ahead of what it is, as long as ``file`` says."""
    if LIBRARY is None:
        assert not os.environ.get("CI"), "libfaketime is missing: apt-get install faketime"
        pytest.skip("libfaketime is not installed")
    names = {"LD_PRELOAD": str(LIBRARY), "FAKETIME_TIMESTAMP_FILE": str(file), "TZ": "Europe/Berlin"}
    return names | {"FAKETIME_CACHE_DURATION": "1", "FAKETIME_DONT_FAKE_MONOTONIC": "1", "DONT_FAKE_MONOTONIC": "1"}


class Kept:
    """What a Weir has of one conversation."""

    def __init__(self, process: WeirProcess, client: httpx.AsyncClient) -> None:
        self._process = process
        self._client = client

    async def get(self, path: str) -> httpx.Response:
        """A page of the management API."""
        return await self._client.get(f"{self._process.root}/weir/{path}")

    async def is_whole(self) -> bool:
        """Whether the conversation is there, and the original of something that was removed from it."""
        told = await self.get("conversations/kept/removed")
        refs = [row["ref"] for row in told.json()["data"]] if told.status_code == 200 else []
        return bool(refs) and (await self.get(f"blobs/{refs[-1]}")).status_code == 200

    async def has_the_quiet_one(self) -> bool:
        """Whether the conversation that nobody goes on with is there."""
        return (await self.get("conversations/quiet")).status_code == 200

    async def said(self, words: str) -> bool:
        """Whether the process has logged something."""
        await asyncio.sleep(0)
        return any(words in line for line in self._process.log)


async def leave_old(database: Path) -> None:
    """Store a conversation that is past its retention by any clock, so that retention has something to say."""
    store = await Store.open(url(database))
    await store.commit(change(conversation="old", branch="old", of="old", at=time.time() - 90 * DAY))
    await store.close()


@pytest.mark.requirement("R.71", "P9")
async def test_a_clock_that_has_jumped_ahead_takes_no_conversation_that_is_as_new_as_the_last_one(
    tmp_path: Path,
) -> None:
    clock = tmp_path / "clock"
    set_clock(clock, 0)
    async with (
        serve_simulator(SimulatorSettings(window=8192), counter=COUNTER) as simulator,
        httpx.AsyncClient(headers={"authorization": "Bearer sk-test"}, timeout=30) as client,
    ):
        arguments = ["--upstream", simulator.base_url, "--window", "8192"]
        arguments += ["--store", f"sqlite+aiosqlite:///{tmp_path / 'w.db'}"]
        process = WeirProcess(arguments, free_port(), env=faked(clock))
        kept = Kept(process, client)
        async with process:
            talk = Talk(process.client(default_headers={"x-weir-conversation": "kept"}))
            talk.grow(15, kind="agent")
            await talk.agent(1)
            assert await kept.is_whole()
            await Talk(process.client(default_headers={"x-weir-conversation": "quiet"})).chat(1)
            await until(kept.has_the_quiet_one)
            await process.stop()
            set_clock(clock, 40 * DAY)
            await leave_old(tmp_path / "w.db")
            await process.start()
            await until(partial(kept.said, "retention has deleted"), 60)
            assert await kept.is_whole()
            assert await kept.has_the_quiet_one()
            await talk.agent(1)
    assert "degraded" not in " ".join(talk.actions())
