"""Connections to upstreams as aiohttp has them, changed where its own behaviour is not Weir's.

Nothing is added to a request, bytes that nobody asked for close a connection, an answer that was broken off never
looks complete, and a pooled connection that the upstream had closed already is told from one that failed.
"""

import asyncio
import functools
import select
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from itertools import islice
from typing import Any, Generic, TypeVar

import aiohttp
from aiohttp.abc import AbstractStreamWriter
from aiohttp.client_proto import ResponseHandler
from aiohttp.client_reqrep import ClientRequest
from aiohttp.connector import Connection
from aiohttp.payload import Payload
from multidict import CIMultiDict

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

    Bytes that come while no request is out belong to no one: they close it. ``told`` is called when something has come
    of the answer under way: bytes, its end, or what broke it.
    """

    idle = True
    used = False
    heard = False
    held = False
    told: Callable[[], None] | None = None

    def set_response_params(self, **params: Any) -> None:
        self.idle = False
        self.heard = False
        super().set_response_params(**params)

    def is_connected(self) -> bool:
        """Whether a request can take it: not while bytes that nobody asked for wait to be read."""
        transport = self.transport if super().is_connected() else None
        return transport is not None and not (self.used and self.idle and _has_come(transport))

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

    def resume_reading(self, resume_parser: bool = True) -> None:
        """As aiohttp's, which parses nothing and resumes what was not paused for each piece that is read."""
        if self.held:
            self.held = False
            super().resume_reading(resume_parser)

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


def _has_come(transport: asyncio.BaseTransport) -> bool:
    """Whether bytes, or the end, are in a transport's socket and wait to be read."""
    waiting = select.poll()
    waiting.register(transport.get_extra_info("socket").fileno(), select.POLLIN)
    return bool(waiting.poll(0))


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
    def update_auto_headers(self, skip_auto_headers: Any) -> None:  # noqa: ARG002 - aiohttp's signature
        self._skip_auto_headers = _NOTHING_ADDED


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

    def drop_idle(self) -> None:
        waiting = [wire for wires in self._conns.values() for wire, _ in wires]
        self._conns.clear()
        for wire in waiting:
            wire.close()


class RawBody(Payload):
    _autoclose = True

    def __init__(self, value: bytes) -> None:
        super().__init__(value, content_type="application/octet-stream")
        self._size = len(value)

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        return bytes(self._value).decode(encoding, errors)

    async def write(self, writer: AbstractStreamWriter) -> None:
        await writer.write(self._value)


class Pools(Generic[K, V]):
    def __init__(
        self, *, make: Callable[[], V], busy: Callable[[V], bool], close: Callable[[V], Coroutine[Any, Any, None]]
    ) -> None:
        self._make = make
        self._busy = busy
        self._close = close
        self._pools: OrderedDict[K, V] = OrderedDict()
        self._closing: set[asyncio.Task[None]] = set()

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
