"""What litellm gives back: its answer or its stream as bytes, or what its exception means.

litellm raises its own classes, whose status and text are not always the provider's: Anthropic's 413 becomes a
400 and its 529 a 500, a broken connection becomes a 500. What the provider said stands further down the chain
of the exception, and is taken from there.
"""

import ast
import asyncio
import contextlib
import json
import logging
import re
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp

from proxy.errors import ProxyError, UpstreamTimeout, UpstreamUnreachable
from proxy.upstream.connection import Answer, IdleWatch, StreamBroken
from proxy.wire.raw import unnamed_event

log = logging.getLogger("weir.upstream")

Headers = tuple[tuple[bytes, bytes], ...]

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
_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}


@dataclass(frozen=True, slots=True)
class Library:
    litellm: Any
    httpx: Any
    openai: Any
    lines: Any


@dataclass(frozen=True, slots=True)
class Reader:
    library: Library
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
        httpx, openai, name = self.library.httpx, self.library.openai, f"Upstream {self.upstream!r}"
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
        if isinstance(cause, self.library.httpx.HTTPStatusError):
            return True
        return isinstance(cause, self.library.openai.APIStatusError) and not _is_own(cause)

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
        overflow = any(isinstance(cause, self.library.litellm.ContextWindowExceededError) for cause in causes)
        code, kind, param = said.get("code"), said.get("type"), said.get("param")
        usual = "api_error" if status >= 500 else _KINDS[400]
        told = {
            "message": _clean(message if isinstance(message, str) else text[:MAX_TEXT], secret)
            or f"Upstream {self.upstream!r} answered with status {status}.",
            "type": kind if isinstance(kind, str) else _KINDS.get(status, usual),
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


class StreamedAnswer(Answer):
    """A stream of litellm's as server-sent events, each sent on as it comes.

    The bytes that came over ``line`` are counted, so that a stream of which litellm shows nothing for a while
    (Anthropic's pings) is not taken for a silent one.
    """

    def __init__(self, stream: Any, first: Any, *, line: Any, reader: Reader, secret: str, idle: float) -> None:
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
