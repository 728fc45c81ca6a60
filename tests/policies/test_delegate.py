"""Very large results are read apart, in parts where they are larger than what reads them, and only if nobody needs them."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.draft import Bounds, ConversationState, Draft, bounds_for, broken_rules, untouched
from policies.effects import Failed, Summary
from policies.ledger import EditKind
from policies.messages import ToolCall, Transcript
from policies.settings import ContextSettings, Layer, Param
from policies.tokens import CHARS4
from tests.policies.answering import Model, says, texts
from tests.policies.play import Said, assistant, decide, flow, result, step, talk, user, window, words

delegate = flow("delegate")

REPORT = "The listing names 3 users, and the newest of them is ada@example.org, who joined before the others left."
NOTHING_IN_IT = "This part holds nothing that matters for the task, only the same word over and over."
NONE: Mapping[str, Param] = {}


def listing(tokens: int, word: str = "lorem") -> str:
    start = f"There are 3 users. The newest is ada@example.org.\n{word}\n"
    return start + words(tokens - CHARS4.count(start), word)


def bounds(
    transcript: Transcript,
    aim: int = 0,
    params: Mapping[str, Param] = NONE,
    *,
    scope: str = "total",
    summarizer: str | None = "small",
    reads: int | None = None,
    size: int = 100_000,
) -> Bounds:
    policy = replace(ContextSettings(), summarizer=summarizer)
    limits = bounds_for(
        transcript,
        settings=policy,
        budget=window(size),
        known=ConversationState(),
        counter=CHARS4,
        summarizer_input=reads,
    )
    layer = Layer(strategy="delegate", scope=scope, params=params)
    return replace(limits, layer=layer, aim=aim)


def listed(*sizes: int) -> Transcript:
    said = [step(listing(s, f"w{n:03}"), tool="listing", arguments=f'{{"n": {n}}}') for n, s in enumerate(sizes)]
    return talk(user("Find the newest user."), *said, *step("newest"))


def delegated(transcript: Transcript, model: Model, limits: Bounds | None = None) -> Draft:
    return model.run(delegate(untouched(transcript), limits or bounds(transcript)))


@pytest.mark.requirement("A0.67", "A0.73", "D24")
def test_a_result_of_60k_is_read_in_parts_and_comes_back_in_2000_tokens_with_a_ref() -> None:
    transcript, model = listed(60_000), Model(lambda a: Summary(REPORT if "ada@" in a.prompt else NOTHING_IN_IT))
    draft = delegated(transcript, model, bounds(transcript, reads=16_000))
    message, (edit,) = transcript.messages[2], draft.edits.values()
    assert edit.tokens == draft.pieces[2].tokens <= 2_000
    assert edit.kind is EditKind.DELEGATE
    assert edit.text == f"{REPORT}\n[weir: 60,004 tokens were read apart for this, archived as {message.ref}]"
    assert len(model.asked) >= 5, "four or more parts, and what was made of them"
    assert model.rounds[0] == len(model.asked) - 1
    assert all(CHARS4.count(a.prompt) < 16_000 for a in model.asked)
    assert sum(a.prompt.count("w000 ") for a in model.asked) * 5 >= 4 * 59_000, "all of it was read"
    (record,) = draft.condensed
    assert (record.strategy, record.original_tokens, record.compressed_tokens) == ("delegate", 60_004, edit.tokens)
    assert (record.calls, record.ref, record.failure) == (len(model.asked), message.ref, "")
    assert record.ratio == 60_004 / edit.tokens > 20
    assert record.purpose.startswith("reading")
    assert record.key.startswith(message.digest.hex())


@pytest.mark.requirement("A0.67")
def test_it_is_read_for_what_the_user_asked_and_for_the_call_that_it_answers() -> None:
    transcript, model = listed(12_000), says(REPORT)
    delegated(transcript, model)
    assert all("Find the newest user." in a.prompt and 'listing {"n": 0}' in a.prompt for a in model.asked)


@pytest.mark.requirement("A0.67", "D24")
@pytest.mark.parametrize(("params", "most"), [({"max_tokens": 100}, 100), (NONE, 2_000)])
def test_a_report_that_is_too_long_is_cut(params: Mapping[str, Param], most: int) -> None:
    transcript = listed(20_000)
    long, names = REPORT, product("bdfgklmnprst", "aeiou", "bdfgklmnprst", "aeiou")
    while CHARS4.count(long) <= most:
        long += f" {' '.join(''.join(next(names)) for _ in range(3 + len(long) % 7))}."
    draft = delegated(transcript, says(long), bounds(transcript, params=params))
    assert 0.8 * most < draft.edits[2].tokens <= most


@pytest.mark.requirement("A0.68")
@pytest.mark.parametrize(
    ("later", "goes"),
    [
        ("The newest one is ada@example.org, so I write to her.", False),
        ("I will look for something else.", True),
    ],
)
def test_a_result_that_is_referred_to_later_is_not_delegated(later: str, goes: bool) -> None:
    said: list[Said] = [
        user("task"),
        *step(listing(20_000), tool="listing"),
        assistant(later),
        user("go on"),
        *step("b"),
    ]
    transcript, model = talk(*said), says(REPORT)
    draft = delegated(transcript, model)
    assert bool(draft.edits) is goes
    assert bool(model.asked) is goes


@pytest.mark.requirement("A0.68")
@pytest.mark.parametrize(("tokens", "goes"), [(9_999, False), (10_000, True)])
def test_only_what_takes_a_tenth_of_the_window_is_delegated(tokens: int, goes: bool) -> None:
    transcript = listed(tokens - 4)
    assert transcript.messages[2].tokens == tokens
    assert bool(delegated(transcript, says(REPORT)).edits) is goes
    smaller = delegated(transcript, says(REPORT), bounds(transcript, params={"least": 9_000}))
    assert smaller.edits


@pytest.mark.requirement("A0.68", "A0.76")
def test_the_largest_goes_first_and_no_more_than_the_target_takes() -> None:
    transcript, model = listed(11_000, 30_000, 20_000), says(REPORT)
    draft = delegated(transcript, model, bounds(transcript, transcript.tokens - 25_000))
    assert list(texts(draft)) == [4]
    assert len(model.asked) == 1
    quiet = says(REPORT)
    same = untouched(transcript)
    assert quiet.run(delegate(same, bounds(transcript, transcript.tokens))) is same
    assert quiet.asked == []


@pytest.mark.requirement("A0.75", "A0.67")
def test_without_a_summarizer_the_array_stays_and_the_layer_says_why() -> None:
    transcript = listed(60_000)
    draft = delegated(transcript, says("never asked"), bounds(transcript, summarizer=None))
    assert draft.pieces == untouched(transcript).pieces
    assert draft.reason == "no_summarizer"
    layers = (Layer(strategy="delegate", at=0.5), Layer(strategy="evict", at=0.5))
    policy = replace(ContextSettings(), layers=layers)
    decision = decide(transcript, budget=window(100_000), settings=policy)
    assert [(r.layer, r.kept, r.reason) for r in decision.trail] == [
        ("delegate", False, "no_summarizer"),
        ("evict", True, ""),
    ]


@pytest.mark.requirement("A0.75", "A0.78")
@pytest.mark.parametrize("reply", [Failed("timeout"), Summary(""), Summary("I'm sorry, but I can't help with that.")])
def test_without_a_usable_report_the_result_stays(reply: Summary | Failed) -> None:
    transcript = listed(20_000)
    draft = delegated(transcript, Model(lambda _: reply))
    assert draft.pieces == untouched(transcript).pieces
    assert draft.reason == draft.condensed[0].failure != ""


@pytest.mark.requirement("A0.38", "A4.7")
def test_protected_pictured_replaced_and_other_buckets_results_stay() -> None:
    call = ToolCall("call_0", "listing", "{}")
    pinned = (assistant("", call), result(listing(20_000, "pinned"), keep=True))
    pictured = (assistant("", call), replace(result(listing(20_000, "picture")), media=1))
    transcript = talk(user("task"), pinned, pictured, step(listing(20_000, "newest")))
    assert not delegated(transcript, says(REPORT)).edits
    other = listed(20_000)
    assert not delegated(other, says(REPORT), bounds(other, scope="history")).edits
    edit = bounds(other).edited(2, words(15_000), EditKind.SUMMARY)
    draft = untouched(other).with_edits({2: edit}, new=False)
    assert says(REPORT).run(delegate(draft, bounds(other))) is draft


@pytest.mark.requirement("A0.140", "A0.70", "A0.76")
@pytest.mark.parametrize(("size", "asked"), [(60_000, False), (96_000, True)])
def test_where_what_is_local_suffices_nothing_is_delegated(size: int, asked: bool) -> None:
    """Eviction may not touch the newest nine steps, so that only the size says whether the second layer is due."""
    said = [user("task"), assistant(words(size - 30_000, "kept"), keep=True), *step(listing(24_000)), *step("newest")]
    layers = (
        Layer(strategy="evict", at=0.75, params={"scorer": "hybrid", "protect_steps": 9}),
        Layer(strategy="delegate", at=0.80),
    )
    policy = replace(ContextSettings(), summarizer="small", layers=layers, base="window", reserve_floor=0, headroom=0)
    model = says(REPORT)
    decision = model.decide(talk(*said), budget=window(100_000), settings=policy)
    assert bool(model.asked) is asked
    assert ("delegate" in [r.layer for r in decision.trail if r.kept]) is asked


@settings(max_examples=30, deadline=None)
@given(sizes=st.lists(st.integers(20, 4_000), max_size=5), aim=st.integers(0, 9_000))
@pytest.mark.requirement("A0.78", "P2")
def test_nothing_ever_grows_pairs_stay_and_a_second_run_changes_nothing(sizes: list[int], aim: int) -> None:
    transcript = listed(*sizes)
    limits = bounds(transcript, aim, size=10_000)
    draft = delegated(transcript, says(REPORT), limits)
    assert not broken_rules(draft)
    assert all(p.tokens <= transcript.messages[n].tokens for n, p in enumerate(draft.pieces))
    assert all(p.tokens <= 2_000 for p in draft.pieces if p.kind is EditKind.DELEGATE)
    assert says(REPORT).run(delegate(draft, limits)).pieces == draft.pieces
