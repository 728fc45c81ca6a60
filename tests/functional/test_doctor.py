"""``weir doctor``: each thing that can be wrong is made wrong, and found with what to do about it."""

import asyncio
import contextlib
import email.utils
import json
import os
import socket
import sqlite3
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from proxy.cli import main
from proxy.store.schema import HEAD
from tests.functional.harness import COUNTER, free_port, weir
from tests.functional.scripted import Asked, Reply, scripted
from tests.upstream.app import RunningSimulator, serve_simulator
from tests.upstream.model import SimulatorSettings

Found = dict[str, tuple[str, str, str]]


@pytest.fixture
async def simulator() -> AsyncIterator[RunningSimulator]:
    settings = SimulatorSettings(models=("sim", "gpt-4o-mini"))
    async with serve_simulator(settings, counter=COUNTER) as running:
        yield running


async def doctor(*arguments: str, env: dict[str, str] | None = None) -> tuple[int, Found]:
    """The exit code, and of each check its state, what was said and what is to be done."""
    clean = {k: None for k in os.environ if k.startswith(("WEIR_", "OPENAI_", "TIKTOKEN_"))}
    done = await asyncio.to_thread(
        CliRunner().invoke, main, ["doctor", *arguments, "--json"], env={**clean, **(env or {})}
    )
    told = json.loads(done.stdout)
    assert told["ok"] == (done.exit_code == 0)
    return done.exit_code, {each["check"]: (each["state"], each["said"], each["do"]) for each in told["checks"]}


def written(folder: Path, upstream: str, *, port: int = 0, more: str = "", key: str = "sk-right") -> str:
    """A configuration file; whatever it does not say is healthy."""
    path = folder / "weir.yaml"
    path.write_text(
        f"listen: {{port: {port}}}\nupstreams: {{main: {{base_url: '{upstream}', api_key: {key}}}}}\n"
        + (more or f"store: {{url: 'sqlite+aiosqlite:///{folder}/w.db'}}\n")
    )
    return str(path)


@pytest.mark.parametrize(
    ("key", "sent", "state", "said"),
    [
        ("sk-wrong", "", "fail", "it is refused (401)"),
        ("pass", "sk-wrong", "warn", "OPENAI_API_KEY is refused (401)"),
        ("pass", "", "warn", "OPENAI_API_KEY is not set here"),
        ("pass", "sk-right", "ok", "it is accepted"),
    ],
)
async def test_a_key_that_is_refused_is_found(key: str, sent: str, state: str, said: str, tmp_path: Path) -> None:
    def listing(asked: Asked) -> Reply:
        return Reply(200 if asked.headers.get("authorization") == "Bearer sk-right" else 401, chunks=(b"{}",))

    async with scripted(listing) as server:
        path = written(tmp_path, server.base_url, key=key)
        code, found = await doctor("--config", path, env={"OPENAI_API_KEY": sent} if sent else {})

    assert found["key of main"][0] == state
    assert said in found["key of main"][1]
    assert code == (state == "fail")
    assert (state == "ok") == (found["key of main"][2] == "")


async def test_an_upstream_that_is_away_and_a_model_that_nobody_knows_are_found(
    simulator: RunningSimulator, tmp_path: Path
) -> None:
    away = written(tmp_path, f"http://127.0.0.1:{free_port()}/v1")
    code, found = await doctor("--config", away, "--model", "my-own-model")
    assert (code, found["upstream main"][0]) == (1, "fail")
    assert "Connection refused" in found["upstream main"][1]
    assert found["model"] == (
        "warn", "nobody knows the window of my-own-model",
        'state it in the file: models: [{match: "my-own-model", window: 8192}]',
    )  # fmt: skip

    _, found = await doctor("--config", written(tmp_path, simulator.base_url), "--model", "my-own-model")
    assert found["model"] == ("warn", "no upstream lists my-own-model", "they list gpt-4o-mini, sim")

    told = json.dumps({"data": [{"id": "local", "max_model_len": 16384}]}).encode()
    async with scripted(lambda _: Reply(chunks=(told,))) as server:
        _, found = await doctor("--config", written(tmp_path, server.base_url))
    assert found["model"] == ("ok", "local, a window of 16,384 tokens as the upstream says", "")


@pytest.mark.parametrize(("days", "state"), [(0.01, "warn"), (-2, "fail")])
async def test_a_clock_that_disagrees_with_the_upstreams_is_found(days: float, state: str, tmp_path: Path) -> None:
    theirs = email.utils.formatdate(time.time() - days * 86_400, usegmt=True)
    async with scripted(lambda _: Reply(chunks=(b"{}",), headers=(("Date", theirs),))) as server:
        _, found = await doctor("--config", written(tmp_path, server.base_url))

    assert found["clock"][0] == state
    assert ("ahead of" if days > 0 else "behind") in found["clock"][1]


async def test_what_is_wrong_with_the_store_is_found(simulator: RunningSimulator, tmp_path: Path) -> None:
    with contextlib.closing(sqlite3.connect(tmp_path / "w.db")) as database:
        database.execute("CREATE TABLE somebody_elses (id)")
    code, found = await doctor("--config", written(tmp_path, simulator.base_url))
    assert (code, found["store"][0]) == (1, "fail")

    gone = written(tmp_path, simulator.base_url, more="store: {url: 'sqlite+aiosqlite:////nowhere/w.db'}\n")
    code, found = await doctor("--config", gone)
    assert found["store"][:2] == ("fail", "/nowhere/w.db cannot be made")

    (tmp_path / "w.db").unlink()
    shut = written(
        tmp_path,
        simulator.base_url,
        more=f"auth: {{mode: keys}}\nstore: {{url: 'sqlite+aiosqlite:///{tmp_path}/w.db'}}\n",
    )
    _, found = await doctor("--config", shut)
    assert found["keys"] == ("warn", "there is none, so nobody may call", "weir keys create --name me")
    made = ["keys", "create", "--name", "me", "--config", shut]
    assert (await asyncio.to_thread(CliRunner().invoke, main, made)).exit_code == 0
    code, found = await doctor("--config", shut)
    assert (code, "keys" in found) == (0, False)
    assert found["store"][1].startswith(f"it can be written, schema {HEAD}, 0 conversations in ")


async def test_another_store_than_the_configured_one_is_checked_by_its_path_or_its_url(
    simulator: RunningSimulator, tmp_path: Path
) -> None:
    path = written(tmp_path, simulator.base_url)
    other = tmp_path / "other.db"
    for store in (str(other), f"sqlite+aiosqlite:///{other}"):
        _, found = await doctor("--config", path, "--store", store)
        assert found["store"] == ("ok", f"{other} will be made", "")
    other.write_bytes(b"no database at all" * 300)
    code, found = await doctor("--config", path, "--store", str(other))
    assert (code, found["store"][0]) == (1, "fail")

    other.write_bytes(b"")
    code, found = await doctor("--config", path, "--store", str(other))
    state, said, do = found["store"]
    assert (code, state) == (1, "fail")
    assert "the database has no tables" in said
    assert do == f"weir db migrate --store {other} makes its tables"

    made = await asyncio.to_thread(CliRunner().invoke, main, ["db", "migrate", "--store", str(other)])
    assert made.exit_code == 0
    with contextlib.closing(sqlite3.connect(other)) as opened, opened:
        opened.execute("UPDATE alembic_version SET version_num = '0026'")
    code, found = await doctor("--config", path, "--store", str(other))
    state, said, do = found["store"]
    assert (code, state) == (1, "fail")
    assert "the database has schema 0026, of a Weir before the first release" in said
    assert do == "name another file or database (--store, store.url)"


async def test_a_port_that_is_taken_is_found_unless_a_weir_has_it(simulator: RunningSimulator, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        other.settimeout(0)
        code, found = await doctor("--config", written(tmp_path, simulator.base_url, port=port))
        assert (code, found["port"][1]) == (1, f"another program has 127.0.0.1:{port}")

    async with weir(simulator.base_url) as target:
        port = int(target.root.rpartition(":")[2])
        code, found = await doctor("--config", written(tmp_path, simulator.base_url, port=port))
        assert (code, found["port"][:2]) == (0, ("ok", f"a Weir answers on 127.0.0.1:{port}"))


def test_for_people_it_is_a_line_each_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(main, ["doctor"], env={k: None for k in os.environ if k.startswith(("WEIR_", "OPENAI_"))})

    assert done.exit_code == 0
    assert "warn  upstream: none is named, the built-in simulator will answer: weir init writes one\n" in done.stdout
    assert all(line[:6] in ("ok    ", "warn  ", "fail  ") for line in done.stdout.splitlines())


async def test_a_page_in_place_of_the_api_has_tried_no_key(tmp_path: Path) -> None:
    def page(_: Asked) -> Reply:
        return Reply(200, kind="text/html", chunks=(b"<html>Welcome</html>",))

    async with scripted(page) as server:
        code, found = await doctor("--config", written(tmp_path, server.base_url))

    assert code == 0
    assert found["key of main"][0] == "warn"
    assert "text/html, no list of models, so it was not tried" in found["key of main"][1]
