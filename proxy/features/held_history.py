"""History that the provider holds: a request that goes on from an earlier answer, and has only its
newest messages.

Such a request is planned as the whole that it goes on with. As long as the provider's copy is what
was planned, the client's own bytes go up; else the whole does, once, as a request that goes on from
nothing, and what the client goes on from next is the answer to that.

Every answer that a later request may go on from is kept, in memory first and bounded there, and in
the store where that may hold content. A history counts only if all of it is known, from its first
request on, and only for its own tenant. Two requests may go on from the same answer: what follows
is distinguished by the answers' ids.
"""

import logging
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress

import msgspec

from policies.settings import ContextSettings, Mode
from proxy.access.destination import Caller
from proxy.errors import InvalidRequest
from proxy.features.feature import Feature
from proxy.planning.planner import Planner
from proxy.planning.values import Plan, PlanRequest
from proxy.store import Store, WriteBehindQueue
from proxy.store.records import AnswerRow, ConversationRow, StoreError
from proxy.tap import NO_USAGE, usage_from
from proxy.wire.codec import NOTHING, OWN, ClientRequest, Codec, Segments, opening_of, with_history
from proxy.wire.raw import Raw
from proxy.wire.render import without_marks

log = logging.getLogger("weir.held_history")

MAX_BYTES = 12 * 1024 * 1024
Key = tuple[str, str]


class AnswerBook(Feature):
    """Answers that a provider keeps, by their ids."""

    def __init__(self, store: Store, write_queue: WriteBehindQueue) -> None:
        self._store = store
        self._write_queue = write_queue
        self._size = 0
        self._rows: OrderedDict[Key, AnswerRow] = OrderedDict()
        self._items: dict[Key, str] = {}
        self._unwritten: set[Key] = set()

    async def keep(self, row: AnswerRow, *, lasting: bool) -> None:
        """Remember an answer; one that is not ``lasting`` is stored once a request goes on from it
        or names its items.
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

    async def forget_answer(self, tenant: str, answer: str) -> None:
        self._drop((tenant, answer))
        try:
            await self._write_queue.flush()
            await self._store.forget_answer(tenant, answer)
        except StoreError as error:
            log.warning("an answer could not be deleted from the store: %s", error)

    def forget(self, conversation: ConversationRow) -> None:
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
            for row in rows if not self._write_queue.failing else ():
                self._write_queue.put(row)
            return
        try:
            await self._store.record(rows)
        except StoreError as error:
            self._unwritten |= {(row.tenant, row.id) for row in rows}
            log.warning("another process will not know an answer that a provider keeps: %s", error)


def _size_of(row: AnswerRow) -> int:
    return 1024 + len(row.given) + len(row.output) + len(row.opening)


SAME = 0.9
"""Share of the provider's copy from which on what is planned counts as the same: both are
estimates.
"""


class HeldState(msgspec.Struct, frozen=True, kw_only=True):
    """The provider's part in a request.

    Attributes:
        parent: the answer that the request goes on from; ``chain`` are those from the first one on
            up to it, none where not all of them are known.
        keeps: whether the answer is recorded.
        known: the elements that the request only names.
        elsewhere: whether what the model reads cannot be known, so that the request is not managed.
    """

    parent: str | None = None
    chain: Sequence[AnswerRow] = ()
    keeps: bool = False
    known: Mapping[str, Raw] = msgspec.field(default_factory=dict)
    elsewhere: bool = False

    def whole(self, client: ClientRequest) -> ClientRequest:
        chat = client
        if self.chain:
            history = b",".join(
                part for row in self.chain for part in (row.given, row.output) if part
            )
            chat = with_history(client, history, self.chain[0].opening)
        elif client.messages is None and client.codec.added(client.fields):
            chat = with_history(client, b"", b"{}")
        if self.known and chat.messages is not None:
            array = bytes(chat.messages.raw)
            head = chat.messages.head
            chat = msgspec.structs.replace(
                chat, messages=Segments(array, chat.codec, head, self.known)
            )
        return chat

    async def followed(
        self, planner: Planner, plan_request: PlanRequest, client: ClientRequest, plan: Plan
    ) -> Plan:
        """The plan with the client's own bytes wherever the provider's copy, or the client's, is
        what was planned.
        """
        if not self.chain:
            is_own = plan.body is plan_request.request.body is not client.body
            return msgspec.structs.replace(plan, body=client.body) if is_own else plan
        recognized = plan.recognized
        decision = plan.decision
        body = client.body
        if recognized is None or recognized.marked:
            with suppress(Exception):  # nobody may have been able to read the messages
                body = without_marks(client)
        own = msgspec.structs.replace(plan, body=body)
        anew = msgspec.structs.replace(plan, restarted=True)
        last = self.chain[-1]
        # its provider does not have that answer, or not all of it
        if OWN in last.output or not last.output:
            return anew
        if recognized is None or decision is None or plan_request.settings.observes:
            return own
        if decision.is_new:
            return anew
        budget = recognized.limits.budget
        if not last.tokens:
            return own
        new = [
            m.tokens for m in recognized.transcript.messages[last.length :] if m.role != "assistant"
        ]
        held = last.tokens + budget.estimate(sum(new))
        planned = budget.estimate(plan.sent)
        is_same = SAME * held <= planned <= held / SAME
        if held <= budget.estimate(recognized.policy_limits.trigger):
            return own if is_same else msgspec.structs.replace(own, sent=0)
        smaller = (
            await planner.harder(plan_request, plan, attempt=1) if planned > SAME * held else plan
        )
        return own if smaller is None else msgspec.structs.replace(smaller, restarted=True)


NOTHING_HELD = HeldState()


async def held_by(
    answers: AnswerBook, chat: ClientRequest, caller: Caller, settings: ContextSettings
) -> HeldState:
    """Raises InvalidRequest where the policy wants all of it sent."""
    codec = chat.codec
    fields = chat.fields
    tenant = caller.tenant
    parent = codec.parent(fields)
    keeps = codec.is_kept(fields)
    if settings.mode is Mode.OFF or codec.is_held_elsewhere(fields):
        return HeldState(elsewhere=True)
    if settings.server_state != "follow":
        linked = parent is not None or (keeps and codec.link in fields)
        if linked and settings.server_state == "refuse":
            raise InvalidRequest("The history is not held here: send all of it.", param=codec.link)
        return HeldState(elsewhere=linked)
    names = codec.names(chat)
    known = await answers.elements(tenant, names, codec) if names else NOTHING
    chain = (
        await answers.behind(tenant, parent)
        if parent is not None and len(known) == len(names)
        else ()
    )
    unknown = next((name for name, alone in names.items() if alone and name not in known), None)
    elsewhere = unknown is not None or (parent is not None and not chain)
    # what goes on from the answer to an unknown item is unknown, too: nothing is recorded under a
    # name
    return HeldState(
        parent=parent or unknown, chain=chain, keeps=keeps, known=known, elsewhere=elsewhere
    )


async def record_answer(
    answers: AnswerBook,
    held: HeldState,
    client: ClientRequest,
    plan: Plan,
    tenant: str,
    body: bytes,
    *,
    at: float,
) -> None:
    codec = client.codec
    recognized = plan.recognized
    try:
        given = codec.answer(body)
        if given is None:
            return
        usage = usage_from(given.usage) or NO_USAGE
        messages = () if recognized is None else recognized.transcript.messages
        row = AnswerRow(
            tenant=tenant,
            id=given.id,
            parent=held.parent,
            conversation="" if recognized is None else recognized.thread.branch.conversation,
            at=at,
            tokens=(usage.prompt or 0) + (usage.completion or 0) if usage.prompt else 0,
            reasoned=usage.reasoning or 0,
            length=len(messages),
            given=codec.added(client.fields),
            output=given.elements,
            opening=opening_of(client),
            items=tuple(codec.named(given.elements, 0)),
        )
        # a client that does will hardly go on from an answer
        repeats = any(m.role == "assistant" for m in messages)
        lasting = held.parent is not None or bool(held.known) or not repeats
        await answers.keep(row, lasting=lasting)
    except Exception:
        log.exception("an answer that its provider keeps could not be recorded")
