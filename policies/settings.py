"""A policy as frozen values: what to keep free, when to act, how far to shrink, in which order.

The defaults are the policy ``balanced``. Its numbers were chosen from simulated policies on recorded
conversations; shares are of *room*, which is the trigger less what can never be removed, because absolute
shares thrash in small windows.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal


class Mode(StrEnum):
    """What Weir may do: manage, plan but forward as it came, or nothing."""

    ENFORCE = "enforce"
    OBSERVE = "observe"
    OFF = "off"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Where a batch starts and where it ends, for windows up to ``window`` tokens (None: any).

    ``trigger`` is a share of U = W - R - H. ``low_water``, ``extract``, ``tail`` and ``note`` are shares of
    room = trigger - fixed; ``extract_max`` caps the extract in tokens; a ``note`` of 0 asks no model.
    """

    window: int | None
    trigger: float
    low_water: float
    extract: float
    tail: float
    note: float = 0.04
    extract_max: int = 4_000


BALANCED_SHAPES: tuple[Shape, ...] = (
    Shape(window=6_144, trigger=0.95, low_water=0.75, extract=0.50, tail=0.25, note=0.0),
    Shape(window=16_384, trigger=0.90, low_water=0.45, extract=0.20, tail=0.25),
    Shape(window=65_536, trigger=0.90, low_water=0.35, extract=0.10, tail=0.25),
    Shape(window=None, trigger=0.80, low_water=0.30, extract=0.04, tail=0.26),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Zones:
    """Start of each zone as a share of the base."""

    yellow_at: float = 0.50
    orange_at: float = 0.75
    red_at: float = 0.90
    critical_at: float = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One strategy with its trigger and target.

    ``at`` is a share of the policy's base, or None for the trigger of the window's shape; ``stop_at``
    likewise, None for low water. ``min_savings`` (share of W) and ``must_reach`` (a share of the way from
    low water to the trigger) are what the layer has to achieve to be kept; otherwise its work is dropped
    and the next layer starts from where it started.
    """

    strategy: str
    at: float | None = None
    stop_at: float | None = None
    scope: str = "total"
    min_savings: float = 0.0
    must_reach: float | None = None
    params: Mapping[str, int | float | str | bool] = field(default_factory=dict)


BALANCED_LAYERS: tuple[Layer, ...] = (
    Layer(strategy="ingest_cap"),
    Layer(strategy="dedupe"),
    Layer(strategy="evict", min_savings=0.10, must_reach=0.5),
    Layer(strategy="compact"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextSettings:
    """One policy, complete.

    Attributes:
        name: what operators call it; the preset's name for a preset.
        window: context window that stands above every other source, tokens.
        base: denominator of pressure: ``usable`` = W - R - H, ``window`` = W, ``max_input`` = I or W.
        reserve_mode: ``request`` takes the client's ``max_tokens``, ``fixed`` the policy's ``reserve``.
        reserve: output reserve where the client states none; ``reserve_floor`` bounds it below (never
            above W / 4).
        headroom: share of W that is never planned to be used.
        margin: estimator error as a share, until the estimate is calibrated.
        ingest_cap: largest tool result in tokens once the first trigger fired, and
            ``ingest_cap_share`` the same as a share of U; the smaller one holds.
        summarizer: model that writes summaries, ``same`` for the request's own, None for no model.
    """

    name: str = "balanced"
    mode: Mode = Mode.ENFORCE
    window: int | None = None
    base: Literal["usable", "window", "max_input"] = "usable"
    reserve_mode: Literal["request", "fixed"] = "request"
    reserve: int = 0
    reserve_floor: int = 4_000
    headroom: float = 0.05
    margin: float = 0.05
    zones: Zones = Zones()
    shapes: tuple[Shape, ...] = BALANCED_SHAPES
    layers: tuple[Layer, ...] = BALANCED_LAYERS
    ingest_cap: int = 25_000
    ingest_cap_share: float = 0.20
    placeholder_tokens: int = 50
    summarizer: str | None = None
    note_min: int = 200
    note_max: int = 2_000

    def shape_for(self, window: int) -> Shape:
        """The shape for a window of ``window`` tokens: the first that is large enough, else the last."""
        for shape in self.shapes:
            if shape.window is None or window <= shape.window:
                return shape
        return self.shapes[-1]
