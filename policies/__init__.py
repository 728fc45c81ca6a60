"""The pure half of Weir: deciding what a request may carry. Standard library only; no clock, no IO.

These are the functions that decide; the values that they take and give have modules of their own.
"""

from policies.draft import standing
from policies.memory.state import milestone_of, notes_of, state_of, wants_notes, write_notes
from policies.planner import compacted, is_soft, passed, plan, prepare, trim
from policies.strategies.layers import STRATEGIES
from policies.strategies.recall import Elsewhere, Pages

__all__ = [
    "STRATEGIES",
    "Elsewhere",
    "Pages",
    "compacted",
    "is_soft",
    "milestone_of",
    "notes_of",
    "passed",
    "plan",
    "prepare",
    "standing",
    "state_of",
    "trim",
    "wants_notes",
    "write_notes",
]
