"""One request from bytes to bytes: the straight line.

identify → count → measure → replay known edits → (pass | cascade) → check → send → relay → remember

An overflow from the upstream runs the middle of the line again with a harder target, at most twice, before any
byte went to the client.
"""

import asyncio
import itertools
import os
import secrets
import time
from collections.abc import MutableMapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from proxy.access.admission import without_grants
from proxy.access.destination import CHAT, Caller, Route, for_chat
from proxy.attempts import learn_from_answer
from proxy.call import Call
from proxy.errors import (
    LoopDetected,
    ProxyError,
    ShuttingDown,
    UnsupportedEncoding,
    UpstreamUnreachable,
)
from proxy.heard import Listener
from proxy.intake import ClientGone, Receive, read_held, while_connected
from proxy.outcome import Outcome
from proxy.planning import PlannedRequest
from proxy.recall.rounds import Rounds, follow_whole
from proxy.recall.streaming import Relaying
from proxy.recalling import Recalling
from proxy.relay import Send, StreamCut, UpstreamResponse, is_readable, relay_stream, relay_whole
from proxy.runtime import Runtime
from proxy.settlement import listened, record_exchange
from proxy.tap import Tap
from proxy.telemetry import LOG_CONTEXT, RequestContext
from proxy.upstream.client import Answer, came_through
from proxy.upstream.overflow import Verdict
from proxy.wire.messages import parse_chat

ROUTE = "/v1/chat/completions"
NOT_RELAYED = frozenset({b"transfer-encoding", b"connection"})

Headers = Sequence[tuple[bytes, bytes]]


@dataclass(slots=True)
class RequestIds:
    """Ids that no other request has: random per process, then counted; a process that is forked draws its own."""

    process: str = ""
    numbers: "itertools.count[int]" = field(default_factory=lambda: itertools.count(1))

    def __post_init__(self) -> None:
        self.draw()
        os.register_at_fork(after_in_child=self.draw)

    def draw(self) -> None:
        """Draw the part that tells this process from others."""
        self.process = secrets.token_hex(8)

    def new(self) -> str:
        """The next id."""
        return f"req_{self.process}{next(self.numbers):08x}"


new_request_id = RequestIds().new


@dataclass(slots=True)
class Exchange:
    """One chat completions request. ``run`` is the whole of it."""

    runtime: Runtime
    scope: MutableMapping[str, Any]
    receive: Receive
    send: Send
    route: Route = CHAT
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
            "POST",
            ROUTE,
            headers,
            server=self.scope.get("server"),
            client=client[0] if client else None,
            scheme=self.scope.get("scheme", "http"),
            request_id=self.id,
        )
        LOG_CONTEXT.set(RequestContext(self.id, trace.trace_id))
        query, metrics = self.scope.get("query_string", b""), self.runtime.telemetry.metrics
        metrics.active += 1
        outcome = Outcome(id=self.id, started=self.started, trace=trace, query=query, sent_with=headers)
        try:
            outcome.caller = caller = self._admit(headers)
            with self.runtime.admission.enter(caller) as stay:
                body = await read_held(self.receive, headers, limit=self.runtime.config.limits.body, hold=stay.hold)
                self.task = asyncio.current_task()
                await while_connected(self.scope, self.receive, self._answer(body, caller, headers, outcome))
        except ClientGone:
            outcome.gone()
        except asyncio.CancelledError:
            if not self.stopping or self.task is None:
                raise
            self.task.uncancel()
            error = ShuttingDown("The proxy is stopping; please send the request again.")
            outcome.refused(error)
            await self._refuse(error, outcome)
        except StreamCut:
            outcome.error = "stream_broken"
        except ProxyError as error:
            outcome.refused(error)
            await self._refuse(error, outcome)
        finally:
            metrics.active -= 1
            record_exchange(self.runtime, outcome)

    def _admit(self, headers: Headers) -> Caller:
        """Whose request it is, by its headers alone."""
        if came_through(headers, self.runtime.instance):
            raise LoopDetected("This request has come through this proxy before: an upstream points back at it.")
        if [v for n, v in headers if n == b"content-encoding" and v.strip().lower() != b"identity"]:
            raise UnsupportedEncoding("Send the request body without Content-Encoding: it has to be read here.")
        return self.runtime.admit(self.scope)

    async def _answer(self, body: bytes, caller: Caller, headers: Headers, outcome: Outcome) -> None:
        runtime = self.runtime
        outcome.request = request = parse_chat(body)
        outcome.destination, request = for_chat(
            runtime.config, caller, self.route, request, query=outcome.query, headers=headers
        )
        outcome.request = request
        call = Call(runtime, request, outcome.destination, headers, outcome)
        planned = await call.plan()
        outcome.planned = planned
        if planned.listens:
            ended = partial(self._announce, planned, outcome) if runtime.planner.conversations.announces else None
            outcome.listener = self.send = Listener(self.send, ended)
        outcome.ready = time.perf_counter()
        received = await call.send(planned)
        rounds, metrics = call.rounds(), runtime.telemetry.metrics
        is_stream = received.chunks is not None
        metrics.streams += is_stream
        try:
            if rounds is None or call.recalling is None:
                await self._relay(received, outcome)
            else:
                await self._recall(received, rounds, call.recalling, outcome)
        finally:
            metrics.streams -= is_stream

    async def _announce(self, planned: PlannedRequest, outcome: Outcome) -> None:
        """Have other processes know the conversation by the answer that its client is about to have."""
        model = outcome.request.model if outcome.request is not None else ""
        if answers := listened(self.runtime, planned, outcome):
            await self.runtime.planner.announce(planned, request=self.id, model=model, answers=answers)

    async def _recall(self, received: UpstreamResponse, rounds: Rounds, recalling: Recalling, outcome: Outcome) -> None:
        """Relay an answer whose calls of the recall tool Weir answers itself."""
        self.answer = received.answer

        async def ask(body: bytes) -> tuple[UpstreamResponse, Verdict]:
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

    def _stream_headers(self, received: UpstreamResponse, outcome: Outcome) -> list[tuple[bytes, bytes]]:
        outcome.status = received.answer.status
        return self._headers(received.answer, outcome)

    async def _relay(self, received: UpstreamResponse, outcome: Outcome) -> None:
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
                        explain=self._explain if is_readable(answer) else None,
                        begun=outcome.begin_stream,
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
        granted = without_grants(answer.headers, self.scope, outcome.caller, self.runtime.config)
        named = [(n.lower(), n, v) for n, v in granted]
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
            *error.headers(),
            *outcome.headers(),
        ]
        await self.send({"type": "http.response.start", "status": error.status, "headers": headers})
        await self.send({"type": "http.response.body", "body": body, "more_body": False})
