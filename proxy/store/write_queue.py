"""What is written after the answer: exchanges in batches, and changes that the store refused
earlier.

No failure here can cost a client its request. While the store is down rows wait, bounded, and the
oldest exchange rows are dropped first; changes (edits with the originals they removed) are kept
until they are stored.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from contextlib import suppress

import msgspec

from proxy.store.audit import of_change
from proxy.store.records import (
    Change,
    ExchangeRow,
    RelayedRow,
    Row,
    StaleVersion,
    StoreError,
)
from proxy.store.store import Store

log = logging.getLogger("weir.settle")
BATCH = 256
# bytes of new messages that one batch is about: requests that have to be stored wait for it
HEAVY = 512 << 10
PAUSE = 0.15
SOON = 0.02
"""Seconds until the row of a request is stored for which something of a budget is reserved: until
then others are refused what it did not use, and a process that is killed has not counted it.
"""
RETRY_PAUSE = 2.0
MAX_ROWS = 20_000
MAX_CHANGES = 2_000
MAX_INSPECTED = 512  # rows that wait with what they were about
MAX_HELD = 32 << 20  # bytes of new messages in them


class WriteBehindQueue:
    """Writes rows in the background; one task, started by :meth:`start` and ended by :meth:`close`.

    ``stored`` is called for each exchange that was new to the store, as it was stored;
    ``overtaken`` for each change that waited while another process made one in its place.
    """

    def __init__(
        self,
        store: Store,
        *,
        degraded: Callable[[str], None],
        stored: Callable[[ExchangeRow], None] = lambda _: None,
    ) -> None:
        self.overtaken: Callable[[Change], None] = lambda _: None
        self._store = store
        self._stored = stored
        self._degraded = degraded
        self._rows: deque[Row] = deque(maxlen=MAX_ROWS)
        self._changes: deque[Change] = deque()
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._writing = asyncio.Lock()
        self._failing = False
        self._held = 0
        self._pause = PAUSE

    @property
    def failing(self) -> bool:
        return self._failing or bool(self._changes)

    @property
    def is_full(self) -> bool:
        """Whether what a request was about should not wait here: it is given with the next one
        instead.
        """
        return self._failing or len(self._rows) >= MAX_INSPECTED or self._held >= MAX_HELD

    def waiting(self) -> dict[tuple[str, ...], float]:
        return {("rows",): len(self._rows), ("changes",): len(self._changes)}

    def start(self) -> None:
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="weir-settle")

    def put(self, row: Row) -> None:
        self._held += _weight(row)
        self._rows.append(row)
        if isinstance(row, ExchangeRow | RelayedRow) and row.reserved:
            self._pause = SOON
        self._wake.set()

    def keep(self, change: Change) -> None:
        if len(self._changes) >= MAX_CHANGES:
            self._changes.popleft()
            log.error(
                "the store has been down for too long: a change of conversation was dropped from"
                " memory"
            )
        self._changes.append(change)
        self._wake.set()

    def original(self, tenant: str, ref: str) -> bytes | None:
        """The original of a removed message among the changes that wait, None if it is not
        there.
        """
        held = (
            each for change in self._changes if change.tenant == tenant for each in change.originals
        )
        return next((each.body for each in held if each.ref == ref), None)

    async def flush(self) -> None:
        """Write what waits now; what comes meanwhile is gathered for the next batch."""
        async with self._writing:
            await self._write_all(len(self._rows))

    async def close(self) -> None:
        task = self._task
        self._task = None
        if task is not None:
            # the store ends what it has begun: nothing else may be written meanwhile
            async with self._writing:
                task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        async with self._writing:
            await self._write_all(MAX_ROWS)

    async def _run(self) -> None:
        while True:
            await self._wake.wait()
            pause = self._pause
            self._pause = PAUSE
            await asyncio.sleep(RETRY_PAUSE if self._failing else pause)
            self._wake.clear()
            await self.flush()
            if self._changes or self._rows:
                self._wake.set()

    async def _write_all(self, most: int) -> None:
        while (self._changes or (self._rows and most > 0)) and (
            written := await self._write()
        ) is not None:
            most -= written

    async def _write(self) -> int | None:  # how many rows; None where the store failed
        rows: list[Row] = []
        weight = 0
        try:
            while self._changes:
                await self._commit(self._changes[0])
                self._changes.popleft()
            while self._rows and len(rows) < BATCH and weight < HEAVY:
                rows.append(row := self._rows.popleft())
                weight += _weight(row)
            self._held = self._held - weight if self._rows else 0
            for row in await self._store.record(rows):
                self._stored(row)
        except StoreError as error:
            self._rows.extendleft(_bare(row) for row in reversed(rows))
            self._fail(error)
            return None
        except asyncio.CancelledError:
            self._rows.extendleft(reversed(rows))
            self._held += weight
            raise
        except Exception:  # a row that cannot be written at all must not stop those that follow
            log.exception("%d exchange rows were dropped: they cannot be written", len(rows))
            self._degraded("store")
            if not rows:
                self._changes.popleft()
            return len(rows)
        if self._failing:
            log.warning("the store is written again: what waited in memory goes into it")
        self._failing = False
        return len(rows)

    async def _commit(self, change: Change) -> None:
        try:
            await self._store.commit(change)
        except StaleVersion as stale:
            self.overtaken(change)
            nothing = msgspec.structs.replace(
                change, edits=(), cut=None, covered=(), checkpoint=None, resumed=None, evictions=()
            )
            events = of_change(change, conversation=change.conversation, version=None)
            kept = msgspec.structs.replace(
                nothing, expected=stale.current, audited=change.audited or tuple(events)
            )
            if kept.originals:  # again where another process was first once more
                await self._commit(kept)

    def _fail(self, error: StoreError) -> None:
        if not self._failing:
            log.error("the store cannot be written, rows wait in memory: %s", error)
        self._failing = True
        self._degraded("store")


def _weight(row: Row) -> int:
    return (
        sum(map(len, row.inspection.raws))
        if isinstance(row, ExchangeRow) and row.inspection is not None
        else 0
    )


def _bare(row: Row) -> Row:
    if not isinstance(row, ExchangeRow) or row.inspection is None:
        return row
    return msgspec.structs.replace(row, inspection=None)
