"""Every content type lives so many steps: the score falls from 1 to 0 over that time and stays there."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from policies.errors import PolicyError
from policies.scoring.blocks import BAND, Block, ContentType, decided, unit

OTHER_TTL = 50.0
TTL: Mapping[ContentType, float] = MappingProxyType(
    {
        ContentType.TOOL_RESULT: 8.0,
        ContentType.THINKING: 2.0,
        ContentType.MEMORY: 20.0,
        ContentType.ASSISTANT: 30.0,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TypeBased:
    """1 - age / time to live, 0 from the time to live on.

    Attributes:
        ttl: time to live in steps by content type.
        other: the time to live of the types that ``ttl`` leaves out.
    """

    ttl: Mapping[ContentType, float] = field(default_factory=lambda: TTL)
    other: float = OTHER_TTL
    name: str = "type_based"
    band: float = BAND

    def __post_init__(self) -> None:
        for kind, steps in (*self.ttl.items(), ("other", self.other)):
            if not steps > 0:
                raise PolicyError(f"type_based: the time to live of {kind} must be above 0 steps, not {steps}")

    def score(self, block: Block) -> float:
        """The keep score, 0 to 1."""
        fixed = decided(block)
        return unit(1.0 - block.age / self.lifetime(block.kind)) if fixed is None else fixed

    def lifetime(self, kind: ContentType) -> float:
        """Steps that a block of this type lives."""
        return self.ttl.get(kind, self.other)
