"""Everything that is known about a block, weighed by one of three sets of weights or by one's own.

====================  ============================================  ============  ============  =====
signal                value, 0 to 1                                 article-yaml  article-code  equal
====================  ============================================  ============  ============  =====
recency               what ``fifo`` says                            .30           .15           .20
lru                   what ``lru`` says                                           .15
priority              what ``priority`` says                        .25           .40           .20
type_ttl              what ``type_based`` says                      .20           .30           .20
reference_freq        min(references / 5, 1)                        .15                         .20
semantic_duplication  1 - similarity to the most similar later one  .10                         .20
====================  ============================================  ============  ============  =====

Recency weighs much in all of them, so that a result which is new and worthless would outlive an old finding.
A result that nothing has referred to although a step followed it, and that is known to have nothing to do
with the newest user message, therefore scores 0 (ours).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from policies.errors import PolicyError
from policies.scoring.blocks import BAND, Block, ContentType, Scorer, decided, unit
from policies.scoring.fifo import Fifo
from policies.scoring.lru import Lru
from policies.scoring.priority import Priority, check_weights, reuse
from policies.scoring.type_based import TypeBased

SIGNALS = ("recency", "lru", "priority", "type_ttl", "reference_freq", "semantic_duplication")
HYBRID_WEIGHTS: Mapping[str, Mapping[str, float]] = MappingProxyType(
    {
        "article-yaml": MappingProxyType(
            {
                "recency": 0.30,
                "priority": 0.25,
                "type_ttl": 0.20,
                "reference_freq": 0.15,
                "semantic_duplication": 0.10,
            }
        ),
        "article-code": MappingProxyType({"recency": 0.15, "lru": 0.15, "priority": 0.40, "type_ttl": 0.30}),
        "equal": MappingProxyType(
            {
                "recency": 0.20,
                "priority": 0.20,
                "type_ttl": 0.20,
                "reference_freq": 0.20,
                "semantic_duplication": 0.20,
            }
        ),
    }
)
DEFAULT_WEIGHTS = "article-yaml"
UNRELATED = 0.1


def low_value(block: Block) -> bool:
    """Whether a result is known to be of no use: unused after a step, and unrelated to the newest user message."""
    return (
        block.kind is ContentType.TOOL_RESULT
        and not block.important
        and block.references == 0
        and block.age >= 1
        and block.semantic is not None
        and block.semantic <= UNRELATED
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Hybrid:
    """The weighted sum of the signals.

    Attributes:
        weights: by signal, all together 1; a signal left out weighs nothing.
        fifo, lru, priority, type_based: the scorers behind the signals of their names.
    """

    weights: Mapping[str, float] = field(default_factory=lambda: HYBRID_WEIGHTS[DEFAULT_WEIGHTS])
    fifo: Scorer = field(default_factory=Fifo)
    lru: Scorer = field(default_factory=Lru)
    priority: Scorer = field(default_factory=Priority)
    type_based: Scorer = field(default_factory=TypeBased)
    name: str = "hybrid"
    band: float = BAND

    def __post_init__(self) -> None:
        if not self.weights:
            raise PolicyError(f"hybrid: no weights; the sets are {', '.join(HYBRID_WEIGHTS)}")
        check_weights("hybrid", self.weights, SIGNALS)

    def score(self, block: Block) -> float:
        """The keep score, 0 to 1."""
        fixed = decided(block)
        if fixed is not None:
            return fixed
        if low_value(block):
            return 0.0
        return unit(math.fsum(weight * self.signal(name, block) for name, weight in self.weights.items()))

    def signal(self, name: str, block: Block) -> float:
        """The value of one signal for ``block``, 0 to 1; KeyError for an unknown one."""
        if name == "reference_freq":
            return reuse(block)
        if name == "semantic_duplication":
            return 1.0 - unit(block.duplicate)
        scorers = {"recency": self.fifo, "lru": self.lru, "priority": self.priority, "type_ttl": self.type_based}
        return scorers[name].score(block)
