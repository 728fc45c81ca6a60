"""A request as it is to be handled: what it asks, of which upstream, and what its provider holds of
the exchange.

A request that goes on from an earlier answer is planned as the whole that it stands for. As long as
the provider's copy is what was planned, the client's own bytes go up; else the whole does, once, as
a request that goes on from nothing, and what the client goes on from next is the answer to that.
"""

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress

import msgspec

from policies.settings import ContextSettings, Mode
from proxy.access.destination import Caller, Destination
from proxy.config.values import UpstreamSettings
from proxy.conversation.answers import AnswerBook
from proxy.errors import InvalidRequest
from proxy.planning.planner import Planner
from proxy.planning.values import Paid, Plan, PlanRequest
from proxy.store.records import AnswerRow
from proxy.tap import NO_USAGE, usage_from
from proxy.telemetry.names import service_at
from proxy.wire.codec import NOTHING, OWN, ClientRequest, Segments, opening_of, with_history
from proxy.wire.raw import Raw
from proxy.wire.render import without_marks

log = logging.getLogger("weir.settlement")

COMPACT_PATH = "/responses/compact"
SAME = 0.9
"""Share of the provider's copy from which on what is planned counts as the same: both are
estimates.
"""


class HeldState(msgspec.Struct, frozen=True, kw_only=True):
    """The provider's part in a request.

    Attributes:
        parent: the answer that the request goes on from; ``chain`` are those from the first one on
        up to it, none where
            not all of them are known.
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
        self, planner: Planner, asked: PlanRequest, client: ClientRequest, plan: Plan
    ) -> Plan:
        """The plan with the client's own bytes wherever the provider's copy, or the client's, is
        what was planned.
        """
        if not self.chain:
            is_own = plan.body is asked.request.body is not client.body
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
        if recognized is None or decision is None or asked.settings.observes:
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
        smaller = await planner.harder(asked, plan, attempt=1) if planned > SAME * held else plan
        return own if smaller is None else msgspec.structs.replace(smaller, restarted=True)


NOTHING_HELD = HeldState()


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked, of whom, and what is to be planned of it; ``asked`` is None for a request that
    is not managed.

    ``client`` is what came, ``chat`` the whole that it stands for. ``compacts``: it has its history
    compacted and nothing else, which Weir may do.
    """

    client: ClientRequest
    chat: ClientRequest
    destination: Destination
    held: HeldState
    asked: PlanRequest | None = None
    replies: Paid | None = None
    compacts: bool = False


def is_native(chat: ClientRequest, upstream: UpstreamSettings) -> bool:
    known = chat.codec.providers
    return (
        bool(known) and service_at(upstream.address, upstream.name, upstream.provider)[0] in known
    )


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
    # what goes on from the answer to an unknown item is unknown, too: nothing is on record behind a
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
