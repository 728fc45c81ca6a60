"""What is prepared after answers is used, and a model that is of no use is left alone: served, and counted."""

import re

import pytest

from tests.functional.harness import COUNTER, SHARED, Deployment, InTurns, Talk
from tests.misbehaving import Failing, SummaryMode
from tests.upstream import SimulatorSettings
from tests.upstream.app import serve_simulator


def simulated(mode: SummaryMode = SummaryMode.OK) -> SimulatorSettings:
    return SimulatorSettings(window=16_384, windows={"notes": 32_768}, summary_model="notes", summarizer=Failing(mode))


async def talked(target: InTurns, turns: int, *, earlier: int = 0) -> Talk:
    """A chat in which everything that is worth preparing is prepared before the next question."""
    talk = Talk(target.client())
    talk.grow(earlier)
    for _ in range(turns):
        await talk.chat(1)
        await target.settled()
    return talk


def counted(turns: InTurns) -> dict[str, int]:
    """By result, of all of them together."""
    texts = [each.runtime.telemetry.metrics.render()[0].decode() for each in turns.weirs]
    found = [
        each for text in texts for each in re.findall(r'weir_preparations_total\{weir_result="(\w+)"\} (\d+)', text)
    ]
    sums = {result: sum(int(number) for name, number in found if name == result) for result, _ in found}
    return {result: number for result, number in sums.items() if number}


@SHARED
@pytest.mark.requirement("D14", "A2.11", "A2.27")
@pytest.mark.parametrize(
    ("policy", "window", "earlier", "turns"), [("balanced", 8_192, 12, 12), ("turn-atomic", 16_384, 8, 8)]
)
async def test_what_is_prepared_is_used_by_the_batch_and_counted(
    policy: str, window: int, earlier: int, turns: int, deployment: Deployment
) -> None:
    async with (
        serve_simulator(simulated(), counter=COUNTER) as simulator,
        deployment.serving(simulator.base_url, window=window, policy=policy, summarizer="notes") as target,
    ):
        talk = await talked(target, turns, earlier=earlier)
        results = counted(target)
    assert any("compact" in action for action in talk.actions())
    assert results["used"] >= 1
    assert results["prepared"] - results["used"] <= 1, "the last one may be for a batch that has not come yet"
    assert results.get("wasted", 0) <= 0.2 * results["prepared"]
