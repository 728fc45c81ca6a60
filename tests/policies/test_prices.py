import pytest

from policies.quality.prices import GEMINI_CLIFF, OPENAI_CLIFF, PROVIDERS, TokenPrices, request_cost


@pytest.mark.parametrize(
    ("cliff", "border"), [(OPENAI_CLIFF, 272_000), (GEMINI_CLIFF, 200_000)], ids=["OpenAI", "Gemini"]
)
def test_a_token_over_a_tier_doubles_the_price_of_the_whole_prompt(cliff: object, border: int) -> None:
    prices = TokenPrices(1.0, 0.1, 1.0, 8.0, cliff=cliff)  # type: ignore[arg-type]

    assert request_cost(prices, tokens=border, cached=0) == border
    assert request_cost(prices, tokens=border + 1, cached=0) == 2 * (border + 1)


def test_a_prefix_below_the_minimum_is_neither_read_nor_written() -> None:
    prices = PROVIDERS["anthropic"]

    assert request_cost(prices, tokens=1_023, cached=1_000) == 1_023
    assert request_cost(prices, tokens=1_024, cached=1_023) == pytest.approx(1.25 * 1_024)
    assert request_cost(prices, tokens=2_000, cached=1_024) == pytest.approx(102.4 + 1.25 * 976)
