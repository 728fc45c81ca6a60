"""Results of one tool that say nearly the same: one stays, and says what changed."""

from dataclasses import replace

import pytest

from policies.draft import Bounds, ConversationState, Draft, bounds_for, untouched
from policies.ledger import EditKind
from policies.messages import Transcript
from policies.settings import ContextSettings, Layer
from policies.tokens import CHARS4
from tests.policies.play import Said, assistant, flow, play, step, talk, user, window, words

semantic_merge = flow("semantic_merge")

REPORT = "build 4711 of branch main\nrunner: linux-arm\nstate: running\n" + words(60)


def poll(state: str = "running") -> tuple[Said, Said]:
    return step(REPORT.replace("running", state), tool="status")


def polled(*polls: tuple[Said, Said]) -> Transcript:
    """A task, the polls, and two steps of something else."""
    return talk(user("wait for the build"), *polls, *step("unrelated"), *step("also unrelated"))


def bounds(transcript: Transcript, *, placeholder: str = "finding", **params: float) -> Bounds:
    settings = replace(ContextSettings(), placeholder=placeholder)  # type: ignore[arg-type]
    found = bounds_for(transcript, settings=settings, budget=window(4_000), known=ConversationState(), counter=CHARS4)
    return replace(found, layer=Layer(strategy="semantic_merge", params=params))


def texts(draft: Draft) -> dict[int, str]:
    return {p.index: p.text for p in draft.pieces if p.index is not None and p.text is not None}


@pytest.mark.requirement("A0.35")
def test_of_five_identical_status_polls_one_says_it_all_and_no_model_is_asked() -> None:
    transcript = polled(*[poll()] * 5)
    draft = play(semantic_merge(untouched(transcript), bounds(transcript)))
    said = texts(draft)
    assert sorted(said) == [2, 4, 6, 8, 10]
    assert said[10] == f"{REPORT}\n[weir: stands for 4 earlier results with the same text]"
    assert {said[i] for i in (2, 4, 6, 8)} == {
        f"[weir: merged into a later result; archived as {transcript.messages[2].ref}]"
    }
    assert {p.kind for p in draft.pieces} == {None, EditKind.MERGE}
    assert draft.applied == {"semantic_merge": 5}
    assert draft.tokens < untouched(transcript).tokens


def test_the_newest_step_and_what_is_pinned_are_never_merged() -> None:
    transcript = talk(user("wait"), *[poll()] * 3)
    draft = play(semantic_merge(untouched(transcript), bounds(transcript)))
    assert sorted(texts(draft)) == [2, 4]
    pinned = talk(user("wait"), *poll(), assistant("DO_NOT_EVICT", keep=True), *[poll()] * 2, *step("x"))
    once = play(semantic_merge(untouched(pinned), bounds(pinned)))
    assert 3 not in texts(once)
    assert play(semantic_merge(once, bounds(pinned))) is once
