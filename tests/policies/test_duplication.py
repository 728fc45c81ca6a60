"""Which results are compared, which are merged, and what the merged one says."""

import json
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.scoring.redundancy import (
    LENGTH_RATIO,
    LOOK_BACK,
    MAX_CHANGES,
    MAX_NOTE,
    MAX_PAIRS,
    NEIGHBOURS,
    Candidates,
    Merge,
    Output,
    candidates,
    fields,
    merge,
    merged_text,
)
from policies.strategies.rewrite import SemanticMerge


def polls(*texts: str, tool: str = "status", start: int = 3) -> list[Output]:
    """Results of one tool, every other message."""
    return [Output(start + 2 * n, tool, text) for n, text in enumerate(texts)]


def alike(found: Candidates, similarity: float = 0.9) -> dict[tuple[int, int], float]:
    """The same answer to every question."""
    return dict.fromkeys(found.pairs, similarity)


def above(found: Candidates, similarities: Mapping[tuple[int, int], float]) -> tuple[Merge, ...]:
    """What is merged with the layer's own threshold."""
    return merge(found, similarities, threshold=SemanticMerge().threshold)


# -- what is compared ------------------------------------------------------------------------------------------------


@pytest.mark.requirement("A0.35")
def test_five_identical_polls_become_four_placeholders_and_one_merged_without_asking_anybody() -> None:
    found = candidates(polls(*["build 7: running, 3 of 9 jobs done"] * 5))
    assert found.pairs == ()
    merges = above(found, {})
    assert [(m.index, m.earlier) for m in merges] == [(11, (3, 5, 7, 9))]
    assert merges[0].text == (
        "build 7: running, 3 of 9 jobs done\n[weir: stands for 4 earlier results with the same text]"
    )


@pytest.mark.requirement("A0.35")
def test_results_of_different_tools_are_not_compared() -> None:
    outputs = [Output(1, "status", "same text"), Output(3, "weather", "same text"), Output(5, "status", "same next")]
    assert candidates(outputs).pairs == ((1, 5),)


@pytest.mark.requirement("A0.35")
@pytest.mark.parametrize(("shorter", "pairs"), [(50, [(3, 5)]), (49, [])])
def test_results_of_very_different_length_are_not_compared(shorter: int, pairs: list[tuple[int, int]]) -> None:
    assert LENGTH_RATIO == 0.5
    assert candidates(polls("a" * 100, "b" * shorter)).pairs == tuple(pairs)
    assert candidates(polls("a" * shorter, "b" * 100)).pairs == tuple(pairs)


def test_empty_results_are_not_compared() -> None:
    for outputs in (polls("", " \n", ""), [], polls("alone")):
        found = candidates(outputs)
        assert (found.equal, found.pairs) == ((), ())


def test_a_result_is_compared_with_its_nearest_neighbours_only() -> None:
    found = candidates(polls(*(f"progress {n:02} of 99" for n in range(20))))
    newest = [older for older, newer in found.pairs if newer == 41]
    assert newest == [33, 35, 37, 39]
    assert len(newest) == NEIGHBOURS


def test_equal_texts_are_asked_about_once() -> None:
    found = candidates(polls("queued ....", "queued ....", "queued ....", "running ..."))
    assert (found.equal, found.pairs) == (((3, 5), (5, 7)), ((7, 9),))
    assert above(found, {(7, 9): 0.9})[0].earlier == (3, 5, 7)


def test_a_result_that_nothing_resembles_in_length_is_in_no_pair() -> None:
    found = candidates(polls("a" * 100, "b" * 1_000, "c" * 110))
    assert found.pairs == ((3, 7),)


def test_the_number_of_questions_is_bounded_and_the_newest_are_asked() -> None:
    found = candidates(polls(*(f"progress {n:04} of 9999" for n in range(500))))
    pairs = found.pairs
    assert len(pairs) == MAX_PAIRS == 256
    assert max(newer for _, newer in pairs) == 3 + 2 * 499
    assert min(newer for _, newer in pairs) == 3 + 2 * (500 - MAX_PAIRS // NEIGHBOURS)


# -- what is merged --------------------------------------------------------------------------------------------------


@pytest.mark.requirement("A0.35")
@pytest.mark.parametrize(("similarity", "merged"), [(0.84, 0), (0.85, 0), (0.8501, 1), (1.0, 1)])
def test_what_is_above_the_threshold_is_merged(similarity: float, merged: int) -> None:
    assert SemanticMerge().threshold == 0.85
    found = candidates(polls("status: queued", "status: running"))
    assert len(above(found, alike(found, similarity))) == merged


def test_the_threshold_is_configurable_and_an_unanswered_question_is_a_no() -> None:
    found = candidates(polls("status: queued", "status: running"))
    assert len(merge(found, alike(found, 0.6), threshold=0.5)) == 1
    assert above(found, {}) == ()


@pytest.mark.requirement("A0.35")
def test_the_latest_carries_the_text_and_the_values_that_changed() -> None:
    found = candidates(polls("id: 88\nstatus: queued", "id: 88\nstatus: running", "id: 88\nstatus: done"))
    assert above(found, alike(found)) == (
        Merge(
            index=7,
            text="id: 88\nstatus: done\n[weir: stands for 2 earlier results; earlier: status queued → running → done]",
            earlier=(3, 5),
        ),
    )


def test_sets_that_are_not_alike_are_merged_apart_and_in_order() -> None:
    found = candidates(polls("alpha one", "delta one", "alpha two", "delta two"))
    merges = above(found, {(3, 7): 0.9, (5, 9): 0.9, (3, 5): 0.1, (5, 7): 0.1, (7, 9): 0.2, (3, 9): 0.1})
    assert [(m.index, m.earlier) for m in merges] == [(7, (3,)), (9, (5,))]


def test_links_chain_to_the_last_of_the_row() -> None:
    found = candidates(polls(*(f"progress {n:02} of 99" for n in range(12))))
    neighbours = {(older, newer): 0.9 if newer - older == 2 else 0.1 for older, newer in found.pairs}
    assert [(m.index, len(m.earlier)) for m in above(found, neighbours)] == [(25, 11)]


# -- what the merged one says ----------------------------------------------------------------------------------------


@pytest.mark.requirement("A0.35")
def test_changes_in_json_are_named_by_their_path() -> None:
    texts = [
        json.dumps({"run": {"id": 88, "state": state}, "jobs": [{"ok": ok}]})
        for state, ok in (("queued", None), ("running", None), ("running", True))
    ]
    assert merged_text(texts).splitlines()[-1] == (
        "[weir: stands for 2 earlier results; earlier: run.state queued → running; jobs.0.ok null → true]"
    )


def test_what_changed_least_often_is_named_first() -> None:
    texts = [f"uptime: {n} s\nstate: {'up' if n < 4 else 'down'}" for n in range(6)]
    note = merged_text(texts).splitlines()[-1]
    assert note.endswith("earlier: state up → down; uptime 0 s → 1 s → … → 5 s]")


def test_a_value_that_comes_back_is_told_as_it_went() -> None:
    assert "state up → down → up" in merged_text(["state: up", "state: down", "state: up"])


def test_plain_lines_are_compared_by_their_place() -> None:
    assert merged_text(["3 of 9 done", "4 of 9 done"]) == (
        "4 of 9 done\n[weir: stands for 1 earlier result; earlier: line 1 3 of 9 done → 4 of 9 done]"
    )


def test_a_difference_outside_of_what_is_read_is_owned_up_to() -> None:
    assert merged_text(["a: 1\nnoise", "a: 1\nother"]).endswith(
        "[weir: stands for 1 earlier result differing in details]"
    )


def test_the_note_is_bounded_and_cannot_close_its_own_bracket() -> None:
    texts = [json.dumps({f"key {k}": f"[value] {n} " + "x" * 500 for k in range(50)}) for n in range(30)]
    note = merged_text(texts).splitlines()[-1]
    assert len(note) <= MAX_NOTE + 60
    assert note.count("[") == note.count("]") == 1
    assert note.count(";") <= MAX_CHANGES


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", "null", '{"a": NaN}', "[" * 5_000, "\x00", "a:b:c", "=", "名: 値"]
)
def test_any_text_has_fields(text: str) -> None:
    assert all(isinstance(k, str) and isinstance(v, str) for k, v in fields(text).items())


def test_a_deep_or_wide_document_is_read_up_to_a_bound() -> None:
    assert len(fields(json.dumps(list(range(100_000))[:9_000]))) <= 400
    assert len(fields(json.dumps({"k" * 1_000 + str(n): n for n in range(90)}))) <= 90


# -- what holds always -----------------------------------------------------------------------------------------------

OUTPUTS = st.lists(
    st.tuples(
        st.sampled_from(["status", "list"]), st.sampled_from(["a: 1", "a: 2", "b: 2 c", "", "long " * 9, '{"a": 1}'])
    ),
    max_size=25,
).map(lambda rows: [Output(n, tool, text) for n, (tool, text) in enumerate(rows)])


@pytest.mark.requirement("A0.35")
@given(OUTPUTS, st.data())
def test_every_result_is_in_one_merge_at_most_and_the_latest_stays(outputs: list[Output], data: st.DataObject) -> None:
    before = list(outputs)
    found = candidates(outputs)
    answers = {pair: data.draw(st.sampled_from([0.2, 0.85, 0.86, 1.0])) for pair in found.pairs}
    merges = above(found, answers)
    assert above(candidates(outputs[::-1]), answers) == merges
    assert outputs == before
    seen = [i for m in merges for i in (*m.earlier, m.index)]
    assert len(seen) == len(set(seen))
    by_index = {o.index: o for o in outputs}
    for one in merges:
        assert one.earlier == tuple(sorted(one.earlier))
        assert max(one.earlier) < one.index
        assert {by_index[i].tool for i in one.earlier} == {by_index[one.index].tool}
        assert one.text.startswith(by_index[one.index].text)
    for older, newer in found.pairs:
        assert by_index[older].text != by_index[newer].text
        place = [o.index for o in outputs if o.tool == by_index[newer].tool and o.text.strip()]
        assert 0 < place.index(newer) - place.index(older) <= LOOK_BACK


@pytest.mark.parametrize(
    "text", [" " * 200_000, "a" + " " * 200_000, "a:" + " " * 200_000, "a " * 100_000, "[{" * 40_000]
)
def test_no_text_takes_quadratic_time(text: str) -> None:
    fields(text)
    merged_text([text, text + "x"])  # quadratic would take hours
