"""What a prompt costs: prices by token, and the providers' own."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Cliff:
    above: int
    input: float
    output: float


@dataclass(frozen=True, slots=True)
class TokenPrices:
    """In any one unit, by token. A prefix shorter than ``minimum`` tokens is not cached."""

    input: float
    cache_read: float
    cache_write: float
    output: float
    minimum: int = 0
    cliff: Cliff | None = None

    def factor(self, tokens: int) -> float:
        return self.cliff.input if self.cliff is not None and tokens > self.cliff.above else 1.0


OPENAI_CLIFF = Cliff(above=272_000, input=2.0, output=1.5)  # OpenAI's prices for gpt-5.4 to gpt-5.6
GEMINI_CLIFF = Cliff(above=200_000, input=2.0, output=1.5)  # Google's prices for Gemini Pro

PROVIDERS: Mapping[str, TokenPrices] = MappingProxyType(
    {
        # relative to the provider's own input price, by its page on prompt caching; output as for
        # its usual model
        "anthropic": TokenPrices(1.0, 0.1, 1.25, 5.0, minimum=1_024),
        "anthropic-1h": TokenPrices(1.0, 0.1, 2.0, 5.0, minimum=1_024),
        "openai": TokenPrices(1.0, 0.1, 1.0, 8.0, minimum=1_024),
        "openai-5.6": TokenPrices(1.0, 0.1, 1.25, 6.0, minimum=1_024, cliff=OPENAI_CLIFF),
        "openai-4.1": TokenPrices(1.0, 0.25, 1.0, 4.0, minimum=1_024),
        "openai-4o": TokenPrices(1.0, 0.5, 1.0, 4.0, minimum=1_024),
        "gemini": TokenPrices(1.0, 0.1, 1.0, 8.0, minimum=2_048, cliff=GEMINI_CLIFF),
        "deepseek": TokenPrices(1.0, 0.1, 1.0, 1.5, minimum=64),
        "uncached": TokenPrices(1.0, 1.0, 1.0, 4.0),
    }
)


def request_cost(prices: TokenPrices, *, tokens: int, cached: int) -> float:
    if tokens < prices.minimum:
        return prices.input * tokens * prices.factor(tokens)
    read = cached if cached >= prices.minimum else 0
    return (prices.cache_read * read + prices.cache_write * (tokens - read)) * prices.factor(tokens)
