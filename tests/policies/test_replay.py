from collections.abc import Sequence
from dataclasses import replace

import pytest

from policies.draft import (
    ConversationState,
    Draft,
    applicable_cut,
    bounds_for,
    replay,
    tokens_kept_verbatim,
)
from policies.ledger import Cut, Edit, EditKind, Trend
from policies.limits import limits_for
from policies.messages import ToolCall, Transcript, protect
from policies.planner import is_needless
from policies.settings import ContextSettings, Ingest
from policies.tokens import CHARS4
from tests.policies.play import Said, assistant, decide, remember, result, step, system, talk, user, window, words

OLD = (system("s"), user("task"), *step(words(300)), assistant("read"), *step(words(200, "other")), assistant("ok"))
GROWN = (*OLD, user("and now?"))


def replayed(said: Sequence[Said], *, edits: Sequence[Edit] = (), cuts: tuple[Cut, ...] = ()) -> Draft:
    transcript = talk(*said)
    known = ConversationState(edits={e.key: e for e in edits}, cuts=cuts, length=len(transcript.chain))
    return replay(transcript, known, protect(transcript))


def edit_of(transcript: Transcript, index: int, kind: EditKind = EditKind.EVICT) -> Edit:
    bounds = bounds_for(transcript, ContextSettings(), window(100_000), ConversationState(), CHARS4)
    return bounds.edited(index, "gone", kind)


def cut_of(transcript: Transcript, covers: int, *, before: tuple[int, ...] = (0,), text: str = "summary") -> Cut:
    return Cut(
        covers=covers,
        prefix=transcript.chain[covers - 1],
        text=text,
        tokens=6,
        version=1,
        ref="r",
        before=before,
    )


def texts(draft: Draft) -> list[str]:
    read = draft.transcript.read
    return [p.text if p.text is not None else read(p.index or 0).text[:8] for p in draft.pieces]


def test_without_anything_known_the_array_is_the_clients() -> None:
    draft = replayed(GROWN)
    assert not draft.changed
    assert draft.tokens == talk(*GROWN).tokens


@pytest.mark.requirement("P2", "D25")
def test_an_edit_is_found_by_the_message_it_was_made_on_and_is_not_new() -> None:
    edit = edit_of(talk(*GROWN), 3)
    draft = replayed([*GROWN, assistant("fine"), user("more")], edits=[edit])
    assert draft.pieces[3].text == "gone"
    assert draft.pieces[3].tokens == 5
    assert draft.edits == {}
    assert draft.applied == {"evict": 1}


@pytest.mark.requirement("P1", "P2")
def test_what_was_brought_back_stays_behind_the_history_that_it_was_brought_back_behind() -> None:
    """Another run of the same script asks the same, and is answered the same."""
    before, after = [*GROWN, user("go on"), assistant("done")], [*GROWN[:-1], assistant("other"), user("go on")]
    transcript = talk(*before)
    recalled = replace(edit_of(transcript, len(GROWN)), kind=EditKind.RECALL)
    own, other = (replayed(array, edits=[recalled]) for array in (before, [*after, assistant("done")]))
    assert own.applied == {"recall": 1}
    assert not other.changed
    theirs = edit_of(talk(*after), len(GROWN), EditKind.RECALL)
    beside = [recalled, replace(theirs, digest=theirs.chain, occurrence=0)]
    assert [replayed(array, edits=beside).applied for array in (before, after)] == [{"recall": 1}] * 2
    old = [replace(recalled, chain=b"")]  # stored before it was noted
    for array in (before, [*after, assistant("done")]):
        assert replayed(array, edits=old).applied == {"recall": 1}


@pytest.mark.requirement("P1")
def test_an_edit_survives_a_client_that_rewrites_something_else() -> None:
    edit = edit_of(talk(*GROWN), 3)
    rewritten = [*GROWN[:1], user("another task"), *GROWN[2:]]
    assert replayed(rewritten, edits=[edit]).pieces[3].text == "gone"


def test_the_second_message_of_the_same_text_is_another_message() -> None:
    twice = (user("task"), *step(words(300)), assistant("read"), *step(words(300)), assistant("ok"), user("now"))
    edit = edit_of(talk(*twice), 2)
    assert [p.text for p in replayed(twice, edits=[edit]).pieces].count("gone") == 1
    assert replayed(twice, edits=[edit]).pieces[2].text == "gone"


@pytest.mark.requirement("P1")
def test_an_evicted_text_that_comes_back_as_the_newest_result_is_read_in_full() -> None:
    edit = edit_of(talk(*GROWN), 3)
    assert replayed([user("fresh start"), *step(words(300))], edits=[edit]).pieces[2].text is None


@pytest.mark.requirement("P1", "A0.38")
def test_a_rewound_conversation_reads_again_what_was_evicted_later() -> None:
    for kind in (EditKind.EVICT, EditKind.DEDUPE):
        assert replayed(OLD[:4], edits=[edit_of(talk(*GROWN), 3, kind)]).pieces[3].text is None


@pytest.mark.requirement("P2")
def test_a_result_that_was_shortened_while_it_was_the_newest_stays_so_only_on_the_same_history() -> None:
    capped = edit_of(talk(*OLD[:4]), 3, EditKind.INGEST_CAP)
    assert replayed(OLD[:4], edits=[capped]).pieces[3].text == "gone"
    assert replayed([OLD[0], user("other"), *OLD[2:4]], edits=[capped]).pieces[3].text is None


@pytest.mark.requirement("A0.38")
def test_what_is_pinned_later_is_whole_again() -> None:
    transcript = talk(*GROWN)
    pinned = [*GROWN[:3], replace(GROWN[3], keep=True), *GROWN[4:]]
    for kind in (EditKind.EVICT, EditKind.INGEST_CAP):
        assert replayed(pinned, edits=[edit_of(transcript, 3, kind)]).pieces[3].text is None
    assert len(replayed(pinned, cuts=(cut_of(transcript, 4),)).pieces) == len(pinned)


@pytest.mark.requirement("P2")
def test_a_clipped_task_stays_clipped_and_counts_as_what_is_left_of_it() -> None:
    said = (user(words(500)), assistant("hm"), user("so?"))
    transcript = talk(*said)
    clipped = edit_of(transcript, 0, EditKind.CLIP)
    assert replayed(said, edits=[clipped]).pieces[0].text == "gone"
    protection = protect(transcript)
    assert tokens_kept_verbatim(transcript, ConversationState(), protection) == 504 + 4
    known = ConversationState(edits={clipped.key: clipped})
    assert tokens_kept_verbatim(transcript, known, protection) == 5 + 4
    bounds = bounds_for(transcript, settings=ContextSettings(), budget=window(400), known=known, counter=CHARS4)
    assert bounds.fixed == 5 + 4 + transcript.priming


@pytest.mark.requirement("P2", "A2.28")
def test_a_cut_stands_in_place_of_exactly_what_it_covers() -> None:
    cut = cut_of(talk(*GROWN), 4)
    draft = replayed(GROWN, cuts=(cut,))
    assert texts(draft) == ["s", "task", "summary", "", "other ot", "ok", "and now?"]
    assert draft.cut is None
    assert draft.active_cut is cut
    assert draft.buckets()["summary"] == 6
    assert draft.applied == {"compact": 1}


def test_what_stays_behind_a_summary_stands_behind_it() -> None:
    cut = replace(cut_of(talk(*GROWN), 7), after=(6,))
    assert texts(replayed([*GROWN, assistant("sure")], cuts=(cut,))) == [
        "s",
        "task",
        "summary",
        "ok",
        "and now?",
        "sure",
    ]


@pytest.mark.requirement("P1", "R.25")
@pytest.mark.parametrize(
    "said",
    [
        [OLD[0], user("another task"), *GROWN[2:]],
        [*GROWN[:3], replace(GROWN[3], text="edited"), *GROWN[4:]],
        GROWN[:4],
        GROWN[:2],
        [],
    ],
)
def test_a_cut_does_not_apply_where_its_prefix_is_not_there(said: Sequence[Said]) -> None:
    assert replayed(said, cuts=(cut_of(talk(*GROWN), 4),)).active_cut is None


def test_a_cut_applies_under_another_system_message() -> None:
    said = [system("today is Tuesday"), *GROWN[1:]]
    assert replayed(said, cuts=(cut_of(talk(*GROWN), 4),)).active_cut is not None


@pytest.mark.requirement("P1")
def test_a_rewound_conversation_falls_back_to_the_newest_cut_that_still_holds() -> None:
    transcript = talk(*GROWN)
    first, second = cut_of(transcript, 4, text="first"), cut_of(transcript, 7, text="second")
    assert replayed(GROWN, cuts=(first, second)).active_cut is second
    assert replayed(GROWN[:7], cuts=(first, second)).active_cut is first


@pytest.mark.requirement("A0.38")
def test_a_cut_that_would_hide_something_protected_does_not_apply() -> None:
    transcript = talk(*OLD[:4])
    protection = protect(transcript)
    assert applicable_cut(transcript, (cut_of(transcript, 3),), protection) is None
    assert applicable_cut(transcript, (cut_of(transcript, 1, before=()),), protection) is None


@pytest.mark.requirement("A0.18")
def test_the_calls_of_a_message_whose_content_is_replaced_are_still_counted() -> None:
    call = ToolCall("call_0", "look", '{"path": "' + words(200) + '"}')
    transcript = talk(user("task"), assistant(words(500), call), result("done"), user("and now?"))
    before = transcript.messages[1].tokens
    edit = edit_of(transcript, 1, EditKind.SUMMARY)
    assert edit.tokens == before - CHARS4.count(words(500)) + CHARS4.count("gone") > 200


# -- what is taken back ----------------------------------------------------------------------------------------------


@pytest.mark.requirement("P1", "P10", "D25")
def test_a_batch_is_needless_only_where_its_message_is_gone_and_the_rest_fits_with_room_to_spare() -> None:
    said = [
        user("task"),
        *(m for n in range(20) for m in (assistant(f"a {n} {words(50)}"), user(f"q {n} {words(50)}"))),
    ]
    huge, short = talk(*said, user(words(5_000))), talk(*said, user("short"))
    budget, limits = window(6_000), limits_for(ContextSettings(), window(6_000))
    known = remember(ConversationState(), decide(huge, budget=budget), huge)
    assert known.cuts
    before = replace(known, length=len(short.chain) - 1)
    last = Trend(raw=huge.tokens, length=len(huge.messages))
    assert is_needless(short, before, limits=limits, trend=last)
    assert is_needless(short, before, limits=limits, trend=Trend(raw=10, length=2)), "the last request is not known"
    assert not is_needless(short, replace(known, length=len(short.chain)), limits=limits, trend=last), "it is there"
    assert not is_needless(short, before, limits=limits, trend=Trend(at=1.0)), "it is another run's"
    near = talk(*said, user(words(2_900)))
    assert not is_needless(near, before, limits=limits, trend=last), "no room to spare"
    wide = limits_for(ContextSettings(), window(60_000))
    grown = Trend(raw=short.tokens - 20, length=len(short.messages))
    assert not is_needless(short, before, limits=wide, trend=grown), "nothing is gone, the window is another one"
    start = ContextSettings(ingest=Ingest(from_start=True))
    capped = Edit(b"d", 0, EditKind.INGEST_CAP, "t", "r", 9, length=len(short.chain))
    held = replace(before, edits={capped.key: capped})
    assert not is_needless(short, held, limits=limits_for(start, budget), trend=last), "its cap holds from the start"
