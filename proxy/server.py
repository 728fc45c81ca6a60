"""The client's edge: uvicorn, with deadlines for what a client sends and takes, and a stop in two
steps.

Everything else that a service on an open network needs belongs to the proxy in front of Weir; see
docs/operating.md.
"""

import asyncio
import logging
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from types import FrameType
from typing import Any, Literal

import httptools
import msgspec
import uvicorn
from starlette.responses import Response
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from proxy.errors import ProxyError, RequestTimeout

_log = logging.getLogger("proxy.server")
# A cut answer is logged by the code that cut it.
logging.getLogger("uvicorn.error").addFilter(
    lambda line: "without completing response" not in line.getMessage()
)

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

WHEN_GONE = "weir.when_gone"
"""The scope extension that registers a function to call when the client leaves; None unregisters
it.
"""
WRITE = "weir.write"
"""The extension that writes a piece of a chunked answer at once; False where the client takes no
more for now.

With an ASGI message a piece, a stream costs 1.8 times what benchmarks.floor takes for it, with this
1.5 times.
"""
CHECKED_EVERY = 0.1


class ServerLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What one client may take: times in seconds, sizes in bytes.

    header_timeout: From the first byte of a head, or from the connection, to the end of the head.
    body_timeout: From the end of the head to the last byte of the body.
    keep_alive: Between two requests of a connection.
    stall: While a client takes nothing of its answer.
    header_bytes, header_fields: Of one head.
    connections: Of all clients; beyond them uvicorn answers 503. None for no limit.
    drain: On SIGTERM readiness fails for so long while everything is still served.
    grace: For open answers to finish.
    farewell: For what is cut then to say so.
    """

    header_timeout: float = 10.0
    body_timeout: float = 60.0
    keep_alive: float = 75.0
    stall: float = 60.0
    header_bytes: int = 64 * 1024
    header_fields: int = 100
    connections: int | None = None
    drain: float = 0.0
    grace: float = 30.0
    farewell: float = 2.0


class Shutdown(msgspec.Struct, frozen=True):
    """How far the process is with stopping; in every request's ``scope["state"]["shutdown"]``.

    draining: Readiness is 503.
    callbacks: Called when what is open must end now; a request adds one while it runs.
    """

    draining: asyncio.Event = msgspec.field(default_factory=asyncio.Event)
    callbacks: set[Callable[[], None]] = msgspec.field(default_factory=set)

    def cut_now(self) -> None:
        _log.warning("stopping: %d requests are still open and will be cut", len(self.callbacks))
        for callback in tuple(self.callbacks):
            callback()


class Protocol(HttpToolsProtocol):
    """uvicorn's protocol with what it lacks: deadlines for heads and readers, and bodies after an
    upgrade's offer.
    """

    def __init__(self, *args: Any, limits: ServerLimits, **options: Any) -> None:
        super().__init__(*args, **options)
        self.limits = limits
        self.in_head = True
        self.head_bytes = 0
        self.head_timer: asyncio.TimerHandle | None = None
        self.stall_timer: asyncio.TimerHandle | None = None
        self.gone: Callable[[], None] | None = None
        self.extensions: dict[str, Any] = {WHEN_GONE: self.when_gone, WRITE: self.write}

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self.head_timer, self.stall_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)
        self.extensions.clear()  # which hold the protocol
        if self.gone is not None:
            self.gone()

    def data_received(self, data: bytes) -> None:
        self.head_bytes += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            self._decline(data[offer.args[0] :])
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")
            return
        if self.in_head:
            self._wait_for_head()
        elif self.head_timer is not None:
            self.head_timer.cancel()
            self.head_timer = None

    def _wait_for_head(self) -> None:
        if self.head_bytes > self.limits.header_bytes:
            self.send_400_response("The request's headers are too large.")
        elif self.head_timer is None:
            self.head_timer = self.loop.call_later(self.limits.header_timeout, self.transport.close)

    def _decline(self, rest: bytes) -> None:
        """Read the body of a request that offers an upgrade, as the JDK's client does with every
        POST (h2c).

        llhttp takes it for bytes of the other protocol, so another parser is given its framing.
        """
        framing = [
            header
            for header in self.headers
            if header[0] in (b"content-length", b"transfer-encoding")
        ]
        self.cycle.keep_alive = False
        self.parser = httptools.HttpRequestParser(_Body(self))
        head = b"".join([b"%b: %b\r\n" % header for header in framing])
        self.data_received(b"POST / HTTP/1.1\r\nconnection: close\r\n" + head + b"\r\n" + rest)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.in_head = True
        self.head_bytes = 0  # what came with the end of a body before it is not counted

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.in_head:  # trailers are no headers (RFC 9110 6.5.1)
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        size = sum([len(name) + len(value) for name, value in self.headers])
        if size > self.limits.header_bytes or len(self.headers) > self.limits.header_fields:
            # which is a parser's error: 400
            raise ValueError("The request's headers are too large.")
        self.in_head = False
        # Only now: the rest of a refused body, or an empty line, keeps no connection
        # open.
        self._unset_keepalive_if_required()
        self.scope["extensions"] = self.extensions
        super().on_headers_complete()
        # A client that is refused before it has sent its body may send another request in its place
        # (RFC 9110 10.1.1).
        if self.expect_100_continue or self.app_state["shutdown"].draining.is_set():
            self.cycle.keep_alive = False

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():
            super().on_message_complete()
            if not self.pipeline:
                # nobody receives after the last piece: else a client's leaving is not seen
                self.flow.resume_reading()

    def when_gone(self, callback: Callable[[], None] | None) -> None:
        self.gone = callback
        if callback is not None and self.transport.is_closing():
            callback()

    def write(self, piece: bytes) -> bool:
        if not self.transport.is_closing():
            self.transport.write(b"%x\r\n%b\r\n" % (len(piece), piece))
        return not self.flow.write_paused

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        super().resume_writing()
        if self.stall_timer is not None:
            self.stall_timer.cancel()

    def _watch_reader(self, unsent: int) -> None:
        self.stall_timer = self.loop.call_later(self.limits.stall, self._check_reader, unsent)

    def _check_reader(self, before: int) -> None:
        unsent = self.transport.get_write_buffer_size()
        if unsent < before:
            self._watch_reader(unsent)
        else:
            _log.info("client stopped reading: connection cut with %d bytes unsent", unsent)
            self.transport.abort()


class _Body:
    """What is called by a parser that reads a body alone."""

    def __init__(self, protocol: Protocol) -> None:
        self.on_body = protocol.on_body
        self.on_message_complete = protocol.on_message_complete


def edge(app: App, body_timeout: float) -> App:
    """ASGI middleware: its requests' bodies have a deadline in seconds, and what the application
    raises is answered.
    """

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        deadline = asyncio.get_running_loop().time() + body_timeout
        is_read = False

        async def receive_in_time() -> MutableMapping[str, Any]:
            nonlocal is_read
            if is_read:
                return await receive()
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                raise RequestTimeout("The request's body did not arrive in time.") from None
            is_read = not message.get("more_body")
            return message

        try:
            await app(scope, receive_in_time, send)
        except Exception as failure:  # noqa: BLE001 - a fault of Weir's must affect one client only
            error = (
                failure if isinstance(failure, ProxyError) else ProxyError("Internal server error.")
            )
            if error is not failure:
                _log.exception("the application failed")
            # Where an answer has begun, uvicorn takes a second one for an error, and closes the
            # connection.
            response = Response(error.body(), error.status, media_type="application/json")
            response.raw_headers += error.headers()
            await response(scope, receive, send)

    return answer


class Server(uvicorn.Server):
    """uvicorn's server: readiness fails for a while before it stops; what is open at the end of the
    grace period is cut.
    """

    def __init__(
        self, app: App, limits: ServerLimits, lifespan: Literal["on", "off"] = "on", port: int = 0
    ) -> None:
        config = uvicorn.Config(
            edge(app, limits.body_timeout),
            port=port,
            http=partial(Protocol, limits=limits),  # type: ignore[arg-type]  # which makes one
            ws="none",
            loop="uvloop",
            lifespan=lifespan,
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            limit_concurrency=limits.connections,
            timeout_keep_alive=limits.keep_alive,  # type: ignore[arg-type]  # fractions of a second as well
            timeout_graceful_shutdown=limits.grace + limits.farewell,  # type: ignore[arg-type]
        )
        super().__init__(config)
        self.limits = limits
        self.stopping = Shutdown()
        self.interrupted = False

    @property
    def port(self) -> int:
        return int(self.servers[0].sockets[0].getsockname()[1])

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self.lifespan.state["shutdown"] = self.stopping
        await super().startup(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002 - a signal handler's signature
        """Stops gracefully, or at once at the second signal; the process then ends with
        status 0.
        """
        self.force_exit = self.should_exit
        self.interrupted = self.interrupted or sig == signal.SIGINT
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.stopping.draining.set()
        for _ in range(int(self.limits.drain / CHECKED_EVERY)):
            # Ctrl-C comes from its terminal: no balancer has to notice
            if self.interrupted or self.force_exit:
                break
            await asyncio.sleep(CHECKED_EVERY)
        await self._stop_listening(sockets or [])
        cutting = asyncio.get_running_loop().call_later(self.limits.grace, self.stopping.cut_now)
        await super().shutdown(sockets)
        cutting.cancel()

    async def _stop_listening(self, sockets: list[socket.socket]) -> None:
        """Close the listening sockets without resetting a connection that a client has made.

        The kernel has accepted connections that the loop has not, and closing would reset them; so
        they are taken first, by a copy of each socket. uvicorn then closes connections without a
        request: those that are new have time to send theirs.
        """
        listeners = [
            socket.fromfd(each.fileno(), each.family, each.type)
            for server in self.servers
            for each in server.sockets
        ]
        for server in self.servers:
            server.close()
        for each in sockets:
            each.close()
        accepted = [connection for each in listeners for connection in _last_of(each)]
        loop = asyncio.get_running_loop()
        for connection in accepted:
            await loop.connect_accepted_socket(self._protocol, connection)
        await asyncio.sleep(0 if self.force_exit else CHECKED_EVERY)

    def _protocol(self) -> asyncio.Protocol:
        kind: Any = self.config.http_protocol_class
        made: asyncio.Protocol = kind(
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        return made


def _last_of(listener: socket.socket) -> list[socket.socket]:
    """The connections that wait to be accepted; the socket is closed."""
    found: list[socket.socket] = []
    listener.settimeout(0)
    with (
        listener,
        suppress(OSError),
    ):  # there is no other, or no descriptor is left: it stops anyway
        while True:
            found.append(listener.accept()[0])
    return found


@asynccontextmanager
async def serve(
    app: App, *, limits: ServerLimits = ServerLimits(), lifespan: Literal["on", "off"] = "on"
) -> AsyncIterator[Server]:
    """A server in this loop, on a free port of the loopback interface."""
    server = Server(app, limits, lifespan)
    server.config.load()
    server.lifespan = server.config.lifespan_class(server.config)
    await server.startup()
    ticking = asyncio.create_task(server.main_loop())
    try:
        yield server
    finally:
        ticking.cancel()
        await asyncio.wait([ticking])
        await server.shutdown()


def run(app: App, *, sockets: list[socket.socket], limits: ServerLimits = ServerLimits()) -> int:
    """Serve until a signal; 0, or 1 if the application could not be started."""
    server = Server(app, limits)
    try:
        server.run(sockets)
    except SystemExit:
        return 1
    return 0 if server.started else 1
