"""An operator's function as a layer: what it is given, what becomes of its answer, what is refused."""

from dataclasses import replace

import pytest

from policies.draft import Bounds, ConversationState, Draft, bounds_for, untouched
from policies.effects import Failed, Kept, Trim, Trimmed
from policies.ledger import EditKind
from policies.messages import Transcript
from policies.settings import ContextSettings, ExtractShape, Layer, Param
from policies.tokens import CHARS4
from tests.policies.play import (
    OFFLOAD,
    assistant,
    decide,
    flow,
    play,
    remember,
    step,
    system,
    talk,
    user,
    window,
    words,
)

custom = flow("custom")

PATH = "trims:newest"
#        0             1             2 3                    4 5                    6                7
TALK = (system("s"), user("task"), step(words(300)), step(words(300)), assistant("done"), user("next"))


def bounds(
    transcript: Transcript, *, aim: int = 100, known: ConversationState | None = None, **params: Param
) -> Bounds:
    found = bounds_for(
        transcript, settings=ContextSettings(), budget=window(4_000), known=known or ConversationState(), counter=CHARS4
    )
    return replace(found, layer=Layer(strategy="custom", params={"path": PATH, **params}), aim=aim)


def trimmed(transcript: Transcript, *kept: Kept, draft: Draft | None = None) -> Draft:
    return play(custom(draft or untouched(transcript), bounds(transcript)), (Trim, Trimmed(kept)))


def indices(draft: Draft) -> list[int | None]:
    return [p.index for p in draft.pieces]


@pytest.mark.requirement("A1.11")
def test_the_function_is_asked_about_every_message_with_what_is_left_for_them() -> None:
    transcript = talk(*TALK, tools=30)
    asked = Trim(
        path=PATH,
        indices=(0, 1, 2, 3, 4, 5, 6, 7),
        max_tokens=200 - 30 - transcript.priming,
        seconds=0.25,
        texts=(None,) * 8,
        tokens=tuple(m.tokens for m in transcript.messages),
        protected=(True, True, False, False, False, False, False, True),
    )
    flow = custom(untouched(transcript), bounds(transcript, aim=200, seconds=0.25))
    assert next(flow) == asked


@pytest.mark.requirement("A1.11")
def test_what_does_not_come_back_is_dropped_and_what_is_protected_stays_anyhow() -> None:
    transcript = talk(*TALK)
    draft = trimmed(transcript, Kept(4), Kept(5), Kept(6))
    assert indices(draft) == [0, 1, 4, 5, 6, 7]
    assert draft.cut is not None
    assert (draft.cut.origin, draft.cut.text, draft.cut.covers) == ("custom", "", 3)
    assert draft.applied == {"custom": 1}
    assert indices(trimmed(transcript)) == [0, 1, 7]


def test_a_hole_in_the_middle_is_one_cut_with_what_stays_around_it() -> None:
    transcript = talk(*TALK)
    draft = trimmed(transcript, Kept(2), Kept(3), Kept(6))
    assert indices(draft) == [0, 1, 2, 3, 6, 7]


def test_another_text_is_an_edit_and_protected_text_keeps_its_own() -> None:
    transcript = talk(*TALK)
    every = [Kept(i) for i in range(8)]
    every[3], every[1] = Kept(3, "short"), Kept(1, "another task")
    draft = trimmed(transcript, *every)
    assert [(p.index, p.text, p.kind) for p in draft.pieces if p.text] == [(3, "short", EditKind.CUSTOM)]
    assert draft.pieces[3].tokens == 4 + CHARS4.count("short")


@pytest.mark.requirement("A1.11")
@pytest.mark.parametrize(
    "kept",
    [
        pytest.param((Kept(3), Kept(4), Kept(5)), id="a result without its call"),
        pytest.param((Kept(2), Kept(4), Kept(5)), id="a call without its result"),
        pytest.param((Kept(4), Kept(2), Kept(3)), id="another order"),
        pytest.param((Kept(4), Kept(4)), id="one of them twice"),
        pytest.param((Kept(9),), id="one that was not given"),
        pytest.param(tuple(Kept(i) for i in range(8)), id="all of them"),
        pytest.param((*(Kept(i) for i in range(3)), Kept(3, words(900)), Kept(4), Kept(5)), id="more than there was"),
    ],
)
def test_an_answer_that_no_upstream_would_take_or_that_saves_nothing_changes_nothing(kept: tuple[Kept, ...]) -> None:
    transcript = talk(*TALK)
    before = untouched(transcript)
    assert trimmed(transcript, *kept, draft=before) is before


def test_a_function_that_fails_or_has_no_path_leaves_the_draft_to_the_next_layer() -> None:
    transcript = talk(*TALK)
    before = untouched(transcript)
    assert play(custom(before, bounds(transcript)), (Trim, Failed("timeout"))) is before
    assert play(custom(before, bounds(transcript, path=7))) is before
    assert play(custom(before, bounds(transcript, aim=before.tokens))) is before


@pytest.mark.requirement("A1.11")
def test_after_a_failure_the_next_layer_does_the_work() -> None:
    shape = ExtractShape(window=None, trigger=0.5, low_water=0.1, extract=0.1, tail=0.2)
    layers = (Layer(strategy="custom", params={"path": PATH}), Layer(strategy="evict"))
    settings = ContextSettings(layers=layers, shapes=(shape,), margin=0.0, headroom=0)
    transcript = talk(*TALK)
    for reply, done in (Failed("rejected"), [("custom", False), ("evict", True)]), (Trimmed(()), [("custom", True)]):
        decision = decide(transcript, budget=window(1_000), settings=settings, script=[OFFLOAD, (Trim, reply)])
        assert [(r.layer, r.kept) for r in decision.trail][: len(done)] == done


@pytest.mark.requirement("A1.11")
def test_what_was_decided_is_replayed_and_a_summary_in_front_is_not_lost() -> None:
    shape = ExtractShape(window=None, trigger=0.5, low_water=0.1, extract=0.1, tail=0.2)
    settings = ContextSettings(
        layers=(Layer(strategy="custom", params={"path": PATH}),), shapes=(shape,), margin=0.0, headroom=0
    )
    transcript = talk(*TALK)
    first = decide(transcript, budget=window(1_000), settings=settings, script=[OFFLOAD, (Trim, Trimmed(()))])
    assert first.applied == {"custom": 1}
    known = remember(ConversationState(), first, transcript)
    longer = talk(*TALK, assistant("yes"), user("go on"))
    again = decide(longer, budget=window(1_000), settings=settings, known=known)
    assert again.pieces is not None
    assert [p.index for p in again.pieces] == [0, 1, 7, 8, 9]
    assert not again.is_new

    assert first.cut is not None
    told = replace(known, cuts=(replace(first.cut, text="[summary]", tokens=7, origin="extract"),))
    base = bounds(longer, aim=20, known=told)
    draft = replace(untouched(longer).with_cut(told.cuts[0]), cut=None)
    later = play(custom(draft, base), (Trim, Trimmed((Kept(0), Kept(1)))))
    assert later.cut is not None
    assert later.cut.text == "[summary]"
    assert 7 not in indices(later)
    assert indices(later)[-1] == 9
