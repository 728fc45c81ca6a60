"""How full the window is: level and zone, and the word for what Weir is doing about it."""

from dataclasses import dataclass

from policies.settings import Zones


@dataclass(frozen=True, slots=True, kw_only=True)
class Pressure:
    """Forwarded tokens over the policy's base.

    ``status`` is healthy, preparing (orange or above, nothing to do yet), active (acted on this request) or
    emergency (only the last rungs helped).
    """

    level: float
    zone: str
    status: str

    def __str__(self) -> str:
        """The value of the header ``x-weir-pressure``, e.g. ``0.88;orange;active``."""
        return f"{self.level:.2f};{self.zone};{self.status}"


def zone_of(level: float, zones: Zones, *, fits: bool = True) -> str:
    """The zone whose start ``level`` has reached; ``critical`` also whenever the request does not fit."""
    table = (
        (zones.critical_at, "critical"),
        (zones.red_at, "red"),
        (zones.orange_at, "orange"),
        (zones.yellow_at, "yellow"),
    )
    if not fits:
        return "critical"
    return next((name for start, name in table if level >= start), "green")


def read_pressure(
    used: int, base: int, zones: Zones, *, fits: bool, acted: bool = False, emergency: bool = False
) -> Pressure:
    """The pressure of ``used`` tokens over ``base`` tokens."""
    level = used / base
    zone = zone_of(level, zones, fits=fits)
    if emergency or not fits:
        status = "emergency"
    elif acted:
        status = "active"
    else:
        status = "preparing" if zone in ("orange", "red", "critical") else "healthy"
    return Pressure(level=level, zone=zone, status=status)
