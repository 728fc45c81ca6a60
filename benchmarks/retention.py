"""Retention through the product: which facts of recorded conversations are in the request when they are needed.

    python -m benchmarks.retention [--set NAME] [--budget N] [--way fresh|growing] [--misses] [--json] [--workers N]
    python -m benchmarks.retention --pareto DIR [--variant NAME=PATH.yaml ...]
    python -m benchmarks.retention --ablate [NAME ...]

Every request goes through a served Weir with the policy ``balanced`` to an upstream that keeps what it was sent, and
facts are looked up there. See benchmarks/README.md.
"""

import argparse
import asyncio
import json
import logging
import multiprocessing
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.baselines import indexed, keep_last, matched
from benchmarks.facts import Case, case_of, displaced, is_verbatim, lines_of, quotes, shown
from benchmarks.served import TOKENS, Ask, Chat, Override, play, window_for, written
from policies.advise import PROVIDERS, request_cost

PLANS: tuple[tuple[str, float], ...] = (
    ("tau_airline", 3_000),
    ("tau_airline", 2_000),
    ("tau_airline", 1_800),
    ("tau_airline_long", 4_000),
    ("swe_agent", 4_000),
    ("longmemeval_windows", 4_000),
    ("longmemeval_windows", 2_500),
    ("side_constraints", 1_500),
    ("side_constraints:middle", 1_500),
    ("side_constraints:end", 1_500),
    ("side_constraints:paraphrased", 1_500),
    ("canary_sessions", 300),
    ("wording", 0.3),
    ("wording_unseen", 0.3),
)
OWN = Path(__file__).parent / "sets"
WAYS = ("fresh", "growing")
PRICES = PROVIDERS["anthropic"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A set at a budget, played in one way under one variant of the policy."""

    path: Path
    name: str
    budget: float | None
    way: str
    variant: str = "balanced"
    override: Override = field(default_factory=dict)

    def cases(self) -> Iterator[Case]:
        """The conversations of the set; ``name:place`` moves or rewords a side constraint."""
        place = self.name.partition(":")[2]
        for number, row in enumerate(lines_of(self.path)):
            made = displaced(row, place, number) if place else row
            budget = self.budget or row["meta"]["budget"]
            yield case_of(made, name=str(row["meta"].get("id", number)), budget=budget)


@dataclass(slots=True, kw_only=True)
class Row:
    """One line of the table; shares of facts, tokens of the requests that facts are looked up in."""

    name: str
    budget: float | None
    way: str
    variant: str
    facts: int = 0
    in_window: float = 0.0
    answerable: float = 0.0
    tokens_sent: float = 0.0
    tokens_in: float = 0.0
    keep_last: float = 0.0
    keep_last_tokens: float = 0.0
    index: float = 0.0
    index_tokens: float = 0.0
    requests: int = 0
    refused: int = 0
    batches: int | None = None
    reuse: float | None = None
    cost: float | None = None
    stale: int = 0
    altered: int = 0
    altered_others: int = 0
    seconds: float = 0.0
    misses: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)


Played = Sequence[tuple[Case, Mapping[Ask, Chat]]]


def measure(plan: Plan) -> Row:
    """One row: what the product sends, beside both baselines at the same tokens."""
    start = time.monotonic()
    row = Row(name=plan.name, budget=plan.budget, way=plan.way, variant=plan.variant)
    cases = list(plan.cases())
    growing = plan.way == "growing"
    asks = [case.grown if growing else case.looked_at for case in cases]
    windows = [window_for(case.budget) for case in cases]
    histories = [(case.messages, each) for case, each in zip(cases, asks, strict=True)]
    sent = asyncio.run(play(histories, windows, growing=growing, override=plan.override))
    played = list(zip(cases, sent, strict=True))
    row.requests = sum(map(len, sent))
    row.refused = sum(not messages for each in sent for messages in each.values())
    _look_up(played, row)
    _beside(played, row)
    if growing:
        _economy(played, row)
    _check_quotes(played, row)
    row.seconds = time.monotonic() - start
    return row


def _look_up(played: Played, row: Row) -> None:
    kept = answerable = 0
    for case, sent in played:
        texts = {ask: [written(message) for message in sent[ask]] for ask in case.looked_at}
        without = {ask: shown(said, ask, recalled=False) for ask, said in texts.items()}
        whole = {ask: shown(said, ask, recalled=True) for ask, said in texts.items()}
        for fact in case.facts:
            for ask in fact.needed:
                row.facts += 1
                missing = [needle for needle in fact.needles if needle not in without[ask]]
                kept += not missing
                answerable += all(needle in whole[ask] for needle in fact.needles)
                old = any(word in whole[ask] for word in fact.superseded)
                row.stale += old and not all(word in whole[ask] for word in fact.later)
                if missing:
                    row.misses.append(f"{case.name} at {ask.upto}: {missing}")
    row.in_window, row.answerable = kept / max(1, row.facts), answerable / max(1, row.facts)


def _beside(played: Played, row: Row) -> None:
    looked = [(case, ask) for case, _ in played for ask in case.looked_at]
    requests = [ask.messages(case.messages) for case, ask in looked]
    count = max(1, len(requests))
    went_up = sum(TOKENS.of([written(m) for m in sent[ask]]) for case, sent in played for ask in case.looked_at)
    row.tokens_sent = went_up / count
    row.tokens_in = sum(TOKENS.of([written(m) for m in messages]) for messages in requests) / count
    row.keep_last, row.keep_last_tokens = _kept_by(matched(keep_last, requests, went_up), looked, row.facts)
    row.index, row.index_tokens = _kept_by(matched(indexed, requests, went_up), looked, row.facts)


def _kept_by(sent: Sequence[list[str]], looked: Sequence[tuple[Case, Ask]], facts: int) -> tuple[float, float]:
    """The share of facts that these texts hold, and their mean tokens."""
    kept = 0
    for texts, (case, ask) in zip(sent, looked, strict=True):
        said = shown(texts, ask, recalled=True)
        kept += sum(all(n in said for n in fact.needles) for fact in case.facts for at in fact.needed if at == ask)
    return kept / max(1, facts), sum(map(TOKENS.of, sent)) / max(1, len(sent))


def _economy(played: Played, row: Row) -> None:
    """Batches, prefix reuse and cost of growing conversations; questions at their end are no part of it."""
    tokens = same = batches = 0
    paid = unmanaged = 0.0
    for case, sent in played:
        before: list[str] = []
        known = 0
        for ask, messages in sent.items():
            if ask.question or not messages:
                continue
            now = [json.dumps(message, sort_keys=True) for message in messages]
            common = next((i for i, (a, b) in enumerate(zip(before, now, strict=False)) if a != b), len(before))
            batches += common < len(before)
            size = TOKENS.of([written(m) for m in messages])
            shared = TOKENS.of([written(m) for m in messages[:common]])
            tokens, same = tokens + size, same + shared
            paid += request_cost(PRICES, tokens=size, cached=shared)
            whole = TOKENS.of([written(m) for m in ask.messages(case.messages)])
            unmanaged += request_cost(PRICES, tokens=whole, cached=known)
            before, known = now, whole
    row.batches, row.reuse, row.cost = batches, same / max(1, tokens), paid / max(1.0, unmanaged)


def _check_quotes(played: Played, row: Row) -> None:
    """Count the lines that put other words into somebody's mouth, each once a conversation."""
    for case, sent in played:
        said = {quote for messages in sent.values() for m in messages for quote in quotes(written(m))}
        for role, words in sorted(said):
            if not is_verbatim(role, words, case.messages):
                row.altered += role == "user"
                row.altered_others += role != "user"
                row.changed.append(f"{case.name}: {role}: {words}")


def default_data() -> Path:
    """The shared data beside the checkout if present, else the small file beside the tests."""
    root = Path(__file__).resolve().parent.parent
    shared = root.parent / "shared" / "data"
    return shared if shared.is_dir() else root / "tests" / "policies" / "data"


def sets(data: Path, *, name: str | None, budget: int | None) -> Iterator[tuple[Path, str, float | None]]:
    """Files, names and budgets of the sets that are there; None for budgets that the rows say."""
    found: dict[tuple[str, float | None], Path] = {}
    for known, tokens in PLANS:
        path = data / f"{known.partition(':')[0]}.jsonl"
        if path.exists():
            found[known, budget or tokens] = path
    for path in sorted((*OWN.glob("*.jsonl"), *OWN.glob("*.jsonl.zst"))):
        found[path.name.partition(".")[0], budget] = path
    yield from ((path, known, tokens) for (known, tokens), path in found.items() if name in (None, known))


def run(plans: Sequence[Plan], workers: int) -> list[Row]:
    """The rows of plans, in their order; the longest are begun first."""
    if workers == 1:
        return [measure(plan) for plan in plans]
    order = sorted(range(len(plans)), key=lambda i: (plans[i].way == "fresh", -plans[i].path.stat().st_size))
    rows: dict[int, Row] = {}
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, spawn, logging.disable, (logging.CRITICAL,)) as pool:
        waiting = {pool.submit(measure, plans[i]): i for i in order}
        for done in as_completed(waiting):
            row = rows[waiting[done]] = done.result()
            said = f"{row.name} @{row.budget} {row.way} {row.variant}: {row.seconds:.0f} s"
            print(f"{len(rows)}/{len(plans)} {said}", file=sys.stderr)
    return [rows[i] for i in range(len(plans))]


HEADER = (
    f"{'set':28} {'budget':>6} {'way':7} {'facts':>5} {'window':>6} {'answ.':>6} {'sent':>6} {'input':>6} {'last':>6} "
    f"{'index':>6} {'bat.':>5} {'reuse':>6} {'cost':>5} {'stale':>5} {'altered':>7} {'others':>6} {'refused':>7}"
)


def line(row: Row) -> str:
    """One row for people."""
    economy = ["-" if v is None else f for v, f in ((row.batches, f"{row.batches}"),)]
    reuse = "-" if row.reuse is None else f"{row.reuse:.1%}"
    cost = "-" if row.cost is None else f"{row.cost:.2f}"
    return (
        f"{row.name:28} {row.budget or '-':>6} {row.way:7} {row.facts:5} {row.in_window:6.1%} {row.answerable:6.1%} "
        f"{row.tokens_sent:6.0f} {row.tokens_in:6.0f} {row.keep_last:6.1%} {row.index:6.1%} {economy[0]:>5} "
        f"{reuse:>6} {cost:>5} {row.stale:5} {row.altered:7} {row.altered_others:6} {row.refused:7}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; exit 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=default_data())
    parser.add_argument("--json", action="store_true", help="rows as JSON instead of a table")
    parser.add_argument("--set", dest="name", help="only this set")
    parser.add_argument("--budget", type=int, help="this budget instead of the sets' own")
    parser.add_argument("--way", choices=WAYS, help="only this way of playing")
    parser.add_argument("--workers", type=int, default=2, help="processes")
    parser.add_argument(
        "--misses", action="store_true", help="list facts that were missing and quotes that were altered"
    )
    options = parser.parse_args(arguments)
    plans = [
        Plan(path=path, name=name, budget=budget, way=way)
        for path, name, budget in sets(options.data, name=options.name, budget=options.budget)
        for way in WAYS
        if options.way in (None, way)
    ]
    rows = run(plans, options.workers)
    if options.json:
        print(json.dumps([asdict(row) for row in rows], indent=1))
    else:
        print("\n".join((HEADER, *map(line, rows))))
    if options.misses:
        for row in rows:
            for missing in (*row.misses, *row.changed):
                print(f"{row.name} @{row.budget} {row.way}: {missing}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
