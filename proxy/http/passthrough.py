"""Every other ``/v1/*``, any method: relayed untouched, streaming both ways."""

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, MutableMapping, Sequence
from contextlib import ExitStack, aclosing
from dataclasses import dataclass
from typing import Any

from proxy.browsers import without_grants
from proxy.caller import Caller
from proxy.destination import Destination, Route, admit, for_models, for_relay, is_decided_by_model, unread
from proxy.errors import LoopDetected, ProxyError, RequestTooLarge
from proxy.http.respond import respond_error
from proxy.intake import ClientGone, Receive, declared_length, read_held, while_connected
from proxy.outcome import CLIENT_CLOSED, address_of, provider_of
from proxy.relay import Cut, Send, relay_stream
from proxy.relayed import NO_POLICY, settle_relayed
from proxy.reported import Reported
from proxy.runtime import Runtime
from proxy.tap import Tap, Usage, read_completion
from proxy.telemetry import ABOUT, CONTEXT_HEADERS, Attempt, Trace
from proxy.telemetry.names import OPERATIONS
from proxy.telemetry.spans import NULL_SPAN
from proxy.upstream.client import came_through
from proxy.upstream.upstreams import Answer
from proxy.wire.names import name_from
from proxy.wire.raw import read_value, split_object

log = logging.getLogger("weir")

MOST_HELD = 1024 * 1024
MOST_READ = 64 * 1024
NOTHING = frozenset[bytes]()
ROUTES = frozenset({*OPERATIONS, "/v1/models", "/v1/files", "/v1/batches", "/v1/moderations"})
OTHER_ROUTE = "/v1/{rest}"
NOT_RELAYED = frozenset({b"transfer-encoding", b"connection"})
RELAYED = (b"x-weir-actions", b"relayed")


@dataclass(slots=True)
class Relay:
    """One relayed request as it unfolds."""

    id: str
    trace: Trace
    started: float
    caller: Caller | None = None
    destination: Destination | None = None
    status: int | None = None
    error: str | None = None
    reported: Reported | None = None

    @property
    def label(self) -> str:
        """The outcome's label for metrics and rows."""
        return self.error or "relayed"


class Passthrough:
    """The ASGI application of all relayed routes."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send, route: Route) -> None:
        """Relay one request and its answer."""
        about = ABOUT.get()
        request_id = about.request if about is not None else f"req_{secrets.token_hex(12)}"
        relay = Relay(request_id, self._trace(scope, request_id), time.perf_counter())
        refused = None
        try:
            with ExitStack() as inside:
                await self._relay(scope, receive, send, relay, route, inside)
        except ClientGone:
            relay.error = "client_disconnect"
        except Cut:
            relay.error = "stream_broken"
            log.warning("a relayed answer broke off before its end")
        except ProxyError as error:
            relay.error, relay.status, refused = error.code, error.status, error.status
            await respond_error(send, error, request_id=request_id)
        finally:
            relay.trace.end(refused, relay.error)
            self._settle(relay, route)

    def _settle(self, relay: Relay, route: Route) -> None:
        """Count the request: in all, and of its key with what the answer says that it used."""
        metrics = self._runtime.telemetry.metrics
        metrics.request(outcome=relay.label, policy=NO_POLICY)
        if relay.caller is None:
            return
        usage = relay.reported.usage if relay.reported is not None else None
        destination, model = relay.destination, relay.destination.model if relay.destination is not None else ""
        settle_relayed(
            self._runtime,
            relay.caller,
            request=relay.id,
            model=model,
            status=relay.status or CLIENT_CLOSED,
            outcome=relay.label,
            usage=usage,
        )
        operation = OPERATIONS.get(f"/v1{route.path}")
        if destination is not None and operation is not None:
            address, port = address_of(destination.upstream)
            failed = relay.error or (str(relay.status) if (relay.status or 0) >= 400 else "")
            metrics.answered(
                provider=provider_of(destination.upstream),
                model=model,
                seconds=time.perf_counter() - relay.started,
                operation=operation,
                address=address,
                port=port,
                error_type=failed,
                input_tokens=usage.prompt if usage is not None else None,
                output_tokens=usage.completion if usage is not None else None,
            )

    def _trace(self, scope: MutableMapping[str, Any], request_id: str) -> Trace:
        client, path = scope.get("client"), scope["path"]
        return self._runtime.telemetry.exchange(
            scope["method"],
            path if path in ROUTES else OTHER_ROUTE,
            scope["headers"],
            path=path,
            server=scope.get("server"),
            client=client[0] if client else None,
            scheme=scope.get("scheme", "http"),
            request_id=request_id,
        )

    async def _relay(
        self,
        scope: MutableMapping[str, Any],
        receive: Receive,
        send: Send,
        relay: Relay,
        route: Route,
        inside: ExitStack,
    ) -> None:
        runtime, headers = self._runtime, scope["headers"]
        if came_through(headers, runtime.instance):
            raise LoopDetected("This request has come through this proxy before: an upstream points back at it.")
        sent = {n.decode("latin-1"): v.decode("latin-1") for n, v in headers}
        config = runtime.config
        relay.caller = caller = runtime.admit(scope)
        admit(caller, route)
        stay = inside.enter_context(runtime.admission.enter(caller))
        length = declared_length(headers)
        has_body, query = bool(length) or "transfer-encoding" in sent, scope.get("query_string", b"")
        decides = is_decided_by_model(config, caller, route)
        if has_body and not decides and (length is None or length > MOST_HELD):
            if length is not None and length > config.limits.body:
                raise RequestTooLarge.of_body(config.limits.body)
            relay.destination = unread(config, caller, route)
            parts = _parts(receive, config.limits.body)
            await self._forward(scope, send, relay, parts, length=length)
            return
        read = await read_held(receive, headers, limit=config.limits.body, hold=stay.hold)
        body = read if has_body else None
        if route.kind == "models":
            relay.destination = for_models(config, caller, route)
        elif decides:
            relay.destination, body = for_relay(config, caller, route, headers, body, query=query)
        else:
            looks = has_body and (route.kind == "model" or relay.trace.recorded)
            relay.destination = unread(config, caller, route, model=_model_in(read) if looks else "")
        await while_connected(scope, receive, self._forward(scope, send, relay, body))

    async def _forward(
        self,
        scope: MutableMapping[str, Any],
        send: Send,
        relay: Relay,
        body: "bytes | AsyncIterator[bytes] | None",
        *,
        length: int | None = None,
    ) -> None:
        destination, trace = relay.destination, relay.trace
        assert destination is not None  # noqa: S101 - it was decided
        upstream = destination.upstream
        span = _span(trace, scope, destination)
        context = span.propagation() if upstream.forward_trace else ()
        try:
            answer = await self._runtime.upstreams.send(
                destination,
                method=scope["method"],
                query=scope.get("query_string", b""),
                headers=_with_context(scope["headers"], context) if context else scope["headers"],
                body=body,
                length=length,
                drop=NOTHING if upstream.forward_trace else CONTEXT_HEADERS,
            )
        except ProxyError as error:
            span.failed(error.code)
            raise
        relay.status, relay.reported = answer.status, Reported(answer.headers)
        span.arrived(answer.status)
        granted = without_grants(answer.headers, scope, relay.caller, self._runtime.config)
        named = ((n.lower(), n, v) for n, v in granted)
        headers = [(n, v) for low, n, v in named if low not in NOT_RELAYED and not low.startswith(b"x-weir-")]
        headers.append(RELAYED)
        if not any(name.lower() == b"x-request-id" for name, _ in headers):
            headers.append((b"x-request-id", relay.id.encode()))
        held, failed = bytearray(), None
        keeps = trace.recorded and _is_readable(answer)
        watched = _watched(answer.chunks(), held if keeps else None, relay.reported)
        try:
            async with aclosing(watched) as chunks:
                await relay_stream(send, status=answer.status, headers=headers, opening=None, chunks=chunks)
        except (Cut, asyncio.CancelledError) as error:
            failed = "stream_broken" if isinstance(error, Cut) else "client_disconnect"
            raise
        finally:
            answer.close()
            if trace.recorded:
                _end(trace, span, answer.status, bytes(held), failed)


def _span(trace: Trace, scope: MutableMapping[str, Any], destination: Destination) -> Attempt:
    """The span of the request to the upstream: a model's operation where the route is known as one."""
    if not trace.recorded:
        return NULL_SPAN
    named, upstream, model = name_from(scope["headers"], {}), destination.upstream, destination.model
    trace.identify(conversation=named, tenant=destination.caller.tenant, policy=NO_POLICY, model=model)
    operation = OPERATIONS.get(f"/v1{destination.path}") if scope["method"] == "POST" else None
    if operation is None:
        return trace.relayed(scope["method"], *address_of(upstream))
    return trace.attempt(model, provider_of(upstream), *address_of(upstream), operation=operation)


def _with_context(
    headers: Sequence[tuple[bytes, bytes]], context: Sequence[tuple[bytes, bytes]]
) -> list[tuple[bytes, bytes]]:
    return [*(header for header in headers if header[0] not in CONTEXT_HEADERS), *context]


def _is_readable(answer: Answer) -> bool:
    """Whether an answer is JSON that nobody has compressed."""
    named = {name.lower(): value for name, value in answer.headers}
    return named.get(b"content-type", b"").startswith(b"application/json") and b"content-encoding" not in named


async def _watched(
    chunks: AsyncGenerator[bytes, None], held: bytearray | None, reported: Reported
) -> AsyncGenerator[bytes, None]:
    """The same chunks, of which ``reported`` takes note; ``held`` gets them all as long as they are few."""
    async with aclosing(chunks) as going:
        async for chunk in going:
            reported.feed(chunk)
            if held is not None and len(held) <= MOST_READ:
                held += chunk
            yield chunk


def _end(trace: Trace, span: Attempt, status: int, body: bytes, failed: str | None) -> None:
    """End the spans of an answer, with what it says of itself if it was short enough to be read."""
    seen = read_completion(body) if 0 < len(body) <= MOST_READ else Tap()
    usage = seen.usage or Usage()
    span.answered(
        status,
        response_model=seen.model,
        response_id=seen.id,
        finish_reasons=seen.finish_reasons,
        input_tokens=usage.prompt,
        output_tokens=usage.completion,
        cache_read=usage.cached,
        reasoning=usage.reasoning,
        error_type=failed,
    )
    trace.end(status, failed)


def _model_in(body: bytes) -> str:
    try:
        fields = split_object(body)
    except ProxyError:
        return ""
    model = read_value(fields["model"]) if "model" in fields else None
    return model if isinstance(model, str) else ""


async def _parts(receive: Receive, limit: int) -> AsyncIterator[bytes]:
    """The request's body as it arrives."""
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        part = message.get("body", b"")
        size += len(part)
        if size > limit:
            raise RequestTooLarge.of_body(limit)
        if part:
            yield part
        if not message.get("more_body", False):
            return
