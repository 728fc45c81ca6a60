"""Whether speed is still what was committed: calls and CPU of three cases, memory, modules that a
start loads.

    python -m benchmarks.gate [--accept]

Exits with 1 where a figure is above the committed one (``gate.json``) by more than its share,
twice. ``--accept`` commits to what is measured now. Calls per request and imports are counted, and
no machine counts more than another, so their shares are narrow. CPU is compared with the floor's
beside it, on the machine that it was committed on: the same code is 4.6 times the floor's on one
machine and 6.7 on another, where system calls are cheap. Its share is wide, and it finds what calls
do not show, such as a costly call into C.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Collection
from pathlib import Path

from rich.console import Console

from benchmarks.processes import Cores, companion, weir
from benchmarks.speed import WINDOW, run

FILE = Path(__file__).parent / "gate.json"
CASES = ("small", "agent", "stream")
SECONDS = 0.25
ROUNDS = 11
COUNTED = {"small": 300, "agent": 100, "stream": 8}
WARM_UP = 10
PATIENCE = 30.0
CALLS = {f"{case}_calls": case for case in CASES}
SHARES = {
    **dict.fromkeys(CASES, 1.3),
    **dict.fromkeys(CALLS, 1.05),
    "ready_mb": 1.1,
    "imports": 1.03,
}


def measured(names: Collection[str], console: Console) -> dict[str, float]:
    """The figures of these names. Raises RuntimeError where an answer was wrong."""
    result = run(
        [case for case in CASES if case in names],
        seconds=SECONDS,
        rounds=ROUNDS,
        otlp=False,
        console=console,
    )
    if result["wrong"]:
        raise RuntimeError("; ".join(result["wrong"]))
    rows = (row for row in result["rows"] if row["subject"] == "weir")
    found = {row["case"]: min(row["ratio"], row["ratio_of_best"]) for row in rows}
    found |= {name: _calls(case) for name, case in CALLS.items() if name in names}
    if "ready_mb" in names:
        found["ready_mb"] = result["rss_mb"]["ready"]
    if "imports" in names:
        found["imports"] = _imports()
    return found


def _calls(case: str) -> float:
    """How many functions the main thread calls for one request of a case, one after the other on
    one connection.
    """
    cores = Cores.split()
    with tempfile.TemporaryDirectory(prefix="weir-gate-") as home:
        place = Path(home)
        out = place / "calls"
        with (
            companion("stub", name="direct", cores=cores.others, home=place) as stub,
            companion("load", name="load", cores=cores.others, home=place) as load,
            weir(
                "weir",
                upstream=stub.port,
                window=WINDOW,
                cores=cores.tested,
                home=place,
                profile=("calls", out),
            ) as tested,
        ):
            job = {
                "name": "weir",
                "case": case,
                "connections": 1,
                "port": tested.port,
                "seconds": PATIENCE,
            }
            load.ask({**job, "most": WARM_UP})
            with tested.profiled(out):
                report = load.ask({**job, "most": COUNTED[case]})
        if report["failed"]:
            raise RuntimeError("; ".join(report["errors"]))
        return float(out.read_text()) / float(report["requests"])


def _imports() -> int:
    """How many modules a start loads until it is ready."""
    cores = Cores.split()
    with tempfile.TemporaryDirectory(prefix="weir-gate-") as home:
        place = Path(home)
        with companion("stub", name="direct", cores=cores.others, home=place) as stub:
            os.environ["PYTHONPROFILEIMPORTTIME"] = "1"
            try:
                with weir(
                    "weir", upstream=stub.port, window=WINDOW, cores=cores.tested, home=place
                ):
                    pass
            finally:
                del os.environ["PYTHONPROFILEIMPORTTIME"]
        return sum(
            line.startswith("import time:")
            for line in (place / "weir.log").read_text().splitlines()
        )


def main() -> int:
    """Measure and compare; 1 where something has become too expensive."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--accept", action="store_true", help="write what is measured now to gate.json"
    )
    accept = parser.parse_args().accept
    console = Console(width=120)
    found = measured(SHARES, console)
    if accept:
        FILE.write_text(
            json.dumps({name: round(value, 2) for name, value in found.items()}, indent=1) + "\n"
        )
        return 0
    committed = json.loads(FILE.read_text())
    most = {name: committed[name] * share for name, share in SHARES.items()}
    if above := [name for name, value in found.items() if value > most[name]]:
        console.print(f"once more, for the machine may have been busy: {', '.join(above)}")
        found |= measured(above, console)
    for name, value in found.items():
        verdict = "ok" if value <= most[name] else "[red]too much"
        console.print(
            f"{name}: {value:.2f}, committed {committed[name]:.2f}, at most {most[name]:.2f}:"
            f" {verdict}"
        )
    return 1 if any(value > most[name] for name, value in found.items()) else 0


if __name__ == "__main__":
    sys.exit(main())
