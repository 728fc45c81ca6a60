"""One aiohttp session per credential, and what keeps its connections from mixing up answers or
passing off a broken one as complete.

Bytes that nobody requested close a connection, an answer that was broken off never looks complete,
and a pooled connection that the upstream had closed already is distinguished from one that failed.
"""

import asyncio
import contextlib
import functools
import math
import select
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from itertools import islice
from typing import Any, Generic, TypeVar, cast

import aiohttp
import msgspec
from aiohttp.client_proto import ResponseHandler
from aiohttp.connector import Connection
from aiohttp.http import StreamWriter

from proxy.config.values import UpstreamSettings
from proxy.errors import UpstreamTimeout

K = TypeVar("K")
V = TypeVar("V")
KEEP_ALIVE = 15.0
MAX_LINE = 1 << 17
READ_BUFFER = 1 << 17
MAX_POOLS = 256
MIN_SECRET_LEN = 6


class NoAnswer(aiohttp.ClientConnectionError):
    """The connection was closed before an answer. None of those after which aiohttp sends a GET
    once more by itself.
    """


class StaleConnection(NoAnswer):
    """It was a pooled one, and closed before a byte of the answer."""


class PooledConnection(ResponseHandler):
    """A connection that knows whether it has been used before and whether an answer has begun.

    aiohttp takes bytes that come while no request is out for the next answer; here they close the
    connection. ``waiting`` polls its socket for bytes, or the end, that are yet to be read;
    ``on_data`` is called when something of the answer under way has come: bytes, its end, or its
    failure.
    """

    idle = True
    used = False
    begun = False
    on_data: Callable[[], None] | None = None
    waiting: select.poll

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.waiting = select.poll()
        self.waiting.register(transport.get_extra_info("socket").fileno(), select.POLLIN)

    def is_connected(self) -> bool:
        return super().is_connected() and not (self.used and self.idle and self.waiting.poll(0))

    @property
    def is_held_back(self) -> bool:
        """Whether nothing is read of it for now, because what has come is yet to be taken."""
        return self._reading_paused

    @property
    def should_close(self) -> bool:
        """Also where not all has gone up that was to: the upstream has answered without
        reading it.
        """
        return super().should_close or (
            self.transport is not None and self.transport.get_write_buffer_size() > 0
        )

    def set_response_params(self, **params: Any) -> None:
        self.idle = False
        self.begun = False
        super().set_response_params(**params)

    def data_received(self, data: bytes) -> None:
        if data:
            if self.idle:
                self.abort()
                return
            self.begun = True
        super().data_received(data)
        if data and self.on_data is not None:
            self.on_data()

    def resume_reading(self, resume_parser: bool = True) -> None:  # noqa: FBT001, FBT002 - aiohttp's signature
        """Only what was paused: aiohttp parses nothing, and resumes it, for each piece that is
        read.
        """
        if self._reading_paused:
            super().resume_reading(resume_parser)

    def set_exception(self, exc: BaseException, *cause: Any) -> None:
        """An error ends also the body under way, which aiohttp leaves waiting after an illegal
        chunk.
        """
        if isinstance(exc, aiohttp.ServerDisconnectedError | aiohttp.ClientOSError):
            exc = StaleConnection() if self.used and not self.begun else NoAnswer()
        super().set_exception(exc, *cause)
        self._break(exc)

    def connection_lost(self, exc: BaseException | None) -> None:
        """A reset breaks also an answer that only the end of the connection delimits; aiohttp takes
        it for the end.
        """
        if exc is not None:
            self._break(exc)
        super().connection_lost(exc)
        if self.on_data is not None:
            self.on_data()

    def _break(self, exc: BaseException) -> None:
        payload = self._payload
        if payload is not None and not payload.is_eof() and payload.exception() is None:
            payload.set_exception(
                exc if isinstance(exc, TimeoutError) else aiohttp.ClientPayloadError("broken off")
            )
        if self.on_data is not None:
            self.on_data()


class Outgoing(msgspec.Struct, frozen=True):
    """A request as it is sent.

    head: All lines of it and the empty one.
    body: As a whole, or as it streams in.
    length: Of a streamed body, bytes; None where it is chunked.
    """

    head: bytes
    body: bytes | AsyncIterator[bytes]
    length: int | None = None


class OutgoingRequest(aiohttp.ClientRequest):
    """A request of the session's whose ``data`` is an :class:`Outgoing`, sent as it is.

    aiohttp's headers are text, which it sends as UTF-8; those of a client may be any bytes. A whole
    body goes with them in one call of the system, where aiohttp starts a task: with that, a small
    request costs a tenth more calls.
    """

    outgoing: Outgoing

    def update_body_from_data(self, body: Any, _stacklevel: int = 3) -> None:
        self.outgoing = body

    async def send(self, conn: Connection) -> aiohttp.ClientResponse:
        protocol = conn.protocol
        assert protocol is not None  # noqa: S101 - a connection that was just opened, or taken from its pool
        writer = StreamWriter(protocol, self.loop)
        head = self.outgoing.head
        body = self.outgoing.body
        upload = None
        if protocol.transport is not None:  # or it was closed at once: reading says why
            if isinstance(body, bytes):
                protocol.transport.writelines((head, body) if body else (head,))
            else:
                protocol.transport.write(head)
                upload = asyncio.create_task(self._upload(conn, writer, body))
        return aiohttp.ClientResponse(
            self.method,
            self.original_url,
            writer=upload,
            continue100=None,
            timer=self._timer,
            request_info=self.request_info,
            traces=[],
            loop=self.loop,
            session=self._session,
            stream_writer=writer,
        )

    async def _upload(
        self, conn: Connection, writer: StreamWriter, parts: AsyncIterator[bytes]
    ) -> None:
        """Send a body as it streams in; what ends it too early is raised where the answer is
        awaited.
        """
        writer.length = self.outgoing.length
        writer.chunked = writer.length is None
        try:
            async for part in parts:
                if part:
                    await writer.write(part)
            await writer.write_eof()
        except Exception as error:  # noqa: BLE001 - raised where the answer is awaited
            if conn.protocol is not None:
                conn.protocol.set_exception(error)
        except asyncio.CancelledError:
            conn.close()
            raise


class Connector(aiohttp.TCPConnector):
    def __init__(self) -> None:
        super().__init__(limit=0, keepalive_timeout=KEEP_ALIVE, ttl_dns_cache=30)
        self._factory = functools.partial(PooledConnection, loop=self._loop)  # type: ignore[assignment]

    def _release(self, key: Any, protocol: Any, *, should_close: bool = False) -> None:
        protocol.idle = True
        protocol.used = True
        super()._release(key, protocol, should_close=should_close)

    @property
    def connections(self) -> tuple[int, int]:
        return len(self._acquired), sum(map(len, self._conns.values()))

    def drop_idle(self) -> None:
        waiting = [
            connection for connections in self._conns.values() for connection, _ in connections
        ]
        self._conns.clear()
        for connection in waiting:
            connection.close()


class Pool:
    """The session, and with it the connections, of one origin and one tenant's credential."""

    def __init__(self) -> None:
        self.connector = Connector()
        self.session = aiohttp.ClientSession(
            connector=self.connector,
            request_class=OutgoingRequest,
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            read_bufsize=READ_BUFFER,
            max_line_size=MAX_LINE,
            max_field_size=MAX_LINE,
        )

    @property
    def busy(self) -> bool:
        return self.connector.connections[0] > 0

    async def close(self) -> None:
        await self.session.close()


class Pools(Generic[K, V]):
    def __init__(
        self,
        *,
        make: Callable[[], V],
        busy: Callable[[V], bool],
        close: Callable[[V], Awaitable[None]],
    ) -> None:
        self._make = make
        self._busy = busy
        self._close = close
        self._pools: OrderedDict[K, V] = OrderedDict()
        self._closing: set[asyncio.Future[None]] = set()

    def of(self, owner: K) -> V:
        pool = self._pools.get(owner)
        if pool is not None:
            self._pools.move_to_end(owner)
            return pool
        pool = self._pools[owner] = self._make()
        surplus = len(self._pools) - MAX_POOLS
        if surplus > 0:
            idle = (
                key for key, each in self._pools.items() if key != owner and not self._busy(each)
            )
            for key in tuple(islice(idle, surplus)):
                task = asyncio.ensure_future(self._close(self._pools.pop(key)))
                self._closing.add(task)
                task.add_done_callback(self._closing.discard)
        return pool

    def __iter__(self) -> Iterator[V]:
        return iter(tuple(self._pools.values()))

    async def close(self) -> None:
        pools = tuple(self._pools.values())
        self._pools.clear()
        for pool in pools:
            await self._close(pool)
        if self._closing:
            await asyncio.wait(self._closing)


class StreamBroken(Exception): ...


class SecretMasker:
    """Takes a secret out of bytes on their way, length for length; of an error's body also where it
    is in two parts.
    """

    def __init__(self, secret: bytes, *, whole: bool) -> None:
        self._secret = secret
        self._stars = b"*" * len(secret)
        self._whole = whole
        self._held = b""

    def over(self, chunk: bytes) -> bytes:
        data = self._held + chunk if self._held else chunk
        if self._secret in data:
            data = data.replace(self._secret, self._stars)
        if not self._whole:
            return data
        sizes = range(min(len(self._secret) - 1, len(data)), 0, -1)
        kept = next((size for size in sizes if self._secret.startswith(data[-size:])), 0)
        self._held = data[len(data) - kept :]
        return data[: len(data) - kept]

    def end(self) -> bytes:
        held = self._held
        self._held = b""
        return held


class Answer(ABC):
    __slots__ = ("_rest", "ended", "headers", "status")

    def __init__(self, status: int, headers: tuple[tuple[bytes, bytes], ...]) -> None:
        self.status = status
        self.headers = headers
        self.ended = False
        self._rest = b""

    @abstractmethod
    def chunks(self) -> AsyncGenerator[bytes, None]:
        """The body as it arrives, or what :meth:`read` left of it.

        Raises UpstreamTimeout after ``idle`` seconds of silence, StreamBroken if it is cut off.
        """

    @abstractmethod
    def close(self) -> None: ...

    async def read(self, limit: int | None = None) -> bytes:
        """The body, or its first ``limit`` bytes: then ``ended`` is false and ``chunks`` goes on
        after them.

        Raises what ``chunks`` raises.
        """
        parts: list[bytes] = []
        size = 0
        async with contextlib.aclosing(self.chunks()) as chunks:
            async for chunk in chunks:
                parts.append(chunk)
                size += len(chunk)
                if limit is not None and size > limit:
                    break
        body = b"".join(parts)
        if limit is not None and size > limit:
            self._rest = body[limit:]
            body = body[:limit]
            self.ended = False
        return body


class HTTPAnswer(Answer):
    """An answer that came over a connection of Weir's own.

    ``hidden`` is the operator's key that the request was sent with: an upstream that shows it in
    its answer would show it to the client.
    """

    __slots__ = ("_masker", "_response", "_upstream")

    def __init__(
        self,
        response: aiohttp.ClientResponse,
        headers: tuple[tuple[bytes, bytes], ...],
        upstream: UpstreamSettings,
        hidden: bytes = b"",
    ) -> None:
        self._masker = None
        if len(hidden) >= MIN_SECRET_LEN:
            self._masker = SecretMasker(hidden, whole=response.status >= 400)
            if any(hidden in value for _, value in headers):
                headers = tuple((n, v.replace(hidden, b"*" * len(hidden))) for n, v in headers)
        super().__init__(response.status, headers)
        self._response = response
        self._upstream = upstream

    async def read(self, limit: int | None = None) -> bytes:
        content = self._response.content
        if (
            not content.is_eof()
            or content.exception()
            or self._rest
            or content.total_bytes > (limit or math.inf)
        ):
            return await super().read(limit)
        body = content.read_nowait()  # it is there as a whole, as most answers are with their head
        self.ended = True
        return body if self._masker is None else self._masker.over(body) + self._masker.end()

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        held: list[bytes] = []
        is_over = False
        while not is_over:
            is_over = await self.pour(held.append, bytes)
            if held:
                piece = b"".join(held)
                held.clear()
                yield piece

    async def pour(
        self, write: Callable[[bytes], bool | None], through: Callable[[bytes], bytes]
    ) -> bool:
        """Write what is left of the body, each piece in the callback that it comes in, without a
        turn of the loop.

        It goes ``through`` a function first. True when the body is over, False as soon as ``write``
        wants no more for now; then this is to be called again. Raises what ``chunks`` raises. With
        aiohttp's ``iter_any`` a stream costs a quarter more calls.
        """
        rest = self._rest
        self._rest = b""
        if rest and (piece := through(rest)) and not write(piece):
            return False
        content = self._response.content
        connection = self._response.connection
        wire = None if connection is None else cast("PooledConnection | None", connection.protocol)
        turn = asyncio.get_running_loop().create_future()

        def come() -> None:
            is_welcome = not turn.done()
            is_refilled = True
            try:
                while is_welcome and is_refilled and content.exception() is None:
                    # then reading may bring more at once
                    is_refilled = wire is not None and wire.is_held_back
                    is_welcome = self._hand_on(content.read_nowait(), write, through)
            except Exception as error:  # noqa: BLE001 - raised where the answer is awaited
                turn.set_exception(error)
            is_over = not is_welcome or content.is_eof() or content.exception() is not None
            if is_over and not turn.done():
                turn.set_result(None)

        come()
        if wire is not None:
            wire.on_data = come
        try:
            await turn
        finally:
            if wire is not None:
                wire.on_data = None
        if (error := content.exception()) is not None:
            raise self._broken(error) from error
        if not content.at_eof():
            return False
        if self._masker is not None and (held := through(self._masker.end())):
            write(held)
        self.ended = True
        return True

    def _hand_on(
        self, piece: bytes, write: Callable[[bytes], bool | None], through: Callable[[bytes], bytes]
    ) -> bool:
        """Whether more is welcome."""
        if piece and self._masker is not None:
            piece = self._masker.over(piece)
        if piece:
            piece = through(piece)
        return not piece or bool(write(piece))

    def _broken(self, error: BaseException) -> Exception:
        self.close()
        name = f"Upstream {self._upstream.name!r}"
        if isinstance(error, TimeoutError):
            return UpstreamTimeout(
                f"{name} sent nothing for {self._upstream.timeout.idle:g} seconds."
            )
        return StreamBroken(f"{name} broke off its answer.")

    def close(self) -> None:
        if self.ended:
            return
        connection = self._response.connection
        if connection is not None and connection.transport is not None:
            connection.transport.abort()  # what has not gone up yet is not sent
        self._response.close()
