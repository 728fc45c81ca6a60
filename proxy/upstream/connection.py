"""HTTP/1.1 connections to upstreams, in pools.

Nothing is added to a request but its framing, bytes that nobody asked for close a connection, an answer that was broken
off never looks complete, and a pooled connection that the upstream had closed already is told from one that failed.
"""

import asyncio
import contextlib
import functools
import select
import socket
import ssl
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from itertools import islice
from typing import Any, Generic, NamedTuple, TypeVar, cast

import httptools
from aiohappyeyeballs import start_connection

K = TypeVar("K")
V = TypeVar("V")
KEEP_ALIVE = 15.0
MAX_HEAD = 1 << 18
MAX_FIELDS = 128
READ_AHEAD = 1 << 18
MAX_POOLS = 256
SECOND_ADDRESS_AFTER = 0.25  # RFC 8305 section 8


class ConnectTimeout(Exception):
    """No connection was there in time."""


class NotHTTP(Exception):
    """What came is not HTTP/1.1."""


class BrokenOff(Exception):
    """The connection ended before the answer did."""


class StaleConnection(BrokenOff):
    """A pooled connection was closed by the upstream before a byte of the answer."""


class Origin(NamedTuple):
    """Where connections go; ``named`` is the Host header."""

    host: str
    port: int
    is_tls: bool
    named: bytes


class Response:
    """One answer as it arrives: ``begun`` is done with its head, ``ended`` true once all of its body is here."""

    __slots__ = ("_error", "_parts", "_waiter", "begun", "connection", "ended", "has_body", "headers", "size", "status")

    def __init__(self, connection: "UpstreamConnection", *, has_body: bool) -> None:
        self.connection: UpstreamConnection | None = connection
        self.begun: asyncio.Future[None] = connection.loop.create_future()
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.has_body = has_body
        self.ended = False
        self.size = 0
        self._parts: list[bytes] = []
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    def take(self) -> bytes:
        """What has come of the body and was not taken yet."""
        parts, self._parts, self.size = self._parts, [], 0
        if self.connection is not None and self.connection.is_paused:
            self.connection.go_on()
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def read(self) -> bytes:
        """What has come, or comes next; empty at the end. Raises what broke the answer off."""
        while not self._parts:
            if self._error is not None:
                raise self._error
            if self.ended or self.connection is None:
                return b""
            self._waiter = self.connection.loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self.take()

    def feed(self, data: bytes) -> None:
        self._parts.append(data)
        self.size += len(data)
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def end(self) -> None:
        self.ended = True
        self._wake()

    def fail(self, error: Exception) -> None:
        """Break the answer off; its connection is of no more use."""
        connection, self.connection = self.connection, None
        if self.ended or self._error is not None:
            return
        self._error = error
        if not self.begun.done():
            self.begun.set_exception(error)
        self._wake()
        if connection is not None:
            connection.abort()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    @property
    def is_delimited(self) -> bool:
        """Whether its head says where it ends: else the end of the connection does (RFC 9112 6.3)."""
        named = {name.lower(): value.lower() for name, value in self.headers}
        return named.get(b"transfer-encoding", b"").endswith(b"chunked") or b"content-length" in named


class UpstreamConnection(asyncio.Protocol):
    """A connection, with the answer that it is busy with."""

    def __init__(self, pool: "Pool") -> None:
        self.loop = pool.loop
        self.response: Response | None = None
        self.used = self.heard = False
        self.free_since = 0.0
        self._pool = pool
        self._parser = self._new_parser()
        self._is_interim = self._has_surplus = self.is_paused = False
        self._head_bytes = 0
        self._upload: asyncio.Task[None] | None = None
        self._writable: asyncio.Future[None] | None = None
        self._waiting = select.poll()

    def _new_parser(self) -> httptools.HttpResponseParser:
        parser = httptools.HttpResponseParser(self)
        parser.set_dangerous_leniencies(
            lenient_headers=True, lenient_optional_cr_before_lf=True, lenient_spaces_after_chunk_size=True
        )
        return parser

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        wire: socket.socket = transport.get_extra_info("socket")
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._waiting.register(wire.fileno(), select.POLLIN)
        self._pool.open.add(self)

    # Sending

    def ask(self, head: bytes, body: bytes | AsyncIterator[bytes], *, has_body: bool, is_chunked: bool) -> Response:
        """Send a request, a streamed body in the background; ``has_body`` is false where an answer cannot have one."""
        response = self.response = Response(self, has_body=has_body)
        self.heard = False
        self._head_bytes = 0
        if isinstance(body, bytes):
            self._transport.writelines((head, body))
        else:
            self._transport.write(head)
            self._upload = self.loop.create_task(self._send(response, body, is_chunked=is_chunked))
        return response

    async def _send(self, response: Response, parts: AsyncIterator[bytes], *, is_chunked: bool) -> None:
        try:
            async for part in parts:
                if self._writable is not None:
                    await self._writable
                if part:
                    self._transport.write(b"%x\r\n%b\r\n" % (len(part), part) if is_chunked else part)
            if is_chunked:
                self._transport.write(b"0\r\n\r\n")
        except Exception as error:  # noqa: BLE001 - whatever ends the client's body ends the request, as what it is
            response.fail(error)
        finally:
            self._upload = None

    def pause_writing(self) -> None:
        self._writable = self.loop.create_future()

    def resume_writing(self) -> None:
        writable, self._writable = self._writable, None
        if writable is not None and not writable.done():
            writable.set_result(None)

    # Receiving

    def data_received(self, data: bytes) -> None:
        response = self.response
        if response is None:  # bytes that nobody asked for would open the next answer
            self.abort()
            return
        self.heard = True
        if not response.status:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._has_surplus = True
        except httptools.HttpParserError:
            self._has_surplus = True
            if not response.ended:
                response.fail(NotHTTP() if not response.status else BrokenOff())
                return
        if not response.status and self._head_bytes > MAX_HEAD:
            response.fail(NotHTTP())
        elif response.ended:
            self._rest(response)
        elif response.size > READ_AHEAD and not self.is_paused:
            self.is_paused = True
            self._transport.pause_reading()

    def on_message_begin(self) -> None:
        self._has_surplus = self.response is None or self.response.ended

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._has_surplus and self.response is not None and not self.response.status:  # else a trailer
            self.response.headers.append((name, value))

    def on_headers_complete(self) -> None:
        response, status = self.response, self._parser.get_status_code()
        if self._has_surplus or response is None:
            return
        self._is_interim = 100 <= status < 200 and status != 101
        if self._is_interim:
            response.headers.clear()
            return
        if len(response.headers) > MAX_FIELDS:
            response.fail(NotHTTP())
            return
        response.status = status
        if not response.has_body:  # the parser does not know, and would wait for the length that is stated
            self._complete(response)
        if not response.begun.done():
            response.begun.set_result(None)

    def on_body(self, body: bytes) -> None:
        if self.response is not None and not self.response.ended:
            self.response.feed(body)
        else:
            self._has_surplus = True

    def on_message_complete(self) -> None:
        response, was_interim, self._is_interim = self.response, self._is_interim, False
        if response is not None and not (was_interim or response.ended):
            self._complete(response)

    def _complete(self, response: Response) -> None:
        response.end()
        self._has_surplus = not self._parser.should_keep_alive()

    def go_on(self) -> None:
        """Read on after reading was held back."""
        self.is_paused = False
        self._transport.resume_reading()

    def _rest(self, response: Response) -> None:
        """The answer is over: wait for the next request, if nothing is left of this one."""
        self.response = response.connection = None
        if self._has_surplus or self._upload is not None or self._transport.get_write_buffer_size():
            self.abort()
            return
        if not response.has_body:
            self._parser = self._new_parser()
        if self.is_paused:
            self.go_on()
        self.used = True
        self._pool.put(self)

    # Ending

    @property
    def is_fresh(self) -> bool:
        """Whether it can take a request: not once bytes that nobody asked for, or its end, wait to be read."""
        return not self._transport.is_closing() and not self._waiting.poll(0)

    def abort(self) -> None:
        """End it at once."""
        self.response = None
        if self._upload is not None:
            self._upload.cancel()
        self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._pool.forget(self)
        self.resume_writing()
        if self._upload is not None:
            self._upload.cancel()
        response, self.response = self.response, None
        if response is None:
            return
        if response.status and exc is None and not response.is_delimited:
            response.end()  # a reset breaks also an answer that only the end of the connection delimits
        else:
            response.fail(StaleConnection() if self.used and not self.heard else BrokenOff())


class Pool:
    """The connections to one origin that may serve one owner's requests."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.open: set[UpstreamConnection] = set()
        self._idle: deque[UpstreamConnection] = deque()
        self._sweep: asyncio.TimerHandle | None = None

    @property
    def busy(self) -> bool:
        """Whether an answer is under way."""
        return len(self.open) > len(self._idle)

    @property
    def connections(self) -> tuple[int, int]:
        """How many are busy, and how many wait."""
        return len(self.open) - len(self._idle), len(self._idle)

    async def take(self, origin: Origin, seconds: float) -> UpstreamConnection:
        """The connection used last that is still good, or a new one.

        Raises ConnectTimeout after so many seconds, ``socket.gaierror``, ``ssl.SSLError``, OSError.
        """
        while self._idle:
            connection = self._idle.pop()
            if connection.is_fresh:
                return connection
            connection.abort()
        try:
            async with asyncio.timeout(seconds):
                return await self._connect(origin)
        except TimeoutError:
            raise ConnectTimeout from None

    async def _connect(self, origin: Origin) -> UpstreamConnection:
        found = await self.loop.getaddrinfo(origin.host, origin.port, type=socket.SOCK_STREAM)
        wire = await start_connection(found, happy_eyeballs_delay=SECOND_ADDRESS_AFTER, interleave=1, loop=self.loop)
        secured: dict[str, Any] = {"ssl": _tls(), "server_hostname": origin.host} if origin.is_tls else {}
        try:
            _, connection = await self.loop.create_connection(lambda: UpstreamConnection(self), sock=wire, **secured)
        except BaseException:
            wire.close()
            raise
        return connection

    def put(self, connection: UpstreamConnection) -> None:
        """Keep a connection for the next request, for some seconds."""
        connection.free_since = self.loop.time()
        self._idle.append(connection)
        if self._sweep is None:
            self._sweep = self.loop.call_later(KEEP_ALIVE, self._drop_old)

    def _drop_old(self) -> None:
        self._sweep, now = None, self.loop.time()
        while self._idle and (left := self._idle[0].free_since + KEEP_ALIVE - now) <= 0:
            self._idle.popleft().abort()
        if self._idle:
            self._sweep = self.loop.call_later(left, self._drop_old)

    def forget(self, connection: UpstreamConnection) -> None:
        self.open.discard(connection)
        with contextlib.suppress(ValueError):
            self._idle.remove(connection)

    def drop_idle(self) -> None:
        """Close the connections that wait: the next request opens one."""
        while self._idle:
            self._idle.pop().abort()

    async def close(self) -> None:
        """Close them all."""
        if self._sweep is not None:
            self._sweep.cancel()
        self._idle.clear()
        for connection in tuple(self.open):
            if connection.response is not None:
                connection.response.fail(BrokenOff())
            connection.abort()
        await asyncio.sleep(0)


@functools.cache
def _tls() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.set_alpn_protocols(["http/1.1"])
    return context


class Pools(Generic[K, V]):
    """Pools by owner; above 256 those used longest ago are closed, unless an answer is under way in them."""

    def __init__(
        self, *, make: Callable[[], V], busy: Callable[[V], bool], close: Callable[[V], Coroutine[Any, Any, None]]
    ) -> None:
        self._make = make
        self._busy = busy
        self._close = close
        self._pools: OrderedDict[K, V] = OrderedDict()
        self._closing: set[asyncio.Task[None]] = set()

    def of(self, owner: K) -> V:
        """The owner's pool, a new one if it has none."""
        pool = self._pools.get(owner)
        if pool is not None:
            self._pools.move_to_end(owner)
            return pool
        pool = self._pools[owner] = self._make()
        surplus = len(self._pools) - MAX_POOLS
        if surplus > 0:
            idle = (key for key, each in self._pools.items() if key != owner and not self._busy(each))
            for key in tuple(islice(idle, surplus)):
                task = asyncio.ensure_future(self._close(self._pools.pop(key)))
                self._closing.add(task)
                task.add_done_callback(self._closing.discard)
        return pool

    def __iter__(self) -> Iterator[V]:
        return iter(tuple(self._pools.values()))

    async def close(self) -> None:
        """Close them all."""
        pools = tuple(self._pools.values())
        self._pools.clear()
        for pool in pools:
            await self._close(pool)
        if self._closing:
            await asyncio.wait(self._closing)


class IdleWatch:
    """Calls ``end`` when a wait has gone on for ``seconds`` without a byte.

    ``since`` is the loop's time at which the wait under way began, None between two waits. ``received`` counts bytes
    that came without ending the wait.
    """

    __slots__ = ("_bytes", "_end", "_received", "_timer", "clock", "seconds", "since")

    def __init__(self, seconds: float, *, end: Callable[[], None], received: Callable[[], int] = int) -> None:
        self.seconds = seconds
        self.since: float | None = None
        self.clock = asyncio.get_running_loop().time
        self._end = end
        self._received = received
        self._bytes = 0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Watch from now on, if not already."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self.seconds, self._look)

    def stop(self) -> None:
        """Watch no longer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        now, count = self.clock(), self._received()
        if self.since is None or count != self._bytes:
            self._bytes = count
            self.since = None if self.since is None else now
        left = self.seconds if self.since is None else self.since + self.seconds - now
        if left > 0:
            self._timer = asyncio.get_running_loop().call_later(left, self._look)
        else:
            self._timer = None
            self._end()
