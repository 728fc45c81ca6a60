"""A new window from the checkpoint, another conversation's checkpoint in front, and what is prepared after an answer."""

from dataclasses import replace

import pytest

from policies.draft import ConversationState
from policies.effects import Failed, Summarize
from policies.ledger import Action, Decision, Prepared, Status, Subtask
from policies.memory.checkpoint import Checkpoint
from policies.planner import plan
from policies.settings import ContextSettings, Layer, Summaries
from policies.tokens import CHARS4
from tests.policies.play import (
    OFFLOAD,
    Said,
    assistant,
    decide,
    play,
    remember,
    step,
    system,
    talk,
    user,
    window,
    words,
)

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


@pytest.mark.requirement("A0.102", "A0.103", "A0.115")
def test_a_conversation_goes_on_from_the_checkpoint_of_another() -> None:
    state = Checkpoint(
        goal=TASK,
        constraints=("Never delete customer data.",),
        subtasks=(Subtask("move the reader", Status.IN_PROGRESS), Subtask("remove the old topic")),
        version=4,
        window_id=2,
    )
    transcript = talk(system("You are a careful engineer."), user("Go on, please."))
    known = ConversationState(resumed=state.to_json())
    decision = decide(transcript, budget=window(8_000), settings=windows("compact"), known=known)

    assert decision.action is Action.EDIT
    order = [p.index for p in decision.pieces or ()]
    assert order == [0, None, 1]
    text = summary_of(decision)
    assert TASK in text
    assert "Never delete customer data." in text
    assert "TODO: remove the old topic" in text
    assert decision.window_id == 3
    assert next(e for e in decision.events if e.kind == "resume").facts["new_window"] == 3

    later = talk(system("You are a careful engineer."), user("Go on, please."), assistant("Moving."), user("And?"))
    again = decide(
        later, budget=window(8_000), settings=windows("compact"), known=remember(known, decision, transcript)
    )
    assert again.action is Action.REPLAY
    assert [p.index for p in again.pieces or ()] == [0, None, 1, 2, 3]
    assert summary_of(again) == text


MODEL = windows("compact", summarizer="small", summaries=Summaries(wait=20))


@pytest.mark.requirement("D14", "R.25")
def test_what_was_prepared_for_another_history_is_not_used() -> None:
    stale = Prepared(covers=4, prefix=b"\0" * 16, text="Something else entirely happened here.")
    known, full, reads = ConversationState(prepared=stale), talk(*history(80)), 64_000
    decision = play(
        plan(full, settings=MODEL, budget=window(16_000), known=known, counter=CHARS4, summarizer_input=reads),
        OFFLOAD,
        (Summarize, Failed("timeout")),
    )

    assert "Something else" not in summary_of(decision)
