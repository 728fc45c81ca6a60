"""Each strategy alone: what it changes, what it leaves, and that what it counts is what there is."""

from dataclasses import replace
from itertools import chain

import pytest

from policies.draft import Bounds, ConversationState, Draft, bounds_for, untouched
from policies.ledger import EditKind
from policies.limits import ingest_cap_for
from policies.messages import ToolCall, Transcript
from policies.settings import ContextSettings
from policies.strategies.clear import evict_marked
from policies.strategies.drop import cap_results, clip
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


def test_a_large_window_caps_at_25000_tokens() -> None:
    assert ingest_cap_for(ContextSettings(), window(1_000_000)) == 25_000
    assert ingest_cap_for(ContextSettings(), window(100_000)) == 20_000


def test_a_result_that_was_sent_in_full_is_left_alone_between_batches() -> None:
    transcript = talk(user("task"), *step(words(900)), *step(words(4_200)))
    draft = cap_results(untouched(transcript), bounds(transcript, known=ConversationState(length=3)), new_only=True)
    assert changed(draft) == {4: EditKind.INGEST_CAP}


@pytest.mark.requirement("A0.38")
def test_a_step_with_a_pinned_message_is_not_capped() -> None:
    calls = ToolCall("a", "f", "{}"), ToolCall("b", "f", "{}")
    transcript = talk(user("t"), assistant("", *calls), result(words(900), "a"), result("1", "b", keep=True), user("v"))
    assert changed(ingest_cap(untouched(transcript), bounds(transcript))) == {}


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


@pytest.mark.requirement("A0.54")
def test_a_result_is_superseded_by_a_later_one_of_the_same_call_however_it_is_written() -> None:
    transcript = talk(
        user("t"),
        *step(words(90, "old"), arguments='{"a": 1, "b": 2}'),
        *step(words(90, "new"), arguments='{"b":2,"a":1}'),
        *step(words(90, "other"), arguments='{"a": 3}'),
        user("v"),
    )
    draft = dedupe(untouched(transcript), bounds(transcript))
    assert changed(draft) == {2: EditKind.DEDUPE}
    assert "a later call of the same tool replaced it" in (draft.pieces[2].text or "")


@pytest.mark.requirement("A0.54")
def test_a_call_without_arguments_is_repeated_where_its_result_says_much_of_the_older_one_again() -> None:
    pages = [step(f"{name} {words(90, name[::-1])}", arguments="{}") for name in ("one", "two", "three")]
    transcript = talk(user("t"), *chain.from_iterable(pages), user("v"))
    assert changed(dedupe(untouched(transcript), bounds(transcript))) == {}
    polls = [step(f"{words(90, 'job')} {state}", arguments="{}") for state in ("waits", "runs", "is done")]
    transcript = talk(user("t"), *pages[0], *chain.from_iterable(polls), *pages[1], user("v"))
    draft = dedupe(untouched(transcript), bounds(transcript))
    assert changed(draft) == {4: EditKind.DEDUPE, 6: EditKind.DEDUPE}


def test_small_protected_and_pinned_duplicates_stay() -> None:
    assert changed(_deduped(words(30), None)) == {}
    assert changed(_deduped(words(90), True)) == {}
    transcript = talk(
        user("t"), assistant("", ToolCall("a", "f", "1"), ToolCall("b", "f", "1")), result(words(90), "a")
    )
    assert changed(dedupe(untouched(transcript), bounds(transcript))) == {}


def _deduped(text: str, keep: bool | None) -> Draft:
    call = assistant("", ToolCall("call_0", "look", "{}"))
    transcript = talk(user("t"), call, result(text, keep=keep), *step(text), user("v"))
    return dedupe(untouched(transcript), bounds(transcript))


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


@pytest.mark.requirement("A0.39")
@pytest.mark.parametrize("tool", ["look", "a_tool_with_a_very_long_name_" * 3, "", "weird [name]\n"])
@pytest.mark.parametrize("text", ["", "x" * 9_000, CITY * 40, "line of text\n" * 500, "界" * 4_000, "[]" * 3_000])
def test_a_placeholder_never_takes_more_than_fifty_tokens(tool: str, text: str) -> None:
    others = [s for n in range(4) for s in step(f"{words(2_000)} {n}")]
    transcript = talk(user("t"), *step(text, tool=tool, arguments='{"path": "' + "a/b" * 200 + '"}'), *others)
    draft = evict(untouched(transcript), bounds(transcript))
    for piece in draft.pieces:
        if piece.text is not None:
            assert 0 < CHARS4.count(piece.text) <= 50
            assert transcript.messages[piece.index or 0].ref in piece.text


@pytest.mark.requirement("A0.96", "D21")
def test_eviction_stops_at_low_water_and_keeps_the_newest_half_of_it() -> None:
    transcript = talk(user("task"), *[step(f"{words(700)}{n}") for n in range(12)])
    limits = bounds(transcript, 8_000)
    draft = evict(untouched(transcript), limits)
    assert limits.low_water - 700 < draft.tokens <= limits.low_water
    assert list(changed(draft)) == list(range(2, 2 * len(changed(draft)) + 1, 2))
    kept = [i for i in range(2, len(transcript.messages), 2) if i not in changed(draft)]
    assert sum(transcript.messages[i].tokens for i in kept) >= (limits.low_water - limits.fixed) / 2


@pytest.mark.requirement("A0.55")
def test_the_largest_of_two_results_of_the_same_age_goes_first() -> None:
    pair = assistant("", ToolCall("a", "f", "1"), ToolCall("b", "f", "2"))
    transcript = talk(user("t"), pair, result(words(200), "a"), result(words(900), "b"), *step(words(400)), user("v"))
    limits = bounds(transcript, 1_500)
    assert list(changed(evict(untouched(transcript), limits))) == [3]


@pytest.mark.requirement("A0.38")
def test_protected_results_are_never_evicted() -> None:
    pinned = (assistant("", ToolCall("call_0", "look", "{}")), result(words(900), keep=True))
    transcript = talk(user("task"), *pinned, *step(words(2_000)))
    assert changed(evict(untouched(transcript), bounds(transcript, 2_000))) == {}


@pytest.mark.requirement("D25", "A0.54")
def test_the_newest_results_stay_although_they_are_the_largest() -> None:
    old = [step(f"{words(150)}{n}") for n in range(20)]
    transcript = talk(user("task"), *old, *step(words(1_200)), assistant("read"), user("now"))
    limits = bounds(transcript, 4_600)
    assert (limits.low_water - limits.fixed) / 2 > 1_210
    evicted = changed(evict(untouched(transcript), limits))
    assert evicted
    assert max(evicted) <= 40


@pytest.mark.requirement("A0.51")
def test_a_result_hardly_larger_than_its_placeholder_stays() -> None:
    transcript = talk(user("task"), *[step(words(30)) for _ in range(40)], *step(words(3_000)))
    assert changed(evict(untouched(transcript), bounds(transcript, 2_000))) == {}


def test_below_low_water_nothing_is_evicted() -> None:
    transcript = talk(user("task"), *step(words(50)), *step(words(50)))
    draft = untouched(transcript)
    assert evict(draft, bounds(transcript)) is draft


def test_what_is_marked_dispensable_goes_oldest_first_and_keeps_its_place() -> None:
    transcript = talk(
        system("s"),
        user("task"),
        user(words(800, "pasted"), keep=False),
        assistant(words(800, "chatter"), keep=False),
        assistant("", ToolCall("call_0", "look", "{}")),
        result(words(800, "log"), keep=False),
        user("go on"),
        *step(words(1_500)),
    )
    draft = evict_marked(untouched(transcript), bounds(transcript, 3_600))
    assert list(changed(draft)) == [2, 3]
    assert [p.index for p in draft.pieces] == list(range(9))
    assert draft.pieces[2].text == (
        f"[weir: user message of 804 tokens removed; archived as {transcript.messages[2].ref}]"
    )
    assert list(changed(evict_marked(untouched(transcript), bounds(transcript, 2_000)))) == [2, 3, 5]


def test_a_dispensable_newest_message_stays() -> None:
    transcript = talk(user("task"), assistant("hm"), user(words(3_000), keep=False))
    assert changed(evict_marked(untouched(transcript), bounds(transcript, 2_000))) == {}


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


@pytest.mark.parametrize("target", range(600, 640))
def test_the_note_is_paid_for_out_of_what_is_dropped(target: int) -> None:
    transcript = talk(user("task"), *[assistant(f"{n}") for n in range(250)], user("now"))
    draft = drop_oldest(untouched(transcript), replace(bounds(transcript), aim=target))
    assert target - 5 <= draft.tokens <= target


@pytest.mark.requirement("A2.25", "D6")
def test_one_user_message_and_sixty_steps_can_be_dropped_step_by_step() -> None:
    transcript = talk(user("task"), *[step(f"{words(100)}{n}") for n in range(60)])
    draft = drop_oldest(untouched(transcript), replace(bounds(transcript), aim=2_000))
    assert 1_800 < draft.tokens <= 2_000
    assert draft.pieces[0].index == 0


def test_nothing_is_dropped_where_the_note_would_cost_more() -> None:
    transcript = talk(user("task"), assistant("ok"), user(words(300)))
    draft = untouched(transcript)
    assert drop_oldest(draft, replace(bounds(transcript), aim=100)) is draft


@pytest.mark.requirement("A0.38")
def test_pinned_messages_stay_in_their_order_around_the_newest_user_message() -> None:
    pinned = (assistant("", ToolCall("call_0", "look", "{}")), result("pinned", keep=True))
    filler = [step(f"{words(200)}{n}") for n in range(4)]
    transcript = talk(user("task"), *filler[:2], user("now"), *pinned, *filler[2:])
    draft = drop_oldest(untouched(transcript), replace(bounds(transcript), aim=320))
    order = [p.index for p in draft.pieces]
    assert order == [0, None, 5, 6, 7, 10, 11]


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


def test_the_weightiest_of_the_newest_is_clipped_and_the_others_are_not() -> None:
    parallel = assistant("", ToolCall("a", "f", "1"), ToolCall("b", "f", "2"))
    transcript = talk(user(words(500)), parallel, result(words(200), "a"), result(words(3_000), "b"))
    assert changed(clip(untouched(transcript), bounds(transcript), target=2_000)) == {3: EditKind.CLIP}
    huge = talk(user(words(5_000)), *step(words(200)))
    assert changed(clip(untouched(huge), bounds(huge), target=2_000)) == {0: EditKind.CLIP}
    large = talk(user(words(3_500)), *step(words(200)), assistant("done"), user(words(700)))
    assert changed(clip(untouched(large), bounds(large), target=2_000)) == {}


def test_a_message_that_stays_for_good_is_clipped_with_room_for_what_follows() -> None:
    transcript = talk(user(words(5_000)), assistant("so"), user("next"))
    draft = clip(untouched(transcript), bounds(transcript), target=transcript.tokens - 1)
    assert 64 < draft.pieces[0].tokens <= 0.75 * 5_004
    assert changed(draft) == {0: EditKind.CLIP}


def test_system_messages_pictures_and_pinned_history_are_not_clipped() -> None:
    pinned = (assistant("", ToolCall("call_0", "look", "{}")), result(words(900), keep=True))
    transcript = talk(system(words(900)), user("t"), *pinned, assistant("read"), user(words(900), media=1))
    draft = untouched(transcript)
    assert clip(draft, bounds(transcript), target=500) == draft


def test_what_fits_is_not_clipped() -> None:
    draft = untouched(talk(user(words(100))))
    assert clip(draft, bounds(draft.transcript), target=draft.tokens) is draft
