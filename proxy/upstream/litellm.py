"""One call through litellm: what is asked, its way to the provider, and its answer or what its exception means.

litellm raises its own classes, whose status and text are not always the provider's: Anthropic's 413 becomes a
400 and its 529 a 500, a broken connection becomes a 500. What the provider said stands further down the chain
of the exception, and is taken from there. The module is loaded with litellm, whose client, httpx, nothing else needs.
"""

import ast
import asyncio
import contextlib
import importlib
import json
import logging
import re
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Mapping
from typing import Any
from weakref import WeakSet

import aiohttp
import httpx
import msgspec
import openai

from proxy.access.destination import Headers
from proxy.config.values import UpstreamSettings
from proxy.errors import InvalidJSON, InvalidRequest, ProxyError, UpstreamEmpty, UpstreamTimeout, UpstreamUnreachable
from proxy.upstream.connection import Answer, Pools, StreamBroken
from proxy.upstream.providers import NO_KEY, SDK, copied_headers, translated
from proxy.wire.anthropic import REFUSALS
from proxy.wire.raw import unnamed_event

log = logging.getLogger("weir.upstream")

MAX_TEXT = 16_384
OVERFLOW = "context_length_exceeded"
_OWN = "litellm.exceptions"
_PREFIX = re.compile(r"^(?:(?:litellm\.)?\w+(?:Error|Exception)(?::| -) ?)+")
_ADVICE = re.compile(
    r"\s*(?:To drop these,|Traceback \(most recent call last\)|This looks like a bug in LiteLLM).*", re.DOTALL
)
_QUERY = re.compile(r"(https?://[^\s?\"'`<>]+)\?[^\s\"'`<>]*")
_GO_ON = re.compile(
    r"retry-after(?:-ms)?|x-should-retry|(?:x-)?request-id|cf-ray|x-ratelimit-.+|anthropic-.+|openai-.+"
)
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


class LitellmCalls:
    """The calls to one upstream of kind ``litellm``.

    An empty ``api_key`` in the configuration leaves the credential to the provider's own way of finding one, for
    example the instance's AWS role. A caller without a credential of its own never gets that far.
    """

    def __init__(self, upstream: UpstreamSettings, *, litellm: Any) -> None:
        self._upstream = upstream
        self._name = str(upstream.provider)
        self._litellm = litellm
        self._timeout = upstream.timeout
        self._reader = Reader(litellm, upstream.name, upstream.timeout.connect)
        self._http = importlib.import_module("litellm.llms.custom_httpx.http_handler")
        self._owned: Callable[[str], bool] = importlib.import_module("litellm.types.utils").is_litellm_owned_kwarg
        self._compatible = self._name in SDK or self._name in litellm.openai_compatible_providers
        self._pools: Pools[bytes, _ProviderPool] = Pools(
            make=self._pool, busy=lambda pool: any(line.busy for line in pool.lines), close=_ProviderPool.close
        )

    async def send(self, *, body: bytes, credential: bytes, headers: Headers) -> Answer:
        request = _request_in(body)
        key = self._key(credential)
        line = self._line(credential)
        arguments = translated(request, provider=self._name, compatible=self._compatible, owned=self._owned)
        if copied := copied_headers(headers):
            arguments["extra_headers"] = copied
        arguments |= self._connection(key, line)
        try:
            async with asyncio.timeout(self._timeout.first_byte) as limit:
                reply = await self._litellm.acompletion(**arguments)
                if not request.get("stream"):
                    return WholeAnswer(200, completion_body(reply), headers=provider_headers(reply))
                first = await first_of(reply)
        except asyncio.CancelledError:
            await line.abort()
            raise
        except Exception as error:  # noqa: BLE001 - whatever litellm raises becomes an answer or an error of Weir's
            await line.abort()
            if limit.expired():
                seconds = f"{self._timeout.first_byte:g} seconds"
                raise UpstreamTimeout(
                    f"Upstream {self._upstream.name!r} did not begin to answer within {seconds}."
                ) from None
            if line.empty:
                raise UpstreamEmpty(f"Upstream {self._upstream.name!r} answered 200 with an empty body.") from None
            told = self._reader.read(error, secret=key)
            if isinstance(told, ProxyError):
                raise told from None
            return told
        return StreamedAnswer(reply, first, line=line, reader=self._reader, secret=key, idle=self._timeout.idle)

    def _key(self, credential: bytes) -> str:
        """The operator's key, else the caller's; never none, in whose place litellm would look into the environment."""
        if not self._upstream.passes_key:
            return self._upstream.api_key.get_secret_value()
        return credential.decode("latin-1") or NO_KEY

    def _connection(self, key: str, line: LiteLLMLine) -> dict[str, Any]:
        """The arguments that say where and how to ask; the last word over whatever a client sent."""
        arguments: dict[str, Any] = {
            "api_key": key or None,
            "api_base": self._upstream.api_base,
            "timeout": self._timeout.first_byte,
            "num_retries": 0,
            "max_retries": 0,
            "_skip_mcp_handler": True,  # litellm's own MCP gateway; asking for it needs a package that is not here
        }
        if not self._compatible:
            handler = self._http.AsyncHTTPHandler
            arguments["client"] = handler(transport=line, timeout=self._timeout.first_byte, follow_redirects=False)
        return arguments

    def _pool(self) -> "_ProviderPool":
        context = self._http.get_ssl_configuration()
        secure = isinstance(context, ssl.SSLContext)
        return _ProviderPool(
            self._http.AsyncHTTPHandler.create_async_transport(
                ssl_context=context if secure else None, ssl_verify=None if secure else context
            )
        )

    def _line(self, credential: bytes) -> LiteLLMLine:
        pool = self._pools.of(credential)
        line = LiteLLMLine(pool.transport, connect=self._timeout.connect)
        pool.lines.add(line)
        return line

    async def close(self) -> None:
        await self._pools.close()
        await self._litellm.close_litellm_async_clients()


class _ProviderPool(msgspec.Struct, frozen=True):
    transport: Any
    lines: WeakSet[LiteLLMLine] = msgspec.field(default_factory=WeakSet)

    async def close(self) -> None:
        await self.transport.aclose()


def _request_in(body: bytes) -> dict[str, Any]:
    try:
        request = json.loads(body)
    except (ValueError, RecursionError):
        raise InvalidJSON("The body is not JSON.") from None
    if not isinstance(request, dict):
        raise InvalidRequest("The body must be a JSON object.")
    return request


class Reader(msgspec.Struct, frozen=True):
    litellm: Any
    upstream: str
    connect: float

    def read(self, error: BaseException, *, secret: str) -> "WholeAnswer | ProxyError":
        """The error that the provider answered with, in its own words and OpenAI's shape, or what kept it from that."""
        causes = tuple(_causes(error))
        for cause in causes:
            if self._is_answered(cause):
                return self._answered(cause, causes, secret)
        unreached = self._unreached(causes)
        if unreached is not None:
            return unreached
        name = f"Upstream {self.upstream!r}"
        if any(isinstance(cause, StopAsyncIteration) for cause in causes):
            return UpstreamUnreachable(f"{name} broke off its answer before it began.")
        if any(isinstance(cause, json.JSONDecodeError) for cause in causes):
            return UpstreamUnreachable(f"{name} sent an answer that cannot be read.")
        stated = next((cause for cause in causes if _states_status(cause)), None)
        if stated is not None:
            return self._refusal(_status(stated, causes), _text(stated), causes, secret)
        refused = next((cause for cause in causes if _is_own(cause) and 400 <= _number(cause) < 500), None)
        if refused is not None:
            text = _ADVICE.sub("", _PREFIX.sub("", str(getattr(refused, "message", "")))).strip()
            return self._refusal(_number(refused), text, causes, secret)
        log.warning(
            "litellm could not serve upstream %s: %s", self.upstream, ", ".join(type(c).__name__ for c in causes)
        )
        return UpstreamUnreachable(f"{name} could not be asked: the request could not be put into its form.")

    def _unreached(self, causes: tuple[BaseException, ...]) -> UpstreamUnreachable | UpstreamTimeout | None:
        name = f"Upstream {self.upstream!r}"
        if any(isinstance(cause, httpx.ConnectTimeout) for cause in causes):
            return UpstreamUnreachable(f"{name} could not be connected to within {self.connect:g} seconds.")
        if any(isinstance(cause, aiohttp.ClientConnectorError | ConnectionRefusedError) for cause in causes):
            return UpstreamUnreachable(f"{name} could not be connected to.")
        if any(isinstance(cause, httpx.TimeoutException) or type(cause) is openai.APITimeoutError for cause in causes):
            return UpstreamTimeout(f"{name} did not answer in time.")
        if any(isinstance(cause, httpx.TransportError | ConnectionError) for cause in causes):
            return UpstreamUnreachable(f"{name} closed the connection without an answer.")
        return None

    def _is_answered(self, cause: BaseException) -> bool:
        if isinstance(cause, httpx.HTTPStatusError):
            return True
        return isinstance(cause, openai.APIStatusError) and not _is_own(cause)

    def _answered(
        self, cause: BaseException, causes: tuple[BaseException, ...], secret: str
    ) -> "WholeAnswer | UpstreamUnreachable":
        response = cause.response  # type: ignore[attr-defined]  # both classes have one
        status = int(response.status_code)
        if status < 400:
            text = f"Upstream {self.upstream!r} answered with status {status}, which Weir does not follow."
            return UpstreamUnreachable(text)
        return self._refusal(status, response.text, causes, secret, headers=_relayed(response.headers.items()))

    def _refusal(
        self, status: int, text: str, causes: tuple[BaseException, ...], secret: str, *, headers: Headers = ()
    ) -> "WholeAnswer":
        said = _decoded(text[:MAX_TEXT])
        message = said.get("message")
        overflow = any(isinstance(cause, self.litellm.ContextWindowExceededError) for cause in causes)
        code, kind, param = said.get("code"), said.get("type"), said.get("param")
        usual = "api_error" if status >= 500 else REFUSALS[400]
        told = {
            "message": _clean(message if isinstance(message, str) else text[:MAX_TEXT], secret)
            or f"Upstream {self.upstream!r} answered with status {status}.",
            "type": kind if isinstance(kind, str) else REFUSALS.get(status, usual),
            "param": param if isinstance(param, str) else None,
            "code": OVERFLOW if overflow else code if isinstance(code, str | int) else None,
        }
        return WholeAnswer(status, json.dumps({"error": told}).encode(), headers=headers)


def _relayed(headers: Iterable[tuple[object, object]]) -> Headers:
    """Those that go on; litellm puts ``llm_provider-`` before some."""
    kept: dict[str, str] = {}
    for name, value in headers:
        plain = str(name).lower().removeprefix("llm_provider-")
        if _GO_ON.fullmatch(plain) and str(value).isascii() and str(value).isprintable():
            kept.setdefault(plain, str(value))
    return tuple((name.encode(), value.encode()) for name, value in kept.items())


def _causes(error: BaseException) -> Iterator[BaseException]:
    waiting: list[BaseException | None] = [error]
    seen: set[int] = set()
    while waiting:
        cause = waiting.pop(0)
        if not isinstance(cause, BaseException) or id(cause) in seen:
            continue
        seen.add(id(cause))
        yield cause
        waiting += [getattr(cause, "original_exception", None), cause.__cause__, cause.__context__]


def _is_own(cause: BaseException) -> bool:
    return any(base.__module__ == _OWN for base in type(cause).__mro__)


def _states_status(cause: BaseException) -> bool:
    invented = getattr(cause, "status_code_is_synthesized", False)
    return not _is_own(cause) and isinstance(getattr(cause, "status_code", None), int) and not invented


def _number(cause: BaseException) -> int:
    status = getattr(cause, "status_code", None)
    return status if isinstance(status, int) else 0


def _status(stated: BaseException, causes: tuple[BaseException, ...]) -> int:
    mapped = next((_number(cause) for cause in causes if _is_own(cause)), 0)
    return mapped if 400 <= mapped < 500 else max(_number(stated), 500)


def _text(cause: BaseException) -> str:
    return str(getattr(cause, "message", "") or cause)


def _decoded(text: str) -> Mapping[str, Any]:
    value: Any = None
    for parse in (json.loads, ast.literal_eval):
        try:
            value = parse(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
        if isinstance(value, bytes):
            return _decoded(value.decode("utf-8", "replace"))
        break
    if isinstance(value, list) and value:
        value = value[0]
    if not isinstance(value, dict):
        return {}
    inner = value.get("error", value)
    if isinstance(inner, str):
        return {"message": inner}
    return inner if isinstance(inner, dict) else {}


def _clean(text: str, secret: str) -> str:
    text = text.replace(secret, "***") if secret else text
    return _QUERY.sub(r"\1", text).strip()


JSON = (b"content-type", b"application/json")
EVENTS = (b"content-type", b"text/event-stream; charset=utf-8")
DONE = b"data: [DONE]\n\n"

Plain = dict[str, Any]


class WholeAnswer(Answer):
    def __init__(self, status: int, body: bytes, *, headers: Headers = ()) -> None:
        super().__init__(status, (JSON, *headers))
        self.body = self._rest = body

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        rest, self._rest = self._rest, b""
        if rest:
            yield rest
        self.ended = True

    def close(self) -> None: ...


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


class StreamedAnswer(Answer):
    """A stream of litellm's as server-sent events, each sent on as it comes.

    The bytes that came over ``line`` are counted, so that a stream of which litellm shows nothing for a while
    (Anthropic's pings) is not taken for a silent one.
    """

    def __init__(self, stream: Any, first: Any, *, line: LiteLLMLine, reader: Reader, secret: str, idle: float) -> None:
        super().__init__(200, (EVENTS, *provider_headers(stream)))
        self._stream = stream
        self._rest = unnamed_event(chunk_body(first))
        self._line = line
        self._reader = reader
        self._secret = secret
        self._name = f"Upstream {reader.upstream!r}"
        self._silent = False
        self._watch = IdleWatch(idle, end=self._fell_silent, received=line.received)
        self._closing: asyncio.Task[None] | None = None

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        if self._rest:
            rest, self._rest = self._rest, b""
            yield rest
        while True:
            try:
                chunk = await self._next()
            except StopAsyncIteration:
                break
            except Exception as error:  # noqa: BLE001 - whatever litellm raises becomes an event or an error of Weir's
                yield self._failed(error)
                self.ended = True
                return
            if is_invented_end(self._stream, chunk):
                self.close()
                raise StreamBroken(f"{self._name} broke off its answer.")
            yield unnamed_event(chunk_body(chunk))
        self._watch.stop()
        yield DONE
        self.ended = True

    async def _next(self) -> Any:
        if self._closing is not None:
            raise StreamBroken(f"{self._name} broke off its answer.")
        self._watch.start()
        try:
            return await anext(self._stream)
        finally:
            self._watch.since = None

    def _fell_silent(self) -> None:
        self._silent = True
        self.close()

    def _failed(self, error: Exception) -> bytes:
        self.close()
        if self._silent:
            raise UpstreamTimeout(f"{self._name} sent nothing for {self._watch.seconds:g} seconds.") from None
        told = error if isinstance(error, StreamBroken) else self._reader.read(error, secret=self._secret)
        if isinstance(told, WholeAnswer):
            return unnamed_event(told.body)
        if isinstance(told, UpstreamTimeout):
            raise told from None
        raise StreamBroken(f"{self._name} broke off its answer.") from None

    def close(self) -> None:
        self._watch.stop()
        if not self.ended and self._closing is None:
            self._closing = asyncio.ensure_future(self._abort())

    async def _abort(self) -> None:
        await self._line.abort()
        with contextlib.suppress(Exception):  # the stream is given up; how it ends is nobody's business
            await self._stream.aclose()


async def first_of(stream: Any) -> Any:
    first = await anext(stream)
    if is_invented_end(stream, first):
        raise StopAsyncIteration
    return first


def is_invented_end(stream: Any, chunk: Any) -> bool:
    """Whether litellm made up the finish reason of a stream that ended without one (it says ``stop``)."""
    ends = any(getattr(choice, "finish_reason", None) for choice in chunk.choices)
    known = getattr(stream, "received_finish_reason", "") or getattr(stream, "intermittent_finish_reason", None)
    return ends and known is None


def provider_headers(reply: Any) -> Headers:
    """What goes on of the provider's headers, which litellm keeps beside its answer."""
    hidden = getattr(reply, "_hidden_params", None)
    headers = hidden.get("additional_headers") if isinstance(hidden, dict) else None
    return _relayed(headers.items()) if isinstance(headers, dict) else ()


def completion_body(reply: Any) -> bytes:
    plain = _present(reply.model_dump())
    plain["choices"] = [_choice(choice, "message") for choice in plain.get("choices", ())]
    plain["usage"] = _usage(plain["usage"]) if "usage" in plain else None
    return _bytes(_present(plain))


def chunk_body(chunk: Any) -> bytes:
    plain = _present(chunk.model_dump())
    choices = [_choice(choice, "delta") for choice in plain.get("choices", ())]
    usage = plain.pop("usage", None)
    if usage is not None:
        plain["usage"] = _usage(usage)
        choices = [choice for choice in choices if choice["delta"] or choice["finish_reason"]]
    plain["choices"] = choices
    return _bytes(plain)


def _choice(choice: Plain, said: str) -> Plain:
    plain = _present(choice)
    spoken = _present(plain.pop(said, None) or {})
    fields = _present(spoken.pop("provider_specific_fields", None) or {})
    if fields:
        spoken["provider_specific_fields"] = fields
    if "tool_calls" in spoken:
        spoken["tool_calls"] = [_call(call, whole=said == "message") for call in spoken["tool_calls"]]
    if said == "message":
        spoken = {"role": "assistant", "content": None, **spoken}
    kept = {key: plain[key] for key in plain if key not in ("index", "finish_reason", "logprobs")}
    return {
        "index": plain.get("index", 0),
        said: spoken,
        "logprobs": plain.get("logprobs"),
        "finish_reason": plain.get("finish_reason"),
        **kept,
    }


def _call(call: Plain, *, whole: bool) -> Plain:
    plain = _present(call)
    if "function" in plain:
        plain["function"] = _present(plain["function"])
    if whole:
        plain.pop("index", None)
    return plain


def _usage(usage: Plain) -> Plain:
    return {key: _present(value) if isinstance(value, dict) else value for key, value in _present(usage).items()}


def _present(plain: Mapping[str, Any]) -> Plain:
    return {key: value for key, value in plain.items() if value is not None}


def _bytes(plain: Plain) -> bytes:
    return json.dumps(plain, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")
