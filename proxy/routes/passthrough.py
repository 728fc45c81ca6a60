"""Every other ``/v1/*``, any method: relayed untouched, streaming both ways."""

import secrets
from collections.abc import AsyncIterator, MutableMapping
from contextlib import aclosing
from typing import Any

from proxy.caller import Caller
from proxy.errors import LoopDetected, ProxyError, RequestTooLarge
from proxy.intake import ClientGone, Receive, read_body, while_connected
from proxy.relay import Cut, Send, relay_stream
from proxy.routes.respond import respond_error
from proxy.runtime import Runtime
from proxy.telemetry import ABOUT
from proxy.upstream.client import came_through
from proxy.wire.raw import read_value, split_object

PREFIX = b"/v1"
MOST_HELD = 1024 * 1024
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
        try:
            await self._relay(scope, receive, send, request_id)
            metrics.request(outcome="relayed", policy="none")
        except ClientGone:
            metrics.request(outcome="client_disconnect", policy="none")
        except Cut:
            metrics.request(outcome="stream_broken", policy="none")
        except ProxyError as error:
            metrics.request(outcome=error.code, policy="none")
            await respond_error(send, error, request_id=request_id)

    async def _relay(self, scope: MutableMapping[str, Any], receive: Receive, send: Send, request_id: str) -> None:
        runtime, headers = self._runtime, scope["headers"]
        if came_through(headers, runtime.instance):
            raise LoopDetected("This request has come through this proxy before: an upstream points back at it.")
        sent = {n.decode("latin-1"): v.decode("latin-1") for n, v in headers}
        caller = runtime.keyring.identify(sent)
        length = int(sent["content-length"]) if sent.get("content-length", "").isdigit() else None
        if length is not None and length > runtime.config.limits.body:
            raise RequestTooLarge(f"The request body is larger than {runtime.config.limits.body} bytes.")
        has_body = bool(length) or "transfer-encoding" in sent
        if not has_body or (length is not None and length <= MOST_HELD):
            body = await read_body(receive, limit=runtime.config.limits.body)
            model = _model_in(body) if has_body and self._has_to_look(caller) else ""
            if model:
                caller.require(model)
            work = self._forward(scope, send, caller, model, body if has_body else None, request_id=request_id)
            await while_connected(scope, receive, work)
            return
        parts = _parts(receive, runtime.config.limits.body)
        await self._forward(scope, send, caller, "", parts, length=length, request_id=request_id)

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
        length: int | None = None,
    ) -> None:
        answer = await self._runtime.upstreams.send(
            self._runtime.config.upstream(model),
            caller=caller,
            method=scope["method"],
            path=(scope.get("raw_path") or scope["path"].encode()).removeprefix(PREFIX).decode("latin-1"),
            query=scope.get("query_string", b""),
            headers=scope["headers"],
            body=body,
            length=length,
        )
        headers = [(n, v) for n, v in answer.headers if n.lower() not in NOT_RELAYED]
        if not any(name.lower() == b"x-request-id" for name, _ in headers):
            headers.append((b"x-request-id", request_id.encode()))
        try:
            async with aclosing(answer.chunks()) as chunks:
                await relay_stream(send, status=answer.status, headers=headers, opening=None, chunks=chunks)
        finally:
            answer.close()


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
            raise RequestTooLarge(f"The request body is larger than the {limit} bytes that are allowed here.")
        if part:
            yield part
        if not message.get("more_body", False):
            return
