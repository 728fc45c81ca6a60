"""What a warm request of an agent costs on each endpoint: CPU of a served Weir, over that on chat.

    python -m benchmarks.endpoints [--rounds N]

Eight conversations at once, each seen before it is measured; the endpoints take turns.
"""

import argparse
import tempfile
from pathlib import Path
from statistics import median

from benchmarks.processes import Cores, Running, companion, weir
from benchmarks.speed import CONNECTIONS, WINDOW

CASES = ("agent", "responses", "messages")
SEEN = 4
MEASURED = 15
"""Requests of each conversation, together fewer than it has."""
PATIENCE = 60.0
MAX_RATIO = 1.2


def cost(case: str, turn: int, tested: Running, load: Running) -> float:
    """CPU milliseconds a request. Raises RuntimeError where an answer was wrong."""
    job = {
        "name": f"turn {turn}",
        "case": case,
        "connections": CONNECTIONS[case],
        "port": tested.port,
    }
    load.ask({**job, "seconds": PATIENCE, "most": SEEN})
    tested.settle()
    before = tested.cpu()
    report = load.ask({**job, "seconds": PATIENCE, "most": MEASURED})
    tested.settle()
    if report["failed"] or report["requests"] != CONNECTIONS[case] * MEASURED:
        raise RuntimeError(f"{case}: {report['failed']} of {report['requests']} answers were wrong")
    return 1000 * (tested.cpu() - before) / int(report["requests"])


def main() -> int:
    """Print a line for each endpoint; 1 where one is above :data:`MAX_RATIO`."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=12)
    rounds = parser.parse_args().rounds
    cores = Cores.split()
    with tempfile.TemporaryDirectory(prefix="weir-bench-") as home:
        place = Path(home)
        with (
            companion("stub", name="direct", cores=cores.others, home=place) as stub,
            companion("load", name="load", cores=cores.others, home=place) as load,
            weir(
                "weir", upstream=stub.port, window=WINDOW, cores=cores.tested, home=place
            ) as tested,
        ):
            for case in CASES:
                cost(case, -1, tested, load)  # nothing of a first one is warm
            turns = [
                {case: cost(case, turn, tested, load) for case in CASES} for turn in range(rounds)
            ]
    ratios = {case: median(turn[case] / turn["agent"] for turn in turns) for case in CASES}
    for case, ratio in ratios.items():
        print(f"{case:10} {median(turn[case] for turn in turns):7.2f} ms {ratio:6.2f} times chat")
    return int(max(ratios.values()) > MAX_RATIO)


if __name__ == "__main__":
    raise SystemExit(main())
