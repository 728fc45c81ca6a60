"""The ladder of compact, rung by rung, played without a model."""

from dataclasses import replace

import pytest

from policies.draft import Bounds, ConversationState, Draft, bounds_for, replay, untouched
from policies.effects import Failed, Reply, Summarize, Summary
from policies.ledger import Cut
from policies.messages import ToolCall, Transcript
from policies.settings import ContextSettings, Summaries
from policies.tokens import CHARS4
from tests.policies.answering import Model
from tests.policies.play import (
    Said,
    assistant,
    first_question,
    flow,
    play,
    result,
    step,
    system,
    talk,
    user,
    window,
    words,
)

compact = flow("compact")

NOTES = (
    'Goal: according to the user: "Why are orders late?"\n'
    "Left to do: say why orders are late.\n"
    'Open problems: according to the result of look: "depot D-17: E4411 carrier refused the manifest"\n'
    "Next step: read on."
)
MODEL = ContextSettings(summarizer="small-model", summaries=Summaries(wait=20))
RULE = "Never contact the customer directly."
FINDING = "depot D-17: E4411 carrier refused the manifest"


def history(steps: int = 40) -> list[Said | tuple[Said, ...]]:
    looks = [
        step(
            f'{{"order": "W{7000 + n}", "note": "{FINDING if n == 3 else ""} {words(330)}"}}', arguments=f'{{"n": {n}}}'
        )
        for n in range(steps)
    ]
    return [system("You help."), user("Why are orders late?"), user(RULE), *looks, user("And now?"), assistant("Hm.")]


TRANSCRIPT = talk(*history(), user("Go on."))


def bounds(
    transcript: Transcript = TRANSCRIPT,
    *,
    settings: ContextSettings = MODEL,
    known: ConversationState | None = None,
    reads: int = 0,
) -> Bounds:
    return bounds_for(
        transcript,
        settings=settings,
        budget=window(16_000),
        known=known or ConversationState(),
        counter=CHARS4,
        summarizer_input=reads or None,
    )


def compacted(*script: tuple[type[Summarize], Reply], limits: Bounds | None = None) -> tuple[Draft, Cut]:
    limits = limits or bounds()
    draft = replay(limits.transcript, limits.known, limits.protection)
    done = play(compact(draft, limits), *script)
    assert done.cut is not None
    assert done.tokens < draft.tokens
    return done, done.cut


def answered_with(reply: Summary | Failed) -> tuple[Draft, Cut, int]:
    """The draft, its cut, and how many questions were asked, where every one of them gets this reply."""
    model = Model(lambda _: reply)
    done = model.run(compact(untouched(TRANSCRIPT), bounds()))
    assert done.cut is not None
    return done, done.cut, len(model.asked)


@pytest.mark.requirement("P6")
def test_an_answer_that_repeats_what_it_was_given_is_refused() -> None:
    draft, limits = untouched(TRANSCRIPT), bounds()
    asked = first_question(compact(draft, limits))
    assert answered_with(Summary(asked.prompt[900:3_300]))[1].origin == "extract"


@pytest.mark.requirement("P2", "A0.57")
def test_the_next_summary_extends_the_previous_one_and_reads_only_what_is_new() -> None:
    done, cut = compacted((Summarize, Summary(NOTES)))
    grown = talk(*history(), user("Go on."), *[step(words(300, f"fresh{n}")) for n in range(20)], user("Well?"))
    limits = bounds(grown, known=ConversationState(edits={e.key: e for e in done.edits.values()}, cuts=(cut,)))
    draft = replay(grown, limits.known, limits.protection)
    asked = first_question(compact(draft, limits))
    assert "E4411" in asked.prompt
    assert "fresh0" in asked.prompt
    assert "W7001" not in asked.prompt
    again, second = compacted((Summarize, Summary(NOTES.replace("read on", "read fresh pages"))), limits=limits)
    assert (second.version, second.origin) == (2, "model+extract")
    assert second.covers > cut.covers
    assert "read fresh pages" in second.text
    (one,), (two,) = done.condensed, again.condensed
    taken = [m.tokens for m in grown.messages[grown.head : grown.head + second.covers]]
    kept = {*cut.before, *cut.after, *second.before, *second.after}
    assert one.original_tokens == sum(t for i, t in enumerate(taken[: cut.covers]) if i not in kept)
    fresh = sum(t for i, t in enumerate(taken) if i >= cut.covers and i not in kept)
    assert two.original_tokens == cut.tokens + fresh, "what the first one took out is not counted again"
    _, failed = compacted((Summarize, Failed("timeout")), limits=limits)
    assert (failed.origin, failed.narrative) == ("previous+extract", NOTES)
    _, none = compacted(limits=replace(limits, settings=ContextSettings()))
    assert (none.origin, none.narrative) == ("previous+extract", NOTES)
    assert again.buckets()["summary"] == second.tokens


@pytest.mark.requirement("A0.57", "D9", "A2.28", "A2.7")
def test_the_result_is_head_task_summary_and_tail_in_order() -> None:
    done, cut = compacted((Summarize, Summary(NOTES)))
    order = [p.index for p in done.pieces]
    assert order[:3] == [0, 1, None]
    tail = order[3:]
    assert tail == list(range(tail[0] or 0, len(TRANSCRIPT.messages)))
    assert all(p.text is None for p in done.pieces if p.index is not None)
    assert cut.before == (0,)
    assert cut.after == ()
    assert cut.prefix == TRANSCRIPT.chain[cut.covers - 1]
    limits = bounds()
    assert sum(TRANSCRIPT.messages[i or 0].tokens for i in tail[:-1]) <= limits.shape.tail * limits.room


@pytest.mark.requirement("D9", "A2.9")
def test_every_pending_call_keeps_the_results_it_has() -> None:
    calls = tuple(ToolCall(f"c{n}", "look", "{}") for n in range(3))
    transcript = talk(*history(), user("Go on."), assistant("", *calls), result("one", "c1"))
    done, _ = compacted(limits=bounds(transcript, settings=ContextSettings()))
    assert [p.index for p in done.pieces][-2:] == [len(transcript.messages) - 2, len(transcript.messages) - 1]
