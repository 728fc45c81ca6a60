"""How far a command that reads a long file has come."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

QUIET_FOR = 5.0


@contextmanager
def progress(size: int) -> Iterator["Moved"]:
    """Says on stderr how far the file has been read: a bar on a terminal, else a line every few seconds."""
    screen = Console(stderr=True, highlight=False)
    if not screen.is_terminal:
        yield Moved(size, screen)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=screen, transient=True) as bar:
        yield Moved(size, screen, bar, bar.add_task("conversations", total=size))


class Moved:
    """Called after each conversation with the bytes read and the conversations played so far."""

    def __init__(self, size: int, screen: Console, bar: Progress | None = None, task: TaskID | None = None) -> None:
        self._size = size
        self._screen = screen
        self._bar = bar
        self._task = task
        self._said = time.monotonic()

    def __call__(self, read: int, played: int, note: str = "") -> None:
        """Show it, and what else there is to say, unless something was said a moment ago."""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=read, description=f"{played} conversations{note}")
        elif time.monotonic() - self._said > QUIET_FOR:
            self._said = time.monotonic()
            self._screen.print(f"{played} conversations{note}, {read / max(1, self._size):.0%} of the file")
