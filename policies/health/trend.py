"""Where a conversation's health is heading."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from policies.health.metrics import Snapshot

TREND_OF, TREND_NEEDS = 10, 5
STABLE = 0.05
"""Ours: utilization that moved by less between the ends of a trend is stable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthTrend:
    """Where a conversation is heading (requirement A0.128), None where fewer than 5 samples say nothing.

    ``trend`` is rising, falling, stable or insufficient_data; the deltas are between the ends of the newest 10
    samples, ``utilization_delta`` with three decimals, ``burn_rate_delta`` in tokens with one.
    """

    trend: Literal["rising", "falling", "stable", "insufficient_data"]
    samples: int
    utilization_delta: float | None = None
    burn_rate_delta: float | None = None
    avg_fidelity: float | None = None


def trend_of(snapshots: Sequence[Snapshot]) -> HealthTrend:
    """The trend of a conversation's snapshots, oldest first."""
    newest = snapshots[-TREND_OF:]
    if len(newest) < TREND_NEEDS:
        return HealthTrend(trend="insufficient_data", samples=len(newest))
    moved = round(newest[-1].utilization - newest[0].utilization, 3)
    rates = [each.burn_rate for each in newest if each.burn_rate is not None]
    scores = [each.fidelity_score for each in newest if each.fidelity_score is not None]
    return HealthTrend(
        trend="stable" if abs(moved) < STABLE else "rising" if moved > 0 else "falling",
        samples=len(newest),
        utilization_delta=moved,
        burn_rate_delta=round(rates[-1] - rates[0], 1) if rates else None,
        avg_fidelity=round(sum(scores) / len(scores), 3) if scores else None,
    )
