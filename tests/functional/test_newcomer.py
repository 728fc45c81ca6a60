"""What a stranger finds in README and docs is typed in: every command is run, or named here with why it is not."""

import asyncio
import contextlib
import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from proxy.cli import main
from tests.functional.harness import COUNTER, ROOT, Talk, WeirProcess, free_port
from tests.golden.cli import session
from tests.upstream.app import serve_simulator
from tests.upstream.model import SimulatorSettings

pytestmark = pytest.mark.slow

PAGES = (
    ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", ROOT / "examples" / "README.md",
    *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs" / "clients").glob("*.md")),
)  # fmt: skip
NOT_RUN = {
    "export ": "sets a variable; the test's environment has it",
    "pip install ": "test_installed.py installs the wheel into an empty environment",
    "uvx ": "needs a registry that has the wheel",
    "docker build ": "needs a Docker daemon; test_container.py runs what the image would",
    "helm install ": "needs a cluster; test_deploy.py renders the chart",
    "kubectl ": "needs a cluster",
    "docker compose": "needs a Docker daemon; test_container.py runs what the image would",
    "mkdir ": "downloads clients from registries",
    "for each ": "downloads clients from registries",
    "cd .. && python -m benchmarks.broken_streams": "drives those clients; needs what was downloaded",
    "claude mcp add ": "needs Claude Code; tests/real/test_mcp.py runs it with what weir run gives it",
    "codex mcp add ": "needs Codex; as above",
    "cline auth ": "needs Cline; benchmarks/broken_streams.py runs it so",
    "OTEL_EXPORTER_OTLP_ENDPOINT=": "needs a collector; test_traces.py starts one",
}
"""Commands that are not run, by how they begin, and why."""
ELSEWHERE = {
    "weir demo": "test_demo.py",
    "weir serve": "test_readme.py, and by the newcomer",
    "curl -i http://127.0.0.1:8400/v1/chat/completions": "test_readme.py",
    ".venv/bin/weir serve": "test_readme.py",
}
STRAIGHT = r"weir (audit|replay|doctor|policy|conversations|db|keys|usage|health)\b"
NAME = "support-4711"


@dataclass(frozen=True, slots=True)
class Typed:
    """A command as a page prints it, without its comment."""

    page: str
    line: str


def commands() -> Iterator[Typed]:
    """Every line of every block of commands."""
    for path in PAGES:
        name = str(path.relative_to(ROOT)) if path.parent.name == "examples" else path.name
        for language, text in re.findall(r"^```(\w*)\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL):
            for line in re.sub(r"\\\n\s*", "", text).splitlines() if language in ("", "sh") else ():
                said = re.sub(r"(^|\s+)# .*$", "", line).strip()
                if said:
                    yield Typed(name, said)


def lines(page: str, beginning: str) -> list[str]:
    return [each.line for each in commands() if each.page == page and re.match(beginning, each.line)]


def test_every_command_is_run_by_a_test_or_named_with_why_it_is_not() -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    made = [f"make {name}" for name in targets]
    runs = (*(re.escape(each) for each in (*NOT_RUN, *ELSEWHERE, *made)), r"curl .*\$WEIR/", STRAIGHT, *STEPS)
    assert [each for each in commands() if not any(re.match(begin, each.line) for begin in runs)] == []
    unused = [each for each in (*NOT_RUN, *ELSEWHERE) if not any(c.line.startswith(each) for c in commands())]
    assert unused == []


def test_every_link_leads_to_a_page_and_every_page_is_in_the_index() -> None:
    for path in PAGES:
        targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", path.read_text())
        lost = [each for each in targets if "://" not in each and not (path.parent / each).exists()]
        assert lost == [], path.name
    index = (ROOT / "docs" / "README.md").read_text()
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert [name for name in pages if f"({name})" not in index] == []
    clients = (ROOT / "docs" / "clients.md").read_text()
    assert [
        path.name for path in (ROOT / "docs" / "clients").glob("*.md") if f"(clients/{path.name})" not in clients
    ] == []
    assert len((ROOT / "README.md").read_text().splitlines()) <= 180


def test_every_command_that_is_only_mentioned_is_one() -> None:
    mentioned = [each for path in PAGES for each in re.findall(r"`(weir [^`]+)`", path.read_text())]
    assert len(mentioned) > 100
    for line in mentioned:
        command: click.Command = main
        for word in line.split()[1:]:
            if isinstance(command, click.Group) and re.fullmatch(r"[a-z-]+", word):
                found = command.get_command(click.Context(command), word)
                assert found is not None, line
                command = found
            elif word == "--":
                break
            elif word.startswith("--"):
                known = {option for parameter in command.params for option in parameter.opts}
                assert word in known | {"--help", "--version"}, line


STEPS = (r"weir init$", r"weir serve --config weir\.yaml$", r"weir run -- ", r"weir conversations list$")
"""What the newcomer does in order, in :func:`place` and the test of each."""


@dataclass(slots=True)
class Place:
    """A folder in which somebody has followed the README, and the Weir that runs there."""

    folder: Path
    weir: WeirProcess
    key: str
    store: str
    talk: Any = None

    def env(self) -> dict[str, str]:
        """The variables that the pages have one export."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("WEIR_", "OPENAI_", "OTEL_"))}
        return {
            **kept, "PYTHONPATH": str(ROOT), "PATH": f"{self.folder}:{os.environ['PATH']}", "OPENAI_API_KEY": self.key,
            "WEIR_PORT": str(self.weir.port), "WEIR": f"{self.weir.root}/weir", "KEY": self.key, "ADMIN": "an-operator",
            "MODEL": "sim",
            "WEIR_STORE": self.store,
        }  # fmt: skip

    async def typed(self, line: str, *, folder: Path | None = None) -> str:
        """What a shell prints after a command, which has to succeed."""
        pipes = {"stdout": asyncio.subprocess.PIPE, "stderr": asyncio.subprocess.PIPE}
        where: dict[str, Any] = {"cwd": folder or self.folder, "env": self.env(), **pipes}
        if re.fullmatch(r"weir [\w ./-]+", line):  # nothing in it is for the shell
            words = [sys.executable, "-m", "proxy", *line.split()[1:]]
            process = await asyncio.create_subprocess_exec(*words, **where)
        else:
            process = await asyncio.create_subprocess_shell(line, **where)
        out, err = await asyncio.wait_for(process.communicate(), 60)
        assert process.returncode == 0, (line, out, err)
        return out.decode()

    async def invoked(self, line: str) -> str:
        """The same of a command of Weir's, in this process."""
        clean = {name: None for name in os.environ if name.startswith(("WEIR_", "OPENAI_", "OTEL_"))}
        with contextlib.chdir(self.folder):
            words = shlex.split(line)[1:]
            done = await asyncio.to_thread(CliRunner().invoke, main, words, env={**clean, **self.env()})
        assert done.exit_code == 0, (line, done.output)
        return done.stdout


@contextlib.asynccontextmanager
async def following(folder: Path) -> AsyncIterator[Place]:
    """The README's own commands: init, a key, serve; then a conversation that outgrows its window."""
    for name, words in (("weir", "-m proxy"), ("python", "")):
        (folder / name).write_text(f'#!/bin/sh\nexec {sys.executable} {words} "$@"\n')
        (folder / name).chmod(0o755)
    (folder / "sessions.jsonl").write_text(json.dumps({"messages": session(6)}) + "\n")
    (init,) = lines("README.md", STEPS[0])
    (serve,) = lines("README.md", STEPS[1])
    store = f"sqlite+aiosqlite:///{folder}/weir.db"
    async with serve_simulator(SimulatorSettings(window=8192, models=("sim",)), counter=COUNTER) as simulator:
        weir = WeirProcess([], free_port(), env={"WEIR_ADMIN_TOKEN": "an-operator", "WEIR_STORE": store})
        place = Place(folder, weir, key="", store=store)
        await place.invoked(f"{init} --upstream {simulator.base_url} --window 8192 --yes")
        place.key = (await place.invoked("weir keys create --name me --config weir.yaml")).splitlines()[0]
        weir.arguments = shlex.split(serve.replace("weir.yaml", str(folder / "weir.yaml")))[2:]
        async with weir:
            place.talk = Talk(weir.client(place.key, default_headers={"x-weir-conversation": NAME}))
            await place.talk.agent(24)
            yield place


@pytest.mark.timeout(600)  # some sixty commands
async def test_a_newcomer_types_what_is_printed(tmp_path: Path) -> None:
    async with following(tmp_path) as place:
        (doctor,) = lines("README.md", "weir doctor")
        assert "fail" not in await place.invoked(doctor)
        (listed,) = lines("README.md", STEPS[3])
        assert NAME in await place.invoked(listed)
        (run,) = lines("README.md", "weir run -- COMMAND")
        assert "x-weir-conversation: conv-" in await place.typed(
            run.replace("COMMAND", f"python {ROOT}/examples/chat.py")
        )
        for line in lines("examples/README.md", "weir run -- python"):
            await place.typed(line, folder=ROOT)
        assert (await place.typed(f"OPENAI_BASE_URL={place.weir.base_url} {ROOT}/examples/chat.sh")).count(
            "HTTP/1.1 200"
        ) == 1
        await archive(place)
        for line in (*lines("audit.md", "weir"), *lines("cookbook.md", "weir")):
            await offline(place, line)


async def archive(place: Place) -> None:
    """Every curl of the page about the management API, about a conversation that is there; what deletes it comes last."""
    if shutil.which("curl") is None:
        pytest.skip("there is no curl")
    ref = json.loads(await place.invoked(f"weir conversations show {NAME} --removed --json"))[0]["ref"]
    version = json.loads(await place.invoked(f"weir conversations show {NAME} --checkpoint --json"))["version"]
    await place.invoked("weir keys create --name support")
    request = json.loads(await place.invoked(f"weir conversations show {NAME} --timeline --json"))[-1]["id"]
    there = {
        "74e67f258338": ref,
        "req_5f0c": request,
        "checkpoints/1": f"checkpoints/{version}",
        "rollback/3": "rollback/0",
        "=65536": "=0",
    }
    typed = lines("api.md", "curl")
    assert len(typed) > 25
    for line in sorted(
        typed, key=lambda each: ("-X POST" in each) + ("/rollback/" in each) + 3 * ("-X DELETE" in each)
    ):
        own = line
        for printed, mine in there.items():
            own = own.replace(printed, mine)
        if "/live" in own:  # it goes on until the reader has enough
            own = f"{own} --max-time 3 || [ $? = 28 ]"
        fails = "" if "/windows/forget" in own else "-f "  # nothing was learned here that could be forgotten
        await place.typed(own.replace("curl ", f"curl -sS {fails}", 1))


async def offline(place: Place, line: str) -> None:
    """Commands about the database and recordings."""
    if "weir.yaml:coding" in line:
        page = (ROOT / "docs" / "cookbook.md").read_text()
        (policy,) = re.findall(r"^```yaml\npolicies:\n(  coding:\n.*?)^```", page, re.MULTILINE | re.DOTALL)
        path = place.folder / "weir.yaml"
        path.write_text(
            path.read_text().replace("policies:", "policies: #", 1).replace("policies: #", f"policies:\n{policy}#")
        )
    await place.invoked(line)
