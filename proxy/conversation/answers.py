"""The record of answers: what a provider that keeps them holds behind a request that has only its newest messages.

Every answer that a later request may go on from is kept, in memory first and bounded there, and in the store where that
may hold what is said. A history counts only if all of it is known, from its first request on; whose tenant it is not,
for him there is nothing. Two requests may go on from the same answer: what follows is told apart by the answers' ids.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from proxy.store import Store
from proxy.store.answers import AnswerRow
from proxy.store.records import ConversationRow, StoreError
from proxy.store.write_behind import WriteBehindQueue
from proxy.wire.codec import Codec
from proxy.wire.raw import Raw

log = logging.getLogger("weir.conversation")

MAX_BYTES = 64 * 1024 * 1024
ROW_BYTES = 1024
"""What an answer takes in memory beside what it says."""

Key = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Chain:
    """All that was said up to an answer, from the first request on; ``rows`` are oldest first."""

    rows: Sequence[AnswerRow]

    @property
    def last(self) -> AnswerRow:
        """The answer that a request goes on from."""
        return self.rows[-1]

    @property
    def opening(self) -> bytes:
        """What holds from the first request on."""
        return self.rows[0].opening

    @property
    def history(self) -> bytes:
        """The elements, with commas between."""
        return b",".join(part for row in self.rows for part in (row.given, row.output) if part)


class AnswerBook:
    """The answers of one process, and with the store those of all that share it."""

    def __init__(self, store: Store, settler: WriteBehindQueue, *, most: int = MAX_BYTES) -> None:
        self._store = store
        self._settler = settler
        self._most = most
        self._size = 0
        self._rows: OrderedDict[Key, AnswerRow] = OrderedDict()
        self._items: dict[Key, str] = {}
        self._unwritten: set[Key] = set()

    async def keep(self, row: AnswerRow, *, lasting: bool) -> None:
        """Know an answer; one that is not ``lasting`` is stored once a request goes on from it."""
        self._remember(row)
        self._unwritten.add((row.tenant, row.id))
        if lasting:
            await self._write([row])

    async def behind(self, tenant: str, answer: str) -> Chain | None:
        """All that was said up to an answer; None where some of it is not known."""
        rows = self._in_memory(tenant, answer)
        try:
            if rows is None:
                rows = self._with_stored(tenant, answer, await self._store.answers(tenant, answer))
            elif self._store.shared and self._store.keeps_content:  # another process may have forgotten some
                ids = [row.id for row in rows if (tenant, row.id) not in self._unwritten]
                rows = rows if await self._store.known_answers(tenant, ids) == len(ids) else None
        except StoreError as error:
            log.warning("what a provider holds cannot be read from the store: %s", error)
        if rows is None:
            return None
        await self._write([row for row in rows if (tenant, row.id) in self._unwritten])
        return Chain(rows[::-1])

    async def elements(self, tenant: str, ids: Collection[str], codec: Codec) -> Mapping[str, Raw]:
        """The elements that a request only names, as far as they are known, by their ids."""
        missing = [each for each in ids if (tenant, each) not in self._items]
        if missing:
            try:
                for row in await self._store.answers_with(tenant, missing):
                    self._remember(row)
            except StoreError as error:
                log.warning("what a request names cannot be read from the store: %s", error)
        answers = {answer for each in ids if (answer := self._items.get((tenant, each))) is not None}
        rows = [self._rows[tenant, answer] for answer in answers]
        return {name: raw for row in rows for name, raw in codec.named(row.output, row.reasoned).items() if name in ids}

    async def forget(self, tenant: str, answer: str) -> None:
        """Know nothing of an answer any more, nor of what goes on from it."""
        self._drop((tenant, answer))
        try:
            await self._settler.flush()
            await self._store.forget_answer(tenant, answer)
        except StoreError as error:
            log.warning("an answer could not be deleted from the store: %s", error)

    def forget_all(self, conversation: ConversationRow) -> None:
        """The same for those of a conversation, once the store knows them no more."""
        of = (conversation.tenant, conversation.id)
        for key in [key for key, row in self._rows.items() if (row.tenant, row.conversation) == of]:
            self._drop(key)

    def _in_memory(self, tenant: str, answer: str) -> list[AnswerRow] | None:
        """The answer and those before it, newest first; None where one is missing."""
        return _line(answer, lambda name: self._rows.get((tenant, name)), self._touch)

    def _with_stored(self, tenant: str, answer: str, stored: Sequence[AnswerRow]) -> list[AnswerRow] | None:
        found = {row.id: row for row in stored}
        rows = _line(answer, lambda name: self._rows.get((tenant, name)) or found.get(name), self._touch)
        for row in rows or ():
            if (tenant, row.id) not in self._rows:
                self._remember(row)
        return rows

    def _touch(self, row: AnswerRow) -> None:
        if (key := (row.tenant, row.id)) in self._rows:
            self._rows.move_to_end(key)

    def _remember(self, row: AnswerRow) -> None:
        key = (row.tenant, row.id)
        self._drop(key)
        self._rows[key] = row
        self._items |= {(row.tenant, item): row.id for item in row.items}
        self._size += row.size + ROW_BYTES
        while self._size > self._most:
            self._drop(next(iter(self._rows)))

    def _drop(self, key: Key) -> None:
        row = self._rows.pop(key, None)
        self._unwritten.discard(key)
        if row is not None:
            self._size -= row.size + ROW_BYTES
            for item in row.items:
                self._items.pop((row.tenant, item), None)

    async def _write(self, rows: Sequence[AnswerRow]) -> None:
        """Have answers stored: soon, or before the next request may come to another process."""
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


def _line(
    answer: str, find: Callable[[str], AnswerRow | None], found: Callable[[AnswerRow], None]
) -> list[AnswerRow] | None:
    rows: dict[str, AnswerRow] = {}
    name: str | None = answer
    while name is not None:
        row = find(name)
        if row is None or name in rows:
            return None
        found(row)
        rows[name] = row
        name = row.parent
    return list(rows.values())
