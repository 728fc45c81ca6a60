"""Connections to upstreams as aiohttp has them, changed where its own behaviour is not Weir's, and answers over them.

Nothing is added to a request, bytes that nobody asked for close a connection, an answer that was broken off never
looks complete, and a pooled connection that the upstream had closed already is told from one that failed.
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
from aiohttp.client_proto import ResponseHandler
from aiohttp.client_reqrep import ClientRequest
from aiohttp.connector import Connection
from aiohttp.http import RawResponseMessage, StreamWriter
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.streams import StreamReader
from yarl import URL

from proxy.config.values import UpstreamSettings
from proxy.errors import UpstreamTimeout

K = TypeVar("K")
V = TypeVar("V")
KEEP_ALIVE = 15.0
MAX_LINE = 1 << 17
READ_BUFFER = 1 << 17
MAX_POOLS = 256
SWITCHING = 101
MIN_SECRET_LEN = 6


class StaleConnection(Exception):
    """A pooled connection was closed by the upstream before a byte of the answer."""


class PooledConnection(ResponseHandler):
    """A connection that knows whether it has been used before and whether an answer has begun.

    Bytes that come while no request is out belong to no one: they close it. ``waiting`` polls its socket for bytes, or
    the end, that are yet to be read; ``told`` is called when something of the answer under way has come: bytes, its
    end, or what broke it. ``due`` is when its head has to be there, by the loop's time.
    """

    idle = True
    used = False
    heard = False
    held = False
    told: Callable[[], None] | None = None
    due: float | None = None
    timer: asyncio.TimerHandle | None = None
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

    def wait_until(self, due: float) -> None:
        self.due = due
        if self.timer is not None and self.timer.when() > due:
            self.timer.cancel()
            self.timer = None
        self.timer = self.timer or self._loop.call_at(due, self._look)

    def _look(self) -> None:
        self.timer, due = None, self.due
        if due is not None and due > self._loop.time():
            self.wait_until(due)
        elif due is not None:
            self.set_exception(TimeoutError())

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
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
        if exc is not None:
            self._break()
        super().connection_lost(exc)
        if self.told is not None:
            self.told()


class PooledResponse:
    """The head of an answer, and its body as it comes; ``wire`` is its connection, until that is over or given up."""

    __slots__ = ("_connection", "_upload", "content", "raw_headers", "status", "wire")
    wire: PooledConnection | None

    def __init__(
        self,
        connection: Connection,
        wire: PooledConnection,
        answer: tuple[RawResponseMessage, StreamReader],
        upload: asyncio.Task[None] | None,
    ) -> None:
        message, self.content = answer
        self.status, self.raw_headers = message.code, message.raw_headers
        self.wire = wire
        self._connection, self._upload = connection, upload
        self.content.on_eof(self._release)

    def _release(self) -> None:
        wire, self.wire = self.wire, None
        if wire is None:
            return
        wire.rest()
        if self._upload is None or self._upload.done():
            self._connection.release()
        else:
            self._upload.cancel()
            self._connection.close()

    def close(self) -> None:
        """Nothing more of it is wanted; whoever waits for it is told, and its connection is gone."""
        wire, self.wire = self.wire, None
        if wire is not None and wire.transport is not None:
            wire.transport.abort()
        if self.content.exception() is None:
            self.content.set_exception(aiohttp.ClientConnectionError("closed here"))
        if self._upload is not None:
            self._upload.cancel()
        self._connection.close()
        if wire is not None and wire.told is not None:
            wire.told()


async def _upload(wire: PooledConnection, parts: AsyncIterator[bytes], length: int | None) -> None:
    """Send a body as it streams in; what ends it too early is what whoever waits for the answer gets to see."""
    writer = StreamWriter(wire, asyncio.get_running_loop())
    writer.length, writer.chunked = length, length is None
    try:
        async for part in parts:
            if part:
                await writer.write(part)
        await writer.write_eof()
    except Exception as error:  # noqa: BLE001 - raised by whoever waits
        wire.set_exception(error)


class Connector(aiohttp.TCPConnector):
    def __init__(self) -> None:
        super().__init__(limit=0, keepalive_timeout=KEEP_ALIVE, ttl_dns_cache=30)
        self._place: ClientRequest | None = None
        self._factory = functools.partial(PooledConnection, loop=self._loop)  # type: ignore[assignment]

    @property
    def busy(self) -> bool:
        return bool(self._acquired)

    @property
    def connections(self) -> tuple[int, int]:
        return len(self._acquired), sum(map(len, self._conns.values()))

    async def ask(
        self,
        origin: URL,
        head: bytes,
        body: bytes | AsyncIterator[bytes] = b"",
        *,
        patience: aiohttp.ClientTimeout,
        within: float,
        length: int | None = None,
        is_bodiless: bool = False,
    ) -> PooledResponse:
        """The answer's head; what ``ClientSession.request`` does, without all that Weir has none of.

        That is redirects, cookies, proxies, middleware, credentials in URLs, and second attempts of aiohttp's own.
        ``is_bodiless`` is an answer to a request for its head alone, ``length`` that of a ``body`` which streams in.
        Raises TimeoutError where there is none ``within`` so many seconds.
        """
        due = self._loop.time() + within
        if self._place is None or self._place.url != origin:
            self._place = ClientRequest("GET", origin, loop=self._loop)
        try:
            connection = await self.connect(self._place, [], patience)
        except TimeoutError as error:
            raise aiohttp.ConnectionTimeoutError(f"Connection timeout to host {origin}") from error
        wire, upload = cast("PooledConnection", connection.protocol), None
        try:
            wire.set_response_params(
                skip_payload=is_bodiless,
                read_until_eof=True,
                auto_decompress=False,
                read_bufsize=READ_BUFFER,
                max_line_size=MAX_LINE,
                max_field_size=MAX_LINE,
            )
            if wire.transport is not None:  # or it was closed at once: reading says why
                if isinstance(body, bytes):
                    wire.transport.writelines((head, body) if body else (head,))  # in one call of the system
                else:
                    wire.transport.write(head)
                    upload = asyncio.create_task(_upload(wire, body, length))
            wire.wait_until(due)
            answer = await _final(wire)
            wire.due = None
            return PooledResponse(connection, wire, answer, upload)
        except BaseException:
            if upload is not None:
                upload.cancel()
            connection.close()
            raise

    def drop_idle(self) -> None:
        waiting = [wire for wires in self._conns.values() for wire, _ in wires]
        self._conns.clear()
        for wire in waiting:
            wire.close()


async def _final(wire: PooledConnection) -> tuple[RawResponseMessage, StreamReader]:
    while True:
        try:
            answer = await wire.read()
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
            if wire.used and not wire.heard:
                raise StaleConnection from error
            raise
        except HttpProcessingError as error:  # which holds itself, by its traceback: nobody further up may stand in it
            raise aiohttp.ClientPayloadError("no HTTP") from error
        if not 100 <= answer[0].code < 200 or answer[0].code == SWITCHING:
            return answer


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
        """Begin a wait."""
        self.since = self.clock()
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self.seconds, self._look)

    def stop(self) -> None:
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


class StreamBroken(Exception): ...


class _Idle(Exception): ...


_BREAKS = (_Idle, aiohttp.ClientError, OSError)


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

    __slots__ = (
        *("_content", "_handing", "_masker", "_refilled", "_response", "_through", "_turn", "_upstream"),
        *("_watch", "_wire", "_write"),
    )
    _turn: asyncio.Future[None]
    _watch: IdleWatch | None
    _wire: PooledConnection | None
    _write: Callable[[bytes], bool | None]
    _through: Callable[[bytes], bytes]

    def __init__(
        self,
        response: PooledResponse,
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
        self._content = response.content
        self._handing = self._refilled = False
        self._upstream = upstream
        self._watch = None

    async def read(self, limit: int | None = None) -> bytes:
        content = self._content
        if not content.is_eof() or content.exception() or self._rest or content.total_bytes > (limit or math.inf):
            return await super().read(limit)
        body, self.ended = content.read_nowait(), True  # it is there as a whole, as most answers are with their head
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

    async def pour(self, write: Callable[[bytes], bool | None], through: Callable[[bytes], bytes]) -> bool:
        """Write what is left of the body, each piece in the callback that it comes in, without a turn of the loop.

        It goes ``through`` a function first. True when the body is over, False as soon as ``write`` wants no more for
        now; then this is to be called again. Raises what ``chunks`` raises.
        """
        rest, self._rest = self._rest, b""
        if rest and (piece := through(rest)) and not write(piece):
            return False
        self._write, self._through = write, through
        self._wire = wire = self._response.wire
        self._turn = turn = asyncio.get_running_loop().create_future()
        if wire is not None:
            wire.told = self._come
        self._come()
        try:
            if not turn.done():
                if wire is None or not wire.connected:
                    raise aiohttp.ClientConnectionError("closed here")
                fall_silent = functools.partial(_fall_silent, self._response)
                self._watch = self._watch or IdleWatch(self._upstream.timeout.idle, end=fall_silent)
                self._watch.start()
                await turn
            turn.result()
        except _BREAKS as error:
            raise self._broken(error) from error
        finally:
            if self._watch is not None:
                self._watch.since = None
            self._turn_away()
            del self._write, self._through  # which lead to whoever holds this answer
        if not self._content.at_eof():
            return False
        if self._masker is not None and (held := through(self._masker.end())):
            write(held)
        self.ended = True
        self._stop_watch()
        return True

    def _come(self) -> None:
        if self._handing or self._turn.done():
            self._refilled = True
            return
        self._handing = True
        try:
            if self._hand_on():
                if self._watch is not None:
                    self._watch.since = self._watch.clock()
            else:
                self._turn.set_result(None)
        except Exception as error:  # noqa: BLE001 - raised by whoever waits
            self._turn.set_exception(error)
        self._handing = False
        if self._turn.done():
            self._turn_away()

    def _hand_on(self) -> bool:
        """Whether more is to come, and welcome. Room that is made may bring at once what aiohttp had held back."""
        self._refilled = True
        while self._refilled:
            self._refilled = False
            piece = self._content.read_nowait()
            if piece and self._masker is not None:
                piece = self._masker.over(piece)
            if piece and (piece := self._through(piece)) and not self._write(piece):
                return False
        return not self._content.is_eof()

    def _turn_away(self) -> None:
        if self._wire is not None and self._wire.told == self._come:
            self._wire.told = None

    def _broken(self, error: Exception) -> Exception:
        self.close()
        name, idle = f"Upstream {self._upstream.name!r}", self._upstream.timeout.idle
        if isinstance(error, _Idle):
            return UpstreamTimeout(f"{name} sent nothing for {idle:g} seconds.")
        return StreamBroken(f"{name} broke off its answer.")

    def close(self) -> None:
        if not self.ended:
            self._stop_watch()
            self._response.close()

    def _stop_watch(self) -> None:
        if self._watch is not None:
            self._watch.stop()


def _fall_silent(response: PooledResponse) -> None:
    response.content.set_exception(_Idle())
    if response.wire is not None and response.wire.told is not None:
        response.wire.told()
