"""The data of the dashboard's charts: scales, positions and paths; ``charts.html`` draws them as
inline SVG.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

STEPS_OF_A_SCALE = (1, 2, 2.5, 5, 10)
MAX_TICKS = 4
SMALL = 110
NARROW = 420
"""Pixels of the charts that are side by side: a phone is as wide as one of them."""


@dataclass(frozen=True, slots=True)
class Frame:
    """Where values are drawn: ``count`` requests from left to right, 0 to ``top`` upwards, pixels
    of the view box.
    """

    LEFT: ClassVar = 64
    RIGHT: ClassVar = 14
    TOP: ClassVar = 18
    BOTTOM: ClassVar = 26

    count: int
    top: float
    height: int
    width: int = 960

    @property
    def right(self) -> int:
        return self.width - self.RIGHT

    @property
    def depth(self) -> int:
        return self.height - self.TOP - self.BOTTOM

    @property
    def numbers(self) -> list[int]:
        """The requests that are named below the chart."""
        step = max(1, int(scale(max(1, self.count), most=10)[1]))
        return sorted({1, *range(step, self.count + 1, step)})

    def x(self, position: float) -> float:
        return self.LEFT + (self.width - self.LEFT - self.RIGHT) * position / max(1, self.count)

    def y(self, value: float) -> float:
        share = min(1.0, max(0.0, value / self.top)) if self.top > 0 else 0.0
        return self.height - self.BOTTOM - self.depth * share

    def line(self, values: Sequence[float]) -> str:
        return "M" + " L".join(
            f"{self.x(i + 0.5):.1f},{self.y(value):.1f}" for i, value in enumerate(values)
        )

    def area(self, above: Sequence[float], below: Sequence[float] | None = None) -> str:
        base = below or [0.0] * len(above)
        there = [
            f"{self.x(i + side):.1f},{self.y(value):.1f}"
            for i, value in enumerate(above)
            for side in (0, 1)
        ]
        back = [
            f"{self.x(i + side):.1f},{self.y(base[i]):.1f}"
            for i in reversed(range(len(base)))
            for side in (1, 0)
        ]
        return f"M{' L'.join((*there, *back))} Z" if there else "M0,0"


def scale(highest: float, *, most: int = MAX_TICKS) -> tuple[float, ...]:
    if highest <= 0:
        return (0.0, 1.0)
    power = 1.0
    while power * 10 * most < highest:
        power *= 10
    while power * most > highest * 10:
        power /= 10
    step = next(power * each for each in STEPS_OF_A_SCALE if power * each * most >= highest)
    ticks = [0.0]
    while ticks[-1] < highest:
        ticks.append(step * len(ticks))
    return tuple(ticks)


def stacked(
    frame: Frame, names: Iterable[str], buckets: Sequence[Mapping[str, int]]
) -> Iterator[tuple[str, str]]:
    """The buckets of each request, stacked: their names and areas."""
    below = [0.0] * len(buckets)
    for name in names:
        above = [low + each.get(name, 0) for low, each in zip(below, buckets, strict=True)]
        if above != below:
            yield name, frame.area(above, below)
        below = above


def spark_of(values: Sequence[float]) -> dict[str, Any]:
    """A small chart of values, from the least of them where that is below 0."""
    low = min([0.0, *values])
    heights = [value - low for value in values]
    ticks = scale(max(heights, default=0.0), most=2)
    return {
        "heights": heights,
        "ticks": ticks,
        "frame": Frame(len(values), ticks[-1], SMALL, NARROW),
    }
