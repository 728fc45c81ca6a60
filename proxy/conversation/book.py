"""Which conversation is this: the longest stored prefix of the incoming chain.

State is addressed by content. The canonical digests of the messages after the head are chained, seeded with
the tenant, and the longest prefix that an earlier request ended at is the conversation. So two chats with the
same opening never mix, an edited history falls back to the last prefix that still holds, and a fork goes its
own way with the shared past. Names only label.

What a conversation has resumed belongs to it alone, and its words may be anybody's. So it is never found by its chain
alone but behind doors: every hash of it is mixed with something that tells it from others. That is what it resumes
together with its name, its name alone, or the first answer that it was given.
"""

import contextlib
import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import msgspec

from policies.ledger import REWRITTEN, ConversationState, Edit, EditKind, Event, Note
from policies.messages import Message, Transcript, extend_chain
from proxy.conversation.thread import REWRITTEN_END, Door, Match, Thread, inherited, link_behind, new_thread
from proxy.store import Store
from proxy.store.records import Arrival, Branch, Change, ConversationRow, StaleVersion, StoreError

log = logging.getLogger("weir.conversation")

MAX_ENDS = 150_000
MAX_BRANCHES = 20_000
MAX_HELD = 48 << 20
"""Bytes of what was decided on conversations; of others it is read from the store when they go on."""
MAX_REMOVED = 10_000
MAX_ANSWERS = 8
NEAR = 32
"""How far from its end a request's chain is looked for behind the doors of the store."""
RESUME, NAME, ANSWER = "resume", "name", "answer"

K = TypeVar("K")
V = TypeVar("V")


class Conversations:
    """Recognises requests, in memory first and in the store where memory does not know them.

    With a shared store other processes edit the same conversations, so what memory holds is checked
    against the store on every request.
    """

    def __init__(self, store: Store, *, clock: Callable[[], float] = time.time) -> None:
        self._store = store
        self.shared = store.shared
        self._clock = clock
        self._ends: OrderedDict[bytes, tuple[str, bool]] = OrderedDict()
        self._threads = _Threads()
        self._names: OrderedDict[tuple[str, str], str] = OrderedDict()
        self._has_resumed = False

    async def recognise(
        self,
        tenant: str,
        chain: Sequence[bytes],
        messages: Sequence[Message],
        *,
        name: str | None,
        resumes: str | None = None,
    ) -> Match:
        """The thread that ``chain`` continues, or a new one, which goes on from the conversation that it ``resumes``.

        Raises StoreError only if nothing was found in memory.
        """
        opening = _opening(chain, messages)
        found = self._in_memory(chain, messages)
        if found is not None and resumes is None and self._is_nobody_elses(found, chain, opening):
            recognised = await self._continue(found, chain, opening, name)
            self._remember(recognised.thread, chain)
            return recognised
        doors, answered = _doors(chain, opening, name, resumes), opening < len(chain)
        tried = _tried(doors, chain, opening, found, name)
        mine = self._behind_doors(tried, chain, messages, found) if self._has_resumed else None
        strays = found is None or found.length < min(found.thread.longest, len(chain))
        begins = found is None and mine is None and answered and not self.shared
        begins = begins and await self._is_unknown(tenant, tried, chain, opening)
        if self.shared or (mine is None and answered and strays and not begins):
            try:
                found = await self._in_store(tenant, chain, found)
            except StoreError:
                if mine is None:
                    raise
        tried = _tried(doors, chain, opening, found, name)
        if self.shared and mine is not None:  # what was not known in the open may be another's
            mine = self._behind_doors(tried, chain, messages, found)
        if (mine is None and not begins) or self.shared:
            mine = await self._behind_stored_doors(tenant, tried, chain, opening, found, mine)
        found = mine or found
        if resumes is not None and not answered and not (found is not None and found.is_repeat(chain)):
            found = await self._resume(tenant, name, resumes) or found
        recognised = (
            await self._begin(tenant, name) if found is None else await self._continue(found, chain, opening, name)
        )
        own = [door for door in doors if door[0] != ANSWER or door == recognised.door]
        self._remember(recognised.thread, chain, doors=own)
        return recognised

    async def find(self, tenant: str, chain: Sequence[bytes], messages: Sequence[Message]) -> Match | None:
        found = self._in_memory(chain, messages)
        return found if found is not None else await self._in_store(tenant, chain, None)

    def listens(self, thread: Thread, transcript: Transcript) -> bool:
        """Whether the answer to a request will tell its conversation from another with the same opening.

        Of a shared store nobody knows whether another process has resumed one.
        """
        resumed = self.shared or self._has_resumed or thread.known.resumed is not None
        return resumed and _opening(transcript.chain, transcript.messages) == len(transcript.chain)

    def answered(self, thread: Thread, transcript: Transcript, answers: Sequence[bytes]) -> tuple[bytes, ...]:
        said = (Message(role="assistant", digest=digest, tokens=0) for digest in answers)
        ends = [extend_chain(transcript.chain[-1:], (message,))[-1] for message in said]
        if thread.known.resumed is not None:
            thread.doors = _known_doors((*thread.doors, *((ANSWER, end.hex()) for end in ends)))
        found_by = thread.behind(ends)
        for end in found_by:
            self._ends[end] = (thread.branch.branch, True)
        return found_by

    def begin(self, tenant: str, chain: Sequence[bytes], *, name: str | None) -> Match:
        conversation = self._names.get((tenant, name)) if name else None
        recognised = new_thread(tenant, conversation, name)
        self._remember(recognised.thread, chain)
        return recognised

    def arrival(
        self, thread: Thread, transcript: Transcript, *, request: str, model: str, answers: Sequence[bytes] = ()
    ) -> Arrival:
        branch, chain = thread.branch, transcript.chain
        return Arrival(
            id=request,
            tenant=branch.tenant,
            conversation=branch.conversation,
            name=branch.name,
            branch=branch.branch,
            parent=thread.parent,
            at=self._clock(),
            model=model,
            ends=tuple((end, len(chain) + 1) for end in answers) or thread.tips(transcript),
            length=len(chain),
            trend=thread.trend,
        )

    async def announce(self, thread: Thread, arrival: Arrival) -> None:
        branch, home = thread.branch, await self._store.arrive(arrival)
        thread.stored = True
        if home != branch.conversation:
            thread.branch = msgspec.structs.replace(thread.branch, conversation=home)
            self._names[(branch.tenant, branch.name)] = home

    async def reload(self, thread: Thread) -> None:
        branch = await self._store.branch(thread.branch.tenant, thread.branch.branch)
        if branch is not None:
            thread.refresh(branch)

    async def restate(self, thread: Thread) -> None:
        if thread.branch.version > 0:
            await self._store.restate(msgspec.structs.replace(thread.branch, known=thread.known), at=self._clock())

    async def want(self, conversation: ConversationRow, what: str | None) -> None:
        for thread in self._threads_of(conversation):
            thread.known = replace(thread.known, wanted=what)
        if (branch := await self._store.newest_branch(conversation)) is not None:
            await self._store.want(conversation.tenant, branch, what, self._clock())

    async def rollback(self, conversation: ConversationRow, version: int) -> int:
        new = await self._store.rollback(conversation, version=version, at=self._clock())
        for thread in self._threads_of(conversation):
            async with thread.lock:
                await self.reload(thread)
        return new

    async def take_back(
        self, thread: Thread, lengths: tuple[int, int], needless: Callable[[ConversationState], bool], *, observed: bool
    ) -> tuple[Event, ...]:
        """Take back what was decided on requests of more messages than are still there; what was before holds again.

        ``lengths``: how many messages are known, and how many the last request had.
        """
        (length, last), newest = lengths, thread.ledger(observed=observed).newest
        if newest == last:  # this request may be known, and what the last one ended with gone
            length = min(length, newest - 1)
        if not max(0, length) < newest <= length + REWRITTEN:  # who goes far back has what he had then anyway
            return ()
        async with thread.lock:
            known = thread.known_at(length, observed=observed)
            if not needless(known):
                return ()
            rest = known.before(length)
            try:
                branch = None if observed else await self._store.take_back(thread.branch, length, self._clock())
            except StoreError as error:  # it holds on
                if isinstance(error, StaleVersion) and error.current > thread.branch.version:
                    with contextlib.suppress(StoreError):
                        await self.reload(thread)
                return ()
            if branch is None:
                thread.shadow = rest
            elif self._store.keeps_content:
                thread.refresh(branch)
            else:
                thread.known, thread.branch = rest, branch
        gone = len(known.edits) + len(known.cuts) - len(rest.edits) - len(rest.cuts)
        return (Event("rollback", {"count": gone}),)

    async def pin(self, conversation: ConversationRow, ref: str) -> bool:
        store = self._store
        branch_id = await store.newest_branch(conversation)
        if branch_id is None or all(row.ref != ref for row in await store.removed(conversation, limit=MAX_REMOVED)):
            return False
        thread = await self._loaded(conversation.tenant, branch_id)
        if thread is None:
            return False
        edit = Edit(bytes.fromhex(ref), 0, EditKind.PIN, "", ref, 0)
        async with thread.lock:
            await self.reload(thread)
            change = msgspec.structs.replace(thread.branch.change(self._clock()), edits=(edit,))
            thread.apply(change, await store.commit(change))
        return True

    async def close(self, conversation: ConversationRow) -> float:
        store, at = self._store, self._clock()
        found = await store.latest_checkpoint(conversation.tenant, conversation.id)
        thread = None if found is None else await self._loaded(conversation.tenant, found[1].branch)
        if found is not None and thread is not None:
            async with thread.lock:
                change = msgspec.structs.replace(
                    thread.branch.change(at),
                    checkpoint=found[1].body,
                    reason="closed",
                    window_id=found[1].window_id,
                    length=found[1].length,
                )
                with contextlib.suppress(StaleVersion):
                    version = await store.commit(change)
                    thread.save(change.checkpoint, version, length=change.length)
        await store.close_conversation(conversation, at)
        return at

    def distrust(self, change: Change) -> None:
        thread = self._threads.get(change.branch)
        if thread is not None:
            thread.branch = msgspec.structs.replace(thread.branch, version=0)

    def forget(self, conversation: ConversationRow) -> None:
        for thread in self._threads_of(conversation):
            self._threads.drop(thread.branch.branch)
        self._names.pop((conversation.tenant, conversation.name), None)

    def note(self, conversation: ConversationRow, note: Note) -> None:
        for thread in self._threads_of(conversation):
            thread.known = replace(thread.known, notes=(*thread.known.notes, note))

    async def _loaded(self, tenant: str, branch_id: str) -> Thread | None:
        branch = await self._store.branch(tenant, branch_id)
        return None if branch is None else self._threads.get(branch_id) or Thread(branch, stored=True)

    def _threads_of(self, conversation: ConversationRow) -> list[Thread]:
        of = (conversation.tenant, conversation.id)
        return [t for t in self._threads.values() if (t.branch.tenant, t.branch.conversation) == of]

    def _in_memory(self, chain: Sequence[bytes], messages: Sequence[Message], door: Door | None = None) -> Match | None:
        """The thread of the longest prefix that a request ended at, or came near to before a user message that is
        another one now: clients rewrite the newest user message from turn to turn."""
        head = len(messages) - len(chain)
        for length in range(len(chain), 0, -1):
            link = chain[length - 1] if door is None else link_behind(door, chain[length - 1])
            branch, is_end = self._ends.get(link, ("", False))
            if branch not in self._threads:
                continue
            if is_end or (length < len(chain) and messages[head + length].role == "user"):
                self._threads.move_to_end(branch)
                return Match(self._threads[branch], length, door)
        return None

    def _behind_doors(
        self, doors: Sequence[Door], chain: Sequence[bytes], messages: Sequence[Message], found: Match | None
    ) -> Match | None:
        behind = (self._in_memory(chain, messages, door) for door in doors)
        return next((mine for mine in behind if mine is not None and _goes_as_far(mine, found)), None)

    def _is_nobody_elses(self, found: Match, chain: Sequence[bytes], opening: int) -> bool:
        """Whether what was found in memory, in the open, is all that there can be: it goes on from a known answer."""
        if self.shared or self._has_resumed or found.is_resumed or found.length <= opening:
            return False
        return found.length >= min(found.thread.longest, len(chain))

    async def _is_unknown(self, tenant: str, doors: Sequence[Door], chain: Sequence[bytes], opening: int) -> bool:
        """Whether the store has nothing of a chain either, in the open or behind a door."""
        behind = [link for door in doors for link in _near(door, chain, opening)]
        return not await self._store.has_any(tenant, [*chain, *behind])

    async def _behind_stored_doors(
        self,
        tenant: str,
        doors: Sequence[Door],
        chain: Sequence[bytes],
        opening: int,
        found: Match | None,
        mine: Match | None,
    ) -> Match | None:
        for door in doors:
            if not (self.shared or found is None or (door[0] != ANSWER and found.length <= opening)):
                continue
            try:
                stored = await self._in_store(tenant, _near(door, chain, opening), mine)
            except StoreError:
                if found is None:
                    raise
                return None
            if stored is not None and _goes_as_far(stored, found):
                return stored if stored is mine else msgspec.structs.replace(stored, door=door)
        return mine

    async def _resume(self, tenant: str, name: str | None, resumes: str) -> Match | None:
        try:
            found = await self._store.latest_checkpoint(tenant, resumes)
        except StoreError as error:
            log.error("a checkpoint cannot be read, the conversation starts without: %s", error)
            return None
        if found is None:
            return None
        begun = await self._begin(tenant, name)
        begun.thread.known = replace(begun.thread.known, resumed=found[1].body)
        return begun

    async def _in_store(self, tenant: str, chain: Sequence[bytes], found: Match | None) -> Match | None:
        try:
            branch = await self._store.find(tenant, chain)
            if self.shared and found is not None and await self._is_deleted(found.thread, branch):
                found = None
        except StoreError:
            if found is not None:
                return found
            raise
        if branch is None or (found is not None and found.length > branch.length):
            return found
        thread = self._threads.get(branch.branch)
        if thread is None:
            return Match(Thread(branch, stored=True), branch.length)
        thread.catch_up(branch)
        return Match(thread, branch.length)

    async def _is_deleted(self, thread: Thread, instead: Branch | None) -> bool:
        own = thread.branch
        if not thread.stored or (instead is not None and instead.branch == own.branch):
            return False
        if await self._store.branch(own.tenant, own.branch) is not None:
            return False
        self._threads.drop(own.branch)
        self._names.pop((own.tenant, own.name), None)
        return True

    async def _begin(self, tenant: str, name: str | None) -> Match:
        return new_thread(tenant, await self._conversation_named(tenant, name) if name else None, name)

    async def _continue(self, found: Match, chain: Sequence[bytes], opening: int, name: str | None) -> Match:
        thread, length = found.thread, found.length
        more = thread.longest - length if length < len(chain) else 0
        two_answers = length <= opening + 1 and found.is_resumed  # of two that resumed alike each has its own
        diverges = more > (0 if two_answers else REWRITTEN_END)
        renamed = name is not None and name != thread.branch.name
        asked_for = found.door is not None and found.door[0] == RESUME
        if length <= opening and more > 0 and not asked_for:
            begun = await self._begin(thread.branch.tenant, name)
            return Match(begun.thread, 0)
        if not diverges and not renamed:
            return found
        if renamed and not diverges and thread.branch.name == thread.branch.conversation:
            thread.branch = msgspec.structs.replace(thread.branch, name=name or "")
            self._names[(thread.branch.tenant, thread.branch.name)] = thread.branch.conversation
            return found
        return await self._fork(thread, chain, length, name if renamed else None)

    async def _fork(self, thread: Thread, chain: Sequence[bytes], length: int, name: str | None) -> Match:
        conversation = thread.branch.conversation
        if name is not None:
            conversation = await self._conversation_named(thread.branch.tenant, name) or f"conv-{secrets.token_hex(10)}"
        known = inherited(thread.known, chain, length)
        branch = msgspec.structs.replace(
            thread.branch,
            conversation=conversation,
            name=name or thread.branch.name,
            branch=f"br-{secrets.token_hex(10)}",
            version=0,
            known=known,
            length=length,
            longest=length,
            trend=thread.trend,
            health=None,
        )
        if known.triggered and name is None:
            branch = await self._store_fork(thread.branch, branch)
        forked = Thread(branch, parent=thread.branch.branch)
        forked.prefix, forked.doors = thread.prefix, thread.doors
        forked.shadow = None if thread.shadow is None else inherited(thread.shadow, chain, length)
        return Match(forked, length)

    async def _store_fork(self, parent: Branch, branch: Branch) -> Branch:
        try:
            await self._store.fork(parent, branch, at=self._clock())
        except StoreError as error:
            log.warning("a fork of a conversation could not be stored: %s", error)
            return branch
        return msgspec.structs.replace(branch, version=parent.version)

    async def _conversation_named(self, tenant: str, name: str) -> str | None:
        known = self._names.get((tenant, name))
        if known is not None:
            return known
        try:
            return await self._store.named(tenant, name)
        except StoreError:
            return None

    def _remember(self, thread: Thread, chain: Sequence[bytes], *, doors: Sequence[Door] = ()) -> None:
        branch = thread.branch
        thread.longest = len(chain)
        self._threads.keep(thread)
        self._names[(branch.tenant, branch.name)] = branch.conversation
        lines: list[Sequence[bytes]] = [chain[-1 - REWRITTEN_END :]]
        if thread.known.resumed is not None:
            self._has_resumed = True
            thread.doors = _known_doors((*thread.doors, *doors))
            lines = [[link_behind(door, link) for link in lines[0]] for door in thread.doors]
        for line in lines:
            for link in line[:-1]:
                self._ends.setdefault(link, (branch.branch, False))
            if line:
                self._ends[line[-1]] = (branch.branch, True)
                self._ends.move_to_end(line[-1])
        _bound(self._ends, MAX_ENDS)
        _bound(self._names, MAX_BRANCHES)


class _Threads(OrderedDict[str, Thread]):
    """Threads by their branch, least recently used first out: bounded by their number and by what they hold."""

    def __init__(self) -> None:
        super().__init__()
        self._sizes: dict[str, int] = {}
        self._held = 0

    def keep(self, thread: Thread) -> None:
        branch = thread.branch.branch
        size = thread.size
        self._held += size - self._sizes.get(branch, 0)
        self._sizes[branch] = size
        self[branch] = thread
        self.move_to_end(branch)
        while len(self) > MAX_BRANCHES or (self._held > MAX_HELD and len(self) > 1):
            self.drop(next(iter(self)))

    def drop(self, branch: str) -> None:
        self.pop(branch, None)
        self._held -= self._sizes.pop(branch, 0)


def _opening(chain: Sequence[bytes], messages: Sequence[Message]) -> int:
    head = len(messages) - len(chain)
    return next((n for n in range(len(chain)) if messages[head + n].role == "assistant"), len(chain))


def _near(door: Door, chain: Sequence[bytes], opening: int) -> list[bytes]:
    near = (*chain[: opening + 1], *chain[max(opening + 1, len(chain) - NEAR) :])
    return [link_behind(door, link) for link in near]


def _doors(chain: Sequence[bytes], opening: int, name: str | None, resumes: str | None) -> list[Door]:
    doors: list[Door] = [] if resumes is None else [(RESUME, resumes, name or "")]
    if name is not None:
        doors.append((NAME, name))
    if opening < len(chain):
        doors.append((ANSWER, chain[opening].hex()))
    if name is None:
        doors.append((NAME, ""))
    return doors


def _tried(
    doors: Sequence[Door], chain: Sequence[bytes], opening: int, found: Match | None, name: str | None
) -> list[Door]:
    return [door for door in doors if _may_try(door, chain, opening, found, name)]


def _goes_as_far(mine: Match, found: Match | None) -> bool:
    return found is None or mine.length >= found.length


def _may_try(door: Door, chain: Sequence[bytes], opening: int, found: Match | None, name: str | None) -> bool:
    """Whether a request may go through a door where a conversation was ``found`` in the open.

    An opening alone gets what was resumed only if it asks for it. A name is worth more than a conversation of another
    name; the answer that one was given more than a conversation that has only the opening in common.
    """
    if door[0] == RESUME:
        return True
    if opening == len(chain):
        return False
    if found is None:
        return True
    return found.length <= opening if door[0] == ANSWER else name not in (None, found.thread.branch.name)


def _known_doors(doors: Sequence[Door]) -> tuple[Door, ...]:
    once = list(dict.fromkeys(doors))
    answers = [door for door in once if door[0] == ANSWER]
    return (*(door for door in once if door[0] != ANSWER), *answers[-MAX_ANSWERS:])


def _bound(kept: OrderedDict[K, V], most: int) -> None:
    while len(kept) > most:
        kept.popitem(last=False)
