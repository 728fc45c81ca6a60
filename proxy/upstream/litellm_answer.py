"""Answers that come through litellm, as bytes of OpenAI's protocol."""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from proxy.errors import UpstreamTimeout
from proxy.upstream.client import Answer, StreamBroken
from proxy.upstream.connection import IdleWatch
from proxy.upstream.litellm_failure import Headers, ProviderRefusal, Reader, relayed

JSON = (b"content-type", b"application/json")
EVENTS = (b"content-type", b"text/event-stream; charset=utf-8")
DONE = b"data: [DONE]\n\n"

Plain = dict[str, Any]


class WholeAnswer(Answer):
    """An answer whose body is here already."""

    def __init__(self, status: int, body: bytes, *, headers: Headers = ()) -> None:
        super().__init__(status, (JSON, *headers))
        self._rest = body

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """The body in one piece."""
        rest, self._rest = self._rest, b""
        if rest:
            yield rest
        self.ended = True

    def close(self) -> None:
        """Nothing is open."""


class StreamedAnswer(Answer):
    """A stream of litellm's as server-sent events, each sent on as it comes.

    The bytes that came over ``line`` are counted, so that a stream of which litellm shows nothing for a while
    (Anthropic's pings) is not taken for a silent one.
    """

    def __init__(self, stream: Any, first: Any, *, line: Any, reader: Reader, secret: str, idle: float) -> None:
        super().__init__(200, (EVENTS, *relayed(provider_headers(stream).items())))
        self._stream = stream
        self._first: Any = first
        self._line = line
        self._reader = reader
        self._secret = secret
        self._name = f"Upstream {reader.upstream!r}"
        self._silent = False
        self._watch = IdleWatch(idle, end=self._fell_silent, received=line.received)
        self._closing: asyncio.Task[None] | None = None

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """The events as they arrive; an error that the provider states inside its stream is the last of them."""
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
            yield event(chunk_body(chunk))
        self._watch.stop()
        yield DONE
        self.ended = True

    async def _next(self) -> Any:
        first, self._first = self._first, None
        if first is not None:
            return first
        if self._closing is not None:
            raise StreamBroken(f"{self._name} broke off its answer.")
        self._watch.start()
        self._watch.since = self._watch.clock()
        try:
            return await anext(self._stream)
        finally:
            self._watch.since = None

    def _fell_silent(self) -> None:
        self._silent = True
        self.close()

    def _failed(self, error: Exception) -> bytes:
        """The event that states the provider's error; raises StreamBroken or UpstreamTimeout for a broken stream."""
        self.close()
        if self._silent:
            raise UpstreamTimeout(f"{self._name} sent nothing for {self._watch.seconds:g} seconds.") from None
        told = error if isinstance(error, StreamBroken) else self._reader.read(error, secret=self._secret)
        if isinstance(told, ProviderRefusal):
            return event(told.body())
        if isinstance(told, UpstreamTimeout):
            raise told from None
        raise StreamBroken(f"{self._name} broke off its answer.") from None

    def close(self) -> None:
        """Also the provider's stream ends, unless it is at its end."""
        self._watch.stop()
        if not self.ended and self._closing is None:
            self._closing = asyncio.ensure_future(self._abort())

    async def _abort(self) -> None:
        await self._line.abort()
        with contextlib.suppress(Exception):  # the stream is given up; how it ends is nobody's business
            await self._stream.aclose()


async def first_of(stream: Any) -> Any:
    """The first chunk of a stream; StopAsyncIteration if it ended before it began, and what litellm raises."""
    first = await anext(stream)
    if is_invented_end(stream, first):
        raise StopAsyncIteration
    return first


def is_invented_end(stream: Any, chunk: Any) -> bool:
    """Whether litellm made up the finish reason of a stream that ended without one (it says ``stop``)."""
    ends = any(getattr(choice, "finish_reason", None) for choice in chunk.choices)
    known = getattr(stream, "received_finish_reason", "") or getattr(stream, "intermittent_finish_reason", None)
    return ends and known is None


def provider_headers(reply: Any) -> Mapping[str, Any]:
    """The headers of the provider's answer that litellm keeps beside it, some with the prefix ``llm_provider-``."""
    hidden = getattr(reply, "_hidden_params", None) or {}
    headers = hidden.get("additional_headers") if isinstance(hidden, dict) else None
    return headers if isinstance(headers, dict) else {}


def event(data: bytes) -> bytes:
    """One server-sent event."""
    return b"data: " + data + b"\n\n"


def completion_body(reply: Any) -> bytes:
    """A whole completion in OpenAI's form; litellm's empty fields are left out."""
    plain = _present(reply.model_dump())
    plain["choices"] = [_choice(choice, "message") for choice in plain.get("choices", ())]
    plain["usage"] = _usage(plain["usage"]) if "usage" in plain else None
    return _bytes(_present(plain))


def chunk_body(chunk: Any) -> bytes:
    """One chunk of a streamed completion in OpenAI's form; the one that holds the usage has no choices."""
    plain = _present(chunk.model_dump())
    choices = [_choice(choice, "delta") for choice in plain.get("choices", ())]
    usage = plain.pop("usage", None)
    if usage is not None:
        plain["usage"] = _usage(usage)
        choices = [choice for choice in choices if choice["delta"] or choice["finish_reason"]]
    plain["choices"] = choices
    return _bytes(plain)


def _choice(choice: Plain, said: str) -> Plain:
    """A choice with the keys that OpenAI always sends, null or not."""
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
