"""What each scorer says about a block, by hand-computed numbers, and what holds for all of them."""

import math
from collections.abc import Mapping
from dataclasses import FrozenInstanceError, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.messages import PolicyError, step_numbers
from policies.scoring.eviction import HYBRID_WEIGHTS, SCORERS, SIGNALS, Block, ContentType, Scorer, parameters, scorer
from tests.policies.play import assistant, step, system, talk, user

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


@pytest.mark.requirement("A0.30")
def test_fifo_lets_the_oldest_go_first_whatever_was_used() -> None:
    blocks = {
        "newest": block(3, age=0, tokens=9_000),
        "oldest": block(0, age=12, references=9, idle=0),
        "middle": block(2, age=4),
    }
    assert order(scorer("fifo"), blocks) == ["oldest", "middle", "newest"]


@pytest.mark.requirement("A0.31", "A0.46", "A0.47")
@pytest.mark.parametrize(("idle", "score"), [(0, 1.0), (1, 0.870551), (5, 0.5), (10, 0.25), (20, 0.0625)])
def test_lru_halves_every_five_idle_steps(idle: int, score: float) -> None:
    assert scorer("lru").score(block(age=40, idle=idle, references=1)) == pytest.approx(score, abs=1e-6)


@pytest.mark.requirement("A0.46")
def test_lru_keeps_what_was_just_referred_to() -> None:
    blocks = {f"idle {n}": block(n, age=30, idle=n, references=2) for n in (0, 1, 5, 20)}
    assert order(scorer("lru"), blocks) == ["idle 20", "idle 5", "idle 1", "idle 0"]


@pytest.mark.requirement("A0.47")
@pytest.mark.parametrize("half_life", [1, 2.5, 5, 12])
def test_half_is_left_after_one_half_life(half_life: float) -> None:
    lru = scorer("lru", {"half_life": half_life})
    assert lru.score(block(age=99, idle=10, references=1)) == pytest.approx(2 ** (-10 / half_life))
    assert scorer("lru", {"half_life": 7}).score(block(age=7)) == pytest.approx(0.5)


@pytest.mark.requirement("A0.47")
def test_a_block_that_nothing_refers_to_is_as_idle_as_it_is_old() -> None:
    assert scorer("lru").score(block(age=5, idle=0)) == pytest.approx(0.5)
    assert scorer("lru").score(block(age=0, idle=0)) == 1.0


@pytest.mark.requirement("A4.33")
def test_largest_takes_age_in_messages_times_tokens() -> None:
    blocks = {
        "old and small": replace(block(0, tokens=100, age=9), behind=20),  # 2,000
        "new and large": replace(block(1, tokens=3_000, age=0), behind=1),  # 3,000
        "old and large": replace(block(2, tokens=1_000, age=8), behind=18),  # 18,000
        "tiny": replace(block(3, tokens=10, age=9), behind=19),  # 190
    }
    assert order(scorer("largest"), blocks) == ["old and large", "new and large", "old and small", "tiny"]
    assert scorer("largest").score(blocks["tiny"]) == pytest.approx(1 / 191)


@pytest.mark.requirement("A4.33")
def test_of_two_results_of_one_age_the_larger_goes_first() -> None:
    by = scorer("largest")
    assert by.score(block(tokens=1_001, age=3)) < by.score(block(tokens=1_000, age=3))
    assert by.band == 0.0


def test_largest_tells_the_longest_contexts_apart() -> None:
    by = scorer("largest")
    one, other = (replace(block(tokens=n), behind=10_000) for n in (1_000_000, 1_000_001))
    assert by.score(other) < by.score(one)


# -- priority --------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("A0.32")
def test_priority_of_a_known_block_is_what_the_hand_computes() -> None:
    known = replace(block(age=15, references=2), semantic=0.8, important=True)
    by_hand = 0.30 * math.exp(-1) + 0.25 * 0.8 + 0.20 * 0.3 + 0.15 * (2 / 5) + 0.10 * 1.0
    assert scorer("priority").score(known) == pytest.approx(by_hand, abs=1e-6)
    assert by_hand == pytest.approx(0.530364, abs=1e-6)


@pytest.mark.requirement("A0.32")
def test_without_embeddings_relevance_is_neutral() -> None:
    by = scorer("priority")
    unknown, known = block(age=3), replace(block(age=3), semantic=0.5)
    assert by.score(unknown) == by.score(known)
    assert by.score(replace(known, semantic=0.9)) - by.score(unknown) == pytest.approx(0.25 * 0.4)
    assert by.score(replace(known, semantic=-0.4)) == by.score(replace(known, semantic=0.0))


@pytest.mark.requirement("A0.32")
@pytest.mark.parametrize(("references", "reuse"), [(0, 0.0), (1, 0.2), (4, 0.8), (5, 1.0), (6, 1.0), (50, 1.0)])
def test_reuse_is_full_at_five_references(references: int, reuse: float) -> None:
    by = scorer("priority")
    assert by.score(block(references=references)) - by.score(block()) == pytest.approx(0.15 * reuse)


@pytest.mark.requirement("A0.33")
@pytest.mark.parametrize(
    ("kind", "source"),
    [
        (ContentType.USER, 1.0),
        (ContentType.SYSTEM, 1.0),
        (ContentType.TOOLS, 0.9),
        (ContentType.MEMORY, 0.7),
        (ContentType.ASSISTANT, 0.5),
        (ContentType.TOOL_RESULT, 0.3),
    ],
)
def test_every_source_has_its_score(kind: ContentType, source: float) -> None:
    by = scorer("priority")
    rest = 0.30 + 0.25 * 0.5 + 0.10 * 0.5
    assert by.score(block(kind=kind)) == pytest.approx(rest + 0.20 * source)


@pytest.mark.requirement("A0.33")
def test_a_configured_source_score_moves_the_total_by_its_weight() -> None:
    changed = scorer("priority", {"source_tool_result": 0.9})
    for age in (0, 4, 30):
        assert changed.score(block(age=age)) - scorer("priority").score(block(age=age)) == pytest.approx(0.20 * 0.6)


@pytest.mark.requirement("A0.34")
def test_what_is_called_important_scores_higher_than_what_is_not() -> None:
    for name, weight in (("priority", 0.10), ("hybrid", 0.25 * 0.10)):
        by = scorer(name)
        raised = by.score(replace(block(age=6), important=True)) - by.score(block(age=6))
        assert raised == pytest.approx(weight * 0.5)


@pytest.mark.requirement("A0.32")
def test_weights_are_configurable_and_must_sum_to_one() -> None:
    only_source = scorer("priority", {"weight_source": 0.75, "weight_explicit": 0.25})
    assert only_source.score(block(age=400)) == pytest.approx(0.75 * 0.3 + 0.25 * 0.5)
    equal = {f"weight_{s}": 0.2 for s in ("recency", "semantic", "source", "reuse", "explicit")}
    assert scorer("priority", equal).score(block()) == pytest.approx(0.2 * (1 + 0.5 + 0.3 + 0 + 0.5))
    with pytest.raises(PolicyError, match=r"priority: the weights must sum to 1, not 0\.9"):
        scorer("priority", {"weight_recency": 0.4, "weight_source": 0.5})
    with pytest.raises(PolicyError, match="within 0 to 1"):
        scorer("priority", {"weight_recency": 1.5})


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


@pytest.mark.requirement("A0.36")
def test_times_to_live_are_configurable() -> None:
    by = scorer("type_based", {"ttl_tool_result": 3, "ttl_other": 10})
    assert by.score(block(age=2)) == pytest.approx(1 / 3)
    assert by.score(block(age=3)) == 0.0
    assert by.score(block(kind=ContentType.USER, age=5)) == 0.5
    assert by.score(block(kind=ContentType.MEMORY, age=10)) == 0.5


# -- hybrid ----------------------------------------------------------------------------------------------------------

FIXTURE = {
    "finding": block(0, age=12, idle=1, references=5),
    "poll": replace(block(1, age=1, idle=1), duplicate=0.8),
    "plan": block(2, kind=ContentType.ASSISTANT, age=9, idle=4, references=3),
    "memory": block(3, kind=ContentType.MEMORY, age=16, idle=16, references=0),
    "reading": block(4, age=3, idle=3, references=0),
}
GOLDEN = {
    # .30 recency, .25 priority, .20 type_ttl, .15 reference_freq, .10 (1 - duplicate)
    "article-yaml": {"memory": 0.3051, "finding": 0.4703, "reading": 0.5674, "plan": 0.5844, "poll": 0.5954},
    # .15 fifo, .15 lru, .40 priority, .30 type_based
    "article-code": {"memory": 0.2739, "finding": 0.3837, "plan": 0.5690, "reading": 0.5898, "poll": 0.7351},
    # .20 each
    "equal": {"memory": 0.3640, "poll": 0.4991, "finding": 0.5642, "reading": 0.5693, "plan": 0.6472},
}


@pytest.mark.requirement("D19", "A0.37", "A0.48")
@pytest.mark.parametrize("weights", list(GOLDEN))
def test_each_set_of_weights_gives_its_documented_order(weights: str) -> None:
    by = scorer("hybrid", {"weights": weights})
    assert order(by, FIXTURE) == list(GOLDEN[weights])
    assert {name: by.score(b) for name, b in FIXTURE.items()} == pytest.approx(GOLDEN[weights], abs=1e-4)


@pytest.mark.requirement("D19")
def test_the_three_sets_of_weights_are_those_of_the_sources() -> None:
    assert {
        "article-yaml": {
            "recency": 0.30,
            "priority": 0.25,
            "type_ttl": 0.20,
            "reference_freq": 0.15,
            "semantic_duplication": 0.10,
        },
        "article-code": {"recency": 0.15, "lru": 0.15, "priority": 0.40, "type_ttl": 0.30},
        "equal": dict.fromkeys(("recency", "priority", "type_ttl", "reference_freq", "semantic_duplication"), 0.2),
    } == HYBRID_WEIGHTS
    own, named = scorer("hybrid"), scorer("hybrid", {"weights": "article-yaml"})
    assert [own.score(each) for each in FIXTURE.values()] == [named.score(each) for each in FIXTURE.values()]


@pytest.mark.requirement("A0.37")
def test_hybrid_of_a_known_block_is_what_the_hand_computes() -> None:
    known = replace(block(age=4, idle=2, references=2), duplicate=0.4)
    priority = 0.30 * math.exp(-4 / 15) + 0.25 * 0.5 + 0.20 * 0.3 + 0.15 * 0.4 + 0.10 * 0.5
    yaml = 0.30 * math.exp(-0.4) + 0.25 * priority + 0.20 * 0.5 + 0.15 * 0.4 + 0.10 * 0.6
    code = 0.15 * math.exp(-0.4) + 0.15 * 2 ** (-2 / 5) + 0.40 * priority + 0.30 * 0.5
    equal = 0.20 * (math.exp(-0.4) + priority + 0.5 + 0.4 + 0.6)
    assert [round(s, 6) for s in (yaml, code, equal)] == [0.552291, 0.574138, 0.53902]
    for weights, by_hand in (("article-yaml", yaml), ("article-code", code), ("equal", equal)):
        assert scorer("hybrid", {"weights": weights}).score(known) == pytest.approx(by_hand, abs=1e-6)


@pytest.mark.requirement("A0.48")
@pytest.mark.parametrize("weights", list(HYBRID_WEIGHTS))
def test_the_newest_block_of_high_priority_scores_highest(weights: str) -> None:
    by = scorer("hybrid", {"weights": weights})
    best = replace(block(9, kind=ContentType.USER, age=0, references=5), semantic=1.0, important=True)
    assert by.score(best) > max(by.score(b) for b in FIXTURE.values())


@pytest.mark.requirement("A0.37")
def test_duplication_counts_against_a_block() -> None:
    by = scorer("hybrid")
    assert by.score(block(age=2)) - by.score(replace(block(age=2), duplicate=1.0)) == pytest.approx(0.10)


def test_own_weights_may_name_any_signal() -> None:
    by = scorer("hybrid", {"weight_lru": 0.5, "weight_reference_freq": 0.5})
    assert by.score(block(age=30, idle=5, references=5)) == pytest.approx(0.5 * 0.5 + 0.5)
    with pytest.raises(PolicyError, match="hybrid: the weights must sum to 1"):
        scorer("hybrid", {"weight_lru": 0.5})
    with pytest.raises(PolicyError, match="hybrid: no parameter weight_novelty"):
        scorer("hybrid", {"weight_novelty": 1.0})


def test_parameters_of_the_scorers_behind_it_reach_them() -> None:
    by = scorer("hybrid", {"weight_type_ttl": 1, "ttl_tool_result": 4})
    assert by.score(block(age=1)) == pytest.approx(0.75)
    assert scorer("hybrid", {"weight_recency": 1, "decay": 2}).score(block(age=2)) == pytest.approx(math.exp(-1))
    assert scorer("hybrid", {"weight_lru": 1, "half_life": 2}).score(block(age=2)) == pytest.approx(0.5)
    moved = scorer("hybrid", {"source_tool_result": 0.9}).score(block()) - scorer("hybrid").score(block())
    assert moved == pytest.approx(0.25 * 0.20 * 0.6)


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


@pytest.mark.requirement("A0.49", "A0.45")
@pytest.mark.parametrize("name", ["fifo", "lru", "priority", "type_based", "hybrid", "largest"])
def test_the_name_decides_the_scorer(name: str) -> None:
    assert scorer(name).name == name
    assert name in SCORERS


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


def test_every_parameter_that_is_listed_is_taken() -> None:
    for name in SCORERS:
        for key in parameters(name):
            if key == "weights":
                continue
            value = 1 if key.startswith("weight_") else 0.5
            assert scorer(name, {key: value}).name == name
    assert {f"weight_{s}" for s in SIGNALS} <= set(parameters("hybrid"))


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


@pytest.mark.requirement("A0.42")
def test_a_block_and_a_scorer_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        block().age = 3  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError):
        scorer("fifo").name = "lru"  # type: ignore[misc]


@pytest.mark.requirement("A0.42")
def test_a_message_keeps_its_id_on_every_request() -> None:
    first = talk(system("s"), user("task"), *step("found it"))
    second = talk(system("s"), user("task"), *step("found it"), *step("more"), user("go on"))
    assert [m.digest.hex() for m in first.messages] == [m.digest.hex() for m in second.messages[:4]]


@pytest.mark.requirement("D6")
def test_steps_are_counted_by_assistant_messages() -> None:
    transcript = talk(system("s"), user("task"), *step("a"), *step("b"), assistant("done"), user("next"))
    assert step_numbers(transcript.messages) == (0, 0, 1, 1, 2, 2, 3, 3)


@pytest.mark.requirement("A4.33")
@given(st.lists(st.integers(0, 50_000), min_size=1, max_size=60))
def test_largest_orders_exactly_by_age_times_tokens(tokens: list[int]) -> None:
    newest = len(tokens)
    blocks = {str(i): replace(block(i, tokens=n), behind=newest - i) for i, n in enumerate(tokens)}
    by_hand = sorted(range(newest), key=lambda i: (-(newest - i) * tokens[i], i))
    assert order(scorer("largest"), blocks) == [str(i) for i in by_hand]
