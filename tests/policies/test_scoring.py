"""What each scorer says about a block, by hand-computed numbers, and what holds for all of them."""

import math
from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.messages import PolicyError
from policies.scoring.eviction import HYBRID_WEIGHTS, SCORERS, Block, ContentType, Scorer, parameters, scorer

RESULT = ContentType.TOOL_RESULT


def block(
    index: int = 0,
    *,
    kind: ContentType = RESULT,
    tokens: int = 500,
    age: int = 0,
    idle: int | None = None,
    references: int = 0,
) -> Block:
    return Block(
        index=index,
        id=f"{index:032x}",
        kind=kind,
        tokens=tokens,
        age=age,
        idle=age if idle is None else idle,
        references=references,
    )


def order(by: Scorer, blocks: Mapping[str, Block]) -> list[str]:
    """Names of the blocks, the first to go first."""
    return sorted(blocks, key=lambda name: (by.score(blocks[name]), blocks[name].index))


BLOCKS = st.builds(
    Block,
    index=st.integers(0, 400),
    id=st.just("00"),
    kind=st.sampled_from(ContentType),
    tokens=st.integers(0, 100_000),
    age=st.integers(0, 500),
    idle=st.integers(0, 500),
    references=st.integers(0, 30),
    superseded=st.booleans(),
    duplicate=st.floats(0, 1),
    important=st.booleans(),
    keep=st.sampled_from([None, None, None, True, False]),
    semantic=st.one_of(st.none(), st.floats(-1, 1)),
    behind=st.one_of(st.none(), st.integers(1, 900)),
)
EVERY = st.sampled_from(
    [
        *(scorer(name) for name in SCORERS),
        *(scorer("hybrid", {"weights": name}) for name in HYBRID_WEIGHTS),
    ]
)

# -- fifo, lru, largest ----------------------------------------------------------------------------------------------


@pytest.mark.requirement("A0.30")
@pytest.mark.parametrize(("age", "score"), [(0, 1.0), (1, 0.904837), (5, 0.606531), (10, 0.367879), (20, 0.135335)])
def test_fifo_falls_by_e_every_ten_steps(age: int, score: float) -> None:
    assert scorer("fifo").score(block(age=age)) == pytest.approx(score, abs=1e-6)


@pytest.mark.requirement("A0.31", "A0.46", "A0.47")
@pytest.mark.parametrize(("idle", "score"), [(0, 1.0), (1, 0.870551), (5, 0.5), (10, 0.25), (20, 0.0625)])
def test_lru_halves_every_five_idle_steps(idle: int, score: float) -> None:
    assert scorer("lru").score(block(age=40, idle=idle, references=1)) == pytest.approx(score, abs=1e-6)


# -- priority --------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("A0.32")
@pytest.mark.parametrize(("references", "reuse"), [(0, 0.0), (1, 0.2), (4, 0.8), (5, 1.0), (6, 1.0), (50, 1.0)])
def test_reuse_is_full_at_five_references(references: int, reuse: float) -> None:
    by = scorer("priority")
    assert by.score(block(references=references)) - by.score(block()) == pytest.approx(0.15 * reuse)


@pytest.mark.requirement("A0.33")
def test_a_configured_source_score_moves_the_total_by_its_weight() -> None:
    changed = scorer("priority", {"source_tool_result": 0.9})
    for age in (0, 4, 30):
        assert changed.score(block(age=age)) - scorer("priority").score(block(age=age)) == pytest.approx(0.20 * 0.6)


# -- by type ---------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("A0.36", "A0.53")
@pytest.mark.parametrize(
    ("kind", "ttl"),
    [
        (ContentType.TOOL_RESULT, 8),
        (ContentType.MEMORY, 20),
        (ContentType.ASSISTANT, 30),
        (ContentType.USER, 50),
        (ContentType.SYSTEM, 50),
        (ContentType.TOOLS, 50),
    ],
)
def test_every_type_lives_as_long_as_the_table_says(kind: ContentType, ttl: int) -> None:
    by = scorer("type_based")
    assert by.score(block(kind=kind, age=0)) == 1.0
    assert by.score(block(kind=kind, age=ttl // 2)) == pytest.approx(0.5)
    assert by.score(block(kind=kind, age=ttl - 1)) == pytest.approx(1 / ttl)
    assert by.score(block(kind=kind, age=ttl)) == 0.0
    assert by.score(block(kind=kind, age=ttl + 1)) == 0.0


# -- hybrid ----------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("A0.37")
def test_duplication_counts_against_a_block() -> None:
    by = scorer("hybrid")
    assert by.score(block(age=2)) - by.score(replace(block(age=2), duplicate=1.0)) == pytest.approx(0.10)


@pytest.mark.requirement("A0.54")
def test_a_result_that_is_known_to_be_useless_goes_first() -> None:
    by = scorer("hybrid")
    useless = replace(block(age=1), semantic=0.1)
    assert by.score(useless) == 0.0
    for better in (
        replace(useless, semantic=0.11),
        replace(useless, semantic=None),
        replace(useless, references=1),
        replace(useless, age=0, idle=0),
        replace(useless, important=True),
        replace(useless, kind=ContentType.USER),
    ):
        assert by.score(better) > 0.4


# -- what holds for all ----------------------------------------------------------------------------------------------


@pytest.mark.requirement("A0.54")
@pytest.mark.parametrize("name", [n for n in SCORERS if n != "largest"])
def test_marks_and_supersession_stand_above_every_formula(name: str) -> None:
    by = scorer(name)
    assert by.score(replace(block(age=0, references=5), superseded=True)) == 0.0
    assert by.score(replace(block(age=0, references=5), keep=False)) == 0.0
    assert by.score(replace(block(age=400), keep=True)) == 1.0
    assert by.score(replace(block(age=400), keep=True, superseded=True)) == 1.0


@pytest.mark.requirement("A0.49")
def test_an_unknown_name_is_an_error_that_names_the_nearest() -> None:
    with pytest.raises(PolicyError, match="no scorer fiffo; did you mean fifo"):
        scorer("fiffo")
    with pytest.raises(PolicyError, match="no scorer semantic_merge; known: fifo, lru, priority"):
        scorer("semantic_merge")
    with pytest.raises(PolicyError, match="did you mean hybrid"):
        parameters("hybird")
    with pytest.raises(PolicyError, match="hybrid: no weights article_yaml; did you mean article-yaml"):
        scorer("hybrid", {"weights": "article_yaml"})


@pytest.mark.requirement("A0.49")
@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("lru", {"halflife": 3}, "lru: no parameter halflife; did you mean half_life"),
        ("fifo", {"half_life": 3}, "fifo: no parameter half_life; known: decay, band"),
        ("lru", {"half_life": 0}, "lru: half_life must be above 0 steps"),
        ("fifo", {"decay": 0}, "fifo: decay must be above 0 steps"),
        ("fifo", {"decay": "long"}, "fifo: decay must be a number from 0 on, not 'long'"),
        ("fifo", {"decay": True}, "fifo: decay must be a number from 0 on, not True"),
        ("fifo", {"decay": math.nan}, "fifo: decay must be a number from 0 on, not nan"),
        ("type_based", {"ttl_tool_result": 0}, "the time to live of tool_result must be above 0 steps"),
        ("type_based", {"ttl_toolresult": 9}, "did you mean ttl_tool_result"),
        ("priority", {"source_user": 2}, "the source score of user must be within 0 to 1"),
        ("hybrid", {"weights": 1}, "hybrid: no weights 1"),
        ("largest", {"decay": 1}, "largest: no parameter decay; known: band"),
    ],
)
def test_a_wrong_parameter_is_an_error_that_says_which(name: str, params: dict[str, object], message: str) -> None:
    with pytest.raises(PolicyError, match=message.replace("(", r"\(")):
        scorer(name, params)


@pytest.mark.requirement("D19", "A0.48")
@given(EVERY, BLOCKS)
def test_every_score_is_within_zero_and_one_and_the_same_again(by: Scorer, one: Block) -> None:
    score = by.score(one)
    assert 0.0 <= score <= 1.0
    assert by.score(replace(one)) == score


@pytest.mark.requirement("A0.48")
@given(EVERY, BLOCKS, st.integers(1, 100))
def test_no_score_rises_with_age(by: Scorer, one: Block, more: int) -> None:
    behind = None if one.behind is None else one.behind + more
    older = replace(one, age=one.age + more, idle=one.idle + more, behind=behind)
    assert by.score(older) <= by.score(one)
    assert by.score(replace(one, age=one.age + more)) <= by.score(one)


@pytest.mark.requirement("A0.31", "A0.46")
@given(EVERY, BLOCKS)
def test_no_score_falls_because_something_referred_to_the_block(by: Scorer, one: Block) -> None:
    used = replace(one, references=one.references + 1, idle=0)
    assert by.score(used) >= by.score(replace(one, idle=one.age if one.references == 0 else one.idle))


@pytest.mark.requirement("A4.33")
@given(st.lists(st.integers(0, 50_000), min_size=1, max_size=60))
def test_largest_orders_exactly_by_age_times_tokens(tokens: list[int]) -> None:
    newest = len(tokens)
    blocks = {str(i): replace(block(i, tokens=n), behind=newest - i) for i, n in enumerate(tokens)}
    by_hand = sorted(range(newest), key=lambda i: (-(newest - i) * tokens[i], i))
    assert order(scorer("largest"), blocks) == [str(i) for i in by_hand]
