"""One request from bytes to bytes: the straight line.

admit → read → recognize → plan (replay known edits, then pass or edit) → send → relay → record

An overflow from the upstream runs the middle of the line again with a harder target, at most twice,
before any byte went to the client.
"""

import asyncio
import itertools
import logging
import os
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any, TypedDict

import msgspec

from policies.ledger import LayerReport
from policies.limits import Limits, layers_of, limit_for
from policies.settings import Mode
from proxy.access.admission import admitted, without_grants
from proxy.access.destination import (
    CHAT,
    Caller,
    Headers,
    Route,
    for_fallback,
    for_managed,
)
from proxy.access.provider_ids import ids_in, is_judged, named_in_request
from proxy.custom import Overflow, Turn, new_results
from proxy.errors import (
    ContextLengthExceeded,
    EndpointMissing,
    LoopDetected,
    ModelNotAllowed,
    ProxyError,
    ShuttingDown,
    UpstreamPage,
    UpstreamUnreachable,
)
from proxy.exchange.asked import parsed_for, request_for, settings_for
from proxy.exchange.compaction import (
    as_answer,
    as_compacted,
    compaction_on,
    is_weirs,
    lacks_compaction,
    make_compaction,
    natively,
)
from proxy.exchange.record import BROKE_OFF, ExchangeProgress, evicted_count, identify
from proxy.exchange.request import COMPACT_PATH, NOTHING_HELD, Request, held_by, record_answer
from proxy.exchange.reserving import reserve
from proxy.exchange.send import (
    Attempts,
    Recalling,
    learn_from_answer,
    learn_from_error,
    learn_load,
    learn_loads_passed,
)
from proxy.exchange.tell import record_exchange
from proxy.models.limits import BINDING
from proxy.planning.values import Plan, PlanRequest
from proxy.recall.rounds import Relaying, Rounds, follow_whole
from proxy.runtime import Runtime
from proxy.server import WRITE
from proxy.stream import (
    EVENT_STREAM,
    NOT_RELAYED,
    READ_OUT,
    ClientGone,
    Listener,
    Receive,
    Send,
    StreamCut,
    UpstreamResponse,
    is_readable,
    is_stream,
    read_plain,
    relay_stream,
    relay_whole,
    send_start,
    unbuffered,
    while_connected,
)
from proxy.tap import StreamTap, Tap, unpacker_for
from proxy.telemetry.logs import LOG_CONTEXT, RequestContext
from proxy.telemetry.trace import NULL_TRACE, ExchangeTrace, Span
from proxy.upstream.client import came_through, has_no_route
from proxy.upstream.connection import Answer, HTTPAnswer
from proxy.upstream.overflow import MEASURED, NONE, Kind, Verdict
from proxy.wire import CODECS
from proxy.wire.anthropic import MESSAGES
from proxy.wire.raw import write_value

MAX_RETRIES = 2
NO_SUCH_ROUTE = frozenset({404, 405})
STEERING = (("policy", b"x-weir-policy"), ("mode", b"x-weir-mode"))
REFUSES_REASONING = frozenset({Kind.BINDING, Kind.CHANGED})
WITH_IDS = frozenset({"container", "thread", "mcp_servers"})
"""Fields of a request of Messages whose answer names something that the provider keeps."""

log = logging.getLogger("weir.exchange")


class RequestIds:
    """Ids that no other request has: random per process, then counted; a process that is forked
    draws its own.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._draw()
        os.register_at_fork(after_in_child=self._draw)

    def _draw(self) -> None:
        self._process = secrets.token_hex(8)

    def new(self) -> str:
        return f"req_{self._process}{next(self._numbers):08x}"


new_request_id = RequestIds().new


class ExchangeHandler:
    def __init__(
        self,
        runtime: Runtime,
        scope: MutableMapping[str, Any],
        receive: Receive,
        send: Send,
        route: Route = CHAT,
    ) -> None:
        self.runtime = runtime
        self.scope = scope
        self.receive = receive
        self.send = send
        self.route = route
        self.codec = CODECS[route.path.split("/")[1]]
        self.task: asyncio.Task[Any] | None = None
        self.asking: asyncio.Task[Any] | None = None
        self.answer: Answer | None = None
        self.stopping = False
        self.remembers = False
        name = new_request_id()
        started = time.perf_counter()
        headers = scope["headers"]
        trace: ExchangeTrace = NULL_TRACE
        if runtime.telemetry.exports_traces:
            trace = runtime.telemetry.exchange(scope, f"/v1{route.path}", request_id=name)
        self.progress = ExchangeProgress(
            name, started, trace, scope.get("query_string", b""), headers, route
        )

    def _stop(self) -> None:
        self.stopping = True
        if self.asking is not None:
            self.asking.cancel()
        elif self.answer is not None:
            self.answer.close()
        elif self.task is not None:
            self.task.cancel()

    async def run(self) -> None:
        runtime = self.runtime
        progress = self.progress
        shutdown = self.scope.get("state", {}).get("shutdown")
        LOG_CONTEXT.set(RequestContext(progress.id, progress.trace.trace_id))
        runtime.telemetry.metrics.active_requests.inc()
        if shutdown is not None:
            shutdown.callbacks.add(self._stop)
        try:
            progress.caller = caller = self._admit(progress.headers)
            with runtime.admission.enter(caller) as stay:
                progress.stay = stay
                if runtime.admission.shared is not None:
                    await runtime.admission.share_limits(stay, caller)
                limit = runtime.config.limits.body
                body, progress.headers = await read_plain(
                    self.receive, progress.headers, limit=limit, hold=stay.hold
                )
                if stay.waited:
                    progress.since = time.monotonic() - stay.waited
                if progress.trace.recorded:
                    progress.trace.root.since(progress.trace.root.started, "receive")
                self.task = asyncio.current_task()
                await while_connected(self.scope, self._answer(body, caller))
        except ClientGone:
            progress.gone()
        except asyncio.CancelledError:
            if not self.stopping or self.task is None:
                raise
            self.task.uncancel()
            await self._refuse(
                ShuttingDown("The proxy is stopping; please send the request again.")
            )
        except StreamCut:
            progress.error = BROKE_OFF
        except ProxyError as error:
            await self._refuse(error)
        finally:
            if shutdown is not None:
                shutdown.callbacks.discard(self._stop)
            runtime.telemetry.metrics.active_requests.dec()
            ended = time.perf_counter()
            if progress.trace.recorded:  # its spans end now
                record_exchange(runtime, progress, ended=ended)
            else:
                # behind the other answers that can go out now, before whatever comes next is begun
                asyncio.get_running_loop().call_soon(
                    partial(record_exchange, runtime, progress, ended=ended)
                )
        if progress.error == BROKE_OFF:
            await asyncio.sleep(READ_OUT)

    def _admit(self, headers: Headers) -> Caller:
        if came_through(headers, self.runtime.instance):
            raise LoopDetected(
                "This request has come through this proxy before: an upstream points back at it."
            )
        runtime = self.runtime
        return admitted(self.scope, runtime.keyring, runtime.guesses, runtime.config)

    async def _answer(self, body: bytes, caller: Caller) -> None:
        progress = self.progress
        metrics = self.runtime.telemetry.metrics
        request = await self.read(body, caller)
        if (
            request.compacts
            and is_weirs(self.runtime, request, self.route.path)
            and await self._compact(request)
        ):
            return
        try:
            received, sent, recalling = await self._obtain(request)
        except ContextLengthExceeded as refusal:
            request = self._fallen_back(request, refusal)
            try:
                received, sent, recalling = await self._obtain(request)
            except ContextLengthExceeded as second:
                raise refused_twice(refusal, second, request.chat.model) from None
        remember = self._remembering(request)
        if remember is not None or request.held.keeps:
            ended = partial(self._announce, request)
            progress.listener = self.send = Listener(self.send, ended, remember, codec=self.codec)
        if (
            request.compacts
            and lacks_compaction(received, self.route.path)
            and await self._compact(request, received)
        ):
            return
        self._require_endpoint(request, received)
        rounds = None if recalling is None else recalling.rounds(sent, progress.plan)
        is_stream = received.chunks is not None
        metrics.active_streams.inc(is_stream)
        try:
            if rounds is None or recalling is None:
                await self._relay(received)
            else:
                await self._recall(received, rounds, recalling)
        finally:
            metrics.active_streams.dec(is_stream)

    async def _obtain(self, request: Request) -> tuple[UpstreamResponse, bytes, Recalling | None]:
        """The upstream's answer, the body that it answers, and the recall tool that it carries."""
        plan = await self.plan(request)
        self.progress.ready = time.perf_counter()
        attempts, recalling = self.attempts_of(request)
        received, sent = await self._send(request, plan, attempts, recalling)
        return received, sent, recalling

    def _fallen_back(self, request: Request, refusal: ContextLengthExceeded) -> Request:
        """The request as one to the policy's ``fallback``. Raises the refusal where there is none,
        or the key may not use it.
        """
        progress = self.progress
        settings = progress.settings
        caller = request.destination.caller
        model = None if settings is None else settings.fallback
        if model is None or settings is None or model == request.chat.model:
            raise refusal
        try:
            destination, chat = for_fallback(
                self.runtime.config, caller, self.route, request.chat, model
            )
        except ModelNotAllowed:
            raise refusal from None
        if self.codec.name not in destination.upstream.endpoints:
            raise refusal
        held = request.held
        if held is not NOTHING_HELD:  # all of it goes up, as to one who holds nothing
            held = msgspec.structs.replace(held, parent=None, chain=(), known={})
        sent = dict(progress.headers)
        new = request_for(self.runtime, progress, chat, destination, settings, held, sent=sent)
        progress.chat = new.chat
        progress.asked = new.asked
        progress.replies = new.replies
        progress.fallback = True
        progress.refusal = {}
        self.remembers = is_judged(caller, destination.upstream)
        progress.trace.event("fallback", model=model, reason=refusal.code)
        return new

    async def read(self, body: bytes, caller: Caller) -> Request:
        progress = self.progress
        runtime = self.runtime
        sent = dict(self.progress.headers)
        progress.chat = chat = parsed_for(runtime, caller, self.codec, body)
        destination, progress.chat = for_managed(
            runtime.config, caller, self.route, chat, headers=progress.headers, query=progress.query
        )
        self.remembers = is_judged(caller, destination.upstream)
        if self.remembers:
            await runtime.provider_ids.require(caller, named_in_request(progress.chat))
        settings = settings_for(runtime, caller, sent)
        progress.settings = settings
        progress.observed = settings.observes and settings.mode is not Mode.OFF
        progress.ignored = [
            what for what, header in STEERING if header in sent and what not in caller.allow
        ]
        if runtime.hooks.plugins:
            progress.turn = Turn(
                request=progress.id,
                tenant=caller.tenant,
                model=progress.chat.model,
                policy=settings.name,
            )
            runtime.hooks.tell("turn_start", progress.turn)
        held = NOTHING_HELD
        if self.codec.link is not None:
            held = await held_by(runtime.answers, progress.chat, caller, settings)
        request = request_for(
            runtime, progress, progress.chat, destination, settings, held, sent=sent
        )
        progress.chat = request.chat
        progress.asked = request.asked
        progress.replies = request.replies
        return request

    async def plan(self, request: Request) -> Plan:
        progress = self.progress
        asked = request.asked
        progress.plan = Plan(body=request.chat.body)
        if asked is None:
            identify(progress)
            if request.destination.caller.is_counted:
                await reserve(self.runtime, progress, request, None)
            return progress.plan
        if progress.trace.recorded:
            with progress.trace.plan() as asked.span:
                plan = await self._plan(request, asked)
                self._note_plan(asked.span, plan)
        else:
            plan = await self._plan(request, asked)
        if progress.turn is not None:
            self._tell_results(plan, progress.turn)
        return plan

    async def _plan(self, request: Request, asked: PlanRequest) -> Plan:
        progress = self.progress
        planner = self.runtime.planner
        recognized = await planner.recognize(asked)
        if recognized is not None:
            progress.plan = Plan(
                body=request.chat.body, recognized=recognized, degraded=recognized.degraded
            )
        identify(progress)
        if request.destination.caller.is_counted:
            await reserve(self.runtime, progress, request, recognized)
        try:
            plan = await planner.first(asked, recognized)
            if request.client is not asked.request:
                plan = await request.held.followed(planner, asked, request.client, plan)
            progress.plan = plan = natively(request, plan) if asked.settings.observes else plan
        except ContextLengthExceeded:
            self._tell_overflow(Overflow(source="planned"))
            raise
        return plan

    async def _compact(self, request: Request, received: UpstreamResponse | None = None) -> bool:
        progress = self.progress
        runtime = self.runtime
        asked = request.asked
        if asked is None or (recognized := await runtime.planner.recognize(asked)) is None:
            return False
        progress.plan = msgspec.structs.replace(
            progress.plan, body=request.chat.body, recognized=recognized
        )
        identify(progress)
        if request.destination.caller.is_counted:
            await reserve(runtime, progress, request, recognized)
        if (
            made := await make_compaction(runtime, request, asked, recognized, name=progress.id)
        ) is None:
            return False
        if received is not None:
            runtime.unsupported[
                request.destination.upstream.name, compaction_on(self.route.path)
            ] = None
            received.answer.close()
        progress.compacted = True
        progress.ready = progress.ready or time.perf_counter()
        kind = EVENT_STREAM if request.chat.stream else b"application/json"
        await self._tell(
            as_compacted(made) if self.route.path == COMPACT_PATH else as_answer(made), kind=kind
        )
        return True

    async def _tell(
        self,
        told: bytes,
        more: Headers = (),
        *,
        status: int = 200,
        kind: bytes = b"application/json",
    ) -> None:
        self.progress.status = status
        headers = [
            (b"content-type", kind),
            (b"content-length", b"%d" % len(told)),
            *more,
            *self.progress.own_headers(),
        ]
        headers = unbuffered(headers) if kind == EVENT_STREAM else headers
        await send_start(self.send, status=status, headers=headers)
        await self.send({"type": "http.response.body", "body": told, "more_body": False})

    def _require_endpoint(self, request: Request, received: UpstreamResponse) -> None:
        """Nothing, or EndpointMissing where the upstream has nothing at the endpoint; remembered
        for a time.
        """
        upstream = request.destination.upstream
        status = received.answer.status
        path = self.codec.path
        if status not in NO_SUCH_ROUTE:
            if status < 300:
                self.runtime.unsupported.pop((upstream.name, path), None)
        elif self.codec.name in upstream.endpoints and has_no_route(
            status, received.body or b"", path
        ):
            self.runtime.unsupported[upstream.name, path] = None
            received.answer.close()
            raise EndpointMissing.of(upstream.name, f"POST /v1{path}", status=status)

    def attempts_of(self, request: Request) -> tuple[Attempts, Recalling | None]:
        progress = self.progress
        runtime = self.runtime
        asked = request.asked
        progress.attempts = attempts = Attempts(
            runtime.upstreams,
            runtime.windows,
            runtime.telemetry.metrics,
            request.chat,
            request.destination,
            progress.headers,
            progress.query,
            progress.trace,
            None if asked is None else asked.settings,
        )
        if asked is None or not asked.settings.recall.tool:
            return attempts, None
        return attempts, Recalling(asked, attempts, runtime.planner, runtime.without_tools)

    async def _send(
        self, request: Request, plan: Plan, attempts: Attempts, recalling: Recalling | None
    ) -> tuple[UpstreamResponse, bytes]:
        """The answer to relay, and the body that it answers.

        Asks again with less, at most twice, where the upstream says that it does not fit.
        """
        asked = request.asked
        make = (recalling or attempts).make
        plan = self.progress.plan = plan if recalling is None else recalling.consider(plan)
        body = attempts.within_window(plan)
        while True:
            received, verdict = await make(body, plan)
            if verdict.kind in REFUSES_REASONING and (
                valid := await self._without_reasoning(request, plan, verdict)
            ):
                received.answer.close()
                attempts.retries += 1
                plan = self.progress.plan = (
                    valid if recalling is None else recalling.consider(valid)
                )
                body = attempts.within_window(plan)
                continue
            if (
                verdict.kind in MEASURED
                and (lighter := await self._lighter(request, plan, verdict)) is not None
            ):
                received.answer.close()
                attempts.retries += 1
                plan = lighter if recalling is None else recalling.consider(lighter)
                self.progress.plan = plan
                body = attempts.within_window(plan)
                continue
            if verdict is NONE or not verdict.is_overflow or asked is None:
                return received, body
            self._tell_overflow(
                Overflow(source="upstream", tokens=verdict.prompt, limit=verdict.limit)
            )
            if asked.settings.observes:
                return received, body
            attempts.overflows += 1
            window = learn_from_error(self.runtime.windows, verdict, plan)
            attempt = attempts.retries + 1
            if attempt > MAX_RETRIES:
                return received, body
            if (clamped := attempts.clamped(body, verdict, plan, floor=True)) is not None:
                body = clamped
            elif (
                smaller := await self._smaller(
                    asked, plan, recalling, attempt=attempt, window=window
                )
            ) is not None:
                plan = msgspec.structs.replace(smaller, restarted=bool(request.held.chain))
                body = plan.body
            elif (clamped := attempts.clamped(body, verdict, plan, floor=False)) is not None:
                body = clamped
            else:
                return received, body
            received.answer.close()
            attempts.retries += 1
            self.progress.plan = plan

    async def _lighter(self, request: Request, plan: Plan, verdict: Verdict) -> Plan | None:
        """The plan within what the upstream has refused by beside tokens; None where it is not
        Weir's to change.
        """
        asked = request.asked
        attempts = self.progress.attempts
        if (
            asked is None
            or asked.settings.observes
            or attempts is None
            or attempts.retries >= MAX_RETRIES
        ):
            return None
        planner = self.runtime.planner
        learn_load(self.runtime.windows, planner.scales, verdict, plan, asked.request)
        with self.progress.trace.plan() as asked.span:
            lighter = await planner.lighter(asked, plan)
            if lighter is None:
                return None
            self._note_plan(asked.span, lighter)
            return msgspec.structs.replace(lighter, restarted=bool(request.held.chain))

    async def _smaller(
        self,
        asked: PlanRequest,
        plan: Plan,
        recalling: Recalling | None,
        *,
        attempt: int,
        window: int | None,
    ) -> Plan | None:
        with self.progress.trace.plan() as asked.span:
            smaller = await self.runtime.planner.harder(asked, plan, attempt=attempt, window=window)
            if smaller is None:
                return None
            self._note_plan(asked.span, smaller)
            return smaller if recalling is None else recalling.consider(smaller)

    async def _without_reasoning(
        self, request: Request, plan: Plan, verdict: Verdict
    ) -> Plan | None:
        """The plan without any reasoning, after the upstream refused it for how it stands.

        A model that refuses it behind what it was not signed for is known from now on to do so.
        Else the client has changed it, or the rounds are lost that stood in it. None where that was
        tried, or is not for Weir to do.
        """
        asked = request.asked
        recognized = plan.recognized
        if asked is None or recognized is None or asked.unbinds or asked.settings.observes:
            return None
        asked.unbinds = True
        if verdict.kind is Kind.CHANGED and asked.drops_unbound:
            return None  # a loop has to begin with its thinking
        if verdict.kind is Kind.BINDING:
            self.runtime.windows.know(recognized.limits.scope, BINDING)
        transcript = replace(recognized.transcript, binds=not asked.drops_unbound)
        recognized = msgspec.structs.replace(recognized, transcript=transcript)
        return await self.runtime.planner.first(asked, recognized)

    def _gives_ids(self, request: Request) -> bool:
        """Whether the answer may have ids that later requests of the caller name."""
        fields = request.client.fields
        if not self.remembers:
            return False
        if self.codec.name == "responses":
            return True
        if self.codec is MESSAGES:
            return not fields.keys().isdisjoint(WITH_IDS) or b'"code_' in bytes(
                fields.get("tools", b"")
            )
        return "audio" in fields or bytes(fields.get("store", b"")) == b"true"

    def _remembering(self, request: Request) -> Callable[[bytes], None] | None:
        """What remembers the ids in the first events of an answer, and in all of it; None where
        there are none.
        """
        tenant = request.destination.caller.tenant

        def remember(held: bytes) -> None:
            if (self.progress.status or 0) < 300:
                self.runtime.provider_ids.remember(tenant, ids_in(held))

        return remember if self._gives_ids(request) else None

    async def _announce(self, request: Request) -> None:
        progress = self.progress
        runtime = self.runtime
        if progress.listener is not None and (remember := self._remembering(request)) is not None:
            remember(bytes(progress.listener.held))
        if request.held.keeps and progress.listener is not None and (progress.status or 0) < 400:
            tenant = request.destination.caller.tenant
            body = bytes(progress.listener.held)
            at = runtime.planner.clock()
            held = request.held
            client = request.client
            plan = progress.plan
            await record_answer(runtime.answers, held, client, plan, tenant, body, at=at)

    async def _recall(
        self, received: UpstreamResponse, rounds: Rounds, recalling: Recalling
    ) -> None:
        self.answer = received.answer
        progress = self.progress

        async def ask(body: bytes) -> tuple[UpstreamResponse, Verdict]:
            self.asking = asyncio.current_task()
            try:
                found = await recalling.attempts.make(body, progress.plan)
            finally:
                self.asking = None
            self.answer = found[0].answer
            return found

        try:
            if received.chunks is None:
                received = await follow_whole(received, rounds, ask, recalling.note_round)
            if received.chunks is not None:
                relaying = Relaying(
                    rounds=rounds,
                    ask=ask,
                    send=self.send,
                    headers=self._stream_headers,
                    explain=self._explain,
                    ended=recalling.note_round,
                )
                progress.seen = relaying.tap.seen
                left = await relaying.run(received)
                if left is None:
                    return
                received = left
        finally:
            rounds.finish()
            progress.recalls = rounds.recalled
            if received.chunks is not None:
                received.answer.close()
                self._learn()
        await self._relay(received)

    def _stream_headers(self, received: UpstreamResponse) -> list[tuple[bytes, bytes]]:
        self.progress.status = received.answer.status
        return self._headers(received.answer)

    async def _relay(self, received: UpstreamResponse) -> None:
        self.answer = received.answer
        progress = self.progress
        answer = received.answer
        if answer.status >= 400 and is_page(answer, received.body or b""):
            answer.close()
            raise UpstreamPage.of(answer.status, wait_in(answer.headers))
        progress.status = answer.status
        headers = self._headers(answer)
        if received.rewritten:
            headers = [h for h in headers if h[0] != b"content-length"]
            headers.append((b"content-length", str(len(received.body or b"")).encode()))
        try:
            if received.body is not None:
                await relay_whole(
                    self.send, answer, status=answer.status, headers=headers, body=received.body
                )
                progress.seen = received.seen or Tap()
            elif received.chunks is not None:
                tap = StreamTap(codec=self.codec, unpacker=unpacker_for(answer.headers))
                progress.seen = tap.seen  # also of a stream that breaks off
                async with aclosing(received.chunks) as chunks:
                    await relay_stream(
                        self.send,
                        status=answer.status,
                        headers=headers,
                        opening=received.opening,
                        chunks=chunks,
                        pour=self._pouring(answer),
                        explain=self._explain if is_readable(answer) else None,
                        tap=tap,
                        begun=None if progress.attempts is None else progress.attempts.begin_stream,
                    )
        finally:
            answer.close()
            self._learn()

    def _pouring(
        self, answer: Answer
    ) -> Callable[[Callable[[bytes], bytes]], Awaitable[bool]] | None:
        """How an answer goes past ``send``, where nothing but the client has to have its pieces."""
        progress = self.progress
        write = self.scope.get("extensions", {}).get(WRITE)
        span = None if progress.attempts is None else progress.attempts.span
        is_kept = progress.listener is not None or span is None or span.captures
        is_chunked = b"content-length" not in dict(answer.headers)
        if write is None or is_kept or not is_chunked or not isinstance(answer, HTTPAnswer):
            return None
        return partial(answer.pour, write)

    def _learn(self) -> None:
        progress = self.progress
        accepted = progress.status is not None and progress.status < 400
        if accepted and progress.asked is not None:
            scales = self.runtime.planner.scales
            learn_loads_passed(self.runtime.windows, scales, progress.plan, progress.asked.request)
        rounds = () if progress.attempts is None else progress.attempts.rounds
        usage = rounds[0] if rounds else progress.seen.usage
        if usage is None or progress.asked is None:
            return
        runtime = self.runtime
        plan = progress.plan
        transcripts = runtime.planner.transcripts
        cut = learn_from_answer(
            runtime.windows, transcripts, plan, progress.asked, usage=usage, accepted=accepted
        )
        if cut and progress.attempts is not None:
            progress.attempts.overflows += 1

    def _explain(self, error: Exception) -> ProxyError:
        if self.stopping:
            return ShuttingDown("The proxy is stopping; please send the request again.")
        return error if isinstance(error, ProxyError) else UpstreamUnreachable(str(error))

    def _headers(self, answer: Answer) -> list[tuple[bytes, bytes]]:
        granted = without_grants(
            answer.headers, self.scope, self.progress.caller, self.runtime.config
        )
        kept = [(n, v) for n, v in granted if n not in NOT_RELAYED and not n.startswith(b"x-weir-")]
        kept = unbuffered(kept) if is_stream(answer) else kept
        own = self.progress.own_headers()
        return kept + (
            [(n, v) for n, v in own if n != b"x-request-id"]
            if b"x-request-id" in dict(kept)
            else own
        )

    async def _refuse(self, error: ProxyError) -> None:
        self.progress.refused(error)
        await self._tell(self.codec.error_body(error), error.headers(), status=error.status)

    def _note_plan(self, span: Span, plan: Plan) -> None:
        decision = plan.decision
        recognized = plan.recognized
        if not span.recorded or decision is None or recognized is None:
            return
        tokens = recognized.limits.budget.estimate
        for report in decision.trail:
            span.layer(
                report.layer,
                before=tokens(report.before),
                after=tokens(report.after),
                units=report.units if report.kept else 0,
                ref=report.ref,
                reason=report.reason,
                rung=report.rung,
                **_due(report, recognized.policy_limits),
            )
        span.decide(
            decision.action.value,
            decision.usage,
            base=recognized.policy_limits.base,
            reading=decision.reading,
            stage=decision.stage,
            strategy=decision.strategy,
            evicted=evicted_count(plan),
        )

    def _tell_results(self, plan: Plan, turn: Turn) -> None:
        recognized = plan.recognized
        hooks = self.runtime.hooks
        if recognized is None:
            return
        self.progress.turn = turn = msgspec.structs.replace(
            turn, conversation=recognized.thread.branch.name
        )
        for result in new_results(recognized.transcript, recognized.length):
            hooks.tell("tool_result", turn, result)
        tokens = recognized.transcript.tokens if plan.decision is None else plan.decision.raw_after
        budget = recognized.limits.budget
        if not budget.fits(tokens):
            self._tell_overflow(
                Overflow(source="planned", tokens=budget.estimate(tokens), limit=budget.usable)
            )

    def _tell_overflow(self, overflow: Overflow) -> None:
        if self.progress.turn is not None:
            self.runtime.hooks.tell("overflow", self.progress.turn, overflow)


def is_page(answer: Answer, body: bytes) -> bool:
    """Whether an answer is a web page: some servers call JSON one."""
    kind = next((value for name, value in answer.headers if name == b"content-type"), b"")
    begins = body[:512].lstrip().lower()
    if kind.strip().lower().startswith((b"text/html", b"application/xhtml+xml")):
        return not begins.startswith((b"{", b"["))
    return begins.startswith((b"<!doctype html", b"<html"))


def wait_in(headers: Headers) -> int | None:
    """The whole seconds of a header ``retry-after``, None without one."""
    said = next((value.strip() for name, value in headers if name == b"retry-after"), b"")
    return int(said) if said.isdigit() and len(said) < 10 else None


def refused_twice(
    first: ContextLengthExceeded, second: ContextLengthExceeded, model: str
) -> ContextLengthExceeded:
    """The refusal of a request that does not fit into its fallback either."""
    window = (second.weir or {}).get("window")
    return ContextLengthExceeded(
        f"{first.message} It does not fit into the fallback {model[:200]} either, whose maximum"
        f" context length is {window} tokens.",
        param=first.param,
        weir=second.weir,
    )


class _Due(TypedDict):
    trigger: int | None
    scorer: str | None


def _due(report: LayerReport, limits: Limits) -> _Due:
    """From how many tokens on the policy's layer of a report is due, and by what rule it
    chooses.
    """
    own = (
        each
        for each in layers_of(limits.settings)
        if (each.strategy, each.scope) == (report.layer, report.scope)
    )
    layer = None if report.rung else next(own, None)
    if layer is None:
        return {"trigger": None, "scorer": None}
    scorer = layer.params.get("scorer")
    most = max(0, limit_for(layer, limits.settings, limits.budget))
    return {
        "trigger": limits.budget.estimate(most),
        "scorer": scorer if isinstance(scorer, str) else None,
    }


def answering(
    runtime: Runtime, scope: MutableMapping[str, Any], receive: Receive, send: Send, route: Route
) -> Coroutine[Any, Any, None]:
    """The answer to a request of a managed route: not itself a coroutine, which every chunk would
    have to pass.
    """
    handler = CountHandler if route.kind == "counted" else ExchangeHandler
    return handler(runtime, scope, receive, send, route).run()


class CountHandler(ExchangeHandler):
    """One request that is only measured, or summed up by the provider, as it would be sent.

    A client that sizes its window by the raw number compacts although the request that is sent is
    small. So what goes up has the known edits of its conversation, and nothing is decided, stored
    or asked for it.
    """

    async def _answer(self, body: bytes, caller: Caller) -> None:
        progress = self.progress
        request = await self.read(body, caller)
        if (
            request.compacts
            and is_weirs(self.runtime, request, self.route.path)
            and await self._compact(request)
        ):
            return
        sent = request.chat.body
        tokens = None
        if self.route.path == COMPACT_PATH and caller.is_counted:
            await reserve(self.runtime, progress, request, None)
        if request.asked is not None:
            try:
                sent, tokens = await self.runtime.planner.replayed(request.asked)
            except Exception:
                log.exception(
                    "a request is counted as it came, its conversation's edits cannot be read"
                )
        if sent is request.chat.body and not request.held.chain:
            sent = request.client.body
        progress.plan = plan = Plan(body=sent)
        progress.ready = time.perf_counter()
        attempts, _ = self.attempts_of(request)
        received, _ = await attempts.make(sent, plan)
        self.answer = received.answer
        if self.route.path == COMPACT_PATH:
            if (
                request.compacts
                and lacks_compaction(received, COMPACT_PATH)
                and await self._compact(request, received)
            ):
                return
        elif received.answer.status in NO_SUCH_ROUTE and tokens is not None:
            # Weir says what it counts
            received.answer.close()
            kind = {} if self.codec is MESSAGES else {"object": "response.input_tokens"}
            told = write_value({**kind, "input_tokens": tokens})
            await self._tell(told, [(b"x-weir-tokens", b"~%d" % tokens)])
            return
        await self._relay(received)
