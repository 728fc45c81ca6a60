"""Who may call a Weir as keys come and go: a process of its own, `weir keys` beside it, the real SDK."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path

import openai
import pytest
from click.testing import CliRunner, Result

from proxy.cli import main
from tests.functional.harness import COUNTER, Talk, WeirProcess, free_port, opening, prose
from tests.functional.test_process import command
from tests.functional.test_store_failures import moved_away
from tests.upstream.app import RunningSimulator, serve_simulator
from tests.upstream.model import SimulatorSettings

pytestmark = pytest.mark.slow

STRANGER = "sk-stranger"


@pytest.fixture
async def simulator() -> AsyncIterator[RunningSimulator]:
    async with serve_simulator(SimulatorSettings(), counter=COUNTER) as running:
        yield running


async def accepted(weir: WeirProcess, key: str) -> bool:
    """Whether a chat request with that key is answered."""
    try:
        await weir.client(key).chat.completions.create(model="sim", messages=opening())
    except (openai.AuthenticationError, openai.RateLimitError):  # of many wrong ones some are held off
        return False
    return True


async def until(holds: Callable[[], Awaitable[bool]]) -> None:
    """Wait for what a running Weir takes two seconds to see."""
    async with asyncio.timeout(30):
        while not await holds():
            await asyncio.sleep(0.1)


def says(weir: WeirProcess, text: str) -> bool:
    return any(text in line for line in weir.log)


@pytest.mark.requirement("S.29", "P7")
async def test_the_first_key_shuts_an_open_door_and_no_revocation_opens_it_again(
    simulator: RunningSimulator, tmp_path: Path
) -> None:
    store = ["--store", f"sqlite+aiosqlite:///{tmp_path}/w.db"]
    async with WeirProcess(["--upstream", simulator.base_url, *store], free_port()) as weir:
        assert await accepted(weir, STRANGER)
        await until(lambda: asyncio.to_thread(says, weir, "open to anybody on this machine"))

        secret = await command("keys", "create", "--name", "first", *store)
        await until(lambda: refused(weir, STRANGER))
        assert await accepted(weir, secret)
        await until(lambda: asyncio.to_thread(says, weir, "only known keys may call"))

        await command("keys", "revoke", "first", *store)
        await until(lambda: refused(weir, secret))
        assert await refused(weir, STRANGER)
        await until(lambda: asyncio.to_thread(says, weir, "no key is left"))

        await weir.stop()
        weir.log.clear()
        await weir.start()
        assert await refused(weir, STRANGER)
        assert says(weir, f"weir keys create --name me --store {store[1]}")


@pytest.mark.requirement("S.29", "P6", "P7")
async def test_while_the_store_is_away_no_stranger_gets_in_what_fits_goes_up_and_what_does_not_is_refused(
    tmp_path: Path,
) -> None:
    database, settings = tmp_path / "w.db", SimulatorSettings(window=8192)
    store = ["--store", f"sqlite+aiosqlite:///{database}"]
    secret = await command("keys", "create", "--name", "first", *store)
    async with (
        serve_simulator(settings, counter=COUNTER) as simulator,
        WeirProcess(["--upstream", simulator.base_url, "--window", "8192", *store], free_port()) as weir,
    ):
        assert await accepted(weir, secret)
        with moved_away(database):
            await until(lambda: asyncio.to_thread(says, weir, "the store could not be tended"))
            before = len(simulator.ledger)
            assert await refused(weir, STRANGER)
            assert await refused(weir, "weir-0123456789abcdef")
            rules = {"role": "system", "content": prose(9_000, seed=1)}
            with pytest.raises(openai.BadRequestError) as too_long:
                await weir.client(secret).chat.completions.create(model="sim", messages=[rules, *opening()[1:]])
            assert too_long.value.code == "context_length_exceeded"
            assert len(simulator.ledger) == before, "nothing of it went up"
            await weir.client(secret).chat.completions.create(model="sim", messages=opening(seed=5))
            assert json.loads(simulator.ledger[-1].body)["messages"] == opening(seed=5)
            assert len(simulator.ledger) == before + 1


async def refused(weir: WeirProcess, key: str) -> bool:
    return not await accepted(weir, key)


@pytest.mark.requirement("P7", "R.79")
async def test_a_rotated_key_has_two_secrets_for_a_grace_and_keeps_its_conversations(
    simulator: RunningSimulator, tmp_path: Path
) -> None:
    store = ["--store", f"sqlite+aiosqlite:///{tmp_path}/w.db"]
    old = await command("keys", "create", "--name", "bot", *store)
    async with WeirProcess(["--upstream", simulator.base_url, "--window", "4096", *store], free_port()) as weir:
        named = {"default_headers": {"x-weir-conversation": "support-4711"}}
        talk = Talk(weir.client(old, **named), opening(seed=7))
        await talk.agent(10)
        assert "compact=1" in talk.headers[-1]["x-weir-actions"]

        new = await command("keys", "rotate", "bot", "--grace", "4s", *store)
        assert new != old
        assert await accepted(weir, old)
        await until(lambda: accepted(weir, new))
        await until(lambda: refused(weir, old))
        assert await accepted(weir, new)

        talk.client = weir.client(new, **named)
        await talk.agent(1)
        assert talk.headers[-1]["x-weir-actions"] == talk.headers[-2]["x-weir-actions"], "the same edits, none anew"
    rows = json.loads(
        (await asyncio.to_thread(invoked, "conversations", "show", "support-4711", "--json", *store)).stdout
    )
    assert rows["requests"] == 11
    used = await asyncio.to_thread(invoked, "usage", *store)
    assert used.stdout.count("bot") == 1


def invoked(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


@pytest.mark.requirement("P7", "R.79")
async def test_a_key_takes_what_it_may_until_it_expires_and_is_told_so(
    simulator: RunningSimulator, tmp_path: Path
) -> None:
    store = ["--store", f"sqlite+aiosqlite:///{tmp_path}/w.db"]
    limited = await command("keys", "create", "--name", "bot", "--requests-per-minute", "2", "--expires", "30d", *store)
    free = await command("keys", "create", "--name", "other", *store)
    async with WeirProcess(["--upstream", simulator.base_url, *store], free_port()) as weir:
        assert [await accepted(weir, limited), await accepted(weir, limited)] == [True, True]
        with pytest.raises(openai.RateLimitError, match="2 requests within a minute") as too_many:
            await weir.client(limited).chat.completions.create(model="sim", messages=opening())
        assert 0 < int(too_many.value.response.headers["retry-after"]) <= 60
        assert await accepted(weir, free), "others are served beside it"

        await command("keys", "limit", "bot", "--requests-per-minute", "none", *store)
        await until(lambda: accepted(weir, limited))
        await command("keys", "limit", "bot", "--expires", soon(2.0), *store)
        await until(lambda: refused(weir, limited))
        with pytest.raises(openai.AuthenticationError, match="This API key expired at 20"):
            await weir.client(limited).chat.completions.create(model="sim", messages=opening())
        assert await accepted(weir, free)


def soon(seconds: float) -> str:
    """A moment so soon, as ISO 8601 writes it."""
    return datetime.fromtimestamp(time.time() + seconds, tz=UTC).isoformat()
