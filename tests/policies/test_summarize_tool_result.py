"""Old tool results become their finding: which ones, how short, how often a model is asked, and when none is."""

from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.draft import Bounds, ConversationState, Draft, bounds_for, broken_rules, untouched
from policies.effects import Failed, Summary
from policies.ledger import Condensed, EditKind
from policies.messages import ToolCall, Transcript
from policies.settings import ContextSettings, Ingest, Layer, Param
from policies.tokens import CHARS4
from tests.policies.answering import Model, says, texts
from tests.policies.play import Said, assistant, flow, remember, result, step, talk, user, window, words

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


@pytest.mark.requirement("A0.64", "A0.79")
def test_the_finding_comes_first_and_what_stands_behind_it_says_where_the_rest_is() -> None:
    transcript = results(found(3_000))
    draft = summarised(transcript, says(FINDING))
    ref = transcript.messages[2].ref
    assert texts(draft) == {2: f"{FINDING}\n[weir: summary of 3,004 tokens, archived as {ref}]"}
    edit = draft.edits[2]
    assert (edit.kind, edit.ref) == (EditKind.SUMMARY, ref)
    assert edit.tokens == draft.pieces[2].tokens == 4 + CHARS4.count(edit.text)
    assert edit.tokens < 0.2 * transcript.messages[2].tokens
    assert draft.applied == {"summarize_tool_result": 1}


@pytest.mark.requirement("A0.64", "A0.145")
def test_the_model_reads_all_of_the_result_and_the_question_is_addressed_by_its_content() -> None:
    text = found(2_000) + " And the very last word is Zanzibar."
    transcript, model = results(text), says(FINDING)
    summarised(transcript, model)
    (asked,) = model.asked
    assert "result of lookup" in asked.prompt
    assert words(2_000 - 20)[:4_000] in asked.prompt
    assert "Zanzibar" in asked.prompt
    assert asked.key
    again = says(FINDING)
    summarised(talk(user("another task"), *step(text, tool="lookup"), *step("later"), *step("newest")), again)
    assert [a.key for a in again.asked] == [asked.key]
    other = says(FINDING)
    summarised(results(found(2_001)), other)
    assert other.asked[0].key != asked.key


@pytest.mark.requirement("A0.145")
def test_what_was_cut_on_its_way_in_is_summarised_from_all_of_it() -> None:
    transcript, model = results(found(5_000) + " Zanzibar ends it."), says(FINDING)
    edit = bounds(transcript).edited(2, words(2_000), EditKind.INGEST_CAP)
    draft = untouched(transcript).with_edits({2: edit}, new=False)
    done = model.run(summarize_tool_result(draft, bounds(transcript)))
    assert "Zanzibar ends it." in model.asked[0].prompt
    assert done.pieces[2].kind is EditKind.SUMMARY


@pytest.mark.requirement("A0.64")
def test_the_same_result_in_twenty_requests_costs_one_question() -> None:
    layer = Layer(strategy="summarize_tool_result", at=0.5)
    policy = replace(ContextSettings(), summarizer="small", layers=(layer,))
    model, known = says(FINDING), ConversationState()
    said: list[Said] = [user("task"), *step(found(6_000), tool="lookup")]
    sent: list[str | None] = []
    for n in range(20):
        said += step(f"step {n}: {words(20)}")
        transcript = talk(*said)
        decision = model.decide(transcript, budget=window(10_000), settings=policy, known=known)
        known = remember(known, decision, transcript)
        sent.append(None if decision.pieces is None else decision.pieces[2].text)
    assert len(model.asked) == 1
    assert None not in sent
    assert len({*sent}) == 1


@pytest.mark.requirement("A0.64")
def test_a_result_that_came_twice_is_asked_about_once() -> None:
    transcript, model = results(found(2_000), "between", found(2_000)), says(FINDING)
    draft = summarised(transcript, model)
    assert sorted(texts(draft)) == [2, 6]
    assert len(model.asked) == 1
    assert [r.calls for r in draft.condensed] == [1, 0]


@pytest.mark.requirement("A0.78", "A0.75")
def test_of_a_model_that_returns_what_it_was_given_nothing_is_taken_and_that_is_said() -> None:
    transcript = results(found(2_000))
    draft = summarised(transcript, Model(lambda asked: Summary(asked.prompt)))
    assert draft.edits == summarised(transcript, says(FINDING), bounds(transcript, summarizer=None)).edits
    (record,) = draft.condensed
    assert (record.failure, record.purpose) == ("echo", "extract")
    assert record.compressed_tokens < 0.2 * record.original_tokens


@pytest.mark.requirement("A0.78")
def test_of_a_text_of_nine_tenths_of_the_original_that_of_code_stands() -> None:
    facts = [f"row {n}: user{n}@example.org" for n in range(40)]
    transcript = results("\n".join(facts))
    whole = transcript.messages[2].tokens
    long = " ".join(f"It reports user{n}@example.org." for n in range(12))
    limits = bounds(transcript, params={"over": 50, "ratio": 0.5})
    assert 4 + CHARS4.count(long) < 0.9 * whole
    assert summarised(transcript, says(long), limits).edits
    small = results("\n".join(facts[:14]))
    assert 4 + CHARS4.count(long) + 12 >= 0.9 * small.messages[2].tokens
    refused = summarised(small, says(long), bounds(small, params={"over": 50, "ratio": 0.9}))
    assert "It reports" not in "".join(texts(refused).values())
    assert [each.failure for each in refused.condensed] == ["not_smaller"]


@pytest.mark.requirement("A0.78")
@pytest.mark.parametrize(("left", "taken"), [(58, False), (59, True)])
def test_what_stands_there_now_counts_and_what_stands_behind_the_text_too(left: int, taken: bool) -> None:
    transcript = results(found(2_000))
    edit = bounds(transcript).edited(2, words(left - 4), EditKind.TRUNCATE)
    draft = untouched(transcript).with_edits({2: edit}, new=False)
    text = f"{FINDING} Nobody else has joined since then."
    assert 4 + CHARS4.count(f"{text}\n[weir: summary of 2,004 tokens, archived as 0123456789ab]") == 53
    done = says(text).run(summarize_tool_result(draft, bounds(transcript, params={"over": 50})))
    assert (done.pieces != draft.pieces) is taken
    assert done.condensed[0].failure == ("" if taken else "not_smaller")


@pytest.mark.requirement("A0.75", "A0.78")
@pytest.mark.parametrize("reply", [Failed("timeout"), Summary(""), Summary("", tool_calls=1)])
def test_without_a_usable_answer_code_writes_and_the_reason_is_told(reply: Summary | Failed) -> None:
    transcript, model = results(found(2_000), found(3_000, "other")), Model(lambda _: reply)
    draft = summarised(transcript, model)
    alone = bounds(transcript, summarizer=None)
    assert draft.edits == summarised(transcript, model, alone).edits != {}
    assert all(each.failure and each.compressed_tokens < each.original_tokens for each in draft.condensed)
    assert model.rounds[0] == 2


@pytest.mark.requirement("A0.64", "A0.72")
def test_invented_names_are_not_taken_over() -> None:
    transcript = results(found(2_000))
    draft = summarised(transcript, says("The lookup says that bob@invented.example and /srv/none/there.txt are fine."))
    assert "bob@invented.example" not in "".join(texts(draft).values())


@pytest.mark.requirement("A0.64", "A0.76")
def test_the_largest_saving_goes_first_and_no_more_than_the_target_takes() -> None:
    transcript = results(found(1_000, "alpha"), found(4_000, "beta"), found(2_000, "gamma"))
    model = says(FINDING)
    draft = summarised(transcript, model, bounds(transcript, transcript.tokens - 3_000))
    assert list(texts(draft)) == [4]
    assert len(model.asked) == 1
    model = says(FINDING)
    draft = summarised(transcript, model, bounds(transcript, transcript.tokens - 4_500))
    assert sorted(texts(draft)) == [4, 6]
    assert model.rounds == [2]
    assert draft.tokens <= transcript.tokens - 4_500
    assert draft.reason == ""


def test_at_the_target_nothing_is_asked() -> None:
    transcript, model = results(found(2_000)), says(FINDING)
    draft = untouched(transcript)
    assert model.run(summarize_tool_result(draft, bounds(transcript, transcript.tokens))) is draft
    assert model.asked == []


@pytest.mark.requirement("A0.76", "A0.78")
@pytest.mark.parametrize(
    ("reply", "rounds"), [(Summary("It is user_9001@invented.example."), [1, 1]), (Failed("timeout"), [1])]
)
def test_where_an_answer_is_of_no_use_code_says_it_and_no_other_result_is_asked_about_for_that(
    reply: Summary | Failed, rounds: list[int]
) -> None:
    transcript = results(found(4_000, "alpha"), found(3_500, "beta"))
    model = Model(lambda asked: reply if "alpha" in asked.prompt else Summary(FINDING))
    draft = summarised(transcript, model, bounds(transcript, transcript.tokens - 2_500))
    assert sorted(texts(draft)) == [2]
    assert model.rounds == rounds, "an answer that may be mended is asked for twice"
    assert draft.reason == ""


@pytest.mark.requirement("A0.76", "A0.78")
def test_where_nobody_answers_code_does_the_rest_and_nobody_is_asked_again() -> None:
    transcript = results(*[found(600, f"word{n:02}") for n in range(70)])
    model = Model(lambda _: Failed("timeout"))
    draft = summarised(transcript, model)
    assert len(model.asked) == 32
    assert len(draft.edits) == 70


def test_no_more_than_32_questions_are_asked_at_once() -> None:
    transcript, model = results(*[found(600, f"word{n:02}") for n in range(40)]), says(FINDING)
    draft = summarised(transcript, model)
    assert len(model.asked) == 32
    assert len(draft.edits) == 32


@pytest.mark.requirement("A0.38", "A4.24", "A0.64")
def test_protected_pictured_and_replaced_results_stay() -> None:
    call = ToolCall("call_0", "look", "{}")
    pinned = (assistant("", call), result(found(900), keep=True))
    pictured = (assistant("", call), replace(result(found(900, "picture")), media=1))
    transcript = talk(user(found(900)), assistant(found(900)), pinned, pictured, step(found(900, "new")))
    model = says(FINDING)
    assert not summarised(transcript, model).edits
    assert model.asked == []
    gone = results(found(900))
    edit = bounds(gone).edited(2, words(700), EditKind.EVICT)
    draft = untouched(gone).with_edits({2: edit}, new=False)
    assert model.run(summarize_tool_result(draft, bounds(gone))) is draft


@pytest.mark.requirement("A0.64")
def test_the_newest_steps_stay_where_the_policy_says_so() -> None:
    transcript = results(found(900, "one"), found(900, "two"), found(900, "three"))
    draft = summarised(transcript, says(FINDING), bounds(transcript, params={"keep_newest": 3}))
    assert sorted(texts(draft)) == [2]


@pytest.mark.requirement("A4.7")
def test_only_what_is_in_the_layers_scope_changes() -> None:
    transcript = results(found(2_000))
    outside = summarised(transcript, says(FINDING), bounds(transcript, scope="history"))
    assert not outside.edits
    inside = summarised(transcript, says(FINDING), bounds(transcript, scope="tool_outputs"))
    assert list(inside.edits) == [2]
    before, after = untouched(transcript).buckets(), inside.buckets()
    assert {name for name in before if before[name] != after[name]} == {"tool_outputs"}


LOG = "build 4711 of /srv/app\n" + "\n".join(f"step {n} took {n} ms" for n in range(300)) + "\n"


@pytest.mark.requirement("A0.64", "P6")
def test_without_a_model_the_telling_lines_stand_for_a_result_with_every_error_among_them() -> None:
    errors = ["ValueError: port 5432 is taken", "fatal: no route to db.internal"]
    transcript = results(LOG + errors[0] + "\n" + LOG + errors[1] + "\n12 passed, 2 failed")
    draft = summarised(transcript, says("never asked"), bounds(transcript, summarizer=None))
    said = texts(draft)[2]
    assert all(error in said for error in errors)
    assert said.endswith(f"archived as {transcript.messages[2].ref}]")
    assert draft.pieces[2].tokens <= 0.2 * transcript.messages[2].tokens + 4
    assert [(r.calls, r.purpose) for r in draft.condensed] == [(0, "extract")]


@pytest.mark.requirement("A0.64", "P6")
def test_without_a_model_a_result_whose_errors_take_too_much_stays() -> None:
    transcript = results("\n".join(f"ValueError: row {n} has no key user_{n}" for n in range(100)))
    draft = summarised(transcript, says("never asked"), bounds(transcript, summarizer=None))
    assert not draft.edits
    assert draft.reason == "no_summarizer"


REPORT = Ingest(sub_agent_tools=("Task",), sub_agent_cap=2_000)


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


@pytest.mark.requirement("A0.69", "D24")
def test_a_report_that_is_longer_than_asked_for_is_cut_to_the_cap() -> None:
    transcript = reported(30_000)
    long = "The newest is ada@example.org. " + " ".join(f"It says that part {n} is well." for n in range(8))
    draft = summarised(transcript, says(long), bounds(transcript, ingest=replace(REPORT, sub_agent_cap=70)))
    assert draft.edits[2].tokens <= 70


@pytest.mark.requirement("A0.69")
@pytest.mark.parametrize(("tokens", "due"), [(1_996, False), (1_997, True)])
def test_a_report_over_its_cap_is_due_whatever_the_layer_says(tokens: int, due: bool) -> None:
    transcript = reported(tokens)
    limits = bounds(transcript, ingest=REPORT, params={"over": 100_000})
    assert bool(summarised(transcript, says(FINDING), limits).edits) is due


@pytest.mark.requirement("A0.69")
def test_a_report_that_was_cut_on_its_way_in_is_read_instead() -> None:
    transcript, model = reported(30_000), says(FINDING)
    edit = bounds(transcript).edited(2, words(1_990), EditKind.INGEST_CAP)
    draft = untouched(transcript).with_edits({2: edit}, new=False)
    done = model.run(summarize_tool_result(draft, bounds(transcript, ingest=REPORT, params={"over": 5_000})))
    assert done.pieces[2].kind is EditKind.SUMMARY
    assert done.tokens < draft.tokens


def test_without_a_model_a_report_is_a_result_like_any_other() -> None:
    transcript = reported(1_997)
    limits = bounds(transcript, ingest=REPORT, params={"over": 100_000}, summarizer=None)
    assert not summarised(transcript, says("never asked"), limits).edits


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


@pytest.mark.requirement("D7", "A0.70", "A0.142", "D11")
def test_what_eviction_leaves_is_summarised_then() -> None:
    pinned_from_eviction = replace(
        POLICY, layers=(replace(EVICT, params={"scorer": "hybrid", "protect_steps": 100}), SUMMARISE)
    )
    model, transcript = says(FINDING), run_of(30_000, 48_000)
    decision = model.decide(transcript, budget=window(100_000), settings=pinned_from_eviction)
    assert [(r.layer, r.kept) for r in decision.trail] == [("evict", False), ("summarize_tool_result", True)]
    report = decision.trail[-1]
    assert decision.applied == {"summarize_tool_result": 1}
    assert report.condensed == (
        Condensed(
            strategy="summarize_tool_result",
            original_tokens=48_004,
            compressed_tokens=report.condensed[0].compressed_tokens,
            calls=report.condensed[0].calls,
            purpose=report.condensed[0].purpose,
            ref=transcript.messages[4].ref,
            key=transcript.messages[4].digest.hex(),
        ),
    )
    assert report.condensed[0].calls >= 1
    assert report.condensed[0].ratio > 100
    assert report.before - report.after == 48_004 - report.condensed[0].compressed_tokens, "booked is the net"


@pytest.mark.requirement("A0.72", "A0.73", "A0.78")
def test_the_report_of_a_layer_says_what_became_of_every_question_also_where_nobody_answered() -> None:
    policy = replace(POLICY, layers=(SUMMARISE,))
    decision = Model(lambda _: Failed("timeout")).decide(run_of(78_000), budget=window(100_000), settings=policy)
    (report,) = decision.trail
    assert (report.kept, report.reason) == (True, "")
    assert [(c.failure, c.purpose) for c in report.condensed] == [("timeout", "extract")]
    assert decision.applied == {"summarize_tool_result": 1}


@settings(max_examples=40, deadline=None)
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
