"""What layers do, by the verb: clear, shorten, drop, compact, rewrite; and what they do to tools.

A strategy takes a draft and the bounds of the request, and gives the next draft. The cascade puts them in order.
"""

from collections.abc import Mapping
from types import MappingProxyType

from policies.strategies.base import Strategy
from policies.strategies.clear import Dedupe, Evict, Prune, Reasoning, RetireMedia, clear_results, evict_marked
from policies.strategies.compact import Compact, Rollover, resume
from policies.strategies.drop import Custom, DropOldest, Window
from policies.strategies.rewrite import Delegate, Progressive, SemanticMerge, SummarizeToolResult
from policies.strategies.shorten import IngestCap, TruncateLargest, cap_results, clip, shorten_standing
from policies.strategies.tools import PruneTools

STRATEGIES: Mapping[str, type[Strategy]] = MappingProxyType(
    {
        strategy.name: strategy
        for strategy in (
            IngestCap,
            Dedupe,
            Evict,
            Prune,
            PruneTools,
            Reasoning,
            RetireMedia,
            TruncateLargest,
            SemanticMerge,
            Window,
            DropOldest,
            Custom,
            SummarizeToolResult,
            Progressive,
            Compact,
            Delegate,
            Rollover,
        )
    }
)
"""Every strategy by its name, cheapest first."""

__all__ = [
    "STRATEGIES",
    "Compact",
    "DropOldest",
    "Reasoning",
    "Rollover",
    "Strategy",
    "cap_results",
    "clear_results",
    "clip",
    "evict_marked",
    "resume",
    "shorten_standing",
]
