"""What nobody has referred to for longest goes first."""

from dataclasses import dataclass

from policies.errors import PolicyError
from policies.scoring.blocks import BAND, Block, decided

HALF_LIFE = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Lru:
    """2^(-idle / ``half_life``), half-life 5 steps; a block that was never referred to is as idle as it is old."""

    half_life: float = HALF_LIFE
    name: str = "lru"
    band: float = BAND

    def __post_init__(self) -> None:
        if not self.half_life > 0:
            raise PolicyError(f"lru: half_life must be above 0 steps, not {self.half_life}")

    def score(self, block: Block) -> float:
        """The keep score, 0 to 1."""
        fixed = decided(block)
        if fixed is not None:
            return fixed
        idle = block.idle if block.references > 0 else block.age
        return float(2.0 ** (-idle / self.half_life))
