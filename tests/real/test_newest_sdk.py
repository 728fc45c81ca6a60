"""The newest ``openai`` in an environment of its own, and the one Weir is installed with, against Weir."""

import asyncio
import json
import re
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from tests.functional.harness import COUNTER, weir
from tests.profile import soak
from tests.real.environments import HERE, STAMP, clean_environment, environment
from tests.real.sdk_driver import KEY, STEPS
from tests.upstream import Request, SimulatedAnswer, SimulatedCall, SimulatorSettings
from tests.upstream.app import serve_simulator

pytestmark = [pytest.mark.real, pytest.mark.timeout(400)]

WINDOW = 8_192
LOCKS = sorted(HERE.glob("*.lock"))


def model(request: Request) -> SimulatedAnswer:
    """One that reads one file after the other as long as the last word is not a question of the user's."""
    last = request["messages"][-1]
    if "tools" not in request or (last["role"] == "user" and "?" in last["content"]):
        return SimulatedAnswer(
            text="It is sunny in Graz, with some clouds in the afternoon and a light wind from the west."
        )
    read = re.findall(r"function_(\d+)_", str(last["content"]))
    number = int(read[-1]) + 1 if read else 0
    return SimulatedAnswer(calls=(SimulatedCall("read_file", json.dumps({"path": f"src/{number}.py"})),))


async def drive(python: Path) -> dict[str, Any]:
    """What the driver found with this interpreter's SDK, against Weir in front of a window of 8,192 tokens."""
    settings = SimulatorSettings(window=WINDOW, answer=model, api_keys=(KEY,))
    async with (
        serve_simulator(settings, counter=COUNTER) as simulator,
        weir(simulator.base_url, window=WINDOW) as target,
    ):
        driver = await asyncio.create_subprocess_exec(
            *(str(python), "-W", "error", str(HERE / "sdk_driver.py"), target.base_url),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=clean_environment(),
        )
        out, err = await asyncio.wait_for(driver.communicate(), 120)
        assert driver.returncode == 0, err.decode()
        overflows = [seen for seen in simulator.answered() if seen.status == 400]
    assert overflows == []
    found: dict[str, Any] = json.loads(out)
    return found


def expect(found: dict[str, Any]) -> None:
    """What every version of the SDK has to see."""
    assert found["answered"] == STEPS
    assert found["managed"] > STEPS // 3, "the run did not fill the window"
    assert found["too_long"] == "context_length_exceeded"
    assert found["denied"] == "invalid_api_key"
    assert found["stream_pieces"] > 5


@pytest.mark.requirement("A0.3", "P5", "P16")
async def test_the_newest_sdk_works_through_weir_blocking_async_streaming_with_tools_and_errors(
    newest_sdk: Path,
) -> None:
    found = await drive(newest_sdk)
    expect(found)
    assert f"openai=={found['version']} " in (HERE / "openai.lock").read_text()


@soak
@pytest.mark.requirement("A0.3", "P5", "P16")
async def test_the_installed_sdk_works_through_weir_in_the_same_way() -> None:
    found = await drive(Path(sys.executable))
    expect(found)
    assert found["version"] == version("openai")


@pytest.mark.requirement("S.30")
@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: str(lock.name))
def test_what_these_tests_install_is_pinned_by_hash_and_names_no_index(lock: Path) -> None:
    text = lock.read_text()
    pins = re.findall(r"^[a-z0-9_.-]+==[^\s;]+", text, re.MULTILINE)
    blocks = re.split(r"^(?=[a-z])", text, flags=re.MULTILINE)[1:]
    assert len(pins) == len(blocks) >= 1
    assert all("--hash=sha256:" in block for block in blocks)
    assert not re.search(r"https?:|file:|--index|--find-links|--extra", text)


@pytest.mark.requirement("S.30")
def test_nothing_that_was_installed_runs_code_whenever_python_starts(newest_sdk: Path) -> None:
    assert list((newest_sdk.parents[1] / "lib").rglob("*.pth")) == []


def test_an_environment_whose_lock_has_not_changed_is_not_installed_again(newest_sdk: Path) -> None:
    folder = newest_sdk.parents[1]
    before = (folder / STAMP).stat().st_mtime_ns
    assert environment("openai") == folder
    assert (folder / STAMP).stat().st_mtime_ns == before
