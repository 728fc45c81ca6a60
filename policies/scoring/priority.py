"""Five signals weighed against one another: recency, relevance, source, reuse, and what was said outright.

===========  ======  =================================================================
signal       weight  value, 0 to 1
===========  ======  =================================================================
recency      .30     exp(-age / 15)
semantic     .25     relevance to the newest user message; .5 while it is unknown
source       .20     by content type (:data:`SOURCES`)
reuse        .15     min(references / 5, 1)
explicit     .10     1 for what is called important, else .5 (ours)
===========  ======  =================================================================
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from policies.errors import PolicyError
from policies.scoring.blocks import BAND, Block, ContentType, decided, unit

RECENCY_DECAY = 15.0
REUSE_FULL = 5
NEUTRAL = 0.5

PRIORITY_WEIGHTS: Mapping[str, float] = MappingProxyType(
    {"recency": 0.30, "semantic": 0.25, "source": 0.20, "reuse": 0.15, "explicit": 0.10}
)
OTHER_SOURCE = 0.5
SOURCES: Mapping[ContentType, float] = MappingProxyType(
    {
        ContentType.USER: 1.0,
        ContentType.SYSTEM: 1.0,
        ContentType.TOOLS: 0.9,
        ContentType.MEMORY: 0.7,
        ContentType.ASSISTANT: 0.5,
        ContentType.TOOL_RESULT: 0.3,
    }
)


def check_weights(scorer: str, weights: Mapping[str, float], signals: Iterable[str]) -> None:
    """Nothing; raises PolicyError for an unknown signal, a weight outside 0 to 1, or a sum other than 1."""
    known = tuple(signals)
    for signal, weight in weights.items():
        if signal not in known:
            raise PolicyError(f"{scorer}: no signal {signal}; known: {', '.join(known)}")
        if not 0.0 <= weight <= 1.0:
            raise PolicyError(f"{scorer}: the weight of {signal} must be within 0 to 1, not {weight}")
    total = math.fsum(weights.values())
    if abs(total - 1.0) > 1e-6:
        raise PolicyError(f"{scorer}: the weights must sum to 1, not {total:.6g}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Priority:
    """The weighted sum of the five signals.

    Attributes:
        weights: by signal, all together 1; a signal left out weighs nothing.
        sources: by content type, 0 to 1; a type left out counts :data:`OTHER_SOURCE`.
    """

    weights: Mapping[str, float] = field(default_factory=lambda: PRIORITY_WEIGHTS)
    sources: Mapping[ContentType, float] = field(default_factory=lambda: SOURCES)
    name: str = "priority"
    band: float = BAND

    def __post_init__(self) -> None:
        check_weights("priority", self.weights, PRIORITY_WEIGHTS)
        for kind, source in self.sources.items():
            if not 0.0 <= source <= 1.0:
                raise PolicyError(f"priority: the source score of {kind} must be within 0 to 1, not {source}")

    def score(self, block: Block) -> float:
        """The keep score, 0 to 1."""
        fixed = decided(block)
        if fixed is not None:
            return fixed
        signals = {
            "recency": math.exp(-block.age / RECENCY_DECAY),
            "semantic": NEUTRAL if block.semantic is None else unit(block.semantic),
            "source": self.sources.get(block.kind, OTHER_SOURCE),
            "reuse": reuse(block),
            "explicit": 1.0 if block.important else NEUTRAL,
        }
        return unit(math.fsum(weight * signals[signal] for signal, weight in self.weights.items()))


def reuse(block: Block) -> float:
    """How often a block was referred to, 0 to 1; full from 5 references on."""
    return min(max(0, block.references) / REUSE_FULL, 1.0)
