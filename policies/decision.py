"""What the planner answers: what is to be done with a request, and how that came about."""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from policies.ledger import Condensed, Cut, Edit, PlannedMessage
from policies.pressure import UNKNOWN, Event, PressureReading, Trend, WindowPressure


class Action(StrEnum):
    PASS = "pass"  # noqa: S105 - a word, not a password
    REPLAY = "replay"
    EDIT = "edit"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerReport:
    """What one layer did, in uncalibrated tokens.

    ``scope`` is the bucket that it was about; ``reason`` says why it did nothing, or less than asked, although it was
    due; a ``rung`` is what helped where the layers did not. ``condensed`` has also what was not kept. ``scanned`` are
    the tokens of all tool results that it looked at, ``prunable`` those that it could take.
    """

    layer: str
    before: int
    after: int
    units: int
    kept: bool
    ref: str | None = None
    scope: str = "total"
    reason: str = ""
    rung: bool = False
    condensed: tuple[Condensed, ...] = ()
    scanned: int | None = None
    prunable: int | None = None


class Decision(NamedTuple):
    """What the planner answered, and how it got there.

    Without ``pieces`` the client's bytes go up unchanged. ``before``, ``due``, ``after`` and ``limit`` are calibrated
    tokens: as it came, as it would go up had no layer done anything new, as it goes up, W - R - H. ``edits`` and
    ``cut`` are new and have to be stored before the request is forwarded; of ``removed`` the archive needs the
    originals. ``applied`` counts edits by kind, ``pruned`` names tools that are left out, ``window_id`` numbers a
    window that begins here.
    """

    action: Action
    pieces: tuple[PlannedMessage, ...] | None
    before: int
    due: int
    after: int
    limit: int
    raw_after: int
    pressure: WindowPressure
    buckets: dict[str, int]
    applied: dict[str, int]
    edits: tuple[Edit, ...] = ()
    cut: Cut | None = None
    removed: tuple[int, ...] = ()
    covered: tuple[int, ...] = ()
    checkpoint: str | None = None
    trail: tuple[LayerReport, ...] = ()
    pruned: tuple[str, ...] = ()
    window_id: int | None = None
    reading: PressureReading | None = None
    trend: Trend = UNKNOWN
    events: tuple[Event, ...] = ()

    @property
    def is_new(self) -> bool:
        return bool(self.edits) or self.cut is not None
