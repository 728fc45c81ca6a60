"""Which results are compared, which are merged, and what the merged one says."""

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.strategies.redundancy import (
    LOOK_BACK,
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
def test_results_of_different_tools_are_not_compared() -> None:
    outputs = [Output(1, "status", "same text"), Output(3, "weather", "same text"), Output(5, "status", "same next")]
    assert candidates(outputs).pairs == ((1, 5),)


# -- what is merged --------------------------------------------------------------------------------------------------


@pytest.mark.requirement("A0.35")
@pytest.mark.parametrize(("similarity", "merged"), [(0.84, 0), (0.85, 0), (0.8501, 1), (1.0, 1)])
def test_what_is_above_the_threshold_is_merged(similarity: float, merged: int) -> None:
    assert SemanticMerge().threshold == 0.85
    found = candidates(polls("status: queued", "status: running"))
    assert len(above(found, alike(found, similarity))) == merged


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
