"""Long work in a thread, which ends within milliseconds once nobody waits for it any more.

The pure half has no way to be told, so the interpreter raises :class:`Abandoned` in the thread, between two steps of
whatever runs there. What is shared with others has to be whole between any two calls that it makes.
"""

import asyncio
import ctypes
from collections.abc import Callable
from threading import Lock, get_ident
from typing import Generic, ParamSpec, TypeVar

AT_ONCE = 1_000
"""Calls, within one of which the interpreter raises what it was asked to."""
P = ParamSpec("P")
T = TypeVar("T")


class Abandoned(BaseException):
    """Nobody waits for what runs here. No Exception: it is no fault that a fallback could make good."""


async def apart(work: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """What ``work`` returns, done by a thread, which leaves it where it is if the caller is cancelled."""
    begun = _Work(lambda: work(*args, **kwargs))
    try:
        return await asyncio.to_thread(begun.run)
    except asyncio.CancelledError:
        begun.leave()
        raise


class _Work(Generic[T]):
    """``due`` while something is to be raised in the thread that does it, and was not yet."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work = work
        self._lock = Lock()
        self._thread: int | None = None
        self._left = self._due = False

    def run(self) -> T:
        with self._lock:
            self._thread = get_ident()
            if self._left:
                raise Abandoned
        try:
            return self._work()
        except Abandoned:
            self._due = False
            raise
        finally:
            with self._lock:
                self._thread = None
            for _ in range(AT_ONCE if self._due else 0):  # here, for what the thread does next is somebody else's
                get_ident()

    def leave(self) -> None:
        with self._lock:
            self._left = True
            if self._thread is not None:
                self._due = bool(_raise_in(self._thread))


def _raise_in(thread: int) -> int:
    set_error = ctypes.pythonapi.PyThreadState_SetAsyncExc
    return int(set_error(ctypes.c_ulong(thread), ctypes.py_object(Abandoned)))
