"""The largest results lose their middle first, and only as much as it takes."""

from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.draft import Bounds, ConversationState, Draft, bounds_for, untouched
from policies.messages import Transcript
from policies.settings import ContextSettings, Layer, Param
from policies.tokens import CHARS4
from tests.policies.play import Said, step, strategy, talk, user, window, words
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


def sizes(draft: Draft) -> dict[int, int]:
    return {p.index: p.tokens for p in draft.pieces if p.index is not None and p.kind is not None}


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
