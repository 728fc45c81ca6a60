"""Rehearsal: recorded conversations played through policies as a client would send them, without a model.

Every request of a recording goes down one lane per policy, one unmanaged and one with a sliding window. What each
lane forwards is compared with what it forwarded before, as a provider's prompt cache does, and priced.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from policies import ContextSettings
from policies.advise import Prices
from proxy.rehearsal.facts import Retention
from proxy.rehearsal.lanes import SLIDING, UNMANAGED, Conditions, Open, SlidingWindow, Unmanaged, opened
from proxy.rehearsal.meter import Meter
from proxy.rehearsal.recordings import BadRecording, Fact, Place, Recording, read_recordings, recording_of
from proxy.rehearsal.script import Script
from proxy.rehearsal.tally import Refusal, Step, Tally, step_values

__all__ = [
    "SLIDING",
    "UNMANAGED",
    "BadRecording",
    "Conditions",
    "Fact",
    "LaneResult",
    "Place",
    "Recording",
    "Refusal",
    "Rehearsal",
    "Retention",
    "Script",
    "Step",
    "Tally",
    "read_recordings",
    "recording_of",
    "rehearse",
    "step_values",
]


@dataclass(frozen=True, slots=True)
class LaneResult:
    """One conversation in one lane; ``steps`` only where they were asked for."""

    name: str
    tally: Tally
    steps: tuple[Step, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """One conversation in every lane: unmanaged, sliding window, then the policies; ``window`` in tokens."""

    id: str
    line: int
    window: int
    lanes: tuple[LaneResult, ...]


def rehearse(
    script: Script,
    policies: Sequence[ContextSettings],
    conditions: Conditions,
    prices: Prices,
    *,
    keep_steps: bool = False,
) -> Rehearsal:
    """The conversation played under each policy.

    The window of the unmanaged lane and of the sliding window is the first policy's. Unmanaged requests cost what
    they would cost a model with a window that is large enough.
    """
    budget = conditions.budget(policies[0] if policies else ContextSettings())
    opens: list[tuple[str, Open]] = [
        (UNMANAGED, lambda: Unmanaged(budget)),
        (SLIDING, lambda: SlidingWindow(budget)),
        *((settings.name, opened(settings, conditions)) for settings in policies),
    ]
    room = budget.window - budget.reserve
    meters = [Meter(script, lane(), prices, room=room, keep_steps=keep_steps) for _, lane in opens]
    for request in script.requests:
        played = [meter.play(request) for meter in meters]
        for meter, each in zip(meters, played, strict=True):
            meter.settle(each, unmanaged=played[0].cost, sliding=played[1].cost)
    lanes = tuple(LaneResult(n, m.tally, tuple(m.steps)) for (n, _), m in zip(opens, meters, strict=True))
    return Rehearsal(id=script.recording.id, line=script.recording.line, window=budget.window, lanes=lanes)
