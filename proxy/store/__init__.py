"""What Weir remembers: conversations, their edits and evictions, the archive, exchanges, keys, what upstreams taught.

Everything outside this package uses only this file, the records and the errors. :class:`Store` is its front door.
Each method is one transaction, or one consistent read; a task that is cancelled inside leaves no lock and never
half of a transaction (it may leave a whole one). Errors are the :class:`StoreError` tree.

:class:`WriteBehindQueue` is the other door: what is written after the answer, exchanges in batches, and changes that
the store refused earlier. Nothing there can cost a client its request. While the store is down rows wait, bounded, and
the oldest exchange rows are dropped first; changes (edits with the originals they removed) are kept until they are
stored.
"""

import asyncio
import importlib
import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial, wraps
from itertools import count
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import msgspec
import sqlalchemy as sa

from proxy.store import archive, branches, configuration, exchanges, inspections, key_use, ledger, maintenance, memory
from proxy.store import audit as audit_
from proxy.store import conversations as conversations_
from proxy.store.records import (
    AnswerRow,
    Arrival,
    Change,
    ConversationRow,
    ExchangeRow,
    Original,
    ProviderIdsRow,
    RelayedRow,
    StaleVersion,
    StoreError,
    UsageRow,
)
from proxy.store.schema import HEAD, usage_days
from proxy.store.sqlite import Mode, SqliteDatabase
from proxy.store.transaction import Content, Database, Transaction

log = logging.getLogger("weir.settle")

P = ParamSpec("P")
T = TypeVar("T")
Work = Callable[Concatenate[Transaction, P], T]
Method = Callable[Concatenate["Store", P], Coroutine[Any, Any, T]]
Row = ExchangeRow | RelayedRow | AnswerRow | ProviderIdsRow | Arrival
POSTGRES_SCHEMES = frozenset({"postgres", "postgresql", "postgresql+asyncpg"})
BUSY_TIMEOUT = 5.0
CONNECTIONS = 4
INDEXED_AT_ONCE = 4  # steps of 256 KiB that a batch of rows waits for
ROOM = 0.9  # of the largest size, when a database was made smaller
BATCH = 256
HEAVY = 512 << 10  # bytes of new messages that one batch is about: requests that have to be stored wait for it
PAUSE = 0.15
RETRY_PAUSE = 2.0
MAX_ROWS = 20_000
MAX_CHANGES = 2_000
MAX_INSPECTED, MAX_HELD = 512, 32 << 20  # rows, and bytes of new messages, that wait with what they were about


@dataclass(slots=True)
class _Arrivals:
    rows: list[Arrival] = field(default_factory=list)
    homes: dict[str, str] = field(default_factory=dict)
    error: StoreError | None = None


def reading(work: Work[P, T], told: str = "") -> Method[P, T]:
    return _method(work, told, writes=False)


def writing(work: Work[P, T], told: str = "") -> Method[P, T]:
    return _method(work, told, writes=True)


def _method(work: Work[P, T], told: str, *, writes: bool) -> Method[P, T]:
    @wraps(work)
    async def method(self: "Store", /, *args: P.args, **kwargs: P.kwargs) -> T:
        run = self._write if writes else self._read
        with self.telling(told) if told else nullcontext():
            return await run(lambda tx: work(tx, *args, **kwargs))

    return method


class Store:
    """``took`` is told operations that requests wait for, and the seconds of each."""

    schema = HEAD
    took: Callable[[str, float], None] = staticmethod(lambda _name, _seconds: None)

    def __init__(self, database: Database, *, content: Content) -> None:
        self.journal = database.journal
        self.notices = database.notices
        self.shared = database.shared
        self.keeps_content = content == "full"
        self.load, self.backup, self.close = database.load, database.backup, database.close
        self._database = database
        self._damaged: set[tuple[str, str, str]] = set()
        self._unmarked: set[tuple[str, str]] = set()
        self._secret: bytes | None = None
        self._arrivals, self._arriving = _Arrivals(), asyncio.Lock()

    @classmethod
    async def open(
        cls,
        url: str,
        *,
        content: Content = "full",
        read_only: bool = False,
        visitor: bool = False,
        any_schema: bool = False,
        busy_timeout: float = BUSY_TIMEOUT,
        connections: int = CONNECTIONS,
    ) -> Self:
        """The store behind an SQLAlchemy ``url``, its schema brought up to date.

        Args:
            url: ``sqlite+aiosqlite:///weir.db``, ``sqlite+aiosqlite://`` (memory), ``postgresql://…``.
            content: with ``digest`` nothing that a message, a summary or a note says reaches the disk: of originals
                SHA-256 and size are kept, of edits and cuts all but their texts. What replays them lives in memory,
                so that after a restart a conversation is managed anew.
            read_only: look only; nothing is migrated or written.
            visitor: a short-lived writer beside a running server. It keeps that server from checkpointing for as
                long as it is open (see :mod:`proxy.store.sqlite` for why), so close it soon.
            any_schema: to a reader the schema may be an older one: such a store can be backed up, nothing else.
            busy_timeout: seconds to wait for others before :class:`StoreUnavailable`; a server waits no longer for a
                statement either.
            connections: to a database server, at most.
        """
        mode: Mode = "reader" if read_only else "visitor" if visitor else "server"
        mode = "copier" if any_schema and "postgres" not in url.partition(":")[0] else mode
        return cls(await _opened(url, mode=mode, patience=busy_timeout, connections=connections), content=content)

    async def ping(self) -> None:
        await self._database.ping()

    @property
    def damaged(self) -> int:
        return len(self._damaged)

    @contextmanager
    def telling(self, name: str) -> Iterator[None]:
        begun = time.perf_counter()
        try:
            yield
        finally:
            self.took(name, time.perf_counter() - begun)

    find = reading(branches.find, "find")
    branch = reading(branches.branch, "branch")
    named = reading(conversations_.named)
    newest_branch = reading(ledger.newest_branch)
    commit = writing(branches.commit, "commit")
    fork = writing(branches.fork, "fork")
    restate = writing(branches.restate)
    prepare = writing(branches.prepare)
    claim = writing(branches.claim)
    release = writing(branches.release)
    want = writing(branches.want)
    rollback = writing(branches.rollback)
    take_back = writing(branches.take_back)
    open_view = writing(ledger.open_view)

    conversations = reading(conversations_.listed)
    conversation = reading(conversations_.one)
    figures = reading(exchanges.figures)
    overheads = reading(exchanges.overheads)
    beside = reading(exchanges.beside)
    fullest = reading(conversations_.fullest)
    dearest = reading(exchanges.dearest)
    passed = reading(exchanges.passed)
    close_conversation = writing(conversations_.close_conversation)
    export = reading(maintenance.export)

    checkpoints = reading(memory.listed)
    checkpoint_at = reading(memory.at_version)
    latest_checkpoint = reading(branches.latest_checkpoint, "latest_checkpoint")
    notes = reading(memory.all_notes, "notes")
    add_notes = writing(memory.add_notes)
    summary = reading(memory.summary, "summary")
    keep_summary = writing(memory.keep_summary)

    original = reading(archive.original, "original")
    covered = reading(inspections.covered, "covered")
    held = reading(archive.held)
    lacking_vectors = reading(archive.lacking_vectors)
    add_vectors = writing(archive.add_vectors)
    nearest = reading(archive.nearest)
    removed = reading(inspections.removed)
    count_removed = reading(inspections.count_removed)
    evictions = reading(ledger.listed)
    count_evictions = reading(ledger.count_evictions)

    answers = reading(memory.answers_behind, "answers")
    known_answers = reading(memory.known_answers, "known_answers")
    answers_with = reading(memory.answers_with, "answers_with")
    forget_answer = writing(memory.forget_answer)
    own_provider_ids = reading(memory.own_provider_ids, "own_provider_ids")

    timeline = reading(exchanges.timeline)
    inspection = reading(inspections.inspection)
    snapshots = reading(conversations_.snapshots)
    alerts = reading(conversations_.alerts_of)
    open_alerts = reading(conversations_.open_alerts)

    audit = reading(audit_.listed)
    verify = reading(audit_.verify)
    add_key = writing(configuration.add_key)
    list_keys = reading(configuration.list_keys)
    revoke_key = writing(configuration.revoke_key)
    change_key = writing(configuration.change_key)
    rotate_key = writing(configuration.rotate_key)
    enter_key = writing(key_use.enter, "enter_key")
    keep_key_use = writing(key_use.keep)
    save_policy = writing(configuration.save_policy)
    delete_policy = writing(configuration.delete_policy)
    policies = reading(configuration.all_policies)
    note_changes = writing(configuration.note_changes)
    limits = reading(configuration.all_limits)
    calibrations = reading(configuration.all_calibrations)
    learn = writing(configuration.learn)
    forget_limit = writing(configuration.forget_limit)
    size = reading(maintenance.size)
    requests = reading(maintenance.requests)
    sizes = reading(maintenance.sizes)
    counts = reading(maintenance.counts)
    keep_size = writing(maintenance.keep_size)
    facts = reading(configuration.facts)
    tell = writing(configuration.tell)
    newest = reading(configuration.newest)

    async def secret(self) -> bytes:
        if self._secret is None:
            found = await self._read(configuration.stored_secret)
            self._secret = found if found is not None else await self._write(configuration.make_secret)
        return self._secret

    async def arrive(self, arrival: Arrival) -> str:
        """The id of its conversation, once it is stored; those that come while others are stored go together."""
        mine = self._arrivals
        mine.rows.append(arrival)
        with self.telling("arrive"):
            async with self._arriving:
                if mine is self._arrivals:
                    self._arrivals = _Arrivals()
                    try:
                        mine.homes = await self._write(lambda tx: exchanges.arrive(tx, mine.rows))
                    except StoreError as error:
                        mine.error = error
                    except Exception:  # noqa: BLE001 - one that cannot be written is no other's fault
                        mine.homes = {}
                if mine.error is not None:
                    raise mine.error
                if arrival.id not in mine.homes:
                    mine.homes |= await self._write(lambda tx: exchanges.arrive(tx, [arrival]))
                return mine.homes[arrival.id]

    async def record(self, rows: Sequence[Row]) -> Sequence[ExchangeRow]:
        """Store a batch of exchanges, their chain ends, and what conversations and branches count, in one go.

        Those that are new come back; in a shared store their health is that which all servers together have seen.

        Conversations and branches that are missing are made; what was only relayed belongs to none. An empty
        ``chain_end`` leaves no trace to be found by.
        """
        if not rows:
            return ()

        def work(tx: Transaction) -> tuple[Sequence[ExchangeRow], bool]:
            return exchanges.record(tx, rows, shared=self.shared), archive.waits_for_index(tx)

        with self.telling("record"):
            stored, waits = await self._write(work)
            if waits:
                await self._index(INDEXED_AT_ONCE)
            await self._database.tend()
        return stored

    async def search(
        self, tenant: str, text: str, *, limit: int = 20, conversation: str | None = None
    ) -> list[Original]:
        with self.telling("search"):
            if self._database.writable and await self._read(archive.waits_for_index):
                await self._index()
            return await self._read(lambda tx: archive.search(tx, tenant, text, limit=limit, conversation=conversation))

    async def usage(self, tenant: str | None, *, since: float, by: exchanges.By | None = None) -> list[UsageRow]:
        """What requests took from the day (UTC) of ``since`` on, by key and ``by`` group; the most tokens first."""
        rows: list[UsageRow] = []
        for day in await self._read(lambda tx: exchanges.days(tx, since)):
            rows += await self._read(partial(exchanges.used, tenant=tenant, day=day, by=by))
        return exchanges.added_up(rows)

    async def delete(self, conversation: ConversationRow, at: float | None = None) -> bool:
        found = await self._write(lambda tx: maintenance.delete(tx, conversation, at))
        await self._database.tend(force=True)
        return found

    async def prune(self, before: float, at: float | None = None) -> int:
        """Delete conversations last used, and exchanges and summaries made, before ``before``; how many rows.

        Rows of the audit from before it go too, but not the last one of a chain, and are not counted. It works in small
        transactions, so that requests in between hardly wait.
        """
        total, now = 0, time.time() if at is None else at
        conversations_of = partial(maintenance.prune_conversations, at=now)
        for step in (conversations_of, *(partial(maintenance.prune, key=key) for key in maintenance.PRUNED)):
            while gone := await self._write(partial(step, before=before)):
                total += gone
                await self._database.tend()
        while await self._write(partial(audit_.drop, before=before)):
            await self._database.tend()
        if total:
            await self._shrink()
        return total

    async def prune_usage(self, before: float) -> None:
        """Delete for good what requests took on days that began before ``before``."""
        while await self._write(partial(maintenance.prune, key=usage_days.c.at, before=before)):
            await self._database.tend()

    async def fit(self, most: int, *, before: float, at: float) -> int:
        """Delete conversations last used before ``before`` if the database takes more than ``most`` bytes; how many.

        Closed ones go first, then those that were used longest ago, a few at a time as in :meth:`prune`, until it
        takes a tenth less: making room costs as much for one as for many.
        """
        total, used = 0, await self._read(maintenance.size)
        while used > (most if total == 0 else most * ROOM):
            due = await self._read(maintenance.requests) * (1 - most * ROOM / used)
            fewer, gone, step = 0, 0, (1, 1)
            while step[0] and (fewer < due or gone == 0):
                step = await self._write(partial(maintenance.drop_oldest, before=before, at=at, most=due - fewer))
                gone, fewer = gone + step[0], fewer + step[1]
                await self._database.tend()
            if not gone:
                break
            total += gone
            await self._shrink()
            used = await self._read(maintenance.size)
        return total

    async def checkpoint(self) -> bool:
        return await self._database.tend(force=True)

    async def _read(self, work: Callable[[Transaction], T]) -> T:
        found = await self._database.read(lambda c: work(Transaction(c, full=self.keeps_content, damage=self._damage)))
        if self._unmarked and self._database.writable:
            fresh, self._unmarked = self._unmarked, set()
            with suppress(StoreError):  # what was read is absent either way; the next read marks it
                await self._write(
                    lambda tx: tx.many(archive.QUARANTINE, [{"of_tenant": t, "of_ref": ref} for t, ref in fresh])
                )
        return found

    async def _write(self, work: Callable[[Transaction], T]) -> T:
        return await self._database.write(lambda c: work(Transaction(c, full=self.keeps_content, damage=self._damage)))

    def _damage(self, kind: str, tenant: str, key: str) -> None:
        self._damaged.add((kind, tenant, key))
        if kind == "original":
            self._unmarked.add((tenant, key))

    async def _shrink(self) -> None:
        begins = True
        while await self._write(partial(archive.merge_words, begins=begins)):
            begins = False
            await self._database.tend()
        while await self._database.shrink():
            await self._database.tend()

    async def _index(self, steps: int | None = None) -> None:
        """Index the words that wait, of a database that was made anew from an older one for a long time."""
        for _ in count() if steps is None else range(steps):
            if not await self._write(archive.index_some):
                break


class WriteBehindQueue:
    """Writes rows in the background; one task, started by :meth:`start` and ended by :meth:`close`.

    ``stored`` is told each exchange that was new to the store, as it was stored; ``overtaken`` each change that waited
    while another process made one in its place.
    """

    def __init__(
        self, store: Store, *, degraded: Callable[[str], None], stored: Callable[[ExchangeRow], None] = lambda _: None
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
        self._failing, self._held = False, 0

    @property
    def failing(self) -> bool:
        return self._failing or bool(self._changes)

    @property
    def is_full(self) -> bool:
        """Whether what a request was about should not wait here: it is given with the next one instead."""
        return self._failing or len(self._rows) >= MAX_INSPECTED or self._held >= MAX_HELD

    def waiting(self) -> dict[tuple[str, ...], float]:
        return {("rows",): len(self._rows), ("changes",): len(self._changes)}

    def start(self) -> None:
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="weir-settle")

    def put(self, row: Row) -> None:
        self._held += _weight(row)
        self._rows.append(row)
        self._wake.set()

    def keep(self, change: Change) -> None:
        if len(self._changes) >= MAX_CHANGES:
            self._changes.popleft()
            log.error("the store has been down for too long: a change of conversation was dropped from memory")
        self._changes.append(change)
        self._wake.set()

    def original(self, tenant: str, ref: str) -> bytes | None:
        """The original of a removed message among the changes that wait, None if it is not there."""
        held = (each for change in self._changes if change.tenant == tenant for each in change.originals)
        return next((each.body for each in held if each.ref == ref), None)

    async def flush(self) -> None:
        """Write what waits now; what comes meanwhile is gathered for the next batch."""
        async with self._writing:
            await self._write_all(len(self._rows))

    async def close(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            async with self._writing:  # the store ends what it has begun: nothing may be written beside it
                task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        async with self._writing:
            await self._write_all(MAX_ROWS)

    async def _run(self) -> None:
        while True:
            await self._wake.wait()
            await asyncio.sleep(RETRY_PAUSE if self._failing else PAUSE)
            self._wake.clear()
            await self.flush()
            if self._changes or self._rows:
                self._wake.set()

    async def _write_all(self, most: int) -> None:
        while (self._changes or (self._rows and most > 0)) and (written := await self._write()) is not None:
            most -= written

    async def _write(self) -> int | None:  # how many rows; None where the store failed
        rows, weight = list[Row](), 0
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
        except Exception:  # a row that cannot be written at all must not stop those behind it
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
            told = audit_.of_change(change, conversation=change.conversation, version=None)
            kept = msgspec.structs.replace(nothing, expected=stale.current, audited=change.audited or tuple(told))
            if kept.originals:  # anew where another process has been first once more
                await self._commit(kept)

    def _fail(self, error: StoreError) -> None:
        if not self._failing:
            log.error("the store cannot be written, rows wait in memory: %s", error)
        self._failing = True
        self._degraded("store")


def _weight(row: Row) -> int:
    return sum(map(len, row.inspection.raws)) if isinstance(row, ExchangeRow) and row.inspection is not None else 0


def _bare(row: Row) -> Row:
    if not isinstance(row, ExchangeRow) or row.inspection is None:
        return row
    return msgspec.structs.replace(row, inspection=None)


async def _opened(url: str, *, mode: Mode, patience: float, connections: int) -> Database:
    scheme = url.partition("://")[0]
    if scheme in POSTGRES_SCHEMES:
        # Loaded by name: SQLAlchemy's asyncio package costs 120 ms and 8 MB that a SQLite user need not pay.
        module = importlib.import_module("proxy.store.postgres")
        database: Database = await module.PostgresDatabase.open(
            url, mode=mode, patience=patience, connections=connections
        )
        return database
    try:
        parsed = sa.make_url(url)
    except sa.exc.ArgumentError:
        raise StoreError("the store's URL cannot be read", reason="url") from None
    if parsed.get_backend_name() == "sqlite":
        return await SqliteDatabase.open(parsed.database, mode=mode, patience=patience)
    raise StoreError(
        f"the store cannot be a {scheme} database: its URL begins with sqlite+aiosqlite:// or postgresql://",
        reason="url",
    )
