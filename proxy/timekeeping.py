"""What time it is, where the clock alone decides what is deleted: a clock that jumps ahead would make everything old.

A clock goes wrong by years where a machine has no battery, a snapshot is resumed or a time server lies. It is believed
as long as it is at most a day ahead of the time that has passed since it was believed last. One that is further ahead
(a Weir that was off for a week looks the same) is believed once it has stood for a day of running time, restarts not
counted. A clock that goes back deletes nothing and is believed at once.
"""

import datetime as dt
import logging
import time
from collections.abc import Callable

log = logging.getLogger("weir.timekeeping")

DAY = 86_400.0
MAX_STEP_LEN = 60.0  # between two looks: what a monotonic clock says beyond that, a suspended machine slept through


class Timekeeper:
    """Times are seconds since the epoch. ``believed`` is what the store said when it was opened, None for a new one.

    ``doubted`` are the seconds for which the clock has been too far ahead so far.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        believed: float | None,
        doubted: float = 0.0,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._monotonic = monotonic
        self._looked = self._begun = monotonic()
        self._said = False
        self.believed = clock() if believed is None else believed
        self.doubted = doubted
        self.look()
        self._origin = self.believed

    def look(self) -> None:
        """Compare the clock with the time that has passed since the last look; a change of mind is logged."""
        now, looked = self._clock(), self._monotonic()
        passed = min(looked - self._looked, MAX_STEP_LEN)
        self._looked = looked
        if now > self.believed + passed + DAY:
            self.doubted += passed
            if self.doubted < DAY:
                self.believed += passed
                self._say(now)
                return
        if self._said or self.doubted:
            log.warning("the clock is believed again, it says %s: what is past its retention is deleted", _date(now))
        self.believed, self.doubted, self._said = now, 0.0, False

    def steady(self) -> float:
        """A time that never jumps: what was believed at the start, and what has passed since."""
        return self._origin + self._monotonic() - self._begun

    def _say(self, now: float) -> None:
        if not self._said:
            self._said = True
            log.warning(
                "the clock says %s, more than a day ahead of %s, the time that is known of: "
                "nothing is deleted for its age by it until it has stood for a day",
                _date(now),
                _date(self.believed),
            )


def _date(at: float) -> str:
    try:
        return dt.datetime.fromtimestamp(at, tz=dt.UTC).isoformat(timespec="seconds")
    except (OverflowError, ValueError, OSError):
        return f"{at:.0f} s since 1970"
