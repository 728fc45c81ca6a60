"""One request on a connection, the bytes of its answer, and what one client may take of the server."""

import asyncio
import http
import re
import uuid
from collections.abc import Awaitable, Callable, Sequence
from itertools import chain
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import msgspec

from proxy.errors import Busy, ProxyError

App = Callable[..., Awaitable[None]]
DISCONNECT = "weir.disconnect"
"""The extension in a request's scope that has a function called when the client leaves."""
WRITE = "weir.write"
"""The extension that writes a piece of the answer's body at once; False where the client takes no more for now."""
BODY_FOLLOWS = "weir.body_follows"
"""In a message that begins an answer: its whole body is the next, so that both go out in one call of the system."""


CLOSING = 5.0
"""Seconds for what is written and closed once the last answer is over."""


class ServerLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What one client may take: times in seconds, sizes in bytes.

    ``header_timeout`` runs from the first byte of a head (or the connection) to its end, ``body_timeout`` from there to
    the last byte of the body, ``keep_alive`` between requests, ``stall`` while a reader takes nothing, ``linger``
    after a refusal. On SIGTERM readiness fails for ``drain`` while everything is still taken, before the listeners
    close; open answers have ``grace`` to finish, and ``farewell`` to say why they are cut. ``concurrency``: requests at
    once, ``connections``: of clients at once; who comes then is told that there is no room, and as many of those
    linger. ``None`` for no limit.
    """

    header_timeout: float = 10.0
    body_timeout: float = 60.0
    keep_alive: float = 75.0
    stall: float = 60.0
    linger: float = 2.0
    header_bytes: int = 64 * 1024
    header_fields: int = 100
    body_bytes: int = 64 * 1024 * 1024
    concurrency: int | None = 1024
    connections: int | None = None
    drain: float = 0.0
    grace: float = 30.0
    farewell: float = 2.0

    @property
    def patience(self) -> float:
        return self.drain + self.grace + self.farewell + CLOSING


class Shutdown(msgspec.Struct, frozen=True):
    """How far the process is with stopping; in every request's ``scope["state"]["shutdown"]``.

    ``draining``: readiness is 503. ``cut``: what still streams must end now, with an error event; ``callbacks`` are
    called at that moment (a stream adds one while it runs, which costs less than waiting for the event).
    """

    draining: asyncio.Event = msgspec.field(default_factory=asyncio.Event)
    cut: asyncio.Event = msgspec.field(default_factory=asyncio.Event)
    callbacks: set[Callable[[], None]] = msgspec.field(default_factory=set)

    def cut_now(self) -> None:
        self.cut.set()
        for callback in tuple(self.callbacks):
            callback()


if TYPE_CHECKING:
    from proxy.server.protocol import Protocol

Message = Any

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
READ_OUT = 0.25
_GENERATED = frozenset({b"connection", b"keep-alive", b"transfer-encoding"})
_NOT_IN_NAME = re.compile(rb'[\x00-\x20\x7f()<>@,;:\\"/\[\]?={}]')
_NOT_IN_VALUE = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
_STATUS = {status.value: b"HTTP/1.1 %d %b\r\n" % (status.value, status.phrase.encode()) for status in http.HTTPStatus}


class Cycle:
    """One request and its answer; ``plain`` is HTTP/1.0, which knows no chunks and gets ``Connection: close``."""

    disconnected = response_started = response_complete = bodiless = False
    more_body = True
    buffered = expected_content_length = 0
    chunked_encoding: bool | None = None
    head = b""
    gone: Callable[[], None] | None = None

    def __init__(self, *, protocol: "Protocol", plain: bool, whole: bool, keep_alive: bool) -> None:
        self.scope: dict[str, Any] = protocol.scope  # type: ignore[assignment]  # uvicorn's has no extensions of ours
        self.transport = protocol.transport
        self.flow = protocol.flow
        self.logger = protocol.logger
        self.default_headers = protocol.server_state.default_headers
        self.message_event = asyncio.Event()
        self.on_response: Callable[[], None] = protocol.on_response_complete
        self.waiting_for_100_continue = protocol.expect_100_continue
        self.keep_alive = keep_alive
        self.pipeline = protocol.pipeline
        self.plain = plain
        self.whole = whole
        self.parts: list[bytes] = []
        self.scope["extensions"] = {DISCONNECT: self.when_gone, WRITE: self.write}

    def when_gone(self, callback: Callable[[], None] | None) -> None:
        """Has ``callback`` called once when the client leaves before its answer is complete; None calls it off."""
        self.gone = callback
        if callback is not None and self.disconnected:
            callback()

    def disconnect(self) -> None:
        if not self.response_complete:
            self.disconnected = True
            self.message_event.set()
            if self.gone is not None:
                callback, self.gone = self.gone, None
                callback()

    async def receive(self) -> Message:
        if self.waiting_for_100_continue and not self.transport.is_closing():
            self.transport.write(CONTINUE)
            self.waiting_for_100_continue = False
        if not self.disconnected and not self.response_complete:
            if self.more_body or not self.pipeline:
                self.flow.resume_reading()
            await self.message_event.wait()
            self.message_event.clear()
        if self.disconnected or self.response_complete:
            return {"type": "http.disconnect"}
        parts, self.parts, self.buffered = self.parts, [], 0
        body = parts[0] if len(parts) == 1 else b"".join(parts)
        return {"type": "http.request", "body": body, "more_body": self.more_body}

    async def send(self, message: Message) -> None:
        if self.flow.write_paused and not self.disconnected:
            await self.flow.drain()
        if self.disconnected:
            return
        if not self.response_started:
            self._write_head(message)
            return
        if self.response_complete or message["type"] != "http.response.body":
            raise RuntimeError(f"unexpected ASGI message {message['type']!r}")
        body = message.get("body", b"")
        more = message.get("more_body", False)
        self._write_body(body, b"" if more else b"0\r\n\r\n")
        if not more:
            if self.expected_content_length and not self.bodiless:
                raise RuntimeError("answer is shorter than its Content-Length")
            self.response_complete = True
            self.message_event.set()
            self.on_response()

    def write(self, body: bytes) -> bool:
        if not self.disconnected:
            self._write_body(body)
        return not self.flow.write_paused

    def _write_body(self, body: bytes, end: bytes = b"") -> None:
        if self.bodiless:
            return
        if self.chunked_encoding:
            body = b"%x\r\n%b\r\n%b" % (len(body), body, end) if body else end
        elif self.chunked_encoding is False:
            if len(body) > self.expected_content_length:
                raise RuntimeError("answer is longer than its Content-Length")
            self.expected_content_length -= len(body)
        if self.head:
            self.transport.writelines((self.head, body))
            self.head = b""
        elif body:
            self.transport.write(body)

    def _write_head(self, message: Message) -> None:
        if message["type"] != "http.response.start":
            raise RuntimeError(f"unexpected ASGI message {message['type']!r}")
        status, headers = message["status"], list(message.get("headers", ()))
        names, values = [*map(bytes.lower, map(itemgetter(0), headers))], [*map(itemgetter(1), headers)]
        if _NOT_IN_NAME.search(b"".join(names)):
            raise RuntimeError("illegal character in a header name")
        if _NOT_IN_VALUE.search(b"".join(values)):
            raise RuntimeError("illegal character in a header value")
        if self.waiting_for_100_continue:
            # The client may now send its body or not: the next bytes are ambiguous, so there is no next request.
            self.keep_alive = self.waiting_for_100_continue = False
        self.response_started = True
        self.bodiless = self.scope["method"] == "HEAD" or status in (204, 304)
        fields = [*zip(names, values, strict=True)]
        if not _GENERATED.isdisjoint(names):
            if any(name == b"connection" and value.lower() == b"close" for name, value in fields):
                self.keep_alive = False
            fields = [field for field in fields if field[0] not in _GENERATED]
        if (length := dict(fields).get(b"content-length")) is not None:
            self.expected_content_length = int(length)
            self.chunked_encoding = False
        if b"date" not in names:
            fields += self.default_headers
        lines = [_STATUS.get(status) or b"HTTP/1.1 %d \r\n" % status]
        lines.append(b"%b: %b\r\n" * len(fields) % (*chain.from_iterable(fields),))
        if self.chunked_encoding is None and not self.bodiless and not self.plain:
            self.chunked_encoding = True
            lines.append(b"transfer-encoding: chunked\r\n")
        if not self.keep_alive:
            lines.append(b"connection: close\r\n")
        lines.append(b"\r\n")
        if message.get(BODY_FOLLOWS) and not self.bodiless:
            self.head = b"".join(lines)
        else:
            self.transport.write(b"".join(lines))

    async def run_asgi(self, app: App) -> None:
        """Runs the application. One that returns in the middle of its answer has cut it off, and says so itself.

        The connection outlives that for a moment: Bun's fetch and aiohttp forget what they have received but not
        handed out yet once it ends early, and with it the error event that says why.
        """
        try:
            await app(self.scope, self.receive, self.send)
        except BaseException as error:
            self.logger.error("Exception in ASGI application\n", exc_info=error)
            if self.response_started:
                self.transport.close()
            else:
                await self.send_500_response()
        else:
            if self.response_complete or self.disconnected:
                return
            if self.response_started:
                self.disconnected = True
                asyncio.get_running_loop().call_later(READ_OUT, self.transport.close)
            else:
                self.logger.error("ASGI callable returned without starting response.")
                await self.send_500_response()
        finally:
            self.on_response = lambda: None
            self.scope.pop("extensions", None)  # it holds the cycle

    async def send_500_response(self) -> None:
        await answer_error(self.send, 500, ProxyError("Internal server error."))


def refusal(status: int, error: ProxyError, headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    lines = [b"%b: %b\r\n" % header for header in (*headers, *_headers_of(error))]
    return b"".join([_STATUS[status], *lines, b"\r\n", error.body()])


async def answer_error(send: Callable[[Message], Awaitable[None]], status: int, error: ProxyError) -> None:
    await send({"type": "http.response.start", "status": status, "headers": _headers_of(error)})
    await send({"type": "http.response.body", "body": error.body()})


def _headers_of(error: ProxyError) -> list[tuple[bytes, bytes]]:
    return [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(error.body())).encode()),
        (b"x-request-id", uuid.uuid4().hex.encode()),
        *error.headers(),
        (b"connection", b"close"),
    ]


async def answer_busy(_scope: Any, _receive: Any, send: Any) -> None:
    await answer_error(send, 503, Busy("Weir has as many requests open as it may have. Please try again."))
