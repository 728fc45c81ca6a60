"""Every other ``/v1/*``, any method: relayed untouched, streaming both ways."""

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, MutableMapping, Sequence
from contextlib import ExitStack, aclosing
from typing import Any

from proxy.browsers import without_grants
from proxy.caller import Caller
from proxy.config import UpstreamSettings
from proxy.errors import LoopDetected, ProxyError, RequestTooLarge
from proxy.intake import ClientGone, Receive, read_body, while_connected
from proxy.outcome import address_of, provider_of
from proxy.relay import Cut, Send, relay_stream
from proxy.routes.respond import respond_error
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

PREFIX = b"/v1"
MOST_HELD = 1024 * 1024
MOST_READ = 64 * 1024
NOTHING = frozenset[bytes]()
ROUTES = frozenset({*OPERATIONS, "/v1/models", "/v1/files", "/v1/batches", "/v1/moderations"})
OTHER_ROUTE = "/v1/{rest}"
NOT_RELAYED = frozenset({b"transfer-encoding", b"connection"})


class Passthrough:
    """The ASGI application of all relayed routes."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Relay one request and its answer."""
        about = ABOUT.get()
        request_id = about.request if about is not None else f"req_{secrets.token_hex(12)}"
        metrics = self._runtime.telemetry.metrics
        trace, outcome, refused = self._trace(scope, request_id), "relayed", None
        try:
            with ExitStack() as inside:
                await self._relay(scope, receive, send, request_id, trace, inside)
        except ClientGone:
            outcome = "client_disconnect"
        except Cut:
            outcome = "stream_broken"
            log.warning("a relayed answer broke off before its end")
        except ProxyError as error:
            outcome, refused = error.code, error.status
            await respond_error(send, error, request_id=request_id)
        trace.end(refused, None if outcome == "relayed" else outcome)
        metrics.request(outcome=outcome, policy="none")

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
        request_id: str,
        trace: Trace,
        inside: ExitStack,
    ) -> None:
        runtime, headers = self._runtime, scope["headers"]
        if came_through(headers, runtime.instance):
            raise LoopDetected("This request has come through this proxy before: an upstream points back at it.")
        sent = {n.decode("latin-1"): v.decode("latin-1") for n, v in headers}
        caller = runtime.admit(scope)
        stay = inside.enter_context(runtime.admission.enter(caller))
        length = int(sent["content-length"]) if sent.get("content-length", "").isdigit() else None
        if length is not None and length > runtime.config.limits.body:
            raise RequestTooLarge.of_body(runtime.config.limits.body)
        has_body = bool(length) or "transfer-encoding" in sent
        if not has_body or (length is not None and length <= MOST_HELD):
            await stay.hold(length or 0)
            body = await read_body(receive, limit=runtime.config.limits.body)
            model = _model_in(body) if has_body and (trace.recorded or self._has_to_look(caller)) else ""
            if model:
                caller.require(model)
            given = body if has_body else None
            work = self._forward(scope, send, caller, model, given, request_id=request_id, trace=trace)
            await while_connected(scope, receive, work)
            return
        parts = _parts(receive, runtime.config.limits.body)
        await self._forward(scope, send, caller, "", parts, length=length, request_id=request_id, trace=trace)

    def _has_to_look(self, caller: Caller) -> bool:
        """Whether the model in the body decides where the request goes, or if it may."""
        return bool(caller.models) or len(self._runtime.config.upstreams) > 1

    async def _forward(
        self,
        scope: MutableMapping[str, Any],
        send: Send,
        caller: Caller,
        model: str,
        body: "bytes | AsyncIterator[bytes] | None",
        *,
        request_id: str,
        trace: Trace,
        length: int | None = None,
    ) -> None:
        upstream = self._runtime.config.upstream(model)
        span = _span(trace, scope, caller, upstream, model)
        context = span.propagation() if upstream.forward_trace else ()
        try:
            answer = await self._runtime.upstreams.send(
                upstream,
                caller=caller,
                method=scope["method"],
                path=(scope.get("raw_path") or scope["path"].encode()).removeprefix(PREFIX).decode("latin-1"),
                query=scope.get("query_string", b""),
                headers=_with_context(scope["headers"], context) if context else scope["headers"],
                body=body,
                length=length,
                drop=NOTHING if upstream.forward_trace else CONTEXT_HEADERS,
            )
        except ProxyError as error:
            span.failed(error.code)
            raise
        span.arrived(answer.status)
        granted = without_grants(answer.headers, scope, caller, self._runtime.config)
        headers = [(n, v) for n, v in granted if n.lower() not in NOT_RELAYED]
        if not any(name.lower() == b"x-request-id" for name, _ in headers):
            headers.append((b"x-request-id", request_id.encode()))
        held, failed = bytearray(), None
        watched = _watched(answer.chunks(), held) if trace.recorded and _is_readable(answer) else answer.chunks()
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


def _span(
    trace: Trace, scope: MutableMapping[str, Any], caller: Caller, upstream: UpstreamSettings, model: str
) -> Attempt:
    """The span of the request to the upstream: a model's operation where the route is known as one."""
    if not trace.recorded:
        return NULL_SPAN
    named = name_from(scope["headers"], {})
    trace.identify(conversation=named, tenant=caller.tenant, policy="none", model=model)
    operation = OPERATIONS.get(scope["path"]) if scope["method"] == "POST" else None
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


async def _watched(chunks: AsyncGenerator[bytes, None], held: bytearray) -> AsyncGenerator[bytes, None]:
    """The same chunks; ``held`` gets them all as long as they are few."""
    async with aclosing(chunks) as going:
        async for chunk in going:
            if len(held) <= MOST_READ:
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
