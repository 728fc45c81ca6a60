"""A summariser that fails in every way there is: the session is answered, and the summariser is not pestered."""

from pathlib import Path

import pytest

from proxy.simulator.serving import RunningSimulator, serve_simulator
from proxy.simulator.settings import SimulatorSettings, SummaryMode
from proxy.summarizer import BACK_OFF_MOST, Summarizer
from tests.functional.harness import COUNTER, Talk, answered, arrays_of, batches, opening, weir

USELESS = [mode for mode in SummaryMode if mode is not SummaryMode.OK]
EARLIER = 10
TURNS = 20


def summaries(simulator: RunningSimulator) -> list[str]:
    """The different texts that stood in for removed history, in order."""
    arrays = arrays_of(answered(simulator))
    texts = [m["content"] for a in arrays for m in a if m["role"] == "user" and "Written by Weir" in m["content"]]
    return list(dict.fromkeys(texts))


@pytest.mark.requirement("A0.3", "P6", "P13", "R.50", "R.51", "R.52", "R.53")
@pytest.mark.parametrize("mode", USELESS)
async def test_every_request_is_answered_while_the_summariser_is_useless(mode: SummaryMode, tmp_path: Path) -> None:
    settings = SimulatorSettings(window=8192, summary_model="summariser", summary_mode=mode)
    async with (
        serve_simulator(settings, counter=COUNTER) as simulator,
        weir(simulator.base_url, tmp_path / "w.db", summarizer="summariser", asking=Summarizer(patience=0.3)) as target,
    ):
        talk = Talk(target.client(), opening()[:1])
        talk.grow(EARLIER)
        await talk.chat(TURNS)
        seen = answered(simulator)
        calls = len(answered(simulator, "summariser"))
        made = summaries(simulator)
    assert [s.status for s in seen] == [200] * TURNS
    assert talk.actions()[-1] == "compact=1"
    assert 1 <= batches(arrays_of(seen)) <= 3
    assert 1 <= calls <= 3
    assert 1 <= len(made) <= 3
    for text in made:
        assert "I'm sorry" not in text
        assert "<think>" not in text
        assert COUNTER.count(text) < 2_000


@pytest.mark.requirement("A0.3", "P13")
async def test_a_working_summariser_is_asked_once_a_batch_and_its_notes_are_used(tmp_path: Path) -> None:
    settings = SimulatorSettings(window=8192, summary_model="summariser")
    async with (
        serve_simulator(settings, counter=COUNTER) as simulator,
        weir(simulator.base_url, tmp_path / "w.db", summarizer="summariser") as target,
    ):
        talk = Talk(target.client(), opening()[:1])
        talk.grow(EARLIER)
        await talk.chat(TURNS)
        calls = answered(simulator, "summariser")
        arrays = arrays_of(answered(simulator))
        made = summaries(simulator)
    assert len(calls) == batches(arrays) == len(made)
    assert all("Next step: go on from" in text for text in made)


@pytest.mark.requirement("P13", "R.50")
async def test_a_summariser_that_keeps_failing_is_left_alone_for_a_while_and_asked_again_after_it(
    tmp_path: Path,
) -> None:
    now = [0.0]
    settings = SimulatorSettings(window=8192, summary_model="summariser", summary_mode=SummaryMode.STATUS_500)
    async with (
        serve_simulator(settings, counter=COUNTER) as simulator,
        weir(
            simulator.base_url,
            tmp_path / "w.db",
            summarizer="summariser",
            asking=Summarizer(clock=lambda: now[0]),
        ) as target,
    ):
        talk = Talk(target.client(), opening()[:1])
        while len(summaries(simulator)) < 5:
            talk.grow(5)
            await talk.chat(1)
        assert len(answered(simulator, "summariser")) == 3
        now[0] += BACK_OFF_MOST + 1
        while len(summaries(simulator)) < 6:
            talk.grow(5)
            await talk.chat(1)
        assert len(answered(simulator, "summariser")) == 4
        assert {s.status for s in answered(simulator)} == {200}
