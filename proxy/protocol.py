"""The client's edge: uvicorn on httptools, plus the deadlines, caps and framing rules that uvicorn leaves to others.

llhttp already refuses most illegal framing. What it lets through is refused here, before the application runs: heads
and bodies above a cap, heads and bodies that take too long, a missing or second ``Host``, transfer codings other than
``chunked``. Each refusal is a JSON error in OpenAI's shape on a connection that is then closed.

A connection has one timer, armed lazily: a request that arrives in one piece costs no timer and no clock.
"""

import asyncio
import http
import logging
import re
import urllib.parse
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from proxy.errors import Busy, InvalidRequest, ProxyError, RequestTooLarge, ShuttingDown

App = Callable[..., Awaitable[None]]
Message = Any

_log = logging.getLogger(__name__)

_NEVER = float("inf")
_IDLE, _HEAD, _BODY = range(3)
_WATCHED = frozenset({b"host", b"transfer-encoding", b"content-length", b"expect", b"upgrade"})
_GENERATED = frozenset({b"connection", b"keep-alive", b"transfer-encoding"})
_HOST = re.compile(rb"[A-Za-z0-9._~%!$&'()*+,;=:\[\]-]*")
_NOT_IN_NAME = re.compile(rb'[\x00-\x20\x7f()<>@,;:\\"/\[\]?={}]')
_NOT_IN_VALUE = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
_STATUS = {status.value: b"HTTP/1.1 %d %b\r\n" % (status.value, status.phrase.encode()) for status in http.HTTPStatus}
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_WHOLE = 1 << 20
_READ_AHEAD = 1 << 16
_READ_OUT = 0.25
_STOPPED = 0.5
_PIPELINED = 8
_PROBED = frozenset({"/healthz", "/readyz", "/metrics"})  # who asks there would end a process that is only busy
_PROBES = (0.02, 0.2, 0.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """What one client may take: times in seconds, sizes in bytes.

    ``header_timeout`` runs from the first byte of a head (or the connection) to its end, ``body_timeout`` from there to
    the last byte of the body, ``keep_alive`` between requests, ``stall`` while a reader takes nothing, ``linger``
    after a refusal. On shutdown readiness fails for ``notice`` before the listeners close, open answers have ``grace``
    to finish, and ``farewell`` to say why they are cut. ``concurrency``: requests at once, ``connections``: of
    clients at once; as many again are told that there is no room, more are reset. ``None`` for no limit.
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
    notice: float = 0.0
    grace: float = 30.0
    farewell: float = 2.0


@dataclass(frozen=True, slots=True)
class Shutdown:
    """How far the process is with stopping; in every request's ``scope["state"]["shutdown"]``.

    ``draining``: readiness is 503. ``cut``: what still streams must end now, with an error event; ``callbacks`` are
    called at that moment (a stream adds one while it runs, which costs less than waiting for the event).
    """

    draining: asyncio.Event = field(default_factory=asyncio.Event)
    cut: asyncio.Event = field(default_factory=asyncio.Event)
    callbacks: set[Callable[[], None]] = field(default_factory=set)

    def cut_now(self) -> None:
        """Sets ``cut`` and calls every callback."""
        self.cut.set()
        for callback in tuple(self.callbacks):
            callback()


DISCONNECT: Final = "weir.disconnect"


class _Refused(Exception):
    """Stops the parser from inside one of its callbacks."""


class Cycle(RequestResponseCycle):
    """One request and its answer; ``plain`` is HTTP/1.0, which knows no chunks and gets ``Connection: close``."""

    def __init__(self, *, protocol: "Protocol", plain: bool, whole: bool, keep_alive: bool) -> None:
        super().__init__(
            scope=protocol.scope,
            transport=protocol.transport,
            flow=protocol.flow,
            logger=protocol.logger,
            access_logger=protocol.access_logger,
            access_log=False,
            default_headers=protocol.server_state.default_headers,
            message_event=asyncio.Event(),
            expect_100_continue=protocol.expect_100_continue,
            keep_alive=keep_alive,
            on_response=protocol.on_response_complete,
        )
        self.pipeline = protocol.pipeline
        self.plain = plain
        self.whole = whole
        self.bodiless = False
        self.parts: list[bytes] = []
        self.buffered = 0
        self.gone: Callable[[], None] | None = None
        protocol.scope["extensions"] = {DISCONNECT: self.when_gone}  # type: ignore[dict-item]  # ours, not ASGI's

    def when_gone(self, callback: Callable[[], None] | None) -> None:
        """Has ``callback`` called once when the client leaves before its answer is complete; None calls it off."""
        self.gone = callback
        if callback is not None and self.disconnected:
            callback()

    async def receive(self) -> Message:
        """The next part of the body; a body declared below 1 MiB comes as one."""
        if self.waiting_for_100_continue and not self.transport.is_closing():
            self.transport.write(_CONTINUE)
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
        """Writes one ASGI message; waits while the client is not reading; does nothing once it is gone."""
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
        if self.bodiless:
            pass
        elif self.chunked_encoding:
            if body:
                self.transport.write(b"%x\r\n%b\r\n%b" % (len(body), body, b"" if more else b"0\r\n\r\n"))
            elif not more:
                self.transport.write(b"0\r\n\r\n")
        else:
            self._write_counted(body)
        if not more:
            if self.expected_content_length and not self.bodiless:
                raise RuntimeError("answer is shorter than its Content-Length")
            self.response_complete = True
            self.message_event.set()
            self.on_response()

    def _write_counted(self, body: bytes) -> None:
        """Writes to an answer that is delimited by its length or, ``chunked_encoding`` being None, by its end."""
        if self.chunked_encoding is False:
            if len(body) > self.expected_content_length:
                raise RuntimeError("answer is longer than its Content-Length")
            self.expected_content_length -= len(body)
        if body:
            self.transport.write(body)

    def _write_head(self, message: Message) -> None:
        """Writes status line and headers; framing is generated, whatever the application says about it."""
        if message["type"] != "http.response.start":
            raise RuntimeError(f"unexpected ASGI message {message['type']!r}")
        status, headers = message["status"], list(message.get("headers", ()))
        if _NOT_IN_NAME.search(b"".join([name for name, _ in headers])):
            raise RuntimeError("illegal character in a header name")
        if _NOT_IN_VALUE.search(b"".join([value for _, value in headers])):
            raise RuntimeError("illegal character in a header value")
        if self.waiting_for_100_continue:
            # The client may now send its body or not: the next bytes are ambiguous, so there is no next request.
            self.keep_alive = self.waiting_for_100_continue = False
        self.response_started = True
        self.bodiless = self.scope["method"] == "HEAD" or status in (204, 304)
        lines = [_STATUS.get(status) or b"HTTP/1.1 %d \r\n" % status]
        dated = False
        for name, value in headers:
            name = name.lower()
            if name in _GENERATED:
                if name == b"connection" and value.lower() == b"close":
                    self.keep_alive = False
                continue
            if name == b"content-length":
                self.expected_content_length = int(value)
                self.chunked_encoding = False
            elif name == b"date":
                dated = True
            lines += (name, b": ", value, b"\r\n")
        for name, value in () if dated else self.default_headers:
            lines += (name, b": ", value, b"\r\n")
        if self.chunked_encoding is None and not self.bodiless and not self.plain:
            self.chunked_encoding = True
            lines.append(b"transfer-encoding: chunked\r\n")
        if not self.keep_alive:
            lines.append(b"connection: close\r\n")
        lines.append(b"\r\n")
        self.transport.write(b"".join(lines))

    async def run_asgi(self, app: App) -> None:
        """Runs the application. One that returns in the middle of its answer has cut it off, and says so itself.

        The connection outlives that for a moment: Bun's fetch and aiohttp forget what they have received but not
        handed out yet once it ends early, and with it the error event that says why.
        """

        async def running(scope: Any, receive: Any, send: Any) -> None:
            await app(scope, receive, send)
            if self.response_started and not self.response_complete and not self.disconnected:
                self.disconnected = True
                asyncio.get_running_loop().call_later(_READ_OUT, self.transport.close)

        await super().run_asgi(running)

    async def send_500_response(self) -> None:
        """Answers for an application that raised before its answer began."""
        await _answer(self.send, 500, ProxyError("Internal server error."))


class Protocol(HttpToolsProtocol):
    """One client connection."""

    cycle: Cycle
    pipeline: deque[tuple[Cycle, Any]]  # type: ignore[assignment]

    def __init__(
        self,
        config: "ServerConfig",
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.limits = config.limits
        self.stopping: Shutdown = app_state["shutdown"]
        self.phase = _IDLE
        self.heads = 0
        self.head_bytes = 0
        self.body_bytes = 0
        self.beside = 0
        self.hosts = 0
        self.coded = False
        self.offered = False
        self.length: int | None = None
        self.entered = False
        self.running: Cycle | None = None
        self.verdict: tuple[int, ProxyError] | None = None
        self.refusal: bytes | None = None
        self.deadline = _NEVER
        self.stalled = _NEVER
        self.unsent = 0
        self.timer: asyncio.TimerHandle | None = None

    # -- connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Starts the clock of the first head: a connection that says nothing is closed too."""
        super().connection_made(transport)
        self._wait_until(self.loop.time() + self.limits.header_timeout)
        most, there = self.limits.connections, len(self.connections)
        if most is None or there <= most:
            return
        if there > 2 * most:
            transport.abort()
        else:
            self._refuse(503, Busy("Weir has as many connections open as it may have. Please try again."))

    def connection_lost(self, exc: Exception | None) -> None:
        """Tells the running application, also when a pipelined request stands behind it."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
        if self.running is not None:
            _disconnect(self.running)
        super().connection_lost(exc)

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """Keeps a half-closed connection open for its answer.

        A client that left sends the same FIN, but its kernel answers whatever comes next with a reset. So something
        harmless is sent to find out: before the answer a 100, which a client must skip (RFC 9110 15.2), and between
        two chunks a leading zero of the next one's size (RFC 9112 7.1).
        """
        running = self.running
        if self.refusal is not None or running is None or running.response_complete or self.scheme == "https":
            return None
        if running.disconnected:
            return None
        if self.phase != _IDLE:
            _disconnect(running)
            return None
        self.cycle.keep_alive = False
        self._probe(_PROBES)
        return True

    def _probe(self, delays: Sequence[float]) -> None:
        running = self.running
        if running is None or running.response_complete or self.transport.is_closing():
            return
        if running.chunked_encoding:
            self.transport.write(b"0")
        elif not running.response_started and not running.plain:
            self.transport.write(_CONTINUE)
        if delays:
            self.loop.call_later(delays[0], self._probe, delays[1:])

    def shutdown(self) -> None:
        """Closes the connection if it is idle, else after its answer."""
        if self.refusal is not None:
            return
        if self.running is not None and not self.running.response_complete:
            self.cycle.keep_alive = False
        elif self.phase == _IDLE:
            self._close()
        else:
            self._refuse(503, ShuttingDown("Weir is shutting down."))

    # -- deadlines

    def _wait_until(self, deadline: float) -> None:
        self.deadline = deadline
        self._arm(deadline)

    def _arm(self, when: float) -> None:
        if self.timer is not None:
            if self.timer.when() <= when:
                return
            self.timer.cancel()
        self.timer = self.loop.call_at(when, self._tick)

    def _tick(self) -> None:
        self.timer = None
        now = self.loop.time()
        if now >= self.stalled:
            self._check_reader(now)
        if now >= self.deadline + _STOPPED:
            self.deadline = now + _STOPPED  # uvloop runs timers before it reads what came while the process stood still
        elif now >= self.deadline:
            self._expire(now)
        if (when := min(self.deadline, self.stalled)) < _NEVER and self.parser is not None:
            self._arm(when)

    def _expire(self, now: float) -> None:
        self.deadline = _NEVER
        if self.refusal is not None or (self.phase == _IDLE and self.cycle is not None):
            self._close()
        elif self.flow.read_paused:
            # The application, not the client, is the slow one.
            self.deadline = now + 1.0
        else:
            part = "body" if self.phase == _BODY else "headers"
            self._refuse(408, InvalidRequest(f"The request's {part} did not arrive in time."))

    def _check_reader(self, now: float) -> None:
        unsent = self.transport.get_write_buffer_size()
        if unsent < self.unsent:
            self.unsent, self.stalled = unsent, now + self.limits.stall
            return
        self.stalled = _NEVER
        _log.info("client stopped reading: connection cut with %d bytes unsent", unsent)
        self.transport.abort()

    def pause_writing(self) -> None:
        """Starts the clock of a reader that does not read."""
        super().pause_writing()
        self.unsent = self.transport.get_write_buffer_size()
        self.stalled = self.loop.time() + self.limits.stall
        self._arm(self.stalled)

    def resume_writing(self) -> None:
        """Stops that clock."""
        super().resume_writing()
        self.stalled = _NEVER

    def _close(self) -> None:
        """Closes the connection; what is unsent is still flushed, for at most ``stall`` seconds."""
        self.transport.close()
        if self.transport.get_write_buffer_size():
            self.unsent = 0
            self.stalled = self.loop.time() + self.limits.stall
            self._arm(self.stalled)

    # -- refusals

    def _reject(self, status: int, error: ProxyError) -> None:
        """Refuses the request from inside a callback of the parser."""
        self.verdict = (status, error)
        raise _Refused

    def _refuse(self, status: int, error: ProxyError) -> None:
        """Parses nothing more; answers once the requests before this one are answered, and closes."""
        _log.info("request refused with %d: %s", status, error.message)
        self.refusal = _refusal(status, error, self.server_state.default_headers)
        self.deadline = _NEVER
        running = self.running
        if self.phase == _BODY and self.pipeline:
            self.pipeline.popleft()
        elif self.phase == _BODY and running is not None:
            if running.response_started:
                self.refusal = b""
            _disconnect(running)
            self.running = None
        elif running is not None and not running.response_complete:
            return
        if self.running is None or self.running.response_complete:
            self._part()

    def _part(self) -> None:
        """Writes the refusal and half-closes, then reads on for a while: unread bytes would reset the answer away."""
        self.transport.write(self.refusal or b"")
        if not self.transport.can_write_eof():
            self._close()
            return
        self.transport.write_eof()
        self.flow.resume_reading()
        self._wait_until(self.loop.time() + self.limits.linger)

    # -- parsing

    def data_received(self, data: bytes | memoryview) -> None:
        """Feeds the parser, at most the header cap of it until a head is complete."""
        if self.refusal is not None:
            return
        if self.phase != _BODY:
            room = self.limits.header_bytes - self.head_bytes
            if len(data) > room:
                heads = self.heads
                view = memoryview(data)
                self._feed(view[:room])
                if self.refusal is None and self.heads == heads:
                    self._refuse(431, RequestTooLarge("The request's headers are too large."))
                elif self.refusal is None:
                    self._feed(view[room:])
                return
            self.head_bytes += len(data)
            self._feed(data)
            return
        before = self.body_bytes
        self._feed(data)
        # What frames a body (trailers, parameters of chunks) has no end of its own either, and llhttp keeps it.
        self.beside = self.beside + len(data) if self.phase == _BODY and self.body_bytes == before else 0
        if self.beside > self.limits.header_bytes and self.refusal is None:
            self._refuse(431, RequestTooLarge("The request's trailers are too large."))

    def _feed(self, data: bytes | memoryview) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            # An offer (h2c, by the JDK's client) that is not taken up: the request stands, what follows is HTTP/1.1.
            if self.phase == _BODY:
                self._resume()
            if rest := data[upgrade.args[0] :]:
                self.data_received(rest)
                return
        except httptools.HttpParserError:
            status, error = self.verdict or (400, InvalidRequest("The request is not valid HTTP/1.1."))
            self._refuse(status, error)
            return
        if self.entered:
            self.entered = False
            body = self.phase == _BODY
            self._wait_until(
                self.loop.time() + (self.limits.body_timeout if body else self.limits.header_timeout),
            )

    def _resume(self) -> None:
        """Goes on with the body, which llhttp takes for another protocol's bytes: a new parser is told its framing."""
        self.parser = httptools.HttpRequestParser(_Resumed(self))
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        framing = b"Transfer-Encoding: chunked" if self.coded else b"Content-Length: %d" % (self.length or 0)
        self.parser.feed_data(b"POST / HTTP/1.1\r\n" + framing + b"\r\n\r\n")

    def on_message_begin(self) -> None:
        """A request's first byte."""
        self.url = b""
        self.headers = []
        self.expect_100_continue = False
        self.hosts = 0
        self.coded = self.offered = False
        self.length = None
        self.phase = _HEAD
        self.entered = True

    def on_header(self, name: bytes, value: bytes) -> None:
        """One field; those that frame the request are judged at once. Trailers are passed over (RFC 9110 6.5.1)."""
        if self.phase == _BODY:
            return
        name = name.lower()
        headers = self.headers
        headers.append((name, value))
        if len(headers) > self.limits.header_fields:
            self._reject(431, RequestTooLarge("The request has too many headers."))
        if name in _WATCHED:
            self._watch(name, value)

    def _watch(self, name: bytes, value: bytes) -> None:
        if name == b"host":
            self.hosts += 1
            if _HOST.fullmatch(value) is None:
                self._reject(400, InvalidRequest("The Host header is malformed."))
        elif name == b"content-length":
            self.length = int(value)
        elif name == b"expect":
            self.expect_100_continue = value.lower() == b"100-continue"
        elif name == b"upgrade":
            self.offered = True
        elif self.coded or value.lower() != b"chunked":
            self._reject(400, InvalidRequest("The only Transfer-Encoding understood is chunked."))
        else:
            self.coded = True

    def on_headers_complete(self) -> None:
        """Starts the application, or queues the request behind the one that is being answered."""
        version = self.parser.get_http_version()
        plain = version == "1.0"
        self._judge(version)
        url = httptools.parse_url(self.url)
        path = url.path.decode("ascii")
        self.scope = {
            "type": "http",
            "asgi": {"version": self.asgi_version, "spec_version": "2.3"},
            "http_version": version,
            "server": self.server,
            "client": self.client,
            "scheme": self.scheme or "http",
            "method": self.parser.get_method().decode("ascii"),
            "root_path": self.root_path,
            "path": urllib.parse.unquote(path) if "%" in path else path,
            "raw_path": url.path,
            "query_string": url.query or b"",
            "headers": self.headers,
            "state": self.app_state.copy(),
        }
        self.heads += 1
        self.body_bytes = 0
        self.phase = _BODY
        self.entered = True
        waits = self.running is not None and not self.running.response_complete
        cycle = Cycle(
            protocol=self,
            plain=plain,
            whole=self.length is not None and self.length <= _WHOLE and not waits,
            keep_alive=not plain and self.parser.should_keep_alive() and not self.stopping.draining.is_set(),
        )
        self.cycle = cycle
        limit = self.limits.concurrency
        has_room = limit is None or len(self.tasks) < limit or path in _PROBED
        app = self.app if has_room else _busy
        if waits:
            self.pipeline.appendleft((cycle, app))
        else:
            self._begin(cycle, app)

    def _judge(self, version: str) -> None:
        """Refuses a head that llhttp accepts and Weir does not (RFC 9112 3.2, 6.1 and 6.3)."""
        if version not in ("1.0", "1.1"):
            self._reject(400, InvalidRequest("Only HTTP/1.0 and HTTP/1.1 are understood."))
        if self.hosts > 1 or (not self.hosts and version == "1.1"):
            self._reject(400, InvalidRequest("A request has exactly one Host header."))
        if self.coded and (version == "1.0" or self.length is not None):
            self._reject(400, InvalidRequest("The request's length is ambiguous."))
        if self.length is not None and self.length > self.limits.body_bytes:
            self._reject(413, RequestTooLarge.of_body(self.limits.body_bytes))
        if self.running is not None and not self.running.response_complete:
            size = sum(len(name) + len(value) + 4 for name, value in self.headers) + len(self.url)
            if size > self.limits.header_bytes or len(self.pipeline) >= _PIPELINED:
                self._reject(431, RequestTooLarge("Too much was sent ahead of the answer."))

    def _begin(self, cycle: Cycle, app: Any) -> None:
        self.running = cycle
        self._start_asgi_task(cycle, app)

    def on_body(self, body: bytes) -> None:
        """A part of the body; above the cap it is refused, whatever was declared."""
        self.body_bytes += len(body)
        if self.body_bytes > self.limits.body_bytes:
            self._reject(413, RequestTooLarge.of_body(self.limits.body_bytes))
        cycle = self.cycle
        if cycle.response_complete or cycle.disconnected:
            return
        cycle.parts.append(body)
        cycle.buffered += len(body)
        if not cycle.whole:
            if cycle.buffered > _READ_AHEAD:
                self.flow.pause_reading()
            cycle.message_event.set()

    def on_message_complete(self) -> None:
        """A request's last byte."""
        if self.offered and (self.coded or self.length) and self.parser.should_upgrade():
            return
        cycle = self.cycle
        self.phase = _IDLE
        self.head_bytes = 0
        self.entered = False
        self.deadline = _NEVER
        cycle.more_body = False
        if not cycle.response_complete:
            cycle.message_event.set()
        elif self.running is cycle:
            self._wait_until(self.loop.time() + self.limits.keep_alive)

    def on_response_complete(self) -> None:
        """Goes on to the next request of the connection, or ends it."""
        self.server_state.total_requests += 1
        if self.transport.is_closing() or self.running is None:
            return
        if self.pipeline and self.running.keep_alive:
            self.flow.resume_reading()
            cycle, app = self.pipeline.pop()
            self._begin(cycle, app)
        elif self.refusal is not None:
            self._part()
        elif not self.running.keep_alive and self.phase == _BODY:
            self.refusal = b""
            self._part()
        elif not self.running.keep_alive:
            self._close()
        else:
            self.flow.resume_reading()
            if self.phase == _IDLE:
                self._wait_until(self.loop.time() + self.limits.keep_alive)


class _Resumed:
    """The callbacks of a parser that goes on inside a request: it passes over the head that tells it the framing."""

    def __init__(self, protocol: Protocol) -> None:
        self._protocol = protocol
        self._inside = False
        self.on_body = protocol.on_body
        self.on_message_complete = protocol.on_message_complete

    def on_message_begin(self) -> None:
        if self._inside:
            self._protocol.on_message_begin()

    def on_url(self, url: bytes) -> None:
        if self._inside:
            self._protocol.on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._inside:
            self._protocol.on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._inside:
            self._protocol.on_headers_complete()
        self._inside = True


def _disconnect(cycle: Cycle) -> None:
    """Lets the application see ``http.disconnect``; what it sends from now on goes nowhere."""
    if not cycle.response_complete:
        cycle.disconnected = True
        cycle.message_event.set()
        if cycle.gone is not None:
            callback, cycle.gone = cycle.gone, None
            callback()


def _refusal(status: int, error: ProxyError, headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    """A whole answer, with ``Connection: close``."""
    body = error.body()
    return b"".join(
        [
            _STATUS[status],
            *[b"%b: %b\r\n" % header for header in headers],
            b"content-type: application/json\r\nx-request-id: %b\r\n" % uuid.uuid4().hex.encode(),
            *[b"%b: %b\r\n" % header for header in error.headers()],
            b"content-length: %d\r\nconnection: close\r\n\r\n" % len(body),
            body,
        ]
    )


async def _answer(send: Callable[[Message], Awaitable[None]], status: int, error: ProxyError) -> None:
    body = error.body()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"x-request-id", uuid.uuid4().hex.encode()),
        *error.headers(),
        (b"connection", b"close"),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _busy(_scope: Any, _receive: Any, send: Any) -> None:
    """Answers in the application's place when too many requests are open."""
    await _answer(send, 503, Busy("Weir has as many requests open as it may have. Please try again."))


class ServerConfig(uvicorn.Config):
    """uvicorn's configuration with ``limits``: no server header, no access log, no trust in forwarded headers."""

    def __init__(
        self,
        app: App | str,
        *,
        host: str,
        port: int,
        limits: ServerLimits,
        lifespan: Literal["on", "off"],
        factory: bool = False,
    ) -> None:
        self.limits = limits
        super().__init__(
            app,
            host=host,
            port=port,
            http=Protocol,
            ws="none",
            loop="uvloop",
            interface="asgi3",
            lifespan=lifespan,
            factory=factory,
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=True,
            proxy_headers=False,
        )
