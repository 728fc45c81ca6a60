"""What a model wrote, kept by the address of what it was asked, so that nobody asks twice.

In memory the answers used last, bounded in number and in characters; behind that the store, where there is one. A
store that fails is said once and never costs a request.
"""

import asyncio
import logging
from collections import OrderedDict
from typing import Protocol

from policies import Summary
from proxy.store.records import SummaryRow

log = logging.getLogger("weir.summaries")

MAX_KEPT = 512
MAX_CHARACTERS = 4_000_000
STOPPED = "stop"


class SummaryStore(Protocol):
    """Where answers outlive the process."""

    async def summary(self, tenant: str, key: bytes) -> SummaryRow | None:
        """What a tenant was told to this question, None if it was never asked."""
        ...

    async def keep_summary(self, tenant: str, row: SummaryRow) -> None:
        """Keep an answer in place of what there was under its key."""
        ...


class SummaryCache:
    """Answers by tenant and address (16 bytes); no tenant is ever given another one's."""

    def __init__(self, store: SummaryStore | None = None) -> None:
        self._store = store
        self._failing = False
        self._answers: OrderedDict[tuple[str, bytes], Summary] = OrderedDict()
        self._size = 0
        self._writing: set[asyncio.Task[None]] = set()

    def remembered(self, tenant: str, address: bytes) -> Summary | None:
        """The answer that is in memory."""
        found = self._answers.get((tenant, address))
        if found is not None:
            self._answers.move_to_end((tenant, address))
        return found

    async def find(self, tenant: str, address: bytes) -> Summary | None:
        """The answer that is in the store, which is remembered from then on."""
        if self._store is None:
            return None
        try:
            row = await self._store.summary(tenant, address)
        except Exception as error:  # noqa: BLE001 - a store that fails never costs a request
            self._say_failing(error)
            return None
        if row is None:
            return None
        answer = Summary(text=row.text, finish_reason=STOPPED, model=row.model)
        self._remember(tenant, address, answer)
        return answer

    def keep(self, tenant: str, row: SummaryRow) -> None:
        """Keep an answer under ``row.key``; nobody waits for the store."""
        self._remember(tenant, row.key, Summary(text=row.text, finish_reason=STOPPED, model=row.model))
        if self._store is not None:
            task = asyncio.create_task(self._write(self._store, tenant, row), name="weir-keep-summary")
            self._writing.add(task)
            task.add_done_callback(self._writing.discard)

    def forget(self, tenant: str) -> None:
        """Drop a tenant's answers from memory; the store's part is the store's."""
        for key in [key for key in self._answers if key[0] == tenant]:
            self._drop(key)

    async def close(self) -> None:
        """Wait for what is being written."""
        await asyncio.gather(*self._writing, return_exceptions=True)

    def _remember(self, tenant: str, address: bytes, answer: Summary) -> None:
        self._drop((tenant, address))
        self._answers[tenant, address] = answer
        self._size += len(answer.text)
        while len(self._answers) > MAX_KEPT or self._size > MAX_CHARACTERS:
            self._drop(next(iter(self._answers)))

    def _drop(self, key: tuple[str, bytes]) -> None:
        gone = self._answers.pop(key, None)
        self._size -= len(gone.text) if gone is not None else 0

    async def _write(self, store: SummaryStore, tenant: str, row: SummaryRow) -> None:
        try:
            await store.keep_summary(tenant, row)
        except Exception as error:  # noqa: BLE001 - a store that fails never costs a request
            self._say_failing(error)
        else:
            self._failing = False

    def _say_failing(self, error: Exception) -> None:
        if not self._failing:
            self._failing = True
            log.warning("summaries are kept in memory only, the store fails: %s", type(error).__name__)
