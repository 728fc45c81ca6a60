"""The way of one call through litellm to its provider. It imports httpx, so it is loaded together with litellm."""

import contextlib
from collections.abc import AsyncIterator

import httpx

_SPLIT_BY_HTTPX = (b"\xe2\x80\xa8", b"\xe2\x80\xa9", b"\xc2\x85")
"""U+2028, U+2029 and U+0085 in UTF-8: legal inside JSON, and no line ends in an event stream (WHATWG 9.2.5)."""
_ESCAPED = (b"\\u2028", b"\\u2029", b"\\u0085")
_BEGINNINGS = (b"\xe2\x80", b"\xe2", b"\xc2")


class LiteLLMLine:
    """One call's way to the provider: never taken twice, and can be broken off.

    It stands in the place of an httpx transport. litellm asks again, on a new connection, after a connection was lost
    with a request on it; here that error looks like one of those after which it does not. Nothing may come compressed.
    """

    def __init__(self, pool: httpx.AsyncBaseTransport, *, connect: float) -> None:
        self._pool = pool
        self._timeout = {"connect": connect, "read": None, "write": None, "pool": None}
        self._response: httpx.Response | None = None
        self._body: LineBody | None = None
        self._asking = True

    @property
    def busy(self) -> bool:
        return self._asking if self._response is None else not self._response.is_closed

    @property
    def empty(self) -> bool:
        if self._response is None or self._body is None:
            return False
        return self._response.status_code == 200 and self._body.ended and not self._body.received

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        request.extensions = {**request.extensions, "timeout": self._timeout}
        request.headers["accept-encoding"] = "identity"
        try:
            response = await self._pool.handle_async_request(request)
        except (httpx.ConnectError, httpx.RemoteProtocolError) as error:
            self._asking = False
            raise httpx.NetworkError("connection lost", request=request) from error
        assert isinstance(response.stream, httpx.AsyncByteStream)  # noqa: S101 - an asynchronous transport's
        self._body = LineBody(
            response.stream, events=response.headers.get("content-type", "").startswith("text/event-")
        )
        response.stream = self._body
        self._response = response
        return response

    async def aclose(self) -> None: ...

    def received(self) -> int:
        return self._body.received if self._body is not None else 0

    async def abort(self) -> None:
        self._asking = False
        if self._response is not None:
            with contextlib.suppress(Exception):  # it is given up; how it ends is nobody's business
                await self._response.aclose()


class LineBody(httpx.AsyncByteStream):
    """A response's body as it arrives, counted.

    In an event stream the characters at which httpx splits lines and the protocol does not are escaped; they stand
    only inside JSON strings, where the escape means the same. Without that litellm drops what follows them.
    """

    def __init__(self, stream: httpx.AsyncByteStream, *, events: bool) -> None:
        self._stream = stream
        self._events = events
        self.received = 0
        self.ended = False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        held = b""
        async for chunk in self._stream:
            self.received += len(chunk)
            if not self._events:
                yield chunk
                continue
            whole, held = escaped(held + chunk)
            if whole:
                yield whole
        if held:
            yield held
        self.ended = True

    async def aclose(self) -> None:
        await self._stream.aclose()


def escaped(data: bytes) -> tuple[bytes, bytes]:
    held = next((part for part in _BEGINNINGS if data.endswith(part)), b"")
    whole = data[: len(data) - len(held)]
    for character, escape in zip(_SPLIT_BY_HTTPX, _ESCAPED, strict=True):
        if character in whole:
            whole = whole.replace(character, escape)
    return whole, held
