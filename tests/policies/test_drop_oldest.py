"""The oldest units go with a note, as a layer of its own: how many, and what becomes of a summary."""

from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.draft import Bounds, ConversationState, Draft, bounds_for, broken_rules, replay, untouched
from policies.ledger import Cut
from policies.messages import Transcript
from policies.settings import ContextSettings, Layer, Param
from policies.tokens import CHARS4
from tests.policies.play import Said, assistant, step, strategy, talk, user, window, words
from tests.profile import tried

drop_oldest = strategy("drop_oldest")

SUMMARY = (
    "<weir-123456>\nWritten by Weir from 6 earlier messages (v1, archived as 0123456789ab).\nfacts\n</weir-123456>"
)


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
