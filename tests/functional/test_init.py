"""``weir init``: the file it writes is one that Weir starts with, and no other file is touched."""

import asyncio
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result

from proxy.cli import main
from tests.functional.harness import COUNTER, ROOT, WeirProcess, free_port
from tests.functional.test_demo import read
from tests.upstream.app import serve_simulator
from tests.upstream.model import SimulatorSettings


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("WEIR_", "OPENAI_", "ANTHROPIC_"))]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


def weir(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--upstream", "http://127.0.0.1:9/v1", "--window", "8192", "--model", "local-*"),
        ("--upstream", "https://api.anthropic.com/v1", "--access", "keys", "--client", "claude-code"),
        ("--key-variable", "pass"),
    ],
    ids=["defaults", "local", "keys", "own key"],
)
def test_what_it_writes_passes_check_and_the_strictest_lint(options: tuple[str, ...]) -> None:
    assert weir("init", *options, "--yes").exit_code == 0

    done = weir("policy", "lint", "--strict", "weir.yaml")
    assert (done.exit_code, done.stderr) == (0, "")
    assert weir("doctor", "--values", "--config", "weir.yaml").exit_code == 0
    words = Path("weir.yaml").read_text()
    assert sum("#" in line for line in words.splitlines()) > 8
    assert all(len(line) <= 120 for line in words.splitlines())


def test_an_existing_file_stays_as_it_is() -> None:
    Path("weir.yaml").write_text("mine: 1")

    done = weir("init", "--yes")

    assert done.exit_code == 1
    assert "weir.yaml exists already; name another file with --out" in done.stderr
    assert Path("weir.yaml").read_text() == "mine: 1"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--upstream", "api.openai.com"), "upstreams.main.base_url: should be an address"),
        (("--key-variable", "sk-proj-abc"), "should name an environment variable, not hold the key itself"),
    ],
)
def test_wrong_answers_are_wrong_usage_and_nothing_is_written(options: tuple[str, ...], said: str) -> None:
    done = weir("init", *options, "--yes")

    assert done.exit_code == 2
    assert said in done.stderr
    assert not Path("weir.yaml").exists()


async def test_a_terminal_is_asked_three_questions_and_weir_serves_with_the_answers(tmp_path: Path) -> None:
    async with serve_simulator(SimulatorSettings(), counter=COUNTER) as simulator:
        answers = [simulator.base_url, "", "codex", "4096", "sim*", "me"]
        said = await asyncio.to_thread(typed, answers, tmp_path)
        assert [said.count(f"{n}. ") for n in (1, 2, 3)] == [1, 1, 1]
        assert "weir run --config weir.yaml -- codex" in said

        written = yaml.safe_load((tmp_path / "weir.yaml").read_text())
        assert written["upstreams"]["main"]["api_key"] == "pass"
        store = f"sqlite+aiosqlite:///{tmp_path}/w.db"
        async with WeirProcess(["--config", str(tmp_path / "weir.yaml"), "--store", store], free_port()) as running:
            raw = await running.client().chat.completions.with_raw_response.create(
                model="sim", max_tokens=512, messages=[{"role": "user", "content": "Hello"}]
            )
    assert raw.parse().choices[0].message.content
    assert ";limit=3" in raw.headers["x-weir-tokens"]


def typed(answers: list[str], folder: Path) -> str:
    """What `weir init` says to a person at a terminal who types these answers."""
    terminal, other = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "proxy", "init"], cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=other, stdout=other, stderr=other,
    ) as process:  # fmt: skip
        os.close(other)
        os.write(terminal, "".join(f"{answer}\n" for answer in answers).encode())
        said = b"".join(iter(lambda: read(terminal), b""))
        assert process.wait(60) == 0, said
    os.close(terminal)
    return said.decode()
