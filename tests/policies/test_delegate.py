"""Very large results are read apart, in parts where they are larger than what reads them, and only if nobody needs them."""

from collections.abc import Mapping
from dataclasses import replace

import pytest

from policies.draft import Bounds, ConversationState, Draft, bounds_for, untouched
from policies.messages import Transcript
from policies.settings import ContextSettings, Layer, Param
from policies.tokens import CHARS4
from tests.policies.answering import Model, says
from tests.policies.play import flow, step, talk, user, window, words

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
