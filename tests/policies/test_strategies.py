"""Each strategy alone: what it changes, what it leaves, and that what it counts is what there is."""

from dataclasses import replace

import pytest

from policies.draft import Bounds, ConversationState, Draft, bounds_for, untouched
from policies.ledger import EditKind
from policies.limits import ingest_cap_for
from policies.messages import ToolCall, Transcript
from policies.settings import ContextSettings
from policies.strategies.clip import clip
from policies.tokens import CHARS4, middle_of
from tests.policies.play import assistant, result, step, strategy, system, talk, user, window, words

dedupe = strategy("dedupe")
drop_oldest = strategy("drop_oldest")
evict = strategy("evict")
ingest_cap = strategy("ingest_cap")

CITY = '{"order": "W7788", "city": "Denver", "status": "delivered"}'


def bounds(transcript: Transcript, tokens: int = 4_000, *, known: ConversationState | None = None) -> Bounds:
    return bounds_for(
        transcript,
        settings=ContextSettings(),
        budget=window(tokens),
        known=known or ConversationState(),
        counter=CHARS4,
    )


def changed(draft: Draft) -> dict[int, EditKind]:
    return {p.index: p.kind for p in draft.pieces if p.index is not None and p.kind is not None}


def recounted(draft: Draft) -> bool:
    """Whether every replaced message has the tokens that counting it again gives."""
    return all(p.text is None or p.tokens == 4 + CHARS4.count(p.text) for p in draft.pieces)


# -- ingest cap ------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("D11")
def test_a_result_above_the_cap_keeps_its_head_and_its_tail() -> None:
    text = "HEAD " + words(3_000) + " TAIL"
    transcript = talk(user("task"), *step(text), *step(words(750)))
    draft = ingest_cap(untouched(transcript), bounds(transcript))
    assert ingest_cap_for(ContextSettings(), window(4_000)) == 800
    assert changed(draft) == {2: EditKind.INGEST_CAP}
    shortened = draft.pieces[2].text or ""
    assert shortened.startswith("HEAD ")
    assert shortened.endswith(" TAIL")
    assert f'"ref": "{transcript.messages[2].ref}.txt"' in shortened
    assert 780 <= draft.pieces[2].tokens <= 800
    assert recounted(draft)


# -- dedupe ----------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("A0.51")
def test_an_exact_duplicate_leaves_a_line_that_points_to_the_newer_one() -> None:
    transcript = talk(
        user("t"), *step(words(90), arguments='{"a": 1}'), *step(words(90), arguments='{"a": 2}'), user("v")
    )
    draft = dedupe(untouched(transcript), bounds(transcript))
    assert changed(draft) == {2: EditKind.DEDUPE}
    assert "the same result comes again later" in (draft.pieces[2].text or "")
    assert recounted(draft)


# -- evict -----------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("D13", "A0.39")
def test_an_evicted_result_says_what_was_asked_what_was_found_and_where_it_is() -> None:
    steps = [s for n in range(9) for s in step(f"{words(400)} {n}", arguments=f'{{"page": {n}}}')]
    transcript = talk(user("task"), *step(CITY + " " * 2_000, tool="get_order", arguments='{"id": "W7788"}'), *steps)
    draft = evict(untouched(transcript), bounds(transcript))
    text = draft.pieces[2].text or ""
    assert text.startswith("[weir: result of get_order(W7788)")
    assert "Denver" in text
    assert f"rchived as {transcript.messages[2].ref}" in text
    assert CHARS4.count(text) <= 50
    assert draft.pieces[2].index == 2
    assert recounted(draft)


@pytest.mark.requirement("A0.38")
def test_protected_results_are_never_evicted() -> None:
    pinned = (assistant("", ToolCall("call_0", "look", "{}")), result(words(900), keep=True))
    transcript = talk(user("task"), *pinned, *step(words(2_000)))
    assert changed(evict(untouched(transcript), bounds(transcript, 2_000))) == {}


# -- drop oldest -----------------------------------------------------------------------------------------------------


@pytest.mark.requirement("A2.13", "A2.28", "A0.52")
def test_the_oldest_units_are_dropped_with_a_note_that_is_no_message_of_the_history() -> None:
    transcript = talk(system("s"), user("task"), *[step(f"{words(200)}{n}") for n in range(10)], user("now"))
    draft = drop_oldest(untouched(transcript), replace(bounds(transcript), aim=1_200))
    assert 900 < draft.tokens <= 1_200
    order = [p.index for p in draft.pieces]
    assert order[:3] == [0, 1, None]
    assert order[3:] == list(range(order[3] or 0, 23))
    assert transcript.messages[order[3] or 0].role == "assistant"
    removed = (order[3] or 0) - 2
    assert draft.cut is not None
    assert draft.cut.text.startswith(f"[weir: {removed} earlier messages were removed")
    assert f"archived as {draft.cut.ref}" in draft.cut.text
    assert len(transcript.messages) == 23


# -- clip ------------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("P12")
def test_the_newest_message_is_clipped_in_the_middle_even_where_it_is_the_task() -> None:
    transcript = talk(system("s"), user("BEGIN " + words(5_000) + " Now translate it."))
    draft = clip(untouched(transcript), bounds(transcript), target=2_000)
    assert 1_950 < draft.tokens <= 2_000
    text = draft.pieces[1].text or ""
    assert text.startswith("BEGIN ")
    assert text.endswith(" Now translate it.")
    assert middle_of(transcript.read(1).text, text) is not None
    assert changed(draft) == {1: EditKind.CLIP}
    assert recounted(draft)
