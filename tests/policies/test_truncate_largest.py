"""The largest results lose their middle first, and only as much as it takes."""

from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.draft import Bounds, ConversationState, Draft, bounds_for, untouched
from policies.ledger import EditKind
from policies.limits import TokenBudget, divide
from policies.messages import Transcript
from policies.settings import Bucket, ContextSettings, Layer, Param
from policies.tokens import CHARS4
from proxy.config.presets import preset_policies
from tests.policies.answering import says
from tests.policies.play import Said, assistant, decide, remember, result, step, strategy, talk, user, window, words
from tests.profile import tried

truncate_largest = strategy("truncate_largest")

NONE: Mapping[str, Param] = {}


def bounds(transcript: Transcript, aim: int, params: Mapping[str, Param] = NONE, *, scope: str = "total") -> Bounds:
    limits = bounds_for(
        transcript, settings=ContextSettings(), budget=window(200_000), known=ConversationState(), counter=CHARS4
    )
    return replace(limits, layer=Layer(strategy="truncate_largest", scope=scope, params=params), aim=aim)


def results(*sizes: int) -> Transcript:
    """Steps whose results are messages of exactly so many tokens, and a newest one that is protected."""
    said: list[Said] = [user("task")]
    for n, size in enumerate(sizes):
        said += step(words(size - 4, f"word{n:02}"))
    return talk(*said, *step("newest"))


def cut(transcript: Transcript, less: int, params: Mapping[str, Param] = NONE) -> Draft:
    """What is left of a draft that is to be ``less`` tokens smaller."""
    return truncate_largest(untouched(transcript), bounds(transcript, transcript.tokens - less, params))


def sizes(draft: Draft) -> dict[int, int]:
    return {p.index: p.tokens for p in draft.pieces if p.index is not None and p.kind is not None}


@pytest.mark.requirement("A4.33", "A4.11")
def test_the_largest_shrink_to_one_size_and_none_is_emptied_while_another_stays_whole() -> None:
    transcript = results(3_000, 9_000, 6_000)
    draft = cut(transcript, 2_000)
    assert list(sizes(draft)) == [4]
    assert 2_000 <= transcript.tokens - draft.tokens <= 2_040
    draft = cut(transcript, 8_800)
    assert list(sizes(draft)) == [4, 6]
    assert all(3_060 <= tokens <= 3_100 for tokens in sizes(draft).values())
    draft = cut(transcript, 12_000)
    assert list(sizes(draft)) == [2, 4, 6]
    assert all(1_960 <= tokens <= 2_000 for tokens in sizes(draft).values())
    draft = cut(transcript, 20_000)
    assert list(sizes(draft)) == [2, 4, 6]
    assert all(170 <= tokens <= 200 for tokens in sizes(draft).values())


@pytest.mark.requirement("A4.33")
def test_head_and_tail_stay_and_the_note_says_where_the_rest_is() -> None:
    transcript = talk(user("task"), step("HEAD " + words(5_000) + " TAIL"), step("newest"))
    draft = cut(transcript, 1_000)
    text = draft.pieces[2].text or ""
    assert text.startswith("HEAD ")
    assert text.endswith(" TAIL")
    assert transcript.messages[2].ref in text
    assert draft.pieces[2].kind is EditKind.TRUNCATE
    assert draft.pieces[2].tokens == 4 + CHARS4.count(text)
    assert draft.edits[2].text == text


@pytest.mark.requirement("A4.33")
@pytest.mark.parametrize(("size", "floor", "cuts"), [(200, 200, False), (299, 300, False), (400, 200, True)])
def test_a_result_at_the_floor_is_left_alone(size: int, floor: int, cuts: bool) -> None:
    assert bool(sizes(cut(results(size), 10_000, {"floor": floor}))) is cuts


@pytest.mark.requirement("A4.33")
def test_two_equal_ones_stay_equal() -> None:
    assert [tokens // 50 for tokens in sizes(cut(results(2_000, 2_000), 500)).values()] == [34, 34]


@pytest.mark.requirement("A0.38", "A4.24")
def test_only_results_are_cut_and_no_protected_ones() -> None:
    pinned = (assistant("", *step("")[0].calls), result(words(900), keep=True))
    pictured = (assistant("", *step("")[0].calls), replace(result(words(900)), media=1))
    transcript = talk(user(words(900)), assistant(words(900)), pinned, pictured, step(words(900)))
    draft = untouched(transcript)
    assert truncate_largest(draft, bounds(transcript, 100)) is draft


def test_at_the_target_nothing_is_cut_and_one_token_above_it_something_is() -> None:
    transcript = results(3_000)
    draft = untouched(transcript)
    assert truncate_largest(draft, bounds(transcript, transcript.tokens)) is draft
    assert truncate_largest(draft, bounds(transcript, transcript.tokens - 1)) is not draft


def test_a_result_that_is_cut_already_is_cut_again_from_its_original_if_that_takes_a_fifth() -> None:
    transcript = results(10_000)
    first = cut(transcript, 4_000)
    assert 5_950 <= sizes(first)[2] <= 6_000
    second = truncate_largest(first, bounds(transcript, first.tokens - 1))
    assert 4_700 <= sizes(second)[2] <= 0.8 * sizes(first)[2]
    assert (second.pieces[2].text or "").count("left out here") == 1
    small = cut(results(1_000), 770)
    assert 200 < sizes(small)[2] < 250
    assert truncate_largest(small, bounds(small.transcript, small.tokens - 1)) is small


@pytest.mark.parametrize("kind", [EditKind.EVICT, EditKind.DEDUPE, EditKind.PRUNE, EditKind.MERGE])
def test_what_stands_in_place_of_a_result_is_not_cut(kind: EditKind) -> None:
    transcript = results(3_000)
    edit = replace(cut(transcript, 500).edits[2], kind=kind)
    draft = untouched(transcript).with_edits({2: edit}, new=False)
    assert truncate_largest(draft, bounds(transcript, 100)) is draft


@pytest.mark.requirement("D16")
def test_a_result_outside_the_layers_scope_stays() -> None:
    transcript = results(3_000)
    draft = untouched(transcript)
    assert truncate_largest(draft, bounds(transcript, 100, scope="history")) is draft
    assert truncate_largest(draft, bounds(transcript, 100, scope="tool_outputs")) is not draft


@pytest.mark.requirement("A4.11", "A4.37", "D2", "P2")
@pytest.mark.parametrize(("used", "acts"), [(25_599, False), (25_600, True)])
def test_tool_outputs_are_cut_at_80_percent_of_their_cap(used: int, acts: bool) -> None:
    """The cap is 32,000; the work ends at 80 % of that line, 20,480."""
    layer = Layer(strategy="truncate_largest", scope="tool_outputs", at=0.80, min_savings=0)
    rules = replace(ContextSettings(), enforce="bucket", layers=(layer,), buckets={"tool_outputs": Bucket(cap=32_000)})
    budget = replace(TokenBudget(window=128_000, reserve=16_000, headroom=8_000), caps={"tool_outputs": 32_000})
    newest = talk(*step("newest")).messages[1].tokens
    transcript = results(9_000, used - 9_000 - 4_000 - newest, 4_000)
    assert untouched(transcript).buckets()["tool_outputs"] == used
    decision = decide(transcript, budget=budget, settings=rules)
    assert decision.applied == ({"truncate": 2} if acts else {})
    if acts:
        assert decision.pieces is not None
        assert [p.index for p in decision.pieces if p.kind is not None] == [2, 4]
        assert 20_400 <= decision.buckets["tool_outputs"] <= 20_480
        again = decide(
            transcript, budget=budget, settings=rules, known=remember(ConversationState(), decision, transcript)
        )
        assert (again.edits, again.pieces) == ((), decision.pieces)


@settings(max_examples=tried(25, 100), deadline=None)
@given(
    lengths=st.lists(st.integers(5, 4_000), max_size=8),
    aim=st.integers(0, 20_000),
    floor=st.integers(0, 1_000),
)
@pytest.mark.requirement("A4.33", "A3.20")
def test_no_result_ever_grows_or_falls_under_the_floor_by_more_than_its_note(
    lengths: list[int], aim: int, floor: int
) -> None:
    transcript = results(*lengths)
    limits = bounds(transcript, aim, {"floor": floor})
    draft = truncate_largest(untouched(transcript), limits)
    for index, tokens in sizes(draft).items():
        before = transcript.messages[index].tokens
        assert min(floor, before) * 0.75 - 40 <= tokens < before
    whole = [p.tokens for p in draft.pieces if p.index is not None and transcript.messages[p.index].is_result]
    assert draft.tokens <= aim or all(tokens <= max(floor, 64) for tokens in whole[:-1])
    assert truncate_largest(draft, limits) is draft


AFTER: Mapping[str, Param] = {"truncate_after_summary": True}
TAIL = "[weir: summary of 9,000 tokens, archived as 0123456789ab]"


def partly_summarised() -> Draft:
    """The result of 9,000 tokens stands in 3,000; the one of 6,000 stands as it came."""
    transcript = results(9_000, 6_000)
    text = f"It was found that {words(2_900, 'finding')}\n{TAIL}"
    edit = bounds(transcript, aim=0).edited(2, text, EditKind.SUMMARY)
    return untouched(transcript).with_edits({2: edit}, new=False)


def less(draft: Draft, tokens: int, params: Mapping[str, Param] = AFTER) -> Draft:
    return truncate_largest(draft, bounds(draft.transcript, draft.tokens - tokens, params))


@pytest.mark.requirement("A4.27")
def test_after_a_summary_what_was_summarised_is_cut_and_an_original_is_not() -> None:
    draft = partly_summarised()
    done = less(draft, 1_000)
    text = done.pieces[2].text or ""
    assert done.pieces[4].text is None
    assert text.startswith("It was found that")
    assert text.endswith(TAIL)
    assert done.pieces[2].tokens < draft.pieces[2].tokens - 990
    assert done.reason == ""
    assert sorted(i for i, p in enumerate(less(draft, 1_000, NONE).pieces) if p.kind is EditKind.TRUNCATE) == [4]


@pytest.mark.requirement("A4.27")
def test_what_was_cut_out_of_a_summary_is_cut_again_from_that() -> None:
    once = less(partly_summarised(), 1_000)
    again = less(once, 500)
    text = again.pieces[2].text or ""
    assert again.pieces[2].tokens < once.pieces[2].tokens
    assert text.startswith("It was found that")
    assert text.endswith(TAIL)
    assert again.pieces[4].text is None


@pytest.mark.requirement("A4.27")
@pytest.mark.parametrize(("summarizer", "reason"), [(None, "no_summarizer"), ("small", "not_summarised")])
def test_where_that_is_not_enough_originals_are_cut_and_the_reason_is_told(summarizer: str | None, reason: str) -> None:
    draft = partly_summarised()
    limits = bounds(draft.transcript, draft.tokens - 5_000, AFTER)
    limits = replace(limits, settings=replace(limits.settings, summarizer=summarizer))
    done = truncate_largest(draft, limits)
    assert done.tokens <= limits.target
    assert 180 <= done.pieces[2].tokens <= 200, "what was summarised went first, to the floor"
    assert done.pieces[4].kind is EditKind.TRUNCATE
    assert done.reason == reason
    hurried = truncate_largest(draft, replace(limits, free_only=True))
    assert hurried.pieces[4].text is None, "where nobody may be asked now, an original waits for its summary"
    assert truncate_largest(done, limits).pieces == done.pieces


FB_CODE = preset_policies()["fb-code-200k"]
FINDING = "The listing names 3 users, and the newest of them is ada@example.org."


def listing(tokens: int, word: str) -> str:
    start = f"There are 3 users. The newest is ada@example.org.\n{word}\n"
    return start + words(tokens - CHARS4.count(start), word)


@pytest.mark.requirement("A4.27", "A0.70", "D11")
def test_the_preset_for_code_summarises_first_and_cuts_what_remains_then() -> None:
    said = [user("task"), *step(listing(20_000, "large"))]
    for n in range(105):
        said += step(words(480, f"small{n:03}"), arguments=f'{{"n": {n}}}')
    transcript, model = talk(*said, *step("newest")), says(FINDING)
    policy = replace(FB_CODE, summarizer="small")
    decision = model.decide(transcript, budget=divide(policy, window=200_000), settings=policy)
    trail = [(r.layer, r.kept, r.reason) for r in decision.trail if r.kept]
    assert trail == [("summarize_tool_result", True, ""), ("truncate_largest", True, "not_summarised")]
    assert decision.pieces is not None
    assert (decision.pieces[2].text or "").startswith(FINDING), "its finding was not cut off again"
    assert decision.applied["summarize_tool_result"] == 1
    assert decision.buckets["tool_outputs"] <= 0.64 * 60_000
    assert len(model.asked) == 1


@pytest.mark.requirement("A4.27", "D11")
@pytest.mark.parametrize("summarizer", ["small", None])
def test_with_the_preset_for_code_a_result_of_30000_tokens_is_summarised_and_nothing_is_cut(
    summarizer: str | None,
) -> None:
    said = [user("task"), *step(listing(30_000, "large")), *step(listing(24_000, "other"), arguments='{"n": 1}')]
    transcript, model = talk(*said, *step("newest")), says(FINDING)
    policy = replace(FB_CODE, summarizer=summarizer)
    decision = model.decide(transcript, budget=divide(policy, window=200_000), settings=policy)
    assert [r.layer for r in decision.trail if r.kept][-1] == "summarize_tool_result"
    assert decision.applied == {"summarize_tool_result": 1}
    assert decision.pieces is not None
    assert decision.pieces[2].tokens < 6_000
    assert transcript.messages[2].ref in (decision.pieces[2].text or "")
    assert len(model.asked) == (summarizer is not None)
