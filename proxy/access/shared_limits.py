"""A key's limits where several processes share a database: requests admitted by any of them count
for all.

A request of a key that has limits costs one statement before it begins. What a process has open is
a row of its own, which it renews and withdraws; the row of one that has died expires. Where the
database does not answer, each process enforces the limits alone, as without a shared store.
"""

import asyncio
import logging
import secrets
from collections import Counter
from collections.abc import Callable

from proxy.store import Store
from proxy.store.records import KeyUse, Refusal, StoreError

log = logging.getLogger("weir")

SETTLES = 0.1
"""Seconds after which a full limit is checked again: that a request has ended is stored after it.
"""


class SharedLimits:
    """``open_here`` says how many requests of a key this process has open."""

    def __init__(self, store: Store, open_here: Callable[[str], int]) -> None:
        self._store = store
        self._open_here = open_here
        self._process = secrets.token_hex(6)
        self._said: dict[str, int] = {}
        self._changed: set[str] = set()
        self._forgotten: Counter[str] = Counter()
        self._saying: asyncio.Task[None] | None = None

    async def enter(
        self, key: str, *, rate: int | None, most: int | None, count: int = 1
    ) -> KeyUse | None:
        """The refusal of a request that this process has let in; None where it may begin, or where
        that is unknown. In its minute it counts as ``count``.
        """
        if key in self._forgotten:
            await self.settle()
        use = await self._ask(key, rate, most, count)
        if use is not None and use.refused is Refusal.CONCURRENCY:
            await asyncio.sleep(SETTLES)
            use = await self._ask(key, rate, most, count)
        return use if use is not None and use.refused else None

    async def _ask(self, key: str, rate: int | None, most: int | None, count: int) -> KeyUse | None:
        here = self._open_here(key)
        try:
            use = await self._store.enter_key(
                key,
                process=self._process,
                here=here,
                rate=rate or 0,
                most=most or 0,
                count=count,
            )
        except StoreError as error:
            log.warning("a key's limits hold in this process alone: %s", error)
            return None
        if most is not None:
            self._said[key] = here - bool(use.refused)
            if not use.refused:  # a refused one is still open here, and left in a moment
                self.left(key)
        return use

    def left(self, key: str) -> None:
        """Update the stored number of this process's open requests, if it has changed."""
        if key in self._said and self._said[key] != self._open_here(key):
            self._changed.add(key)
            self._say()

    def forget(self, key: str) -> None:
        """Let a request that was not allowed count for nothing within its minute."""
        self._forgotten[key] += 1
        self._say()

    async def renew(self) -> None:
        """Renew what is open here, before it expires."""
        self._changed |= {key for key, count in self._said.items() if count}
        await self.settle()

    async def settle(self) -> None:
        """Return once everything is stored, or could not be."""
        self._say()
        if self._saying is not None:
            await asyncio.wait({self._saying})

    def _say(self) -> None:
        if (self._changed or self._forgotten) and (self._saying is None or self._saying.done()):
            self._saying = asyncio.create_task(self._write(), name="weir-key-use")

    async def _write(self) -> None:
        while self._changed or self._forgotten:
            here = {key: self._open_here(key) for key in self._changed}
            self._changed.clear()
            forgotten = dict(self._forgotten)
            try:
                await self._store.keep_key_use(here, process=self._process, forgotten=forgotten)
            except StoreError as error:
                log.warning("how many requests of keys are open could not be stored: %s", error)
                return
            self._forgotten -= Counter(forgotten)
            self._said |= here
            self._changed |= {key for key, count in here.items() if self._open_here(key) != count}
            self._said = {
                key: count for key, count in self._said.items() if count or key in self._changed
            }
