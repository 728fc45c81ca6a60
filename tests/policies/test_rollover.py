"""A new window from the checkpoint, another conversation's checkpoint in front, and what is prepared after an answer."""

import json
from dataclasses import replace

import pytest

from policies.draft import ConversationState
from policies.effects import Failed, Save, StateSaved, Summarize, Summary
from policies.ledger import Action, Decision, Edit, EditKind, Prepared, Status, Subtask
from policies.memory.checkpoint import Checkpoint
from policies.memory.state import state_of
from policies.messages import Transcript
from policies.planner import is_soft, plan, prepare
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
NOTES = (
    "Left to do: the writer has to be moved, and the tests of it have to pass, and so on.\n"
    "Next step: move the reader to where the writer is."
)


LONGER = Checkpoint(
    goal=TASK,
    subtasks=(Subtask("deploy the reader to the second region", Status.DONE),),
    narrative="All of it is done.",
)
"""The state of a run that went further."""


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


@pytest.mark.requirement("A0.146", "D15")
@pytest.mark.parametrize("later", [4, 5])
def test_a_run_begun_anew_does_not_go_on_from_a_state_that_was_only_saved_in_a_longer_one(later: int) -> None:
    """The client may rewrite its last four messages; a state of a longer run than that is of another run."""
    transcript = talk(*history(30))
    known = ConversationState(checkpoint=LONGER.to_json(), checkpoint_length=len(transcript.chain) + later)
    assert not known.triggered
    decision = decide(transcript, budget=window(4_000), settings=windows("rollover"), known=known)
    state = Checkpoint.from_json(decision.checkpoint or "")
    told = [each.text for each in state.subtasks]

    assert (LONGER.subtasks[0].text in told) is (later == 4)
    saved = state_of(transcript, settings=windows("rollover"), known=known, counter=CHARS4)
    assert (LONGER.subtasks[0] in saved.subtasks) is (later == 4)


@pytest.mark.requirement("A0.149")
def test_the_next_window_has_the_next_number() -> None:
    first = talk(*history(30))
    settings, budget = windows("rollover"), window(4_000)
    known = remember(
        ConversationState(), decide(first, budget=budget, settings=settings, known=ConversationState()), first
    )
    assert known.checkpoint is not None
    second = talk(*history(60))
    decision = decide(second, budget=budget, settings=settings, known=known)

    event = next(e for e in decision.events if e.kind == "rollover")
    assert (event.facts["old_window"], event.facts["new_window"]) == (2, 3)


@pytest.mark.requirement("D15")
def test_where_a_summary_does_not_help_the_rungs_begin_a_new_window_before_anything_is_dropped() -> None:
    said = [*history(3), *[piece for n in range(40) for piece in (assistant(f"Step {n}."), user(words(40, f"w{n}")))]]
    decision = decide(talk(*said), budget=window(1_200), settings=windows(), known=ConversationState())
    kept = [report.layer for report in decision.trail if report.kept]

    assert "drop_oldest" not in kept or "rollover" in [r.layer for r in decision.trail]
    assert decision.raw_after <= 1_200


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


@pytest.mark.requirement("A0.110")
@pytest.mark.parametrize("state", ["{", "[]", Checkpoint(goal="").to_json(), Checkpoint(goal="x", version=0).to_json()])
def test_a_checkpoint_that_is_not_valid_is_not_put_in_front(state: str) -> None:
    transcript = talk(user("Go on, please."))
    decision = decide(
        transcript, budget=window(8_000), settings=windows("compact"), known=ConversationState(resumed=state)
    )

    assert decision.pieces is None


@pytest.mark.requirement("A2.20")
def test_what_was_resumed_is_still_there_after_the_next_summary() -> None:
    state = Checkpoint(goal=TASK, constraints=("Never delete customer data.",), version=4, window_id=2)
    begun = talk(user("Go on, please."))
    known = ConversationState(resumed=state.to_json())
    known = remember(known, decide(begun, budget=window(3_000), settings=windows("compact"), known=known), begun)
    grown = talk(user("Go on, please."), *[piece for n in range(20) for piece in step(words(200, f"r{n}"))])
    decision = decide(grown, budget=window(3_000), settings=windows("compact"), known=known)

    assert decision.cut is not None
    assert "resume" not in decision.cut.origin
    assert "Never delete customer data." in summary_of(decision)
    assert "Never delete customer data." in Checkpoint.from_json(decision.checkpoint or "").constraints


@pytest.mark.requirement("A0.38")
def test_a_pinned_message_comes_back_and_stays() -> None:
    transcript = talk(*history(20))
    settings, budget = windows("compact"), window(3_000)
    known = remember(
        ConversationState(), decide(transcript, budget=budget, settings=settings, known=ConversationState()), transcript
    )
    gone = next(i for i in range(3, 10, 2) if i not in [p.index for p in decide_again(transcript, known).pieces or ()])
    ref = transcript.messages[gone].ref
    pin = Edit(bytes.fromhex(ref), 0, EditKind.PIN, "", ref, 0)
    pinned = replace(known, edits={**known.edits, pin.key: pin})
    grown = talk(*history(20), assistant("Thinking."), user("Which one was it?"))
    decision = decide(grown, budget=budget, settings=settings, known=pinned)

    assert gone in [p.index for p in decision.pieces or () if p.text is None]
    assert decision.raw_after <= 3_000
    assert "pin" not in decision.applied


def decide_again(transcript: Transcript, known: ConversationState) -> Decision:
    return decide(transcript, budget=window(3_000), settings=windows("compact"), known=known)


MODEL = windows("compact", summarizer="small", summaries=Summaries(by_schema=False, wait=20))


@pytest.mark.requirement("A2.11", "A2.27", "D14")
def test_a_summary_is_prepared_at_the_soft_mark_and_used_without_a_question() -> None:
    budget = window(16_000)
    soft = talk(*history(56))
    assert is_soft(soft.tokens, len(soft.chain), settings=MODEL, budget=budget, known=ConversationState())
    few = talk(*history(20))
    assert not is_soft(few.tokens, len(few.chain), settings=MODEL, budget=budget, known=ConversationState())
    prepared = play(
        prepare(soft, settings=MODEL, budget=budget, known=ConversationState(), counter=CHARS4),
        (Summarize, Summary(NOTES)),
    )
    assert prepared is not None
    assert "move the reader" in prepared.text
    full = talk(*history(80))
    decision = play(
        plan(full, settings=MODEL, budget=budget, known=ConversationState(prepared=prepared), counter=CHARS4), OFFLOAD
    )

    assert decision.cut is not None
    assert decision.cut.origin == "prepared+extract"
    assert "move the reader" in summary_of(decision)


@pytest.mark.requirement("A2.11", "D14", "A0.57")
def test_the_next_note_is_on_all_that_the_one_before_was_not_on_though_it_says_the_same() -> None:
    """A batch cuts behind the end of what was prepared for it, and a model may have nothing to add."""
    budget, known, starts = window(16_000), ConversationState(), []
    for ready, full in ((60, 86), (120, 150), (180, 214)):
        soft, reads = talk(*history(ready)), 64_000
        flow = prepare(soft, settings=MODEL, budget=budget, known=known, counter=CHARS4, summarizer_input=reads)
        asked = next(flow)
        assert isinstance(asked, Summarize)
        starts.append(int(asked.prompt.partition("[result of look] result")[2].partition(" ")[0]))
        with pytest.raises(StopIteration) as end:
            flow.send(Summary(NOTES))
        known = replace(known, prepared=end.value.value)
        transcript = talk(*history(full))
        decision = play(plan(transcript, settings=MODEL, budget=budget, known=known, counter=CHARS4), OFFLOAD)
        assert decision.cut is not None
        assert known.prepared is not None
        assert decision.cut.noted == known.prepared.covers < decision.cut.covers
        known = remember(replace(known, prepared=None), decision, transcript)
    assert starts[0] == 0
    assert len({cut.narrative for cut in known.cuts}) == 1
    ends = [(cut.noted - 1) // 2 for cut in known.cuts]  # the task, and two messages a step
    assert starts[1:] == ends[:-1]


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


@pytest.mark.requirement("D14")
def test_what_covers_most_of_the_history_is_not_prepared_again() -> None:
    budget, transcript = window(16_000), talk(*history(56))
    flow = prepare(transcript, settings=MODEL, budget=budget, known=ConversationState(), counter=CHARS4)
    prepared = play(flow, (Summarize, Summary(NOTES)))
    assert prepared is not None
    grown = talk(*history(58))

    assert (
        play(prepare(grown, settings=MODEL, budget=budget, known=ConversationState(prepared=prepared), counter=CHARS4))
        is None
    )


@pytest.mark.requirement("A2.21")
def test_the_soft_mark_moves_with_the_tools() -> None:
    settings, budget = MODEL, window(16_000)
    transcript = talk(*history(40))

    assert not is_soft(
        transcript.tokens, len(transcript.chain), settings=settings, budget=budget, known=ConversationState()
    )
    with_tools = replace(transcript, tools=4_000)
    assert is_soft(
        with_tools.tokens, len(with_tools.chain), settings=settings, budget=budget, known=ConversationState()
    )


@pytest.mark.requirement("A2.11", "A2.27")
def test_by_number_of_messages_the_next_request_has_the_summary() -> None:
    layers = (Layer(strategy="compact", at=0, params={"prepared": True, "evict_pct": 50}),)
    settings = replace(MODEL, layers=layers, summaries=Summaries(prepare_messages=20, by_schema=False))
    budget, transcript = window(100_000), talk(*history(11, size=60))

    assert len(transcript.chain) == 23
    assert is_soft(transcript.tokens, 23, settings=settings, budget=budget, known=ConversationState())
    assert not is_soft(transcript.tokens, 20, settings=settings, budget=budget, known=ConversationState())
    assert decide(transcript, budget=budget, settings=settings, known=ConversationState()).pieces is None
    flow = prepare(transcript, settings=settings, budget=budget, known=ConversationState(), counter=CHARS4)
    prepared = play(flow, (Summarize, Summary(NOTES)))
    grown = talk(*history(12, size=60))
    decision = play(
        plan(grown, settings=settings, budget=budget, known=ConversationState(prepared=prepared), counter=CHARS4),
        OFFLOAD,
    )

    assert decision.applied["compact"] == 1
    assert "move the reader" in summary_of(decision)


@pytest.mark.requirement("D23", "A0.111")
def test_the_state_is_saved_before_a_model_is_asked_and_the_batch_has_the_version_after_it() -> None:
    known, full, reads = ConversationState(version=6), talk(*history(80)), 64_000
    decision = play(
        plan(full, settings=MODEL, budget=window(16_000), known=known, counter=CHARS4, summarizer_input=reads),
        OFFLOAD,
        (Save, StateSaved(7)),
        (Summarize, Summary(NOTES)),
    )

    assert decision.cut is not None
    assert decision.cut.version == 8
    assert json.loads(decision.checkpoint or "{}")["version"] == 8


@pytest.mark.requirement("A0.59")
def test_compaction_that_is_off_drops_and_never_summarises() -> None:
    settings = windows("compact", "rollover", compaction="off", summarizer="small")
    decision = decide(talk(*history(40)), budget=window(4_000), settings=settings, known=ConversationState())

    assert decision.cut is not None
    assert decision.cut.origin == "drop_oldest"
    assert decision.raw_after <= 4_000


@pytest.mark.requirement("A0.59")
def test_compaction_by_the_provider_only_observes() -> None:
    assert windows("compact", compaction="provider").observes
