"""Watching an answer go by: its usage, how it ended, whether it has content yet.

Nothing is changed and nothing is held back; where the answer cannot be read the tap reports
nothing.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from proxy.wire.codec import CHAT, ERROR, Codec
from proxy.wire.encodings import Unpacker, encodings_of
from proxy.wire.raw import DONE, Decoder, ServerSentEvent, read_value

MAX_READ = 8 * 1024 * 1024
MAX_ERROR = 64 * 1024
MAX_SAMPLED = 256 * 1024
EVENT_ENDS = (b"\n\n", b"\r\n\r\n")
_CODE = re.compile(r"[a-z][a-z_]{2,47}")
_CUT_JSON = "Input data was truncated"  # msgspec's word for JSON that ends in the middle


class ReportedUsage(msgspec.Struct, frozen=True):
    """Tokens that the upstream reported; None where it did not.

    ``prompt`` counts all of the prompt, ``cached`` what of it was read from a cache and ``written``
    what was written to one at a price of its own. ``estimated``: it reported nothing, the numbers
    are Weir's own counts.
    """

    prompt: int | None = None
    completion: int | None = None
    cached: int | None = None
    reasoning: int | None = None
    written: int | None = None
    estimated: bool = False


NO_USAGE = ReportedUsage()


def together(
    usages: Sequence[ReportedUsage], *, by: Callable[[list[int]], int] = sum
) -> ReportedUsage:
    if len(usages) == 1:
        return usages[0]

    def made(name: str) -> int | None:
        said = [value for each in usages if (value := getattr(each, name)) is not None]
        return by(said) if said else None

    counts = {name: made(name) for name in ReportedUsage.__struct_fields__ if name != "estimated"}
    return ReportedUsage(**counts, estimated=any(each.estimated for each in usages))


def usage_from(value: object) -> ReportedUsage | None:
    usage = _usage_in(value) if isinstance(value, dict) else NO_USAGE
    return None if usage.prompt is None else usage


def _usage_in(said: Mapping[str, Any]) -> ReportedUsage:
    counts = _counts(said)
    asked = dict[str, int]()
    answered = dict[str, int]()
    for name, found in said.items():
        if isinstance(found, dict) and name in _DETAILS:
            (asked if name in _OF_PROMPT else answered).update(_counts(found))
    prompt = counts.get("prompt_tokens")
    completion = counts.get("completion_tokens")
    # OpenAI, OpenRouter and vLLM put them into the details, DeepSeek and litellm next to them
    read = counts.get("cache_read_input_tokens")
    taken = counts.get("cache_creation_input_tokens")
    cached = asked.get("cached_tokens")
    written = asked.get("cache_write_tokens")
    if prompt is None and (uncached := counts.get("input_tokens")) is not None:
        # Anthropic leaves out what the cache gave and took
        prompt = uncached + (read or 0) + (taken or 0)
    if read is None and cached is None:
        cached = counts.get("prompt_cache_hit_tokens")
    return ReportedUsage(
        prompt=prompt,
        completion=counts.get("output_tokens") if completion is None else completion,
        cached=cached if read is None else read,
        reasoning=answered.get("reasoning_tokens", answered.get("thinking_tokens")),
        written=taken if written is None else written,
    )


_OF_PROMPT = frozenset({"prompt_tokens_details", "input_tokens_details"})
_DETAILS = _OF_PROMPT | {"completion_tokens_details", "output_tokens_details"}


def _counts(said: Mapping[str, Any]) -> dict[str, int]:
    return {
        name: found for name, found in said.items() if type(found) is int and 0 <= found < 2**53
    }


class Tap(msgspec.Struct):
    """What was seen of one answer so far.

    ``said`` is True once content, a tool call, or reasoning has come; ``ends`` holds for each
    choice that has begun whether a finish reason has; ``error`` holds the first error event of a
    stream; ``truncated`` is a whole answer whose JSON ends in the middle. Of an answer of ``size``
    bytes ``sample`` is the beginning, from which its tokens are counted where no usage comes.
    """

    usage: ReportedUsage | None = None
    finish_reasons: list[str] = msgspec.field(default_factory=list)
    ends: dict[int, bool] = msgspec.field(default_factory=dict)
    model: str | None = None
    id: str | None = None
    tier: str | None = None
    fingerprint: str | None = None
    said: bool = False
    done: bool = False
    error: bytes | None = None
    truncated: bool = False
    sample: bytearray | bytes = msgspec.field(default_factory=bytearray)
    size: int = 0

    @property
    def finished(self) -> bool:
        """Whether the answer came to a proper end: not every server sends the end marker, nor every
        one a reason.
        """
        return self.done or (bool(self.ends) and all(self.ends.values()))

    def read(self, value: object) -> None:
        if not isinstance(value, dict):
            return
        self.usage = self._with_usage(value.get("usage"))
        self.model = self.model or _text(value.get("model"))
        self.id = self.id or _text(value.get("id"))
        self.tier = self.tier or _text(value.get("service_tier"))
        self.fingerprint = self.fingerprint or _text(value.get("system_fingerprint"))
        choices = value.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            if isinstance(choice, dict):
                self._read_choice(choice)

    def _with_usage(self, said: object) -> ReportedUsage | None:
        """What is used so far; Anthropic's streams report first what was read, and at the end what
        was written.
        """
        usage = _usage_in(said) if isinstance(said, dict) else NO_USAGE
        if usage.prompt is None and usage.completion is not None and self.usage is not None:
            thought = self.usage.reasoning if usage.reasoning is None else usage.reasoning
            return msgspec.structs.replace(
                self.usage, completion=usage.completion, reasoning=thought
            )
        return self.usage if usage.prompt is None else usage

    def _read_choice(self, choice: Mapping[str, Any]) -> None:
        index = choice.get("index")
        reason = choice.get("finish_reason")
        number = index if isinstance(index, int) else 0
        ended = isinstance(reason, str) and bool(reason)
        self.ends[number] = self.ends.get(number, False) or ended
        if ended:
            self.finish_reasons.append(choice["finish_reason"])
        if self.usage is None and "usage" in choice:
            self.usage = usage_from(choice["usage"])
        said = choice.get("delta") or choice.get("message") or choice.get("text")
        if isinstance(said, dict) and not self.said:
            said = [v for k, v in said.items() if v and k != "role"]
        self.said = self.said or bool(said)


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def error_code(body: bytes) -> str | None:
    value = read_value(body) if len(body) <= MAX_ERROR else None
    error = value.get("error") if isinstance(value, dict) else None
    said = (error.get("code"), error.get("type")) if isinstance(error, dict) else ()
    return next((text for text in said if isinstance(text, str) and _CODE.fullmatch(text)), None)


class StreamTap(msgspec.Struct):
    """A tap on server-sent events. Chunks without a relevant word are not decoded.

    ``between`` says that what was fed ends with an event; ``unpacker`` is there where the answer
    has an encoding.
    """

    seen: Tap = msgspec.field(default_factory=Tap)
    events: int = 0
    codec: Codec = CHAT
    between: bool = True
    unpacker: Unpacker | None = None
    _decoder: Decoder = msgspec.field(default_factory=Decoder)

    @property
    def complete(self) -> bool:
        return self.seen.finished or self.seen.error is not None or self._decoder.overrun

    @property
    def in_event(self) -> bool:
        return self._decoder.in_event

    def feed(self, chunk: bytes) -> None:
        if self.unpacker is not None:
            chunk = self.unpacker.feed(chunk)
        seen = self.seen
        before = self.between
        seen.size += len(chunk)
        if len(seen.sample) < MAX_SAMPLED:
            seen.sample += chunk
        self.between = chunk.endswith(EVENT_ENDS)
        if (
            before
            and self.between
            and seen.said
            and DONE not in chunk
            and not self.codec.matters(chunk, chunk)
        ):
            return
        for event in self._decoder.feed(chunk):
            self._take(event)

    def end(self) -> None:
        for event in self._decoder.end():
            self._take(event)

    def _take(self, event: ServerSentEvent) -> None:
        self.events += 1
        if event.data == DONE:
            self.seen.done = True
        elif not self.seen.said or self.codec.matters(event.name, event.data):
            self._read(event.data, event.name)

    def _read(self, data: bytes, name: bytes) -> None:
        value = self.codec.chunk(read_value(data))
        if value == DONE:
            self.seen.done = True
            return
        if name == ERROR or (isinstance(value, dict) and value.get("error")):
            self.seen.error = self.seen.error or data
            return
        self.seen.read(value)


def unpacker_for(headers: Sequence[tuple[bytes, bytes]]) -> Unpacker | None:
    """What takes the encodings of an answer off; None where it has none."""
    encodings = encodings_of(headers)
    return Unpacker(encodings, most=MAX_UNPACKED) if encodings else None


def read_completion(body: bytes, codec: Codec = CHAT) -> Tap:
    seen = Tap()
    if len(body) <= MAX_READ:
        try:
            value = codec.completion(msgspec.json.decode(body))
        except (ValueError, RecursionError) as error:
            seen.truncated = str(error) == _CUT_JSON
            value = None if seen.truncated else codec.completion(read_value(body))
        seen.read(value)
        seen.sample = body
        seen.size = len(body)
        if isinstance(value, dict) and value.get("error"):
            seen.error = body
    return seen


_SAID = re.compile(
    rb'"usage"\s{0,8}:\s{0,8}(\{[^{}]{0,2000}(?:\{[^{}]{0,1000}\}[^{}]{0,2000}){0,12}\})'
)
_WORD = b'"usage"'
_MAX_SAID_LEN = 8192
_STREAM = b"text/event-stream"
_KINDS = (b"application/json", _STREAM)
_EVENT = b"data:"
MAX_UNPACKED = 64 * 1024 * 1024


class Reported:
    """A reader of what a relayed answer used, as it goes by; nothing is held but the end of what
    came last.

    A stream says it in several events: the greatest numbers count. ``usage`` stays None where the
    answer is of another kind or says nothing. ``events`` counts those of a stream: most servers
    send a token in each.
    """

    def __init__(self, headers: Sequence[tuple[bytes, bytes]]) -> None:
        named = {name.lower(): value.strip().lower() for name, value in headers}
        kind = named.get(b"content-type", b"")
        self._is_read = kind.startswith(_KINDS)
        self._is_stream = kind.startswith(_STREAM)
        self._unpacker = unpacker_for(headers)
        self._tail = b""
        self.usage: ReportedUsage | None = None
        self.events = 0

    def feed(self, chunk: bytes) -> None:
        if not self._is_read:
            return
        self._look(chunk if self._unpacker is None else self._unpacker.feed(chunk))

    def _look(self, chunk: bytes) -> None:
        if self._is_stream:
            self.events += chunk.count(_EVENT)
        text = self._tail + chunk
        end = 0
        for found in _SAID.finditer(text):
            self._read(found.group(1))
            end = found.end()
        begun = text.rfind(_WORD, end)
        is_open = begun >= 0 and len(text) - begun < _MAX_SAID_LEN
        self._tail = text[begun if is_open else max(end, len(text) - len(_WORD)) :]

    def _read(self, raw: bytes) -> None:
        try:
            said = _usage_in(msgspec.json.decode(raw))
        except (ValueError, RecursionError):
            return
        if said != NO_USAGE:
            self.usage = together((self.usage or said, said), by=max)
