"""What one request goes through before it is answered: the plan, and attempts until one fits."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from policies import ContextSettings, Mode
from proxy.access.destination import Caller, Destination
from proxy.attempts import Attempts, learn_from_error
from proxy.effects.allowance import Patience
from proxy.effects.evictions import stage_of, strategy_of
from proxy.effects.hooks import Overflow, Turn, new_results
from proxy.errors import (
    ContextLengthExceeded,
    InvalidRequest,
)
from proxy.outcome import Outcome, evicted_count
from proxy.planning import PlannedRequest, PlanRequest
from proxy.recall.rounds import Rounds
from proxy.recalling import Recalling
from proxy.relay import UpstreamResponse
from proxy.replies import Replies, summarizer_input
from proxy.runtime import Runtime
from proxy.telemetry import NULL_SPAN, AnySpan
from proxy.wire.client import (
    EDITS,
    MEMORY_HEADER,
    PARENT_HEADER,
    RESUME_HEADER,
    client_edits,
    conversation_in,
    name_from,
    wants_no_editing,
)
from proxy.wire.counting import TextCounter
from proxy.wire.messages import ChatRequest, without_field

MAX_RETRIES = 2


@dataclass(slots=True)
class Call:
    """What one request goes through before it is answered: the plan, and attempts until one fits."""

    runtime: Runtime
    request: ChatRequest
    destination: Destination
    headers: Sequence[tuple[bytes, bytes]]
    outcome: Outcome
    job: PlanRequest | None = None
    recalling: Recalling | None = None
    body: bytes = b""

    @property
    def caller(self) -> Caller:
        """Who asks."""
        return self.destination.caller

    async def plan(self) -> PlannedRequest:
        """What goes up; the client's own bytes for a policy or a request that is not managed."""
        runtime, request, caller = self.runtime, self.request, self.caller
        settings = self._settings()
        self.outcome.settings = settings
        if runtime.hooks:
            self.outcome.turn = turn = Turn(
                request=self.outcome.id, tenant=caller.tenant, model=request.model, policy=settings.name
            )
            runtime.hooks.turn_start(turn)
        if settings.mode is Mode.OFF or not request.messages or wants_no_editing(request.fields):
            return PlannedRequest(request.body)
        if (tag := conversation_in(self.headers, MEMORY_HEADER)) is not None:
            settings = replace(settings, memory=replace(settings.memory, tags=(*settings.memory.tags, tag)))
        edits = client_edits(request.fields)
        if edits is not None and self.destination.upstream.kind == "openai" and not settings.observes:
            self.request = request = without_field(request, EDITS)
            self.outcome.request = request
        else:  # litellm translates it for a provider that may do it itself
            edits = None
        counter = self._counter(settings)
        pruned = set[str]()
        patience = Patience(settings.summaries.wait)
        replies = Replies(runtime, request, caller, settings, self.outcome.trace, pruned, patience)
        self.outcome.spent = lambda: replies.spent
        self.job = PlanRequest(
            request=request,
            tenant=caller.tenant,
            name=name_from(self.headers, request.fields, baggage=runtime.config.telemetry.read_baggage),
            settings=settings,
            counter=counter,
            believe=partial(
                runtime.windows.resolve_limits,
                request.model,
                settings=settings,
                upstream=self.destination.upstream,
                caller=caller,
                max_tokens=request.max_tokens,
                exact=counter.is_exact,
            ),
            ask=replies,
            patience=patience,
            ask_later=Replies(runtime, request, caller, settings, pruned=pruned),
            ask_about=Replies(runtime, request, caller, settings) if settings.evaluate.sample else None,
            pruned=pruned,
            summarizer_input=summarizer_input(runtime, settings, caller),
            resume=conversation_in(self.headers, RESUME_HEADER),
            parent=conversation_in(self.headers, PARENT_HEADER),
            edits=edits,
            id=self.outcome.id,
        )
        self.outcome.job = self.job
        begun = PlannedRequest(request.body)
        with self.outcome.trace.plan() as span:
            try:
                planned = await runtime.planner.first(self.job, begun)
            except ContextLengthExceeded:
                self.outcome.planned = begun
                self._tell_overflow(Overflow(source="planned"))
                raise
            self._note_plan(span, planned)
        self._tell_results(planned)
        return planned

    def _counter(self, settings: ContextSettings) -> TextCounter:
        """What counts this request's tokens: the policy's estimator, else the model's tokenizer."""
        if settings.estimator != "tokenizer":
            return self.runtime.tokenizer.counter(settings.estimator)
        rule = self.runtime.config.rule(self.request.model)
        return self.runtime.tokenizer.counter(rule.tokenizer if rule and rule.tokenizer else self.request.model)

    def _settings(self) -> ContextSettings:
        """The policy of this request: the key's, or the one that its headers ask for where the key allows it."""
        config, caller = self.runtime.config, self.caller
        sent = dict(self.headers)
        name, mode = caller.policy or config.default_policy, None
        if b"x-weir-policy" in sent and "policy" in caller.allow:
            name = sent[b"x-weir-policy"].decode("latin-1").strip()
        if b"x-weir-mode" in sent and "mode" in caller.allow:
            try:
                mode = Mode(sent[b"x-weir-mode"].decode("latin-1").strip().lower())
            except ValueError:
                raise InvalidRequest("x-weir-mode must be enforce, observe or off.") from None
        try:
            return self.runtime.policy(name, mode)
        except KeyError:
            known = ", ".join(sorted(config.policies))
            raise InvalidRequest(f"There is no policy {name[:80]!r}; there are: {known}.") from None

    async def send(self, planned: PlannedRequest) -> UpstreamResponse:
        """The answer to relay. Asks again with less, at most twice, where the upstream says that it does not fit."""
        policy = None if self.job is None else self.job.settings
        attempts = Attempts(self.runtime, self.request, self.destination, self.headers, self.outcome, policy)
        if self.job is not None and self.job.settings.recall.tool:
            self.recalling = Recalling(self.runtime, self.job, attempts)
            self.recalling.consider(planned)
        body, retries = attempts.within_window(planned), 0
        while True:
            self.body = body
            received, verdict = await (self.recalling or attempts).make(body, planned)
            if not verdict.is_overflow or self.job is None:
                return received
            self._tell_overflow(Overflow(source="upstream", tokens=verdict.prompt, limit=verdict.limit))
            if self.job.settings.observes:
                return received
            self.outcome.overflows += 1
            learn_from_error(self.runtime, verdict, planned)
            if retries == MAX_RETRIES:
                return received
            if (clamped := attempts.clamped(body, verdict)) is not None:
                body = clamped
            elif (smaller := await self._smaller(self.job, planned, attempt=retries + 1)) is not None:
                body, planned = smaller.body, smaller
            else:
                return received
            received.answer.close()
            retries += 1
            self.outcome.planned, self.outcome.retries = planned, retries

    def rounds(self) -> Rounds | None:
        """The rounds of recall that may follow the answer; None where the request did not carry the tool."""
        return None if self.recalling is None else self.recalling.rounds(self.body)

    async def _smaller(self, job: PlanRequest, planned: PlannedRequest, *, attempt: int) -> PlannedRequest | None:
        """The plan to try next, None if nothing smaller can be made."""
        with self.outcome.trace.plan() as span:
            smaller = await self.runtime.planner.harder(job, planned, attempt=attempt)
            if smaller is not None:
                self._note_plan(span, smaller)
                if self.recalling is not None:
                    self.recalling.consider(smaller)
        return smaller

    def _note_plan(self, span: AnySpan, planned: PlannedRequest) -> None:
        decision, belief = planned.decision, planned.belief
        if span is NULL_SPAN or decision is None or belief is None:
            return
        tokens = belief.budget.estimate
        for report in decision.trail:
            span.layer(
                report.layer,
                before=tokens(report.before),
                after=tokens(report.after),
                units=report.units if report.kept else 0,
                ref=report.ref,
                reason=report.reason,
            )
        settings, reading = self.outcome.settings_or_default(), decision.reading
        base = belief.budget.base(settings)
        span.decide(
            decision.action.value,
            before=decision.before,
            after=decision.after,
            limit=decision.limit,
            pressure=decision.pressure.level,
            zone=decision.pressure.zone,
            base=base,
            velocity=reading.velocity_tokens_per_turn or 0.0 if reading is not None else 0.0,
            turns_until_red=reading.turns_until_red if reading is not None else None,
            source=reading.source if reading is not None else "client_estimated",
            stage=stage_of(decision, settings, base=base),
            strategy=strategy_of(decision),
            evicted=evicted_count(planned),
            before_percent=round(100 * decision.before / base, 1),
        )

    def _tell_results(self, planned: PlannedRequest) -> None:
        """Tell the hooks which tool results are new, and whether the request does not fit."""
        turn, hooks = self.outcome.turn, self.runtime.hooks
        if turn is None or planned.reading is None or planned.recognised is None:
            return
        self.outcome.turn = turn = replace(turn, conversation=planned.recognised.thread.branch.name)
        for result in new_results(planned.reading.transcript, planned.recognised.length):
            hooks.tool_result(turn, result)
        decision, belief = planned.decision, planned.belief
        tokens = planned.reading.transcript.tokens if decision is None else decision.raw_after
        if belief is not None and not belief.budget.fits(tokens):
            self._tell_overflow(
                Overflow(source="planned", tokens=belief.budget.estimate(tokens), limit=belief.budget.usable)
            )

    def _tell_overflow(self, overflow: Overflow) -> None:
        if self.outcome.turn is not None:
            self.runtime.hooks.overflow(self.outcome.turn, overflow)
