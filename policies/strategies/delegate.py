"""``delegate``: very large results that nothing refers to are read separately, for the question
that they answer.
"""

from dataclasses import dataclass, replace

from policies.draft import (
    NO_SUMMARIZER,
    Bounds,
    Draft,
    Strategy,
    is_original,
    number,
    results,
    whole,
)
from policies.effects import Flow
from policies.ledger import EditKind
from policies.limits import amount
from policies.strategies.redundancy import last_references
from policies.strategies.rewrite import RewriteTask, condense_each, may_ask, reading_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Delegate(Strategy):
    """Very large results that nothing refers to are read separately for their task, and a report
    replaces them.

    A result is delegated only if no later message uses it and it takes ``least`` (a share of W, or
    tokens from 1 on).
    """

    name = "delegate"
    asks_model = costs = True
    least: float = number(0.10)
    max_tokens: int = whole(2_000, least=1)

    def run(self, draft: Draft, bounds: Bounds) -> Flow[Draft]:
        if not may_ask(bounds):
            return replace(draft, reason=NO_SUMMARIZER)
        return (yield from condense_each(draft, bounds, self._jobs(draft, bounds)))

    def _jobs(self, draft: Draft, bounds: Bounds) -> list[RewriteTask]:
        least = amount(self.least, bounds.budget.window) / bounds.budget.ratio
        large = {
            i: p.tokens
            for i, p, _ in results(draft, bounds)
            if p.tokens >= least and is_original(p)
        }
        if not large:
            return []
        calls = bounds.transcript.calls
        used = last_references(draft.transcript, calls)
        return [
            reading_of(
                bounds, index, calls.get(index), kind=EditKind.DELEGATE, most=self.max_tokens
            )
            for index in sorted(large, key=lambda i: (-large[i], i))
            if used[index].count == 0
        ]
