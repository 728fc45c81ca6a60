"""What Weir itself may answer, as one tree, the body that OpenAI's clients expect, and no
credentials in the messages.

The list is closed. ``code`` is also the label of the error metric; an error has the status, code
and kind of the one that it is made from where it does not say its own.
"""

import json
import math
import re
from collections.abc import Mapping
from typing import ClassVar, Final


class ProxyError(Exception):
    status: int = 500
    code: ClassVar[str] = "internal"
    kind: ClassVar[str] = "invalid_request_error"
    retry_after: int | None = None

    def __init_subclass__(
        cls, *, status: int | None = None, code: str | None = None, kind: str | None = None
    ) -> None:
        cls.status = status or cls.status
        cls.code = code or cls.code
        cls.kind = kind or cls.kind

    def __init__(
        self, message: str, *, param: str | None = None, weir: Mapping[str, object] | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.weir = weir

    def headers(self) -> list[tuple[bytes, bytes]]:
        return [] if self.retry_after is None else [(b"retry-after", b"%d" % self.retry_after)]

    def body(self) -> bytes:
        return self._body(self.message, self.kind, self.code, self.weir)

    def event(self) -> bytes:
        """The last event of a stream that broke off, in the words and with the code after which
        clients retry.

        What each of them looks for is listed in docs/broken-streams.md.
        """
        message = f"Connection lost, premature close: {self.message}"
        weir = {**(self.weir or {}), "code": self.code}
        return b"\n\ndata: " + self._body(message, "server_error", "503", weir) + b"\n\n"

    def _body(self, message: str, kind: str, code: str, weir: Mapping[str, object] | None) -> bytes:
        error: dict[str, object] = {
            "message": message,
            "type": kind,
            "param": self.param,
            "code": code,
        }
        if weir is not None:
            error["weir"] = weir
        return json.dumps({"error": error}).encode()


class InvalidJSON(ProxyError, status=400, code="invalid_json"): ...


class InvalidRequest(ProxyError, status=400, code="invalid_request"):
    """JSON, but not a request that Weir can relay."""


class UnsupportedEncoding(InvalidRequest, status=415):
    """A compressed body where it has to be read."""


class UnsupportedKind(InvalidRequest, status=415):
    """A form of another media type than the one that is read."""


class NotFound(InvalidRequest, status=404):
    """No such thing in the management API."""


class Forbidden(InvalidRequest, status=403, kind="permission_error"):
    """It is there, and not for this key or this web page."""


class MethodNotAllowed(InvalidRequest, status=405):
    """It is there, and answers other methods."""

    def __init__(self, message: str, *, allowed: tuple[str, ...]) -> None:
        super().__init__(message)
        self.allowed = allowed

    def headers(self) -> list[tuple[bytes, bytes]]:
        return [*super().headers(), (b"allow", ", ".join(self.allowed).encode())]


class RequestTimeout(InvalidRequest, status=408):
    """A body did not come in time; what arrives later is not read."""

    def headers(self) -> list[tuple[bytes, bytes]]:
        return [*super().headers(), (b"connection", b"close")]


class UpgradeRequired(InvalidRequest, status=426):
    """A WebSocket was requested."""


class Conflict(InvalidRequest, status=409):
    """A request of the same conversation came first."""


class InvalidAPIKey(
    ProxyError, status=401, code="invalid_api_key", kind="authentication_error"
): ...


class ExpiredAPIKey(InvalidAPIKey):
    """An expired key: its sender is not guessing."""


class ModelNotAllowed(
    ProxyError, status=403, code="model_not_allowed", kind="permission_error"
): ...


class ContextLengthExceeded(ProxyError, status=400, code="context_length_exceeded"):
    """What may not be removed does not fit."""


class RequestTooLarge(ProxyError, status=413, code="request_too_large"):
    @classmethod
    def of_body(cls, limit: int) -> "RequestTooLarge":
        size = f"{limit / 2**20:.4g} MiB" if limit >= 2**20 else f"{limit} bytes"
        return cls(
            f"The request's body is larger than {size}, the most that this proxy reads"
            " (limits.body). Where it is images or files, leave out those of old turns; or ask the"
            " operator for a larger limits.body."
        )


# the kind is OpenAI's word
class RateLimited(ProxyError, status=429, code="rate_limit_exceeded", kind="requests"):
    """Too much from one key at once, or too many wrong keys."""

    def __init__(self, message: str, *, retry_after: int = 1) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class BudgetExceeded(
    RateLimited, code="insufficient_quota", kind="insufficient_quota"
):  # OpenAI's words, after which clients do not retry
    """A hard budget of a key or a team is used up."""

    def headers(self) -> list[tuple[bytes, bytes]]:
        # the SDKs of OpenAI and Anthropic retry twice otherwise
        return [*super().headers(), (b"x-should-retry", b"false")]


class Busy(RateLimited, status=503):
    """Too much from all keys at once."""

    @classmethod
    def after(cls, seconds: float) -> "Busy":
        return cls(
            "Weir holds as many requests as it can. Please try again.",
            retry_after=math.ceil(seconds),
        )


class EndpointMissing(ProxyError, status=404, code="endpoint_missing"):
    """The upstream has nothing at this address."""

    @classmethod
    def of(cls, upstream: str, route: str, *, status: int) -> "EndpointMissing":
        return cls(
            f"Upstream {upstream!r} has no {route}: it answered {status}. Have the client use an"
            f" endpoint that it has, and say in upstreams.{upstream}.speaks which those are; if it"
            " should have this one, check its base_url."
        )


class UpstreamUnreachable(
    ProxyError, status=502, code="upstream_unreachable", kind="api_connection_error"
): ...


class UpstreamTimeout(
    ProxyError, status=504, code="upstream_timeout", kind="api_timeout_error"
): ...


class UpstreamEmpty(ProxyError, status=502, code="upstream_empty", kind="api_error"): ...


class UpstreamPage(ProxyError, status=502, code="upstream_error_page", kind="api_error"):
    """The upstream's gateway answered with a web page in place of an error."""

    @classmethod
    def of(cls, status: int, retry_after: int | None) -> "UpstreamPage":
        error = cls(
            f"The upstream's gateway answered with status {status} and a web page, not with an"
            " error of its API."
        )
        error.status = status
        error.retry_after = retry_after
        return error


class LoopDetected(ProxyError, status=400, code="loop_detected"):
    """The request has already passed through Weir."""


class ShuttingDown(ProxyError, status=503, code="shutting_down", kind="api_error"): ...


REDACTED: Final = "[redacted]"
MAX_TEXT_LEN: Final = 4_096

_SHAPES: Final = (
    r"(?<=://)[^\s/@]{1,256}(?=@)"
    r"|(?<![A-Za-z0-9])(?:(?:weir-sk|sk|gsk|xai|hf|ghp)[-_]|AKIA|AIza)[A-Za-z0-9_\-]+"
)
# One character class per repetition and a literal in front of it, so that matching is linear in
# hostile text.
_SECRETS: Final = re.compile(
    r"(?P<kept>\bbearer\s{1,4}"
    r"|\bbasic\s{1,4}(?=[A-Za-z0-9+/=]{12})"
    r"|key=[\"'\\]{0,3}"
    r"|(?:api[-_ ]?key|authorization|secret|password|(?:access|refresh|id)_token)b?[\"'\\]{0,3}\s{0,2}"
    r"[=:,]\s{0,2}(?:(?:bearer|basic)\s{1,4}|b?[\"'\\]{1,3}(?:(?:bearer|basic)\s{1,4})?)?)"
    r"[^\s\"'\\&<>,;]+"
    rf"|{_SHAPES}",
    re.IGNORECASE,
)
_SHAPED: Final = re.compile(_SHAPES, re.IGNORECASE)
# Every alternative above contains one of these: looking for them first is ten times cheaper on an
# ordinary line.
_HINTS: Final = (
    *(
        "bearer",
        "basic",
        "key",
        "authorization",
        "secret",
        "password",
        "s_token",
        "h_token",
        "d_token",
        "://",
    ),
    *("sk-", "sk_", "xai", "hf-", "hf_", "ghp", "akia", "aiza"),
)


def redact(text: str, *, limit: int = MAX_TEXT_LEN) -> str:
    """``text`` cut to ``limit`` characters, with what looks like a credential replaced by
    ``[redacted]``.
    """
    text = text[:limit]
    if any(map(text.lower().__contains__, _HINTS)):
        return _SECRETS.sub(lambda found: (found["kept"] or "") + REDACTED, text)
    return text


def redact_shapes(text: str) -> str:
    """``text`` without what has the shape of a key, whatever precedes it: for texts that are full
    of names.
    """
    return _SHAPED.sub(REDACTED, text)
