"""One request from bytes to bytes: the straight line.

identify → count → measure → replay known edits → (pass | cascade) → check → send → relay → remember

An overflow from the upstream runs the middle of the line again with a harder target, at most twice, before any
byte went to the client.
"""

import asyncio
import itertools
import secrets
import time
from collections.abc import MutableMapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from policies import ContextSettings, Mode
from proxy.attempts import Attempts, learn_from_answer, learn_from_error
from proxy.caller import Caller
from proxy.errors import (
    ContextLengthExceeded,
    InvalidRequest,
    LoopDetected,
    ProxyError,
    ShuttingDown,
    UnsupportedEncoding,
    UpstreamUnreachable,
)
from proxy.hooks import Overflow, Turn, new_results
from proxy.intake import ClientGone, Receive, read_body, while_connected
from proxy.keys import credentials_in
from proxy.planning import Job, Planned
from proxy.recall.rounds import Rounds
from proxy.recall.streaming import Relaying
from proxy.recall.whole import follow_whole
from proxy.recalling import Recalling
from proxy.relay import Cut, Received, Send, relay_stream, relay_whole
from proxy.replies import Replies, summarizer_input
from proxy.runtime import Runtime
from proxy.settlement import Outcome, evicted_count, settle
from proxy.stages import stage_of, strategy_of
from proxy.tap import Tap
from proxy.telemetry import Plan
from proxy.telemetry.spans import NULL_SPAN
from proxy.tokenizer import TextCounter
from proxy.upstream.client import came_through
from proxy.upstream.overflow import Verdict
from proxy.upstream.upstreams import Answer
from proxy.wire.chat import ChatRequest, parse_chat
from proxy.wire.knobs import wants_no_editing
from proxy.wire.names import PARENT_HEADER, RESUME_HEADER, conversation_in, name_from

ROUTE = "/v1/chat/completions"
MOST_RETRIES = 2
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
    asking: "asyncio.Task[Any] | None" = None
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
        if self.asking is not None:
            self.asking.cancel()
        elif self.answer is not None:
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
        if [v for n, v in headers if n == b"content-encoding" and v.strip().lower() != b"identity"]:
            raise UnsupportedEncoding("Send the request body without Content-Encoding: it has to be read here.")
        caller = runtime.keyring.identify(credentials_in(headers))
        request = parse_chat(body)
        outcome.request, outcome.caller = request, caller
        caller.require(request.model)
        call = Call(runtime, request, caller, headers, outcome)
        planned = await call.plan()
        outcome.planned = planned
        outcome.ready = time.perf_counter()
        received = await call.send(planned)
        rounds = call.rounds()
        if rounds is None or call.recalling is None:
            await self._relay(received, outcome)
        else:
            await self._recall(received, rounds, call.recalling, outcome)

    async def _recall(self, received: Received, rounds: Rounds, recalling: Recalling, outcome: Outcome) -> None:
        """Relay an answer whose calls of the recall tool Weir answers itself."""
        self.answer = received.answer

        async def ask(body: bytes) -> tuple[Received, Verdict]:
            self.asking = asyncio.current_task()
            try:
                found = await recalling.again(body)
            finally:
                self.asking = None
            self.answer = found[0].answer
            return found

        try:
            if received.chunks is None:
                joins = "response_format" not in recalling.job.request.fields
                received = await follow_whole(received, rounds, ask, recalling.note_round, joins=joins)
            if received.chunks is not None:
                relaying = Relaying(
                    rounds=rounds,
                    ask=ask,
                    send=self.send,
                    headers=partial(self._stream_headers, outcome=outcome),
                    explain=self._explain,
                    ended=recalling.note_round,
                )
                result = await relaying.run(received)
                if isinstance(result, Tap):
                    outcome.seen = result
                    return
                received = result
        finally:
            rounds.finish()
            outcome.recalls = rounds.recalled
            if received.chunks is not None:
                received.answer.close()
                learn_from_answer(self.runtime, outcome)
        await self._relay(received, outcome)

    def _stream_headers(self, received: Received, outcome: Outcome) -> list[tuple[bytes, bytes]]:
        outcome.status = received.answer.status
        return self._headers(received.answer, outcome)

    async def _relay(self, received: Received, outcome: Outcome) -> None:
        """Send the answer on and take note of how it went."""
        self.answer = answer = received.answer
        outcome.status = answer.status
        headers = self._headers(answer, outcome)
        if received.rewritten:
            headers = [h for h in headers if h[0].lower() != b"content-length"]
            headers.append((b"content-length", str(len(received.body or b"")).encode()))
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
            learn_from_answer(self.runtime, outcome)

    def _explain(self, error: Exception) -> ProxyError:
        """What a client is told whose stream broke off."""
        if self.stopping:
            return ShuttingDown("The proxy is stopping; please send the request again.")
        return error if isinstance(error, ProxyError) else UpstreamUnreachable(str(error))

    def _headers(self, answer: Answer, outcome: Outcome) -> list[tuple[bytes, bytes]]:
        named = [(n.lower(), n, v) for n, v in answer.headers]
        kept = [(n, v) for low, n, v in named if low not in NOT_RELAYED and not low.startswith(b"x-weir-")]
        own = outcome.headers()
        if any(low == b"x-request-id" for low, _, _ in named):
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
class Call:
    """What one request goes through before it is answered: the plan, and attempts until one fits."""

    runtime: Runtime
    request: ChatRequest
    caller: Caller
    headers: Sequence[tuple[bytes, bytes]]
    outcome: Outcome
    job: Job | None = None
    recalling: Recalling | None = None
    body: bytes = b""

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
        pruned = set[str]()
        replies = Replies(runtime, request, caller, settings, self.outcome.trace, pruned)
        self.outcome.spent = lambda: replies.spent
        self.job = Job(
            request=request,
            tenant=caller.tenant,
            name=name_from(self.headers, request.fields),
            settings=settings,
            counter=counter,
            believe=partial(
                runtime.windows.believe,
                request.model,
                settings=settings,
                upstream=upstream,
                caller=caller,
                max_tokens=request.max_tokens,
                exact=counter.is_exact,
            ),
            ask=replies,
            ask_later=Replies(runtime, request, caller, settings, pruned=pruned),
            ask_about=Replies(runtime, request, caller, settings) if settings.evaluate.sample else None,
            pruned=pruned,
            summarizer_input=summarizer_input(runtime, settings, caller),
            resume=conversation_in(self.headers, RESUME_HEADER),
            parent=conversation_in(self.headers, PARENT_HEADER),
            id=self.outcome.id,
        )
        self.outcome.job = self.job
        begun = Planned(request.body)
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

    async def send(self, planned: Planned) -> Received:
        """The answer to relay. Asks again with less, at most twice, where the upstream says that it does not fit."""
        policy = None if self.job is None else self.job.settings
        attempts = Attempts(self.runtime, self.request, self.caller, self.headers, self.outcome, policy)
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
            self.outcome.overflowed(verdict)
            learn_from_error(self.runtime, verdict, planned)
            if retries == MOST_RETRIES:
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

    async def _smaller(self, job: Job, planned: Planned, *, attempt: int) -> Planned | None:
        """The plan to try next, None if nothing smaller can be made."""
        with self.outcome.trace.plan() as span:
            smaller = await self.runtime.planner.harder(job, planned, attempt=attempt)
            if smaller is not None:
                self._note_plan(span, smaller)
                if self.recalling is not None:
                    self.recalling.consider(smaller)
        return smaller

    def _note_plan(self, span: Plan, planned: Planned) -> None:
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
