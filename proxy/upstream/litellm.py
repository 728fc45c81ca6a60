"""Upstreams reached through litellm: the request, its way to the provider, its answer or what its
exception means.

litellm translates and does nothing else that it could: no callbacks, no log, no repetition, no
redirect, no credential from the environment on a caller's behalf. A client's body never becomes its
arguments: by ``api_base`` or ``fallbacks`` a client could have the operator's key sent elsewhere
(CVE-2024-6587).

This module is loaded by :func:`proxy.upstream.client.providers_for`, and only where an upstream
needs it.
"""

import asyncio
import codecs
import contextlib
import importlib
import json
import logging
import re
import ssl
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator, Sequence
from typing import Any
from weakref import WeakSet

import aiohttp
import httpx
import litellm
import openai
from litellm.constants import DEFAULT_CHAT_COMPLETION_PARAM_VALUES
from litellm.llms.custom_httpx.http_handler import AsyncHTTPHandler, get_ssl_configuration
from litellm.types.utils import is_litellm_owned_kwarg

from proxy.access.destination import Headers
from proxy.config.values import UpstreamSettings
from proxy.errors import (
    InvalidJSON,
    InvalidRequest,
    ProxyError,
    UpstreamEmpty,
    UpstreamTimeout,
    UpstreamUnreachable,
)
from proxy.upstream.connection import Answer, Pools, StreamBroken
from proxy.wire.anthropic import REFUSALS
from proxy.wire.raw import unnamed_event

log = logging.getLogger("weir.upstream")

SWITCHES: dict[str, object] = {
    "suppress_debug_info": True,
    "redact_messages_in_exceptions": True,
    "disable_streaming_logging": True,
    "disable_aiohttp_trust_env": True,
    "REPEATED_STREAMING_CHUNK_LIMIT": sys.maxsize,
}
SDK = frozenset(
    {
        "openai",
        "azure",
        "azure_text",
        "text-completion-openai",
        "custom_openai",
        "mistral",
        "openrouter",
    }
)
NO_KEY = "no-key"
MAX_TEXT = 16_384
NOT_A_FIELD = re.compile(
    r"_.*|(?:litellm|mock|aws|azure|vertex|google|gcp|gcs|s3|watsonx|wx|oci|sap|databricks|snowflake|sagemaker)_.*"
    r"|.*(?:api_|base_url|endpoint|credential|secret|password|access_token|token_file|proxy|header|callback).*"
    r"|(?:json_mode|is_vertex_request|deployment_id|model_list|shared_session|client|timeout|project|region|location"
    r"|organization|drop_params|additional_drop_params|enable_json_schema_validation)"
)
"""Names that steer litellm or its connection in one of its providers, so that no client may set
them.
"""
COPIED = frozenset({b"traceparent", b"tracestate", b"anthropic-beta", b"http-referer", b"x-title"})
RELAYED = re.compile(
    r"retry-after(?:-ms)?|x-should-retry|(?:x-)?request-id|cf-ray|x-ratelimit-.+|anthropic-.+|openai-.+"
)
_OWN_WORDS = re.compile(
    r"^(?:(?:litellm\.)?\w+(?:Error|Exception)(?::| -) ?)+"
    r"|\s*(?:To drop these,|Traceback \(most recent call last\)|This looks like a bug in LiteLLM).*",
    re.DOTALL,
)
_QUERY = re.compile(r"(https?://[^\s?\"'`<>]+)\?[^\s\"'`<>]*")
_SPLIT_BY_HTTPX = {ord(character): ascii(character)[1:-1] for character in "\u2028\u2029"} | {
    0x85: "\\u0085"
}
"""Legal inside JSON, and no line ends in an event stream (WHATWG 9.2.5), but litellm drops what
follows them.
"""
_PROBLEMS: Sequence[tuple[tuple[type[BaseException], ...], type[ProxyError], str]] = (
    (
        (httpx.ConnectTimeout,),
        UpstreamUnreachable,
        "could not be connected to within {connect:g} seconds.",
    ),
    (
        (aiohttp.ClientConnectorError, ConnectionRefusedError),
        UpstreamUnreachable,
        "could not be connected to.",
    ),
    ((httpx.TimeoutException,), UpstreamTimeout, "did not answer in time."),
    (
        (httpx.TransportError, ConnectionError),
        UpstreamUnreachable,
        "closed the connection without an answer.",
    ),
    ((StopAsyncIteration,), UpstreamUnreachable, "broke off its answer before it began."),
    ((json.JSONDecodeError,), UpstreamUnreachable, "sent an answer that cannot be read."),
)
JSON = (b"content-type", b"application/json")
EVENTS = (b"content-type", b"text/event-stream; charset=utf-8")


class _Pool:
    """The connections of one credential; idle ones go first where there are too many pools."""

    def __init__(self) -> None:
        context = get_ssl_configuration()
        is_secure = isinstance(context, ssl.SSLContext)
        self.transport = AsyncHTTPHandler.create_async_transport(
            ssl_context=context if is_secure else None, ssl_verify=None if is_secure else context
        )
        self.lines: WeakSet[_Line] = WeakSet()

    async def close(self) -> None:
        await self.transport.aclose()


class _Line(httpx.AsyncBaseTransport):
    """One call's way to the provider; ``received`` counts the bytes that came, pings of Anthropic's
    too.

    litellm retries, on a new connection, after a connection was lost with a request on it; here
    that error looks like one of those after which it does not.
    """

    def __init__(self, pool: _Pool, connect: float) -> None:
        self._transport = pool.transport
        self._timeout = {"connect": connect, "read": None, "write": None, "pool": None}
        self.response: httpx.Response | None = None
        self.received = 0
        pool.lines.add(self)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        request.extensions = {**request.extensions, "timeout": self._timeout}
        request.headers["accept-encoding"] = "identity"
        try:
            response: httpx.Response = await self._transport.handle_async_request(request)
        except (httpx.ConnectError, httpx.RemoteProtocolError) as error:
            raise httpx.NetworkError("connection lost", request=request) from error
        is_text = response.headers.get("content-type", "").startswith("text/event-stream")
        response.stream = _Body(response.stream, self, table=_SPLIT_BY_HTTPX if is_text else {})
        self.response = response
        return response

    async def abort(self) -> None:
        if self.response is not None:
            with contextlib.suppress(Exception):  # it is given up; how it ends does not matter
                await self.response.aclose()


class _Body(httpx.AsyncByteStream):
    def __init__(self, stream: Any, line: _Line, *, table: dict[int, str]) -> None:
        self._stream = stream
        self._line = line
        self._table = table

    async def __aiter__(self) -> AsyncIterator[bytes]:
        decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
        async for chunk in self._stream:
            self._line.received += len(chunk)
            text = decoder.decode(chunk).translate(self._table)
            yield text.encode("utf-8", "surrogateescape")
        yield decoder.decode(b"", final=True).encode("utf-8", "surrogateescape")

    async def aclose(self) -> None:
        await self._stream.aclose()


class LitellmCalls:
    """The chat requests to one upstream.

    An empty ``api_key`` in the configuration leaves the credential to the provider's own way of
    finding one, for example the instance's AWS role. A caller without a credential of its own never
    gets that far.
    """

    def __init__(self, upstream: UpstreamSettings) -> None:
        self.upstream = upstream
        self.name = f"Upstream {upstream.name!r}"
        self._provider = str(upstream.provider)
        self._is_compatible = (
            self._provider in SDK or self._provider in litellm.openai_compatible_providers
        )
        self._pools: Pools[bytes, _Pool] = Pools(
            make=_Pool, busy=lambda pool: bool(pool.lines), close=_Pool.close
        )

    async def send(self, *, body: bytes, credential: bytes, headers: Headers) -> Answer:
        """As :meth:`proxy.upstream.client.LitellmProvider.send`."""
        timeout = self.upstream.timeout
        try:
            request = json.loads(body)
        except (ValueError, RecursionError):
            raise InvalidJSON("The body is not JSON.") from None
        if not isinstance(request, dict):
            raise InvalidRequest("The body must be a JSON object.")
        # never none, for which litellm would use the environment's
        passed = credential.decode("latin-1") or NO_KEY
        key = passed if self.upstream.passes_key else self.upstream.api_key.get_secret_value()
        line = _Line(self._pools.of(credential), timeout.connect)
        arguments = self._arguments(request) | {
            "extra_headers": {
                n.lower().decode(): v.decode("latin-1") for n, v in headers if n.lower() in COPIED
            },
            "api_key": key or None,
            "api_base": self.upstream.api_base,
            "timeout": timeout.first_byte,
            "num_retries": 0,
            "max_retries": 0,
            "_skip_mcp_handler": True,  # litellm's own MCP gateway
        }
        if not self._is_compatible:
            arguments["client"] = AsyncHTTPHandler(
                transport=line, timeout=timeout.first_byte, follow_redirects=False
            )
        try:
            async with asyncio.timeout(timeout.first_byte) as limit:
                reply = await litellm.acompletion(**arguments)
                if not request.get("stream"):
                    return WholeAnswer(200, completion_body(reply), headers=provider_headers(reply))
                first = await anext(reply)
                if _is_invented_end(reply, first):
                    raise StopAsyncIteration  # noqa: TRY301 - as where nothing comes at all
        except asyncio.CancelledError:
            await line.abort()
            raise
        except Exception as error:  # noqa: BLE001 - whatever litellm raises becomes an answer or an error of Weir's
            await line.abort()
            if limit.expired():
                seconds = f"{timeout.first_byte:g} seconds"
                raise UpstreamTimeout(
                    f"{self.name} did not begin to answer within {seconds}."
                ) from None
            if line.response is not None and line.response.status_code == 200 and not line.received:
                raise UpstreamEmpty(f"{self.name} answered 200 with an empty body.") from None
            return self.refusal(error, key)
        return StreamedAnswer(self, reply, first, line=line, key=key)

    def _arguments(self, request: dict[str, Any]) -> dict[str, Any]:
        """The client's fields as litellm takes them: by name what it translates, all others as they
        are.
        """
        fields = {name: value for name, value in request.items() if value is not None}
        model = str(fields.pop("model", ""))
        named: dict[str, Any] = {
            "model": model
            if model.startswith(f"{self._provider}/")
            else f"{self._provider}/{model}"
        }
        steering = {
            name for name in fields if is_litellm_owned_kwarg(name) or NOT_A_FIELD.fullmatch(name)
        }
        if self._is_compatible:
            names = (fields.keys() & DEFAULT_CHAT_COMPLETION_PARAM_VALUES.keys()) - steering
            named |= {name: fields.pop(name) for name in names}
            return named | ({"extra_body": fields} if fields else {})
        metadata = fields.pop("metadata", None)
        if isinstance(metadata, dict) and isinstance(metadata.get("user_id"), str):
            named["metadata"] = {"user_id": metadata["user_id"]}
        for name in steering - {"metadata"}:
            text = f"The field {name[:80]!r} cannot be sent to the provider {self._provider!r}."
            raise InvalidRequest(text, param=name[:80])
        return named | fields

    def refusal(self, error: BaseException, key: str) -> "WholeAnswer":
        """The error that the provider answered with, in its own words and OpenAI's shape.

        litellm's own status and text are not always the provider's: Anthropic's 413 becomes a 400
        and its 529 a 500. What the provider said is further down the chain of the exception. Raises
        what kept it from an answer.
        """
        causes = tuple(_causes(error))
        own = [
            cause
            for cause in causes
            if any(b.__module__ == "litellm.exceptions" for b in type(cause).__mro__)
        ]
        refused = next((cause for cause in own if 400 <= _status(cause) < 500), None)
        is_overflow = any(isinstance(cause, litellm.ContextWindowExceededError) for cause in causes)
        for cause in causes:
            if (
                isinstance(cause, httpx.HTTPStatusError | openai.APIStatusError)
                and cause not in own
            ):
                response = cause.response
                if response.status_code < 400:
                    text = (
                        f"{self.name} answered with status {response.status_code}, which Weir does"
                        " not follow."
                    )
                    raise UpstreamUnreachable(text) from None
                headers = _relayed(response.headers.items())
                return self._refusal(
                    response.status_code, response.text, key, headers, is_overflow=is_overflow
                )
        for kinds, problem, text in _PROBLEMS:
            if any(isinstance(cause, kinds) for cause in causes):
                raise problem(
                    f"{self.name} {text.format(connect=self.upstream.timeout.connect)}"
                ) from None
        stated = next((cause for cause in causes if cause not in own and _status(cause)), None)
        if stated is not None:
            status = max(_status(stated), 500) if refused is None else _status(refused)
            return self._refusal(status, _text(stated), key, is_overflow=is_overflow)
        if refused is not None:
            text = _OWN_WORDS.sub("", _text(refused)).strip()
            return self._refusal(_status(refused), text, key, is_overflow=is_overflow)
        names = ", ".join(type(cause).__name__ for cause in causes)
        log.warning("litellm could not serve upstream %s: %s", self.upstream.name, names)
        problem_text = (
            f"{self.name} could not be asked: the request could not be put into its form."
        )
        raise UpstreamUnreachable(problem_text) from None

    def _refusal(
        self, status: int, text: str, key: str, headers: Headers = (), *, is_overflow: bool
    ) -> "WholeAnswer":
        text = text[:MAX_TEXT]
        said = _error_in(text)
        message = said.get("message")
        clean = message if isinstance(message, str) else text
        clean = _QUERY.sub(r"\1", clean.replace(key, "***") if key else clean).strip()
        kind = said.get("type")
        usual = REFUSALS.get(status, "api_error" if status >= 500 else REFUSALS[400])
        param = said.get("param")
        code = "context_length_exceeded" if is_overflow else said.get("code")
        error = {
            "message": clean or f"{self.name} answered with status {status}.",
            "type": kind if isinstance(kind, str) else usual,
            "param": param if isinstance(param, str) else None,
            "code": code if isinstance(code, str | int) else None,
        }
        return WholeAnswer(status, json.dumps({"error": error}).encode(), headers=headers)

    async def close(self) -> None:
        await self._pools.close()
        await litellm.close_litellm_async_clients()


def providers(upstreams: Sequence[UpstreamSettings]) -> dict[str, LitellmCalls]:
    """One for each upstream, by its name; litellm is set up for them, and loads what their
    providers need.
    """
    for name, value in SWITCHES.items():
        setattr(litellm, name, value)
    for name in ("LiteLLM", "LiteLLM Router", "LiteLLM Proxy"):
        logging.getLogger(name).disabled = True
    found = {upstream.name: LitellmCalls(upstream) for upstream in upstreams}
    for provider in {upstream.provider for upstream in upstreams}:
        # the first request will say what is wrong with the provider
        with contextlib.suppress(Exception):
            hello = [{"role": "user", "content": "-"}]
            litellm.completion(
                f"{provider}/-",
                messages=hello,
                api_key=NO_KEY,
                mock_response="-",
                _skip_mcp_handler=True,
            )
            # else with the first request
            importlib.import_module("litellm.litellm_core_utils.default_encoding")
    return found


class WholeAnswer(Answer):
    def __init__(self, status: int, body: bytes, *, headers: Headers = ()) -> None:
        super().__init__(status, (JSON, *headers))
        self.body = body
        self._rest = body

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        rest = self._rest
        self._rest = b""
        if rest:
            yield rest
        self.ended = True

    def close(self) -> None: ...


class StreamedAnswer(Answer):
    """A stream of litellm's as server-sent events, each sent on as it comes."""

    def __init__(
        self, calls: LitellmCalls, stream: Any, first: Any, *, line: _Line, key: str
    ) -> None:
        super().__init__(200, (EVENTS, *provider_headers(stream)))
        self._calls = calls
        self._stream = stream
        self._rest = unnamed_event(chunk_body(first))
        self._line = line
        self._key = key
        self._closing: asyncio.Task[None] | None = None

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        rest = self._rest
        self._rest = b""
        if rest:
            yield rest
        broken = StreamBroken(f"{self._calls.name} broke off its answer.")
        while self._closing is None:
            try:
                chunk = await self._next()
            except StopAsyncIteration:
                yield b"data: [DONE]\n\n"
                self.ended = True
                return
            except Exception as error:
                self.close()
                if isinstance(error, UpstreamTimeout):
                    raise
                try:
                    refusal = self._calls.refusal(error, self._key)
                except UpstreamUnreachable:
                    raise broken from None
                yield unnamed_event(refusal.body)
                self.ended = True
                return
            if _is_invented_end(self._stream, chunk):
                self.close()
                break
            yield unnamed_event(chunk_body(chunk))
        raise broken

    async def _next(self) -> Any:
        """The next chunk; UpstreamTimeout where nothing has come over the line for ``idle``
        seconds.
        """
        idle = self._calls.upstream.timeout.idle
        following = asyncio.ensure_future(anext(self._stream))
        received = -1
        try:
            while not following.done():
                if received == self._line.received:
                    raise UpstreamTimeout(f"{self._calls.name} sent nothing for {idle:g} seconds.")
                received = self._line.received
                await asyncio.wait((following,), timeout=idle)
            return following.result()
        finally:
            following.cancel()

    def close(self) -> None:
        if not self.ended and self._closing is None:
            self._closing = asyncio.ensure_future(self._abort())

    async def _abort(self) -> None:
        await self._line.abort()
        # the stream is given up; how it ends does not matter
        with contextlib.suppress(Exception):
            await self._stream.aclose()


def _causes(error: BaseException) -> Iterator[BaseException]:
    waiting: list[BaseException | None] = [error]
    seen: set[int] = set()
    while waiting:
        cause = waiting.pop(0)
        if isinstance(cause, BaseException) and id(cause) not in seen:
            seen.add(id(cause))
            yield cause
            waiting += [
                getattr(cause, "original_exception", None),
                cause.__cause__,
                cause.__context__,
            ]


def _status(cause: BaseException) -> int:
    """The status that an exception states; 0 for none, or one that litellm made up."""
    status = getattr(cause, "status_code", None)
    if not isinstance(status, int) or getattr(cause, "status_code_is_synthesized", False):
        return 0
    return status


def _text(cause: BaseException) -> str:
    return str(getattr(cause, "message", "") or cause)


def _error_in(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    if isinstance(value, list) and value:  # Gemini's
        value = value[0]
    error = value.get("error", value) if isinstance(value, dict) else {}
    if isinstance(error, str):
        return {"message": error}
    return error if isinstance(error, dict) else {}


def _relayed(headers: Iterable[tuple[object, object]]) -> Headers:
    """Those that are forwarded; litellm puts ``llm_provider-`` before some."""
    kept: dict[str, str] = {}
    for name, value in headers:
        plain = str(name).lower().removeprefix("llm_provider-")
        if RELAYED.fullmatch(plain) and str(value).isascii() and str(value).isprintable():
            kept.setdefault(plain, str(value))
    return tuple((name.encode(), value.encode()) for name, value in kept.items())


def provider_headers(reply: Any) -> Headers:
    """The provider's headers that are forwarded, which litellm keeps with its answer."""
    hidden = getattr(reply, "_hidden_params", None)
    headers = hidden.get("additional_headers") if isinstance(hidden, dict) else None
    return _relayed(headers.items()) if isinstance(headers, dict) else ()


def _is_invented_end(stream: Any, chunk: Any) -> bool:
    """Whether litellm made up the finish reason of a stream that ended without one (it says
    ``stop``).
    """
    ends = any(getattr(choice, "finish_reason", None) for choice in chunk.choices)
    known = getattr(stream, "received_finish_reason", "") or getattr(
        stream, "intermittent_finish_reason", None
    )
    return ends and known is None


def completion_body(reply: Any) -> bytes:
    plain = reply.model_dump(exclude_none=True)
    for choice in plain.get("choices", ()):
        choice["message"] = {"role": "assistant", "content": None} | choice["message"]
        for call in choice["message"].get("tool_calls", ()):
            call.pop("index", None)
    return json.dumps(plain).encode()


def chunk_body(chunk: Any) -> bytes:
    plain = chunk.model_dump(exclude_none=True)
    choices = [{"delta": {}, "finish_reason": None} | each for each in plain.get("choices", ())]
    if "usage" in plain:
        choices = [choice for choice in choices if choice["delta"] or choice["finish_reason"]]
    return json.dumps(plain | {"choices": choices}).encode()
