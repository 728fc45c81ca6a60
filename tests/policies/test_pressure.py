import pytest

from policies.ledger import WindowPressure
from policies.pressure import read_pressure, zone_of
from policies.settings import Zones

COUNTS = (5_000, 8_000, 12_000, 18_000, 28_000, 45_000, 68_000, 90_000, 105_000, 118_000)
LEVELS = (3.9, 6.2, 9.4, 14.1, 21.9, 35.2, 53.1, 70.3, 82.0, 92.2)
ZONES = ("green",) * 6 + ("yellow",) * 2 + ("orange", "red")


@pytest.mark.requirement("A0.20")
def test_a_session_that_fills_128000_tokens_goes_through_the_zones() -> None:
    found = [read_pressure(n, 128_000, Zones(), fits=True) for n in COUNTS]
    assert tuple(p.zone for p in found) == ZONES
    assert [round(p.level * 100, 1) for p in found] == pytest.approx(LEVELS, abs=0.06)


@pytest.mark.requirement("A0.20")
@pytest.mark.parametrize(
    ("level", "zone"),
    [
        (0.0, "green"),
        (0.4999, "green"),
        (0.50, "yellow"),
        (0.7499, "yellow"),
        (0.75, "orange"),
        (0.8999, "orange"),
        (0.90, "red"),
        (0.9499, "red"),
        (0.95, "critical"),
        (3.0, "critical"),
    ],
)
def test_a_zone_begins_at_its_start(level: float, zone: str) -> None:
    assert zone_of(level, Zones()) == zone


def test_what_does_not_fit_is_critical_at_any_level() -> None:
    assert zone_of(0.1, Zones(), fits=False) == "critical"


def test_a_preset_with_fewer_zones_sets_several_equal() -> None:
    zones = Zones(yellow_at=0.8, orange_at=0.8, red_at=0.8, critical_at=0.95)
    assert [zone_of(level, zones) for level in (0.79, 0.8, 0.95)] == ["green", "red", "critical"]


@pytest.mark.parametrize(
    ("used", "fits", "acted", "emergency", "status"),
    [
        (40, True, False, False, "healthy"),
        (60, True, False, False, "preparing"),
        (80, True, False, False, "active"),
        (96, True, False, False, "active"),
        (40, True, True, False, "active"),
        (40, True, True, True, "emergency"),
        (99, False, True, False, "active"),
    ],
)
def test_the_status_says_what_weir_is_doing(used: int, fits: bool, acted: bool, emergency: bool, status: str) -> None:
    assert read_pressure(used, 100, Zones(), fits=fits, acted=acted, emergency=emergency).status == status


def test_pressure_reads_as_the_response_header() -> None:
    assert str(WindowPressure(level=0.8777, zone="orange", status="active")) == "0.88;orange;active"
