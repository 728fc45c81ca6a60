from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.limits import BUCKETS, TokenBudget, divide
from policies.settings import ContextSettings

BALANCED = ContextSettings()


@pytest.mark.requirement("A2.2")
def test_the_history_budget_is_what_every_other_bucket_leaves_of_the_window() -> None:
    others = sum({"system": 5_000, "summary": 1_000, "tools": 3_000}.values())
    budget = TokenBudget(window=128_000, reserve=32_000, headroom=0)
    assert budget.fits(others + 87_000)
    assert not budget.fits(others + 87_001)
    assert not TokenBudget(window=40_000, reserve=32_000, headroom=0).fits(others)


@pytest.mark.requirement("D4")
def test_a_fixed_reserve_holds_whatever_the_client_asks_for_less() -> None:
    article = replace(BALANCED, reserve_mode="fixed", reserve=6_400)
    assert divide(article, window=128_000).reserve == 6_400
    assert divide(article, window=128_000, requested=100).reserve == 6_400
    assert divide(article, window=128_000, requested=10_000).reserve == 10_000
    none = replace(article, reserve=0, reserve_floor=0)
    assert divide(none, window=128_000).reserve == 0


@pytest.mark.requirement("A2.3", "A2.4")
def test_max_tokens_moves_the_reserve_and_never_the_window() -> None:
    once, twice = (divide(BALANCED, window=128_000, requested=n) for n in (8_000, 16_000))
    assert (once.window, twice.window) == (128_000, 128_000)
    assert (once.reserve, twice.reserve) == (8_000, 16_000)
    assert once.usable - twice.usable == 8_000


@pytest.mark.requirement("D5")
def test_the_estimators_error_counts_on_top_of_what_was_counted() -> None:
    budget = TokenBudget(window=12_500, reserve=2_000, headroom=0, margin=0.05)
    assert (budget.soft_limit, budget.hard_limit) == (10_000, 12_500)
    doubled = TokenBudget(window=12_500, reserve=2_000, headroom=0, margin=0.05, ratio=2.0)
    assert (doubled.soft_limit, doubled.hard_limit) == (5_000, 6_250)


@pytest.mark.requirement("D1")
def test_each_policy_has_its_own_denominator() -> None:
    budget = TokenBudget(window=200_000, reserve=32_000, headroom=0)
    assert budget.base(replace(BALANCED, base="usable")) == 168_000
    assert budget.base(replace(BALANCED, base="window")) == 200_000
    assert budget.base(replace(BALANCED, base="max_input")) == 200_000
    budget = replace(budget, max_input=190_000)
    assert budget.base(replace(BALANCED, base="max_input")) == 190_000
    assert budget.base(replace(BALANCED, base="window")) == 200_000


def test_an_estimate_is_rounded_up_and_not_past_a_whole_number() -> None:
    budget = TokenBudget(window=1_000, reserve=0, headroom=0, ratio=1.1)
    assert budget.estimate(100) == 110
    assert budget.estimate(101) == 112


@pytest.mark.requirement("D3", "A2.26")
@given(st.lists(st.integers(0, 50_000), min_size=6, max_size=6), st.sampled_from([0.25, 0.8, 1.0, 1.37, 4.0]))
def test_buckets_sum_to_the_estimate_of_their_total(tokens: list[int], ratio: float) -> None:
    buckets = dict(zip(BUCKETS, tokens, strict=True))
    budget = TokenBudget(window=128_000, reserve=0, headroom=0, ratio=ratio)
    assert sum(budget.estimate_each(buckets).values()) == budget.estimate(sum(buckets.values()))


@pytest.mark.requirement("A2.26")
@given(
    st.lists(st.integers(0, 30_000), min_size=6, max_size=6), st.integers(1, 128_000), st.integers(0, 40_000), st.data()
)
def test_the_two_forms_of_the_over_budget_test_agree(
    tokens: list[int], window: int, reserve: int, data: st.DataObject
) -> None:
    budget = TokenBudget(window=window, reserve=reserve, headroom=data.draw(st.integers(0, 8_000)))
    buckets = dict(zip(BUCKETS, tokens, strict=True))
    messages = buckets["history"] + buckets["tool_outputs"]
    if messages and window - reserve - budget.headroom >= 0:
        left = window - reserve - budget.headroom - (sum(buckets.values()) - messages)
        assert budget.fits(sum(buckets.values())) == (messages <= max(0, left))


@given(st.integers(1, 10**6), st.one_of(st.none(), st.integers(-5, 10**6)), st.one_of(st.none(), st.integers(1, 10**6)))
def test_every_window_leaves_something_for_the_prompt(window: int, requested: int | None, limit: int | None) -> None:
    budget = divide(BALANCED, window=window, requested=requested, max_input=limit)
    assert 0 < budget.reserve <= max(1, window // 4) or window < 4
    assert budget.usable >= 1
    assert 0 <= budget.soft_limit <= budget.hard_limit <= window
