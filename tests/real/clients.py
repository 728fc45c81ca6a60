"""Real clients: how each is installed, what docs/clients/ has its users set, and what it is run with."""

import asyncio
import json
import os
import re
import shutil
import signal
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.functional.harness import ROOT, WeirProcess, free_port
from tests.real.drivers.common import AGAIN, GREETING, TASK
from tests.real.environments import HERE, environment, packages
from tests.real.scripted import Script

DRIVERS = HERE / "drivers"
DOCS = ROOT / "docs" / "clients.md"
STARTS = ROOT / "docs" / "clients"
ADDRESS = "http://127.0.0.1:8400"
NOWHERE = "http://127.0.0.1:9"
"""What stands in for the way to the internet: nothing listens there."""
QUICK_START = re.compile(r"<!-- quick start: ([\w -]+) -->\n```(\w+)\n(.*?)```", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Client:
    """A program on an endpoint, run in one way.

    ``start`` is the quick start in docs/clients/. ``python`` or ``npm`` names what is installed. A library is run by
    a ``driver``; a ``program`` of npm's is run with ``ask`` before a prompt, with ``again`` to go on.
    """

    name: str
    endpoint: str
    start: str
    arguments: tuple[str, ...] = ()
    python: str = ""
    npm: str = ""
    driver: str = ""
    program: str = ""
    ask: tuple[str, ...] = ()
    again: tuple[str, ...] = ()
    steps: int = 30
    window: int = 8_192
    streams: bool = False

    @property
    def id(self) -> str:
        """What a test calls it."""
        return " ".join((self.name, *self.arguments))


def quick_starts() -> str:
    """What the clients' pages say."""
    return "".join(page.read_text() for page in sorted(STARTS.glob("*.md")))


def quick_start(name: str) -> tuple[Mapping[str, str], str]:
    """What docs/clients/ has a user of this client export, and put into its configuration."""
    exported, config = {}, ""
    for each, kind, text in QUICK_START.findall(quick_starts()):
        if each != name:
            continue
        if kind == "sh":
            exported |= dict(re.findall(r"^export (\w+)=(\S+)", text, re.MULTILINE))
        else:
            config += text
    assert exported or config, name
    return exported, config


class Failed(Exception):
    """A client ended with an error; what it printed."""


@dataclass(slots=True)
class Place:
    """A folder of the client's own, with the tool in it."""

    folder: Path
    base: str
    client: Client
    system: str = ""
    led: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self.work.mkdir(parents=True)
        for file in ("step.py", "common.py", self.client.driver):
            if file:
                shutil.copy(DRIVERS / file, self.work)
        if self.client.npm:
            (self.work / "node_modules").symlink_to(self.installed / "node_modules")
        _, config = quick_start(self.client.start)
        if config:  # Codex's
            (self.folder / ".codex").mkdir()
            (self.folder / ".codex" / "config.toml").write_text(config.replace(ADDRESS, self.base))

    @property
    def work(self) -> Path:
        """Where it is run."""
        return self.folder / "work"

    @property
    def installed(self) -> Path:
        """Where it is installed; raises Unavailable."""
        return packages(self.client.npm) if self.client.npm else environment(self.client.python)

    @property
    def steps(self) -> list[str]:
        """The steps that were run."""
        log = self.work / "steps.log"
        return log.read_text().split() if log.exists() else []

    def environment(self) -> dict[str, str]:
        """Nothing of this process's, and what the quick start says."""
        exported = {} if self.led else quick_start(self.client.start)[0]
        return {
            **{k: v for k, v in os.environ.items() if k in ("PATH", "LANG", "LD_LIBRARY_PATH")},
            **{f"{scheme}_proxy": NOWHERE for scheme in ("http", "https", "HTTP", "HTTPS")},
            "no_proxy": "127.0.0.1",
            "NO_PROXY": "127.0.0.1",
            "TASK": TASK,
            "SYSTEM": self.system,
            "HOME": str(self.folder),
            "CODEX_HOME": str(self.folder / ".codex"),
            "TMPDIR": str(self.folder),
            "CI": "1",
            "NO_COLOR": "1",
            "TERM": "dumb",
            **{name: value.replace(ADDRESS, self.base) for name, value in exported.items()},
        }

    def command(self, prompt: Sequence[str] = ()) -> Sequence[str]:
        """What is run."""
        if self.client.python:
            return [str(self.installed / "bin" / "python"), self.client.driver, *self.client.arguments]
        if self.client.driver:
            return ["node", self.client.driver, *self.client.arguments]
        return [str(self.installed / "node_modules" / self.client.program), *prompt]

    async def run(self, *prompt: str, timeout: float = 200) -> str:
        """What it printed; raises Failed where it ended with an error."""
        process = await asyncio.create_subprocess_exec(
            *self.led,
            *self.command(prompt),
            cwd=self.work,
            env=self.environment(),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        try:
            out, err = await asyncio.wait_for(process.communicate(), timeout)
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
        if process.returncode:
            raise Failed(f"{out.decode()[-1500:]}\n{err.decode()[-3000:]}")
        return out.decode()

    async def drive(self) -> dict[str, Any]:
        """What the client was told: a greeting, the end of the loop, and a word after it."""
        client = self.client
        if client.driver:
            found: dict[str, Any] = json.loads((await self.run()).strip().splitlines()[-1])
            return found
        greeting = await self.run(*client.ask, GREETING)
        said = await self.run(*client.ask, TASK, timeout=500)
        again = await self.run(*client.again, AGAIN)
        return {"greeting": greeting.strip(), "said": said.strip(), "again": again.strip()}


@dataclass(slots=True)
class Setting:
    """A client in front of Weir in front of a model."""

    place: Place
    script: Script
    weir: WeirProcess
    restarts: int = 0

    async def restart_at(self, step: int) -> None:
        """Stop Weir and start it again while step ``step`` runs."""
        pause = self.place.work / f"pause-{step}"
        pause.touch()
        while not (self.place.work / "paused").exists():
            await asyncio.sleep(0.05)
        await self.weir.stop()
        await self.weir.start()
        self.restarts += 1
        pause.unlink()


Model = Callable[[Script, str], AbstractAsyncContextManager[str]]


@asynccontextmanager
async def through_weir(
    client: Client, folder: Path, model: Model, script: Script, *, window: int, system: str = "", policy: str = ""
) -> AsyncIterator[Setting]:
    """The client before a Weir that takes the model's window to be ``window`` tokens."""
    async with model(script, client.endpoint) as upstream:
        store = f"sqlite+aiosqlite:///{folder / 'weir.db'}"
        arguments = ["--upstream", upstream, "--window", str(window), "--store", store, "--summarizer", "same"]
        arguments += ["--policy", policy] if policy else []
        async with WeirProcess(arguments, free_port()) as weir:
            yield Setting(Place(folder / "home", weir.root, client, system), script, weir)
