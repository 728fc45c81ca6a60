"""What an exception of litellm means: what the provider answered, or that nobody answered.

litellm raises its own classes, whose status and text are not always the provider's: Anthropic's 413 becomes a
400 and its 529 a 500, a broken connection becomes a 500. What the provider said stands further down the chain
of the exception, and is taken from there.
"""

import ast
import json
import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp

from proxy.errors import ProxyError, UpstreamTimeout, UpstreamUnreachable

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
_RELAYED = re.compile(
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
    """The modules that are loaded together with litellm, and only then."""

    litellm: Any
    httpx: Any
    openai: Any
    lines: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ProviderRefusal:
    """An error that the provider answered with; its own words, in OpenAI's shape."""

    status: int
    message: str
    kind: str
    code: str | int | None = None
    param: str | None = None
    headers: Headers = ()

    def body(self) -> bytes:
        """``{"error": {"message", "type", "param", "code"}}``."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return json.dumps({"error": error}).encode()


@dataclass(frozen=True, slots=True)
class Reader:
    """Reads the exceptions of one upstream; ``secret`` is taken out of every text."""

    library: Library
    upstream: str
    connect: float

    def read(self, error: BaseException, *, secret: str) -> ProviderRefusal | ProxyError:
        """What the client is told: the provider's refusal, or that it was not reached or kept silent."""
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
        """For a connection that was not made, was lost or stayed silent; None where it is not its fault."""
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
    ) -> ProviderRefusal | UpstreamUnreachable:
        response = cause.response  # type: ignore[attr-defined]  # both classes have one
        status = int(response.status_code)
        if status < 400:
            text = f"Upstream {self.upstream!r} answered with status {status}, which Weir does not follow."
            return UpstreamUnreachable(text)
        return self._refusal(status, response.text, causes, secret, headers=relayed(response.headers.items()))

    def _refusal(
        self, status: int, text: str, causes: tuple[BaseException, ...], secret: str, *, headers: Headers = ()
    ) -> ProviderRefusal:
        said = _decoded(text[:MAX_TEXT])
        message = said.get("message")
        overflow = any(isinstance(cause, self.library.litellm.ContextWindowExceededError) for cause in causes)
        code, kind, param = said.get("code"), said.get("type"), said.get("param")
        return ProviderRefusal(
            status=status,
            message=_clean(message if isinstance(message, str) else text[:MAX_TEXT], secret)
            or f"Upstream {self.upstream!r} answered with status {status}.",
            kind=kind if isinstance(kind, str) else _KINDS.get(status, "api_error" if status >= 500 else _KINDS[400]),
            code=OVERFLOW if overflow else code if isinstance(code, str | int) else None,
            param=param if isinstance(param, str) else None,
            headers=headers,
        )


def relayed(headers: Iterable[tuple[object, object]]) -> Headers:
    """The provider's headers that a client may see: limits, waiting times, the request's id."""
    kept: dict[str, str] = {}
    for name, value in headers:
        plain = str(name).lower().removeprefix("llm_provider-")
        if _RELAYED.fullmatch(plain) and str(value).isascii() and str(value).isprintable():
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
    """Whether litellm made the exception itself, by mapping another one or by refusing the request."""
    return any(base.__module__ == _OWN for base in type(cause).__mro__)


def _states_status(cause: BaseException) -> bool:
    """Whether the exception carries a provider's own words, found inside an answer that began well."""
    invented = getattr(cause, "status_code_is_synthesized", False)
    return not _is_own(cause) and isinstance(getattr(cause, "status_code", None), int) and not invented


def _number(cause: BaseException) -> int:
    status = getattr(cause, "status_code", None)
    return status if isinstance(status, int) else 0


def _status(stated: BaseException, causes: tuple[BaseException, ...]) -> int:
    """litellm gives an error inside an answer the status 200 or 500; where it recognised the error it knows better."""
    mapped = next((_number(cause) for cause in causes if _is_own(cause)), 0)
    return mapped if 400 <= mapped < 500 else max(_number(stated), 500)


def _text(cause: BaseException) -> str:
    return str(getattr(cause, "message", "") or cause)


def _decoded(text: str) -> Mapping[str, Any]:
    """The error object in a body; litellm prints some bodies as Python values. Empty where there is none."""
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
    """The text without the credential and without the queries of addresses, where some providers put it."""
    text = text.replace(secret, "***") if secret else text
    return _QUERY.sub(r"\1", text).strip()
