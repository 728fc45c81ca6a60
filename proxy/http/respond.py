"""Answers that Weir gives itself, as ASGI messages."""

import json
import time
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any

from proxy.errors import ProxyError
from proxy.stream.relay import Send
from proxy.telemetry import LOG_CONTEXT, Metrics

JSON = b"application/json"
NO_CONTENT = 204
Headers = Sequence[tuple[bytes, bytes]]


async def respond(send: Send, body: bytes, *, status: int = 200, kind: bytes = JSON, headers: Headers = ()) -> None:
    """Send one whole answer."""
    framing = [(b"content-type", kind), (b"content-length", str(len(body)).encode())] if status != NO_CONTENT else []
    about = LOG_CONTEXT.get()
    if about is not None and not any(name == b"x-request-id" for name, _ in headers):
        framing.append((b"x-request-id", about.request.encode()))
    await send({"type": "http.response.start", "status": status, "headers": [*framing, *headers]})
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def counted(
    metrics: Metrics, route: str, scope: MutableMapping[str, Any], send: Send, answer: Callable[[Send], Awaitable[None]]
) -> None:
    """Have a request answered and counted under its route; ``answer`` is given the way to send."""
    status, begun = list[int](), time.perf_counter()

    async def sending(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            status.append(message["status"])
        await send(message)

    try:
        await answer(sending)
    finally:
        metrics.served(
            method=scope["method"],
            route=route,
            status=status[0] if status else None,
            error=str(status[0]) if status and status[0] >= 500 else "",
            seconds=time.perf_counter() - begun,
        )


async def respond_json(send: Send, value: object, *, status: int = 200) -> None:
    """Send a value as JSON."""
    await respond(send, json.dumps(value, ensure_ascii=False).encode(), status=status)


async def respond_error(send: Send, error: ProxyError, *, request_id: str | None = None, headers: Headers = ()) -> None:
    """Send an error in OpenAI's shape."""
    own = [(b"x-request-id", request_id.encode())] if request_id else []
    await respond(send, error.body(), status=error.status, headers=[*headers, *error.headers(), *own])
