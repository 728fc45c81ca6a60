"""The record of answers: what a provider that keeps them holds behind a request that has only its
newest messages.

Every answer that a later request may go on from is kept, in memory first and bounded there, and in
the store where that may hold what is said. A history counts only if all of it is known, from its
first request on; whose tenant it is not, for him there is nothing. Two requests may go on from the
same answer: what follows is told apart by the answers' ids.
"""

import logging
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence

import msgspec

from proxy.store import Store, WriteBehindQueue
from proxy.store.records import AnswerRow, ConversationRow, StoreError
from proxy.wire.codec import Codec
from proxy.wire.raw import Raw

log = logging.getLogger("weir.conversation")

MAX_BYTES = 12 * 1024 * 1024
Key = tuple[str, str]


class AnswerBook:
    def __init__(self, store: Store, settler: WriteBehindQueue) -> None:
        self._store = store
        self._settler = settler
        self._size = 0
        self._rows: OrderedDict[Key, AnswerRow] = OrderedDict()
        self._items: dict[Key, str] = {}
        self._unwritten: set[Key] = set()

    async def keep(self, row: AnswerRow, *, lasting: bool) -> None:
        """Know an answer; one that is not ``lasting`` is stored once a request goes on from it or
        names its items.
        """
        self._remember(row)
        self._unwritten.add((row.tenant, row.id))
        if lasting:
            await self._write([row])

    async def behind(self, tenant: str, answer: str) -> Sequence[AnswerRow]:
        rows = self._line(tenant, answer)
        try:
            if rows is None:
                rows = self._line(tenant, answer, await self._store.answers(tenant, answer))
            elif self._store.shared and self._store.keeps_content:
                # another process may have forgotten some
                ids = [row.id for row in rows if (tenant, row.id) not in self._unwritten]
                rows = rows if await self._store.known_answers(tenant, ids) == len(ids) else None
        except StoreError as error:
            log.warning("what a provider holds cannot be read from the store: %s", error)
        await self._write([row for row in rows or () if (tenant, row.id) in self._unwritten])
        return (rows or ())[::-1]

    async def elements(self, tenant: str, ids: Collection[str], codec: Codec) -> Mapping[str, Raw]:
        rows = {
            each: row
            for each in ids
            if (row := self._rows.get((tenant, self._items.get((tenant, each), ""))))
        }
        missing = [each for each in ids if each not in rows]
        try:
            for row in await self._store.answers_with(tenant, missing) if missing else ():
                rows[row.id] = msgspec.structs.replace(row, items=tuple(codec.named(row.output, 0)))
                self._remember(rows[row.id])
        except StoreError as error:
            log.warning("what a request names cannot be read from the store: %s", error)
        behind = {row.id: row for row in rows.values()}.values()
        await self._write([row for row in behind if (tenant, row.id) in self._unwritten])
        named = {row.id: codec.named(row.output, row.reasoned) for row in behind}
        return {name: raw for items in named.values() for name, raw in items.items() if name in ids}

    async def forget(self, tenant: str, answer: str) -> None:
        self._drop((tenant, answer))
        try:
            await self._settler.flush()
            await self._store.forget_answer(tenant, answer)
        except StoreError as error:
            log.warning("an answer could not be deleted from the store: %s", error)

    def forget_all(self, conversation: ConversationRow) -> None:
        of = (conversation.tenant, conversation.id)
        for key in [key for key, row in self._rows.items() if (row.tenant, row.conversation) == of]:
            self._drop(key)

    def _line(
        self, tenant: str, answer: str, stored: Sequence[AnswerRow] = ()
    ) -> list[AnswerRow] | None:
        found = {row.id: row for row in stored}
        rows = dict[str, AnswerRow]()
        name: str | None = answer
        while name is not None:
            row = self._rows.get((tenant, name)) or found.get(name)
            if row is None or name in rows:
                return None
            rows[name] = row
            name = row.parent
        for row in rows.values():
            self._remember(row)
        return list(rows.values())

    def _remember(self, row: AnswerRow) -> None:
        key = (row.tenant, row.id)
        if key not in self._rows:
            self._size += _size_of(row)
        self._rows[key] = row
        self._rows.move_to_end(key)
        self._items |= {(row.tenant, item): row.id for item in row.items}
        while self._size > MAX_BYTES:
            self._drop(next(iter(self._rows)))

    def _drop(self, key: Key) -> None:
        row = self._rows.pop(key, None)
        self._unwritten.discard(key)
        if row is not None:
            self._size -= _size_of(row)
            for item in row.items:
                self._items.pop((row.tenant, item), None)

    async def _write(self, rows: Sequence[AnswerRow]) -> None:
        if not rows or not self._store.keeps_content:
            return
        self._unwritten -= {(row.tenant, row.id) for row in rows}
        if not self._store.shared:
            for row in rows if not self._settler.failing else ():
                self._settler.put(row)
            return
        try:
            await self._store.record(rows)
        except StoreError as error:
            self._unwritten |= {(row.tenant, row.id) for row in rows}
            log.warning("another process will not know an answer that a provider keeps: %s", error)


def _size_of(row: AnswerRow) -> int:
    return 1024 + len(row.given) + len(row.output) + len(row.opening)
