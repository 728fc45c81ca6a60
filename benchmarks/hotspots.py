"""Where Weir's CPU goes, case by case: time by line and by function, per request.

    python -m benchmarks.hotspots [--cases small,agent,stream] [--seconds N] [--top N] [--keep DIR]

The main thread is sampled; what other threads used is shown beside it.
"""

import argparse
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.processes import ROOT, Cores, Running, companion, weir
from benchmarks.speed import CONNECTIONS, WINDOW

CASES = tuple(CONNECTIONS)
WARM_UP = 2.0
EVERYWHERE = 0.99


def profile(case: str, *, seconds: float, top: int, keep: Path | None, console: Console) -> None:
    """Sample one case and print it."""
    cores = Cores.split()
    with tempfile.TemporaryDirectory(prefix="weir-bench-") as home:
        place = Path(home)
        out = (keep or place) / f"{case}.stacks"
        with (
            companion("stub", name="direct", cores=cores.others, home=place) as stub,
            companion("load", name="load", cores=cores.others, home=place) as load,
            weir(
                "weir",
                upstream=stub.port,
                window=WINDOW,
                cores=cores.tested,
                home=place,
                profile=("stacks", out),
            ) as tested,
        ):
            job = {
                "name": "weir",
                "case": case,
                "connections": CONNECTIONS[case],
                "port": tested.port,
            }
            load.ask({**job, "seconds": WARM_UP})
            with tested.profiled(out):
                before = tested.cpu()
                threads = _threads(tested)
                report = load.ask({**job, "seconds": seconds})
                tested.settle()
                spent = tested.cpu() - before
                used = {
                    name: used - threads.get(name, 0.0) for name, used in _threads(tested).items()
                }
        requests = max(1, report["requests"])
        console.rule(
            f"{case}: {requests} requests, {report['failed']} wrong, {1000 * spent / requests:.3f}"
            " CPU ms each"
        )
        stacks = _read(out)
        _show(stacks, requests, 1000 * spent / requests, used, top=top, console=console)


def _show(
    stacks: Mapping[tuple[str, ...], int],
    requests: int,
    cost: float,
    threads: Mapping[str, float],
    *,
    top: int,
    console: Console,
) -> None:
    total = sum(stacks.values()) or 1
    others = sum(used for name, used in threads.items() if not name.startswith("main"))
    main = cost - 1000 * others / requests
    console.print(
        "threads, ms per request: "
        + ", ".join(
            f"{n} {1000 * u / requests:.3f}"
            for n, u in sorted(threads.items(), key=lambda t: -t[1])
            if u > 0
        )
    )
    lines = Counter[str]()
    inside = Counter[str]()
    for stack, count in stacks.items():
        leaf = stack[-1].rsplit(":", 3)
        lines[f"{_short(leaf[0])}:{leaf[3]}  {leaf[1]}"] += count
        for name in {":".join(_parts(frame)) for frame in stack}:
            inside[name] += count
    for title, counts in (
        ("by line, without what it calls", lines),
        ("by function, with what it calls", inside),
    ):
        table = Table(title=title)
        for name in ("share", "us per request", "where"):
            table.add_column(name, justify="left" if name == "where" else "right", no_wrap=True)
        below = [
            (name, count) for name, count in counts.most_common() if count < EVERYWHERE * total
        ]
        for name, count in below[:top]:
            share = count / total
            table.add_row(f"{share:.1%}", f"{1000 * share * main:.1f}", name)
        console.print(table)


def _parts(frame: str) -> tuple[str, str]:
    path, name, first, _ = frame.rsplit(":", 3)
    return f"{_short(path)}:{first} ", name


def _short(path: str) -> str:
    inside = path.removeprefix(f"{ROOT}/")
    return inside.rsplit("site-packages/", 1)[-1]


def _read(path: Path) -> dict[tuple[str, ...], int]:
    stacks: dict[tuple[str, ...], int] = {}
    for line in path.read_text().splitlines():
        stack, _, count = line.rpartition(" ")
        stacks[tuple(stack.split(";"))] = int(count)
    return stacks


def _threads(running: Running) -> dict[str, float]:
    """CPU seconds of each thread; the main one is called ``main``."""
    used: dict[str, float] = {}
    for task in Path(f"/proc/{running.pid}/task").iterdir():
        name = (
            "main"
            if task.name == str(running.pid)
            else f"{(task / 'comm').read_text().strip()}-{task.name}"
        )
        used[name] = int((task / "schedstat").read_text().split()[0]) / 1e9
    return used


def main(arguments: Sequence[str] | None = None) -> None:
    """Profile each case in a process of its own."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.hotspots",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--cases", default=",".join(CASES), help=f"of {','.join(CASES)}; all by default"
    )
    parser.add_argument("--seconds", type=float, default=4.0, help="how long each is sampled (4)")
    parser.add_argument("--top", type=int, default=25, help="rows of each table (25)")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the collapsed stacks here")
    options = parser.parse_args(arguments)
    if options.keep is not None:
        options.keep.mkdir(parents=True, exist_ok=True)
    console = Console(width=150)
    for case in options.cases.split(","):
        if case not in CASES:
            parser.error(f"there is no case {case!r}; there are: {', '.join(CASES)}")
        profile(case, seconds=options.seconds, top=options.top, keep=options.keep, console=console)


if __name__ == "__main__":
    main()
