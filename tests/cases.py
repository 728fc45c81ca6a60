"""Many small cases in one test: each test of its own costs every process of a run some milliseconds."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def case_of(name: object) -> Iterator[None]:
    """Name the case in which something fails."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"case: {name}")
        raise
