"""``weir watch``: what passes through a running Weir is seen once, by whom it belongs to."""

import asyncio
import fcntl
import json
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from proxy.cli import main
from tests.functional.harness import COUNTER, ROOT, RunningWeir, Talk, free_port, weir
from tests.functional.test_demo import read
from tests.upstream.app import serve_simulator
from tests.upstream.model import SimulatorSettings

NAME = "fix-the-tests"
ENV = {**{k: v for k, v in os.environ.items() if not k.startswith(("WEIR_", "OPENAI_"))}, "PYTHONPATH": str(ROOT)}


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[RunningWeir]:
    yaml = "upstreams: {{main: {{base_url: '{}'}}}}\nauth: {{admin_token: token-of-the-operator}}\n"
    async with (
        serve_simulator(SimulatorSettings(), counter=COUNTER) as simulator,
        weir("", tmp_path / "w.db", yaml=yaml.format(simulator.base_url), folder=tmp_path, window=4096) as target,
    ):
        yield target


def heeding_interrupts() -> None:
    """Tests that a shell started in the background begin with interrupts ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def talk(target: RunningWeir, name: str, key: str = "sk-mine") -> Talk:
    return Talk(target.client(key, default_headers={"x-weir-conversation": name}))


async def test_every_request_is_seen_once_with_what_was_done_to_it(running: RunningWeir) -> None:
    mine, other = talk(running, NAME), talk(running, "another", "sk-other")
    await mine.agent(1)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "proxy", "watch", "--url", running.root, "--interval", "0.05", "--json",
        stdout=subprocess.PIPE, env={**ENV, "OPENAI_API_KEY": "sk-mine"}, preexec_fn=heeding_interrupts,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        async with asyncio.timeout(60):
            seen = [json.loads(await process.stdout.readline())]
            await other.agent(1)
            for _ in range(11):
                await mine.agent(1)
                seen.append(json.loads(await process.stdout.readline()))
    finally:
        process.send_signal(signal.SIGINT)
    assert await asyncio.wait_for(process.wait(), 60) == 0

    assert [row["name"] for row in seen] == [NAME] * 12
    assert len({row["id"] for row in seen}) == 12
    told = [dict(part.split("=") for part in headers["x-weir-tokens"].split(";")) for headers in mine.headers]
    assert [(row["tokens_before"], row["tokens_after"]) for row in seen] == [
        (int(each["before"]), int(each["after"])) for each in told
    ]
    assert any("compact" in row["actions"] for row in seen)


async def test_a_terminal_shows_the_newest_of_all_keys_to_the_operator(running: RunningWeir) -> None:
    await talk(running, NAME).agent(12)
    await talk(running, "another", "sk-other").agent(1)

    shown = await asyncio.to_thread(watched, running.root, WEIR_ADMIN_TOKEN="token-of-the-operator")

    assert all(title in shown for title in ("conversation", "sent > forwarded", "pressure", "action"))
    assert NAME in shown
    assert "another" in shown
    assert "compact=1" in shown
    assert "> 2," in shown or "> 1," in shown


def watched(root: str, **more: str) -> str:
    """What a terminal of 80 columns shows until the first whole picture is there."""
    terminal, other = pty.openpty()
    fcntl.ioctl(other, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 80, 0, 0))
    with subprocess.Popen(
        [sys.executable, "-m", "proxy", "watch", "--url", root, "--since", "1h"],
        env={**ENV, "TERM": "xterm-256color", **more}, stdin=other, stdout=other, stderr=other,
        preexec_fn=heeding_interrupts,
    ) as process:  # fmt: skip
        os.close(other)
        late = threading.Timer(60, process.kill)
        late.start()
        shown = b""
        while b"another" not in shown and (more_of_it := read(terminal)):
            shown += more_of_it
        process.send_signal(signal.SIGINT)
        while more_of_it := read(terminal):
            shown += more_of_it
        assert process.wait(60) == 0, shown
        late.cancel()
    os.close(terminal)
    return shown.decode()


async def test_what_goes_wrong_is_said_with_what_to_do(running: RunningWeir) -> None:
    nobody = f"http://127.0.0.1:{free_port()}"
    said = {
        ("--url", nobody): f"no Weir answers at {nobody} (Connection refused): start one with weir serve",
        ("--url", running.root, "--key", "weir-sk-unknown"): "this key is refused: give the admin token",
        ("--url", running.root, "--since", "soon"): "since must be seconds since 1970, or like 90m",
    }
    for arguments, words in said.items():
        done = await asyncio.to_thread(CliRunner().invoke, main, ["watch", *arguments])
        assert done.exit_code in (1, 2)
        assert words in done.stderr
