"""Very large results are read apart, in parts where they are larger than what reads them, and only if nobody needs them."""

from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.draft import Bounds, ConversationState, Draft, bounds_for, broken_rules, untouched
from policies.ledger import EditKind
from policies.messages import Transcript
from policies.settings import ContextSettings, Layer, Param
from policies.tokens import CHARS4
from tests.policies.answering import Model, says
from tests.policies.play import flow, step, talk, user, window, words
from tests.profile import tried

delegate = flow("delegate")

REPORT = "The listing names 3 users, and the newest of them is ada@example.org, who joined before the others left."
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


@pytest.mark.requirement("A0.68")
@pytest.mark.parametrize(("tokens", "goes"), [(9_999, False), (10_000, True)])
def test_only_what_takes_a_tenth_of_the_window_is_delegated(tokens: int, goes: bool) -> None:
    transcript = listed(tokens - 4)
    assert transcript.messages[2].tokens == tokens
    assert bool(delegated(transcript, says(REPORT)).edits) is goes
    smaller = delegated(transcript, says(REPORT), bounds(transcript, params={"least": 9_000}))
    assert smaller.edits


@settings(max_examples=tried(20, 30), deadline=None)
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
