"""How long a client waits for what a model writes."""

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True)
class Patience:
    """How long one client's request may wait for what models write, in all: from the first wait on."""

    seconds: float
    clock: Callable[[], float] = time.monotonic
    _until: float | None = None

    def left(self) -> float:
        """Seconds that it may still wait."""
        if self._until is None:
            self._until = self.clock() + self.seconds
        return max(0.0, self._until - self.clock())
