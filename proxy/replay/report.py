"""Replayed conversations as one HTML page: nothing is fetched, nothing runs, every text is escaped.

Pictures of one conversation in one scenario (buckets against the window, cost, prefix reuse) are inline SVG; colours
are CSS classes of the page (``report.css``), so that they follow light and dark.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from itertools import takewhile

from proxy.models.facts import PriceList
from proxy.replay.play import Replayed, ScenarioResult, Step, Tally
from proxy.replay.scenarios import SLIDING, UNMANAGED
from proxy.replay.script import BUCKETS

WIDTH = 960
LEFT, RIGHT, TOP, BOTTOM = 64, 14, 18, 26
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


def buckets_chart(steps: Sequence[Step], *, window: int) -> str:
    highest = max([window, *(step.after for step in steps)])
    ticks = scale(highest * 1.02)
    frame = Frame(len(steps), ticks[-1], 260)
    parts = [*grid(frame, ticks, [_short(tick) for tick in ticks])]
    parts += stacked(frame, BUCKETS, [step.buckets for step in steps])
    raw = list(takewhile(lambda tokens: tokens <= frame.top, (step.before for step in steps)))
    if raw:
        parts.append(f'<path class="raw" d="{line_of(frame, raw)}"/>')
    parts.append(rule(frame, window, "window", f"window {window:,}"))
    limit = steps[-1].limit
    if 0 < limit < window:
        parts.append(rule(frame, limit, "limit", ""))
    parts += _hover(frame, map(said, steps))
    parts += _marks(frame, steps)
    return svg(frame, "Tokens of each forwarded request by bucket", parts)


def cost_chart(lines: Sequence[tuple[str, Sequence[float]]], shown: Callable[[float], str]) -> str:
    ticks = scale(max((max(values, default=0.0) for _, values in lines), default=0.0))
    frame = Frame(max(len(values) for _, values in lines), ticks[-1], 180)
    parts = [*grid(frame, ticks, map(shown, ticks))]
    parts += [f'<path class="{escape(name)}" d="{line_of(frame, values)}"/>' for name, values in lines]
    return svg(frame, "Cumulative cost of the prompts", parts)


def reuse_chart(steps: Sequence[Step]) -> str:
    frame = Frame(len(steps), 1.0, 120)
    parts = [*grid(frame, (0.0, 0.5, 1.0), ("0 %", "50 %", "100 %"))]
    zero = [0.0] * len(steps)
    parts.append(f'<path class="reuse" d="{area(frame, zero, [step.reuse for step in steps])}"/>')
    parts += _hover(frame, (f"request {step.number}: {step.reuse:.1%} reused" for step in steps))
    return svg(frame, "Prefix reuse of each request", parts)


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


def _hover(frame: Frame, titles: Iterable[str]) -> Iterator[str]:
    for i, title in enumerate(titles):
        yield (
            f'<rect class="hover" x="{frame.x(i):.1f}" y="{TOP}" width="{bar_width(frame):.1f}" '
            f'height="{frame.height - TOP - BOTTOM}"><title>{escape(title)}</title></rect>'
        )


def _marks(frame: Frame, steps: Sequence[Step]) -> Iterator[str]:
    for i, step in enumerate(steps):
        refused = step.action in ("refused", "failed")
        if not (step.broke and step.acted) and not refused:
            continue
        x, name = frame.x(i + 0.5), "refused" if refused else "mark"
        points = f"{x - 5:.1f},4 {x + 5:.1f},4 {x:.1f},13"
        yield f'<polygon class="{name}" points="{points}"><title>{escape(said(step))}</title></polygon>'


def said(step: Step) -> str:
    lines = [f"request {step.number}: {step.before:,} > {step.after:,} tokens, {step.reuse:.0%} reused"]
    if step.applied:
        lines.append(", ".join(f"{name} {count}" for name, count in step.applied.items()))
    if step.acted and step.layers:
        lines.append(f"now: {', '.join(step.layers)}")
    lines += [f"{name} {tokens:,}" for name, tokens in step.buckets.items() if tokens]
    if step.action in ("refused", "failed"):
        lines.append(step.action)
    return "\n".join(lines)


def bar_width(frame: Frame) -> float:
    return frame.x(1) - frame.x(0)


def _short(tokens: float) -> str:
    return f"{tokens / 1000:g}K" if tokens >= 1000 else f"{tokens:g}"


LEGEND = (
    ("b-system", "system"),
    ("b-tools", "tool definitions"),
    ("b-summary", "summary"),
    ("b-history", "history"),
    ("b-tool_outputs", "tool results"),
)
CELLS: Mapping[str, Callable[[Tally, PriceList], str]] = {
    "requests": lambda tally, _: f"{tally.requests:,}",
    "fit": lambda tally, _: f"{tally.fit:,}",
    "batches": lambda tally, _: f"{tally.batches:,}",
    "prefix reuse": lambda tally, _: f"{tally.reuse:.1%}",
    "tokens sent": lambda tally, _: f"{tally.tokens:,}",
    "tokens saved": lambda tally, _: f"{tally.saved:,}",
    "cost": lambda tally, prices: prices.shown(tally.cost),
    "vs unmanaged": lambda tally, _: shown_ratio(tally),
    "facts in window": lambda tally, _: _share(tally.retention.kept, tally.retention.needed),
    "or archive": lambda tally, _: _share(tally.retention.recoverable, tally.retention.needed),
}
COLUMNS = ("policy", *CELLS)

STYLE = (files("proxy.replay") / "report.css").read_text(encoding="utf-8").strip()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayReport:
    title: str
    window: int
    reserve: int
    prices: PriceList
    totals: Mapping[str, Tally]
    drawn: Sequence[Replayed]


def render_report(report: ReplayReport) -> str:
    body = "\n".join((*_header(report), *_table(report), *sections(report)))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(report.title)}</title>\n<style>\n{STYLE}\n</style>\n</head>\n<body>\n<main>\n{body}\n"
        "</main>\n</body>\n</html>\n"
    )


def _header(report: ReplayReport) -> Iterator[str]:
    first = next(iter(report.totals.values()), Tally())
    yield f"<h1>Replay of {escape(report.title)}</h1>"
    drawn = len(report.drawn)
    shown = "all" if drawn == first.conversations else f"only {drawn:,} of {first.conversations:,}"
    yield (
        f'<p class="soft">{first.requests:,} requests of {first.conversations:,} recorded sessions; a window of '
        f"{report.window:,} tokens, {report.reserve:,} of them for the answer; prices: "
        f"{escape(report.prices.source)}. No model was called. The table covers all sessions; {shown} are drawn.</p>"
    )


def _table(report: ReplayReport) -> Iterator[str]:
    yield '<div class="scroll"><table><thead><tr>'
    yield "".join(f"<th>{name}</th>" for name in COLUMNS)
    yield "</tr></thead><tbody>"
    for name, tally in report.totals.items():
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in table_row(name, tally, report.prices))
        yield f"<tr{' class=base' if name in (UNMANAGED, SLIDING) else ''}>{cells}</tr>"
    yield "</tbody></table></div>"
    for name, tally in report.totals.items():
        yield from (f'<p class="soft">{escape(text)}</p>' for text in remarks(name, tally))


def remarks(name: str, tally: Tally) -> Iterator[str]:
    if tally.refused:
        reasons = "; ".join(f"{each.text} ({each.count:,} x)" for each in tally.refusals())
        yield (
            f"{name}: {tally.refused:,} of {tally.requests:,} requests could not be made to fit and would have been "
            f"refused{f': {reasons}' if reasons else ''}. They are in no sum, and no cost is compared."
        )
    unfit = tally.unanswered - tally.refused
    if unfit:
        yield f"{name}: {unfit:,} of {tally.requests:,} requests do not fit the window: no cost is compared."
    if tally.failed:
        yield f"{name}: {tally.failed:,} requests could not be planned and went up as they came."
    if tally.asked:
        yield f"{name}: a model would have been asked {tally.asked:,} times; here code wrote every summary."


def shown_ratio(tally: Tally) -> str:
    return f"– ({tally.unanswered:,})" if tally.unanswered else f"{tally.ratio:.2f}"  # noqa: RUF001 - a dash


def table_row(name: str, tally: Tally, prices: PriceList) -> tuple[str, ...]:
    return (name, *(cell(tally, prices) for cell in CELLS.values()))


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "-"


def sections(report: ReplayReport) -> Iterator[str]:
    yield _legend()
    for name in report.totals:
        if name in (UNMANAGED, SLIDING):
            continue
        yield f"<section>\n<h2>{escape(name)}</h2>"
        for replayed in report.drawn:
            by_name = {each.name: each for each in replayed.scenarios}
            if name in by_name and by_name[name].steps:
                yield from _conversation(replayed, name, by_name, report.prices)
        yield "</section>"


def _conversation(
    replayed: Replayed, name: str, by_name: Mapping[str, ScenarioResult], prices: PriceList
) -> Iterator[str]:
    tally, steps = by_name[name].tally, by_name[name].steps
    yield (
        f"<h3>{escape(replayed.id)}: {tally.requests} requests, {tally.batches} batches, {tally.reuse:.1%} reused, "
        f"{shown_ratio(tally)} of the cost unmanaged</h3>"
    )
    drawn = (("unmanaged", UNMANAGED), ("sliding", SLIDING), ("policy", name))
    lines = [(style, [step.total for step in by_name[scenario].steps]) for style, scenario in drawn]
    yield _figure("Tokens by bucket, request by request", buckets_chart(steps, window=replayed.window))
    yield _figure("Cumulative cost of the prompts", cost_chart(lines, prices.shown))
    yield _figure("Prefix reuse", reuse_chart(steps))


def _figure(caption: str, svg: str) -> str:
    return f"<figure><figcaption>{escape(caption)}</figcaption>\n{svg}\n</figure>"


def _legend() -> str:
    drawn = (("raw", "unmanaged"), ("sliding", "sliding window"), ("policy", "the policy"))
    keys = [(f'<rect class="{name}" width="18" height="10"/>', text) for name, text in LEGEND]
    keys += [(f'<line class="{name}" x1="0" x2="18" y1="5" y2="5"/>', text) for name, text in drawn]
    keys.append(('<polygon class="mark" points="4,0 14,0 9,9"/>', "Weir acted"))
    shown = (f'<span><svg viewBox="0 0 18 10" aria-hidden="true">{key}</svg>{text}</span>' for key, text in keys)
    return f'<p class="legend">{"".join(shown)}</p>'
