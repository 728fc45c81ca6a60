"""How much is tried: what an ordinary run has time for, or the most, with ``WEIR_SOAK=1`` (``make soak``)."""

import os

import pytest

SOAK = bool(os.environ.get("WEIR_SOAK"))
soak = pytest.mark.skipif(not SOAK, reason="takes its time: set WEIR_SOAK")
"""For a test that only a run with time has: what it proves with something real is proven otherwise in every run."""


def tried(ordinary: int, soak: int) -> int:
    """How often: so often in an ordinary run, so often in one that may take its time."""
    return soak if SOAK else ordinary


each_once = pytest.mark.each_once
"""Of a test with several parameters an ordinary run takes so many forms that each value comes once; ``soak`` takes all."""
