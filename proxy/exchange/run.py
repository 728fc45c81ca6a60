"""One request from bytes to bytes: the straight line.

admit → read → plan (recognize, replay known edits, then pass or edit) → send → relay → record

The line is ``ExchangeHandler._answer``. Each step is a file next to this one: ``read``, ``plan``,
``send`` with its ``attempts`` and what they ``learn``, ``relay``; ``record`` is what happened, and
``sinks`` writes it to the trace, the ``metrics``, the log and, as a ``row``, to the store.
"""

import asyncio
import logging
import time
from collections.abc import Coroutine, MutableMapping
from functools import partial
from typing import Any

from proxy.access.admission import admitted
from proxy.access.destination import CHAT, Caller, Headers, Route
from proxy.errors import ContextLengthExceeded, LoopDetected, ProxyError, ShuttingDown
from proxy.exchange.compact import answer_compaction
from proxy.exchange.exchange import BROKE_OFF, Exchange, Request, new_request_id
from proxy.exchange.plan import plan_request
from proxy.exchange.read import fall_back, read_request, refused_twice
from proxy.exchange.recall import Recalling
from proxy.exchange.relay import STOPPING, Relay
from proxy.exchange.reserve import reserve
from proxy.exchange.send import NO_SUCH_ROUTE, attempts_for, recall_for, require_endpoint, send_plan
from proxy.exchange.sinks import record_exchange
from proxy.features.compaction import COMPACT_PATH
from proxy.planning.values import Plan
from proxy.runtime import Runtime
from proxy.stream import (
    READ_OUT,
    ClientGone,
    Receive,
    Send,
    StreamCut,
    UpstreamResponse,
    read_plain,
    while_connected,
)
from proxy.telemetry.logs import LOG_CONTEXT, RequestContext
from proxy.telemetry.trace import NULL_TRACE, ExchangeTrace
from proxy.upstream.client import came_through
from proxy.wire import CODECS

log = logging.getLogger("weir.exchange")


class ExchangeHandler:
    """One managed request; ``run`` is the whole of it."""

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
        self.route = route
        self.codec = CODECS[route.path.split("/")[1]]
        self.task: asyncio.Task[Any] | None = None
        name = new_request_id()
        started = time.perf_counter()
        trace: ExchangeTrace = NULL_TRACE
        if runtime.telemetry.exports_traces:
            trace = runtime.telemetry.exchange(scope, f"/v1{route.path}", request_id=name)
        query = scope.get("query_string", b"")
        self.exchange = Exchange(name, started, trace, query, scope["headers"], route)
        self.relay = Relay(runtime, self.exchange, scope, send, self.codec)

    async def _answer(self, body: bytes, caller: Caller) -> None:
        """The line from a body to the answer; ``run`` admits the request and records it."""
        runtime = self.runtime
        exchange = self.exchange
        request = await read_request(runtime, exchange, body, caller)
        if request.compacts and await answer_compaction(self.relay, request):
            return
        try:
            received, sent, recalling = await self._obtain(request)
        except ContextLengthExceeded as refusal:
            request = fall_back(runtime, exchange, request, refusal)
            try:
                received, sent, recalling = await self._obtain(request)
            except ContextLengthExceeded as second:
                raise refused_twice(refusal, second, request.chat.model) from None
        self.relay.listen(request)
        if request.compacts and await answer_compaction(self.relay, request, received):
            return
        require_endpoint(runtime, request, received)
        rounds = None if recalling is None else recalling.rounds(sent, exchange.plan)
        is_stream = received.chunks is not None
        runtime.telemetry.metrics.active_streams.inc(is_stream)
        try:
            if rounds is None or recalling is None:
                await self.relay.relay(received)
            else:
                await self.relay.relay_rounds(received, rounds, recalling)
        finally:
            runtime.telemetry.metrics.active_streams.dec(is_stream)

    async def _obtain(self, request: Request) -> tuple[UpstreamResponse, bytes, Recalling | None]:
        """The upstream's answer, the body that it answers, and the recall tool that it carries."""
        runtime = self.runtime
        exchange = self.exchange
        plan = await plan_request(runtime, exchange, request)
        exchange.ready = time.perf_counter()
        attempts = attempts_for(runtime, exchange, request)
        recalling = recall_for(runtime, request, attempts)
        received, sent = await send_plan(runtime, exchange, request, plan, attempts, recalling)
        return received, sent, recalling

    async def run(self) -> None:
        """Answer the request, and record it whatever the outcome."""
        runtime = self.runtime
        exchange = self.exchange
        shutdown = self.scope.get("state", {}).get("shutdown")
        LOG_CONTEXT.set(RequestContext(exchange.id, exchange.trace.trace_id))
        runtime.telemetry.metrics.active_requests.inc()
        if shutdown is not None:
            shutdown.callbacks.add(self._stop)
        try:
            exchange.caller = caller = self.admit(exchange.headers)
            with runtime.admission.enter(caller) as slot:
                exchange.slot = slot
                if runtime.admission.shared is not None:
                    await runtime.admission.share_limits(slot, caller)
                limit = runtime.config.limits.body
                body, exchange.headers = await read_plain(
                    self.receive, exchange.headers, limit=limit, hold=slot.hold
                )
                if slot.waited:
                    exchange.since = time.monotonic() - slot.waited
                if exchange.trace.recorded:
                    exchange.trace.root.since(exchange.trace.root.started, "receive")
                self.task = asyncio.current_task()
                await while_connected(self.scope, self._answer(body, caller))
        except ClientGone:
            exchange.gone()
        except asyncio.CancelledError:
            if not self.relay.stopping or self.task is None:
                raise
            self.task.uncancel()
            await self._refuse(ShuttingDown(STOPPING))
        except StreamCut:
            exchange.error = BROKE_OFF
        except ProxyError as error:
            await self._refuse(error)
        finally:
            if shutdown is not None:
                shutdown.callbacks.discard(self._stop)
            runtime.telemetry.metrics.active_requests.dec()
            ended = time.perf_counter()
            if exchange.trace.recorded:  # its spans end now
                record_exchange(runtime, exchange, ended=ended)
            else:
                # after the other answers that can be sent now, before whatever comes next is begun
                asyncio.get_running_loop().call_soon(
                    partial(record_exchange, runtime, exchange, ended=ended)
                )
        if exchange.error == BROKE_OFF:
            await asyncio.sleep(READ_OUT)

    def admit(self, headers: Headers) -> Caller:
        """Who sends the request. Raises InvalidAPIKey, LoopDetected and others."""
        runtime = self.runtime
        if came_through(headers, runtime.instance):
            raise LoopDetected(
                "This request has come through this proxy before: an upstream points back at it."
            )
        return admitted(self.scope, runtime.keyring, runtime.auth_throttle, runtime.config)

    def _stop(self) -> None:
        if not self.relay.stop() and self.task is not None:
            self.task.cancel()

    async def _refuse(self, error: ProxyError) -> None:
        self.exchange.refused(error)
        await self.relay.respond(self.codec.error_body(error), error.headers(), status=error.status)


class CountHandler(ExchangeHandler):
    """One request that is only measured, or summed up by the provider, as it would be sent.

    A client that sizes its window by the raw number compacts although the request that is sent is
    small. So what is sent has the known edits of its conversation, and nothing is decided, stored
    or requested for it.
    """

    async def _answer(self, body: bytes, caller: Caller) -> None:
        runtime = self.runtime
        exchange = self.exchange
        request = await read_request(runtime, exchange, body, caller)
        if request.compacts and await answer_compaction(self.relay, request):
            return
        if self.route.path == COMPACT_PATH:  # the provider takes money for it, for a count none
            await reserve(runtime, exchange, request, None)
        sent = request.chat.body
        tokens = None
        if request.plan_request is not None:
            try:
                sent, tokens = await runtime.planner.replayed(request.plan_request)
            except Exception:
                log.exception(
                    "a request is counted as it came, its conversation's edits cannot be read"
                )
        if sent is request.chat.body and not request.held.chain:
            sent = request.client.body
        exchange.plan = plan = Plan(body=sent)
        exchange.ready = time.perf_counter()
        received, _ = await attempts_for(runtime, exchange, request).make(sent, plan)
        self.relay.answer = received.answer
        if self.route.path == COMPACT_PATH:
            if request.compacts and await answer_compaction(self.relay, request, received):
                return
        elif received.answer.status in NO_SUCH_ROUTE and tokens is not None:
            # Weir answers with its own count
            received.answer.close()
            counted = self.codec.counted_answer(tokens)
            await self.relay.respond(counted, [(b"x-weir-tokens", b"~%d" % tokens)])
            return
        await self.relay.relay(received)


def answering(
    runtime: Runtime, scope: MutableMapping[str, Any], receive: Receive, send: Send, route: Route
) -> Coroutine[Any, Any, None]:
    """The answer to a request of a managed route: not itself a coroutine, which every chunk would
    have to pass.
    """
    handler = CountHandler if route.kind == "counted" else ExchangeHandler
    return handler(runtime, scope, receive, send, route).run()
