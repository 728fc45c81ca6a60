"""One request from bytes to bytes: the straight line.

identify → count → measure → replay known edits → (pass | cascade) → check → send → relay → remember

An overflow from the upstream runs the middle of the line again with a harder target, at most twice, before any
byte went to the client.
"""

import asyncio
import itertools
import math
import secrets
import time
from collections.abc import AsyncGenerator, MutableMapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

from policies import ContextSettings, Mode, Reply, Summarize, Summary
from policies.effects import Compare, Trim
from proxy.caller import Caller
from proxy.errors import (
    ContextLengthExceeded,
    InvalidRequest,
    LoopDetected,
    ProxyError,
    ShuttingDown,
    UnsupportedEncoding,
    UpstreamEmpty,
    UpstreamUnreachable,
)
from proxy.hooks import Overflow, Turn, new_results
from proxy.intake import ClientGone, Receive, read_body, while_connected
from proxy.keys import credentials_in
from proxy.perform import Performer
from proxy.planning import Job, Planned
from proxy.relay import MOST_WHOLE, Cut, Opening, Send, is_stream, open_stream, relay_stream, relay_whole
from proxy.runtime import Runtime
from proxy.settlement import Outcome, evicted_count, settle, stage_of, strategy_of
from proxy.similarity import by_shingles, by_vectors
from proxy.tap import Tap, read_completion
from proxy.telemetry import CONTEXT_HEADERS, Plan, Trace
from proxy.tokenizer import TextCounter
from proxy.upstream.client import StreamBroken, came_through
from proxy.upstream.overflow import NONE, Kind, Verdict, classify, classify_event, plausible_limit
from proxy.upstream.upstreams import CHAT, EMBEDDINGS, Answer
from proxy.windows import Belief
from proxy.wire.chat import ChatRequest, parse_chat, read_message, with_fields
from proxy.wire.knobs import wants_no_editing
from proxy.wire.names import name_from

ROUTE = "/v1/chat/completions"
MOST_RETRIES = 2
SMALLEST_OUTPUT = 16
CLAMP_MARGIN = 8
DROPPED = frozenset({b"accept-encoding", b"baggage"})
NOT_RELAYED = frozenset({b"transfer-encoding", b"connection"})


_PROCESS = secrets.token_hex(8)
_NUMBERS = itertools.count(1)


def new_request_id() -> str:
    """An id that no other request has: random per process, then counted."""
    return f"req_{_PROCESS}{next(_NUMBERS):08x}"


@dataclass(slots=True)
class Exchange:
    """One chat completions request. ``run`` is the whole of it."""

    runtime: Runtime
    scope: MutableMapping[str, Any]
    receive: Receive
    send: Send
    id: str = field(default_factory=new_request_id)
    started: float = field(default_factory=time.perf_counter)
    task: "asyncio.Task[Any] | None" = None
    answer: Answer | None = None
    stopping: bool = False

    async def run(self) -> None:
        """Answer the client, whatever happens."""
        shutdown = self.scope.get("state", {}).get("shutdown")
        if shutdown is None:
            await self._run()
            return
        shutdown.callbacks.add(self._stop)
        try:
            await self._run()
        finally:
            shutdown.callbacks.discard(self._stop)

    def _stop(self) -> None:
        """The process ends: cut the answer, or the wait for it."""
        self.stopping = True
        if self.answer is not None:
            self.answer.close()
        elif self.task is not None:
            self.task.cancel()

    async def _run(self) -> None:
        headers: Sequence[tuple[bytes, bytes]] = self.scope["headers"]
        client = self.scope.get("client")
        trace = self.runtime.telemetry.exchange(
            "POST", ROUTE, headers, client=client[0] if client else None, request_id=self.id
        )
        query = self.scope.get("query_string", b"")
        outcome = Outcome(id=self.id, started=self.started, trace=trace, query=query)
        try:
            body = await read_body(self.receive, limit=self.runtime.config.limits.body)
            self.task = asyncio.current_task()
            await while_connected(self.scope, self.receive, self._answer(body, headers, outcome))
        except ClientGone:
            outcome.gone()
        except asyncio.CancelledError:
            if not self.stopping or self.task is None:
                raise
            self.task.uncancel()
            error = ShuttingDown("The proxy is stopping; please send the request again.")
            outcome.refused(error)
            await self._refuse(error, outcome)
        except Cut as cut:
            outcome.cut(str(cut))
        except ProxyError as error:
            outcome.refused(error)
            await self._refuse(error, outcome)
        finally:
            settle(self.runtime, outcome)

    async def _answer(self, body: bytes, headers: Sequence[tuple[bytes, bytes]], outcome: Outcome) -> None:
        runtime = self.runtime
        if came_through(headers, runtime.instance):
            raise LoopDetected("This request has come through this proxy before: an upstream points back at it.")
        if any(n == b"content-encoding" and v.strip().lower() != b"identity" for n, v in headers):
            raise UnsupportedEncoding("Send the request body without Content-Encoding: it has to be read here.")
        caller = runtime.keyring.identify(credentials_in(headers))
        request = parse_chat(body)
        outcome.request, outcome.caller = request, caller
        caller.require(request.model)
        call = Call(runtime, request, caller, headers, outcome)
        try:
            planned = await call.plan()
            outcome.planned = planned
            outcome.ready = time.perf_counter()
            await self._relay(call, await call.send(planned))
        finally:
            call.job = None  # they know each other: parted, both go at once, and the body with them

    async def _relay(self, call: "Call", received: "Received") -> None:
        """Send the answer on and take note of how it went."""
        self.answer = answer = received.answer
        outcome = call.outcome
        outcome.status = answer.status
        headers = self._headers(answer, outcome)
        try:
            if received.body is not None:
                outcome.seen = await relay_whole(
                    self.send, answer, status=answer.status, headers=headers, body=received.body, seen=received.seen
                )
            elif received.chunks is not None:
                async with aclosing(received.chunks) as chunks:
                    outcome.seen = await relay_stream(
                        self.send,
                        status=answer.status,
                        headers=headers,
                        opening=received.opening,
                        chunks=chunks,
                        explain=self._explain,
                    )
        finally:
            answer.close()
            call.learn_from(outcome.seen)

    def _explain(self, error: Exception) -> ProxyError:
        """What a client is told whose stream broke off."""
        if self.stopping:
            return ShuttingDown("The proxy is stopping; please send the request again.")
        return error if isinstance(error, ProxyError) else UpstreamUnreachable(str(error))

    def _headers(self, answer: Answer, outcome: Outcome) -> list[tuple[bytes, bytes]]:
        kept = [
            (n, v) for n, v in answer.headers if n.lower() not in NOT_RELAYED and not n.lower().startswith(b"x-weir-")
        ]
        own = outcome.headers()
        if any(name.lower() == b"x-request-id" for name, _ in kept):
            own = [(n, v) for n, v in own if n != b"x-request-id"]
        return kept + own

    async def _refuse(self, error: ProxyError, outcome: Outcome) -> None:
        body = error.body()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            *outcome.headers(),
        ]
        await self.send({"type": "http.response.start", "status": error.status, "headers": headers})
        await self.send({"type": "http.response.body", "body": body, "more_body": False})


@dataclass(slots=True)
class Received:
    """An answer that is to be relayed: as a whole (``body``), or as a stream of which a beginning was read."""

    answer: Answer
    body: bytes | None = None
    seen: Tap | None = None
    chunks: AsyncGenerator[bytes, None] | None = None
    opening: Opening | None = None


@dataclass(slots=True)
class Call:
    """What one request asks of the upstream: the plan, the attempts, what is learned from them."""

    runtime: Runtime
    request: ChatRequest
    caller: Caller
    headers: Sequence[tuple[bytes, bytes]]
    outcome: Outcome
    job: Job | None = None

    @property
    def trace(self) -> Trace:
        """The request's trace."""
        return self.outcome.trace

    async def plan(self) -> Planned:
        """What goes up; the client's own bytes for a policy or a request that is not managed."""
        runtime, request, caller = self.runtime, self.request, self.caller
        settings = self._settings()
        self.outcome.settings = settings
        if runtime.hooks:
            self.outcome.turn = turn = Turn(
                request=self.outcome.id, tenant=caller.tenant, model=request.model, policy=settings.name
            )
            runtime.hooks.turn_start(turn)
        self.outcome.upstream = upstream = runtime.config.upstream(request.model)
        if settings.mode is Mode.OFF or not request.messages or wants_no_editing(request.fields):
            return Planned(request.body)
        counter = self._counter(settings)

        async def believe() -> Belief:
            return await runtime.windows.believe(
                request.model,
                settings=settings,
                upstream=upstream,
                caller=caller,
                max_tokens=request.max_tokens,
                exact=counter.is_exact,
            )

        self.job = Job(
            request=request,
            tenant=caller.tenant,
            name=name_from(self.headers, request.fields),
            settings=settings,
            counter=counter,
            believe=believe,
            ask=Performer(self._ask, self._compare, self._trim),
            summarizer_input=self._summarizer_input(settings.summarizer),
        )
        with self.trace.plan() as span:
            try:
                planned = await runtime.planner.first(self.job)
            except ContextLengthExceeded:
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

    async def send(self, planned: Planned) -> Received:
        """The answer to relay. Asks again with less, at most twice, where the upstream says that it does not fit."""
        body, retries = self._within_window(planned), 0
        while True:
            received, verdict = await self._attempt(body, planned, number=retries + 1)
            if not verdict.is_overflow or self.job is None:
                return received
            self._tell_overflow(Overflow(source="upstream", tokens=verdict.prompt, limit=verdict.limit))
            if self.job.settings.observes:
                return received
            self.outcome.overflowed(verdict)
            self._learn(verdict, planned)
            if retries == MOST_RETRIES:
                return received
            smaller = await self._smaller(body, planned, verdict, attempt=retries + 1)
            if smaller is None:
                return received
            received.answer.close()
            body, planned = smaller
            retries += 1
            self.outcome.planned, self.outcome.retries = planned, retries

    async def _smaller(
        self, body: bytes, planned: Planned, verdict: Verdict, *, attempt: int
    ) -> tuple[bytes, Planned] | None:
        """The body to try next, None if nothing smaller can be made."""
        if verdict.kind is Kind.COMPLETION and (clamped := self._clamped(body, verdict)) is not None:
            return clamped, planned
        assert self.job is not None  # noqa: S101 - send() looked
        with self.trace.plan() as span:
            smaller = await self.runtime.planner.harder(self.job, planned, attempt=attempt)
            if smaller is None:
                return None
            self._note_plan(span, smaller)
        return smaller.body, smaller

    def _within_window(self, planned: Planned) -> bytes:
        """The planned body, asking for no more than fits where the upstream is known to refuse more than that."""
        belief, decision = planned.belief, planned.decision
        enforced = self.job is not None and not self.job.settings.observes
        if not enforced or belief is None or decision is None or not self.runtime.windows.is_strict(belief.scope):
            return planned.body
        used = math.ceil(decision.after * (1 + belief.budget.margin))
        return self._asking_for(planned.body, belief.budget.window - used - CLAMP_MARGIN) or planned.body

    def _clamped(self, body: bytes, verdict: Verdict) -> bytes | None:
        """The same body asking for a shorter answer, where only prompt plus answer is too large."""
        return self._asking_for(body, verdict.clamp(CLAMP_MARGIN))

    def _asking_for(self, body: bytes, room: int | None) -> bytes | None:
        """The body with the client's ``max_tokens`` cut to ``room``; None if there is nothing to cut or no room."""
        asked = self.request.max_tokens
        if room is None or asked is None or room >= asked or room < min(SMALLEST_OUTPUT, asked):
            return None
        name = "max_completion_tokens" if "max_completion_tokens" in self.request.fields else "max_tokens"
        self.outcome.clamped = True
        return with_fields(body, **{name: room})

    async def _attempt(self, body: bytes, planned: Planned, *, number: int) -> tuple[Received, Verdict]:
        """One request to the upstream, and what its answer says about size."""
        upstream = self.outcome.upstream
        assert upstream is not None  # noqa: S101 - plan() set it
        span = self.trace.attempt(
            self.request.model,
            upstream.name,
            *self.outcome.address(),
            number,
            compacted=not self.outcome.observed
            and planned.decision is not None
            and "compact" in planned.decision.applied,
        )
        self.outcome.attempt = span
        context = span.propagation()
        drop = DROPPED | CONTEXT_HEADERS if context else DROPPED
        try:
            answer = await self.runtime.upstreams.send(
                upstream,
                caller=self.caller,
                method="POST",
                path=CHAT,
                query=self.outcome.query,
                headers=[*(h for h in self.headers if h[0] not in drop), *context],
                body=body,
                attempt=number - 1,
            )
            received, verdict = await self._look(answer, planned)
        except ProxyError as error:
            span.failed(error.code)
            raise
        if answer.status >= 400:
            span.failed("context_length_exceeded" if verdict.is_overflow else str(answer.status), status=answer.status)
        return received, verdict

    async def _look(self, answer: Answer, planned: Planned) -> tuple[Received, Verdict]:
        """Read as much of an answer as tells whether it is an overflow, before anything goes to the client."""
        if is_stream(answer) and answer.status < 400:
            chunks = answer.chunks()
            if self.job is None:
                return Received(answer, chunks=chunks), NONE
            try:
                opening = await open_stream(chunks)
            except StreamBroken as error:
                answer.close()
                raise UpstreamUnreachable(str(error)) from None
            except BaseException:
                answer.close()
                raise
            verdict = classify_event(opening.error) if opening.error is not None else NONE
            return Received(answer, chunks=chunks, opening=opening), verdict
        try:
            body = await answer.read(MOST_WHOLE)
        except StreamBroken as error:
            answer.close()
            raise UpstreamUnreachable(str(error)) from None
        if answer.status == 200 and not body.strip():
            answer.close()
            raise UpstreamEmpty("The upstream answered 200 with an empty body.")
        seen = read_completion(body) if answer.status < 400 else None
        if seen is not None and seen.said:
            return Received(answer, body=body, seen=seen), NONE
        window = planned.belief.budget.window if planned.belief is not None else None
        verdict = classify(answer.status, body, window=window)
        if seen is not None and verdict.kind is not Kind.CONTEXT:
            verdict = NONE  # an answer that was only cut short
        return Received(answer, body=body, seen=seen), verdict

    def _learn(self, verdict: Verdict, planned: Planned) -> None:
        """Remember the limit and the count that an upstream put into its error."""
        belief = planned.belief
        if belief is None:
            return
        if verdict.kind is Kind.COMPLETION:
            self.runtime.windows.mark_strict(belief.scope)
        limit = plausible_limit(verdict)
        if limit is not None:
            self.runtime.windows.learn(belief.scope, limit)
        exact = verdict.prompt is not None and not verdict.at_least and not planned.has_media
        if exact and verdict.prompt is not None and planned.sent is not None:
            self.runtime.windows.calibrate(belief.counted, estimated=planned.sent, reported=verdict.prompt)

    def learn_from(self, seen: Tap | None) -> None:
        """Calibrate by what the upstream says the forwarded request took."""
        planned = self.outcome.planned
        if seen is None or seen.usage is None or seen.usage.prompt is None or planned is None:
            return
        if planned.belief is not None and planned.sent is not None and not planned.has_media:
            self.runtime.windows.calibrate(planned.belief.counted, estimated=planned.sent, reported=seen.usage.prompt)

    async def _ask(self, effect: Summarize) -> Reply:
        """Have the summariser write; the request's own model and upstream where the policy says ``same``."""
        config = self.runtime.config
        named = self.outcome.settings.summarizer if self.outcome.settings else None
        model = self.request.model if named in (None, "same") else str(named)
        upstream = config.upstream(model)

        async def post(body: bytes) -> tuple[int, bytes]:
            return await self.runtime.upstreams.post(upstream, caller=self.caller, path=CHAT, body=body)

        with self.trace.summarizer(model, upstream.name) as span:
            reply = await self.runtime.summarizer.ask(
                effect, model=model, scope=f"{self.caller.tenant} {upstream.name}", send=post
            )
            result = "ok" if isinstance(reply, Summary) else getattr(reply, "reason", "failed")
            if result != "ok":
                span.fail(result)
        self.runtime.telemetry.metrics.summarizer(result)
        return reply

    async def _compare(self, effect: Compare) -> Reply:
        """How alike texts are, by the embeddings model that the policy names, else by their shingles."""
        if effect.model is None:
            return await asyncio.to_thread(by_shingles, effect)
        upstream = self.runtime.config.upstream(effect.model)

        async def post(body: bytes) -> tuple[int, bytes]:
            return await self.runtime.upstreams.post(upstream, caller=self.caller, path=EMBEDDINGS, body=body)

        return await by_vectors(effect, model=effect.model, send=post)

    async def _trim(self, effect: Trim) -> Reply:
        """What an operator's function leaves of the request's messages."""
        raws = self.request.messages or ()
        return await self.runtime.custom.trim(effect, [read_message(raws[i]) for i in effect.indices])

    def _summarizer_input(self, named: str | None) -> int | None:
        """What the summariser can read at once, None for the request's own limit."""
        if named in (None, "same"):
            return None
        window = self.runtime.registry.facts(str(named), settings=self.outcome.settings_or_default()).window
        return None if window is None else int(window * 0.7)

    def _note_plan(self, span: Plan, planned: Planned) -> None:
        decision, belief = planned.decision, planned.belief
        if decision is None or belief is None:
            return
        tokens = belief.budget.estimate
        for report in decision.trail:
            span.layer(
                report.layer,
                before=tokens(report.before),
                after=tokens(report.after),
                units=report.units if report.kept else 0,
                ref=report.ref,
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

    def _tell_results(self, planned: Planned) -> None:
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
