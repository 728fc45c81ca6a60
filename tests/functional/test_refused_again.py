"""What cannot fit is refused from its counts, before anything of it is read, and again at once when it comes again."""

from typing import Any

import openai
import pytest

from policies.planner import plan
from policies.pressure import passed
from proxy.planning import planner
from tests.functional.harness import COUNTER, prose, weir
from tests.upstream import SimulatorSettings
from tests.upstream.app import serve_simulator


def grown(turns: int) -> list[dict[str, Any]]:
    roles = ("user", "assistant")
    return [{"role": roles[n % 2], "content": prose(200, seed=n)} for n in range(2 * turns + 1)]


@pytest.mark.requirement("A0.3", "P8")
async def test_what_cannot_fit_is_not_read_and_not_planned_again_when_it_is_sent_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    planned = list[int]()

    def counted(*given: Any, **options: Any) -> Any:
        planned.append(1)
        return plan(*given, **options)

    def told_at_once(*given: Any, **options: Any) -> Any:
        decided = passed(*given, **options)
        planned.extend([1] * (decided is not None))
        return decided

    monkeypatch.setattr(planner, "plan", counted)
    monkeypatch.setattr(planner, "passed", told_at_once)
    fixed = {"role": "system", "content": prose(8_000, seed=-1)}
    async with (
        serve_simulator(SimulatorSettings(window=8192), counter=COUNTER) as simulator,
        weir(simulator.base_url, window=8192) as target,
    ):
        client = target.client()
        told = []
        for _ in range(3):
            with pytest.raises(openai.BadRequestError) as refused:
                await client.chat.completions.create(model="sim", messages=[fixed, *grown(30)])  # type: ignore[list-item]
            told.append(refused.value.body)
        assert len(target.runtime.planner.readings) == 0
        assert told[0] == told[1] == told[2]
        assert len(planned) == 1
        await client.chat.completions.create(model="sim", messages=grown(3))  # type: ignore[arg-type]
        assert len(planned) == 2
        assert len(simulator.answered()) == 1
