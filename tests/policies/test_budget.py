from dataclasses import replace

import pytest

from policies.limits import TokenBudget, divide
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


@pytest.mark.requirement("D1")
def test_each_policy_has_its_own_denominator() -> None:
    budget = TokenBudget(window=200_000, reserve=32_000, headroom=0)
    assert budget.base(replace(BALANCED, base="usable")) == 168_000
    assert budget.base(replace(BALANCED, base="window")) == 200_000
    assert budget.base(replace(BALANCED, base="max_input")) == 200_000
    budget = replace(budget, max_input=190_000)
    assert budget.base(replace(BALANCED, base="max_input")) == 190_000
    assert budget.base(replace(BALANCED, base="window")) == 200_000
