"""What context costs, and advice that follows from it: when to compact, which policy to try, which bucket to enlarge.

::

    H  trigger   L  low water   u  tokens added per turn   s  tokens of the summary
    k  leading tokens that a batch leaves as they are
    i, r, w, o  price of a token as input, read from the cache, written to it, and as output
    f(H, L) = r * (H + L) / 2 + w * u + i_s * u + u * R / (H - L)    the mean cost of a turn, all turns warm
    R       = (w - r) * (L - k) + o_s * s                            what each batch costs
    H* - L  = sqrt(2 * u * R / r)                                    where df/dH = 0

df/dL > 0 for every L: money says to compact as deep as fidelity allows, so :func:`advise` never goes below what was
simulated without loss. Nothing here changes a policy by itself.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from policies.limits import shape_for
from policies.settings import ContextSettings, ExtractShape


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
        # relative to the provider's own input price, by its page on prompt caching; output as for its usual model
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


def batch_cost(
    prices: TokenPrices, *, target: int, kept: int, summary: int = 0, summarizer: TokenPrices | None = None
) -> float:
    """R of the module's formula."""
    writing = summarizer.output * summary if summarizer is not None else 0.0
    return max(0.0, (prices.cache_write - prices.cache_read) * (target - kept) + writing)


def best_trigger(prices: TokenPrices, *, growth: float, target: int, batch: float) -> int:
    """H* for a low water of ``target`` and a batch's cost R, at most the border of a dearer tier."""
    best = target + round(math.sqrt(2 * growth * batch / prices.cache_read))
    return best if prices.cliff is None else min(best, prices.cliff.above)


ADVISED_FROM = 128_000
ADVISED = ExtractShape(window=None, trigger=0.40, low_water=0.20, extract=0.08, tail=0.12)
"""Money first in windows of 128K and more: the lowest trigger at which simulated sessions kept every fact."""

BELOW_CLIFF = 0.95


@dataclass(frozen=True, slots=True)
class Advice:
    """``optimum`` is H* in tokens where the formula has one."""

    shape: ExtractShape
    optimum: int | None
    reason: str


def advise(
    prices: TokenPrices, *, growth: float, fixed: int, window: int, usable: int, settings: ContextSettings | None = None
) -> Advice:
    """The cheapest trigger that simulation has shown to be safe.

    ``growth`` is tokens a request, ``usable`` U. H* is held between the advised trigger and the policy's own, and below
    a dearer tier.
    """
    own = shape_for(settings or ContextSettings(), window)
    if prices.cache_read <= 0:
        return Advice(own, None, "Reading from the cache is free here: compaction is for fit, not for cost.")
    low = fixed + int(ADVISED.low_water * max(0.0, ADVISED.trigger * usable - fixed))
    best = best_trigger(prices, growth=growth, target=low, batch=batch_cost(prices, target=low, kept=fixed))
    money = f"cost alone asks for a trigger of {best:,} tokens ({best / usable:.2f} of U)"
    if window < ADVISED_FROM:
        return Advice(own, best, f"Room is what a window of {window:,} lacks: {money}, fidelity for the default.")
    share = min(max(best / usable, ADVISED.trigger), own.trigger)
    reason = f"Sessions grow by {growth:,.0f} tokens a request and {fixed:,} are fixed: {money}"
    if share > best / usable:
        reason += f", and {share:.2f} is the lowest at which simulated sessions kept what they needed"
    cliff = prices.cliff
    if cliff is not None and share * usable > BELOW_CLIFF * cliff.above:
        share = BELOW_CLIFF * cliff.above / usable
        reason += f"; above {cliff.above:,} tokens every token of a prompt costs {cliff.input:g} times as much"
    return Advice(replace(ADVISED, trigger=round(share, 2)), best, f"{reason}.")


@dataclass(slots=True, kw_only=True)
class ToolUse:
    name: str
    calls: int = 0
    tokens: int = 0
    largest: int = 0
    repeated: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    conversations: int
    requests: int
    turns: int
    buckets: Mapping[str, int] = field(default_factory=dict)
    tools: tuple[ToolUse, ...] = ()
    marked: int = 0

    @property
    def tokens(self) -> int:
        return sum(self.buckets.values())

    @property
    def results_share(self) -> float:
        return self.buckets.get("tool_outputs", 0) / self.tokens if self.tokens else 0.0

    @property
    def repeated_share(self) -> float:
        total = sum(tool.tokens for tool in self.tools)
        return sum(tool.repeated for tool in self.tools) / total if total else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    kind: str
    policies: tuple[str, ...]
    reason: str


FEW_RESULTS = 0.10
MANY_RESULTS = 0.50
MANY_REPEATS = 0.20
STEPS_WITHOUT_A_USER = 4

CHOICES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "chat": ("fifo",),
        "exploration": ("type_based", "lru"),
        "heterogeneous": ("priority", "hybrid"),
        "repeated outputs": ("type_based", "priority"),
        "mission-critical": ("hybrid",),
    }
)
"""The chooser of the field guide that Weir follows (docs/development/requirements.md, row A0.40)."""


def recommend(traffic: Traffic) -> Recommendation:
    results, repeats = traffic.results_share, traffic.repeated_share
    steps = traffic.requests / max(1, traffic.turns)
    share = f"{results:.0%} of the tokens are tool results"
    if traffic.marked >= max(1, traffic.conversations):
        kind = "mission-critical"
        reason = (
            f"{traffic.marked} messages in {traffic.conversations} conversations are marked as not to be lost: begin "
            "conservatively with equal weights, and tune by the audit of evictions"
        )
    elif results >= FEW_RESULTS and repeats >= MANY_REPEATS:
        kind = "repeated outputs"
        reason = (
            f"{repeats:.0%} of the tool results' tokens repeat an earlier result or call: let results go first and "
            "merge what is alike, then weigh by priority"
        )
    elif results < FEW_RESULTS:
        kind, reason = "chat", f"only {share}: the oldest turns can go first"
    elif results >= MANY_RESULTS or steps >= STEPS_WITHOUT_A_USER:
        kind = "exploration"
        reason = f"{share}, {steps:.1f} requests to a user message: results go first, then what was not used for long"
    else:
        kind = "heterogeneous"
        reason = f"{share} among {traffic.turns} user messages: weigh by priority, then by several measures"
    return Recommendation(kind=kind, policies=CHOICES[kind], reason=reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolAdvice:
    tool: ToolUse
    share: float
    advice: str


LARGE_RESULT = 4_000


def worst_tools(traffic: Traffic, *, most: int = 5) -> tuple[ToolAdvice, ...]:
    total = sum(tool.tokens for tool in traffic.tools)
    worst = sorted((tool for tool in traffic.tools if tool.tokens), key=lambda tool: (-tool.tokens, tool.name))
    return tuple(ToolAdvice(tool=tool, share=tool.tokens / total, advice=_advice_on(tool)) for tool in worst[:most])


def _advice_on(tool: ToolUse) -> str:
    if tool.repeated >= MANY_REPEATS * tool.tokens:
        return "often returns what it returned before: ask for what changed, or keep the first result"
    if tool.largest >= LARGE_RESULT:
        return "returns whole documents: read in parts, search for the place first"
    return "is called often: ask for fewer fields, or for more with one call"


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketUse:
    requests: int
    over: Mapping[str, int] = field(default_factory=dict)
    tokens: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetAdvice:
    ready: bool
    reason: str
    enlarge: tuple[str, ...] = ()


OBSERVED = 10
CONSTANTLY = 0.5


def advise_budget(conversations: Sequence[BucketUse]) -> BudgetAdvice:
    """On the division of the window (docs/development/requirements.md, rows A0.88 and A0.94).

    A bucket is constantly over its soft limit if it is for half of the requests in half of the conversations.
    """
    seen = len(conversations)
    if seen < OBSERVED:
        return BudgetAdvice(ready=False, reason=f"{seen} of {OBSERVED} conversations observed: too few to tune by.")
    counts = {
        name: sum(use.over.get(name, 0) >= CONSTANTLY * max(1, use.requests) for use in conversations)
        for name in sorted({name for use in conversations for name in use.over})
    }
    constant = sorted((n for n, count in counts.items() if count >= CONSTANTLY * seen), key=lambda n: -counts[n])
    if not constant:
        return BudgetAdvice(ready=True, reason=f"No bucket is constantly over its soft limit in {seen} conversations.")
    named = ", ".join(f"{name} (in {counts[name]} of {seen} conversations)" for name in constant)
    results, history = (sum(use.tokens.get(name, 0) for use in conversations) for name in ("tool_outputs", "history"))
    guide = "Conversations usually give 70 to 75 % of the window to history."
    if results > history:
        guide = "Tool-heavy traffic usually gives 15 to 20 % of the window to results."
    reason = f"Constantly over the soft limit: {named}. Enlarge it from what others leave unused. {guide}"
    return BudgetAdvice(ready=True, reason=reason, enlarge=tuple(constant))
