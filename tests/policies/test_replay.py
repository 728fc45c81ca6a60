from collections.abc import Sequence
from dataclasses import replace

import pytest

from policies.draft import ConversationState, Draft, bounds_for, replay
from policies.ledger import Cut, Edit, EditKind
from policies.messages import Transcript, protect
from policies.settings import ContextSettings
from policies.tokens import CHARS4
from tests.policies.play import Said, assistant, step, system, talk, user, window, words

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


@pytest.mark.requirement("P2", "A2.28")
def test_a_cut_stands_in_place_of_exactly_what_it_covers() -> None:
    cut = cut_of(talk(*GROWN), 4)
    draft = replayed(GROWN, cuts=(cut,))
    assert texts(draft) == ["s", "task", "summary", "", "other ot", "ok", "and now?"]
    assert draft.cut is None
    assert draft.active_cut is cut
    assert draft.buckets()["summary"] == 6
    assert draft.applied == {"compact": 1}
