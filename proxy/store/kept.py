"""The half of the store that outlives a window: checkpoints, notes, summaries, what is out and how it comes back."""

import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Literal

import sqlalchemy as sa

from policies.health import KEPT, Snapshot
from policies.ledger import Prepared
from proxy.store import (
    archive,
    branches,
    checkpoints,
    conversations,
    health,
    notes,
    removals,
    spending,
    summaries,
    usage,
)
from proxy.store.engine import Database
from proxy.store.errors import StoreError
from proxy.store.export import export
from proxy.store.paging import Place
from proxy.store.records import AlertRow, CheckpointRow, ConversationRow, NoteRow, RemovedRow, SummaryRow, UsageRow

Content = Literal["full", "digest"]


class Kept:
    """A database, what was found damaged in it, and what a conversation keeps beside its edits and exchanges."""

    def __init__(self, database: Database, *, content: Content) -> None:
        self.journal = database.journal
        self.notices = database.notices
        self._database = database
        self._full = content == "full"
        self._damaged: set[tuple[str, str, str]] = set()
        self._unmarked: set[tuple[str, str]] = set()

    @property
    def shared(self) -> bool:
        """Whether other servers may write the same conversations."""
        return self._database.shared

    @property
    def keeps_content(self) -> bool:
        """Whether what is said may be stored."""
        return self._full

    @property
    def damaged(self) -> int:
        """How many different rows were found damaged and treated as absent."""
        return len(self._damaged)

    async def checkpoints(self, conversation: ConversationRow) -> list[CheckpointRow]:
        """Every checkpoint of a conversation, all branches, oldest first, each with its cut where it has one."""
        return await self._database.read(lambda c: checkpoints.listed(c, conversation, self._damage))

    async def checkpoint_at(self, conversation: ConversationRow, version: int) -> CheckpointRow | None:
        """The checkpoint with this version, of the branch that was used last among those that have it."""
        return await self._database.read(lambda c: checkpoints.at_version(c, conversation, version, self._damage))

    async def latest_checkpoint(self, tenant: str, name_or_id: str) -> tuple[ConversationRow, CheckpointRow] | None:
        """A conversation by label or id, and the newest whole checkpoint that was not taken back."""

        def work(connection: sa.Connection) -> tuple[ConversationRow, CheckpointRow] | None:
            conversation = conversations.one(connection, tenant, name_or_id)
            found = None if conversation is None else checkpoints.latest(connection, conversation, self._damage)
            return None if conversation is None or found is None else (conversation, found)

        return await self._database.read(work)

    async def newest_branch(self, conversation: ConversationRow) -> str | None:
        """The branch of a conversation that was used last."""
        return await self._database.read(lambda c: branches.newest(c, conversation))

    async def prepare(self, tenant: str, branch: str, prepared: Prepared | None) -> bool:
        """Keep a summary for the branch's next batch, or None; whether the branch is stored yet."""
        kept = prepared if self._full else None
        return await self._database.write(lambda c: branches.prepare(c, tenant, branch, kept))

    async def claim(self, tenant: str, branch: str, seconds: float) -> bool:
        """Whether to have the branch's next summary written: no other server does, and none begins for so long."""
        return await self._database.write(lambda c: branches.claim(c, tenant, branch, seconds))

    async def release(self, tenant: str, branch: str) -> None:
        """Give back what was claimed."""
        await self._database.write(lambda c: branches.release(c, tenant, branch))

    async def reserve(self, tenant: str, tokens: int, *, limit: int, at: float) -> int | None:
        """Where tokens for a tenant's summary are counted, of all servers together; None where they are too many."""
        return await self._database.write(lambda c: spending.reserve(c, tenant, tokens, limit=limit, at=at))

    async def correct(self, tenant: str, slot: int, more: int) -> None:
        """Count ``more`` tokens where some were reserved, or fewer."""
        if more:
            await self._database.write(lambda c: spending.correct(c, tenant, slot, more))

    async def want(self, tenant: str, branch: str, what: str | None, at: float | None = None) -> bool:
        """Ask something of the branch's next request, or nothing; whether the branch is stored yet."""
        now = time.time() if at is None else at
        return await self._database.write(lambda c: branches.want(c, tenant, branch, what, now))

    async def rollback(self, conversation: ConversationRow, *, version: int, at: float) -> int:
        """The new head of the conversation's newest branch, which is again what it was at ``version`` (0: as it came).

        Raises :class:`NoSuchVersion`, or :class:`StaleVersion` where somebody commits at the same time.
        """
        return await self._database.write(lambda c: branches.rollback(c, conversation, version, at, self._damage))

    async def close_conversation(self, conversation: ConversationRow, at: float) -> bool:
        """Mark a conversation as closed until its next exchange, its alerts too; whether it was there."""

        def work(connection: sa.Connection) -> bool:
            health.close_all(connection, conversation.tenant, conversation.id, at)
            return conversations.close(connection, conversation, at)

        return await self._database.write(work)

    async def add_notes(self, tenant: str, conversation: str, given: Sequence[NoteRow]) -> int:
        """How many of the notes on a conversation (its id) were new; 0 where there is no such conversation yet.

        0 also where nothing that is said may be stored.
        """
        if not given or not self._full:
            return 0
        return await self._database.write(lambda c: notes.add_notes(c, tenant, conversation, given))

    async def notes(self, tenant: str, conversation: str) -> list[NoteRow]:
        """The notes on a conversation (its id), oldest first."""
        return await self._database.read(lambda c: notes.all_notes(c, tenant, conversation, self._damage))

    async def summary(self, tenant: str, key: bytes) -> SummaryRow | None:
        """What a model wrote when it was asked this, None if it never was or the row is damaged."""
        return await self._database.read(lambda c: summaries.summary(c, tenant, key, self._damage))

    async def keep_summary(self, tenant: str, row: SummaryRow) -> None:
        """Store what a model wrote in place of what its address had; nothing where bodies are not kept."""
        if not self._full:
            return
        await self._database.write(lambda c: summaries.keep_summary(c, tenant, row))

    async def removed(self, conversation: ConversationRow, *, limit: int = 500) -> list[RemovedRow]:
        """What is out of the window of the conversation's newest branch, wholly or in part, newest first."""
        return await self.removed_after(conversation, None, limit=limit) or []

    async def removed_after(
        self, conversation: ConversationRow, after: str | None, *, limit: int
    ) -> list[RemovedRow] | None:
        """The same behind the message with the ref ``after``; None where that one is not out of the window."""
        return await self._database.read(
            lambda c: removals.removed(c, conversation, limit=limit, damage=self._damage, after=after)
        )

    async def snapshots(self, conversation: ConversationRow, *, limit: int = KEPT) -> list[Snapshot]:
        """The newest ``limit`` snapshots of a conversation's health, of the 100 that are kept, oldest first."""
        return await self._database.read(lambda c: health.snapshots(c, conversation, limit=limit))

    async def alerts(self, conversation: ConversationRow, *, limit: int = health.MOST_ALERTS) -> list[AlertRow]:
        """The newest alerts of a conversation, open and closed, the newest first."""
        return await self._database.read(lambda c: health.alerts_of(c, conversation, limit=limit))

    async def open_alerts(
        self, tenant: str | None, *, limit: int = 200, after: Place | None = None
    ) -> tuple[list[AlertRow], dict[str, int]]:
        """The newest open alerts of a tenant, or with None of everybody, and how many there are by level.

        ``after`` leaves those behind one of which this is ``at``, ``kind``, ``tenant`` and the conversation's name.
        """

        def work(connection: sa.Connection) -> tuple[list[AlertRow], dict[str, int]]:
            found = health.open_alerts(connection, tenant, limit=limit, after=after)
            return found, health.count_open(connection, tenant)

        return await self._database.read(work)

    async def usage(self, tenant: str | None, *, since: float, by: usage.By | None = None) -> list[UsageRow]:
        """What the requests since then took, of a tenant's key or with None of each, the most tokens first.

        It is read day by day, so that what requests have to look up in between does not wait for all of it.
        """
        rows: list[UsageRow] = []
        for start, end in await self._database.read(lambda c: usage.slices(c, since)):
            rows += await self._database.read(partial(usage.usage, tenant=tenant, since=start, until=end, by=by))
        return usage.together(rows)

    async def export(self, conversation: ConversationRow) -> dict[str, Any]:
        """Everything that is known of a conversation as plain data, with the bodies of originals in base64."""
        found = await self._database.read(lambda c: export(c, conversation, self._damage))
        await self._quarantine()
        return found

    def _damage(self, kind: str, tenant: str, key: str) -> None:
        self._damaged.add((kind, tenant, key))
        if kind == "original":
            self._unmarked.add((tenant, key))

    async def _quarantine(self) -> None:
        if not self._unmarked or not self._database.writable:
            return
        fresh, self._unmarked = self._unmarked, set()
        with suppress(StoreError):  # what was read is absent either way; the next read marks it
            await self._database.write(lambda c: archive.quarantine(c, fresh))
