"""What becomes of each request of one conversation: unmanaged, in a sliding window, or under a policy.

A policy's requests go through the planner and the preparation that serve requests, over a store in memory. A question
to a model fails unless somebody is given to ask, and is counted.
"""

from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any, Self

from policies.effects import Failed, Summarize, Summary
from policies.ledger import Decision, PlannedMessage
from policies.limits import Calibration, TokenBudget, divide
from policies.messages import ToolCall
from policies.quality.advise import Advice, TokenPrices, ToolUse, Traffic, advise
from policies.settings import ContextSettings, Mode
from proxy.conversation.book import Conversations
from proxy.effects.perform import Ask, EffectHandler, Patience
from proxy.errors import ContextLengthExceeded
from proxy.models.facts import ModelFacts, ModelRegistry
from proxy.models.limits import MIN_SAMPLE, UNKNOWN_WINDOW, ModelLimits
from proxy.planning.planner import Planner
from proxy.planning.preparation import Preparation
from proxy.planning.values import PlanRequest
from proxy.replay.script import Script
from proxy.store import Store, WriteBehindQueue
from proxy.wire.codec import parse_chat
from proxy.wire.counting import TextCounter, Tokenizer
from proxy.wire.transcripts import Transcripts

UNMANAGED, SLIDING = "unmanaged", "sliding window"
WHOLE_REQUEST = "total"
DEFAULT_ENCODING = "o200k_base"
SECONDS_BETWEEN = 5.0
"""Between two requests of a recording, which has no times: an agent's follow one another while caches are warm."""
STARTED = 1_000_000_000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """``window`` stands above what the policy or the model says; ``max_tokens`` is what a request would ask for."""

    counter: TextCounter
    model: str = ""
    facts: ModelFacts = field(default_factory=ModelFacts)
    window: int | None = None
    max_tokens: int | None = None

    @classmethod
    def of(cls, model: str, tokenizer: Tokenizer, models: ModelRegistry, **stated: int | None) -> Self:
        """Those of a model, which may be none that is named."""
        facts = models.facts(model, settings=ContextSettings()) if model else ModelFacts()
        return cls(counter=tokenizer.counter(model or DEFAULT_ENCODING), model=model, facts=facts, **stated)

    def window_of(self, settings: ContextSettings) -> int:
        return self.window or settings.window or self.facts.window or UNKNOWN_WINDOW

    def budget(self, settings: ContextSettings, *, margin: float | None = None) -> TokenBudget:
        return divide(
            settings,
            window=self.window_of(settings),
            max_input=None if self.window else self.facts.max_input,
            max_output=self.facts.max_output,
            requested=self.max_tokens,
            margin=margin,
        )


@dataclass(frozen=True, slots=True)
class Refusal:
    scope: str
    used: int
    cap: int
    count: int = 1

    @property
    def text(self) -> str:
        if self.scope == WHOLE_REQUEST:
            return f"what may not be removed holds {self.used:,} tokens, there is room for {self.cap:,}"
        return f"bucket {self.scope} holds {self.used:,} tokens, its cap is {self.cap:,}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Forwarded:
    """``pieces`` is None for a request that was refused. ``tokens`` of it (or of what was refused) and ``limit`` are
    uncalibrated; ``new``: edits were decided; ``asked`` counts questions to a model.
    """

    pieces: tuple[PlannedMessage, ...] | None
    tokens: int
    limit: int
    action: str
    new: bool = False
    applied: Mapping[str, int] = field(default_factory=dict)
    asked: int = 0
    why: Refusal | None = None
    decision: Decision | None = None

    @property
    def zone(self) -> str:
        return "" if self.decision is None else self.decision.pressure.zone

    @property
    def layers(self) -> tuple[str, ...]:
        return () if self.decision is None else tuple(r.layer for r in self.decision.trail if r.kept)

    @property
    def removed(self) -> tuple[int, ...]:
        return () if self.decision is None else self.decision.removed


class Scenario:
    async def forward(self, script: Script, length: int) -> Forwarded:
        raise NotImplementedError

    async def close(self) -> None:
        """Give up what is kept for the requests so far."""


@dataclass(frozen=True, slots=True)
class Unmanaged(Scenario):
    budget: TokenBudget

    async def forward(self, script: Script, length: int) -> Forwarded:
        tokens = script.transcript(length).tokens
        return Forwarded(pieces=script.raw_pieces(length), tokens=tokens, limit=self.budget.usable, action="pass")


@dataclass(frozen=True, slots=True)
class SlidingWindow(Scenario):
    budget: TokenBudget

    async def forward(self, script: Script, length: int) -> Forwarded:
        transcript, limit = script.transcript(length), self.budget.soft_limit
        pieces = script.raw_pieces(length)
        head, first = transcript.head, length
        used = sum(p.tokens for p in pieces[:head]) + transcript.tools + transcript.priming
        while first > head and (used + pieces[first - 1].tokens <= limit or first == length):
            first -= 1
            used += pieces[first].tokens
        while first < length - 1 and transcript.messages[first].is_result:
            used -= pieces[first].tokens
            first += 1
        dropped = first - head
        return Forwarded(
            pieces=(*pieces[:head], *pieces[first:]),
            tokens=used,
            limit=self.budget.usable,
            action="drop" if dropped else "pass",
            applied={"dropped": dropped} if dropped else {},
            new=dropped > 0,
        )


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
        # a tenant for each policy in the store; whatever a policy is called, what it archives is called the same
        self._tenant = blake2b(b"%d" % number, digest_size=16).hexdigest()
        self._calibration = Calibration()
        self._settler = WriteBehindQueue(store, degraded=lambda _: None)
        self._planner = Planner(
            transcripts=Transcripts(),
            conversations=Conversations(store, clock=self._clock),
            store=store,
            settler=self._settler,
            clock=self._clock,
        )
        self._preparation = Preparation(
            store=store,
            settler=self._planner.settler,
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
        counter, before = self._conditions.counter, self._asked.count
        margin = self._calibration.margin(self._settings.margin, exact=counter.is_exact)
        budget = self._conditions.budget(self._settings, margin=margin)
        asked = self._asked_of(script.body(length), budget)
        recognized = await self._planner.recognize(asked)
        try:
            plan = await self._planner.first(asked, recognized)
        except ContextLengthExceeded as error:
            tokens = script.transcript(length).tokens
            why = _why(error, budget)
            return Forwarded(pieces=None, tokens=tokens, limit=budget.usable, action="refused", why=why)
        if plan.recognized is not None:
            self._conversation = plan.recognized.thread.branch.conversation
        decision = plan.decision
        if decision is None or "plan" in plan.degraded:
            action, pieces = ("refused", None) if plan.refused else ("failed", script.raw_pieces(length))
            tokens = script.transcript(length).tokens
            return Forwarded(pieces=pieces, tokens=tokens, limit=budget.usable, action=action)
        if decision.raw_after >= MIN_SAMPLE:  # what the upstream's count would teach: here it is the estimate
            self._calibration = self._calibration.observe(decision.raw_after, decision.raw_after)
        self._preparation.after(asked, plan)
        await self._preparation.settled()
        return Forwarded(
            pieces=decision.pieces if decision.pieces is not None else script.raw_pieces(length),
            tokens=decision.raw_after,
            limit=decision.limit,
            action=str(decision.action),
            new=decision.is_new,
            applied=decision.applied,
            asked=self._asked.count - before,
            decision=decision,
        )

    async def close(self) -> None:
        await self._preparation.close()
        await self._settler.close()
        if self._conversation is not None:
            row = await self._store.conversation(self._tenant, self._conversation)
            if row is not None:
                await self._store.delete(row)

    def _clock(self) -> float:
        return self._now

    def _asked_of(self, body: bytes, budget: TokenBudget) -> PlanRequest:
        async def limits() -> ModelLimits:
            return ModelLimits(budget, ModelFacts(window=budget.window, source="policy"), scope="", counted="")

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


def _why(error: ContextLengthExceeded, budget: TokenBudget) -> Refusal:
    facts: Mapping[str, Any] = error.weir or {}
    if "bucket" in facts:
        return Refusal(facts["bucket"], facts["used"], facts["cap"])
    return Refusal(WHOLE_REQUEST, facts["protected"], budget.hard_limit)


@asynccontextmanager
async def store_in_memory() -> AsyncIterator[Store]:
    store = await Store.open("sqlite+aiosqlite:///:memory:")
    try:
        yield store
    finally:
        await store.close()


def scenario_of(settings: ContextSettings, conditions: Conditions, store: Store, number: int) -> Scenario:
    if settings.mode is Mode.OFF:
        return Unmanaged(conditions.budget(settings))
    return Managed(settings, conditions, store, number=number)


UNNAMED = "unknown"


@dataclass(frozen=True, slots=True)
class Pace:
    growth: float
    fixed: int


def pace_of(script: Script) -> Pace:
    counted = [request.length for request in script.requests if request.counts]
    if not counted:
        return Pace(0.0, 0)
    first, last = script.transcript(counted[0]), script.transcript(counted[-1])
    growth = (last.tokens - first.tokens) / (len(counted) - 1) if len(counted) > 1 else 0.0
    users = [message.tokens for message in last.messages if message.role == "user"]
    head = sum(message.tokens for message in last.messages[: last.head])
    ends = sum(users[:1]) + (users[-1] if len(users) > 1 else 0)
    return Pace(max(0.0, growth), head + last.tools + last.priming + ends)


def advice_for(pace: Pace, settings: ContextSettings, conditions: Conditions, prices: TokenPrices) -> Advice:
    budget = conditions.budget(settings)
    return advise(
        prices, growth=pace.growth, fixed=pace.fixed, window=budget.window, usable=budget.usable, settings=settings
    )


def advised(settings: ContextSettings, advice: Advice) -> ContextSettings:
    return replace(settings, name=f"{settings.name}, advised", shapes=(replace(advice.shape, window=None),))


@dataclass(slots=True)
class TrafficCount:
    conversations: int = 0
    requests: int = 0
    turns: int = 0
    marked: int = 0
    _buckets: Counter[str] = field(default_factory=Counter)
    _tools: dict[str, ToolUse] = field(default_factory=dict)

    def add(self, script: Script) -> None:
        length = len(script.recording.raws)
        transcript = script.transcript(length)
        self.conversations += 1
        self.requests += len(script.recording.requests)
        self.turns += sum(message.role == "user" for message in transcript.messages)
        self.marked += sum(message.keep is True for message in transcript.messages)
        self._buckets.update(script.buckets(script.raw_pieces(length), priming=transcript.priming))
        self._add_results(script, length)

    def _add_results(self, script: Script, length: int) -> None:
        calls: dict[str, ToolCall] = {}
        digests: set[bytes] = set()
        asked: set[tuple[str, str]] = set()
        for index, message in enumerate(script.messages[:length]):
            calls |= {call.id: call for call in script.read(index).calls}
            if not message.is_result:
                continue
            call = calls.get(message.answers or "")
            name = UNNAMED if call is None else call.name
            tool = self._tools.setdefault(name, ToolUse(name=name))
            tool.calls += 1
            tool.tokens += message.tokens
            tool.largest = max(tool.largest, message.tokens)
            key = (call.name, call.arguments) if call is not None else None
            if message.digest in digests or key in asked:
                tool.repeated += message.tokens
            digests.add(message.digest)
            if key is not None:
                asked.add(key)

    @property
    def traffic(self) -> Traffic:
        return Traffic(
            conversations=self.conversations,
            requests=self.requests,
            turns=self.turns,
            buckets=dict(self._buckets),
            tools=tuple(self._tools[name] for name in sorted(self._tools)),
            marked=self.marked,
        )
