"""The picture of the house in docs/architecture.md is that of the tree, and the way of a request the one that is taken."""

import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from tests.functional.harness import Talk, weir
from tests.functional.scripted import completion, scripted, whole

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
BOX = re.compile(r'^ +\w+\["([\w, ]+): ', re.MULTILINE)
STEP = re.compile(r"^\| \d+ \|.*\| `([\w/]+\.py)` `([\w.]+)` \|$", re.MULTILINE)
NAMED = re.compile(r"`((?:proxy|policies)/[\w/.]*)`")
EMPTY_ROOMS = {"proxy": {"__init__", "__main__", "defaults", "vocabularies", "py"}, "policies": {"__init__", "py"}}


def drawn() -> dict[str, set[str]]:
    """The rooms in the picture of each package."""
    shell, _, pure = PAGE.partition('subgraph pure["policies')
    return {name: {r for box in BOX.findall(part) for r in box.split(", ")} for name, part in
            (("proxy", shell), ("policies", pure))}  # fmt: skip


@pytest.mark.parametrize("package", ["proxy", "policies"])
def test_every_room_is_in_the_picture_and_every_box_is_a_room(package: str) -> None:
    rooms = {p.stem for p in (ROOT / package).iterdir() if not p.name.startswith("__pycache__")}
    assert drawn()[package] == rooms - EMPTY_ROOMS[package]


def test_every_file_that_the_page_names_is_there() -> None:
    named = NAMED.findall(PAGE)
    assert len(named) > 20
    assert [name for name in named if not (ROOT / name).exists()] == []


async def test_a_first_batch_takes_the_steps_in_the_order_of_the_page() -> None:
    """The plan of a batch is made in a thread, whose steps are not seen here."""
    steps = [(str(ROOT / file), name) for file, name in STEP.findall(PAGE)]
    assert len(steps) > 12
    taken: list[tuple[str, str]] = []
    wanted = set(steps)

    def called(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        at = (code.co_filename, code.co_qualname)
        if event == "call" and at in wanted and at not in taken:
            taken.append(at)

    async with (
        scripted(lambda asked: whole(completion("Go on.", prompt=len(asked.body) // 5))) as upstream,
        weir(upstream.base_url) as running,
    ):
        talk = Talk(running.client())
        await talk.agent(3)
        for _ in range(100):
            await running.runtime.preparation.settled()
            taken.clear()
            sys.setprofile(called)
            try:
                await talk.agent(1)
            finally:
                sys.setprofile(None)
            if "compact" in talk.actions()[-1]:
                break
    assert taken == steps
