"""Connections to upstreams as aiohttp has them, changed where its own behaviour is not Weir's.

Nothing is added to a request, bytes that nobody asked for close a connection, an answer that was broken off never
looks complete, and a pooled connection that the upstream had closed already is told from one that failed.
"""

import asyncio
import functools
import select
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from itertools import islice
from typing import Any, Generic, TypeVar

import aiohttp
from aiohttp.client_proto import ResponseHandler
from aiohttp.client_reqrep import ClientRequest
from aiohttp.connector import Connection
from multidict import CIMultiDict
from yarl import URL

K = TypeVar("K")
V = TypeVar("V")
KEEP_ALIVE = 15.0
MAX_LINE = 1 << 17
READ_BUFFER = 1 << 17
MAX_POOLS = 256
_NOTHING_ADDED: CIMultiDict[None] = CIMultiDict([("Content-Type", None)])


class StaleConnection(Exception):
    """A pooled connection was closed by the upstream before a byte of the answer."""


class PooledConnection(ResponseHandler):
    """A connection that knows whether it has been used before and whether an answer has begun.

    Bytes that come while no request is out belong to no one: they close it. ``waiting`` polls its socket for bytes, or
    the end, that are yet to be read; ``told`` is called when something of the answer under way has come: bytes, its
    end, or what broke it.
    """

    idle = True
    used = False
    heard = False
    held = False
    told: Callable[[], None] | None = None
    waiting: select.poll

    def set_response_params(self, **params: Any) -> None:
        self.idle = False
        self.heard = False
        super().set_response_params(**params)

    def is_connected(self) -> bool:
        """Whether a request can take it: not while bytes that nobody asked for wait to be read."""
        transport = self.transport if super().is_connected() else None
        return transport is not None and not (self.used and self.idle and self.waiting.poll(0))

    @property
    def should_close(self) -> bool:
        """Also where not all has gone up that was to: the upstream has answered without reading it."""
        return super().should_close or (self.transport is not None and self.transport.get_write_buffer_size() > 0)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.waiting = select.poll()
        self.waiting.register(transport.get_extra_info("socket").fileno(), select.POLLIN)

    def rest(self) -> None:
        self.idle = True
        self.used = True

    def data_received(self, data: bytes) -> None:
        if data:
            if self.idle:
                self.abort()
                return
            self.heard = True
        super().data_received(data)
        if self.told is not None:
            self.told()

    def pause_reading(self) -> None:
        self.held = True
        super().pause_reading()

    def resume_reading(self, *how: Any, **named: Any) -> None:
        """Only what was paused: aiohttp parses nothing, and resumes it, for each piece that is read."""
        if self.held:
            self.held = False
            super().resume_reading(*how, **named)

    def set_exception(self, exc: BaseException, *cause: Any) -> None:
        """An error ends also the body under way, which aiohttp leaves waiting after an illegal chunk."""
        super().set_exception(exc, *cause)
        self._break()
        if self.told is not None:
            self.told()

    def _break(self) -> None:
        payload = self._payload
        if payload is not None and not payload.is_eof() and payload.exception() is None:
            payload.set_exception(aiohttp.ClientPayloadError("broken off"))

    def connection_lost(self, exc: BaseException | None) -> None:
        """A reset breaks also an answer that only the end of the connection delimits; aiohttp takes it for the end."""
        if exc is not None:
            self._break()
        super().connection_lost(exc)
        if self.told is not None:
            self.told()


class PooledResponse(aiohttp.ClientResponse):
    async def start(self, connection: Connection) -> aiohttp.ClientResponse:
        wire = connection.protocol
        try:
            await super().start(connection)
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
            if isinstance(wire, PooledConnection) and wire.used and not wire.heard:
                raise StaleConnection from error
            raise
        if isinstance(wire, PooledConnection):
            self.content.on_eof(wire.rest)
        return self


class BareRequest(ClientRequest):
    """A request with the fields that it is given, ``Host`` among them, and nothing of aiohttp's.

    A body that is there as a whole is written behind the head at once, without a task and a payload.
    """

    whole = b""

    def update_headers(self, headers: Any) -> None:
        self.headers = headers

    def update_auto_headers(self, skip_auto_headers: Any) -> None:  # noqa: ARG002 - aiohttp's signature
        self._skip_auto_headers = _NOTHING_ADDED

    def update_body_from_data(self, body: Any, *more: Any) -> None:
        if isinstance(body, bytes) and body:
            self.whole = body
            self.headers["Content-Length"] = str(len(body))
        else:
            super().update_body_from_data(body or None, *more)

    async def send(self, conn: Connection) -> aiohttp.ClientResponse:
        response = await super().send(conn)
        wire = conn.protocol
        if self.whole and wire is not None and wire.transport is not None:
            wire.transport.write(self.whole)
        return response


class Connector(aiohttp.TCPConnector):
    def __init__(self) -> None:
        super().__init__(limit=0, keepalive_timeout=KEEP_ALIVE, ttl_dns_cache=30)
        self._factory = functools.partial(PooledConnection, loop=self._loop)  # type: ignore[assignment]

    @property
    def busy(self) -> bool:
        return bool(self._acquired)

    @property
    def connections(self) -> tuple[int, int]:
        return len(self._acquired), sum(map(len, self._conns.values()))

    async def ask(
        self, method: str, url: URL, fields: CIMultiDict[str], body: Any, *, patience: aiohttp.ClientTimeout
    ) -> aiohttp.ClientResponse:
        """The answer's head; what ``ClientSession.request`` does, without all that Weir has none of.

        That is redirects, cookies, proxies, middleware, credentials in URLs, and second attempts of aiohttp's own.
        """
        request = BareRequest(method, url, headers=fields, data=body, loop=self._loop, response_class=PooledResponse)
        try:
            connection = await self.connect(request, [], patience)
        except TimeoutError as error:
            raise aiohttp.ConnectionTimeoutError(f"Connection timeout to host {url}") from error
        try:
            assert connection.protocol is not None  # noqa: S101 - it was opened just now
            connection.protocol.set_response_params(
                skip_payload=method == "HEAD",
                read_until_eof=True,
                auto_decompress=False,
                read_bufsize=READ_BUFFER,
                max_line_size=MAX_LINE,
                max_field_size=MAX_LINE,
            )
            response = await request.send(connection)
            try:
                return await response.start(connection)
            except BaseException:
                response.close()
                raise
        except BaseException:
            connection.close()
            raise

    def drop_idle(self) -> None:
        waiting = [wire for wires in self._conns.values() for wire, _ in wires]
        self._conns.clear()
        for wire in waiting:
            wire.close()


class Pools(Generic[K, V]):
    def __init__(
        self, *, make: Callable[[], V], busy: Callable[[V], bool], close: Callable[[V], Awaitable[None]]
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
            idle = (key for key, each in self._pools.items() if key != owner and not self._busy(each))
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


class Upload:
    """A body that streams in; keeps the error that ended it, which aiohttp would turn into one of its own."""

    def __init__(self, parts: AsyncIterator[bytes]) -> None:
        self._parts = parts
        self.failure: Exception | None = None

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            async for part in self._parts:
                if part:
                    yield part
        except Exception as error:
            self.failure = error
            raise
