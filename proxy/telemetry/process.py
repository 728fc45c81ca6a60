"""How late the event loop is, and what the allocator and the garbage collector of the
process do.
"""

import asyncio
import contextlib
import ctypes
import gc
import resource
from pathlib import Path

from proxy.telemetry.metrics import Metrics

EVERY = 0.5
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
M_ARENA_MAX = -8
ARENAS = 2
LARGE_BLOCK = 2**20


def collect_seldom(after: int) -> None:
    """Exempt existing objects from garbage collection, which then runs only after so many new ones.

    What is kept is many objects that stay: with the usual thresholds going through them again and
    again took a fifth of a small request's CPU. A request leaves no cycles, so there is next to
    nothing to be found.
    """
    gc.freeze()
    gc.set_threshold(after, 20, 10)
    gc.enable()


def keep_little() -> None:
    """Make the allocator return large blocks once they are free: glibc keeps what follows the first
    of them.

    Threads share two arenas: with one for each, one thread cannot use what another has freed.
    """
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_MMAP_THRESHOLD, LARGE_BLOCK)
        mallopt(M_TRIM_THRESHOLD, 16 * LARGE_BLOCK)
        mallopt(M_ARENA_MAX, ARENAS)


def give_back() -> None:
    """Make the allocator return free memory to the system: glibc keeps what large bodies took."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def resident(process: int) -> int:
    with contextlib.suppress(OSError):
        pages = Path(f"/proc/{process}/statm").read_text().split()[1]
        return int(pages) * resource.getpagesize()
    return 0


async def watch_loop(metrics: Metrics) -> None:
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + EVERY
        await asyncio.sleep(EVERY)
        metrics.loop_lag.observe(max(0.0, loop.time() - due))
