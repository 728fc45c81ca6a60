"""Speed: what Weir costs beside a relay that does nothing, both measured in one run, in turns.

    python -m benchmarks.speed [--cases small,agent,stream,alone,growth,cold] [--seconds N]
    [--rounds N] [--otlp]
                               [--peer NAME='COMMAND' …] [--json FILE]

CPU is the proxy process's own, user and system, per request; a ratio is taken of two rounds that
follow each other. ``best`` is the cheapest round over the floor's cheapest; ``held`` the longest
wait for ``/healthz`` in the best round, ms. ``--peer`` measures another proxy beside them, started
as ``benchmarks.peers`` says. Exits with 1 if any answer was wrong; a target that is missed is shown
and is no failure.
"""

import argparse
import json
import os
import platform
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from time import strftime
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.processes import ROOT, Cores, Running, companion, other, weir

STREAMS = {"stream": 64, "responses stream": 64, "messages stream": 64}
CONNECTIONS = {"small": 32, "agent": 8, "responses": 8, "messages": 8, **STREAMS}
CASES = (*CONNECTIONS, "alone", "growth", "cold")
WINDOW = 200_000
WIDE_WINDOW = 400_000
COLD_REQUESTS = 8
COLD_ROUNDS = 4
WARM_UP = 1.0
STREAM_SECONDS = 0.5
MAX_RATIO = {"small": 2.0, "agent": 2.5, "stream": 1.5}
MAX_OF_PEER = {"small": 0.25, "agent": 0.45, "stream": 0.40}
MAX_GROWTH = 1.5
MAX_ALONE_MS = 2.0
MAX_FIRST_BYTE_MS = 1.0
MAX_COLD_MS = 40.0
MAX_HELD_MS = 10.0
MAX_START_S = 1.5
MAX_READY_MB = 180.0
MAX_MB = 250.0


@dataclass(slots=True)
class Bench:
    """The processes of one run, and what was measured with them."""

    load: Running
    rounds: int
    seconds: float
    samples: list[dict[str, Any]] = field(default_factory=list)

    def measure(
        self,
        subject: Running,
        case: str,
        *,
        label: str,
        connections: int,
        seconds: float,
        **more: object,
    ) -> dict[str, Any]:
        """One round: the load's figures and the CPU ms per request of ``subject``."""
        before = subject.cpu()
        job = {"name": subject.name, "case": case, "connections": connections, "seconds": seconds}
        report = self.load.ask({**job, "port": subject.port, **more})
        subject.settle()
        spent = subject.cpu() - before
        sample = {
            "label": label,
            "subject": subject.name,
            **report,
            "cpu_ms": round(1000 * spent / max(1, report["requests"]), 4),
        }
        self.samples.append(sample)
        return sample

    def in_turns(
        self, subjects: Sequence[Running], case: str, *, label: str, connections: int, **more: Any
    ) -> None:
        """``rounds`` rounds of each subject, one after the other, every second time the other way
        round.
        """
        seconds = self.seconds
        if case in STREAMS:
            seconds = STREAM_SECONDS
            more = {**more, "spread": 0.8 * STREAM_SECONDS}
        for subject in subjects:
            self.measure(
                subject,
                case,
                label=f"{label} (warm-up)",
                connections=connections,
                seconds=WARM_UP,
                **more,
            )
        for turn in range(self.rounds):
            for subject in subjects if turn % 2 == 0 else reversed(subjects):
                self.measure(
                    subject, case, label=label, connections=connections, seconds=seconds, **more
                )

    def of(self, label: str, subject: str, key: str) -> list[float]:
        """One figure of every round that has it."""
        return [
            s[key]
            for s in self.samples
            if s["label"] == label and s["subject"] == subject and s.get(key) is not None
        ]

    def middle(self, label: str, subject: str, key: str) -> float | None:
        """The median over the rounds, None without any."""
        values = self.of(label, subject, key)
        return median(values) if values else None

    def ratios(self, label: str, subject: str, *, to: str = "floor") -> list[float]:
        """CPU per request over that of the round of ``to`` beside it, unless that did nothing."""
        beside = zip(self.of(label, subject, "cpu_ms"), self.of(label, to, "cpu_ms"), strict=False)
        return [a / b for a, b in beside if b]

    def wrong(self) -> list[str]:
        """What was wrong with answers, warm-ups included."""
        return [
            f"{s['label']}, {s['subject']}: {s['failed']} wrong, {s['errors'][:2]}"
            for s in self.samples
            if s["failed"]
        ]


@dataclass(frozen=True, slots=True)
class Target:
    """One figure of quality.md and what it should be at most."""

    name: str
    value: float
    most: float
    unit: str

    @property
    def met(self) -> bool:
        """Whether it is."""
        return self.value <= self.most


def run(
    cases: Sequence[str],
    *,
    seconds: float,
    rounds: int,
    otlp: bool,
    console: Console,
    peers: Mapping[str, str] = {},
) -> dict[str, Any]:
    """Everything that was measured, as one JSON object."""
    cores = Cores.split()
    with tempfile.TemporaryDirectory(prefix="weir-bench-") as home, ExitStack() as stack:
        place = Path(home)
        say = console.log

        def beside(module: str, *arguments: str, name: str, on: frozenset[int]) -> Running:
            return stack.enter_context(
                companion(module, *arguments, name=name, cores=on, home=place)
            )

        stub = beside("stub", name="direct", on=cores.others)
        load = beside("load", name="load", on=cores.others)
        floor = beside(
            "floor", "--upstream", f"http://127.0.0.1:{stub.port}", name="floor", on=cores.tested
        )
        tested = stack.enter_context(
            weir("weir", upstream=stub.port, window=WINDOW, cores=cores.tested, home=place)
        )
        say(f"weir ready after {tested.ready_s:.2f} s, {tested.rss_mb():.0f} MB")
        memory = {"ready": tested.rss_mb()}
        subjects = [floor, tested]
        if otlp:
            subjects.append(
                stack.enter_context(
                    weir(
                        "weir+otlp",
                        upstream=stub.port,
                        window=WINDOW,
                        cores=cores.tested,
                        home=place,
                        otlp=stub.port,
                    )
                )
            )
        for name, command in peers.items():
            subjects.append(
                stack.enter_context(
                    other(
                        name,
                        command,
                        upstream=stub.port,
                        window=WINDOW,
                        cores=cores.tested,
                        home=place,
                    )
                )
            )
        bench = Bench(load, rounds, seconds)
        for case in cases:
            say(f"{case} …")
            if case in CONNECTIONS:
                compared = [stub, *subjects] if case in STREAMS else subjects
                bench.in_turns(compared, case, label=case, connections=CONNECTIONS[case])
            elif case == "alone":
                bench.in_turns([stub, *subjects], "agent", label=case, connections=1)
            elif case == "cold":
                _cold(bench, [stub, *subjects])
            else:
                _growth(bench, stub, cores, place)
            memory[case] = tested.rss_mb()
        memory["peak"] = tested.peak_mb()
        figures = _figures(bench, cases, tested, floor, memory, peers=tuple(peers))
        return {
            "at": strftime("%Y-%m-%dT%H:%M:%S%z"),
            "machine": {
                "cpus": os.cpu_count(),
                "python": platform.python_version(),
                "system": platform.platform(),
            },
            "seconds": seconds,
            "rounds": rounds,
            **figures,
            "wrong": bench.wrong(),
            "samples": bench.samples,
        }


def _cold(bench: Bench, subjects: Sequence[Running]) -> None:
    """Conversations that nobody has ever seen, one after the other, and how long the event loop is
    held meanwhile.
    """
    for _ in range(COLD_ROUNDS):
        for subject in subjects:
            bench.measure(
                subject,
                "cold",
                label="cold",
                connections=1,
                seconds=20.0,
                most=COLD_REQUESTS,
                pulse=True,
            )


def _growth(bench: Bench, stub: Running, cores: Cores, place: Path) -> None:
    """The same new content after 200 messages and after 400, for a Weir with room for both."""
    with weir(
        "wide", upstream=stub.port, window=WIDE_WINDOW, cores=cores.tested, home=place
    ) as wide:
        for messages in (200, 400):
            label = f"growth {messages} (warm-up)"
            bench.measure(
                wide, "agent", label=label, connections=4, seconds=WARM_UP, messages=messages
            )
        for _ in range(bench.rounds):
            for messages in (200, 400):
                bench.measure(
                    wide,
                    "agent",
                    label=f"growth {messages}",
                    connections=4,
                    seconds=bench.seconds,
                    messages=messages,
                )


def _figures(
    bench: Bench,
    cases: Sequence[str],
    tested: Running,
    floor: Running,
    memory: Mapping[str, float],
    *,
    peers: Sequence[str],
) -> dict[str, Any]:
    """Figures per case and the targets they are held against."""
    rows = [_row(bench, label, subject) for label, subject in _measured(bench)]
    targets = [
        Target(
            f"{case}: CPU per request over the floor's", median(ratios), MAX_RATIO[case], "times"
        )
        for case in cases
        if case in MAX_RATIO and (ratios := bench.ratios(case, "weir"))
    ]
    targets += [
        Target(
            f"{case}: CPU per request over that of {peer}",
            median(ratios),
            MAX_OF_PEER[case],
            "times",
        )
        for case in cases
        for peer in peers
        if case in MAX_OF_PEER and (ratios := bench.ratios(case, "weir", to=peer))
    ]
    if "alone" in cases:
        added = _added(bench, "alone", "p50_ms")
        targets.append(Target("agent: added p50 at one connection", added, MAX_ALONE_MS, "ms"))
    for case in (each for each in STREAMS if each in cases):
        added = _added(bench, case, "first_byte_p50_ms")
        targets.append(Target(f"{case}: first byte after direct's", added, MAX_FIRST_BYTE_MS, "ms"))
    if "growth" in cases:
        short, long = (bench.of(f"growth {n}", "wide", "cpu_ms") for n in (200, 400))
        targets.append(
            Target(
                "growth: 400 messages over 200",
                median(b / a for a, b in zip(short, long, strict=True)),
                MAX_GROWTH,
                "times",
            )
        )
    if "cold" in cases:
        targets.append(
            Target("cold: added p50", _added(bench, "cold", "p50_ms"), MAX_COLD_MS, "ms")
        )
        held = min(bench.of("cold", "weir", "pulse_max_ms"), default=0.0)
        targets.append(
            Target("cold: event loop held, at most, best round", held, MAX_HELD_MS, "ms")
        )
    targets.append(Target("start to ready", tested.ready_s, MAX_START_S, "s"))
    targets.append(
        Target("RSS when ready, a vocabulary loaded", memory["ready"], MAX_READY_MB, "MB")
    )
    targets.append(Target("RSS after it all", tested.rss_mb(), MAX_MB, "MB"))
    return {
        "rows": rows,
        "targets": [
            {
                "name": t.name,
                "value": round(t.value, 3),
                "most": t.most,
                "unit": t.unit,
                "met": t.met,
            }
            for t in targets
        ],
        "rss_mb": {
            **{k: round(v, 1) for k, v in memory.items()},
            "floor": round(floor.rss_mb(), 1),
        },
    }


def _measured(bench: Bench) -> Iterator[tuple[str, str]]:
    """Each label and subject that was measured, in order, warm-ups left out."""
    pairs = dict.fromkeys((s["label"], s["subject"]) for s in bench.samples)
    return (pair for pair in pairs if "warm-up" not in pair[0])


def _added(bench: Bench, label: str, key: str) -> float:
    """A figure of Weir's less the direct one, the median over pairs of rounds."""
    pairs = zip(bench.of(label, "weir", key), bench.of(label, "direct", key), strict=False)
    return median([a - b for a, b in pairs] or [float("nan")])


def _row(bench: Bench, label: str, subject: str) -> dict[str, Any]:
    ratios = bench.ratios(label, subject) if subject != "direct" else []
    headers: dict[str, str] = next(
        (s["headers"] for s in bench.samples if s["label"] == label and s["subject"] == subject), {}
    )
    return {
        "case": label,
        "subject": subject,
        "requests": sum(int(n) for n in bench.of(label, subject, "requests")),
        "cpu_ms": bench.middle(label, subject, "cpu_ms") if subject != "direct" else None,
        "ratio": round(median(ratios), 3) if ratios else None,
        "ratio_of_best": _best(bench, label, subject) if ratios else None,
        "ratio_range": [round(min(ratios), 3), round(max(ratios), 3)] if ratios else None,
        "p50_ms": bench.middle(label, subject, "p50_ms"),
        "p99_ms": bench.middle(label, subject, "p99_ms"),
        "first_byte_p50_ms": bench.middle(label, subject, "first_byte_p50_ms"),
        "pulse_max_ms": min(bench.of(label, subject, "pulse_max_ms"), default=None),
        "tokens": headers.get("x-weir-tokens"),
        "actions": headers.get("x-weir-actions"),
    }


def _best(bench: Bench, label: str, subject: str) -> float:
    """The cheapest round over the floor's cheapest: what other work on the machine disturbs
    least.
    """
    return round(
        min(bench.of(label, subject, "cpu_ms")) / min(bench.of(label, "floor", "cpu_ms")), 3
    )


def show(result: Mapping[str, Any], console: Console) -> None:
    """Print the tables."""
    table = Table(title="CPU ms per request, in turns", padding=(0, 0))
    for name in (
        "case",
        "subject",
        "n",
        "CPU",
        "/floor",
        "range",
        "best",
        "p50 ms",
        "p99 ms",
        "1st byte",
        "held",
    ):
        table.add_column(
            name, justify="left" if name in ("case", "subject") else "right", no_wrap=True
        )
    for row in result["rows"]:
        low, high = row["ratio_range"] or (None, None)
        table.add_row(
            row["case"],
            row["subject"],
            str(row["requests"]),
            _number(row["cpu_ms"], 3),
            _number(row["ratio"], 2),
            "" if low is None else f"{low:.2f}-{high:.2f}",
            _number(row["ratio_of_best"], 2),
            _number(row["p50_ms"], 2),
            _number(row["p99_ms"], 2),
            _number(row["first_byte_p50_ms"], 2),
            _number(row["pulse_max_ms"], 1),
        )
    console.print(table)
    aims = Table(title="Targets")
    for name in ("", "measured", "at most", "met"):
        aims.add_column(name, justify="left" if name in ("", "met") else "right")
    for target in result["targets"]:
        unit = target["unit"]
        aims.add_row(
            target["name"],
            f"{target['value']:.2f} {unit}",
            f"{target['most']:g} {unit}",
            "[green]yes" if target["met"] else "[red]no",
        )
    console.print(aims)
    console.print(
        "RSS, MB: " + ", ".join(f"{name} {value:.0f}" for name, value in result["rss_mb"].items())
    )
    for wrong in result["wrong"]:
        console.print(f"[red]{wrong}", markup=True)


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def main() -> int:
    """Measure, show, write; 1 if an answer was wrong, 2 if the arguments were."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.speed",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--cases", default=",".join(CASES), help=f"of {','.join(CASES)}; all by default"
    )
    parser.add_argument("--seconds", type=float, default=0.6, help="length of a round (0.6)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each subject (5)")
    parser.add_argument(
        "--otlp", action="store_true", help="measure also a Weir that exports its traces"
    )
    parser.add_argument(
        "--peer",
        action="append",
        default=[],
        metavar="NAME=COMMAND",
        help="measure also another proxy",
    )
    parser.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="where to write; under benchmarks/results by default",
    )
    arguments = parser.parse_args()
    cases = [name for name in arguments.cases.split(",") if name]
    if unknown := [name for name in cases if name not in CASES]:
        parser.error(f"there is no case {unknown[0]!r}; there are: {', '.join(CASES)}")
    peers = dict(given.split("=", 1) for given in arguments.peer)
    console = Console(width=max(120, Console().width))
    result = run(
        cases,
        seconds=arguments.seconds,
        rounds=arguments.rounds,
        otlp=arguments.otlp,
        peers=peers,
        console=console,
    )
    show(result, console)
    path = (
        arguments.json
        or ROOT / "benchmarks" / "results" / f"speed-{strftime('%Y%m%d-%H%M%S')}.json"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    console.print(f"written to {path}")
    return 1 if result["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
