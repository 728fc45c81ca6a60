"""The upstream's edge: HTTP/1.1 in pools that no two credentials share, with deadlines and nothing of its own added.

A pool belongs to one origin and one tenant's credential, so that bytes which an upstream writes after the end of an
answer can never open another tenant's. Within a pool such bytes close the connection.
"""

import asyncio
import contextlib
import functools
import re
import socket
import ssl
import time
import urllib.parse
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, field

from proxy.errors import InvalidRequest, ProxyError, UpstreamTimeout, UpstreamUnreachable
from proxy.upstream.connection import (
    BrokenOff,
    ConnectTimeout,
    IdleWatch,
    NotHTTP,
    Origin,
    Pool,
    Pools,
    Response,
    StaleConnection,
)

Headers = Sequence[tuple[bytes, bytes]]

STALE_WITHIN = 1.0
BODILESS = frozenset({"GET", "HEAD", "OPTIONS", "TRACE"})
UNSENDABLE = "The request's target or headers hold what cannot be sent."
MIN_SECRET_LEN = 6
_HOP_BY_HOP = frozenset(
    {b"connection", b"keep-alive", b"te", b"trailer", b"trailers", b"transfer-encoding", b"upgrade"},
)
_PRIVATE = (b"proxy-", b"x-weir-", b"uberctx-")
_NOT_COPIED = _HOP_BY_HOP | {b"host", b"content-length", b"expect", b"baggage"}
CREDENTIALS = frozenset({b"authorization", b"api-key", b"x-api-key"})
_NOT_IN_NAME = re.compile(rb"[^!#$%&'*+.^_`|~0-9A-Za-z-]")
_NOT_IN_VALUE = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
# Also as nginx (an escaped slash) and servlet containers (parameters of a segment) come to see one.
_DOT_SEGMENT = re.compile(r"(?:^|[/\\]|%2f|%5c)(?:\.|%2e){1,2}(?:(?:;|%3b)[^/\\]*)?(?:[/\\]|%2f|%5c|$)", re.IGNORECASE)


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


class _Idle(Exception):
    """An answer fell silent."""


class SecretMasker:
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


class Answer(ABC):
    """An upstream's answer, whoever gives it: the head, and a body that is read once, undecoded."""

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
    def close(self) -> None:
        """End the answer: at once, with its connection, unless it has come to its end."""

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

    __slots__ = ("_masker", "_response", "_target", "_watch")

    def __init__(
        self, response: Response, headers: tuple[tuple[bytes, bytes], ...], target: Target, hidden: bytes = b""
    ) -> None:
        self._masker = None
        if len(hidden) >= MIN_SECRET_LEN:
            self._masker = SecretMasker(hidden, whole=response.status >= 400)
            if any(hidden in value for _, value in headers):
                headers = tuple((n, v.replace(hidden, b"*" * len(hidden))) for n, v in headers)
        super().__init__(response.status, headers)
        self._response = response
        self._target = target
        self._watch: IdleWatch | None = None

    async def read(self, limit: int | None = None) -> bytes:
        """The body, or its first ``limit`` bytes; one that is all here already is simply taken."""
        response = self._response
        if not response.ended or self._rest or self._masker is not None:
            return await super().read(limit)
        if limit is not None and response.size > limit:
            return await super().read(limit)
        self.ended = True
        return response.take()

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """The body as it arrives on the connection."""
        if self._rest:
            rest, self._rest = self._rest, b""
            yield rest
        response = self._response
        if self._watch is None:
            self._watch = IdleWatch(self._target.idle, end=self._fell_silent)
        read, watch, clock = response.read, self._watch, self._watch.clock
        if not response.ended:
            watch.start()
        try:
            while True:
                watch.since = clock()
                chunk = await read()
                watch.since = None
                if not chunk:
                    break
                if self._masker is None:
                    yield chunk
                elif shown := self._masker.over(chunk):
                    yield shown
        except _Idle:
            self.close()
            raise UpstreamTimeout(
                f"Upstream {self._target.name!r} sent nothing for {self._target.idle:g} seconds."
            ) from None
        except BrokenOff as error:
            self.close()
            raise StreamBroken(f"Upstream {self._target.name!r} broke off its answer.") from error
        if self._masker is not None and (held := self._masker.end()):
            yield held
        self.ended = True
        watch.stop()

    def _fell_silent(self) -> None:
        self._response.fail(_Idle())

    def close(self) -> None:
        """Also the connection ends, unless the answer has come to its end."""
        if self._watch is not None:
            self._watch.stop()
        self._response.fail(BrokenOff())


class Client:
    """Sends requests to upstreams; ``instance`` names this Weir in ``Via``."""

    def __init__(self, *, instance: str) -> None:
        self._via = f"1.1 weir-{instance}".encode()
        self._pools: Pools[tuple[str, str | None, str], Pool] = Pools(
            make=Pool, busy=lambda pool: pool.busy, close=Pool.close
        )

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
    ) -> HTTPAnswer:
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
        origin, line = _origin(target.base_url), _line(method, target.base_url, path, query)
        fields = self._fields(target, headers, drop=drop, attempt=attempt)
        is_streamed = not (body is None or isinstance(body, bytes))
        if is_streamed and length is None:
            fields += (b"Transfer-Encoding", b": ", b"chunked", b"\r\n")
        elif is_streamed or body or method not in BODILESS:
            size = length if is_streamed else len(body or b"")  # type: ignore[arg-type]  # bytes, if not streamed
            fields += (b"Content-Length", b": ", b"%d" % (size or 0), b"\r\n")
        head = b"".join((line, b"Host: ", origin.named, b"\r\n", *fields, b"\r\n"))
        pool = self._pools.of((target.base_url, target.api_key, tenant))
        sent = _Sent(method, head, body or b"", is_chunked=is_streamed and length is None)
        started = time.monotonic()
        hidden = hidden if target.api_key is None else target.api_key.encode()
        try:
            return _answer(await _send(pool, origin, target, sent), target, hidden)
        except StaleConnection:
            if is_streamed or time.monotonic() - started > STALE_WITHIN:
                raise _failure(BrokenOff(), target) from None
        pool.drop_idle()
        try:
            return _answer(await _send(pool, origin, target, sent), target, hidden)
        except StaleConnection as error:
            raise _failure(error, target) from None

    @property
    def connections(self) -> tuple[int, int]:
        """How many are busy, and how many wait, to all upstreams together."""
        busy, idle = zip((0, 0), *(pool.connections for pool in self._pools), strict=True)
        return sum(busy), sum(idle)

    async def close(self) -> None:
        """Closes every connection."""
        await self._pools.close()

    def _fields(self, target: Target, headers: Headers, *, drop: frozenset[bytes], attempt: int) -> list[bytes]:
        """The header lines that go upstream; ``Host`` and framing are added from the target and the body."""
        skip = _skipped(drop, keyed=target.api_key is not None) | _named(headers)
        fields: list[bytes] = []
        for name, value in headers:
            if name in skip or (copied := _copied(name)) is None:
                continue
            if attempt and copied == b"idempotency-key":
                value += b"-%d" % attempt
            fields += (copied, b": ", value, b"\r\n")
        if target.api_key is not None:
            keyed, key = credential_field(target.auth, target.api_key)
            fields += (keyed.encode(), b": ", key.encode(), b"\r\n")
        fields += (b"via: ", self._via, b"\r\n")
        if _NOT_IN_VALUE.search(b"".join([each for each in fields if each != b"\r\n"])):
            raise InvalidRequest(UNSENDABLE)
        return fields


def credential_field(auth: str, key: str) -> tuple[str, str]:
    """The header that carries a key to an upstream which wants it like that."""
    return ("authorization", f"Bearer {key}") if auth == "bearer" else (auth, key)


def came_through(headers: Headers, instance: str) -> bool:
    """Whether ``Via`` says that this Weir has already forwarded the request (RFC 9110 7.6.3)."""
    said = [value for name, value in headers if len(name) == 3 and name.lower() == b"via"]
    pseudonym = f"weir-{instance}".encode()
    return any(pseudonym in hop.split()[1:2] for value in said for hop in value.split(b",")) if said else False


@dataclass(frozen=True, slots=True)
class _Sent:
    method: str
    head: bytes
    body: bytes | AsyncIterator[bytes]
    is_chunked: bool


async def _send(pool: Pool, origin: Origin, target: Target, sent: _Sent) -> Response:
    """One request on one connection; what a streamed body raises comes out as it is, other errors as Weir's."""
    try:
        connection = await pool.take(origin, min(target.connect, target.first_byte))
        response = connection.ask(sent.head, sent.body, has_body=sent.method != "HEAD", is_chunked=sent.is_chunked)
        timer = pool.loop.call_later(target.first_byte, response.fail, TimeoutError())
        try:
            await response.begun
        except asyncio.CancelledError:
            response.fail(BrokenOff())
            raise
        finally:
            timer.cancel()
    except StaleConnection:
        raise
    except (ConnectTimeout, BrokenOff, NotHTTP, OSError, ValueError) as error:
        raise _failure(error, target) from None
    return response


def _answer(response: Response, target: Target, hidden: bytes) -> HTTPAnswer:
    """The answer without hop-by-hop headers; UpstreamUnreachable for one that may not be relayed."""
    raw = response.headers
    problem = None
    kept = [(relayed, value) for name, value in raw if (relayed := _relayed(name)) is not None]
    if response.status < 200 or (300 <= response.status < 400 and response.status != 304):
        problem = f"answered with status {response.status}, which Weir does not follow"
    elif _NOT_IN_VALUE.search(b"".join([value for _, value in raw])):
        problem = "answered with an illegal header value"
    elif b"" in [name for name, _ in kept]:
        problem = "answered with an illegal header name"
    if problem is not None:
        HTTPAnswer(response, (), target).close()
        raise UpstreamUnreachable(f"Upstream {target.name!r} {problem}.")
    if len(kept) < len(raw):
        hops = [(name.lower(), value) for name, value in raw]
        skip = _named(hops)
        if any(name == b"transfer-encoding" for name, _ in hops):
            skip |= {b"content-length"}
        kept = [(name, value) for name, value in kept if name not in skip]
    return HTTPAnswer(response, tuple(kept), target, hidden)


def _failure(error: Exception, target: Target) -> ProxyError:
    """What the client is told; never the library's text, which may hold the URL."""
    name = f"Upstream {target.name!r}"
    match error:
        case ConnectTimeout():
            return UpstreamUnreachable(f"{name} could not be connected to within {target.connect:g} seconds.")
        case TimeoutError():
            return UpstreamTimeout(f"{name} did not begin to answer within {target.first_byte:g} seconds.")
        case NotHTTP():
            return UpstreamUnreachable(f"{name} answered with something that is not HTTP/1.1.")
        case BrokenOff():
            return UpstreamUnreachable(f"{name} closed the connection without an answer.")
        case socket.gaierror():
            return UpstreamUnreachable(f"The host name of {name.lower()} could not be resolved.")
        case ssl.SSLError():
            return UpstreamUnreachable(f"{name} could not be connected to: TLS failed.")
        case OSError():
            return UpstreamUnreachable(f"{name} could not be connected to.")
        case _:
            return InvalidRequest(UNSENDABLE)


@functools.lru_cache(maxsize=64)
def _skipped(drop: frozenset[bytes], *, keyed: bool) -> frozenset[bytes]:
    return drop | CREDENTIALS if keyed else drop


@functools.lru_cache(maxsize=512)
def _copied(name: bytes) -> bytes | None:
    """A request header's name as it goes up; None for one that stays here."""
    lowered = name.lower()
    if lowered in _NOT_COPIED or lowered.startswith(_PRIVATE):
        return None
    if not name or _NOT_IN_NAME.search(name):
        raise InvalidRequest(UNSENDABLE)
    return lowered


@functools.lru_cache(maxsize=512)
def _relayed(name: bytes) -> bytes | None:
    """An answer's header name as ASGI wants it; None for one that stays here, empty for an illegal one."""
    if _NOT_IN_NAME.search(name):
        return b""
    lowered = name.lower()
    return None if lowered in _HOP_BY_HOP or lowered.startswith(b"proxy-") else lowered


@functools.lru_cache(maxsize=64)
def _origin(base: str) -> Origin:
    parts = urllib.parse.urlsplit(base)
    host, is_tls = parts.hostname or "", parts.scheme == "https"
    host = host if host.isascii() else host.encode("idna").decode()
    usual = 443 if is_tls else 80
    port = parts.port or usual
    named = f"[{host}]" if ":" in host else host
    return Origin(host, port, is_tls, (named if port == usual else f"{named}:{port}").encode())


@functools.lru_cache(maxsize=256)
def _line(method: str, base: str, path: str, query: bytes) -> bytes:
    """The request line, as the client spelled its target; InvalidRequest if the path leaves ``base``."""
    if _DOT_SEGMENT.search(path) or not path.startswith("/"):
        raise InvalidRequest("The request's path may not hold dot segments.")
    target = urllib.parse.urlsplit(base).path.rstrip("/").encode() + path.encode(_encoding(path))
    if query:
        target += b"?" + query
    quoted = urllib.parse.quote_from_bytes(target, _ASCII)
    return f"{method} {quoted} HTTP/1.1\r\n".encode()


def _encoding(path: str) -> str:
    return "latin-1" if max(path) < "\u0100" else "utf-8"  # bytes of a client's path are characters, as ASGI has them


_ASCII = bytes(range(0x21, 0x7F)).decode()


def _named(headers: Headers) -> frozenset[bytes]:
    """The headers that ``Connection`` declares to be hop-by-hop (RFC 9110 7.6.1); their names are in lower case."""
    values = [value for name, value in headers if name == b"connection"]
    return _tokens(b",".join(values)) if values else frozenset()


@functools.lru_cache(maxsize=64)
def _tokens(value: bytes) -> frozenset[bytes]:
    return frozenset(token.strip().lower() for token in value.split(b","))
