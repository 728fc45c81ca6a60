"""The recall tool of one exchange: whether its request carries it, and what its rounds start from."""

import msgspec

from proxy.exchange.send import Attempts
from proxy.planning.values import Plan, PlanRequest
from proxy.recall.archive import Archive
from proxy.recall.chat import ChatRecall
from proxy.recall.elements import ListRecall, MessagesRecall, ResponsesRecall
from proxy.recall.rounds import RecallSurface, Rounds, Unseen
from proxy.recall.tool import Offer, offer_for, with_tool
from proxy.runtime import Runtime
from proxy.stream import UpstreamResponse
from proxy.tap import NO_USAGE, Tap
from proxy.telemetry.metrics import RETRIES
from proxy.upstream.overflow import Verdict
from proxy.wire.codec import CHAT, ClientRequest
from proxy.wire.responses import RESPONSES

REFUSALS = frozenset({400, 404, 405, 422, 501})
WORDS = (b"tool", b"function")
MAX_ERROR_LEN = 16 * 1024
MAX_SCOPES = 1_000


class Recalling(msgspec.Struct):
    """The recall tool of one request that is managed; ``offer`` is None as long as it does not carry it."""

    runtime: Runtime
    asked: PlanRequest
    attempts: Attempts
    offer: Offer | None = None

    def consider(self, plan: Plan) -> Plan:
        """Have the request carry the tool from now on, if something was removed from its conversation.

        The plan comes back, with what the definition costs added to what it says is sent.
        """
        before, self.offer, asked = self.offer, None, self.asked
        if plan.recognized is None or not asked.settings.recall.tool or not is_due(plan) or self._is_refused(plan):
            return plan
        if asked.request.codec is not CHAT and not self.runtime.store.keeps_content:
            return plan  # after a restart nothing would be known of hidden rounds that its answers depend on
        offer = before or offer_for(asked.request, asked.settings, asked.counter)
        if offer is None or not plan.recognized.limits.budget.hard_fits(plan.sent + offer.tokens):
            return plan
        self.offer = offer
        return msgspec.structs.replace(plan, sent=plan.sent + offer.tokens)

    async def make(self, body: bytes, plan: Plan) -> tuple[UpstreamResponse, Verdict]:
        received, verdict = await self.attempts.make(self._carrying(body), plan)
        if self.offer is None or verdict.is_overflow or not refuses_tools(received):
            return received, verdict
        received.answer.close()
        self.runtime.telemetry.metrics.add(RETRIES, "tools_refused")
        received, verdict = await self.attempts.make(body, plan)
        if received.answer.status < 400:
            self._note_refusal(plan)
        return received, verdict

    def note_round(self, received: UpstreamResponse, seen: Tap | None) -> None:
        attempts, seen = self.attempts, seen or Tap()
        if attempts.span is not None:
            attempts.span.answered(received.answer.status, seen=seen)
        attempts.count_call(seen=seen)
        attempts.rounds.append(seen.usage or NO_USAGE)

    async def keep(self, rounds: Rounds, plan: Plan) -> None:
        recognized = plan.recognized
        if recognized is None or rounds.unseen is None:
            return
        if (edit := rounds.unseen.edit(recognized.transcript)) is not None:
            await self.runtime.planner.remember(recognized, edit, request=self.asked.id)

    def _carrying(self, body: bytes) -> bytes:
        return body if self.offer is None else with_tool(body, self.offer.definition)

    def _is_refused(self, plan: Plan) -> bool:
        return plan.recognized is not None and plan.recognized.limits.scope in self.runtime.without_tools

    def _note_refusal(self, plan: Plan) -> None:
        self.offer = None
        if plan.recognized is not None and len(self.runtime.without_tools) < MAX_SCOPES:
            self.runtime.without_tools.add(plan.recognized.limits.scope)

    def rounds(self, body: bytes, plan: Plan) -> Rounds | None:
        """The rounds that may follow an answer to ``body``, the request without the tool; None where it had none."""
        offer, asked, recognized = self.offer, self.asked, plan.recognized
        if offer is None or recognized is None:
            return None
        thread, recall = recognized.thread, asked.settings.recall
        archive = Archive(
            transcript=recognized.transcript,
            pieces=plan.decision.pieces if plan.decision is not None else None,
            edits=tuple(thread.known.edits.values()),
            cuts=thread.known.cuts,
            tenant=asked.tenant,
            conversation=thread.branch.conversation,
            store=self.runtime.store,
            unstored=self.runtime.settler.original,
            ask=asked.ask,
            model=asked.settings.embeddings,
            embeddings=asked.settings.recall.embeddings,
        )
        surface = surface_of(asked.request)
        return Rounds(
            surface=surface,
            unseen=Unseen(surface, asked.counter, asked.request.model) if isinstance(surface, ListRecall) else None,
            offer=offer,
            archive=archive,
            counter=asked.counter,
            model=asked.request.model,
            body=self._carrying(body),
            plain=body,
            room=recognized.limits.budget.hard_limit - plan.sent,
            most=recall.rounds,
            max_tokens=recall.max_tokens,
        )


def surface_of(request: ClientRequest) -> RecallSurface:
    if request.codec is CHAT:
        return ChatRecall(joins="response_format" not in request.fields)
    joins = request.codec.schema_of(request) is None
    if request.codec is RESPONSES:
        return ResponsesRecall(joins=joins, stateless=request.value("store") is False)
    return MessagesRecall(joins=joins)


def is_linked(request: ClientRequest) -> bool:
    link = request.codec.link
    return link is not None and bytes(request.fields.get(link, b"null")) != b"null"


def is_due(plan: Plan) -> bool:
    """Whether something is out of the window of a request's conversation, by this request's batch or an earlier one.

    For a request that begins anew from an early point it is what was out by then.
    """
    if plan.recognized is None or plan.decision is None:
        return False
    return plan.recognized.thread.known.at(len(plan.recognized.transcript.chain)).has_removed


def refuses_tools(received: UpstreamResponse) -> bool:
    if received.body is None or received.answer.status not in REFUSALS:
        return False
    said = received.body[:MAX_ERROR_LEN].lower()
    return any(word in said for word in WORDS)
