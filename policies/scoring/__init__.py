"""What of a conversation is worth least: blocks, scorers, and the choice of what goes; who used a result."""

from policies.scoring.blocks import EVICTABLE, Block, ContentType, step_numbers
from policies.scoring.references import References, last_references
from policies.scoring.scorers import (
    DEFAULT_SCORER,
    HYBRID_WEIGHTS,
    SCORERS,
    SIGNALS,
    Params,
    Scorer,
    parameters,
    scorer,
)
from policies.scoring.selection import Selection, select

__all__ = [
    "DEFAULT_SCORER",
    "EVICTABLE",
    "HYBRID_WEIGHTS",
    "SCORERS",
    "SIGNALS",
    "Block",
    "ContentType",
    "Params",
    "References",
    "Scorer",
    "Selection",
    "last_references",
    "parameters",
    "scorer",
    "select",
    "step_numbers",
]
