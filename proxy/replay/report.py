"""Replayed conversations as one HTML page: nothing is fetched, nothing runs, every text is escaped."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files

from proxy.monitor.caching import PriceList
from proxy.replay.charts import buckets_chart, cost_chart, cost_scale, reuse_chart
from proxy.replay.play import Replayed, ScenarioResult, Tally
from proxy.replay.scenarios import SLIDING, UNMANAGED

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

STYLE = (files("proxy.replay") / "report.css").read_text(encoding="utf-8").strip()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayReport:
    """What a page shows: sums by scenario, and the conversations that are drawn (with their steps)."""

    title: str
    window: int
    reserve: int
    prices: PriceList
    totals: Mapping[str, Tally]
    drawn: Sequence[Replayed]


def render_report(report: ReplayReport) -> str:
    """The page."""
    body = "\n".join((*_header(report), *_table(report), *_sections(report)))
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
    """What a reader has to know of a scenario's figures, in a sentence each."""
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
    """One scenario's figures as people read them, in the order of :data:`COLUMNS`."""
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


def _sections(report: ReplayReport) -> Iterator[str]:
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
    labels = [prices.shown(tick) for tick in cost_scale(lines)]
    yield _figure("Tokens by bucket, request by request", buckets_chart(steps, window=replayed.window))
    yield _figure("Cumulative cost of the prompts", cost_chart(lines, labels))
    yield _figure("Prefix reuse", reuse_chart(steps))


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
