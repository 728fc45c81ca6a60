"""What each scorer says about a message, by hand-computed numbers."""

from dataclasses import replace

import pytest

from policies.strategies.scorers import SCORERS, Block, ContentType

RESULT = ContentType.TOOL_RESULT


def block(*, kind: ContentType = RESULT, age: int = 0, idle: int | None = None, references: int = 0) -> Block:
    since = age if idle is None else idle
    return Block(index=0, kind=kind, tokens=500, age=age, idle=since, references=references, behind=age + 1)


@pytest.mark.requirement("A0.30")
@pytest.mark.parametrize(("age", "score"), [(0, 1.0), (1, 0.904837), (5, 0.606531), (10, 0.367879), (20, 0.135335)])
def test_fifo_falls_by_e_every_ten_steps(age: int, score: float) -> None:
    assert SCORERS["fifo"]().score(block(age=age)) == pytest.approx(score, abs=1e-6)


@pytest.mark.requirement("A0.31", "A0.46", "A0.47")
@pytest.mark.parametrize(("idle", "score"), [(0, 1.0), (1, 0.870551), (5, 0.5), (10, 0.25), (20, 0.0625)])
def test_lru_halves_every_five_idle_steps(idle: int, score: float) -> None:
    assert SCORERS["lru"]().score(block(age=40, idle=idle, references=1)) == pytest.approx(score, abs=1e-6)


@pytest.mark.requirement("A0.32")
@pytest.mark.parametrize(("references", "reuse"), [(0, 0.0), (1, 0.2), (4, 0.8), (5, 1.0), (6, 1.0), (50, 1.0)])
def test_reuse_is_full_at_five_references(references: int, reuse: float) -> None:
    by = SCORERS["priority"]()
    assert by.score(block(references=references)) - by.score(block()) == pytest.approx(0.15 * reuse)


@pytest.mark.requirement("A0.33")
def test_a_configured_source_score_moves_the_total_by_its_weight() -> None:
    usual, changed = SCORERS["priority"](), SCORERS["priority"].of({"source_tool_result": 0.9})
    for age in (0, 4, 30):
        assert changed.score(block(age=age)) - usual.score(block(age=age)) == pytest.approx(0.20 * 0.6)


@pytest.mark.requirement("A0.36", "A0.53")
@pytest.mark.parametrize(("kind", "ttl"), [(RESULT, 8), (ContentType.MEMORY, 20), (ContentType.USER, 50)])
def test_every_type_lives_as_long_as_the_table_says(kind: ContentType, ttl: int) -> None:
    by = SCORERS["type_based"]()
    lives = {0: 1.0, ttl // 2: 0.5, ttl - 1: 1 / ttl, ttl: 0.0, ttl + 1: 0.0}
    assert {age: by.score(block(kind=kind, age=age)) for age in lives} == pytest.approx(lives)


@pytest.mark.requirement("A0.37", "D19", "A0.48")
@pytest.mark.parametrize(("weights", "score"), [("article-yaml", 0.73375), ("article-code", 0.814), ("equal", 0.707)])
def test_hybrid_weighs_by_the_named_set(weights: str, score: float) -> None:
    by = SCORERS["hybrid"].of({"weights": weights})
    assert by.score(block(references=0)) == pytest.approx(score, abs=1e-6)


@pytest.mark.requirement("A0.54")
@pytest.mark.parametrize("name", [name for name in SCORERS if name != "largest"])
def test_what_was_replaced_is_worth_nothing_to_any_scorer(name: str) -> None:
    assert SCORERS[name]().score(replace(block(references=5), worthless=True)) == 0.0


@pytest.mark.requirement("A0.49")
def test_weights_of_ones_own_stand_in_place_of_all_others_and_sum_to_one() -> None:
    only = SCORERS["hybrid"].of({"weight_recency": 1.0})
    assert only.score(block(age=10)) == pytest.approx(SCORERS["fifo"]().score(block(age=10)))
    assert SCORERS["priority"].of({"weight_recency": 0.3}).fault() == "the weights must sum to 1, not 0.3"
    assert only.fault() == SCORERS["fifo"]().fault() == ""
