"""Retention through the product: which facts of recorded conversations are in the request when they
are needed.

    python -m benchmarks.retention [--set NAME] [--budget N] [--way fresh|growing] [--misses]
    [--json] python -m benchmarks.retention --variant NAME=PATH.yaml [--pareto FOLDER] python -m
    benchmarks.retention --ablate [NAME ...]

Every request goes through a served Weir with the policy ``balanced`` to an upstream that keeps what
it was sent; facts are looked up there. See benchmarks/README.md.
"""

import argparse
import asyncio
import json
import logging
import math
import multiprocessing
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from unittest.mock import patch

import yaml

from benchmarks.baselines import indexed, keep_last, matched
from benchmarks.curves import curve
from benchmarks.facts import (
    Case,
    Limit,
    altered,
    case_of,
    counted,
    displaced,
    limit_of,
    rows_of,
    shown,
)
from benchmarks.served import Ask, Chat, Override, play, size, tokens, written
from benchmarks.sets import SETS, load
from policies.quality.prices import PROVIDERS, request_cost
from policies.text import choice, extract
from proxy import app

PLANS: Mapping[str, tuple[float, ...]] = {
    "tau_airline": (3_000, 2_000, 1_800),
    "tau_airline_long": (4_000,),
    "swe_agent": (4_000,),
    "longmemeval_windows": (4_000, 2_500),
    "side_constraints": (1_500,),
    "side_constraints:middle": (1_500,),
    "side_constraints:end": (1_500,),
    "side_constraints:paraphrased": (1_500,),
    "canary_sessions": (300,),
    "wording": (0.3,),
    "wording_unseen": (0.3,),
}
OWN = Path(__file__).parent / "sets"
WAYS = ("fresh", "growing")
SWEEP = (0.7, 1.0, 1.5, 2.2)
PRICES = PROVIDERS["anthropic"]
STANDARD = "balanced"
CASCADE = (
    {"layer": "ingest_cap"},
    {"layer": "dedupe"},
    {"layer": "evict", "min_savings": 0.10, "must_reach": 0.5},
)
SIGNALS: Mapping[str, Override] = {
    str(each["layer"]): {
        "cascade": [*(other for other in CASCADE if other is not each), {"layer": "compact"}]
    }
    for each in CASCADE
}
"""Layers that ``--ablate`` switches off: by name keys of a policy that stand above those of
``balanced``.
"""
WEIGHTS: dict[str, Mapping[str, object]] = {
    "alone": {"ALONE": 1.0},
    "answer": {"ANSWER": 1.0},
    "asked": {"ASKED": 1.0},
    "brevity": {"BRIEFLY": 1e-9},
    "correction": {"CORRECTION": 0},
    "field": {"FIELD": 1.0},
    "few": {"MAX_FEW": 1.0},
    "identifier": {"IDENTIFIER": 1.0},
    "link": {"LINK": math.inf},
    "listed": {"LISTED": math.inf},
    "material": {"MATERIAL": math.inf},
    "name": {"NAME": 1.0},
    "number": {"NUMBER": 0.0},
    "picked": {"MAX_PICKED": -1},
    "question": {"QUESTION": 1.0},
    "reason": {"REASON": 0.2},
    "repeated": {"REPEATED": 1.0},
    "reused": {"REUSED": 0.0},
    "share": {"WHOLE": math.inf},
    "speaker": {"SPEAKERS": {}, "OTHER_SPEAKER": 1.0},
    "taken-up": {"TAKEN_UP": 1.0},
    "telling": {"TELLING": 0.0},
    "used": {"USED": 1.0, "LIKE_USED": 1.0},
    "whole": {"BREATH": 0},
}
"""Signals of the extract that ``--ablate`` switches off: by name constants of it, neutral."""
TALK = (
    "answer",
    "brevity",
    "correction",
    "few",
    "field",
    "link",
    "listed",
    "material",
    "number",
    "picked",
    "taken-up",
)
WEIGHTS["talk"] = {
    key: neutral for name in (*TALK, "whole") for key, neutral in WEIGHTS[name].items()
}
COLUMNS: Mapping[str, tuple[str, str]] = {
    "facts": ("facts", "d"),
    "in_window": ("window", ".1%"),
    "answerable": ("answer.", ".1%"),
    "tokens_sent": ("sent", ".0f"),
    "tokens_in": ("input", ".0f"),
    "keep_last": ("last", ".1%"),
    "index": ("index", ".1%"),
    "batches": ("batches", "d"),
    "reuse": ("reuse", ".1%"),
    "cost": ("cost", ".2f"),
    "stale": ("stale", "d"),
    "altered": ("altered", "d"),
    "altered_others": ("others", "d"),
    "refused": ("refused", "d"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A set at a limit, played in one way under one variant of the policy; ``forced`` whatever
    limit its rows name.

    It is read from ``path``, or made by :mod:`benchmarks.sets` where that is None.
    """

    path: Path | None
    name: str
    limit: Limit
    way: str
    variant: str = STANDARD
    override: Override = field(default_factory=dict)
    weights: Mapping[str, object] = field(default_factory=dict)
    forced: bool = False

    @property
    def place(self) -> str:
        return f"{self.name} {self.limit[0]}{self.limit[1]:g} {self.way}"

    def __str__(self) -> str:
        return self.place + ("" if self.variant == STANDARD else f" {self.variant}")

    def cases(self) -> Iterator[Case]:
        """The set's conversations that have this limit; ``name:place`` moves or rewords a side
        constraint.
        """
        place = self.name.partition(":")[2]
        for number, row in enumerate(rows_of(self.path) if self.path else load(self.name)):
            if self.forced or (limit_of(row) or self.limit) == self.limit:
                yield case_of(displaced(row, place, number) if place else row, self.limit, number)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table: figures by name, and behind them the facts that were ``missing``,
    quotes ``changed``.
    """

    plan: Plan
    figures: Mapping[str, float]
    missing: Sequence[str]
    changed: Sequence[str]


Played = Sequence[tuple[Case, Mapping[Ask, Chat]]]


def measure(plan: Plan) -> Row:
    """One row: what the product sends, beside both baselines at the same tokens."""
    start = time.monotonic()
    cases = list(plan.cases())
    growing = plan.way == "growing"
    conversations = [(case.messages, case.asks(growing=growing), case.window) for case in cases]
    with weighing(plan.weights):
        sent = asyncio.run(play(conversations, growing=growing, override=plan.override))
    played = list(zip(cases, sent, strict=True))
    missing: list[str] = []
    changed = [
        (case.name, *quote)
        for case, each in played
        for quote in altered(each.values(), case.messages)
    ]
    figures = {
        **looked_up(played, missing),
        **beside(played),
        **(economy(played) if growing else {}),
        "altered": sum(role == "user" for _, role, _ in changed),
        "altered_others": sum(role != "user" for _, role, _ in changed),
        "requests": sum(map(len, sent)),
        "refused": sum(not messages for each in sent for messages in each.values()),
        "seconds": time.monotonic() - start,
    }
    return Row(
        plan=plan, figures=figures, missing=missing, changed=[": ".join(each) for each in changed]
    )


@contextmanager
def weighing(weights: Mapping[str, object]) -> Iterator[None]:
    """Has the extract weigh otherwise meanwhile: in this process, so that no other one may plan."""
    with ExitStack() as stack:
        if weights:
            stack.enter_context(patch.object(app, "processes_for_plans", lambda: 0))
        for name, value in weights.items():
            stack.enter_context(
                patch.object(extract if hasattr(extract, name) else choice, name, value)
            )
        yield


def looked_up(played: Played, missing: list[str]) -> dict[str, float]:
    """Facts, and of these: in the window, answerable, and stale; ``missing`` is told what was not
    in the window.
    """
    facts = kept = answerable = stale = 0
    for case, sent in played:
        texts = {ask: written(sent[ask]) for ask in case.looked_at}
        own = {ask: shown(said, ask, recalled=False) for ask, said in texts.items()}
        whole = {ask: shown(said, ask, recalled=True) for ask, said in texts.items()}
        for fact, ask in ((each, at) for each in case.facts for at in each.needed):
            lost = fact.lost_in(own[ask])
            facts = facts + 1
            kept = kept + (not lost)
            answerable += not fact.lost_in(whole[ask])
            stale += fact.is_stale_in(whole[ask])
            if lost:
                missing.append(f"{case.name} at {ask.upto}: {lost}")
    count = max(1, facts)
    return {
        "facts": facts,
        "in_window": kept / count,
        "answerable": answerable / count,
        "stale": stale,
    }


def beside(played: Played) -> dict[str, float]:
    """Mean tokens of the requests that facts are looked up in, and what the baselines keep with as
    many.
    """
    looked = [(case, ask) for case, _ in played for ask in case.looked_at]
    requests = [ask.messages(case.messages) for case, ask in looked]
    count = max(1, len(requests))
    went_up = sum(size(sent[ask]) for case, sent in played for ask in case.looked_at)
    found = {"tokens_sent": went_up / count, "tokens_in": sum(map(size, requests)) / count}
    for name, baseline in (("keep_last", keep_last), ("index", indexed)):
        holds: list[bool] = []
        texts = matched(baseline, requests, went_up)
        for (case, ask), each in zip(looked, texts, strict=True):
            said = shown(each, ask, recalled=True)
            needed = (fact for fact in case.facts for at in fact.needed if at == ask)
            holds += [not fact.lost_in(said) for fact in needed]
        found[name] = sum(holds) / max(1, len(holds))
        found[f"{name}_tokens"] = sum(tokens(text) for each in texts for text in each) / count
    return found


def economy(played: Played) -> dict[str, float]:
    """Batches, prefix reuse and cost of growing conversations; questions are no part of them."""
    sent_tokens = reused = batches = 0
    paid = unmanaged = 0.0
    for case, sent in played:
        before: Chat = []
        known = 0
        for ask, now in ((ask, now) for ask, now in sent.items() if now and not ask.question):
            common = next(
                (i for i, (a, b) in enumerate(zip(before, now, strict=False)) if a != b),
                len(before),
            )
            whole = size(ask.messages(case.messages))
            forwarded = size(now)
            shared = size(now[:common])
            batches += common < len(before)
            sent_tokens = sent_tokens + forwarded
            reused = reused + shared
            paid += request_cost(PRICES, tokens=forwarded, cached=shared)
            unmanaged += request_cost(PRICES, tokens=whole, cached=known)
            before = now
            known = whole
    return {
        "batches": batches,
        "reuse": reused / max(1, sent_tokens),
        "cost": paid / max(1.0, unmanaged),
    }


def default_data() -> Path:
    """The shared data beside the checkout if present, else the small file beside the tests."""
    root = Path(__file__).resolve().parent.parent
    shared = root.parent / "shared" / "data"
    return shared if shared.is_dir() else root / "tests" / "policies" / "data"


def plans_of(data: Path, *, name: str | None, budget: float | None, way: str | None) -> list[Plan]:
    """The sets that are there, each at its limits and in both ways, unless one of them is asked
    for.
    """
    files = {known: data / f"{known.partition(':')[0]}.jsonl" for known in PLANS}
    own = {
        path.name.partition(".")[0]: path
        for path in sorted((*OWN.glob("*.jsonl"), *OWN.glob("*.jsonl.zst")))
    }
    made = dict.fromkeys(SETS)
    found: dict[str, tuple[Path | None, Sequence[Limit]]] = {
        known: (path, [("@", amount) for amount in PLANS[known]])
        for known, path in files.items()
        if path.exists()
    }
    for known, path in (
        (known, path) for known, path in {**made, **own}.items() if name in (None, known)
    ):
        limits = (limit_of(row) for row in (rows_of(path) if path else load(known)) if counted(row))
        found[known] = path, list(dict.fromkeys(limit for limit in limits if limit))
    return [
        Plan(path=path, name=known, limit=limit, way=each, forced=budget is not None)
        for known, (path, limits) in found.items()
        for limit in ([("@", budget)] if budget else limits)
        for each in WAYS
        if name in (None, known) and way in (None, each)
    ]


def run(plans: Sequence[Plan], workers: int) -> list[Row]:
    """The rows of plans, in their order; the longest are begun first."""
    if workers == 1:
        return [measure(plan) for plan in plans]
    order = sorted(
        range(len(plans)), key=lambda i: (plans[i].way == "fresh", plans[i].path is not None)
    )
    rows: dict[int, Row] = {}
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, spawn, logging.disable, (logging.CRITICAL,)) as pool:
        waiting = {pool.submit(measure, plans[i]): i for i in order}
        for done in as_completed(waiting):
            row = rows[waiting[done]] = done.result()
            print(
                f"{len(rows)}/{len(plans)} {row.plan}: {row.figures['seconds']:.0f} s",
                file=sys.stderr,
            )
    return [rows[i] for i in range(len(plans))]


def table(rows: Sequence[Row]) -> Iterator[str]:
    """The rows for people."""
    wide = max((len(str(row.plan)) for row in rows), default=3)
    yield f"{'set':{wide}} " + " ".join(f"{heading:>7}" for heading, _ in COLUMNS.values())
    for row in rows:
        cells = (
            format(row.figures[n], form) if n in row.figures else "-"
            for n, (_, form) in COLUMNS.items()
        )
        yield f"{row.plan!s:{wide}} " + " ".join(f"{cell:>7}" for cell in cells)


def losses(rows: Sequence[Row]) -> Iterator[str]:
    """What each signal adds, in points of facts in the window: set by set, then the most that it
    adds to any.
    """
    base = {
        row.plan.place: row.figures["in_window"] for row in rows if row.plan.variant == STANDARD
    }
    most: dict[str, float] = {}
    for plan, kept in (
        (row.plan, row.figures["in_window"]) for row in rows if row.plan.variant != STANDARD
    ):
        points = 100 * (base[plan.place] - kept)
        most[plan.variant] = max(points, most.get(plan.variant, points))
        yield f"{plan}: {0.0 - points:+.1f}"
    yield from (
        f"{name}: {0.0 - points:+.1f} points where it matters most" for name, points in most.items()
    )


def draw(rows: Sequence[Row], folder: Path) -> None:
    """A curve for each set and way: the variants, and the baselines at what ``balanced`` sent."""
    charts: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for plan, said in ((row.plan, row.figures) for row in rows):
        chart = charts.setdefault(f"{plan.name} {plan.way}", {})
        chart.setdefault(plan.variant, []).append((said["tokens_sent"], said["in_window"]))
        for name in ("keep_last", "index") if plan.variant == STANDARD else ():
            chart.setdefault(name.replace("_", "-"), []).append(
                (said[f"{name}_tokens"], said[name])
            )
    folder.mkdir(parents=True, exist_ok=True)
    for name, chart in charts.items():
        (folder / f"{name.replace(' ', '-').replace(':', '-')}.svg").write_text(
            curve(name, chart), encoding="utf-8"
        )


def variants_of(
    files: Sequence[str], ablated: Sequence[str] | None
) -> dict[str, tuple[Override, Mapping[str, object]]]:
    """The candidates by name: ``balanced``, the files (``NAME=PATH``), the signals to switch off;
    no name is all.
    """
    named = dict(each.partition("=")[::2] for each in files)
    chosen = {
        name: yaml.safe_load(Path(path).read_text(encoding="utf-8")) for name, path in named.items()
    }
    off = () if ablated is None else ablated or (*SIGNALS, *WEIGHTS)
    without = {f"without {name}": (SIGNALS.get(name, {}), WEIGHTS.get(name, {})) for name in off}
    return {
        STANDARD: ({}, {}),
        **{name: (policy, {}) for name, policy in chosen.items()},
        **without,
    }


def values(row: Row) -> dict[str, object]:
    """One row for programs."""
    plan = row.plan
    own = {"set": plan.name, "limit": plan.limit, "way": plan.way, "variant": plan.variant}
    return {**own, **row.figures, "missing": row.missing, "changed": row.changed}


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; exit 0."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=default_data())
    parser.add_argument("--json", action="store_true", help="rows as JSON instead of a table")
    parser.add_argument("--set", dest="name", help="only this set")
    parser.add_argument("--budget", type=float, help="this budget instead of the sets' own")
    parser.add_argument("--way", choices=WAYS, help="only this way of playing")
    parser.add_argument("--workers", type=int, default=2, help="processes")
    parser.add_argument(
        "--misses", action="store_true", help="list missing facts and altered quotes"
    )
    parser.add_argument(
        "--variant",
        action="append",
        default=[],
        help="NAME=PATH of YAML that stands above balanced",
    )
    signals = sorted((*SIGNALS, *WEIGHTS))
    parser.add_argument(
        "--ablate", nargs="*", choices=signals, help="what each signal adds; all for no name"
    )
    parser.add_argument(
        "--pareto", type=Path, help="a folder for curves of what is kept against tokens sent"
    )
    given = parser.parse_args(arguments)
    plans = plans_of(given.data, name=given.name, budget=given.budget, way=given.way)
    if given.pareto:
        swept = (
            replace(p, limit=(p.limit[0], round(p.limit[1] * f, 2)), forced=True)
            for p in plans
            for f in SWEEP
        )
        plans = list({plan.place: plan for plan in swept}.values())
    variants = variants_of(given.variant, given.ablate)
    rows = run(
        [
            replace(p, variant=v, override=o, weights=w)
            for p in plans
            for v, (o, w) in variants.items()
        ],
        given.workers,
    )
    if given.pareto:
        draw(rows, given.pareto)
    lines = [*table(rows), *(() if given.ablate is None else losses(rows))]
    print(json.dumps([values(row) for row in rows], indent=1) if given.json else "\n".join(lines))
    if given.misses:
        print(
            "\n".join(f"{r.plan}: {said}" for r in rows for said in (*r.missing, *r.changed)),
            file=sys.stderr,
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
