"""The prices of a replay: a model's own in dollars, a provider's ratios, or four numbers."""

from dataclasses import dataclass

from policies.media import bare_name
from policies.quality.advise import GEMINI_CLIFF, OPENAI_CLIFF, PROVIDERS, Cliff, TokenPrices
from proxy.models import ModelFacts

DEFAULT_PRICES = "anthropic"
CLIFFS: tuple[tuple[str, Cliff], ...] = (
    ("gpt-5.4", OPENAI_CLIFF),
    ("gpt-5.5", OPENAI_CLIFF),
    ("gpt-5.6", OPENAI_CLIFF),
    ("gemini-", GEMINI_CLIFF),
)
MINIMUM = 1_024
MILLION = 1_000_000


class BadPrices(ValueError):
    """Prices that nobody can read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceList:
    """Prices, whether they are US dollars (else multiples of an input token's price), and where they come from."""

    prices: TokenPrices
    dollars: bool
    source: str

    def shown(self, cost: float) -> str:
        """An amount for people: dollars, or thousands of input tokens' worth."""
        if not self.dollars:
            return f"{cost / 1000:,.1f}k"
        return f"${cost:,.2f}" if cost >= 1 else f"${cost:.4f}"


def price_list(stated: str | None, *, model: str, facts: ModelFacts) -> PriceList:
    """The prices that were stated (a provider's name, or input,read,write,output), else the model's, else a default.

    Raises BadPrices for a statement that is neither.
    """
    if stated is not None:
        return _stated(stated)
    if facts.input_price is None:
        return PriceList(prices=PROVIDERS[DEFAULT_PRICES], dollars=False, source=f"the ratios of {DEFAULT_PRICES}")
    prices = TokenPrices(
        facts.input_price,
        facts.cache_read_price if facts.cache_read_price is not None else facts.input_price,
        facts.cache_write_price if facts.cache_write_price is not None else facts.input_price,
        facts.output_price if facts.output_price is not None else 0.0,
        minimum=MINIMUM if facts.cache_read_price is not None else 0,
        cliff=_cliff(model),
    )
    return PriceList(prices=prices, dollars=True, source=f"the price list for {model}")


def _stated(stated: str) -> PriceList:
    if stated in PROVIDERS:
        return PriceList(prices=PROVIDERS[stated], dollars=False, source=f"the ratios of {stated}")
    parts = stated.split(",")
    try:
        numbers = [float(part) / MILLION for part in parts]
    except ValueError:
        numbers = []
    if len(numbers) != 4 or not all(0 <= number < 1 for number in numbers):
        known = ", ".join(PROVIDERS)
        raise BadPrices(f"{stated} is neither one of {known} nor four dollar prices: input,read,write,output")
    read, write = numbers[1], numbers[2]
    return PriceList(
        prices=TokenPrices(numbers[0], read, write, numbers[3], minimum=MINIMUM), dollars=True, source=stated
    )


def _cliff(model: str) -> Cliff | None:
    name = bare_name(model)
    return next((cliff for prefix, cliff in CLIFFS if name.startswith(prefix)), None)
