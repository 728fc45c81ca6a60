"""A rehearsal as one HTML page: nothing is fetched, nothing runs, every text is escaped."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from proxy.prices import PriceList
from proxy.rehearsal import SLIDING, UNMANAGED, LaneResult, Rehearsal, Tally
from proxy.rehearsal.charts import buckets_chart, cost_chart, cost_scale, reuse_chart

LEGEND = (
    ("b-system", "system"),
    ("b-tools", "tool definitions"),
    ("b-summary", "summary"),
    ("b-history", "history"),
    ("b-tool_outputs", "tool results"),
)
COLUMNS = (
    "policy",
    "requests",
    "fit",
    "batches",
    "prefix reuse",
    "tokens sent",
    "tokens saved",
    "cost",
    "vs unmanaged",
    "facts in window",
    "or archive",
)

STYLE = """
:root { color-scheme: light dark; --paper: #fbfaf7; --ink: #22262b; --soft: #6c737c; --line: #e2dfd7; --card: #ffffff;
  --system: #7a869a; --tools: #2f9e8f; --summary: #e0982b; --history: #4f7fd6; --results: #a86cc4; --act: #d1495b;
  --reuse: #2f9e8f; --policy: #1f5fbf; }
@media (prefers-color-scheme: dark) { :root { --paper: #16181c; --ink: #e6e4de; --soft: #979ea8; --line: #2f343b;
  --card: #1d2025; --system: #8b97ab; --tools: #46b5a6; --summary: #e7ab4c; --history: #6f9bea; --results: #bb86d6;
  --act: #ef6f7f; --reuse: #46b5a6; --policy: #7fb0ff; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1140px; margin: 0 auto; padding: 2.5rem 1.25rem 4rem; }
h1 { font-size: 1.6rem; margin: 0 0 .25rem; letter-spacing: -.01em; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 3rem 0 .5rem; padding-top: 1.5rem; border-top: 1px solid var(--line); }
h3 { font-size: .95rem; margin: 2rem 0 .5rem; font-weight: 600; overflow-wrap: anywhere; }
p { margin: .25rem 0; } .soft, figcaption { color: var(--soft); }
figure { margin: 0 0 1rem; padding: .75rem .75rem .25rem; background: var(--card); border: 1px solid var(--line);
  border-radius: 8px; }
figcaption { font-size: .8rem; margin: 0 0 .25rem .5rem; }
svg { display: block; width: 100%; height: auto; }
.scroll { overflow-x: auto; margin: 1.5rem 0; }
table { border-collapse: collapse; width: 100%; font-size: .88rem; font-variant-numeric: tabular-nums; }
th, td { padding: .4rem .55rem; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { font-size: .78rem; font-weight: 600; color: var(--soft); } th:first-child, td:first-child { text-align: left; }
td:first-child { font-weight: 600; } tr.base td { color: var(--soft); font-weight: 400; }
.legend { display: flex; flex-wrap: wrap; gap: .25rem 1.25rem; font-size: .85rem; color: var(--soft); }
.legend svg { display: inline-block; width: 18px; height: 10px; margin-right: .4rem; vertical-align: baseline; }
.tick { fill: var(--soft); font-size: 11px; } .grid { stroke: var(--line); stroke-width: 1; }
.b-system { fill: var(--system); } .b-tools { fill: var(--tools); } .b-summary { fill: var(--summary); }
.b-history { fill: var(--history); } .b-tool_outputs { fill: var(--results); }
.window { stroke: var(--act); stroke-width: 1.5; } .limit { stroke: var(--act); stroke-dasharray: 2 4; }
.raw, .unmanaged { fill: none; stroke: var(--soft); stroke-width: 1.5; stroke-dasharray: 5 4; }
.sliding { fill: none; stroke: var(--summary); stroke-width: 1.5; stroke-dasharray: 1.5 3; }
.policy { fill: none; stroke: var(--policy); stroke-width: 2.25; } .reuse { fill: var(--reuse); opacity: .75; }
.mark { fill: var(--ink); } .refused { fill: var(--act); }
.hover { fill: transparent; } .hover:hover { fill: var(--ink); fill-opacity: .07; }
""".strip()


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a page shows: sums by lane, and the conversations that are drawn (with their steps)."""

    title: str
    window: int
    reserve: int
    prices: PriceList
    totals: Mapping[str, Tally]
    drawn: Sequence[Rehearsal]


def render_report(report: Report) -> str:
    """The page."""
    body = "\n".join((*_header(report), *_table(report), *_sections(report)))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(report.title)}</title>\n<style>\n{STYLE}\n</style>\n</head>\n<body>\n<main>\n{body}\n"
        "</main>\n</body>\n</html>\n"
    )


def _header(report: Report) -> Iterator[str]:
    any_lane = next(iter(report.totals.values()), Tally())
    yield f"<h1>Rehearsal of {escape(report.title)}</h1>"
    drawn = len(report.drawn)
    shown = "all" if drawn == any_lane.conversations else f"only {drawn:,} of {any_lane.conversations:,}"
    yield (
        f'<p class="soft">{any_lane.requests:,} requests of {any_lane.conversations:,} recorded sessions; a window of '
        f"{report.window:,} tokens, {report.reserve:,} of them for the answer; prices: "
        f"{escape(report.prices.source)}. No model was asked. The table is about all sessions; {shown} are drawn.</p>"
    )


def _table(report: Report) -> Iterator[str]:
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
    """What a reader has to know of a lane's figures, in a sentence each."""
    if tally.refused:
        reasons = "; ".join(f"{each.text} ({each.count:,} x)" for each in tally.why)
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
    """Cost over unmanaged; a dash and how many where requests were refused or did not fit."""
    return f"– ({tally.unanswered:,})" if tally.unanswered else f"{tally.ratio:.2f}"  # noqa: RUF001 - a dash


def table_row(name: str, tally: Tally, prices: PriceList) -> tuple[str, ...]:
    """One lane's figures as people read them, in the order of :data:`COLUMNS`."""
    kept = tally.retention
    return (
        name,
        f"{tally.requests:,}",
        f"{tally.fit:,}",
        f"{tally.batches:,}",
        f"{tally.reuse:.1%}",
        f"{tally.tokens:,}",
        f"{tally.saved:,}",
        prices.shown(tally.cost),
        shown_ratio(tally),
        f"{kept.kept / kept.needed:.1%}" if kept.needed else "-",
        f"{kept.recoverable / kept.needed:.1%}" if kept.needed else "-",
    )


def _sections(report: Report) -> Iterator[str]:
    yield _legend()
    for name in report.totals:
        if name in (UNMANAGED, SLIDING):
            continue
        yield f"<section>\n<h2>{escape(name)}</h2>"
        for rehearsal in report.drawn:
            lanes = {lane.name: lane for lane in rehearsal.lanes}
            if name in lanes and lanes[name].steps:
                yield from _conversation(rehearsal, lanes[name], lanes, report.prices)
        yield "</section>"


def _conversation(
    rehearsal: Rehearsal, lane: LaneResult, lanes: Mapping[str, LaneResult], prices: PriceList
) -> Iterator[str]:
    tally = lane.tally
    yield (
        f"<h3>{escape(rehearsal.id)}: {tally.requests} requests, {tally.batches} batches, {tally.reuse:.1%} reused, "
        f"{shown_ratio(tally)} of the cost unmanaged</h3>"
    )
    lines = [
        ("unmanaged", [step.total for step in lanes[UNMANAGED].steps]),
        ("sliding", [step.total for step in lanes[SLIDING].steps]),
        ("policy", [step.total for step in lane.steps]),
    ]
    labels = [prices.shown(tick) for tick in cost_scale(lines)]
    yield _figure("Tokens by bucket, request by request", buckets_chart(lane.steps, window=rehearsal.window))
    yield _figure("Cumulative cost of the prompts", cost_chart(lines, labels))
    yield _figure("Prefix reuse", reuse_chart(lane.steps))


def _figure(caption: str, svg: str) -> str:
    return f"<figure><figcaption>{escape(caption)}</figcaption>\n{svg}\n</figure>"


def _legend() -> str:
    keys = [f'<span>{_key(f"""<rect class="{name}" width="18" height="10"/>""")}{text}</span>' for name, text in LEGEND]
    stroke = '<line class="{}" x1="0" x2="18" y1="5" y2="5"/>'
    keys += [
        f"<span>{_key(stroke.format(name))}{text}</span>"
        for name, text in (("raw", "unmanaged"), ("sliding", "sliding window"), ("policy", "the policy"))
    ]
    keys.append(f'<span>{_key("""<polygon class="mark" points="4,0 14,0 9,9"/>""")}Weir acted</span>')
    return f'<p class="legend">{"".join(keys)}</p>'


def _key(shape: str) -> str:
    return f'<svg viewBox="0 0 18 10" aria-hidden="true">{shape}</svg>'
