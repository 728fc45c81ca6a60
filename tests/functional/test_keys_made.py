"""Who may call a Weir as keys come and go: a process of its own, `weir keys` beside it, the real SDK."""

import asyncio
import json
import re
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path

import httpx
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


@pytest.mark.requirement("S.29", "A0.45")
async def test_taking_the_last_key_out_of_the_file_opens_nothing_while_weir_runs(
    simulator: RunningSimulator, tmp_path: Path
) -> None:
    path, base = tmp_path / "weir.yaml", {"upstreams": {"main": {"base_url": simulator.base_url}}}
    path.write_text(json.dumps({**base, "keys": [{"name": "mine", "secret": "sk-of-the-file"}]}))
    arguments = ["--config", str(path), "--store", f"sqlite+aiosqlite:///{tmp_path}/w.db"]
    async with WeirProcess(arguments, free_port()) as weir:
        assert await accepted(weir, "sk-of-the-file")
        assert weir.process is not None

        path.write_text(json.dumps(base))
        weir.tell(signal.SIGHUP)
        await until(lambda: refused(weir, "sk-of-the-file"))
        assert await refused(weir, STRANGER)
        await until(lambda: asyncio.to_thread(says, weir, "no key is left"))

        path.write_text(json.dumps({**base, "auth": {"mode": "open"}}))
        weir.tell(signal.SIGHUP)
        await until(lambda: accepted(weir, STRANGER))
        await until(lambda: asyncio.to_thread(says, weir, "anybody who can connect may call"))


@pytest.mark.requirement("S.29", "P7")
@pytest.mark.parametrize("given", ["flag", "variable", "keys"])
async def test_keys_come_by_environment_and_the_mode_by_either(
    simulator: RunningSimulator, tmp_path: Path, given: str
) -> None:
    arguments = ["--upstream", simulator.base_url, "--store", f"sqlite+aiosqlite:///{tmp_path}/w.db"]
    env = {
        "flag": {},
        "variable": {"WEIR_AUTH_MODE": "keys"},
        "keys": {"WEIR_KEYS": "app=sk-of-the-app, job=sk-of-the-job", "WEIR_ADMIN_TOKEN": "token-of-the-operator"},
    }[given]
    arguments += ["--auth-mode", "keys"] if given == "flag" else []
    has_keys = given == "keys"
    async with WeirProcess(arguments, free_port(), env=env) as weir:
        assert await refused(weir, STRANGER)
        assert await accepted(weir, "sk-of-the-job") == has_keys
        assert says(weir, "open to whoever has one of 2 keys" if has_keys else "nobody may call until you make one")
        assert not says(weir, "sk-of-the-")


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


async def test_rotating_is_said_with_what_to_do_and_can_be_cut_short(tmp_path: Path) -> None:
    store = ["--store", f"sqlite+aiosqlite:///{tmp_path}/w.db"]
    (tmp_path / "weir.yaml").write_text("keys: [{name: filed, secret: sk-of-the-file}]\n")

    def run(*arguments: str) -> Result:
        return invoked("keys", *arguments, *store)

    def story() -> None:
        run("create", "--name", "bot", "--policy", "audit", "--models", "gpt-*")
        told = json.loads(run("rotate", "bot", "--grace", "1h", "--json").stdout)
        listed = {row["name"]: row for row in json.loads(run("list", "--json").stdout)}
        assert set(listed) == {"bot", told["former"]}
        assert (listed["bot"]["policy"], listed["bot"]["models"]) == ("audit", ["gpt-*"])
        assert listed[told["former"]]["revoked"] == pytest.approx(time.time() + 3600, abs=600)
        assert run("revoke", told["former"]).exit_code == 0
        assert "bot" in run("rotate", "bott").stderr
        assert run("rotate", "bot", "--grace", "soon").exit_code == 2
        assert "change its secret there" in run("rotate", "filed", "--config", str(tmp_path / "weir.yaml")).stderr
        assert "The old one no longer holds." in run("rotate", "bot", "--grace", "0s").stderr

    await asyncio.to_thread(story)


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


@pytest.mark.requirement("P7", "S.29")
async def test_a_key_of_the_file_has_limits_and_an_expiry_too(simulator: RunningSimulator, tmp_path: Path) -> None:
    path = tmp_path / "weir.yaml"
    path.write_text(
        f"upstreams: {{main: {{base_url: '{simulator.base_url}'}}}}\nauth: {{admin_token: of-the-admin}}\nkeys:\n"
        "  - {name: over, secret: sk-of-yesterday, expires: 2024-02-29}\n"
        "  - {name: slow, secret: sk-of-the-slow, requests_per_minute: 1, expires: 2124-02-29T12:00Z}\n"
    )
    arguments = ["--config", str(path), "--store", f"sqlite+aiosqlite:///{tmp_path}/w.db"]
    async with WeirProcess(arguments, free_port()) as weir:
        for _ in range(12):  # more than there may be guesses: whoever was let in once does not guess
            with pytest.raises(openai.AuthenticationError, match="expired at 2024-02-29 00:00 UTC"):
                await weir.client("sk-of-yesterday").chat.completions.create(model="sim", messages=opening())
        assert [await accepted(weir, "sk-of-the-slow"), await accepted(weir, "sk-of-the-slow")] == [True, False]
        async with httpx.AsyncClient(headers={"authorization": "Bearer of-the-admin"}, trust_env=False) as http:
            again = await http.post(f"{weir.root}/weir/keys", json={"name": "slow"})
        assert again.status_code == 400
        assert "take another name" in again.json()["error"]["message"]
    failed = invoked("keys", "create", "--name", "slow", *arguments)
    assert failed.exit_code == 2
    assert "the configuration has a key 'slow' already" in failed.stderr


def test_what_is_no_limit_is_said_on_the_command_line(tmp_path: Path) -> None:
    store = ["--store", f"sqlite+aiosqlite:///{tmp_path}/w.db"]
    assert invoked("keys", "create", "--name", "bot", "--concurrency", "3", *store).exit_code == 0
    for name, value in (("--concurrency", "0"), ("--requests-per-minute", "many"), ("--expires", "soon")):
        failed = invoked("keys", "limit", "bot", name, value, *store)
        assert failed.exit_code == 2
        assert f"{name[2:].replace('-', '_')} should be" in failed.stderr
    assert "lies in the past" in invoked("keys", "limit", "bot", "--expires", "2024-02-29", *store).stderr
    assert "give --concurrency" in invoked("keys", "limit", "bot", *store).stderr
    assert "bot" in invoked("keys", "limit", "bott", "--concurrency", "2", *store).stderr
    (row,) = json.loads(invoked("keys", "list", "--json", *store).stdout)
    assert (row["concurrency"], row["requests_per_minute"], row["expires"]) == (3, None, None)
    assert re.search(r"^bot( +-){4} +3 ", invoked("keys", "list", *store).stdout, re.MULTILINE)


def test_an_empty_pattern_for_models_makes_no_key(tmp_path: Path) -> None:
    store = ["--store", f"sqlite+aiosqlite:///{tmp_path}/w.db"]
    failed = invoked("keys", "create", "--name", "bot", "--models", "", *store)
    assert failed.exit_code == 2
    assert "--models: should not be empty" in failed.stderr
