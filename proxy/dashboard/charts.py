"""Pictures of the dashboard as inline SVG, with the scales and shapes that a replay's report is drawn with.

Colours and widths of lines are CSS classes: the pages allow no style that stands in an attribute. Every request of a
timeline is a link, so that the keyboard reaches it, with a title that says what a pointer over it shows.
"""

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from itertools import pairwise
from typing import Any
from urllib.parse import quote

import msgspec

from policies.limits import BUCKETS
from proxy.http.conversations import tokens_by_bucket
from proxy.http.reports import Reading
from proxy.http.request import Exchange
from proxy.replay.report import (
    BOTTOM,
    LEFT,
    TOP,
    Frame,
    area,
    bar_width,
    grid,
    line_of,
    rule,
    scale,
    stacked,
    svg,
)

HEIGHT = 280
SMALL, NARROW = 110, 420
"""Pixels of the charts that stand side by side: a phone is as wide as one of them."""
RAW_ROOM = 2.2
"""How far beyond the window the client's own line is still drawn."""


def timeline_chart(rows: Sequence[Exchange], *, first: int, window: int, trigger: int | None, page: str) -> str:
    """Buckets of every forwarded request against the window, the client's own size above them, marks where Weir acted.

    ``page`` is the address of the conversation, ``first`` the number of its oldest request that is shown.
    """
    buckets = [tokens_by_bucket(row.detail.get("buckets")) for row in rows]
    totals = [max(row.tokens_after, sum(each.values())) for row, each in zip(rows, buckets, strict=True)]
    raw_top = min(max(row.tokens_before for row in rows), RAW_ROOM * max(window, *totals))
    ticks = scale(max([window, raw_top, *totals]) * 1.02)
    frame = Frame(len(rows), ticks[-1], HEIGHT)
    parts = [*_zones(frame, rows), *grid(frame, ticks, [short(tick) for tick in ticks], first=first)]
    parts += stacked(frame, BUCKETS, buckets)
    parts.append(f'<path class="raw" d="{line_of(frame, [row.tokens_before for row in rows])}"/>')
    parts += _levels(frame, window=window, usable=rows[-1].limit, trigger=trigger)
    parts += _links(frame, rows, buckets, first=first, page=page)
    return svg(frame, "Tokens of each request by bucket, against the window", parts, 'role="group" class="chart"')


def _zones(frame: Frame, rows: Sequence[Exchange]) -> Iterator[str]:
    starts = [0, *(n + 1 for n, (a, b) in enumerate(pairwise(rows)) if a.zone != b.zone), len(rows)]
    for begin, end in pairwise(starts):
        x, width = frame.x(begin), frame.x(end) - frame.x(begin)
        yield (
            f'<rect class="zone z-{escape(rows[begin].zone)}" x="{x:.1f}" y="{TOP}" width="{width:.1f}" '
            f'height="{frame.height - TOP - BOTTOM}"/>'
        )


def _levels(frame: Frame, *, window: int, usable: int, trigger: int | None) -> Iterator[str]:
    yield rule(frame, window, "window", f"window {window:,}")
    if 0 < usable < window:
        yield rule(frame, usable, "limit", f"usable {usable:,}" if frame.y(usable) - frame.y(window) > 14 else "")
    if trigger is not None and 0 < trigger < usable:
        y = frame.y(trigger)
        yield rule(frame, trigger, "trigger", "")
        if y - frame.y(usable) > 14:
            yield f'<text class="tick" x="{LEFT + 6}" y="{y - 5:.1f}">trigger {trigger:,}</text>'


def _links(
    frame: Frame, rows: Sequence[Exchange], buckets: Sequence[Mapping[str, int]], *, first: int, page: str
) -> Iterator[str]:
    for n, row in enumerate(rows):
        said = escape(told(row, first + n, buckets[n]))
        x, middle = frame.x(n), frame.x(n + 0.5)
        mark = ""
        if row.status >= 400 or row.outcome not in ("ok", "relayed"):
            mark = f'<polygon class="refused" points="{_triangle(middle)}"/>'
        elif acted(row):
            mark = f'<polygon class="mark" points="{_triangle(middle)}"/>'
        yield (
            f'<a href="{escape(page)}/requests/{quote(row.id, safe="")}" aria-label="{said}"><title>{said}</title>'
            f'<rect class="hover" x="{x:.1f}" y="{TOP}" width="{bar_width(frame):.1f}" '
            f'height="{frame.height - TOP - BOTTOM}"/>{mark}</a>'
        )


def _triangle(x: float) -> str:
    return f"{x - 5:.1f},3 {x + 5:.1f},3 {x:.1f},12"


def acted(row: Exchange) -> bool:
    return any(layer["kept"] for layer in layers_of(row))


def layers_of(row: Exchange) -> list[dict[str, Any]]:
    return list(msgspec.to_builtins(row.layers))


def told(row: Exchange, number: int, buckets: Mapping[str, int]) -> str:
    lines = [f"Request {number}: {row.tokens_before:,} tokens sent, {row.tokens_after:,} forwarded, {row.zone}"]
    kept = (each for each in layers_of(row) if each["kept"])
    lines += [f"{each['layer']}: {each['tokens_before']:,} to {each['tokens_after']:,}" for each in kept]
    lines += [f"{name.replace('_', ' ')} {tokens:,}" for name, tokens in buckets.items() if tokens]
    if row.outcome != "ok":
        lines.append(row.outcome)
    return "\n".join(lines)


def health_charts(readings: Sequence[Reading]) -> Iterator[tuple[str, str, str]]:
    metrics: tuple[tuple[str, str, bool], ...] = (
        ("utilization", "Utilization", True),
        ("tool_result_bloat", "Tool results, share of the request", True),
        ("burn_rate", "Tokens a request", False),
        ("eviction_rate", "Evictions a request", False),
        ("compression_ratio", "Compression, times", False),
        ("fidelity_score", "Fidelity", True),
    )
    for field, title, is_share in metrics:
        values = [value for each in readings if (value := getattr(each, field)) is not None]
        newest = "not measured" if not values else f"{values[-1]:.0%}" if is_share else f"{values[-1]:,.1f}"
        yield title, newest, spark(values, title) if len(values) > 1 else ""


def spark(values: Sequence[float], title: str, *, filled: bool = False) -> str:
    """A small chart: a line, or the area below it, which begins at the least value where that is below 0."""
    low = min([0.0, *values])
    heights = [value - low for value in values]
    ticks = scale(max(heights, default=0.0), most=2)
    frame = Frame(len(values), ticks[-1], SMALL, NARROW)
    kind, path = ("bars", area(frame, [0.0] * len(values), heights)) if filled else ("policy", line_of(frame, heights))
    return svg(frame, title, [*grid(frame, ticks, map(short, ticks)), f'<path class="{kind}" d="{path}"/>'])


def meter(tokens: int, limit: int, zone: str) -> str:
    share = min(1.0, max(0.0, tokens / limit)) if limit > 0 else 0.0
    said = f"{share:.0%} of the room for it, zone {zone}"
    return (
        f'<svg class="meter" viewBox="0 0 100 8" preserveAspectRatio="none" role="img" aria-label="{escape(said)}">'
        f"<title>{escape(said)}</title>"
        f'<rect class="track" width="100" height="8" rx="2"/>'
        f'<rect class="f-{escape(zone)}" width="{100 * share:.1f}" height="8" rx="2"/></svg>'
    )


def short(tokens: float) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "K")):
        if tokens >= size:
            return f"{tokens / size:g}{unit}"
    return f"{tokens:g}"
