"""A new window begins with the checkpoint and the open step."""

from dataclasses import replace

import pytest

from policies.draft import ConversationState
from policies.ledger import Decision
from policies.memory.checkpoint import Checkpoint
from policies.settings import ContextSettings, Layer
from tests.policies.play import Said, decide, step, system, talk, user, window, words

TASK = "Migrate the billing service to the new queue. Never delete customer data."


def history(steps: int, size: int = 200) -> list[Said]:
    said = [system("You are a careful engineer."), user(TASK)]
    for number in range(steps):
        said += step(words(size, f"result{number}"))
    return said


def windows(*layers: str, **changes: object) -> ContextSettings:
    settings = ContextSettings(margin=0.0, layers=tuple(Layer(strategy=name) for name in layers))
    return replace(settings, **changes)  # type: ignore[arg-type]


def summary_of(decision: Decision) -> str:
    assert decision.pieces is not None
    return next(p.text or "" for p in decision.pieces if p.is_summary)


@pytest.mark.requirement("A0.149", "A0.146", "D15", "A0.102")
def test_a_new_window_begins_with_the_checkpoint_and_the_open_step() -> None:
    transcript = talk(*history(30))
    decision = decide(transcript, budget=window(4_000), settings=windows("rollover"), known=ConversationState())

    assert decision.cut is not None
    assert decision.cut.origin == "rollover"
    event = next(e for e in decision.events if e.kind == "rollover")
    assert (event.facts["old_window"], event.facts["new_window"]) == (1, 2)
    assert decision.window_id == 2
    text = summary_of(decision)
    assert "Resuming from checkpoint: window 2" in text
    assert "Verify before relying on it" in text
    state = Checkpoint.from_json(decision.checkpoint or "")
    assert (state.goal, state.window_id) == (TASK, 2)
    kept = [p.index for p in decision.pieces or () if p.index is not None]
    assert kept[:2] == [0, 1]
    assert kept[-2:] == [len(transcript.messages) - 2, len(transcript.messages) - 1]
    assert decision.raw_after <= 4_000
