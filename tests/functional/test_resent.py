"""A request that is sent again after a crash goes up as it went up before, whatever was learned shortly before."""

import json
import signal
from dataclasses import dataclass
from pathlib import Path

import pytest

from proxy.simulator.app import RunningSimulator, serve_simulator
from proxy.simulator.model import SimulatorSettings
from tests.functional.harness import COUNTER, Talk, WeirProcess, answered, free_port


@dataclass(frozen=True, slots=True)
class Scaled:
    """An upstream whose vocabulary counts another number of tokens."""

    share: float

    def count(self, text: str) -> int:
        """Tokens of ``text``."""
        return round(COUNTER.count(text) * self.share)


def newest(simulator: RunningSimulator) -> object:
    """The body of the newest request that was answered."""
    return json.loads(answered(simulator)[-1].body)


@pytest.mark.requirement("R.60", "P9", "A0.16")
@pytest.mark.timeout(180)
async def test_a_request_that_is_sent_again_after_a_kill_goes_up_as_before(tmp_path: Path) -> None:
    """The upstream counts less: without what it taught a minute ago the same request would be cut."""
    settings = SimulatorSettings(window=8192)
    async with serve_simulator(settings, counter=Scaled(0.7)) as simulator:
        arguments = ["--upstream", simulator.base_url, "--window", "8192"]
        arguments += ["--store", f"sqlite+aiosqlite:///{tmp_path / 'w.db'}"]
        async with WeirProcess(arguments, free_port()) as process:
            talk = Talk(process.client())
            talk.grow(6, kind="agent")
            await talk.agent(3)
            for _ in range(2):
                talk.grow(2, kind="agent")
                await talk.ask()
                before, actions = newest(simulator), talk.actions()[-1]
                await process.stop(signal.SIGKILL)
                await process.start()
                await talk.ask()
                assert newest(simulator) == before
                assert talk.actions()[-1] == actions
                talk.add_step()
