import logging
from dataclasses import dataclass

import pytest

from proxy.app import Timekeeper
from proxy.store.records import DAY

NOW = 1_760_000_000.0


@dataclass
class Clocks:
    """The time of day, and the time that passes."""

    day: float = NOW
    passed: float = 0.0

    def go_on(self, keeper: Timekeeper, seconds: float) -> None:
        """Let time pass, with a look every half a minute."""
        for _ in range(int(seconds / 30)):
            self.day += 30
            self.passed += 30
            keeper.look()


def started(clocks: Clocks, *, believed: float | None = NOW, doubted: float = 0.0) -> Timekeeper:
    return Timekeeper(lambda: clocks.day, believed=believed, doubted=doubted, monotonic=lambda: clocks.passed)


@pytest.mark.requirement("R.71")
@pytest.mark.parametrize("jump", [2 * DAY, 40 * DAY, 3652 * DAY])
def test_a_clock_that_is_ahead_is_believed_once_it_has_stood_for_a_day(
    jump: float, caplog: pytest.LogCaptureFixture
) -> None:
    clocks = Clocks()
    keeper = started(clocks)
    clocks.day += jump
    clocks.go_on(keeper, DAY - 60)
    assert keeper.believed == NOW + DAY - 60
    assert [r.levelno for r in caplog.records] == [logging.WARNING]
    clocks.go_on(keeper, 120)
    assert keeper.believed == clocks.day
    assert "believed again" in caplog.messages[-1]
    clocks.go_on(keeper, 600)
    assert len(caplog.messages) == 2


@pytest.mark.requirement("R.71")
def test_a_clock_that_is_wrong_for_a_while_or_behind_leaves_no_trace(caplog: pytest.LogCaptureFixture) -> None:
    clocks = Clocks()
    keeper = started(clocks)
    for jump in (40 * DAY, -40 * DAY, -3600.0, 3600.0):
        clocks.day += jump
        clocks.go_on(keeper, 600)
    assert keeper.believed == clocks.day == NOW + 2400
    assert keeper.steady() == clocks.day
    assert len(caplog.messages) == 2


@pytest.mark.requirement("R.71")
def test_doubt_outlives_a_restart(caplog: pytest.LogCaptureFixture) -> None:
    clocks = Clocks(day=NOW + 40 * DAY)
    believed, doubted = NOW, 0.0
    for _ in range(11):
        keeper = started(clocks, believed=believed, doubted=doubted)
        assert keeper.believed < NOW + DAY
        clocks.go_on(keeper, 7_800)
        believed, doubted = keeper.believed, keeper.doubted
    keeper = started(clocks, believed=believed, doubted=doubted)
    clocks.go_on(keeper, 3_600)
    assert keeper.believed == clocks.day
    assert "believed again" in caplog.messages[-1]


def test_a_weir_that_was_off_for_an_hour_or_is_new_believes_the_clock(caplog: pytest.LogCaptureFixture) -> None:
    clocks = Clocks()
    for believed in (None, NOW - 3600):
        assert started(clocks, believed=believed).believed == NOW
    assert not caplog.messages


@pytest.mark.requirement("R.71")
def test_what_expires_goes_by_the_time_that_passes() -> None:
    clocks = Clocks()
    keeper = started(clocks)
    clocks.day += 40 * DAY
    clocks.go_on(keeper, 60)
    assert keeper.steady() == NOW + 60
    assert started(clocks).steady() == NOW, "nor does a restart in the wrong year expire everything"
