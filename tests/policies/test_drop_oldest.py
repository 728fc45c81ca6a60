"""The oldest units go with a note, as a layer of its own: how many, and what becomes of a summary."""

from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.draft import Bounds, ConversationState, Draft, bounds_for, broken_rules, replay, untouched
from policies.ledger import Cut
from policies.messages import Transcript
from policies.settings import Bucket, ContextSettings, Layer, Memory, Param
from policies.strategies.drop import REMOVED as NOTE
from policies.tokens import CHARS4
from tests.policies.play import Said, assistant, decide, remember, step, strategy, system, talk, user, window, words
from tests.profile import tried

drop_oldest = strategy("drop_oldest")

SUMMARY = (
    "<weir-123456>\nWritten by Weir from 6 earlier messages (v1, archived as 0123456789ab).\nfacts\n</weir-123456>"
)
HALF: Mapping[str, Param] = {"fraction": 0.5}


def bounds(transcript: Transcript, aim: int, params: Mapping[str, Param], *, scope: str = "total") -> Bounds:
    limits = bounds_for(
        transcript, settings=ContextSettings(), budget=window(200_000), known=ConversationState(), counter=CHARS4
    )
    return replace(limits, layer=Layer(strategy="drop_oldest", scope=scope, params=params), aim=aim)


def turns(count: int, size: int = 60) -> list[Said]:
    """``count`` turns of a question, a step and an answer: four messages each."""
    made: list[Said] = []
    for n in range(count):
        made += [user(f"{words(size)} {n}"), *step(f"{words(size)}{n}"), assistant(f"{words(size)} so {n}")]
    return made


def order(draft: Draft) -> list[int | None]:
    return [p.index for p in draft.pieces]


def with_summary(transcript: Transcript, covers: int, text: str = SUMMARY) -> Draft:
    prefix = transcript.chain[covers - 1]
    tokens = 4 + CHARS4.count(text)
    return untouched(transcript).with_cut(Cut(covers, prefix, text, tokens, 1, prefix.hex()[:12], before=(0,)))


@pytest.mark.requirement("A1.9", "D21")
@pytest.mark.parametrize("target", [900, 1_000, 1_001, 1_100])
def test_as_much_goes_as_the_target_takes_and_not_a_unit_more(target: int) -> None:
    transcript = talk(system("s"), *turns(12))
    draft = drop_oldest(untouched(transcript), bounds(transcript, target, {}))
    assert target - 200 < draft.tokens <= target
    assert order(draft)[:3] == [0, 1, None]


@pytest.mark.requirement("A1.9")
def test_at_the_target_nothing_is_dropped_and_one_token_above_it_something_is() -> None:
    transcript = talk(*turns(12))
    draft = untouched(transcript)
    assert drop_oldest(draft, bounds(transcript, transcript.tokens, {})) is draft
    assert drop_oldest(draft, bounds(transcript, transcript.tokens - 1, {})).changed


@pytest.mark.requirement("D21", "A2.13", "D6")
@pytest.mark.parametrize(("count", "first_kept"), [(4, 2), (5, 3), (10, 5), (11, 6), (2, 1)])
def test_half_of_the_turns_rounded_up_are_dropped_whole(count: int, first_kept: int) -> None:
    transcript = talk(*turns(count))
    draft = drop_oldest(untouched(transcript), bounds(transcript, transcript.tokens - 1, HALF))
    assert order(draft) == [0, None, *range(4 * first_kept, 4 * count)]
    assert broken_rules(draft) == ()


@pytest.mark.requirement("A2.25", "D6")
def test_of_one_turn_with_sixty_steps_half_of_the_steps_are_dropped() -> None:
    transcript = talk(user("task"), *[step(f"{words(100)}{n}") for n in range(60)])
    draft = drop_oldest(untouched(transcript), bounds(transcript, transcript.tokens - 1, HALF))
    assert order(draft) == [0, None, *range(61, 121)]
    assert broken_rules(draft) == ()


@pytest.mark.requirement("A1.9", "D21")
def test_more_than_the_fraction_goes_where_the_target_asks_for_it() -> None:
    transcript = talk(*turns(10))
    draft = drop_oldest(untouched(transcript), bounds(transcript, 600, HALF))
    assert draft.tokens <= 600
    assert len(draft.pieces) < 2 + 20


@pytest.mark.requirement("A1.9")
@pytest.mark.parametrize(("recent", "first"), [(10, 30), (11, 28), (12, 28), (13, 27), (39, 1), (40, 1)])
def test_the_newest_messages_stay_if_the_policy_says_so(recent: int, first: int) -> None:
    """Units begin at 27 (an answer), at 28 (a step of two messages) and at 30; a unit stays whole."""
    transcript = talk(user("task"), *[s for n in range(13) for s in (*step(f"{words(60)}{n}"), assistant(f"{n}"))])
    draft = drop_oldest(untouched(transcript), bounds(transcript, 1, {"recent": recent}))
    assert [i for i in order(draft) if i is not None] == [0, *range(first, 40)]


@pytest.mark.requirement("A2.13", "A2.28")
def test_the_note_is_kept_in_the_summary_and_written_anew_at_the_next_drop() -> None:
    transcript = talk(*turns(12))
    limits = bounds(transcript, 2_000, {})
    first = drop_oldest(with_summary(transcript, 8), limits)
    assert first.cut is not None
    assert first.cut.text == f"{SUMMARY}\n{NOTE.format(count=first.cut.covers - 1, ref=first.cut.ref)}"
    assert first.cut.tokens == 4 + CHARS4.count(first.cut.text)
    assert first.tokens <= 2_000
    assert first.applied == {"drop_oldest": 1}
    second = drop_oldest(first, replace(limits, aim=1_500))
    assert second.cut is not None
    assert second.cut.text == f"{SUMMARY}\n{NOTE.format(count=second.cut.covers - 1, ref=second.cut.ref)}"
    assert second.tokens <= 1_500
    assert order(second)[:2] == [0, None]
    assert [transcript.messages[i].role for i in order(second) if i is not None].count("user") == (
        len(range(second.cut.covers, 48)) // 4 + 1
    )


@pytest.mark.requirement("A2.28")
def test_where_only_a_summary_is_left_to_drop_a_layer_leaves_it() -> None:
    transcript = talk(*turns(2), user("now"))
    summary = with_summary(transcript, 8, SUMMARY.replace("facts", "facts " + words(50)))
    layer = bounds(transcript, 100, {})
    assert drop_oldest(summary, layer) is summary
    rung = drop_oldest(summary, replace(layer, layer=Layer(strategy="")))
    assert rung.tokens < summary.tokens
    assert "facts" not in (rung.pieces[1].text or "")


@pytest.mark.requirement("A4.38")
def test_the_next_notes_of_a_model_tell_of_what_a_layer_dropped_and_a_rung_extends_the_last_ones() -> None:
    transcript = talk(*turns(6))
    summary = with_summary(transcript, 8)
    assert summary.cut is not None
    noted = untouched(transcript).with_cut(replace(summary.cut, narrative="what happened"))
    layer = bounds(transcript, 900, {})
    for limits, narrative in ((layer, ""), (replace(layer, layer=Layer(strategy="")), "what happened")):
        dropped = drop_oldest(noted, limits).cut
        assert dropped is not None
        assert dropped is not noted.cut
        assert dropped.narrative == narrative


@pytest.mark.requirement("A4.8", "D16", "A0.151")
def test_for_a_bucket_only_what_is_in_it_counts_and_what_is_none_of_it_stays() -> None:
    memory = user("<memory>likes tea</memory>")
    said = [s for n in range(8) for s in (user(f"{words(100)}{n}"), *step(f"{words(900)}{n}"), assistant(f"a{n}"))]
    transcript = replace(talk(user("task"), memory, *said), memory=frozenset({1}))
    history = untouched(transcript).buckets()["history"]
    limits = bounds(transcript, transcript.tokens - 400, {}, scope="history")
    draft = drop_oldest(untouched(transcript), limits)
    assert history - draft.buckets()["history"] >= 400
    assert draft.buckets()["memory"] == transcript.messages[1].tokens
    assert order(draft)[:3] == [0, 1, None]
    total = drop_oldest(untouched(transcript), replace(limits, layer=Layer(strategy="drop_oldest")))
    assert len(total.pieces) > len(draft.pieces)


@pytest.mark.requirement("A4.8", "A4.37")
def test_a_full_history_that_is_to_be_truncated_ends_at_its_watermark_and_stays_there() -> None:
    rules = replace(
        ContextSettings(),
        enforce="bucket",
        layers=(),
        memory=Memory(tags=("<memory>",)),
        buckets={"history": Bucket(cap=2_000, on_overflow="truncate", watermark=0.80)},
    )
    budget = replace(window(10_000), caps={"history": 2_000})
    transcript = talk(*turns(10))
    assert untouched(transcript).buckets()["history"] < 2_000
    assert decide(transcript, budget=budget, settings=rules).applied == {}
    transcript = talk(*turns(16))
    decision = decide(transcript, budget=budget, settings=rules)
    assert decision.applied == {"drop_oldest": 1}
    assert decision.buckets["history"] <= 1_600
    again = decide(transcript, budget=budget, settings=rules, known=remember(ConversationState(), decision, transcript))
    assert (again.edits, again.cut, again.pieces) == ((), None, decision.pieces)


@settings(max_examples=tried(25, 100), deadline=None)
@given(
    count=st.integers(1, 12),
    target=st.integers(0, 4_000),
    covers=st.integers(0, 30),
    params=st.fixed_dictionaries({}, optional={"fraction": st.floats(0, 1), "recent": st.integers(0, 50)}),
)
@pytest.mark.requirement("A1.9", "A2.9", "P3")
def test_whatever_is_asked_no_result_loses_its_call_and_a_second_run_changes_nothing(
    count: int, target: int, covers: int, params: dict[str, Param]
) -> None:
    transcript = talk(*turns(count))
    edges = [1, *(4 * n for n in range(1, count))]
    before = with_summary(transcript, max(e for e in edges if e <= max(1, covers))) if covers else untouched(transcript)
    limits = bounds(transcript, target, params)
    draft = drop_oldest(before, limits)
    assert broken_rules(draft) == ()
    assert draft.tokens <= before.tokens
    assert limits.protection.all <= set(order(draft))
    assert drop_oldest(draft, limits) is draft
    if draft.cut is not None and draft is not before:
        known = ConversationState(cuts=(draft.cut,))
        assert replay(limits.transcript, known, limits.protection).pieces == draft.pieces
