"""The store's interface: each method is one transaction, or one consistent read.

A task that is cancelled inside leaves no lock and never half of a transaction (it may leave a whole
one). Errors are the :class:`StoreError` tree.
"""

import asyncio
import importlib
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial, wraps
from itertools import count
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import sqlalchemy as sa

from proxy.store import answers as answers_
from proxy.store import (
    archive,
    branches,
    budgets,
    configuration,
    exchanges,
    inspections,
    key_use,
    ledger,
    maintenance,
)
from proxy.store import audit as audit_
from proxy.store import checkpoints as checkpoints_
from proxy.store import conversations as conversations_
from proxy.store import notes as notes_
from proxy.store import removed as removed_
from proxy.store import usage as usage_
from proxy.store.engine import Database
from proxy.store.records import (
    DAY,
    Arrival,
    ConversationRow,
    ExchangeRow,
    Original,
    Row,
    StoreError,
    StoreUnavailable,
)
from proxy.store.schema import HEAD, usage_days
from proxy.store.sqlite import SqliteDatabase
from proxy.store.transaction import Content, Transaction

P = ParamSpec("P")
T = TypeVar("T")
Work = Callable[Concatenate[Transaction, P], T]
Method = Callable[Concatenate["Store", P], Coroutine[Any, Any, T]]
POSTGRES_SCHEMES = frozenset({"postgres", "postgresql", "postgresql+asyncpg"})
BUSY_TIMEOUT = 5.0
CONNECTIONS = 4
MONTH = 31 * DAY
INDEXED_AT_ONCE = 4  # steps of 256 KiB for which a batch of rows waits
ROOM = 0.9  # of the largest size, when a database was made smaller


@dataclass(slots=True)
class _Arrivals:
    rows: list[Arrival] = field(default_factory=list)
    homes: dict[str, str] = field(default_factory=dict)
    error: StoreError | None = None


def reading(work: Work[P, T], operation: str = "") -> Method[P, T]:
    return _method(work, operation, writes=False)


def writing(work: Work[P, T], operation: str = "") -> Method[P, T]:
    return _method(work, operation, writes=True)


def _method(work: Work[P, T], operation: str, *, writes: bool) -> Method[P, T]:
    @wraps(work)
    async def method(self: "Store", /, *args: P.args, **kwargs: P.kwargs) -> T:
        run = self._write if writes else self._read
        with self.timed(operation) if operation else nullcontext():
            return await run(lambda tx: work(tx, *args, **kwargs))

    return method


class Store:
    """The store. ``took`` is called with each operation that requests wait for, and the seconds
    that it took.
    """

    schema = HEAD
    took: Callable[[str, float], None] = staticmethod(lambda _name, _seconds: None)

    def __init__(self, database: Database, *, content: Content) -> None:
        self.journal = database.journal
        self.notices = database.notices
        self.shared = database.shared
        self.keeps_content = content == "full"
        self.load = database.load
        self.backup = database.backup
        self.checkpoint = database.checkpoint
        self.close = database.close
        self._database = database
        self._damaged: set[tuple[str, str, str]] = set()
        self._unmarked: set[tuple[str, str]] = set()
        self._secret: bytes | None = None
        self._arrivals = _Arrivals()
        self._arriving = asyncio.Lock()

    @classmethod
    async def open(
        cls,
        url: str,
        *,
        content: Content = "full",
        read_only: bool = False,
        busy_timeout: float = BUSY_TIMEOUT,
        statement_timeout: float | None = None,
        connections: int = CONNECTIONS,
    ) -> Self:
        """The store at an SQLAlchemy ``url``, its schema brought up to date.

        Args:
            url: ``sqlite+aiosqlite:///weir.db``, ``sqlite+aiosqlite://`` (memory),
                ``postgresql://…``.
            content: with ``digest`` nothing that a message, a summary or a note says reaches the
                disk: of originals SHA-256 and size are kept, of edits and cuts all but their texts.
                What replays them lives in memory, so that after a restart a conversation is managed
                anew.
            read_only: Nothing is migrated or written.
            busy_timeout: Seconds to wait for others before :class:`StoreUnavailable`.
            statement_timeout: Seconds that a database server may take for a statement,
                ``busy_timeout`` by default.
            connections: The most connections to a database server.
        """
        if url.partition("://")[0] in POSTGRES_SCHEMES:
            # Loaded by name, so that a SQLite user need not have its driver.
            module = importlib.import_module("proxy.store.postgres")
            database: Database = await module.PostgresDatabase.open(
                url,
                read_only=read_only,
                patience=busy_timeout,
                statement=statement_timeout,
                connections=connections,
            )
        else:
            database = await SqliteDatabase.open(
                file_of(url), read_only=read_only, patience=busy_timeout
            )
        return cls(database, content=content)

    async def ping(self) -> None:
        await self._database.ping()

    @property
    def damaged(self) -> int:
        return len(self._damaged)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
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
    figures = reading(usage_.figures)
    overheads = reading(usage_.overheads)
    beside = reading(usage_.beside)
    fullest = reading(conversations_.fullest)
    dearest = reading(usage_.dearest)
    usage = reading(usage_.usage)
    passed = reading(usage_.passed)
    close_conversation = writing(conversations_.close_conversation)
    export = reading(maintenance.export)

    checkpoints = reading(checkpoints_.listed)
    checkpoint_at = reading(checkpoints_.at_version)
    latest_checkpoint = reading(branches.latest_checkpoint, "latest_checkpoint")
    notes = reading(notes_.all_notes, "notes")
    add_notes = writing(notes_.add_notes)
    summary = reading(notes_.summary, "summary")
    keep_summary = writing(notes_.keep_summary)

    original = reading(archive.original, "original")
    covered = reading(removed_.covered, "covered")
    held = reading(archive.held)
    lacking_vectors = reading(archive.lacking_vectors)
    add_vectors = writing(archive.add_vectors)
    nearest = reading(archive.nearest)
    removed = reading(removed_.removed)
    count_removed = reading(removed_.count_removed)
    evictions = reading(ledger.listed)
    count_evictions = reading(ledger.count_evictions)

    answers = reading(answers_.answers_behind, "answers")
    known_answers = reading(answers_.known_answers, "known_answers")
    answers_with = reading(answers_.answers_with, "answers_with")
    forget_answer = writing(answers_.forget_answer)
    own_provider_ids = reading(answers_.own_provider_ids, "own_provider_ids")

    timeline = reading(exchanges.timeline)
    inspection = reading(inspections.inspection)
    search_kept = reading(inspections.search_kept, "search")
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
    reserve = writing(budgets.reserve, "reserve")
    spent = reading(budgets.spent)
    renew_reservations = writing(budgets.renew)
    is_first_notice = writing(budgets.is_first)
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
            self._secret = (
                found if found is not None else await self._write(configuration.make_secret)
            )
        return self._secret

    async def arrive(self, arrival: Arrival) -> str:
        """The id of its conversation, once it is stored; those that come while others are stored go
        together.
        """
        mine = self._arrivals
        mine.rows.append(arrival)
        with self.timed("arrive"):
            async with self._arriving:
                if mine is self._arrivals:
                    self._arrivals = _Arrivals()
                    try:
                        mine.homes = await self._write(lambda tx: exchanges.arrive(tx, mine.rows))
                    except StoreError as error:
                        mine.error = error
                    except Exception:  # noqa: BLE001 - one that cannot be written must not affect others
                        mine.homes = {}
                if mine.error is not None:
                    raise mine.error
                if arrival.id not in mine.homes:
                    mine.homes |= await self._write(lambda tx: exchanges.arrive(tx, [arrival]))
                return mine.homes[arrival.id]

    async def record(self, rows: Sequence[Row]) -> Sequence[ExchangeRow]:
        """Store a batch of exchanges, their chain ends, and what conversations and branches count,
        in one go.

        Those that are new come back; in a shared store their health is that which all servers
        together have seen.

        Conversations and branches that are missing are made; what was only relayed belongs to none.
        An empty ``chain_end`` leaves no trace to be found by.
        """
        if not rows:
            return ()

        def work(tx: Transaction) -> tuple[Sequence[ExchangeRow], bool]:
            return exchanges.record(tx, rows, shared=self.shared), archive.waits_for_index(tx)

        with self.timed("record"):
            stored, waits = await self._write(work)
            if waits:
                await self._index(INDEXED_AT_ONCE)
        return stored

    async def search(
        self, tenant: str, text: str, *, limit: int = 20, conversation: str | None = None
    ) -> list[Original]:
        with self.timed("search"):
            if self._database.writable and await self._read(archive.waits_for_index):
                await self._index()
            return await self._read(
                lambda tx: archive.search(tx, tenant, text, limit=limit, conversation=conversation)
            )

    async def delete(self, conversation: ConversationRow, at: float | None = None) -> bool:
        found = await self._write(lambda tx: maintenance.delete(tx, conversation, at))
        # it is deleted; the next checkpoint takes it out of the log
        with suppress(StoreUnavailable):
            await self._database.checkpoint()
        return found

    async def prune(self, before: float, at: float | None = None) -> int:
        """Delete conversations last used, and exchanges and summaries made, before ``before``; how
        many rows.

        Rows of the audit from before it go too, but not the last one of a chain, and are not
        counted. It works in small transactions, so that requests in between hardly wait.
        """
        total = 0
        conversations_of = partial(
            maintenance.prune_conversations, at=time.time() if at is None else at
        )
        for step in (
            conversations_of,
            *(partial(maintenance.prune, key=key) for key in maintenance.PRUNED),
        ):
            while gone := await self._write(partial(step, before=before)):
                total += gone
        while await self._write(partial(audit_.drop, before=before)):
            pass
        if total:
            await self._shrink()
        return total

    async def prune_usage(self, before: float) -> None:
        """Delete for good what requests took on days that began before ``before``."""
        while await self._write(partial(maintenance.prune, key=usage_days.c.at, before=before)):
            pass
        # a budget of this month looks back so far
        await self._write(partial(usage_.prune_keys, before=before - MONTH))

    async def fit(self, most: int, *, before: float, at: float) -> int:
        """Delete conversations last used before ``before`` if the database takes more than ``most``
        bytes; how many.

        Closed ones go first, then those that were used longest ago, a few at a time as in
        :meth:`prune`, until it takes a tenth less: making room costs as much for one as for many.
        """
        total = 0
        used = await self._read(maintenance.size)
        while used > (most if total == 0 else most * ROOM):
            due = await self._read(maintenance.requests) * (1 - most * ROOM / used)
            fewer = 0
            gone = 0
            while fewer < due or gone == 0:
                step = partial(maintenance.drop_oldest, before=before, at=at, most=due - fewer)
                conversations, requests = await self._write(step)
                if not conversations:
                    break
                gone += conversations
                fewer += requests
            if not gone:
                break
            total += gone
            await self._shrink()
            used = await self._read(maintenance.size)
        return total

    async def _read(self, work: Callable[[Transaction], T]) -> T:
        found = await self._database.read(
            lambda c: work(Transaction(c, full=self.keeps_content, damage=self._damage))
        )
        if self._unmarked and self._database.writable:
            fresh = self._unmarked
            self._unmarked = set()
            with suppress(StoreError):  # what was read is absent either way; the next read marks it
                await self._write(
                    lambda tx: tx.many(
                        archive.QUARANTINE, [{"of_tenant": t, "of_ref": ref} for t, ref in fresh]
                    )
                )
        return found

    async def _write(self, work: Callable[[Transaction], T]) -> T:
        return await self._database.write(
            lambda c: work(Transaction(c, full=self.keeps_content, damage=self._damage))
        )

    def _damage(self, kind: str, tenant: str, key: str) -> None:
        self._damaged.add((kind, tenant, key))
        if kind == "original":
            self._unmarked.add((tenant, key))

    async def _shrink(self) -> None:
        begins = True
        while await self._write(partial(archive.merge_words, begins=begins)):
            begins = False
        while await self._write(maintenance.give_back):
            pass

    async def _index(self, steps: int | None = None) -> None:
        """Index the words that wait, of a database that was made anew from an older one for a long
        time.
        """
        for _ in count() if steps is None else range(steps):
            if not await self._write(archive.index_some):
                break


def file_of(url: str) -> str | None:
    """The file of a SQLite URL, None for a database in memory."""
    try:
        parsed = sa.make_url(url)
    except sa.exc.ArgumentError:
        raise StoreError("the store's URL cannot be read", reason="url") from None
    if parsed.get_backend_name() != "sqlite":
        raise StoreError(
            f"the store cannot be a {parsed.drivername} database: its URL begins with"
            " sqlite+aiosqlite:// or postgresql://",
            reason="url",
        )
    return parsed.database
