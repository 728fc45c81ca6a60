"""Old tool results become their finding: which ones, how short, how often a model is asked, and when none is."""

from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.draft import Bounds, ConversationState, Draft, bounds_for, broken_rules, untouched
from policies.effects import Failed
from policies.ledger import EditKind
from policies.messages import Transcript
from policies.settings import ContextSettings, Ingest, Layer, Param
from policies.tokens import CHARS4
from tests.policies.answering import Model, says
from tests.policies.play import flow, step, talk, user, window, words
from tests.profile import tried

summarize_tool_result = flow("summarize_tool_result")

FINDING = "The lookup found 3 users, the newest of them is ada@example.org, and nothing else was wrong with the rows."
NONE: Mapping[str, Param] = {}


def found(tokens: int, word: str = "lorem") -> str:
    """A result of exactly so many tokens that holds what the finding names."""
    start = f"There are 3 users. The newest is ada@example.org.\n{word}\n"
    return start + words(tokens - CHARS4.count(start), word)


def bounds(
    transcript: Transcript,
    aim: int = 0,
    params: Mapping[str, Param] = NONE,
    *,
    scope: str = "total",
    summarizer: str | None = "small",
    ingest: Ingest | None = None,
    known: ConversationState | None = None,
) -> Bounds:
    policy = replace(ContextSettings(), summarizer=summarizer, ingest=ingest or Ingest())
    limits = bounds_for(
        transcript, settings=policy, budget=window(200_000), known=known or ConversationState(), counter=CHARS4
    )
    return replace(limits, layer=Layer(strategy="summarize_tool_result", scope=scope, params=params), aim=aim)


def results(*said: str) -> Transcript:
    """A step for each result, and a newest one that is protected."""
    steps = [step(text, tool="lookup", arguments=f'{{"n": {n}}}') for n, text in enumerate(said)]
    return talk(user("task"), *steps, *step("newest"))


def summarised(transcript: Transcript, model: Model, limits: Bounds | None = None) -> Draft:
    return model.run(summarize_tool_result(untouched(transcript), limits or bounds(transcript)))


@pytest.mark.requirement("A0.64", "A0.79", "A0.82")
@pytest.mark.parametrize(("tokens", "asked"), [(500, 0), (501, 1)])
def test_a_result_of_more_than_500_tokens_is_summarised_and_one_of_500_is_not(tokens: int, asked: int) -> None:
    transcript, model = results(found(tokens)), says(FINDING)
    assert CHARS4.count(transcript.read(2).text) == tokens
    draft = summarised(transcript, model)
    assert len(model.asked) == asked
    assert bool(draft.edits) is bool(asked)


@pytest.mark.requirement("A0.145")
def test_what_was_cut_on_its_way_in_is_summarised_from_all_of_it() -> None:
    transcript, model = results(found(5_000) + " Zanzibar ends it."), says(FINDING)
    edit = bounds(transcript).edited(2, words(2_000), EditKind.INGEST_CAP)
    draft = untouched(transcript).with_edits({2: edit}, new=False)
    done = model.run(summarize_tool_result(draft, bounds(transcript)))
    assert "Zanzibar ends it." in model.asked[0].prompt
    assert done.pieces[2].kind is EditKind.SUMMARY


REPORT = Ingest(sub_agents={"Task": 2_000})


def reported(tokens: int) -> Transcript:
    call = {"tool": "Task", "arguments": '{"prompt": "find the newest user"}'}
    return talk(user("who is newest?"), *step(found(tokens), **call), *step("newer"), *step("newest"))


@pytest.mark.requirement("A0.69", "A0.67", "D24")
def test_a_sub_agents_report_of_30k_comes_back_as_a_reading_of_at_most_2k() -> None:
    transcript, model = reported(30_000), says(FINDING)
    draft = summarised(transcript, model, bounds(transcript, ingest=REPORT))
    (edit,) = draft.edits.values()
    assert edit.tokens <= 2_000
    assert transcript.messages[2].ref in edit.text
    assert edit.text.startswith(FINDING)
    assert model.asked[0].max_tokens < 2_000
    assert all("who is newest?" in a.prompt and "find the newest user" in a.prompt for a in model.asked)


EVICT = Layer(strategy="evict", at=0.75, stop_at=0.60)
SUMMARISE = Layer(strategy="summarize_tool_result", at=0.75)
POLICY = replace(
    ContextSettings(),
    summarizer="small",
    layers=(EVICT, SUMMARISE),
    base="window",
    reserve_floor=0,
    headroom=0,
    margin=0.0,
    ingest=Ingest(share=1.0),
)


def run_of(*sizes: int) -> Transcript:
    return results(*[found(size, f"word{n:02}") for n, size in enumerate(sizes)])


@pytest.mark.requirement("D7", "A0.76", "A0.140", "A0.70")
def test_where_eviction_suffices_no_model_is_asked() -> None:
    model = says(FINDING)
    decision = model.decide(run_of(*[2_000] * 38), budget=window(100_000), settings=POLICY)
    assert [r.layer for r in decision.trail] == ["evict"]
    assert model.asked == []


@pytest.mark.requirement("A0.72", "A0.73", "A0.78")
def test_the_report_of_a_layer_says_what_became_of_every_question_also_where_nobody_answered() -> None:
    policy = replace(POLICY, layers=(SUMMARISE,))
    decision = Model(lambda _: Failed("timeout")).decide(run_of(78_000), budget=window(100_000), settings=policy)
    (report,) = decision.trail
    assert (report.kept, report.reason) == (True, "")
    assert [(c.failure, c.purpose) for c in report.condensed] == [("timeout", "extract")]
    assert decision.applied == {"summarize_tool_result": 1}


@settings(max_examples=tried(20, 40), deadline=None)
@given(sizes=st.lists(st.integers(1, 3_000), max_size=6), aim=st.integers(0, 6_000), model=st.booleans())
@pytest.mark.requirement("A0.78", "P2")
def test_nothing_ever_grows_pairs_stay_and_a_second_run_changes_nothing(
    sizes: list[int], aim: int, model: bool
) -> None:
    transcript = results(*[words(size, f"word{n:02}") + " ada@example.org 3" for n, size in enumerate(sizes)])
    limits = bounds(transcript, aim, summarizer="small" if model else None)
    draft = summarised(transcript, says(FINDING), limits)
    assert not broken_rules(draft)
    assert all(p.tokens <= transcript.messages[n].tokens for n, p in enumerate(draft.pieces))
    assert all(p.tokens < 0.9 * transcript.messages[n].tokens for n, p in enumerate(draft.pieces) if p.text is not None)
    again = says(FINDING).run(summarize_tool_result(draft, limits))
    assert again.pieces == draft.pieces
