"""An operator's function as a layer: what it is given, what becomes of its answer, what is refused."""

from dataclasses import replace

import pytest

from policies.draft import Bounds, ConversationState, Draft, bounds_for, untouched
from policies.effects import Kept, Trim, Trimmed
from policies.messages import Transcript
from policies.settings import ContextSettings, Layer, Param
from policies.tokens import CHARS4
from tests.policies.play import (
    assistant,
    flow,
    play,
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
def test_what_does_not_come_back_is_dropped_and_what_is_protected_stays_anyhow() -> None:
    transcript = talk(*TALK)
    draft = trimmed(transcript, Kept(4), Kept(5), Kept(6))
    assert indices(draft) == [0, 1, 4, 5, 6, 7]
    assert draft.cut is not None
    assert (draft.cut.origin, draft.cut.text, draft.cut.covers) == ("custom", "", 3)
    assert draft.applied == {"custom": 1}
    assert indices(trimmed(transcript)) == [0, 1, 7]
