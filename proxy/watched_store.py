"""The store with a stopwatch: what requests wait for in it, and what is written behind them, by operation.

The store itself knows nothing of telemetry; what is done rarely, or only for an operator, is not timed.
"""

import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, TypeVar

from proxy.store import Store

P = ParamSpec("P")
T = TypeVar("T")
Method = Callable[Concatenate["WatchedStore", P], Coroutine[Any, Any, T]]


def _timed(name: str, method: Callable[Concatenate[Store, P], Awaitable[T]]) -> Method[P, T]:
    """The method, its time told as the operation ``name`` whether it succeeds or fails."""

    async def timed(self: "WatchedStore", /, *args: P.args, **kwargs: P.kwargs) -> T:
        begun = time.perf_counter()
        try:
            return await method(self, *args, **kwargs)
        finally:
            self.took(name, time.perf_counter() - begun)

    return timed


class WatchedStore(Store):
    """A store that tells ``took`` each timed operation and its seconds."""

    took: Callable[[str, float], None] = staticmethod(lambda _name, _seconds: None)

    find = _timed("find", Store.find)
    branch = _timed("branch", Store.branch)
    fork = _timed("fork", Store.fork)
    commit = _timed("commit", Store.commit)
    arrive = _timed("arrive", Store.arrive)
    record = _timed("record", Store.record)
    original = _timed("original", Store.original)
    covered = _timed("covered", Store.covered)
    search = _timed("search", Store.search)
    notes = _timed("notes", Store.notes)
    latest_checkpoint = _timed("latest_checkpoint", Store.latest_checkpoint)
    summary = _timed("summary", Store.summary)
