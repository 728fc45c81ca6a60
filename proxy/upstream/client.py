"""The upstream's edge: aiohttp, in pools that no two credentials share, with deadlines and without
additions.

A request goes to where it was decided to, with whose credential, by OpenAI's protocol or litellm's
provider. An upstream's own answers say which endpoints or routes it lacks; that is remembered for a
time.

A pool belongs to one origin and one tenant's credential, so that bytes which an upstream writes
after the end of an answer can never open another tenant's. Within a pool such bytes close the
connection.
"""

import asyncio
import functools
import importlib
import os
import re
import time
import urllib.parse
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping
from dataclasses import replace
from operator import itemgetter
from typing import Any, Protocol

import aiohttp
from cachetools import TTLCache
from yarl import URL

from proxy.access.destination import CHAT_PATH, Caller, Destination, Headers
from proxy.config.values import UpstreamSettings
from proxy.errors import InvalidRequest, ProxyError, UpstreamTimeout, UpstreamUnreachable
from proxy.upstream.connection import (
    Answer,
    HTTPAnswer,
    Outgoing,
    Pool,
    Pools,
    StaleConnection,
    StreamBroken,
)
from proxy.wire.raw import read_value

STALE_WITHIN = 1.0
_HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"te",
        b"trailer",
        b"trailers",
        b"transfer-encoding",
        b"upgrade",
    },
)
_PRIVATE = (b"proxy-", b"x-weir-", b"uberctx-")
_NOT_COPIED = _HOP_BY_HOP | {b"host", b"content-length", b"expect", b"baggage"}
_WITHOUT_BODY = frozenset({"GET", "HEAD", "OPTIONS", "TRACE"})
UNSENDABLE = "The request's target or headers hold what cannot be sent."
CREDENTIALS = frozenset({b"authorization", b"api-key", b"x-api-key"})
_NOT_IN_NAME = re.compile(rb"[^!#$%&'*+.^_`|~0-9A-Za-z-]")
_NOT_IN_VALUE = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
# Also as nginx (an escaped slash) and servlet containers (parameters of a segment) come to see one.
_DOT_SEGMENT = re.compile(
    r"(?:^|[/\\]|%2f|%5c)(?:\.|%2e){1,2}(?:(?:;|%3b)[^/\\]*)?(?:[/\\]|%2f|%5c|$)", re.IGNORECASE
)


class Client:
    def __init__(self, *, instance: str) -> None:
        self._via = f"via: 1.1 weir-{instance}".encode()
        self._pools: Pools[tuple[str | None, str | None, str], Pool] = Pools(
            make=Pool, busy=lambda pool: pool.busy, close=Pool.close
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

        ``path`` follows ``base_url``; names in ``headers`` are lower case, as ASGI has them; those
        in ``drop`` are not forwarded; ``length`` is the size of a streamed body where known;
        ``attempt`` above 0 makes ``Idempotency-Key`` a new one, for a body that was edited;
        ``hidden`` is a credential among the headers that the client must not see in the answer, as
        it must not see the operator's.

        Raises UpstreamUnreachable, UpstreamTimeout, InvalidRequest, and what a streamed body
        raises.

        A request is sent a second time, on a new connection, in one case: the connection was idle
        before, the upstream closed it within a second and without a byte of an answer. That is an
        upstream whose idle timeout ran out while the request was on its way (RFC 9112 9.3.1 and
        9.5).
        """
        url, opening = _opening(method, upstream.base_url or "", path, query)
        head = (
            opening
            + self._fields(upstream, headers, drop=drop, attempt=attempt)
            + _framing(method, body, length)
        )
        key = upstream.own_key
        timeout = upstream.timeout
        pool = self._pools.of((upstream.base_url, key, tenant))
        ask = functools.partial(
            pool.session.request,
            method,
            url,
            data=Outgoing(head, body or b"", length),
            allow_redirects=False,
            timeout=_timeout(timeout.connect, timeout.first_byte),
        )
        started = time.monotonic()
        try:
            async with asyncio.timeout(timeout.first_byte):
                try:
                    response = await ask()
                except StaleConnection:
                    if (
                        not (body is None or isinstance(body, bytes))
                        or time.monotonic() - started > STALE_WITHIN
                    ):
                        raise
                    pool.connector.drop_idle()
                    response = await ask()
        except (aiohttp.ClientError, OSError) as error:
            raise _failure(error, upstream) from None
        connection = response.connection
        # or the whole answer is there
        if connection is not None and connection.protocol is not None:
            connection.protocol.read_timeout = timeout.idle
            connection.protocol.start_timeout()
        return _answer(response, upstream, hidden if key is None else key.encode())

    @property
    def connections(self) -> tuple[int, int]:
        busy, idle = zip((0, 0), *(pool.connector.connections for pool in self._pools), strict=True)
        return sum(busy), sum(idle)

    async def close(self) -> None:
        await self._pools.close()

    def _fields(
        self, upstream: UpstreamSettings, headers: Headers, *, drop: frozenset[bytes], attempt: int
    ) -> bytes:
        skip = _skipped(drop, keyed=upstream.own_key is not None) | _named(headers)
        lines = [
            b"%b: %b" % (copied, value)
            for name, value in headers
            if (copied := _copied(name)) is not None and name not in skip
        ]
        if attempt:
            lines = [
                b"%b-%d" % (line, attempt) if line.startswith(b"idempotency-key:") else line
                for line in lines
            ]
        if upstream.own_key is not None:
            lines.append(
                "{}: {}".format(*credential_field(upstream.credential, upstream.own_key)).encode()
            )
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
    if b"via" not in dict(headers):
        return False
    passed = [hop for name, value in headers if name == b"via" for hop in value.split(b",")]
    return any(f"weir-{instance}".encode() in hop.split()[1:2] for hop in passed)


def _answer(
    response: aiohttp.ClientResponse, upstream: UpstreamSettings, hidden: bytes
) -> HTTPAnswer:
    raw = response.raw_headers
    problem = None
    kept = [(relayed, value) for name, value in raw if (relayed := _relayed(name)) is not None]
    status = response.status
    if not (200 <= status < 300 or status == 304 or 400 <= status < 600):
        problem = f"answered with status {status}, which Weir neither follows nor passes on"
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
    if status == 304:  # its length is that of a body which does not come
        kept = [header for header in kept if header[0] != b"content-length"]
    return HTTPAnswer(response, tuple(kept), upstream, hidden)


def _failure(error: Exception, upstream: UpstreamSettings) -> ProxyError:
    name = f"Upstream {upstream.name!r}"
    match error:
        case aiohttp.ConnectionTimeoutError() if (
            upstream.timeout.connect <= upstream.timeout.first_byte
        ):
            return UpstreamUnreachable(
                f"{name} could not be connected to within {upstream.timeout.connect:g} seconds."
            )
        case TimeoutError():
            return UpstreamTimeout(
                f"{name} did not begin to answer within {upstream.timeout.first_byte:g} seconds."
            )
        case aiohttp.ClientConnectorDNSError():
            return UpstreamUnreachable(f"The host name of {name.lower()} could not be resolved.")
        case aiohttp.ClientSSLError():
            return UpstreamUnreachable(f"{name} could not be connected to: TLS failed.")
        case aiohttp.ClientConnectorError():
            return UpstreamUnreachable(f"{name} could not be connected to.")
        case aiohttp.ClientResponseError() | aiohttp.ClientPayloadError():
            return UpstreamUnreachable(f"{name} answered with something that is not HTTP/1.1.")
        case aiohttp.ClientConnectionError() | OSError():
            return UpstreamUnreachable(f"{name} closed the connection without an answer.")
        case _:
            return UpstreamUnreachable(f"{name} could not be reached.")


@functools.lru_cache(maxsize=64)
def _timeout(connect: float, first_byte: float) -> aiohttp.ClientTimeout:
    return aiohttp.ClientTimeout(total=None, connect=min(connect, first_byte))


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
        shown = query.decode() if query.isascii() else urllib.parse.quote_from_bytes(query, _ASCII)
        address = f"{address}?{shown}"
    url = URL(address, encoded=True)
    line = f"{method} {url.raw_path_qs} HTTP/1.1".encode()
    if not url.raw_host or _NOT_IN_VALUE.search(line):
        raise InvalidRequest(UNSENDABLE)
    return url, line + f"\r\nHost: {url.host_port_subcomponent}\r\n".encode()


_ASCII = bytes(range(0x21, 0x7F)).decode()


def _named(headers: Headers) -> frozenset[bytes]:
    """The headers that ``Connection`` declares to be hop-by-hop (RFC 9110 7.6.1); their names are
    in lower case.
    """
    if b"connection" not in dict(headers):
        return frozenset()
    return _tokens(b",".join([value for name, value in headers if name == b"connection"]))


@functools.lru_cache(maxsize=64)
def _tokens(value: bytes) -> frozenset[bytes]:
    return frozenset(token.strip().lower() for token in value.split(b","))


MAX_ANSWER = 64 * 1024 * 1024
"""Bytes of an answer to a request of Weir's own: 256 vectors of 4,096 numbers take 24 MB."""
_STEERING = re.compile(
    rb"(?:x-portkey|helicone|(?:x-)?litellm|cf-aig|x-envoy|x-gateway|x-bf|x-bifrost|x-kong|x-ai-eg)-.*"
    rb"|.*(?:model|deployment|fallback|provider|target-url|override).*|x-(?:http-)?method|x-(?:original|rewrite)-ur[il]",
    re.IGNORECASE | re.DOTALL,
)
"""What chooses another model, provider, method or path in a gateway upstream of Weir, without any
word in path or body.
"""


class LitellmProvider(Protocol):
    """One upstream of kind ``litellm``; what it is made of is loaded with litellm."""

    async def send(self, *, body: bytes, credential: bytes, headers: Headers) -> Answer:
        """The answer to a chat request, its first chunk read if it is a stream, so that its status
        is the true one.

        Raises UpstreamUnreachable, UpstreamTimeout, UpstreamEmpty, InvalidRequest.
        """

    async def close(self) -> None: ...


ASKS_NO_NETWORK = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_LOCAL_ANTHROPIC_BETA_HEADERS": "True",
    "LITELLM_LOCAL_BLOG_POSTS": "True",
    "LITELLM_MODE": "PRODUCTION",  # which reads no .env
}


def providers_for(upstreams: Iterable[UpstreamSettings]) -> dict[str, LitellmProvider]:
    """A provider for each upstream of kind ``litellm``, by the upstream's name.

    The import of litellm takes seconds and 165 MB: it is done here, and only if there is such an
    upstream. The process's environment makes it use no network.
    """
    wanted = [upstream for upstream in upstreams if upstream.kind == "litellm"]
    if not wanted:
        return {}
    os.environ.update(ASKS_NO_NETWORK)
    found: dict[str, LitellmProvider] = importlib.import_module("proxy.upstream.litellm").providers(
        wanted
    )
    return found


class Upstreams:
    def __init__(self, client: Client, providers: Mapping[str, LitellmProvider]) -> None:
        self._client = client
        self._providers = dict(providers)

    @property
    def connections(self) -> tuple[int, int]:
        return self._client.connections

    def send(
        self,
        destination: Destination,
        *,
        method: str,
        headers: Headers,
        body: bytes | AsyncIterator[bytes] | None,
        query: bytes = b"",
        drop: frozenset[bytes] = frozenset(),
        attempt: int = 0,
        length: int | None = None,
    ) -> Coroutine[Any, Any, Answer]:
        """As :meth:`Client.send`; not itself a coroutine, which every wait would have to pass."""
        upstream = destination.upstream
        caller = destination.caller
        if upstream.kind == "litellm":
            provider = self._providers.get(upstream.name)
            if provider is None or destination.path != CHAT_PATH or not isinstance(body, bytes):
                raise UpstreamUnreachable(
                    f"Upstream {upstream.name!r} answers chat completions only."
                )
            kept = [header for header in headers if header[0] not in drop]
            return provider.send(body=body, credential=caller.credential, headers=kept)
        headers = _judged(headers, caller)
        has_key_to_pass = caller.name is not None and upstream.passes_key
        if has_key_to_pass:
            headers = _with_credential(headers, upstream, caller)
        return self._client.send(
            upstream,
            method=method,
            path=destination.path,
            query=query,
            headers=headers,
            body=body,
            tenant=caller.tenant,
            attempt=attempt,
            drop=drop,
            length=length,
            hidden=caller.credential if has_key_to_pass else b"",
        )

    async def post(self, destination: Destination, body: bytes) -> tuple[int, bytes]:
        answer = await self.send(
            destination, method="POST", headers=own_headers(destination), body=body
        )
        return await _whole(answer)

    async def get(
        self, upstream: UpstreamSettings, caller: Caller, url: str, body: bytes | None
    ) -> tuple[int, bytes]:
        base, _, path = url.rpartition("/")
        answer = await self._client.send(
            replace(upstream, base_url=base, auth=upstream.credential),
            method="POST" if body else "GET",
            path=f"/{path}",
            headers=_own_credential(upstream, caller),
            body=body,
            tenant=caller.tenant,
        )
        return await _whole(answer)

    async def close(self) -> None:
        await self._client.close()
        for provider in self._providers.values():
            await provider.close()


async def read_of(answer: Answer, most: int) -> bytes:
    try:
        return await answer.read(most)
    except StreamBroken as error:
        raise UpstreamUnreachable(str(error)) from None
    finally:
        answer.close()


async def _whole(answer: Answer) -> tuple[int, bytes]:
    body = await read_of(answer, MAX_ANSWER)
    if not answer.ended:
        raise UpstreamUnreachable(
            f"The upstream's answer to a request of Weir's own has over {MAX_ANSWER} bytes."
        )
    return answer.status, body


def _judged(headers: Headers, caller: Caller) -> Headers:
    """The headers without those by which a key could get what its list of models does not have."""
    if not caller.models or not caller.is_restricted:
        return headers
    return [(name, value) for name, value in headers if _STEERING.fullmatch(name) is None]


def _with_credential(headers: Headers, upstream: UpstreamSettings, caller: Caller) -> Headers:
    kept = [(name, value) for name, value in headers if name.lower() not in CREDENTIALS]
    return [*kept, *_own_credential(upstream, caller)]


def own_headers(destination: Destination) -> list[tuple[bytes, bytes]]:
    return [
        (b"content-type", b"application/json"),
        *_own_credential(destination.upstream, destination.caller),
    ]


def _own_credential(upstream: UpstreamSettings, caller: Caller) -> list[tuple[bytes, bytes]]:
    if not caller.credential:
        return []
    name, value = credential_field(upstream.credential, caller.credential.decode("latin-1"))
    return [(name.encode(), value.encode("latin-1"))]


UNSUPPORTED_FOR = 600.0
MAX_UNSUPPORTED = 1_000
_SAYS_NOTHING_ELSE = frozenset({"not found", "file not found", "resource not found"})
"""All that Anthropic, llama.cpp, FastAPI and Azure say where nothing is at an address; of a model
they name it.
"""


def has_no_route(status: int, body: bytes, path: str) -> bool:
    """Whether an answer says that nothing is at ``path``, and not that a model or a stored answer
    is missing.

    405 says so (RFC 9110, 15.5.6). A 404 does where its body is not the error of an API, where the
    error names the route (OpenAI: "Invalid URL (POST /v1/…)") or nothing at all. An error that
    mentions a model is about the model.
    """
    if status != 404:
        return status == 405
    try:
        value = read_value(body)
    except ValueError:
        value = None
    error = (
        value.get("error", value.get("detail", value.get("message")))
        if isinstance(value, dict)
        else None
    )
    said = error.get("message") if isinstance(error, dict) else error
    text = (said if isinstance(said, str) else body.decode("utf-8", "replace")).lower()
    if "model" in text:
        return False
    return not isinstance(said, str) or text.strip(" .!") in _SAYS_NOTHING_ELSE or path in text


def unsupported_endpoints(
    timer: Callable[[], float] = time.monotonic,
) -> TTLCache[tuple[str, str], None]:
    """What upstreams have nothing at, by name and endpoint; each is tried again after a time."""
    return TTLCache(MAX_UNSUPPORTED, UNSUPPORTED_FOR, timer)
