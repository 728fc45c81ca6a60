"""The recall tool of one request: offered, sent with it, and taken back where it is refused."""

import msgspec

from policies.limits import RECALL_TOKENS
from proxy.exchange.attempts import Attempts
from proxy.features.recall.archive import Archive
from proxy.features.recall.rounds import MAX_ROUNDS, Rounds
from proxy.features.recall.tool import Offer, offer_for, with_more
from proxy.planning.planner import Planner
from proxy.planning.values import Plan, PlanRequest
from proxy.stream import UpstreamResponse
from proxy.tap import NO_USAGE, Tap
from proxy.upstream.overflow import Verdict

REFUSALS = frozenset({400, 404, 405, 422, 501})
WORDS = (b"tool", b"function")
MAX_ERROR_LEN = 16 * 1024


class Recalling(msgspec.Struct):
    """The recall tool of one request that is managed; ``offer`` is None as long as it does not
    carry it.

    ``without_tools`` are the scopes (origin, model, credential) whose upstream was seen to take no
    tools.
    """

    plan_request: PlanRequest
    attempts: Attempts
    planner: Planner
    without_tools: set[str]
    offer: Offer | None = None

    def consider(self, plan: Plan) -> Plan:
        """Add the tool to the request, if something was removed from its conversation.

        Returns the plan, with the definition's tokens added to those that are sent.
        """
        before = self.offer
        self.offer = None
        plan_request = self.plan_request
        if (
            plan.recognized is None
            or not is_due(plan)
            or plan.recognized.limits.scope in self.without_tools
        ):
            return plan
        offer = before or offer_for(
            plan_request.request, plan_request.settings, plan_request.counter
        )
        if offer is None or not plan.recognized.limits.budget.hard_fits(plan.sent + offer.tokens):
            return plan
        self.offer = offer
        return msgspec.structs.replace(plan, sent=plan.sent + offer.tokens)

    async def make(self, body: bytes, plan: Plan) -> tuple[UpstreamResponse, Verdict]:
        received, verdict = await self.attempts.make(self._carrying(body), plan)
        if self.offer is None or verdict.is_overflow or not refuses_tools(received):
            return received, verdict
        received.answer.close()
        self.attempts.metrics.retries.labels("tools_refused").inc()
        received, verdict = await self.attempts.make(body, plan)
        if received.answer.status < 400:
            self.offer = None
            if plan.recognized is not None and len(self.without_tools) < MAX_SCOPES:
                self.without_tools.add(plan.recognized.limits.scope)
        return received, verdict

    def note_round(self, received: UpstreamResponse, seen: Tap | None) -> None:
        attempts = self.attempts
        seen = seen or Tap()
        if attempts.span is not None:
            attempts.span.end_call(received.answer.status, seen=seen)
        attempts.count_call(seen=seen)
        attempts.rounds.append(seen.usage or NO_USAGE)

    def _carrying(self, body: bytes) -> bytes:
        return body if self.offer is None else with_more(body, "tools", [self.offer.definition])

    def rounds(self, body: bytes, plan: Plan) -> Rounds | None:
        """The rounds that may follow an answer to ``body``, the request without the tool; None
        where it had none.
        """
        offer = self.offer
        plan_request = self.plan_request
        recognized = plan.recognized
        if offer is None or recognized is None:
            return None
        thread = recognized.thread
        archive = Archive(
            transcript=recognized.transcript,
            pieces=plan.decision.pieces if plan.decision is not None else None,
            edits=tuple(recognized.view.ledger.edits.values()),
            cuts=recognized.view.ledger.cuts,
            tenant=plan_request.tenant,
            conversation=thread.branch.conversation,
            named=plan_request.name is not None,
            store=self.planner.store,
            unstored=self.planner.write_queue.original,
            ask=plan_request.ask,
            embeddings=plan_request.settings.embeddings,
        )
        return Rounds(
            offer=offer,
            archive=archive,
            counter=plan_request.counter,
            model=plan_request.request.model,
            body=self._carrying(body),
            plain=body,
            room=recognized.limits.budget.hard_limit - plan.sent,
            most=MAX_ROUNDS,
            max_tokens=RECALL_TOKENS,
            joins="response_format" not in plan_request.request.fields,
        )


def is_due(plan: Plan) -> bool:
    """Whether something is out of the window of a request's conversation, by this request's batch
    or an earlier one.

    For a request that restarts from an early point, as of that point.
    """
    if plan.recognized is None or plan.decision is None:
        return False
    return plan.recognized.known().at(len(plan.recognized.transcript.chain)).has_removed


def refuses_tools(received: UpstreamResponse) -> bool:
    if received.body is None or received.answer.status not in REFUSALS:
        return False
    said = received.body[:MAX_ERROR_LEN].lower()
    return any(word in said for word in WORDS)


MAX_SCOPES = 1_000
