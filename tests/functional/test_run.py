"""``weir run -- COMMAND``: what the command sees, how it ends, and what is left behind."""

import asyncio
import json
import os
import stat
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from proxy.cli import main
from tests.functional.harness import COUNTER, ROOT, RunningWeir, free_port, weir
from tests.upstream.app import serve_simulator
from tests.upstream.model import SimulatorSettings

pytestmark = pytest.mark.slow

SHOW = "import json, os, sys; print(json.dumps([dict(os.environ), sys.argv[1:]]))"
ASK = """
from openai import OpenAI
raw = OpenAI(max_retries=0).chat.completions.with_raw_response.create(
    model="sim", max_tokens=16, messages=[{"role": "user", "content": "Hello"}])
print(raw.headers["x-weir-conversation"], bool(raw.parse().choices[0].message.content))
"""


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[RunningWeir]:
    async with serve_simulator(SimulatorSettings(), counter=COUNTER) as simulator, weir(simulator.base_url) as target:
        yield target


def environment(**more: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("WEIR_", "OPENAI_", "ANTHROPIC_"))}
    return {**kept, "PYTHONPATH": str(ROOT), **more}


async def run(*arguments: str, folder: Path, **more: str) -> tuple[int, str, str]:
    """What ``weir run`` exits with and says."""
    process = await started(*arguments, folder=folder, **more)
    out, err = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def started(*arguments: str, folder: Path, **more: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "proxy", "run", *arguments, cwd=folder, env=environment(**more),
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


async def test_the_command_sees_weir_in_every_variable_and_its_own_exit_code_comes_back(
    running: RunningWeir, tmp_path: Path
) -> None:
    show = ("--", sys.executable, "-c", f"{SHOW}; sys.exit(7)", "--url", "mine")
    code, out, err = await run("--url", running.root, *show, folder=tmp_path, HTTP_PROXY="http://127.0.0.1:9")

    env, arguments = json.loads(out)
    assert (code, arguments) == (7, ["--url", "mine"])
    assert env["OPENAI_BASE_URL"] == env["OPENAI_API_BASE"] == running.base_url
    assert env["ANTHROPIC_BASE_URL"] == running.root
    assert env["OPENAI_API_KEY"] == "any"
    assert "ANTHROPIC_API_KEY" not in env
    assert env["NO_PROXY"] == "127.0.0.1,localhost"
    assert f"weir: OPENAI_BASE_URL={running.base_url}\n" in err

    code, out, err = await run("--url", running.root, "--key", "sk-secret", *show, folder=tmp_path)
    env, _ = json.loads(out)
    assert env["OPENAI_API_KEY"] == env["ANTHROPIC_API_KEY"] == "sk-secret"
    assert "sk-secret" not in err


@pytest.mark.parametrize("program", ["codex", "opencode"])
async def test_programs_that_read_no_base_url_are_told_in_their_own_way(
    program: str, running: RunningWeir, tmp_path: Path
) -> None:
    """Codex takes any key of its configuration by ``-c``, values in TOML; opencode merges a configuration from a variable."""
    path = tmp_path / program
    path.write_text(f"#!{sys.executable}\n{SHOW}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)

    _, out, _ = await run("--url", running.root, str(path), "exec", "--full-auto", folder=tmp_path)

    env, arguments = json.loads(out)
    if program == "codex":
        assert arguments[-2:] == ["exec", "--full-auto"]
        assert set(arguments[:-2:2]) == {"-c"}
        assert f'model_providers.weir.base_url="{running.base_url}"' in arguments
        assert {'model_provider="weir"', 'model_providers.weir.wire_api="responses"'} <= set(arguments)
    else:
        provider = json.loads(env["OPENCODE_CONFIG_CONTENT"])["provider"]
        assert provider["openai"]["options"] == {"baseURL": running.base_url}


async def test_a_weir_is_started_for_the_time_of_a_command_that_is_the_real_sdk(tmp_path: Path) -> None:
    port = free_port()
    async with serve_simulator(SimulatorSettings(), counter=COUNTER) as simulator:
        (tmp_path / "weir.yaml").write_text(
            f"listen: {{port: {port}}}\nupstreams: {{main: {{base_url: '{simulator.base_url}'}}}}\n"
        )
        given = ("--config", "weir.yaml", "--", sys.executable, "-c", ASK)
        code, out, err = await run(*given, folder=tmp_path)

        assert (code, out.endswith("True\n")) == (0, True), err
        assert len(simulator.answered()) == 1
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", port)


async def test_what_goes_wrong_is_said_with_what_to_do(running: RunningWeir, tmp_path: Path) -> None:
    nobody = f"http://127.0.0.1:{free_port()}"
    code, err = await here("--url", nobody, "--", "true")
    assert code == 1
    assert f"no Weir answers at {nobody}: start one with weir serve, or add --serve" in err

    (tmp_path / "weir.yaml").write_text(f"listen: {{port: {free_port()}}}")
    code, err = await here("--config", str(tmp_path / "weir.yaml"), "--no-serve", "--", "true")
    assert code == 1
    assert "no Weir answers at" in err

    code, err = await here("--url", nobody, "--", "no-such-program")
    assert (code, err) == (127, "weir: no-such-program cannot be started: No such file or directory\n")
    code, err = await here("--url", running.root, "--", "no-such-program")
    assert (code, err.splitlines()[-1]) == (127, "weir: no-such-program cannot be started: No such file or directory")

    for program in ("", "tests"):  # a folder of the one where it is run is no program
        code, err = await here("--url", nobody, "--serve", "--", program)
        assert (code, err) == (127, f"weir: {program} cannot be started: No such file or directory\n")

    async with serve_simulator(SimulatorSettings(), counter=COUNTER) as simulator:
        code, err = await here("--url", simulator.base_url, "--", "true")
    assert code == 1
    assert "is not Weir; name Weir's address with --url" in err

    (tmp_path / "bad.yaml").write_text("prot: 1")
    code, err = await here("--config", str(tmp_path / "bad.yaml"), "--", "true")
    assert code == 1
    assert "bad.yaml:1: prot" in err


async def here(*arguments: str) -> tuple[int, str]:
    """The same in this process, where no command comes to be started."""
    done = await asyncio.to_thread(CliRunner().invoke, main, ["run", *arguments], env=environment())
    return done.exit_code, done.stderr
