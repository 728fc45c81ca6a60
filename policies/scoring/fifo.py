"""What is oldest goes first: by age alone, or by age times size."""

import math
from dataclasses import dataclass

from policies.errors import PolicyError
from policies.scoring.blocks import BAND, Block, decided

FIFO_DECAY = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fifo:
    """exp(-age / ``decay``), decay 10 steps: for linear chat, too blunt for agents."""

    decay: float = FIFO_DECAY
    name: str = "fifo"
    band: float = BAND

    def __post_init__(self) -> None:
        if not self.decay > 0:
            raise PolicyError(f"fifo: decay must be above 0 steps, not {self.decay}")

    def score(self, block: Block) -> float:
        """The keep score, 0 to 1."""
        fixed = decided(block)
        return math.exp(-block.age / self.decay) if fixed is None else fixed


@dataclass(frozen=True, slots=True, kw_only=True)
class Largest:
    """1 / (1 + age times tokens): the oldest and largest first, whatever else is known about them.

    Age counts messages (``behind``) where they are known, else steps. Scores only rank, so no two are equal
    within a band.
    """

    name: str = "largest"
    band: float = 0.0

    def score(self, block: Block) -> float:
        """The keep score, 0 to 1."""
        age = block.age + 1 if block.behind is None else block.behind
        return 1.0 / (1.0 + max(0, age) * max(0, block.tokens))
