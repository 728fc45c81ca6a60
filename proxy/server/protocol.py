"""The client's edge: uvicorn on httptools, plus the deadlines, caps and framing rules that uvicorn leaves to others.

llhttp already refuses most illegal framing. What it lets through is refused here, before the application runs: heads
and bodies above a cap, heads and bodies that take too long, a missing or second ``Host``, transfer codings other than
``chunked``. Each refusal is a JSON error in OpenAI's shape on a connection that is then closed.

A connection has one timer, armed lazily: a request that arrives in one piece costs no timer and no clock.
"""

import asyncio
import logging
import re
import urllib.parse
from collections import deque
from collections.abc import Sequence
from typing import Any

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from proxy.errors import Busy, InvalidRequest, ProxyError, RequestTooLarge, ShuttingDown
from proxy.server.cycle import CONTINUE, App, Cycle, ServerLimits, Shutdown, answer_busy, refusal

_log = logging.getLogger("proxy.server")

_NEVER = float("inf")
_IDLE, _HEAD, _BODY = range(3)
_WATCHED = frozenset({b"host", b"transfer-encoding", b"content-length", b"expect", b"upgrade"})
_HOST = re.compile(rb"[A-Za-z0-9._~%!$&'()*+,;=:\[\]-]*")
WHOLE = 1 << 20
READ_AHEAD = 1 << 16
STOPPED = 0.5
MAX_PIPELINED = 8
PROBED = frozenset({"/healthz", "/readyz", "/metrics"})  # who asks there would end a process that is only busy
PROBES = (0.02, 0.2, 0.5)


class _Refused(Exception): ...


class Protocol(HttpToolsProtocol):
    cycle: Cycle  # type: ignore[assignment]  # which does all that uvicorn's does
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
        self.refused = config.refused
        self.stopping: Shutdown = app_state["shutdown"]
        self.phase = _IDLE
        self.heads = 0
        self.head_bytes = 0
        self.body_bytes = 0
        self.beside = 0
        self.hosts = 0
        self.coded = False
        self.offered = False
        self.retold = False
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
        super().connection_made(transport)
        self._wait_until(self.loop.time() + self.limits.header_timeout)
        most = self.limits.connections
        if most is None or len(self.connections) - len(self.refused) <= most:
            return
        if len(self.refused) >= most:
            self._cut_oldest_refused()
        self.refused[self] = None
        self._refuse(503, Busy("Weir has as many connections open as it may have. Please try again."))

    def _cut_oldest_refused(self) -> None:
        """Gives its descriptor to who comes now: it has its answer, and only lingers to have read it."""
        oldest = next(iter(self.refused))
        del self.refused[oldest]
        self.connections.discard(oldest)
        oldest.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
        if self.running is not None:
            self.running.disconnect()
        self.refused.pop(self, None)
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
            running.disconnect()
            return None
        self.cycle.keep_alive = False
        self._probe(PROBES)
        return True

    def _probe(self, delays: Sequence[float]) -> None:
        running = self.running
        if running is None or running.response_complete or self.transport.is_closing():
            return
        if running.chunked_encoding:
            self.transport.write(b"0")
        elif not running.response_started and not running.plain:
            self.transport.write(CONTINUE)
        if delays:
            self.loop.call_later(delays[0], self._probe, delays[1:])

    def shutdown(self) -> None:
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
        if now >= self.deadline + STOPPED:
            self.deadline = now + STOPPED  # uvloop runs timers before it reads what came while the process stood still
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
        super().pause_writing()
        self.unsent = self.transport.get_write_buffer_size()
        self.stalled = self.loop.time() + self.limits.stall
        self._arm(self.stalled)

    def resume_writing(self) -> None:
        super().resume_writing()
        self.stalled = _NEVER

    def _close(self) -> None:
        self.transport.close()
        if self.transport.get_write_buffer_size():
            self.unsent = 0
            self.stalled = self.loop.time() + self.limits.stall
            self._arm(self.stalled)

    # -- refusals

    def _reject(self, status: int, error: ProxyError) -> None:
        self.verdict = (status, error)
        raise _Refused

    def _refuse(self, status: int, error: ProxyError) -> None:
        _log.info("request refused with %d: %s", status, error.message)
        self.refusal = refusal(status, error, self.server_state.default_headers)
        self.deadline = _NEVER
        running = self.running
        if self.phase == _BODY and self.pipeline:
            self.pipeline.popleft()
        elif self.phase == _BODY and running is not None:
            if running.response_started:
                self.refusal = b""
            running.disconnect()
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
            timeout = self.limits.body_timeout if self.phase == _BODY else self.limits.header_timeout
            self._wait_until(self.loop.time() + timeout)

    def _resume(self) -> None:
        """Goes on with the body, which llhttp takes for another protocol's bytes: a new parser is told its framing."""
        self.retold = True
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        framing = b"Transfer-Encoding: chunked" if self.coded else b"Content-Length: %d" % (self.length or 0)
        self.parser.feed_data(b"POST / HTTP/1.1\r\n" + framing + b"\r\n\r\n")

    def on_message_begin(self) -> None:
        if self.retold:
            return
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
        self.headers.append((name, value))
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
        if self.retold:
            self.retold = False
            return
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
            whole=self.length is not None and self.length <= WHOLE and not waits,
            keep_alive=not plain and self.parser.should_keep_alive() and not self.stopping.draining.is_set(),
        )
        self.cycle = cycle
        limit = self.limits.concurrency
        has_room = limit is None or len(self.tasks) < limit or path in PROBED
        app = self.app if has_room else answer_busy
        if waits:
            self.pipeline.appendleft((cycle, app))
        else:
            self._begin(cycle, app)

    def _judge(self, version: str) -> None:
        """Refuses a head that llhttp accepts and Weir does not (RFC 9112 3.2, 6.1 and 6.3)."""
        if version not in ("1.0", "1.1"):
            self._reject(400, InvalidRequest("Only HTTP/1.0 and HTTP/1.1 are understood."))
        if len(self.headers) > self.limits.header_fields:
            self._reject(431, RequestTooLarge("The request has too many headers."))
        if self.hosts > 1 or (not self.hosts and version == "1.1"):
            self._reject(400, InvalidRequest("A request has exactly one Host header."))
        if self.coded and (version == "1.0" or self.length is not None):
            self._reject(400, InvalidRequest("The request's length is ambiguous."))
        if self.length is not None and self.length > self.limits.body_bytes:
            self._reject(413, RequestTooLarge.of_body(self.limits.body_bytes))
        if self.running is not None and not self.running.response_complete:
            size = sum(len(name) + len(value) + 4 for name, value in self.headers) + len(self.url)
            if size > self.limits.header_bytes or len(self.pipeline) >= MAX_PIPELINED:
                self._reject(431, RequestTooLarge("Too much was sent ahead of the answer."))

    def _begin(self, cycle: Cycle, app: Any) -> None:
        self.running = cycle
        self._start_asgi_task(cycle, app)  # type: ignore[arg-type]

    def on_body(self, body: bytes) -> None:
        self.body_bytes += len(body)
        if self.body_bytes > self.limits.body_bytes:
            self._reject(413, RequestTooLarge.of_body(self.limits.body_bytes))
        cycle = self.cycle
        if cycle.response_complete or cycle.disconnected:
            return
        cycle.parts.append(body)
        cycle.buffered += len(body)
        if not cycle.whole:
            if cycle.buffered > READ_AHEAD:
                self.flow.pause_reading()
            cycle.message_event.set()

    def on_message_complete(self) -> None:
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


class ServerConfig(uvicorn.Config):
    """uvicorn's configuration with ``limits``: no server header, no access log, no trust in forwarded headers.

    ``refused`` are the connections for which there was no room and that are still open, the oldest first.
    """

    def __init__(self, app: App | str, *, limits: ServerLimits, **options: Any) -> None:
        self.limits = limits
        self.refused: dict[Protocol, None] = {}
        super().__init__(
            app,
            http=Protocol,
            ws="none",
            loop="uvloop",
            interface="asgi3",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=True,
            proxy_headers=False,
            **options,
        )
