"""Old results beyond a protected amount are cleared together, or not at all."""

from dataclasses import replace

import pytest

from policies.draft import Bounds, ConversationState, Draft, bounds_for, replay, untouched
from policies.ledger import EditKind
from policies.messages import Transcript
from policies.settings import ContextSettings, Layer, Param
from policies.tokens import CHARS4
from tests.policies.play import (
    Said,
    assistant,
    decide,
    remember,
    step,
    strategy,
    system,
    talk,
    user,
    window,
    words,
)

prune = strategy("prune")

MARKER = "[Old tool result content cleared]"
CLEARED = 4 + len(MARKER) // 4
"""Tokens of a message whose content is the marker."""
CLEAR: dict[str, Param] = {"straddle": "clear"}


def bounds(transcript: Transcript, **params: Param) -> Bounds:
    settings = replace(ContextSettings(), placeholder="marker")
    limits = bounds_for(
        transcript, settings=settings, budget=window(200_000), known=ConversationState(), counter=CHARS4
    )
    return replace(limits, layer=Layer(strategy="prune", params=params), aim=0)


def freeing(tokens: int, word: str = "lorem") -> str:
    """A result's text that frees exactly so many tokens when the marker takes its place."""
    return words(tokens + CLEARED - 4, word)


def pruned(transcript: Transcript, **params: Param) -> Draft:
    return prune(untouched(transcript), bounds(transcript, **params))


def changed(draft: Draft) -> list[int]:
    return [p.index for p in draft.pieces if p.index is not None and p.kind is not None]


def filled(total: int, *said: Said | tuple[Said, ...]) -> Transcript:
    """A conversation with a system message that brings it to ``total`` tokens."""
    rest = talk(system(""), *said).tokens
    transcript = talk(system(words(total - rest)), *said)
    assert transcript.tokens == total
    return transcript


VISUAL = (
    user("Find out why the build is slow."),
    step(freeing(50_000, "log")),
    step(freeing(40_000, "trace")),
    step(words(24_000 - 4, "code")),
)


@pytest.mark.requirement("A3.8", "A3.19", "A3.21", "A3.7")
def test_of_150_000_tokens_the_results_of_50_and_40_are_cleared_and_that_of_24_stays() -> None:
    transcript = filled(150_000, *VISUAL)
    draft = pruned(transcript, **CLEAR)
    assert changed(draft) == [3, 5]
    assert draft.tokens == 60_000
    assert [draft.pieces[i].text for i in (3, 5)] == [MARKER, MARKER]
    assert {draft.pieces[i].kind for i in (3, 5)} == {EditKind.PRUNE}
    assert draft.pieces[7].text is None
    assert transcript.messages[7].tokens == 24_000
    assert [p.index for p in draft.pieces] == list(range(8))
    assert transcript.messages[3].answers == "call_0"


@pytest.mark.requirement("A3.6", "A3.19")
def test_the_latest_two_turns_are_skipped_and_not_added_up_where_there_are_more() -> None:
    old = (user("first"), step(words(30_000, "a")), step(words(30_000, "b")))
    middle = (user("second"), step(words(50_000, "c")))
    newest = (user("third"), step(words(50_000, "d")), assistant("done"))
    transcript = talk(*old, *middle, *newest)
    assert changed(pruned(transcript, **CLEAR)) == [2]
    assert changed(pruned(transcript, skip_turns=1, **CLEAR)) == [2, 4, 7]
    assert changed(pruned(transcript, skip_turns=0, **CLEAR)) == [2, 4, 7, 10]


@pytest.mark.requirement("A3.22", "P2")
def test_a_second_run_changes_nothing_and_a_later_request_replays_the_first() -> None:
    transcript = filled(150_000, *VISUAL)
    first = pruned(transcript, **CLEAR)
    assert prune(first, bounds(transcript, **CLEAR)) is first
    known = ConversationState(edits={e.key: e for e in first.edits.values()}, length=len(transcript.chain))
    later = filled(150_000 + talk(step("more")).tokens - talk().tokens, *VISUAL, step("more"))
    limits = bounds(later, **CLEAR)
    again = replay(later, known, limits.protection)
    assert again.pieces[:8] == first.pieces
    assert prune(again, limits) is again


@pytest.mark.requirement("A3.5", "D7")
def test_where_pruning_is_enough_no_model_is_asked_and_the_next_request_is_quiet() -> None:
    settings = replace(
        ContextSettings(),
        placeholder="marker",
        summarizer="same",
        layers=(
            Layer(strategy="prune", at=0.85, params=CLEAR),
            Layer(strategy="compact", at=0.85),
        ),
    )
    transcript = filled(150_000, *VISUAL)
    budget = window(200_000, reserve=32_000)
    decision = decide(transcript, budget=budget, settings=settings)
    assert [(r.layer, r.kept) for r in decision.trail] == [("prune", True)]
    assert decision.applied == {"prune": 2}
    assert decision.after == 60_000
    again = decide(
        transcript, budget=budget, settings=settings, known=remember(ConversationState(), decision, transcript)
    )
    assert (again.edits, again.pieces) == ((), decision.pieces)
