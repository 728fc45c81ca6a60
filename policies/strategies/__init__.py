"""What layers do, by the verb: clear, shorten, drop, compact, rewrite; and the way back, recall.

A strategy takes a draft and the bounds of the request, and gives the next draft. A policy's layers put them in order.
"""

from policies.strategies.base import Strategy
from policies.strategies.clear import PruneTools, leave_out_unbound
from policies.strategies.compact import Compact, known_summary, may_summarize, stand_in, summarize
from policies.strategies.drop import DropOldest
from policies.strategies.layers import (
    STRATEGIES,
    PlanWork,
    is_due,
    run_anew,
    run_asked,
    run_client_edits,
    run_layers,
    run_rungs,
)
from policies.strategies.recall import Elsewhere, Pages, is_crowded, may_recall, recall
from policies.strategies.shorten import cap_results, clip, shorten_standing

__all__ = [
    "STRATEGIES",
    "Compact",
    "DropOldest",
    "Elsewhere",
    "Pages",
    "PlanWork",
    "PruneTools",
    "Strategy",
    "cap_results",
    "clip",
    "is_crowded",
    "is_due",
    "known_summary",
    "leave_out_unbound",
    "may_recall",
    "may_summarize",
    "recall",
    "run_anew",
    "run_asked",
    "run_client_edits",
    "run_layers",
    "run_rungs",
    "shorten_standing",
    "stand_in",
    "summarize",
]
