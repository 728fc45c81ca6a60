"""Which conversation is this: the longest stored prefix of the incoming chain.

State is addressed by content. The canonical digests of the messages after the head are chained,
seeded with whose history it is: the tenant's alone, that of a name which the client gives, or that
of what it resumes. The longest prefix that an earlier request of the same owner ended at is the
thread. So two chats with the same opening never mix, whether they have names or not, an edited
history falls back to the last prefix that still holds, and a fork goes its own way with the shared
past. A name is one row, which the first request that carries it makes.
"""

import contextlib
import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import msgspec

from policies.ledger import (
    EVERY_WINDOW,
    NOTHING,
    REWRITTEN,
    ConversationState,
    Edit,
    EditKind,
    Event,
    Ledger,
    Note,
    begun,
)
from policies.messages import Transcript
from proxy.conversation.thread import (
    REWRITTEN_END,
    TAIL,
    Match,
    Owner,
    Thread,
    View,
    inherited,
    new_thread,
    owner_by,
    owner_of,
    state_of_fork,
)
from proxy.store import Store
from proxy.store.records import Arrival, Branch, Change, ConversationRow, StaleVersion, StoreError

log = logging.getLogger("weir.conversation")

MAX_ENDS = 150_000
MAX_BRANCHES = 20_000
MAX_HELD = 48 << 20
"""Bytes of decisions kept in memory; those of other conversations are read from the store when they
continue.
"""
MAX_REMOVED = 10_000
MAX_VIEWS = 16
"""Views of a thread in memory: an upstream that names another limit in each refusal would create
one for each.
"""

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

    async def owner(self, tenant: str, name: str | None, resumes: str | None) -> Owner:
        """Whose history a request's is.

        An id that Weir gave to a conversation without a name is no name: its history is what it was
        without.
        """
        unnamed = None if name is None else owner_by(name)
        if (
            name is not None
            and unnamed is not None
            and await self._conversation_named(tenant, name) == name
        ):
            return unnamed
        return owner_of(name, resumes)

    async def recognise(
        self,
        tenant: str,
        transcript: Transcript,
        *,
        seed: bytes,
        name: str | None,
        resumes: str | None = None,
    ) -> Match:
        """The thread that a request continues, or a new one, which goes on from the conversation
        that it ``resumes``.

        ``seed`` is that of the transcript's chain. Raises StoreError only if nothing was found in
        memory.
        """
        found = await self.find(tenant, transcript, seed, name)
        if found is None:
            is_answered = _opening(transcript) < len(transcript.chain)
            recognised = await self._begin(
                tenant, transcript, name, resumes, takes_state=not is_answered
            )
        else:
            recognised = await self._continue(found, name, resumes)
        self._remember(recognised.thread, recognised.transcript)
        return recognised

    def begin(
        self, tenant: str, transcript: Transcript, *, name: str | None, resumes: str | None
    ) -> Match:
        thread = new_thread(
            tenant, self._names.get((tenant, name)) if name else None, name, resumes
        )
        self._remember(thread, transcript)
        return Match(thread, transcript, 0)

    async def view(self, thread: Thread, window: int) -> View:
        """What was decided on a thread for one window; a new one begins with what was for the next
        larger one.

        A request that arrives while it is opened waits: nothing is decided on one that is not
        whole.
        """
        if window not in thread.views:
            async with thread.opening:
                if window not in thread.views:
                    view = await self._opened(thread, window)
                    while len(thread.views) >= MAX_VIEWS:
                        dropped = next(iter(thread.views))
                        thread.views.pop(dropped)
                        thread.dropped.add(dropped)
                    thread.views[window] = view
        return thread.views[window]

    async def _opened(self, thread: Thread, window: int) -> View:
        view = View(window, begun(thread.ledgers(), window))
        if thread.branch.trend is not None and thread.branch.trend.window in (window, EVERY_WINDOW):
            view.follow(thread.branch.trend)
        if not self._store.keeps_content:
            return view
        larger = [
            each
            for each, other in thread.views.items()
            if each > window and other.ledger is view.ledger
        ]
        stored = NOTHING
        try:
            if window in thread.dropped:
                branch = await self._store.branch(thread.branch.tenant, thread.branch.branch)
                stored = NOTHING if branch is None else branch.views.get(window, NOTHING)
            if stored.is_empty and larger and not view.ledger.is_empty:
                stored = await self._store.open_view(thread.branch, window, min(larger))
        except StoreError as error:
            log.warning(
                "a view of a conversation could not be read or stored, it holds in memory: %s",
                error,
            )
        if not stored.is_empty:
            view.ledger = stored
        return view

    def arrival(
        self, thread: Thread, view: View, transcript: Transcript, *, request: str, model: str
    ) -> Arrival:
        branch = thread.branch
        chain = transcript.chain
        return Arrival(
            id=request,
            tenant=branch.tenant,
            conversation=branch.conversation,
            name=branch.name,
            branch=branch.branch,
            parent=thread.parent,
            at=self._clock(),
            model=model,
            ends=thread.tips(transcript),
            length=len(chain),
            trend=view.trend,
            floating=thread.floating,
        )

    async def announce(self, thread: Thread, arrival: Arrival) -> None:
        branch = thread.branch
        home = await self._store.arrive(arrival)
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
            told = msgspec.structs.replace(
                thread.branch, known=thread.known, views=thread.ledgers()
            )
            await self._store.restate(told, at=self._clock())

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
        self,
        thread: Thread,
        view: View,
        lengths: tuple[int, int],
        needless: Callable[[ConversationState], bool],
        *,
        observed: bool,
    ) -> tuple[Event, ...]:
        """Take back what was decided on requests of more messages than are still there; what was
        before holds again.

        ``lengths``: how many messages are known, and how many the last request had.
        """
        length, last = lengths
        newest = thread.known_at(view, length, observed=observed).newest
        if newest == last:  # this request may be known, and what the last one ended with gone
            length = min(length, newest - 1)
        # a client that goes far back has its earlier state anyway
        if not max(0, length) < newest <= length + REWRITTEN:
            return ()
        async with thread.lock:
            known = thread.known_at(view, length, observed=observed)
            if not needless(known):
                return ()
            rest = known.before(length)
            left = Ledger(rest.edits, rest.cuts)
            try:
                branch = (
                    None
                    if observed
                    else await self._store.take_back(
                        thread.branch, length, self._clock(), window=view.window
                    )
                )
            except StoreError as error:  # it stays
                if isinstance(error, StaleVersion) and error.current > thread.branch.version:
                    with contextlib.suppress(StoreError):
                        await self.reload(thread)
                return ()
            if branch is None:
                view.shadow = left
            elif self._store.keeps_content:
                thread.refresh(branch)
            else:
                view.ledger = left
                thread.branch = branch
        gone = len(known.edits) + len(known.cuts) - len(rest.edits) - len(rest.cuts)
        return (Event("rollback", {"count": gone}),)

    async def pin(self, conversation: ConversationRow, ref: str) -> bool:
        store = self._store
        branch_id = await store.newest_branch(conversation)
        if branch_id is None or all(
            row.ref != ref for row in await store.removed(conversation, limit=MAX_REMOVED)
        ):
            return False
        thread = await self._loaded(conversation.tenant, branch_id)
        if thread is None:
            return False
        edit = Edit(bytes.fromhex(ref), 0, EditKind.PIN, "", ref, 0)
        async with thread.lock:
            await self.reload(thread)
            change = msgspec.structs.replace(
                thread.branch.change(self._clock()), edits=(edit,), window=EVERY_WINDOW
            )
            thread.apply(change, await store.commit(change))
        return True

    async def close(self, conversation: ConversationRow) -> float:
        store = self._store
        at = self._clock()
        found = await store.latest_checkpoint(conversation.tenant, conversation.id)
        thread = None if found is None else await self._loaded(conversation.tenant, found[1].branch)
        if found is not None and thread is not None:
            async with thread.lock:
                await self.reload(thread)
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
        return (
            None if branch is None else self._threads.get(branch_id) or Thread(branch, stored=True)
        )

    def _threads_of(self, conversation: ConversationRow) -> list[Thread]:
        of = (conversation.tenant, conversation.id)
        return [t for t in self._threads.values() if (t.branch.tenant, t.branch.conversation) == of]

    def _in_memory(self, transcript: Transcript, seed: bytes, name: str | None) -> Match | None:
        """The thread of the longest prefix that a request ended at, or came near to before a user
        message that is another one now: clients rewrite the newest user message from turn to turn.
        Or of the longest prefix of one, where the next messages are those that its client moves.
        """
        chain = transcript.chain
        messages = transcript.messages
        head = transcript.head
        is_first = True
        for length in range(len(chain), 0, -1):
            branch, is_end = self._ends.get(chain[length - 1], ("", False))
            if branch not in self._threads:
                continue
            goes_on = is_end or (length < len(chain) and messages[head + length].role == "user")
            if goes_on or is_first:
                fitted = self._fitted(Match(self._threads[branch], transcript, length), seed, name)
                if fitted is not None and (goes_on or fitted.transcript is not transcript):
                    self._threads.move_to_end(branch)
                    return fitted
            is_first = False
        return None

    async def find(
        self, tenant: str, transcript: Transcript, seed: bytes, name: str | None
    ) -> Match | None:
        found = self._in_memory(transcript, seed, name)
        strays = found is None or found.length < min(
            found.thread.longest, len(found.transcript.chain)
        )
        is_answered = _opening(transcript) < len(transcript.chain)
        if not self.shared and not (strays and is_answered):
            return found
        found = await self._in_store(
            tenant, transcript if found is None else found.transcript, found
        )
        fitted = found and self._fitted(found, seed, name)
        if found is not None and fitted is not None and fitted.transcript is not found.transcript:
            return await self._in_store(tenant, fitted.transcript, fitted)
        return fitted

    def _fitted(self, found: Match, seed: bytes, name: str | None) -> Match | None:
        """The match once the messages are left out that the client moves; None where it belongs to
        another conversation.
        """
        thread = found.thread
        if name is not None and thread.branch.name != name:
            return None
        if not thread.floating and found.length >= thread.longest:
            return found  # all of the last request is there, as it was
        transcript, length = thread.fitted(found.transcript, seed)
        if transcript is found.transcript:
            return found
        ends = (
            n
            for n in range(len(transcript.chain), 0, -1)
            if self._ends.get(transcript.chain[n - 1])
        )
        known = (
            n for n in ends if self._ends[transcript.chain[n - 1]] == (thread.branch.branch, True)
        )
        same = _shared(found.transcript, transcript, found.length)
        return Match(thread, transcript, max(length, same, next(known, 0)))

    async def _in_store(
        self, tenant: str, transcript: Transcript, found: Match | None
    ) -> Match | None:
        try:
            branch = await self._store.find(tenant, transcript.chain)
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
            return Match(Thread(branch, stored=True), transcript, branch.length)
        thread.catch_up(branch)
        return Match(thread, transcript, branch.length)

    async def _is_deleted(self, thread: Thread, instead: Branch | None) -> bool:
        own = thread.branch
        if not thread.stored or (instead is not None and instead.branch == own.branch):
            return False
        if await self._store.branch(own.tenant, own.branch) is not None:
            return False
        self._threads.drop(own.branch)
        self._names.pop((own.tenant, own.name), None)
        return True

    async def _begin(
        self,
        tenant: str,
        transcript: Transcript,
        name: str | None,
        resumes: str | None,
        *,
        takes_state: bool,
    ) -> Match:
        """A new thread, which begins with the state of what it ``resumes`` where that
        ``takes_state``.
        """
        thread = new_thread(
            tenant, await self._conversation_named(tenant, name) if name else None, name, resumes
        )
        if resumes is not None and takes_state:
            try:
                found = await self._store.latest_checkpoint(tenant, resumes)
            except StoreError as error:
                log.error("a checkpoint cannot be read, the conversation starts without: %s", error)
                found = None
            if found is not None:
                thread.known = replace(thread.known, resumed=found[1].body)
        return Match(thread, transcript, 0)

    async def _continue(self, found: Match, name: str | None, resumes: str | None) -> Match:
        thread, transcript, length = found
        is_whole = length == len(transcript.chain)
        more = 0 if is_whole else thread.longest - length
        if length <= _opening(transcript) and more > 0:
            takes_state = thread.known.resumed is not None
            return await self._begin(
                thread.branch.tenant, transcript, name, resumes, takes_state=takes_state
            )
        return await self._fork(found) if more > REWRITTEN_END else found

    async def _fork(self, found: Match) -> Match:
        thread, transcript, length = found
        views = {
            window: inherited(ledger, transcript) for window, ledger in thread.ledgers().items()
        }
        branch = msgspec.structs.replace(
            thread.branch,
            branch=f"br-{secrets.token_hex(10)}",
            version=0,
            known=state_of_fork(thread.known, length),
            views=views,
            floating=thread.floating,
            length=length,
            longest=length,
            health=None,
        )
        if any(not ledger.is_empty for ledger in views.values()):
            branch = await self._store_fork(thread.branch, branch)
        forked = Thread(branch, parent=thread.branch.branch)
        for window, view in thread.views.items():
            own = forked.views.setdefault(window, View(window, views[window]))
            own.prefix = view.prefix
            own.trend = view.trend
            own.shadow = None if view.shadow is None else inherited(view.shadow, transcript)
        return Match(forked, transcript, length)

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

    def _remember(self, thread: Thread, transcript: Transcript) -> None:
        branch = thread.branch
        thread.remember(transcript)
        self._threads.keep(thread)
        self._names[(branch.tenant, branch.name)] = branch.conversation
        *before, last = transcript.chain[-TAIL:] or (None,)
        for link in before:
            self._ends.setdefault(link, (branch.branch, False))
        if last is not None:
            self._ends[last] = (branch.branch, True)
            self._ends.move_to_end(last)
        _bound(self._ends, MAX_ENDS)
        _bound(self._names, MAX_BRANCHES)


class _Threads(OrderedDict[str, Thread]):
    """Threads by their branch, least recently used first out: bounded by their number and by what
    they hold.
    """

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


def _opening(transcript: Transcript) -> int:
    """How many messages of the history precede its first answer."""
    messages = transcript.messages
    head = transcript.head
    indices = (i for i in range(head, len(messages)) if i not in transcript.floating)
    answer = next((i for i in indices if messages[i].role == "assistant"), len(messages))
    return answer - head


def _shared(before: Transcript, now: Transcript, length: int) -> int:
    """How many messages are known of a history that ``length`` were known of before some were left
    out of it.
    """
    end = before.chain[length - 1] if length else b""
    return max(
        (n for n, link in enumerate(now.chain, 1) if link == end),
        default=min(length, len(now.chain)),
    )


def _bound(kept: OrderedDict[K, V], most: int) -> None:
    while len(kept) > most:
        kept.popitem(last=False)
