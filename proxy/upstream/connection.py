"""aiohttp's connections, changed where an answer could otherwise be taken for another's or for whole, and answers.

Bytes that nobody asked for close a connection, an answer that was broken off never looks complete, and a pooled
connection that the upstream had closed already is told from one that failed.
"""

import asyncio
import contextlib
import functools
import math
import select
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from itertools import islice
from typing import Any, Generic, TypeVar, cast

import aiohttp
from aiohttp.client_proto import ResponseHandler
from aiohttp.http import RawResponseMessage
from aiohttp.streams import StreamReader

from proxy.config.values import UpstreamSettings
from proxy.errors import UpstreamTimeout

K = TypeVar("K")
V = TypeVar("V")
KEEP_ALIVE = 15.0
MAX_POOLS = 256
MIN_SECRET_LEN = 6


class StaleConnection(aiohttp.ServerDisconnectedError):
    """A pooled connection was closed by the upstream before a byte of the answer."""


class PooledConnection(ResponseHandler):
    """A connection that knows whether it has been used before and whether an answer has begun.

    aiohttp takes bytes that come while no request is out for the next answer; here they close the connection.
    ``waiting`` polls its socket for bytes, or the end, that are yet to be read.
    """

    idle = True
    used = False
    begun = False
    waiting: select.poll

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.waiting = select.poll()
        self.waiting.register(transport.get_extra_info("socket").fileno(), select.POLLIN)

    def is_connected(self) -> bool:
        return super().is_connected() and not (self.used and self.idle and self.waiting.poll(0))

    @property
    def should_close(self) -> bool:
        """Also where not all has gone up that was to: the upstream has answered without reading it."""
        return super().should_close or (self.transport is not None and self.transport.get_write_buffer_size() > 0)

    def set_response_params(self, **params: Any) -> None:
        self.idle = False
        self.begun = False
        super().set_response_params(**params)

    def data_received(self, data: bytes) -> None:
        if data and self.idle:
            self.abort()
            return
        self.begun = self.begun or bool(data)
        super().data_received(data)

    async def read(self) -> tuple[RawResponseMessage, StreamReader]:
        try:
            return await super().read()
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
            if self.used and not self.begun:
                raise StaleConnection from error
            raise

    def set_exception(self, exc: BaseException, *cause: Any) -> None:
        """An error ends also the body under way, which aiohttp leaves waiting after an illegal chunk."""
        super().set_exception(exc, *cause)
        self._break(exc)

    def connection_lost(self, exc: BaseException | None) -> None:
        """A reset breaks also an answer that only the end of the connection delimits; aiohttp takes it for the end."""
        if exc is not None:
            self._break(exc)
        super().connection_lost(exc)

    def _break(self, exc: BaseException) -> None:
        payload = self._payload
        if payload is not None and not payload.is_eof() and payload.exception() is None:
            payload.set_exception(exc if isinstance(exc, TimeoutError) else aiohttp.ClientPayloadError("broken off"))


class Connector(aiohttp.TCPConnector):
    def __init__(self) -> None:
        super().__init__(limit=0, keepalive_timeout=KEEP_ALIVE, ttl_dns_cache=30)
        self._factory = functools.partial(PooledConnection, loop=self._loop)  # type: ignore[assignment]

    @property
    def connections(self) -> tuple[int, int]:
        return len(self._acquired), sum(map(len, self._conns.values()))

    def _release(self, key: Any, protocol: ResponseHandler, *, should_close: bool = False) -> None:
        connection = cast("PooledConnection", protocol)
        connection.idle = True
        connection.used = True
        super()._release(key, protocol, should_close=should_close)

    def drop_idle(self) -> None:
        waiting = [connection for connections in self._conns.values() for connection, _ in connections]
        self._conns.clear()
        for connection in waiting:
            connection.close()


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


class StreamBroken(Exception): ...


class SecretMasker:
    """Takes a secret out of bytes on their way, length for length; of an error's body also where it is in two parts."""

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
        held, self._held = self._held, b""
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
        """The body, or its first ``limit`` bytes: then ``ended`` is false and ``chunks`` goes on after them.

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
            self._rest, body = body[limit:], body[:limit]
            self.ended = False
        return body


class HTTPAnswer(Answer):
    """An answer that came over a connection of Weir's own.

    ``hidden`` is the operator's key that the request was sent with: an upstream that shows it in its answer would
    show it to the client.
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
        if not content.is_eof() or content.exception() or self._rest or content.total_bytes > (limit or math.inf):
            return await super().read(limit)
        body = content.read_nowait()  # it is there as a whole, as most answers are with their head
        self.ended = True
        return body if self._masker is None else self._masker.over(body) + self._masker.end()

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        rest, self._rest = self._rest, b""
        if rest:
            yield rest
        content = self._response.content
        try:
            while piece := await content.readany():
                if self._masker is not None:
                    piece = self._masker.over(piece)
                if piece:
                    yield piece
        except (aiohttp.ClientError, OSError) as error:
            self.close()
            name = f"Upstream {self._upstream.name!r}"
            if isinstance(error, TimeoutError):
                silence = f"{name} sent nothing for {self._upstream.timeout.idle:g} seconds."
                raise UpstreamTimeout(silence) from error
            raise StreamBroken(f"{name} broke off its answer.") from error
        if self._masker is not None and (held := self._masker.end()):
            yield held
        self.ended = True

    def close(self) -> None:
        if self.ended:
            return
        connection = self._response.connection
        if connection is not None and connection.transport is not None:
            connection.transport.abort()  # what has not gone up yet is not sent
        self._response.close()
