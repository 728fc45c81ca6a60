"""The recall tool of one exchange: whether its request carries it, and what its rounds start from."""

from dataclasses import dataclass

from policies.ledger import ADDING
from proxy.attempts import Attempts
from proxy.planning import PlannedRequest, PlanRequest
from proxy.recall.archive import Archive
from proxy.recall.rounds import Rounds
from proxy.recall.tool import Offer, offer_for, with_tool
from proxy.record import count_call
from proxy.relay import UpstreamResponse
from proxy.runtime import Runtime
from proxy.tap import NO_USAGE, Tap
from proxy.telemetry.metrics import RETRIES
from proxy.upstream.overflow import Verdict

REFUSALS = frozenset({400, 404, 405, 422, 501})
WORDS = (b"tool", b"function")
MAX_ERROR_LEN = 16 * 1024
MAX_SCOPES = 1_000


@dataclass(slots=True)
class Recalling:
    """The recall tool of one request that is managed; ``offer`` is None as long as it does not carry it."""

    runtime: Runtime
    job: PlanRequest
    attempts: Attempts
    offer: Offer | None = None

    def consider(self, planned: PlannedRequest) -> None:
        """Have the request carry the tool from now on, if something was removed from its conversation.

        What the definition costs is added to what the plan says is sent.
        """
        belief, before = planned.belief, self.offer
        self.offer = None
        if belief is None or not self.job.settings.recall.tool or not is_due(planned) or self.is_refused(planned):
            return
        offer = before or offer_for(self.job.request, self.job.settings, self.job.counter)
        sent = None if offer is None or planned.sent is None else planned.sent + offer.tokens
        if sent is not None and belief.budget.hard_fits(sent):
            self.offer, planned.sent = offer, sent

    async def make(self, body: bytes, planned: PlannedRequest) -> tuple[UpstreamResponse, Verdict]:
        """One attempt, with the tool where the request carries it; without where the upstream takes none."""
        received, verdict = await self.attempts.make(self._carrying(body), planned)
        if self.offer is None or verdict.is_overflow or not refuses_tools(received):
            return received, verdict
        received.answer.close()
        self.runtime.telemetry.metrics.add(RETRIES, "tools_refused")
        received, verdict = await self.attempts.make(body, planned)
        if received.answer.status < 400:
            self._note_refusal(planned)
        return received, verdict

    async def again(self, body: bytes) -> tuple[UpstreamResponse, Verdict]:
        """The answer to one more round, and what it says about size."""
        return await self.attempts.make(body, self.attempts.outcome.planned)

    def note_round(self, received: UpstreamResponse, seen: Tap | None) -> None:
        """End the span of a round that another one follows, and keep what it used."""
        outcome, seen = self.attempts.outcome, seen or Tap()
        if outcome.attempt is not None:
            outcome.attempt.answered(received.answer.status, seen=seen)
        count_call(self.runtime.telemetry.metrics, outcome, seen=seen)
        outcome.rounds.append(seen.usage or NO_USAGE)

    def _carrying(self, body: bytes) -> bytes:
        return body if self.offer is None else with_tool(body, self.offer.definition)

    def is_refused(self, planned: PlannedRequest) -> bool:
        """Whether the upstream was seen to take no tools for this model."""
        return planned.belief is not None and planned.belief.scope in self.runtime.without_tools

    def _note_refusal(self, planned: PlannedRequest) -> None:
        """Remember that the upstream took the request only without the tool."""
        self.offer = None
        if planned.belief is not None and len(self.runtime.without_tools) < MAX_SCOPES:
            self.runtime.without_tools.add(planned.belief.scope)

    def rounds(self, body: bytes) -> Rounds | None:
        """The rounds that may follow an answer to ``body``, the request without the tool; None where it had none."""
        offer, job, planned = self.offer, self.job, self.attempts.outcome.planned
        if offer is None or planned.belief is None or planned.recognised is None or planned.reading is None:
            return None
        thread, recall = planned.recognised.thread, job.settings.recall
        archive = Archive(
            transcript=planned.reading.transcript,
            pieces=planned.decision.pieces if planned.decision is not None else None,
            edits=tuple(thread.known.edits.values()),
            cuts=thread.known.cuts,
            tenant=job.tenant,
            conversation=thread.branch.conversation,
            store=self.runtime.store,
            settler=self.runtime.settler,
            ask=job.ask,
            model=job.settings.embeddings,
            embeddings=job.settings.recall.embeddings,
        )
        return Rounds(
            offer=offer,
            archive=archive,
            counter=job.counter,
            model=job.request.model,
            body=self._carrying(body),
            plain=body,
            room=planned.belief.budget.hard_limit - (planned.sent or 0),
            most=recall.rounds,
            max_tokens=recall.max_tokens,
        )


def is_due(planned: PlannedRequest) -> bool:
    """Whether something is out of the window of a request's conversation, by this request's batch or an earlier one.

    For a request that begins anew from an early point it is what was out by then.
    """
    if planned.recognised is None or planned.reading is None or planned.decision is None:
        return False
    known = planned.recognised.thread.known.at(len(planned.reading.transcript.chain))
    return bool(known.cuts) or any(edit.kind not in ADDING for edit in known.edits.values())


def refuses_tools(received: UpstreamResponse) -> bool:
    """Whether an answer is an error that may be about the tool."""
    if received.body is None or received.answer.status not in REFUSALS:
        return False
    said = received.body[:MAX_ERROR_LEN].lower()
    return any(word in said for word in WORDS)
