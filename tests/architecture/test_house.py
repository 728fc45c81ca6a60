"""The house does not grow: what is measured of it stays at or below what it was brought to, and moves to its aims."""

import pytest

from tests.architecture.house import AIMS, request_path, size

REACHED = {
    "lines": 65_300,
    "files": 231,
    "loose modules in policies": 12,
    "loose modules in proxy": 12,
    "longest chain of imports": 27,
    "class names that stand twice": 0,
    "longest file": 600,
    "longest function": 60,
    "files of a warm request": 64,
    "jumps of a warm request": 360,
    "files of a first batch": 73,
}
"""To be lowered with every room that is furnished, never raised without a word about why.

Before Responses and Messages, the simulator of all three endpoints, the dashboard and the commands of the first ten
minutes were built the house had 53,540 lines in 180 files, and a warm request went through 62 of them. What limits a
key and shows how the store grows is 290 lines and a migration. Plans in
processes of their own took 700 lines in three files, one of them on the way of a batch. Compactions that
clients ask for, and what upstreams do not have, took 600 more in 3 files.
A first batch comes with a request that is close to its trigger, which is stored before it goes up: one file more.
"""


@pytest.fixture(scope="module")
def figures() -> dict[str, int]:
    return size()


def test_nothing_measured_is_without_a_bound() -> None:
    assert REACHED.keys() == AIMS.keys()
    assert all(AIMS[name] <= bound for name, bound in REACHED.items())


@pytest.mark.parametrize("name", [name for name in REACHED if "request" not in name and "batch" not in name])
def test_the_product_does_not_grow(figures: dict[str, int], name: str) -> None:
    assert figures[name] <= REACHED[name]


async def test_a_request_does_not_walk_farther() -> None:
    for name, figure in (await request_path()).items():
        assert figure <= REACHED[name], name
