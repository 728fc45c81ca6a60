"""How much is tried: what an ordinary run has time for, or the most, with ``WEIR_SOAK=1`` (``make soak``)."""

import os

SOAK = bool(os.environ.get("WEIR_SOAK"))


def tried(ordinary: int, soak: int) -> int:
    """How often: so often in an ordinary run, so often in one that may take its time."""
    return soak if SOAK else ordinary
