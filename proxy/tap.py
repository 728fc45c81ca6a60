"""Watching an answer go by: what it used, how it ended, whether it has begun to say something.

Nothing is changed and nothing is held back; where the answer cannot be read the tap sees nothing.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from proxy.sse import DONE, Decoder, Event

MOST_READ = 8 * 1024 * 1024
MOST_ERROR = 64 * 1024
ERROR = b"error"
_CODE = re.compile(r"[a-z][a-z_]{2,47}")
_FINISH = re.compile(rb'"finish_reason"\s*:\s*"[^"]')
_OTHER_CHOICE = re.compile(rb'"index"\s*:\s*[1-9]')
_CUT_JSON = "Input data was truncated"  # msgspec's word for JSON that ends in the middle


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens that the upstream reported; None where it did not.

    ``prompt`` counts all of the prompt, ``cached`` what of it was read from a cache and ``written`` what was written
    to one at a price of its own.
    """

    prompt: int | None = None
    completion: int | None = None
    cached: int | None = None
    reasoning: int | None = None
    written: int | None = None


NO_USAGE = Usage()


def together(usages: Sequence[Usage]) -> Usage:
    """The sum of what several answers used; None stays where none of them said anything."""

    def total(name: str) -> int | None:
        said = [value for each in usages if (value := getattr(each, name)) is not None]
        return sum(said) if said else None

    return Usage(**{name: total(name) for name in Usage.__slots__})


def usage_from(value: object) -> Usage | None:
    """The usage object of an OpenAI answer, or None."""
    if not isinstance(value, dict):
        return None
    prompt, completion = value.get("prompt_tokens"), value.get("completion_tokens")
    if not isinstance(prompt, int):
        return None
    details, thinking = _object(value, "prompt_tokens_details"), _object(value, "completion_tokens_details")
    # OpenAI, OpenRouter and vLLM put them into the details, DeepSeek and litellm beside them
    cached = _first(_int(details, "cached_tokens"), _int(value, "prompt_cache_hit_tokens"))
    written = _first(_int(details, "cache_write_tokens"), _int(value, "cache_creation_input_tokens"))
    return Usage(
        prompt=prompt,
        completion=completion if isinstance(completion, int) else None,
        cached=cached,
        reasoning=_int(thinking, "reasoning_tokens"),
        written=written,
    )


def _object(values: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = values.get(key)
    return value if isinstance(value, dict) else {}


def _first(*found: int | None) -> int | None:
    return next((value for value in found if value is not None), None)


def _int(values: Mapping[str, Any], key: str) -> int | None:
    value = values.get(key)
    return value if isinstance(value, int) else None


@dataclass(slots=True)
class Tap:
    """What was seen of one answer so far.

    ``said`` is True once content, a tool call, or reasoning has come; ``ends`` holds for each choice that has begun
    whether a finish reason has; ``error`` holds the first error event of a stream; ``truncated`` is a whole answer
    whose JSON ends in the middle.
    """

    usage: Usage | None = None
    finish_reasons: list[str] = field(default_factory=list)
    ends: dict[int, bool] = field(default_factory=dict)
    model: str | None = None
    id: str | None = None
    tier: str | None = None
    fingerprint: str | None = None
    said: bool = False
    done: bool = False
    error: bytes | None = None
    truncated: bool = False
    bytes_seen: int = 0

    @property
    def finished(self) -> bool:
        """Whether the answer came to a proper end: not every server sends the end marker, nor every one a reason."""
        return self.done or (bool(self.ends) and all(self.ends.values()))

    def read(self, value: object) -> None:
        """Take note of one completion or one chunk of it."""
        if not isinstance(value, dict):
            return
        self.usage = usage_from(value.get("usage")) or self.usage
        self.model = self.model or _text(value.get("model"))
        self.id = self.id or _text(value.get("id"))
        self.tier = self.tier or _text(value.get("service_tier"))
        self.fingerprint = self.fingerprint or _text(value.get("system_fingerprint"))
        choices = value.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            if isinstance(choice, dict):
                self._read_choice(choice)

    def _read_choice(self, choice: Mapping[str, Any]) -> None:
        index, reason = choice.get("index"), choice.get("finish_reason")
        number = index if isinstance(index, int) else 0
        ended = isinstance(reason, str) and bool(reason)
        self.ends[number] = self.ends.get(number, False) or ended
        if ended:
            self.finish_reasons.append(choice["finish_reason"])
        self.usage = self.usage or usage_from(choice.get("usage"))
        said = choice.get("delta") or choice.get("message") or choice.get("text")
        if isinstance(said, dict):
            said = any(v for k, v in said.items() if k != "role")
        self.said = self.said or bool(said)


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def error_code(body: bytes) -> str | None:
    """The code of an error in OpenAI's shape, or its type; None where it has none or it is no plain word."""
    if len(body) > MOST_ERROR:
        return None
    try:
        value = msgspec.json.decode(body)
    except (ValueError, RecursionError):
        return None
    error = value.get("error") if isinstance(value, dict) else None
    said = (error.get("code"), error.get("type")) if isinstance(error, dict) else ()
    return next((text for text in said if isinstance(text, str) and _CODE.fullmatch(text)), None)


@dataclass(slots=True)
class StreamTap:
    """A tap on server-sent events. Chunks without a word that matters are not decoded."""

    seen: Tap = field(default_factory=Tap)
    events: int = 0
    _decoder: Decoder = field(default_factory=Decoder)

    @property
    def complete(self) -> bool:
        """Whether nothing is missing of a stream that has ended now, as far as it could be read."""
        return self.seen.finished or self.seen.error is not None or self._decoder.overrun

    @property
    def in_event(self) -> bool:
        """Whether an event has begun that is not all here."""
        return self._decoder.in_event

    def feed(self, chunk: bytes) -> None:
        """Take note of bytes that are on their way to the client."""
        self.seen.bytes_seen += len(chunk)
        self._take(self._decoder.feed(chunk))

    def end(self) -> None:
        """Take note of the stream's end."""
        self._take(self._decoder.end())

    def _take(self, events: list[Event]) -> None:
        self.events += len(events)
        for event in events:
            data = event.data
            if data == DONE:
                self.seen.done = True
            elif (
                not self.seen.said
                or event.name == ERROR
                or b'"usage"' in data
                or b'"error"' in data
                or _FINISH.search(data)
                or _OTHER_CHOICE.search(data)
            ):
                self._read(data, event.name)

    def _read(self, data: bytes, name: bytes) -> None:
        try:
            value = msgspec.json.decode(data)
        except (ValueError, RecursionError):
            value = None
        if name == ERROR or (isinstance(value, dict) and value.get("error")):
            self.seen.error = self.seen.error or data
            return
        self.seen.read(value)


def read_completion(body: bytes) -> Tap:
    """What a whole, not streamed, answer says of itself."""
    seen = Tap(bytes_seen=len(body))
    if len(body) <= MOST_READ:
        try:
            value = msgspec.json.decode(body)
        except (ValueError, RecursionError) as error:
            seen.truncated = str(error) == _CUT_JSON
            return seen
        seen.read(value)
        if isinstance(value, dict) and value.get("error"):
            seen.error = body
    return seen
