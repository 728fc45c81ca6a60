"""Curves of what is kept against the tokens that were sent, as SVG."""

from collections.abc import Iterator, Mapping, Sequence
from html import escape

from proxy.dashboard.charts import scale

WIDTH = 760
HEIGHT = 420
LEFT = 60
BOTTOM = 44
RIGHT = 190
TOP = 34
COLOURS = ("#1f6feb", "#d1242f", "#1a7f37", "#9a6700", "#8250df", "#57606a", "#bf3989", "#0a7ea4")


def curve(title: str, lines: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    """One picture: by name the points (mean tokens sent, share kept) of each candidate."""
    ticks = scale(max((x for points in lines.values() for x, _ in points), default=1.0), most=6)
    body = [*_axes(ticks, title)]
    for number, (name, points) in enumerate(lines.items()):
        colour = COLOURS[number % len(COLOURS)]
        at = [(_x(x, ticks[-1]), _y(y)) for x, y in sorted(points)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in at)
        body.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        body += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in at]
        body.append(_text(WIDTH - RIGHT + 14, TOP + 18 * number + 8, name, fill=colour))
    inner = "\n".join(body)
    box = f'viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {box}>\n{inner}\n</svg>\n'


def _x(value: float, top: float) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * value / top


def _y(share: float) -> float:
    return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * share


def _axes(ticks: Sequence[float], title: str) -> Iterator[str]:
    yield f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>{_text(LEFT, 18, title)}'
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = _y(share)
        yield (
            f'<path d="M{LEFT},{y:.1f} H{WIDTH - RIGHT}"'
            f' stroke="#d0d7de"/>{_text(12, y + 4, f"{share:.0%}")}'
        )
    yield from (
        _text(_x(tick, ticks[-1]) - 12, HEIGHT - BOTTOM + 18, f"{tick:,.0f}") for tick in ticks
    )
    yield _text(LEFT, HEIGHT - 8, "mean tokens sent")


def _text(x: float, y: float, said: str, fill: str = "#24292f") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{fill}">{escape(said)}</text>'
