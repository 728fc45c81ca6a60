"""The upstream's edge: aiohttp, in pools that no two credentials share, with deadlines and nothing of its own added.

A pool belongs to one origin and one tenant's credential, so that bytes which an upstream writes after the end of an
answer can never open another tenant's. Within a pool such bytes close the connection.
"""

import asyncio
import contextlib
import functools
import re
import select
import time
import urllib.parse
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp.abc import AbstractStreamWriter
from aiohttp.client_proto import ResponseHandler
from aiohttp.client_reqrep import ClientRequest
from aiohttp.connector import Connection
from aiohttp.payload import AsyncIterablePayload, Payload
from multidict import CIMultiDict
from yarl import URL

from proxy.errors import InvalidRequest, ProxyError, UpstreamTimeout, UpstreamUnreachable

Headers = Sequence[tuple[bytes, bytes]]

_NEVER = float("inf")
_POOLS = 256
_KEEP_ALIVE = 15.0
_STALE_WITHIN = 1.0
_READ_BUFFER = 1 << 17
_LINE = 1 << 17
_SHORTEST_SECRET = 6
_HOP_BY_HOP = frozenset(
    {b"connection", b"keep-alive", b"te", b"trailer", b"trailers", b"transfer-encoding", b"upgrade"},
)
_PRIVATE = (b"proxy-", b"x-weir-", b"uberctx-")
_NOT_COPIED = _HOP_BY_HOP | {b"host", b"content-length", b"expect", b"baggage"}
_CREDENTIALS = frozenset({b"authorization", b"api-key", b"x-api-key"})
_NOT_IN_NAME = re.compile(rb"[^!#$%&'*+.^_`|~0-9A-Za-z-]")
_NOT_IN_VALUE = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
# Also as nginx (an escaped slash) and servlet containers (parameters of a segment) come to see one.
_DOT_SEGMENT = re.compile(r"(?:^|[/\\]|%2f|%5c)(?:\.|%2e){1,2}(?:(?:;|%3b)[^/\\]*)?(?:[/\\]|%2f|%5c|$)", re.IGNORECASE)
_NOTHING_ADDED: CIMultiDict[None] = CIMultiDict([("Content-Type", None)])


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go, from the configuration alone; times in seconds.

    ``api_key`` None passes the client's own credential; ``auth`` is the header that it goes up in. ``connect`` ends at
    the TCP (and TLS) connection, ``first_byte`` at the answer's headers, ``idle`` is the longest silence inside an
    answer.
    """

    name: str
    base_url: str
    api_key: str | None = field(default=None, repr=False)
    auth: str = "bearer"
    connect: float = 5.0
    first_byte: float = 300.0
    idle: float = 120.0

    def __post_init__(self) -> None:
        if self.api_key is not None and not self.api_key.isprintable():
            raise ValueError(f"the api_key of upstream {self.name!r} holds a character that no header may hold")


class StreamBroken(Exception):
    """The upstream's answer ended before its end."""


class _Stale(Exception):
    """A pooled connection was closed by the upstream before a byte of the answer."""


class _Idle(Exception):
    """An answer fell silent."""


class _Wire(ResponseHandler):
    """A connection that knows whether it has been used before and whether an answer has begun.

    Bytes that come while no request is out belong to no one: they close it.
    """

    idle = True
    used = False
    heard = False

    def set_response_params(self, **params: Any) -> None:
        """Called by aiohttp when a request takes the connection."""
        self.idle = False
        self.heard = False
        super().set_response_params(**params)

    def is_connected(self) -> bool:
        """Whether a request can take it: not while bytes that nobody asked for wait to be read."""
        transport = self.transport if super().is_connected() else None
        return transport is not None and not (self.used and self.idle and _has_come(transport))

    def rest(self) -> None:
        """The answer is over and the connection back in its pool."""
        self.idle = True
        self.used = True

    def data_received(self, data: bytes) -> None:
        """Bytes of an answer (or, from aiohttp itself, none: go on with what is buffered)."""
        if data:
            if self.idle:
                self.abort()
                return
            self.heard = True
        super().data_received(data)

    def set_exception(self, exc: BaseException, *cause: Any) -> None:
        """An error ends also the body under way, which aiohttp leaves waiting after an illegal chunk."""
        super().set_exception(exc, *cause)
        self._break()

    def _break(self) -> None:
        payload = self._payload
        if payload is not None and not payload.is_eof() and payload.exception() is None:
            payload.set_exception(aiohttp.ClientPayloadError("broken off"))

    def connection_lost(self, exc: BaseException | None) -> None:
        """A reset breaks also an answer that only the end of the connection delimits; aiohttp takes it for the end."""
        if exc is not None:
            self._break()
        super().connection_lost(exc)


def _has_come(transport: asyncio.BaseTransport) -> bool:
    """Whether bytes, or the end, are in a transport's socket and wait to be read."""
    waiting = select.poll()
    waiting.register(transport.get_extra_info("socket").fileno(), select.POLLIN)
    return bool(waiting.poll(0))


class _Response(aiohttp.ClientResponse):
    async def start(self, connection: Connection) -> aiohttp.ClientResponse:
        """Waits for the headers; _Stale if a used connection was closed before any byte of them."""
        wire = connection.protocol
        try:
            await super().start(connection)
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
            if isinstance(wire, _Wire) and wire.used and not wire.heard:
                raise _Stale from error
            raise
        if isinstance(wire, _Wire):
            self.content.on_eof(wire.rest)
        return self


class _Request(ClientRequest):
    def update_auto_headers(self, skip_auto_headers: Any) -> None:  # noqa: ARG002 - aiohttp's signature
        """Adds nothing: the upstream sees the client's headers."""
        self._skip_auto_headers = _NOTHING_ADDED


class _Connector(aiohttp.TCPConnector):
    def __init__(self) -> None:
        super().__init__(limit=0, keepalive_timeout=_KEEP_ALIVE, ttl_dns_cache=30)
        self._factory = functools.partial(_Wire, loop=self._loop)  # type: ignore[assignment]

    @property
    def busy(self) -> bool:
        """Whether an answer is under way."""
        return bool(self._acquired)

    def drop_idle(self) -> None:
        """Closes the connections that wait: the next request opens one."""
        waiting = [wire for wires in self._conns.values() for wire, _ in wires]
        self._conns.clear()
        for wire in waiting:
            wire.close()


class _Body(Payload):
    """Bytes as they are; aiohttp's own class warns about bodies above 1 MiB."""

    _autoclose = True

    def __init__(self, value: bytes) -> None:
        super().__init__(value, content_type="application/octet-stream")
        self._size = len(value)

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        """The body as text."""
        return bytes(self._value).decode(encoding, errors)

    async def write(self, writer: AbstractStreamWriter) -> None:
        """Writes the body; the transport keeps what the socket does not take."""
        await writer.write(self._value)


class _Upload:
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


class _Deadline:
    """Cancels the running task when the time is up; what ``asyncio.timeout`` does, at a third of its cost."""

    __slots__ = ("_before", "_fired", "_task", "timer")

    def __init__(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        self._task = asyncio.current_task(loop)
        self._before = self._task.cancelling() if self._task is not None else 0
        self._fired = False
        self.timer = loop.call_later(seconds, self._fire)

    def _fire(self) -> None:
        if self._task is not None:
            self._fired = True
            self._task.cancel()

    def passed(self) -> bool:
        """Whether a cancellation was this one; someone else's, even at the same moment, goes first."""
        return self._fired and self._task is not None and self._task.uncancel() <= self._before


class _Veil:
    """Takes a secret out of bytes on their way, length for length; of an error's body also where it is in two parts."""

    def __init__(self, secret: bytes, *, whole: bool) -> None:
        self._secret = secret
        self._stars = b"*" * len(secret)
        self._whole = whole
        self._held = b""

    def over(self, chunk: bytes) -> bytes:
        """The bytes that may go on."""
        data = self._held + chunk if self._held else chunk
        if self._secret in data:
            data = data.replace(self._secret, self._stars)
        if not self._whole:
            return data
        kept = next((n for n in range(min(len(self._secret) - 1, len(data)), 0, -1) if self._begins(data[-n:])), 0)
        self._held = data[len(data) - kept :]
        return data[: len(data) - kept]

    def end(self) -> bytes:
        """What was held back."""
        held, self._held = self._held, b""
        return held

    def _begins(self, tail: bytes) -> bool:
        return self._secret.startswith(tail)


class Answer:
    """An upstream's answer: the head, and a body that is read once, undecoded.

    ``hidden`` is the operator's key that the request was sent with: an upstream that shows it in its answer would
    show it to the client.
    """

    __slots__ = (
        *("_content", "_loop", "_response", "_rest", "_since", "_target", "_timer", "_veil"),
        *("ended", "headers", "status"),
    )

    def __init__(
        self,
        response: aiohttp.ClientResponse,
        headers: tuple[tuple[bytes, bytes], ...],
        target: Target,
        hidden: bytes = b"",
    ) -> None:
        self.status = response.status
        self.headers = headers
        self._veil = None
        if len(hidden) >= _SHORTEST_SECRET:
            self._veil = _Veil(hidden, whole=response.status >= 400)
            if any(hidden in value for _, value in headers):
                self.headers = tuple((n, v.replace(hidden, b"*" * len(hidden))) for n, v in headers)
        self.ended = False
        self._response = response
        self._content = response.content
        self._target = target
        self._rest = b""
        self._since = _NEVER
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

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

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """The body as it arrives; UpstreamTimeout after ``idle`` seconds of silence, StreamBroken if it is cut off."""
        if self._rest:
            rest, self._rest = self._rest, b""
            yield rest
        read = self._content.readany
        clock = self._loop.time
        if self._timer is None and not self._content.is_eof():
            self._timer = self._loop.call_later(self._target.idle, self._watch)
        try:
            while True:
                self._since = clock()
                chunk = await read()
                self._since = _NEVER
                if not chunk:
                    break
                if self._veil is None:
                    yield chunk
                elif shown := self._veil.over(chunk):
                    yield shown
        except _Idle:
            self.close()
            raise UpstreamTimeout(
                f"Upstream {self._target.name!r} sent nothing for {self._target.idle:g} seconds."
            ) from None
        except (aiohttp.ClientError, OSError, RuntimeError) as error:
            # RuntimeError: aiohttp's word for reading from a connection that was closed here.
            self.close()
            raise StreamBroken(f"Upstream {self._target.name!r} broke off its answer.") from error
        if self._veil is not None and (held := self._veil.end()):
            yield held
        self.ended = True
        self._stop_watching()

    def _watch(self) -> None:
        left = min(self._since, self._loop.time()) + self._target.idle - self._loop.time()
        if left <= 0:
            self._timer = None
            self._content.set_exception(_Idle())
        else:
            self._timer = self._loop.call_later(left, self._watch)

    def _stop_watching(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def close(self) -> None:
        """Ends the answer: at once, with its connection, unless it has come to its end."""
        self._stop_watching()
        connection = self._response.connection
        if connection is not None and connection.transport is not None:
            connection.transport.abort()
        self._response.close()


class Client:
    """Sends requests to upstreams; ``instance`` names this Weir in ``Via``."""

    def __init__(self, *, instance: str) -> None:
        self._via = f"1.1 weir-{instance}"
        self._pools: OrderedDict[tuple[str, str | None, str], tuple[aiohttp.ClientSession, _Connector]] = OrderedDict()
        self._closing: set[asyncio.Task[None]] = set()

    async def send(
        self,
        target: Target,
        *,
        method: str,
        path: str,
        headers: Headers,
        tenant: str,
        query: bytes = b"",
        body: bytes | AsyncIterator[bytes] | None = None,
        attempt: int = 0,
        drop: frozenset[bytes] = frozenset(),
        length: int | None = None,
        hidden: bytes = b"",
    ) -> Answer:
        """The answer's head, its body unread; the caller reads it to the end or closes it.

        ``path`` follows ``base_url``; names in ``headers`` are lower case, as ASGI has them; those in ``drop`` are
        not forwarded; ``length`` is the size of a streamed body where known; ``attempt`` above 0 makes
        ``Idempotency-Key`` a new one, for a body that was edited; ``hidden`` is a credential among the headers that the
        client must not see in the answer, as it must not see the target's own.

        Raises UpstreamUnreachable, UpstreamTimeout, InvalidRequest, and what a streamed body raises.

        A request is sent a second time, on a new connection, in one case: the connection was idle before, the
        upstream closed it within a second and without a byte of an answer. That is an upstream whose idle timeout
        ran out while the request was on its way (RFC 9112 9.3.1 and 9.5).
        """
        fields = self._fields(target, headers, drop=drop, attempt=attempt)
        if length is not None and not isinstance(body, bytes):
            fields["Content-Length"] = str(length)
        url = _url(target.base_url, path, query)
        session, connector = self._pool(target, tenant)
        started = time.monotonic()
        hidden = hidden if target.api_key is None else target.api_key.encode()
        try:
            return await _send(session, target, method, url, fields, body, hidden)
        except _Stale:
            if not (body is None or isinstance(body, bytes)) or time.monotonic() - started > _STALE_WITHIN:
                raise UpstreamUnreachable(
                    f"Upstream {target.name!r} closed the connection without an answer."
                ) from None
        connector.drop_idle()
        return await _send(session, target, method, url, fields, body, hidden)

    async def close(self) -> None:
        """Closes every connection."""
        for session, _ in self._pools.values():
            await session.close()
        self._pools.clear()
        if self._closing:
            await asyncio.wait(self._closing)

    def _fields(self, target: Target, headers: Headers, *, drop: frozenset[bytes], attempt: int) -> CIMultiDict[str]:
        """The headers that go upstream; ``Host`` and framing are added from the target and the body."""
        skip = _skipped(drop, keyed=target.api_key is not None) | _named(headers)
        fields = [
            (copied, _text(value))
            for name, value in headers
            if (copied := _copied(name)) is not None and name not in skip
        ]
        if target.api_key is not None:
            fields.append(credential_field(target.auth, target.api_key))
        fields.append(("via", self._via))
        result = CIMultiDict(fields)
        if attempt and (key := result.get("idempotency-key")) is not None:
            result["idempotency-key"] = f"{key}-{attempt}"
        return result

    def _pool(self, target: Target, tenant: str) -> tuple[aiohttp.ClientSession, _Connector]:
        key = (target.base_url, target.api_key, tenant)
        pool = self._pools.get(key)
        if pool is not None:
            self._pools.move_to_end(key)
            return pool
        connector = _Connector()
        session = aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            request_class=_Request,
            response_class=_Response,
            trust_env=False,
            auto_decompress=False,
            read_bufsize=_READ_BUFFER,
            max_line_size=_LINE,
            max_field_size=_LINE,
            timeout=aiohttp.ClientTimeout(total=None),
        )
        self._pools[key] = session, connector
        self._evict()
        return session, connector

    def _evict(self) -> None:
        """Closes the pools used longest ago, above 256 of them, that have no answer under way."""
        surplus = len(self._pools) - _POOLS
        for key in [key for key, (_, connector) in self._pools.items() if not connector.busy][: max(0, surplus)]:
            if key == next(reversed(self._pools)):
                break
            session, _ = self._pools.pop(key)
            task = asyncio.ensure_future(session.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)


def credential_field(auth: str, key: str) -> tuple[str, str]:
    """The header that carries a key to an upstream which wants it like that."""
    return ("authorization", f"Bearer {key}") if auth == "bearer" else (auth, key)


def came_through(headers: Headers, instance: str) -> bool:
    """Whether ``Via`` says that this Weir has already forwarded the request (RFC 9110 7.6.3)."""
    pseudonym = f"weir-{instance}".encode()
    return any(
        pseudonym in hop.split()[1:2] for name, value in headers if name.lower() == b"via" for hop in value.split(b",")
    )


async def _send(
    session: aiohttp.ClientSession,
    target: Target,
    method: str,
    url: URL,
    fields: CIMultiDict[str],
    body: bytes | AsyncIterator[bytes] | None,
    hidden: bytes,
) -> Answer:
    """One request on one connection; every error comes out as one of Weir's, with none of the library's text."""
    upload = None
    data: Payload | None = None
    if isinstance(body, bytes):
        data = _Body(body) if body else None
    elif body is not None:
        upload = _Upload(body)
        data = AsyncIterablePayload(upload)
    deadline = _Deadline(target.first_byte)
    try:
        response = await session.request(
            method, url, headers=fields, data=data, allow_redirects=False, timeout=_timeout(target.connect)
        )
    except asyncio.CancelledError:
        if deadline.passed():
            raise _failure(TimeoutError(), target) from None
        raise
    except (aiohttp.ClientError, OSError, ValueError) as error:
        if upload is not None and upload.failure is not None:
            raise upload.failure from None
        raise _failure(error, target) from None
    finally:
        deadline.timer.cancel()
    return _answer(response, target, hidden)


def _answer(response: aiohttp.ClientResponse, target: Target, hidden: bytes) -> Answer:
    """The answer without hop-by-hop headers; UpstreamUnreachable for one that may not be relayed."""
    raw = response.raw_headers
    problem = None
    kept = [(relayed, value) for name, value in raw if (relayed := _relayed(name)) is not None]
    if response.status < 200 or (300 <= response.status < 400 and response.status != 304):
        problem = f"answered with status {response.status}, which Weir does not follow"
    elif _NOT_IN_VALUE.search(b"".join([value for _, value in raw])):
        problem = "answered with an illegal header value"
    elif b"" in [name for name, _ in kept]:
        problem = "answered with an illegal header name"
    if problem is not None:
        Answer(response, (), target).close()
        raise UpstreamUnreachable(f"Upstream {target.name!r} {problem}.")
    if len(kept) < len(raw):
        hops = [(name.lower(), value) for name, value in raw]
        skip = _named(hops)
        if any(name == b"transfer-encoding" for name, _ in hops):
            skip |= {b"content-length"}
        kept = [(name, value) for name, value in kept if name not in skip]
    return Answer(response, tuple(kept), target, hidden)


def _failure(error: Exception, target: Target) -> ProxyError:
    """What the client is told; never the library's text, which may hold the URL."""
    name = f"Upstream {target.name!r}"
    match error:
        case aiohttp.ConnectionTimeoutError():
            return UpstreamUnreachable(f"{name} could not be connected to within {target.connect:g} seconds.")
        case TimeoutError():
            return UpstreamTimeout(f"{name} did not begin to answer within {target.first_byte:g} seconds.")
        case aiohttp.ClientConnectorDNSError():
            return UpstreamUnreachable(f"The host name of {name.lower()} could not be resolved.")
        case aiohttp.ClientSSLError():
            return UpstreamUnreachable(f"{name} could not be connected to: TLS failed.")
        case aiohttp.ClientConnectorError():
            return UpstreamUnreachable(f"{name} could not be connected to.")
        case aiohttp.ClientResponseError():
            return UpstreamUnreachable(f"{name} answered with something that is not HTTP/1.1.")
        case aiohttp.ClientConnectionError() | OSError():
            return UpstreamUnreachable(f"{name} closed the connection without an answer.")
        case ValueError():
            return InvalidRequest("The request's target or headers hold what cannot be sent.")
        case _:
            return UpstreamUnreachable(f"{name} could not be reached.")


@functools.lru_cache(maxsize=64)
def _timeout(connect: float) -> aiohttp.ClientTimeout:
    return aiohttp.ClientTimeout(total=None, connect=connect)


@functools.lru_cache(maxsize=64)
def _skipped(drop: frozenset[bytes], *, keyed: bool) -> frozenset[bytes]:
    return drop | _CREDENTIALS if keyed else drop


@functools.lru_cache(maxsize=512)
def _copied(name: bytes) -> str | None:
    """A request header's name as aiohttp wants it; None for one that stays here."""
    lowered = name.lower()
    if lowered in _NOT_COPIED or lowered.startswith(_PRIVATE):
        return None
    # aiohttp keeps fields of one name apart only if all of them are spelled alike.
    return lowered.decode("latin-1")


@functools.lru_cache(maxsize=512)
def _relayed(name: bytes) -> bytes | None:
    """An answer's header name as ASGI wants it; None for one that stays here, empty for an illegal one."""
    if _NOT_IN_NAME.search(name):
        return b""
    lowered = name.lower()
    return None if lowered in _HOP_BY_HOP or lowered.startswith(b"proxy-") else lowered


@functools.lru_cache(maxsize=256)
def _url(base: str, path: str, query: bytes) -> URL:
    """The address, as the client spelled it; InvalidRequest if its path leaves ``base``."""
    if _DOT_SEGMENT.search(path) or not path.startswith("/"):
        raise InvalidRequest("The request's path may not hold dot segments.")
    address = base.rstrip("/") + path
    if query:
        address = f"{address}?{query.decode() if query.isascii() else urllib.parse.quote_from_bytes(query, _ASCII)}"
    return URL(address, encoded=True)


_ASCII = bytes(range(0x21, 0x7F)).decode()


def _named(headers: Headers) -> frozenset[bytes]:
    """The headers that ``Connection`` declares to be hop-by-hop (RFC 9110 7.6.1); their names are in lower case."""
    values = [value for name, value in headers if name == b"connection"]
    return _tokens(b",".join(values)) if values else frozenset()


@functools.lru_cache(maxsize=64)
def _tokens(value: bytes) -> frozenset[bytes]:
    return frozenset(token.strip().lower() for token in value.split(b","))


def _text(value: bytes) -> str:
    """The value as the text that aiohttp encodes back (as UTF-8) to the same bytes, where there is one."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")
