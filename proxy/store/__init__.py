"""What Weir remembers: conversations, their edits and evictions, the archive, exchanges, keys, what upstreams taught.

:class:`Store` is the front door, and everything outside this package uses only it, the records and the errors.
Each method is one transaction, or one consistent read; a task that is cancelled inside leaves no lock and never
half of a transaction (it may leave a whole one). Errors are the :class:`StoreError` tree.
"""

import time
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Literal, NamedTuple, Self

import sqlalchemy as sa

from policies.ledger import Cut, Edit
from proxy.store import (
    archive,
    audit,
    conversations,
    documents,
    evictions,
    exchanges,
    keys,
    learned,
    ledger,
    maintenance,
    summaries,
    vectors,
)
from proxy.store.chain import AuditEvent, AuditRow, AuditType
from proxy.store.engine import Database, open_database
from proxy.store.errors import (
    CorruptStore,
    NameTaken,
    NoSuchVersion,
    SchemaTooNew,
    StaleVersion,
    StoreError,
    StoreUnavailable,
)
from proxy.store.kept import Content, Kept
from proxy.store.paging import Place
from proxy.store.records import (
    AlertRow,
    Arrival,
    Branch,
    CalibrationRow,
    Change,
    CheckpointRow,
    ConversationRow,
    EvictionRow,
    EvictionSum,
    ExchangeRow,
    KeyRow,
    LimitRow,
    NoteRow,
    Original,
    PolicyRow,
    RelayedRow,
    RemovedRow,
    SummaryRow,
    UsageRow,
)
from proxy.store.schema import HEAD
from proxy.store.sqlite import SqliteDatabase
from proxy.store.verification import Broken, Progress, Verified, verify

BUSY_TIMEOUT = 5.0
CONNECTIONS = 4
ROOM = 0.9  # of the largest size, when a database was made smaller


class Audited(NamedTuple):
    """What was found in the chains of the audit, and which of the triggers that guard its table are not there."""

    chains: list[Verified]
    unguarded: list[str]


class Store(Kept):
    """The database of one Weir.

    ``journal`` is ``wal``, ``delete``, ``memory`` or ``server``; ``notices`` is what to say loudly at start;
    ``damaged`` counts the rows seen so far whose content was not what had been written.
    """

    def __init__(self, database: Database, *, content: Content) -> None:
        super().__init__(database, content=content)
        self._secret: bytes | None = None

    @classmethod
    async def open(
        cls,
        url: str,
        *,
        content: Content = "full",
        shared: bool = False,
        read_only: bool = False,
        visitor: bool = False,
        busy_timeout: float = BUSY_TIMEOUT,
        connections: int = CONNECTIONS,
    ) -> Self:
        """The store behind an SQLAlchemy ``url``, its schema brought up to date.

        Args:
            url: ``sqlite+aiosqlite:///weir.db``, ``sqlite+aiosqlite://`` (memory), ``postgresql://…``.
            content: with ``digest`` nothing that a message, a summary or a note says reaches the disk: of originals
                SHA-256 and size are kept, of edits and cuts all but their texts. What replays them lives in memory,
                so that after a restart a conversation is managed anew.
            shared: several server processes use this database file; a database server is always shared.
            read_only: look only; nothing is migrated or written.
            visitor: a short-lived writer beside a running server. It keeps that server from checkpointing for as
                long as it is open (see :mod:`proxy.store.sqlite` for why), so close it soon.
            busy_timeout: seconds to wait for others before :class:`StoreUnavailable`; a server waits no longer for a
                statement either.
            connections: to a database server, at most.
        """
        mode: Literal["server", "worker", "visitor", "reader"] = "worker" if shared else "server"
        mode = "reader" if read_only else "visitor" if visitor else mode
        database = await open_database(url, mode=mode, patience=busy_timeout, connections=connections)
        return cls(database, content=content)

    async def close(self) -> None:
        """Finish what has begun and close the database."""
        await self._database.close()

    @property
    def schema(self) -> str:
        """The revision of the schema, which is the newest one that this Weir knows."""
        return HEAD

    @property
    def reopened(self) -> int:
        """How often another file was opened in the place of one that was deleted or replaced."""
        return self._database.opened if isinstance(self._database, SqliteDatabase) else 0

    async def ping(self) -> None:
        """Return if the database can be written (read-only stores: read) now, else raise :class:`StoreError`."""
        await self._database.ping()

    async def secret(self) -> bytes:
        """The 32 bytes that credentials are hashed with (HMAC); made once per database."""
        if self._secret is None:
            found = await self._database.read(keys.stored_secret)
            self._secret = found if found is not None else await self._database.write(keys.secret)
            if isinstance(self._database, SqliteDatabase):
                self._database.seed = partial(keys.keep_secret, value=self._secret)
        return self._secret

    async def find(self, tenant: str, chain: Sequence[bytes]) -> Branch | None:
        """The branch with the longest stored prefix of ``chain`` (``chain[j]``: hash over ``j + 1`` messages).

        ``length`` is how many messages matched, ``longest`` how many the branch has ever had; ties go to the newest.
        """
        return await self._database.read(lambda c: conversations.find(c, tenant, chain, self._damage))

    async def named(self, tenant: str, name: str) -> str | None:
        """The internal id of the tenant's conversation with this label."""
        return await self._database.read(lambda c: conversations.named(c, tenant, name))

    async def branch(self, tenant: str, branch_id: str) -> Branch | None:
        """The branch with this id; ``length`` is 0."""
        return await self._database.read(lambda c: conversations.branch(c, tenant, branch_id, self._damage))

    async def commit(self, change: Change) -> int:
        """The branch's new version, once everything in ``change`` is durable; :class:`StaleVersion` stores nothing."""
        return await self._database.write(lambda c: conversations.commit(c, change, full=self._full))

    async def fork(
        self,
        parent: Branch,
        *,
        branch: str,
        keep_edits: Sequence[Edit],
        keep_cuts: Sequence[Cut],
        at: float,
        length: int | None = None,
    ) -> Branch:
        """The new branch, with these edits and cuts of its parent; its version goes on from the parent's.

        It starts with the parent's newest checkpoint of at most ``length`` messages after the head (None: any).
        """
        work = partial(
            conversations.fork,
            parent=parent,
            branch=branch,
            keep_edits=keep_edits,
            keep_cuts=keep_cuts,
            at=at,
            length=length,
            damage=self._damage,
            full=self._full,
        )
        return await self._database.write(work)

    async def arrive(self, arrival: Arrival) -> str:
        """Have other servers find a request's branch from now on; the id that its conversation has."""
        return await self._database.write(lambda c: exchanges.arrive(c, arrival))

    async def restate(self, branch: Branch, *, edits: Sequence[Edit], cuts: Sequence[Cut], at: float) -> None:
        """Have the store know of a branch what memory does, where it knows less: its file is not the one it was."""
        work = partial(conversations.restate, known=branch, edits=edits, cuts=cuts, at=at, full=self._full)
        await self._database.write(work)

    async def record(self, rows: Sequence[ExchangeRow | RelayedRow]) -> Sequence[ExchangeRow]:
        """Store a batch of exchanges, their chain ends, and what conversations and branches count, in one go.

        Those that are new come back; in a shared store their health is that which all servers together have seen.

        Conversations and branches that are missing are made; what was only relayed belongs to none. An empty
        ``chain_end`` leaves no trace to be found by.
        """
        if not rows:
            return ()
        stored = await self._database.write(lambda c: exchanges.record(c, rows, shared=self.shared))
        await self._index()
        await self._database.tend()
        return stored

    async def annotate(self, tenant: str, exchange: str, facts: Mapping[str, object]) -> bool:
        """Add facts to the detail of an exchange that was recorded; False where it is not there."""
        return await self._database.write(lambda c: exchanges.annotate(c, tenant, exchange, facts))

    async def evaluated(self, tenant: str, exchange: str, fidelity: Mapping[str, object], at: float) -> bool:
        """Keep what the evaluation of an exchange's summary came to; False where the exchange is not there."""
        return await self._database.write(lambda c: exchanges.evaluated(c, tenant, exchange, fidelity, at))

    async def note_changes(self, changes: Sequence[AuditEvent]) -> None:
        """Audit what a configuration that was read anew changed; what was told last of the same thing is not repeated.

        Every worker reads the same file.
        """
        if changes:
            await self._database.write(lambda c: documents.note_changes(c, changes))

    async def original(self, tenant: str, ref: str) -> Original | None:
        """The removed message with this ref; None if unknown, damaged, or kept as a digest only."""
        found = await self._database.read(lambda c: archive.original(c, tenant, ref, self._damage))
        await self._quarantine()
        return found

    async def covered(self, tenant: str, ref: str) -> list[Original]:
        """What the cut with this ref covers, in order, as far as it is there."""

        def work(connection: sa.Connection) -> list[Original]:
            refs = ledger.covered_refs(connection, tenant, ref)
            return archive.originals_of(connection, tenant, refs, self._damage)

        found = await self._database.read(work)
        await self._quarantine()
        return found

    async def held(self, tenant: str, conversation: str) -> set[str]:
        """The refs of all that was removed from a conversation (by id)."""
        return await self._database.read(lambda c: set(c.scalars(archive.held_by(tenant, conversation))))

    async def search(
        self, tenant: str, text: str, *, limit: int = 20, conversation: str | None = None
    ) -> list[Original]:
        """Removed messages with all words of ``text``, else with any of them, best first.

        With the id of a ``conversation`` only those that were removed from it.
        """
        await self._index()
        work = partial(
            archive.search, tenant=tenant, text=text, limit=limit, conversation=conversation, damage=self._damage
        )
        found = await self._database.read(work)
        await self._quarantine()
        return found

    async def lacking_vectors(self, tenant: str, conversation: str, model: str, *, limit: int) -> dict[str, str]:
        """The newest removed texts of a conversation (by id) that have no vector by this model, by ref."""
        return await self._database.read(lambda c: vectors.lacking(c, tenant, conversation, model, limit))

    async def add_vectors(self, tenant: str, model: str, given: Mapping[str, Sequence[float]]) -> None:
        """Keep vectors of removed texts, by ref."""
        await self._database.write(lambda c: vectors.add(c, tenant, model, given))

    async def nearest(
        self, tenant: str, conversation: str, model: str, wanted: Sequence[float], *, limit: int
    ) -> list[tuple[Original, float]]:
        """The removed texts of a conversation (by id) that are most like ``wanted``, each with its cosine."""

        def work(connection: sa.Connection) -> list[tuple[Original, float]]:
            near = vectors.nearest(connection, tenant, conversation, model, wanted, limit=limit)
            found = archive.originals_of(connection, tenant, [ref for ref, _ in near], self._damage)
            alike = dict(near)
            return [(each, alike[each.ref]) for each in found]

        result = await self._database.read(work)
        await self._quarantine()
        return result

    async def conversations(
        self, tenant: str | None, *, limit: int = 50, closed: bool | None = None, after: Place | None = None
    ) -> list[ConversationRow]:
        """The tenant's conversations, or with None everybody's, the one used last first.

        ``closed`` leaves those that are, or are not; ``after`` those behind one of which this is ``updated``, ``id``
        and ``tenant``.
        """
        return await self._database.read(
            lambda c: conversations.listed(c, tenant, limit=limit, closed=closed, after=after)
        )

    async def conversation(self, tenant: str | None, name_or_id: str) -> ConversationRow | None:
        """One conversation by label or internal id."""
        return await self._database.read(lambda c: conversations.one(c, tenant, name_or_id))

    async def timeline(
        self,
        conversation: ConversationRow,
        *,
        limit: int = 200,
        since: float | None = None,
        after: Place | None = None,
    ) -> list[ExchangeRow]:
        """The newest ``limit`` exchanges of a conversation, oldest first.

        ``since`` leaves those from then on, ``after`` those older than one of which this is ``at`` and ``id``.
        """
        return await self._database.read(
            lambda c: exchanges.timeline(c, conversation, limit=limit, since=since, after=after)
        )

    async def evictions(
        self,
        tenant: str | None,
        *,
        conversation: ConversationRow | None = None,
        policy: str | None = None,
        asked_again: bool = False,
        limit: int = 200,
        after: Place | None = None,
    ) -> list[EvictionRow]:
        """What was evicted for a tenant, or with None for everybody, the newest first.

        ``asked_again`` leaves only what was asked for again; ``policy`` is the name of the one that evicted it;
        ``after`` leaves those behind one of which this is ``at``, ``branch``, ``version`` and ``position``.
        """
        work = partial(evictions.listed, tenant=tenant, of=conversation, policy=policy, asked_again=asked_again)
        return await self._database.read(partial(work, limit=limit, after=after))

    async def eviction_sums(
        self, tenant: str | None, *, conversation: ConversationRow | None = None, policy: str | None = None
    ) -> list[EvictionSum]:
        """How much each layer took from each tool, and how much of it was asked for again, most tokens first."""
        return await self._database.read(lambda c: evictions.sums(c, tenant, of=conversation, policy=policy))

    async def audit(
        self,
        tenant: str | None,
        *,
        conversation: str | None = None,
        kind: str | None = None,
        limit: int = 200,
        after: Place | None = None,
    ) -> list[AuditRow]:
        """The newest rows of a tenant's audit, or with None of everybody's, newest first.

        ``conversation`` is the id of one, or the name that one had when it was deleted; ``kind`` one type of row;
        ``after`` leaves those behind one of which this is ``seq``, with None for a tenant ``at``, ``tenant`` and
        ``seq``.
        """
        return await self._database.read(
            lambda c: audit.listed(c, tenant, conversation=conversation, kind=kind, limit=limit, after=after)
        )

    async def audited_tenants(self) -> list[str]:
        """The tenants that have a chain in the audit; the empty one is the operator's."""
        return await self._database.read(audit.tenants)

    async def verify(
        self, tenant: str | None = None, *, heads: Collection[bytes] = (), progress: Progress | None = None
    ) -> Audited:
        """Every chain of the audit, or a tenant's, walked to the first row that is wrong.

        ``progress`` is called with rows done and rows in all, on the thread of the store.
        """
        return await self._database.read(
            lambda c: Audited(verify(c, tenant, heads=heads, progress=progress), audit.missing_guards(c))
        )

    async def save_policy(self, name: str, document: str, at: float) -> None:
        """Store a policy's document in place of the one of that name."""
        row = PolicyRow(name=name, document=document, at=at)
        await self._database.write(lambda c: documents.save_policy(c, row))

    async def delete_policy(self, name: str, at: float | None = None) -> bool:
        """Delete the policy that was saved under a name; whether there was one."""
        now = time.time() if at is None else at
        return await self._database.write(lambda c: documents.delete_policy(c, name, now))

    async def policies(self) -> list[PolicyRow]:
        """Every policy that was saved, by name."""
        return await self._database.read(documents.all_policies)

    async def delete(self, conversation: ConversationRow, at: float | None = None) -> bool:
        """Delete a conversation and all that only it needed, the WAL's copy included; whether it was there.

        Its rows in the audit stay: they hold digests and numbers.
        """
        now = time.time() if at is None else at
        found = await self._database.write(lambda c: maintenance.delete(c, conversation, now))
        await self._database.tend(force=True)
        return found

    async def add_key(self, key: KeyRow) -> None:
        """Store an API key; :class:`NameTaken` if the name is in use."""
        await self._database.write(lambda c: keys.add_key(c, key))

    async def list_keys(self) -> list[KeyRow]:
        """Every API key, revoked ones included, oldest first."""
        return await self._database.read(keys.list_keys)

    async def revoke_key(self, name: str, at: float) -> bool:
        """Revoke an API key; False if there is none of that name in force."""
        return await self._database.write(lambda c: keys.revoke_key(c, name, at))

    async def limits(self) -> list[LimitRow]:
        """Every learned window, expired ones included."""
        return await self._database.read(learned.all_limits)

    async def calibrations(self) -> list[CalibrationRow]:
        """Every calibration."""
        return await self._database.read(learned.all_calibrations)

    async def learn(self, *, calibrations: Sequence[CalibrationRow] = (), limits: Sequence[LimitRow] = ()) -> None:
        """Store calibrations and learned windows in place of what their scopes had."""
        if calibrations or limits:
            await self._database.write(lambda c: learned.learn(c, calibrations, limits))

    async def kept_time(self) -> tuple[float | None, float]:
        """The time that was kept last, else that of the newest row, None for a new store; and for how long the clock
        had been too far ahead of it then."""
        return await self._database.read(maintenance.kept_time)

    async def keep_time(self, believed: float, doubted: float) -> None:
        """Keep what :meth:`kept_time` gives back."""
        await self._database.write(lambda c: maintenance.keep_time(c, believed, doubted))

    async def prune(self, before: float, at: float | None = None) -> int:
        """Delete conversations last used, and exchanges and summaries made, before ``before``; how many rows.

        Rows of the audit from before it go too, under a seal, and are not counted. It works in small transactions, so
        that requests in between hardly wait.
        """
        total, now = 0, time.time() if at is None else at
        conversations_of = partial(maintenance.prune_conversations, at=now)
        steps = (maintenance.prune_exchanges, maintenance.prune_relayed)
        for step in (conversations_of, *steps, summaries.prune_summaries):
            while gone := await self._database.write(partial(step, before=before)):
                total += gone
                await self._database.tend()
        for work in (partial(audit.seal_one, before=before, at=now), audit.drop_sealed):
            while await self._database.write(work):
                await self._database.tend()
        if total:
            await self._shrink()
        return total

    async def fit(self, most: int, *, before: float, at: float) -> int:
        """Delete conversations last used before ``before`` if the database takes more than ``most`` bytes; how many.

        Closed ones go first, then those that were used longest ago, a few at a time as in :meth:`prune`, until it
        takes a tenth less: making room costs as much for one as for many.
        """
        total, used = 0, await self._database.read(maintenance.size)
        while used > (most if total == 0 else most * ROOM):
            due = await self._database.read(maintenance.requests) * (1 - most * ROOM / used)
            fewer, gone, step = 0, 0, (1, 1)
            while step[0] and (fewer < due or gone == 0):
                work = partial(maintenance.drop_oldest, before=before, at=at, most=due - fewer)
                step = await self._database.write(work)
                gone, fewer = gone + step[0], fewer + step[1]
                await self._database.tend()
            if not gone:
                break
            total += gone
            await self._shrink()
            used = await self._database.read(maintenance.size)
        return total

    async def _shrink(self) -> None:
        """Take deleted words out of the index and give freed pages back, some at a time."""
        begins = True
        while await self._database.write(partial(archive.merge_words, begins=begins)):
            begins = False
            await self._database.tend()
        if isinstance(self._database, SqliteDatabase):
            while await self._database.shrink():
                await self._database.tend()

    async def checkpoint(self) -> bool:
        """Bring the WAL into the database file if no visitor is there; whether that was done."""
        return await self._database.tend(force=True)

    async def _index(self) -> None:
        if self._full and self._database.writable and await self._database.read(archive.unindexed):
            while await self._database.write(archive.index_some):
                pass


__all__ = [
    "AlertRow",
    "Arrival",
    "AuditEvent",
    "AuditRow",
    "AuditType",
    "Audited",
    "Branch",
    "Broken",
    "CalibrationRow",
    "Change",
    "CheckpointRow",
    "ConversationRow",
    "CorruptStore",
    "EvictionRow",
    "EvictionSum",
    "ExchangeRow",
    "KeyRow",
    "LimitRow",
    "NameTaken",
    "NoSuchVersion",
    "NoteRow",
    "Original",
    "PolicyRow",
    "RemovedRow",
    "SchemaTooNew",
    "StaleVersion",
    "Store",
    "StoreError",
    "StoreUnavailable",
    "SummaryRow",
    "UsageRow",
    "Verified",
]
