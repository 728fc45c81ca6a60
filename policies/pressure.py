"""How full the window is: level and zone, and the word for what Weir is doing about it."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from policies.settings import Zones

STATUSES: Mapping[str, str] = MappingProxyType({"green": "healthy", "yellow": "preparing"})
"""What is being done in a zone by itself; from orange on it is ``active``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pressure:
    """Forwarded tokens over the policy's base.

    ``status`` is healthy, preparing (yellow), active (orange or above, or acted on this request) or emergency (only
    the last rungs helped, or nothing did).
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
    status = "emergency" if emergency or not fits else "active" if acted else STATUSES.get(zone, "active")
    return Pressure(level=level, zone=zone, status=status)
