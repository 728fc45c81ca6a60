"""What the planner answers: what is to be done with a request, and how that came about."""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from policies.ledger import UNKNOWN, Condensed, Cut, Edit, Event, PlannedMessage, Trend
from policies.pressure import PressureReading, WindowPressure
from policies.settings import ContextSettings


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

    @property
    def strategy(self) -> str:
        """The layers whose work was kept."""
        return "+".join(dict.fromkeys(report.layer for report in self.trail if report.kept))

    def stage(self, settings: ContextSettings, *, base: int) -> str:
        """How far the management of a request had to go, in a word (requirement A0.148).

        ``none`` while there is room, ``evaluate`` from yellow on and at a spike, ``evict_and_compress`` for a new
        batch, ``emergency_compaction`` if that was a summary from red on or one of the last rungs,
        ``cross_window_save`` if the conversation went on in a new window. ``base`` is the denominator of the pressure.
        """
        kept = [report for report in self.trail if report.kept] if self.trail else ()
        if any(report.layer == "rollover" for report in kept):
            return "cross_window_save"
        if self.is_new:
            late = self.cut is not None and self.due >= settings.zones.red_at * base
            rung = self.pressure.status == "emergency" or any(report.rung for report in kept)
            return "emergency_compaction" if late or rung else "evict_and_compress"
        spiked = self.reading is not None and self.reading.spike
        return "none" if self.pressure.zone == "green" and not spiked else "evaluate"
