"""What one process takes of its machine, read when the metrics are, and how late its event loop is."""

import asyncio
import contextlib
import ctypes
import gc
import resource
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from proxy.telemetry import metrics as measured
from proxy.telemetry.metrics import Instrument, Labels, Metrics

EVERY = 0.5
SELF = Path("/proc/self")
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
M_ARENA_MAX = -8
ARENAS = 2
LARGE_BLOCK = 2**20
_STARTED = time.time()


def watch_process(metrics: Metrics) -> None:
    reads: dict[Instrument, Callable[[], float]] = {
        measured.PROCESS_CPU: time.process_time,
        measured.PROCESS_RESIDENT: lambda: _pages()[1],
        measured.PROCESS_VIRTUAL: lambda: _pages()[0],
        measured.PROCESS_FDS: lambda: sum(1 for _ in (SELF / "fd").iterdir()),
        measured.PROCESS_MAX_FDS: lambda: resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        measured.PROCESS_START: lambda: _STARTED,
    }
    for instrument, read in reads.items():
        metrics.watch(instrument, partial(_reading, read))


def collect_seldom(after: int) -> None:
    """Let the garbage collector leave alone what is there, and look only after so many more objects.

    What is kept is many objects that stay: with the usual thresholds going through them again and again took a fifth of
    a small request's CPU. A request leaves no cycle behind, so there is next to nothing to be found.
    """
    gc.freeze()
    gc.set_threshold(after, 20, 10)
    gc.enable()


def keep_little() -> None:
    """Have the allocator return large blocks once they are free: glibc keeps what follows the first of them.

    Threads share two arenas: with one for each, what one thread has freed is of no use to another.
    """
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_MMAP_THRESHOLD, LARGE_BLOCK)
        mallopt(M_TRIM_THRESHOLD, 16 * LARGE_BLOCK)
        mallopt(M_ARENA_MAX, ARENAS)


def give_back() -> None:
    """Have the allocator return what is free to the system: glibc keeps what large bodies took."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _reading(read: Callable[[], float]) -> Mapping[Labels, float]:
    with contextlib.suppress(OSError):
        return {(): read()}
    return {}


def resident(process: int) -> int:
    with contextlib.suppress(OSError):
        return _pages(Path(f"/proc/{process}"))[1]
    return 0


def _pages(process: Path = SELF) -> tuple[int, int]:
    mapped, held = (process / "statm").read_text().split()[:2]
    return int(mapped) * resource.getpagesize(), int(held) * resource.getpagesize()


async def watch_loop(metrics: Metrics) -> None:
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + EVERY
        await asyncio.sleep(EVERY)
        metrics.record(measured.LOOP_LAG, max(0.0, loop.time() - due))
