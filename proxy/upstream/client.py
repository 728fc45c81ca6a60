"""The upstream's edge: aiohttp, in pools that no two credentials share, with deadlines and nothing of its own added.

A pool belongs to one origin and one tenant's credential, so that bytes which an upstream writes after the end of an
answer can never open another tenant's. Within a pool such bytes close the connection.
"""

import asyncio
import contextlib
import functools
import math
import re
import time
import urllib.parse
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from operator import itemgetter
from typing import Any

import aiohttp
from yarl import URL

from proxy.config.values import UpstreamSettings
from proxy.errors import InvalidRequest, ProxyError, UpstreamTimeout, UpstreamUnreachable
from proxy.upstream.connection import Connector, PooledConnection, PooledResponse, Pools, StaleConnection

Headers = Sequence[tuple[bytes, bytes]]

STALE_WITHIN = 1.0
MIN_SECRET_LEN = 6
_HOP_BY_HOP = frozenset(
    {b"connection", b"keep-alive", b"te", b"trailer", b"trailers", b"transfer-encoding", b"upgrade"},
)
_PRIVATE = (b"proxy-", b"x-weir-", b"uberctx-")
_NOT_COPIED = _HOP_BY_HOP | {b"host", b"content-length", b"expect", b"baggage"}
_WITHOUT_BODY = frozenset({"GET", "HEAD", "OPTIONS", "TRACE"})
UNSENDABLE = "The request's target or headers hold what cannot be sent."
CREDENTIALS = frozenset({b"authorization", b"api-key", b"x-api-key"})
_NOT_IN_NAME = re.compile(rb"[^!#$%&'*+.^_`|~0-9A-Za-z-]")
_NOT_IN_VALUE = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
# Also as nginx (an escaped slash) and servlet containers (parameters of a segment) come to see one.
_DOT_SEGMENT = re.compile(r"(?:^|[/\\]|%2f|%5c)(?:\.|%2e){1,2}(?:(?:;|%3b)[^/\\]*)?(?:[/\\]|%2f|%5c|$)", re.IGNORECASE)


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
        kept = next((n for n in range(min(len(self._secret) - 1, len(data)), 0, -1) if self._begins(data[-n:])), 0)
        self._held = data[len(data) - kept :]
        return data[: len(data) - kept]

    def end(self) -> bytes:
        held, self._held = self._held, b""
        return held

    def _begins(self, tail: bytes) -> bool:
        return self._secret.startswith(tail)


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
                self._watch.since = self._watch.clock()
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


class Client:
    def __init__(self, *, instance: str) -> None:
        self._via = f"via: 1.1 weir-{instance}".encode()
        self._pools: Pools[tuple[str | None, str | None, str], Connector] = Pools(
            make=Connector, busy=lambda pool: pool.busy, close=Connector.close
        )

    async def send(
        self,
        upstream: UpstreamSettings,
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
    ) -> HTTPAnswer:
        """The answer's head, its body unread; the caller reads it to the end or closes it.

        ``path`` follows ``base_url``; names in ``headers`` are lower case, as ASGI has them; those in ``drop`` are
        not forwarded; ``length`` is the size of a streamed body where known; ``attempt`` above 0 makes
        ``Idempotency-Key`` a new one, for a body that was edited; ``hidden`` is a credential among the headers that the
        client must not see in the answer, as it must not see the operator's.

        Raises UpstreamUnreachable, UpstreamTimeout, InvalidRequest, and what a streamed body raises.

        A request is sent a second time, on a new connection, in one case: the connection was idle before, the
        upstream closed it within a second and without a byte of an answer. That is an upstream whose idle timeout
        ran out while the request was on its way (RFC 9112 9.3.1 and 9.5).
        """
        origin, opening = _opening(method.upper(), upstream.base_url or "", path, query)
        head = opening + self._fields(upstream, headers, drop=drop, attempt=attempt) + _framing(method, body, length)
        key, timeout = upstream.own_key, upstream.timeout
        pool = self._pools.of((upstream.base_url, key, tenant))
        started = time.monotonic()
        hidden = hidden if key is None else key.encode()
        how: dict[str, Any] = {
            "length": length,
            "patience": _timeout(min(timeout.connect, timeout.first_byte)),
            "within": timeout.first_byte,
            "is_bodiless": method == "HEAD",
        }

        async def ask() -> HTTPAnswer:
            try:
                answer = await pool.ask(origin, head, body or b"", **how)
            except (aiohttp.ClientError, OSError) as error:
                raise _failure(error, upstream) from None
            return _answer(answer, upstream, hidden)

        try:
            return await ask()
        except StaleConnection:
            if not (body is None or isinstance(body, bytes)) or time.monotonic() - started > STALE_WITHIN:
                raise UpstreamUnreachable(
                    f"Upstream {upstream.name!r} closed the connection without an answer."
                ) from None
        pool.drop_idle()
        return await ask()

    @property
    def connections(self) -> tuple[int, int]:
        busy, idle = zip((0, 0), *(pool.connections for pool in self._pools), strict=True)
        return sum(busy), sum(idle)

    async def close(self) -> None:
        await self._pools.close()

    def _fields(self, upstream: UpstreamSettings, headers: Headers, *, drop: frozenset[bytes], attempt: int) -> bytes:
        skip = _skipped(drop, keyed=upstream.own_key is not None) | _named(headers)
        lines = [
            b"%b: %b" % (copied, value)
            for name, value in headers
            if (copied := _copied(name)) is not None and name not in skip
        ]
        if attempt:
            lines = [b"%b-%d" % (line, attempt) if line.startswith(b"idempotency-key:") else line for line in lines]
        if upstream.own_key is not None:
            lines.append("{}: {}".format(*credential_field(upstream.credential, upstream.own_key)).encode())
        lines.append(self._via)
        if _NOT_IN_VALUE.search(b"".join(lines)):
            raise InvalidRequest(UNSENDABLE)
        return b"\r\n".join(lines)


def _framing(method: str, body: bytes | AsyncIterator[bytes] | None, length: int | None) -> bytes:
    if body is None or isinstance(body, bytes):
        length = len(body or b"") or length
        if length is None and method in _WITHOUT_BODY:
            return b"\r\n\r\n"
    elif length is None:
        return b"\r\nTransfer-Encoding: chunked\r\n\r\n"
    return b"\r\nContent-Length: %d\r\n\r\n" % (length or 0)


def credential_field(auth: str, key: str) -> tuple[str, str]:
    return ("authorization", f"Bearer {key}") if auth == "bearer" else (auth, key)


def came_through(headers: Headers, instance: str) -> bool:
    passed = [hop for name, value in headers if name == b"via" for hop in value.split(b",")]
    return any(f"weir-{instance}".encode() in hop.split()[1:2] for hop in passed)


def _answer(response: PooledResponse, upstream: UpstreamSettings, hidden: bytes) -> HTTPAnswer:
    raw, problem = response.raw_headers, None
    kept = [(relayed, value) for name, value in raw if (relayed := _relayed(name)) is not None]
    if response.status < 200 or (300 <= response.status < 400 and response.status != 304):
        problem = f"answered with status {response.status}, which Weir does not follow"
    elif _NOT_IN_VALUE.search(b"".join(map(itemgetter(1), raw))):
        problem = "answered with an illegal header value"
    elif b"" in dict(kept):
        problem = "answered with an illegal header name"
    if problem is not None:
        HTTPAnswer(response, (), upstream).close()
        raise UpstreamUnreachable(f"Upstream {upstream.name!r} {problem}.")
    if len(kept) < len(raw):
        hops = [(name.lower(), value) for name, value in raw]
        skip = _named(hops)
        if any(name == b"transfer-encoding" for name, _ in hops):
            skip |= {b"content-length"}
        kept = [(name, value) for name, value in kept if name not in skip]
    return HTTPAnswer(response, tuple(kept), upstream, hidden)


def _failure(error: Exception, upstream: UpstreamSettings) -> ProxyError:
    name = f"Upstream {upstream.name!r}"
    match error:
        case aiohttp.ConnectionTimeoutError() if upstream.timeout.connect <= upstream.timeout.first_byte:
            return UpstreamUnreachable(f"{name} could not be connected to within {upstream.timeout.connect:g} seconds.")
        case TimeoutError():
            return UpstreamTimeout(f"{name} did not begin to answer within {upstream.timeout.first_byte:g} seconds.")
        case aiohttp.ClientConnectorDNSError():
            return UpstreamUnreachable(f"The host name of {name.lower()} could not be resolved.")
        case aiohttp.ClientSSLError():
            return UpstreamUnreachable(f"{name} could not be connected to: TLS failed.")
        case aiohttp.ClientConnectorError():
            return UpstreamUnreachable(f"{name} could not be connected to.")
        case aiohttp.ClientPayloadError():
            return UpstreamUnreachable(f"{name} answered with something that is not HTTP/1.1.")
        case aiohttp.ClientConnectionError() | OSError():
            return UpstreamUnreachable(f"{name} closed the connection without an answer.")
        case _:
            return UpstreamUnreachable(f"{name} could not be reached.")


@functools.lru_cache(maxsize=64)
def _timeout(connect: float) -> aiohttp.ClientTimeout:
    return aiohttp.ClientTimeout(total=None, connect=connect)


@functools.lru_cache(maxsize=64)
def _skipped(drop: frozenset[bytes], *, keyed: bool) -> frozenset[bytes]:
    return drop | CREDENTIALS if keyed else drop


@functools.lru_cache(maxsize=512)
def _copied(name: bytes) -> bytes | None:
    lowered = name.lower()
    return None if lowered in _NOT_COPIED or lowered.startswith(_PRIVATE) else lowered


@functools.lru_cache(maxsize=512)
def _relayed(name: bytes) -> bytes | None:
    if _NOT_IN_NAME.search(name):
        return b""
    lowered = name.lower()
    return None if lowered in _HOP_BY_HOP or lowered.startswith(b"proxy-") else lowered


@functools.lru_cache(maxsize=256)
def _opening(method: str, base: str, path: str, query: bytes) -> tuple[URL, bytes]:
    """Where a request goes, and the lines that it begins with."""
    if _DOT_SEGMENT.search(path) or not path.startswith("/"):
        raise InvalidRequest("The request's path may not hold dot segments.")
    address = base.rstrip("/") + path
    if query:
        address = f"{address}?{query.decode() if query.isascii() else urllib.parse.quote_from_bytes(query, _ASCII)}"
    url = URL(address, encoded=True)
    line = f"{method} {url.raw_path_qs} HTTP/1.1".encode()
    if not url.raw_host or _NOT_IN_VALUE.search(line):
        raise InvalidRequest(UNSENDABLE)
    return url.origin(), line + f"\r\nHost: {url.host_port_subcomponent}\r\n".encode()


_ASCII = bytes(range(0x21, 0x7F)).decode()


def _named(headers: Headers) -> frozenset[bytes]:
    """The headers that ``Connection`` declares to be hop-by-hop (RFC 9110 7.6.1); their names are in lower case."""
    values = [value for name, value in headers if name == b"connection"]
    return _tokens(b",".join(values)) if values else frozenset()


@functools.lru_cache(maxsize=64)
def _tokens(value: bytes) -> frozenset[bytes]:
    return frozenset(token.strip().lower() for token in value.split(b","))
