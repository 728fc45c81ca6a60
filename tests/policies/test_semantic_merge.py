"""Results of one tool that say nearly the same: one stays, and says what changed."""

from dataclasses import replace

import pytest

from policies.draft import Bounds, ConversationState, Draft, bounds_for, untouched
from policies.effects import Alike, Compare, Failed, Reply, Summarize, Summary
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


@pytest.mark.requirement("A0.35")
def test_near_duplicates_are_asked_about_and_the_merged_text_says_what_changed() -> None:
    transcript = polled(poll("queued"), poll("running"), poll("passed"))
    asked = Compare(
        texts=tuple(REPORT.replace("running", s) for s in ("queued", "running", "passed")),
        pairs=((0, 1), (0, 2), (1, 2)),
    )
    draft = play(semantic_merge(untouched(transcript), bounds(transcript)), (asked, Alike((0.9, 0.2, 0.86))))
    assert sorted(texts(draft)) == [2, 4, 6]
    assert "state queued → running → passed" in texts(draft)[6]


@pytest.mark.parametrize(("score", "merged"), [(0.85, False), (0.8501, True)])
def test_alike_begins_above_the_threshold(score: float, merged: bool) -> None:
    transcript = polled(poll("queued"), poll("passed"))
    draft = play(semantic_merge(untouched(transcript), bounds(transcript)), (Compare, Alike((score,))))
    assert bool(draft.edits) == merged
    lower = bounds(transcript, threshold=0.5)
    assert play(semantic_merge(untouched(transcript), lower), (Compare, Alike((0.6,)))).edits


def test_a_model_that_the_policy_names_is_asked_for_by_name() -> None:
    transcript = polled(poll("queued"), poll("passed"))
    named = bounds(transcript)
    named = replace(named, settings=replace(named.settings, embeddings="embed-1"))
    flow = semantic_merge(untouched(transcript), named)
    asked = next(flow)
    assert isinstance(asked, Compare)
    assert asked.model == "embed-1"


@pytest.mark.parametrize("reply", [Failed("timeout"), Alike(()), Alike((1.0, 1.0))])
def test_without_an_answer_nothing_happens(reply: Failed | Alike) -> None:
    transcript = polled(poll("queued"), poll("passed"))
    before = untouched(transcript)
    assert play(semantic_merge(before, bounds(transcript)), (Compare, reply)).edits == {}


def test_nothing_is_asked_where_there_is_nothing_to_compare() -> None:
    transcript = polled(poll())
    before = untouched(transcript)
    assert play(semantic_merge(before, bounds(transcript))) is before


def test_the_newest_step_and_what_is_pinned_are_never_merged() -> None:
    transcript = talk(user("wait"), *[poll()] * 3)
    draft = play(semantic_merge(untouched(transcript), bounds(transcript)))
    assert sorted(texts(draft)) == [2, 4]
    pinned = talk(user("wait"), *poll(), assistant("DO_NOT_EVICT", keep=True), *[poll()] * 2, *step("x"))
    once = play(semantic_merge(untouched(pinned), bounds(pinned)))
    assert 3 not in texts(once)
    assert play(semantic_merge(once, bounds(pinned))) is once


def test_what_would_not_get_smaller_stays() -> None:
    transcript = polled(*[step("ok", tool="status")] * 3)
    assert play(semantic_merge(untouched(transcript), bounds(transcript))).edits == {}


@pytest.mark.requirement("D13")
@pytest.mark.parametrize(("placeholder", "left"), [("marker", "[Old tool result content cleared]"), ("none", "-")])
def test_what_stands_for_a_merged_result_follows_the_policy(placeholder: str, left: str) -> None:
    transcript = polled(*[poll()] * 2)
    draft = play(semantic_merge(untouched(transcript), bounds(transcript, placeholder=placeholder)))
    assert texts(draft)[2] == left


WRITTEN = "Build 4711 of branch main on linux-arm was queued first and then passed."


def asking(transcript: Transcript, aim: int = 0) -> Bounds:
    """The same where a model writes, and the layer is to end at so many tokens."""
    limits = bounds(transcript)
    return replace(limits, settings=replace(limits.settings, summarizer="small"), aim=aim)


@pytest.mark.requirement("A0.35", "A0.72")
def test_a_model_writes_what_a_group_says_where_merging_alone_does_not_suffice() -> None:
    transcript = polled(poll("queued"), poll("passed"))
    flow = semantic_merge(untouched(transcript), asking(transcript))
    draft = play(flow, (Compare, Alike((0.9,))), (Summarize, Summary(WRITTEN)))
    ref = transcript.messages[4].ref
    assert texts(draft)[4] == f"{WRITTEN}\n[weir: summary of this and 1 earlier result, archived as {ref}]"
    assert texts(draft)[2] == f"[weir: merged into a later result; archived as {transcript.messages[2].ref}]"
    (record,) = draft.condensed
    assert record.original_tokens == sum(transcript.messages[i].tokens for i in (2, 4))
    assert (record.strategy, record.compressed_tokens) == ("semantic_merge", draft.pieces[4].tokens)
    assert (record.calls, record.failure, record.ref) == (1, "", ref)
    assert play(semantic_merge(draft, asking(transcript))) is draft


@pytest.mark.requirement("D7", "A0.76")
def test_no_model_is_asked_where_merging_alone_suffices_or_the_results_are_equal() -> None:
    transcript = polled(poll("queued"), poll("passed"))
    compared = (Compare, Alike((0.9,)))
    merged = play(semantic_merge(untouched(transcript), bounds(transcript)), compared)
    enough = play(semantic_merge(untouched(transcript), asking(transcript, merged.tokens)), compared)
    assert enough.pieces == merged.pieces
    same = polled(*[poll()] * 3)
    assert play(semantic_merge(untouched(same), asking(same))).edits
    hurried = replace(asking(transcript), free_only=True)
    assert play(semantic_merge(untouched(transcript), hurried), compared).pieces == merged.pieces


@pytest.mark.requirement("A0.35", "A0.78")
@pytest.mark.parametrize("reply", [Failed("timeout"), Summary(""), Summary(f"{WRITTEN} {words(200)}")])
def test_where_the_model_gives_nothing_shorter_the_latest_result_stands_for_all(reply: Reply) -> None:
    transcript = polled(poll("queued"), poll("passed"))
    compared = (Compare, Alike((0.9,)))
    merged = play(semantic_merge(untouched(transcript), bounds(transcript)), compared)
    flow = semantic_merge(untouched(transcript), asking(transcript))
    asked = [(Summarize, reply)] * (1 if isinstance(reply, Failed) else 2)
    draft = play(flow, compared, *asked)
    assert draft.pieces == merged.pieces
    assert [c.failure != "" for c in draft.condensed] == [True]
