"""Weir with a profiler inside: what ``python -m proxy`` does, the main thread counted meanwhile.

    python -m benchmarks.profiled stacks|calls OUT serve …

SIGUSR1 begins counting anew, SIGUSR2 ends it and writes OUT. ``stacks``, for
``benchmarks.hotspots``: one collapsed stack per line with its count, the form that flame graphs are
made of. ``calls``, for ``benchmarks.gate``: how many functions were called, those of C included; no
machine makes more of them than another.

The timer runs on the CPU time of the main thread alone (``timer_create(2)`` with
``SIGEV_THREAD_ID``): one of the whole process, ``setitimer``, would put the time of the store's
thread wherever the main thread happens to have let go of the interpreter.
"""

import cProfile
import ctypes
import signal
import sys
import threading
from collections import Counter
from pathlib import Path
from types import FrameType

from proxy.cli import main

EVERY_NS = 1_000_000
DEEPEST = 80
CLOCK_THREAD_CPUTIME_ID = 3
SIGEV_THREAD_ID = 4


class _SigEvent(ctypes.Structure):
    _fields_ = (
        ("value", ctypes.c_void_p),
        ("signo", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("thread", ctypes.c_int),
        ("padding", ctypes.c_char * 44),
    )


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Interval(ctypes.Structure):
    _fields_ = (("interval", _Timespec), ("value", _Timespec))


class Sampler:
    """Counts the stacks of the main thread between two signals."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stacks: Counter[tuple[str, ...]] = Counter()
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._timer = ctypes.c_void_p()

    def install(self) -> None:
        """Listen to the signals; to be called in the main thread. Raises OSError where there is no
        such timer.
        """
        event = _SigEvent(
            signo=signal.SIGPROF, notify=SIGEV_THREAD_ID, thread=threading.get_native_id()
        )
        if self._libc.timer_create(
            CLOCK_THREAD_CPUTIME_ID, ctypes.byref(event), ctypes.byref(self._timer)
        ):
            raise OSError(ctypes.get_errno(), "timer_create")
        signal.signal(signal.SIGPROF, self._sample)
        signal.signal(signal.SIGUSR1, self._begin)
        signal.signal(signal.SIGUSR2, self._end)

    def _every(self, nanoseconds: int) -> None:
        pause = _Timespec(0, nanoseconds)
        self._libc.timer_settime(self._timer, 0, ctypes.byref(_Interval(pause, pause)), None)

    def _begin(self, _signal: int, _frame: FrameType | None) -> None:
        self._stacks.clear()
        self._every(EVERY_NS)

    def _sample(self, _signal: int, frame: FrameType | None) -> None:
        stack: list[str] = []
        while frame is not None and len(stack) < DEEPEST:
            code = frame.f_code
            stack.append(
                f"{code.co_filename}:{code.co_qualname}:{code.co_firstlineno}:{frame.f_lineno}"
            )
            frame = frame.f_back
        self._stacks[tuple(reversed(stack))] += 1

    def _end(self, _signal: int, _frame: FrameType | None) -> None:
        self._every(0)
        lines = [f"{';'.join(stack)} {count}\n" for stack, count in self._stacks.most_common()]
        _write(self._path, "".join(lines))


class CallCounter:
    """Counts the calls of the main thread between two signals."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._profile = cProfile.Profile()

    def install(self) -> None:
        """Listen to the signals; to be called in the main thread."""
        signal.signal(signal.SIGUSR1, self._begin)
        signal.signal(signal.SIGUSR2, self._end)

    def _begin(self, _signal: int, _frame: FrameType | None) -> None:
        self._profile.clear()
        self._profile.enable()

    def _end(self, _signal: int, _frame: FrameType | None) -> None:
        self._profile.disable()
        _write(self._path, f"{sum(entry.callcount for entry in self._profile.getstats())}\n")


PROFILERS: dict[str, type[Sampler] | type[CallCounter]] = {"stacks": Sampler, "calls": CallCounter}


def _write(path: Path, text: str) -> None:
    """At once, for the caller waits until the file is there."""
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(text)
    unfinished.replace(path)


if __name__ == "__main__":
    _, profiler, out, *arguments = sys.argv
    sys.argv[1:] = arguments
    PROFILERS[profiler](Path(out)).install()
    main()
