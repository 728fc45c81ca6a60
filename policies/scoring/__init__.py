"""What of a conversation is worth least: blocks, scorers, and the choice of what goes; who used a result."""

from policies.scoring.eviction import (
    EVICTABLE,
    HYBRID_WEIGHTS,
    SCORERS,
    SIGNALS,
    Block,
    ContentType,
    Params,
    Scorer,
    Selection,
    parameters,
    scorer,
    select,
)
from policies.scoring.references import References, last_references

__all__ = [
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
]
