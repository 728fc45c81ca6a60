"""How large the product is, and how far one request walks through it. As a script: prints the figures and their aims.

python -m tests.architecture.house
"""

import ast
import asyncio
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import grimp

from tests.functional.harness import Talk, weir
from tests.functional.scripted import completion, scripted, whole

ROOT = Path(__file__).parents[2]
ROOMS = ("policies", "proxy")
AIMS = {
    "lines": 36_000,
    "files": 180,
    "loose modules in proxy": 12,
    "loose modules in policies": 12,
    "longest chain of imports": 15,
    "class names that stand twice": 0,
    "longest file": 600,
    "longest function": 60,
    "files of a warm request": 35,
    "jumps of a warm request": 150,
    "files of a first batch": 60,
}
"""What the product may have at most once its rooms are furnished."""


def sources() -> dict[Path, str]:
    """The text of every file of the product."""
    paths = sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))
    return {path: path.read_text(encoding="utf-8") for path in paths}


def size() -> dict[str, int]:
    """Lines, files, loose modules, names and lengths."""
    files = sources()
    trees = [ast.walk(ast.parse(text)) for text in files.values()]
    nodes = [node for tree in trees for node in tree]
    functions = [n for n in nodes if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    classes = Counter(n.name for n in nodes if isinstance(n, ast.ClassDef) and not n.name.startswith("_"))
    return {
        "lines": sum(text.count("\n") for text in files.values()),
        "files": len(files),
        **{
            f"loose modules in {room}": sum(p.parent == ROOT / room and p.stem[0] != "_" for p in files)
            for room in ROOMS
        },
        "longest chain of imports": longest_chain(),
        "class names that stand twice": sum(count > 1 for count in classes.values()),
        "longest file": max(text.count("\n") for text in files.values()),
        "longest function": max((n.end_lineno or 0) - n.lineno + 1 for n in functions),
    }


def longest_chain() -> int:
    """Modules in the longest chain of imports, each of which imports the next; there are no cycles."""
    graph = grimp.build_graph(*ROOMS, include_external_packages=False)
    known: dict[str, int] = {}

    def depth(module: str) -> int:
        if module not in known:
            known[module] = 0  # a package's __init__ may be imported by its own modules
            known[module] = 1 + max(map(depth, graph.find_modules_directly_imported_by(module)), default=0)
        return known[module]

    return max(map(depth, graph.modules))


@dataclass(slots=True)
class Walk:
    """The files of the product that ran, and how often one of them called into another."""

    files: set[str]
    jumps: int = 0


NOW_AND_THEN = {"weir-tend", "weir-loop"}
"""The tasks of a process that no request has to do with: whether one of them runs meanwhile is chance."""


@contextmanager
def walked() -> Iterator[Walk]:
    """What runs in this thread meanwhile, but for what a process does now and then."""
    walk = Walk(set())
    product = tuple(f"{ROOT / room}/" for room in ROOMS)

    def called(frame: FrameType, event: str, _: Any) -> None:
        here = frame.f_code.co_filename
        if event != "call" or not here.startswith(product):
            return
        task = asyncio.current_task()
        if task is not None and task.get_name() in NOW_AND_THEN:
            return
        walk.files.add(here)
        before = frame.f_back
        while before is not None and not before.f_code.co_filename.startswith(product):
            before = before.f_back
        walk.jumps += before is not None and before.f_code.co_filename != here

    sys.setprofile(called)
    try:
        yield walk
    finally:
        sys.setprofile(None)


async def request_path() -> dict[str, int]:
    """A request of a known conversation that nothing is done to, and one with its first batch, until all is recorded."""
    async with (
        scripted(lambda asked: whole(completion("Go on.", prompt=len(asked.body) // 5))) as upstream,
        weir(upstream.base_url) as running,
    ):
        talk = Talk(running.client())

        async def step() -> None:
            await talk.agent(1)
            await running.runtime.preparation.settled()
            await running.stored()

        for _ in range(3):
            await step()
        with walked() as warm:
            await step()
        while "compact" not in talk.actions()[-1]:
            with walked() as batch:
                await step()
    return {
        "files of a warm request": len(warm.files),
        "jumps of a warm request": warm.jumps,
        "files of a first batch": len(batch.files),
    }


def main() -> None:
    """Print each figure beside its aim."""
    figures = {**size(), **asyncio.run(request_path())}
    for name, figure in figures.items():
        print(f"{name:32} {figure:>7,} {AIMS[name]:>7,}{'' if figure <= AIMS[name] else '  above'}")


if __name__ == "__main__":
    main()
