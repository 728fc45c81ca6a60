"""How alike texts are: shingles with their known answers, vectors from a real server, and every way to fail."""

from hypothesis import given
from hypothesis import strategies as st

from policies.effects import Compare
from proxy.effects.perform import MAX_CHARS, MAX_LEN, by_shingles
from tests.functional.harness import prose


def score(one: str, other: str) -> float:
    return by_shingles(Compare((one, other), ((0, 1),))).scores[0]


# -- shingles --------------------------------------------------------------------------------------------------------


@given(st.text(alphabet=st.sampled_from("ab \nä漢\ud800"), max_size=40), st.text(alphabet="ab ", max_size=40))
def test_any_two_texts_have_a_score_and_it_is_the_same_both_ways(one: str, other: str) -> None:
    assert 0.0 <= score(one, other) <= 1.0
    assert score(one, other) == score(other, one)
    assert score(one, one) == 1.0


def test_the_work_for_one_question_is_bounded_and_the_newest_texts_are_looked_at() -> None:
    texts = tuple(prose(9_000, seed=1) + f" {n}" for n in range(64))
    assert sum(map(len, texts)) > MAX_CHARS > len(texts[0])
    scores = by_shingles(Compare(texts, tuple((n, n + 1) for n in range(63)))).scores
    assert scores[0] == 0.0
    assert scores[-1] > 0.85
    assert score("x" * (MAX_LEN + 1), "x" * MAX_LEN) == 0.0
