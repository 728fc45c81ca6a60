"""Shapes of the dashboard's pictures as inline SVG: scales, grids, areas, lines.

Colours and widths of lines are CSS classes: the pages allow no style that stands in an attribute.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

WIDTH = 960
LEFT = 64
RIGHT = 14
TOP = 18
BOTTOM = 26
STEPS_OF_A_SCALE = (1, 2, 2.5, 5, 10)
MAX_TICKS = 4


@dataclass(frozen=True, slots=True)
class Frame:
    """Where values are drawn: ``count`` requests from left to right, 0 to ``top`` upwards, pixels of the view box."""

    count: int
    top: float
    height: int
    width: int = WIDTH

    def x(self, position: float) -> float:
        return LEFT + (self.width - LEFT - RIGHT) * position / max(1, self.count)

    def y(self, value: float) -> float:
        share = min(1.0, max(0.0, value / self.top)) if self.top > 0 else 0.0
        return self.height - BOTTOM - (self.height - TOP - BOTTOM) * share


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


def svg(frame: Frame, label: str, parts: Sequence[str], role: str = 'role="img"') -> str:
    inner = "\n".join(parts)
    return f'<svg viewBox="0 0 {frame.width} {frame.height}" {role} aria-label="{escape(label)}">\n{inner}\n</svg>'


def grid(frame: Frame, ticks: Sequence[float], labels: Iterable[str], *, first: int = 1) -> Iterator[str]:
    for tick, label in zip(ticks, labels, strict=True):
        y = frame.y(tick)
        yield f'<line class="grid" x1="{LEFT}" x2="{frame.width - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield f'<text class="tick" x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{escape(label)}</text>'
    for number in _numbers(frame.count):
        x, y = frame.x(number - 0.5), frame.height - 8
        yield f'<text class="tick" x="{x:.1f}" y="{y}" text-anchor="middle">{number + first - 1}</text>'


def _numbers(count: int) -> list[int]:
    step = max(1, int(scale(max(1, count), most=10)[1]))
    return sorted({1, *range(step, count + 1, step)})


def area(frame: Frame, below: Sequence[float], above: Sequence[float]) -> str:
    there = [f"{frame.x(i + side):.1f},{frame.y(value):.1f}" for i, value in enumerate(above) for side in (0, 1)]
    back = [f"{frame.x(i + side):.1f},{frame.y(below[i]):.1f}" for i in reversed(range(len(below))) for side in (1, 0)]
    return f"M{' L'.join((*there, *back))} Z" if there else "M0,0"


def stacked(frame: Frame, names: Iterable[str], buckets: Sequence[Mapping[str, int]]) -> Iterator[str]:
    """The buckets of each request, one upon the other."""
    below = [0.0] * len(buckets)
    for name in names:
        above = [low + each.get(name, 0) for low, each in zip(below, buckets, strict=True)]
        if above != below:
            yield f'<path class="b-{name}" d="{area(frame, below, above)}"/>'
        below = above


def line_of(frame: Frame, values: Sequence[float]) -> str:
    return "M" + " L".join(f"{frame.x(i + 0.5):.1f},{frame.y(value):.1f}" for i, value in enumerate(values))


def rule(frame: Frame, value: float, name: str, label: str) -> str:
    y, right = frame.y(value), frame.width - RIGHT
    text = f'<text class="tick" x="{right}" y="{y - 5:.1f}" text-anchor="end">{escape(label)}</text>'
    return f'<line class="{name}" x1="{LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>{text if label else ""}'


def bar_width(frame: Frame) -> float:
    return frame.x(1) - frame.x(0)
