"""What becomes of each request of one conversation: unmanaged, in a sliding window, or under a
policy.

A policy's requests go through the planner and the preparation that serve requests, over a store in
memory. A model call fails unless a model is given, and is counted.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from hashlib import blake2b

from policies.effects import Failed, Summarize, Summary
from policies.ledger import Decision, PlannedMessage
from policies.limits import Calibration, TokenBudget, divide
from policies.settings import ContextSettings
from proxy.conversation.book import Conversations
from proxy.effects.perform import Ask, EffectHandler, Patience
from proxy.errors import ContextLengthExceeded
from proxy.features.replay.script import Script
from proxy.models.facts import ModelFacts
from proxy.models.limits import MIN_SAMPLE, UNKNOWN_WINDOW, ModelLimits
from proxy.planning.planner import Planner
from proxy.planning.preparation import Preparation
from proxy.planning.values import PlanRequest
from proxy.store import Store, WriteBehindQueue
from proxy.wire.codec import parse_chat
from proxy.wire.counting import TextCounter
from proxy.wire.transcripts import Transcripts

WHOLE_REQUEST = "total"
SECONDS_BETWEEN = 5.0
"""Between two requests of a recording, which has no times: an agent's follow one another while
caches are warm.
"""
STARTED = 1_000_000_000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """``window`` is used instead of what the policy or the model says; ``max_tokens`` is that of
    each request.
    """

    counter: TextCounter
    model: str = ""
    facts: ModelFacts = field(default_factory=ModelFacts)
    window: int | None = None
    max_tokens: int | None = None

    def budget(self, settings: ContextSettings, *, margin: float | None = None) -> TokenBudget:
        return divide(
            settings,
            window=self.window or settings.window or self.facts.window or UNKNOWN_WINDOW,
            max_input=None if self.window else self.facts.max_input,
            max_output=self.facts.max_output,
            requested=self.max_tokens,
            margin=margin,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Forwarded:
    """What became of one request.

    ``pieces`` is None for a request that was refused, and ``refused_by`` then the bucket that was
    too full, or ``total``. ``tokens`` of it (or of what was refused) are uncalibrated; ``new``:
    edits were decided; ``failed``: it could not be planned; ``asked`` counts calls to a model.
    """

    pieces: tuple[PlannedMessage, ...] | None
    tokens: int
    new: bool = False
    failed: bool = False
    refused_by: str = ""
    asked: int = 0
    decision: Decision | None = None

    @property
    def removed(self) -> tuple[int, ...]:
        return () if self.decision is None else self.decision.removed


class Scenario:
    """Every request goes up as it came."""

    async def forward(self, script: Script, length: int) -> Forwarded:
        """What becomes of the request with the first ``length`` messages."""
        return Forwarded(pieces=script.raw_pieces(length), tokens=script.transcript(length).tokens)

    async def close(self) -> None:
        """Release what is kept for the requests so far."""


@dataclass(frozen=True, slots=True)
class SlidingWindow(Scenario):
    budget: TokenBudget

    async def forward(self, script: Script, length: int) -> Forwarded:
        transcript = script.transcript(length)
        limit = self.budget.soft_limit
        pieces = script.raw_pieces(length)
        head = transcript.head
        first = length
        used = sum(p.tokens for p in pieces[:head]) + transcript.tools + transcript.priming
        while first > head and (used + pieces[first - 1].tokens <= limit or first == length):
            first -= 1
            used += pieces[first].tokens
        while first < length - 1 and transcript.messages[first].is_result:
            used -= pieces[first].tokens
            first += 1
        return Forwarded(pieces=(*pieces[:head], *pieces[first:]), tokens=used, new=first > head)


class _Asked(EffectHandler):
    def __init__(self, ask: Ask | None) -> None:
        self.count = 0
        self._ask = ask

    async def summarize(self, effect: Summarize) -> Summary | Failed:
        self.count += 1
        reply = None if self._ask is None else await self._ask(effect)
        return reply if isinstance(reply, Summary | Failed) else Failed("replay")


class Managed(Scenario):
    def __init__(
        self,
        settings: ContextSettings,
        conditions: Conditions,
        store: Store,
        *,
        ask: Ask | None = None,
        number: int = 0,
    ) -> None:
        self._settings = settings
        self._conditions = conditions
        self._store = store
        self._asked = _Asked(ask)
        self._now = STARTED
        # a tenant for each policy in the store; whatever a policy is called, what it archives is
        # called the same
        self._tenant = blake2b(b"%d" % number, digest_size=16).hexdigest()
        self._calibration = Calibration()
        self._write_queue = WriteBehindQueue(store, degraded=lambda _: None)
        self._planner = Planner(
            transcripts=Transcripts(),
            conversations=Conversations(store, clock=self._clock),
            store=store,
            write_queue=self._write_queue,
            clock=self._clock,
        )
        self._preparation = Preparation(
            store=store,
            write_queue=self._planner.write_queue,
            workers=self._planner.workers,
            readings=self._planner.readings,
            save=self._planner.save,
            happened=lambda _: None,
            clock=self._planner.clock,
        )
        self._conversation: str | None = None

    async def forward(self, script: Script, length: int) -> Forwarded:
        """What the planner refuses goes nowhere; what it cannot plan goes up as it came."""
        self._now += SECONDS_BETWEEN
        counter = self._conditions.counter
        before = self._asked.count
        whole = script.transcript(length).tokens
        margin = self._calibration.margin(self._settings.margin, exact=counter.is_exact)
        budget = self._conditions.budget(self._settings, margin=margin)
        plan_request = self._asked_of(script.body(length), budget)
        recognized = await self._planner.recognize(plan_request)
        try:
            plan = await self._planner.first(plan_request, recognized)
        except ContextLengthExceeded as error:
            bucket = str((error.weir or {}).get("bucket", WHOLE_REQUEST))
            return Forwarded(pieces=None, tokens=whole, refused_by=bucket)
        if plan.recognized is not None:
            self._conversation = plan.recognized.thread.branch.conversation
        decision = plan.decision
        if decision is None or "plan" in plan.degraded:
            if plan.refused:
                return Forwarded(pieces=None, tokens=whole, refused_by=WHOLE_REQUEST)
            return Forwarded(pieces=script.raw_pieces(length), tokens=whole, failed=True)
        # what would be learned from the upstream's count: here it is the estimate
        if decision.raw_after >= MIN_SAMPLE:
            self._calibration = self._calibration.observe(decision.raw_after, decision.raw_after)
        self._preparation.after(plan_request, plan)
        await self._preparation.settled()
        return Forwarded(
            pieces=decision.pieces if decision.pieces is not None else script.raw_pieces(length),
            tokens=decision.raw_after,
            new=decision.is_new,
            asked=self._asked.count - before,
            decision=decision,
        )

    async def close(self) -> None:
        await self._preparation.close()
        await self._write_queue.close()
        if self._conversation is not None:
            row = await self._store.conversation(self._tenant, self._conversation)
            if row is not None:
                await self._store.delete(row)

    def _clock(self) -> float:
        return self._now

    def _asked_of(self, body: bytes, budget: TokenBudget) -> PlanRequest:
        async def limits() -> ModelLimits:
            return ModelLimits(
                budget, ModelFacts(window=budget.window, source="policy"), "", "", budget.window
            )

        return PlanRequest(
            request=parse_chat(body),
            tenant=self._tenant,
            name=None,
            settings=self._settings,
            counter=self._conditions.counter,
            limits=limits,
            ask=self._asked,
            patience=Patience(self._settings.summaries.wait),
        )


@asynccontextmanager
async def store_in_memory() -> AsyncIterator[Store]:
    store = await Store.open("sqlite+aiosqlite:///:memory:")
    try:
        yield store
    finally:
        await store.close()
