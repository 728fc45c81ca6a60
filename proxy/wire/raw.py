"""JSON objects and arrays as slices of the bytes they came in, and events out of the bytes of a
stream.

What Weir does not manage must go up as it came: key order, spelling of numbers, unknown fields. So
a body is taken apart into raw slices, and only the slice of a managed field is replaced in it.

Server-sent events (WHATWG HTML, section 9.2) are decoded as they arrive. Lines end at LF, CR LF or
CR and nowhere else: U+2028 inside JSON is no line end. Decoding happens on whole lines, so a
multi-byte character split between two chunks is no error.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from proxy.errors import InvalidJSON, InvalidRequest

Raw = msgspec.Raw | bytes
T = TypeVar("T")

_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ARRAY = msgspec.json.Decoder(list[msgspec.Raw])
_SCANNER = json.JSONDecoder()
_NO_BRACKETS = bytes(set(range(256)) - set(b'[]{}"'))
_ONE_KIND = bytes.maketrans(b"{}", b"[]")
_KEY = re.compile(rb'\s*[{,]\s*("(?:[^"\\]++|\\.)*+")\s*:\s*', re.DOTALL)
_CLOSE = re.compile(rb"\s*\}")
_BLANK = " \t\n\r"
_NESTING = frozenset({dict, list})
COMPARED_AT_ONCE = 1 << 20


def split_object(body: bytes) -> Mapping[str, Raw]:
    """The fields of a JSON object as slices; of a repeated key the last one counts.

    Raises InvalidJSON if it is not JSON or nested too deeply, InvalidRequest if it is not an
    object. JSON with lone surrogates, NaN or Infinity, which Python clients send, is taken as it
    is: the upstream judges it.
    """
    try:
        return _OBJECT.decode(body)
    except ValueError as error:  # msgspec.DecodeError, or UnicodeDecodeError for a key
        return _split_leniently(body, error)
    except RecursionError:
        raise InvalidJSON("The request body is nested too deeply to be read.") from None


def split_array(raw: Raw | memoryview) -> Sequence[Raw] | None:
    try:
        return _ARRAY.decode(raw)
    except (ValueError, RecursionError):
        text = bytes(raw).decode("utf-8", "replace").strip(_BLANK)
        if not text.startswith("["):
            return None
        try:
            return [element for _, element in _scan(text, 0)[0]]
        except (ValueError, RecursionError):
            return None


def is_object(body: bytes) -> bool:
    return body.lstrip()[:1] == b"{"


def elements_of(run: Raw) -> Sequence[Raw]:
    """The elements of some JSON with commas between."""
    return split_array(b"[" + run + b"]") or ()


def holds_beyond(values: Sequence[Any], levels: int) -> bool:
    """Whether any of these objects and arrays are nested more than ``levels`` deep."""
    within = values
    while within and levels:
        inner = [each.values() if type(each) is dict else each for each in within]
        within = [item for items in inner for item in items if type(item) in _NESTING]
        levels = levels - 1
    return bool(within)


def nests_beyond(raw: Raw, levels: int) -> bool:
    """The same of valid JSON, which is not read for it."""
    if len(raw) <= 2 * levels:
        return False
    text = bytes(raw)
    if text.count(b"{") + text.count(b"[") <= levels:
        return False
    bare = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    # most strings have no brackets
    bare = bare.translate(_ONE_KIND, _NO_BRACKETS).replace(b'""', b"")
    brackets = b"".join(bare.split(b'"')[::2])
    for _ in range(levels):
        brackets = brackets.replace(b"[]", b"")  # the innermost ones
    return bool(brackets)


def _split_leniently(body: bytes, error: Exception) -> Mapping[str, Raw]:
    try:
        text = body.decode("utf-8")
        start = _skip(text, 0)
        if text[start : start + 1] != "{":
            json.loads(text)
            raise InvalidRequest(
                "The request body must be a JSON object with a model and messages."
            )
        fields, end = _scan(text, start)
        if _skip(text, end) != len(text):
            raise ValueError("data after the end of the object")  # noqa: TRY301
    except (ValueError, RecursionError) as reason:
        detail = (
            str(error) if isinstance(reason, UnicodeDecodeError | RecursionError) else str(reason)
        )
        raise InvalidJSON(f"The request body is not valid JSON: {detail}.") from None
    return dict(fields)


def _skip(text: str, index: int) -> int:
    while index < len(text) and text[index] in _BLANK:
        index += 1
    return index


def _scan(text: str, start: int) -> tuple[list[tuple[str, bytes]], int]:
    """The members of the object that begins there, or the elements of the array under no name, and
    where it ends.
    """
    has_keys = text[start] == "{"
    members = list[tuple[str, bytes]]()
    key = ""
    closing = "}" if has_keys else "]"
    index = _skip(text, start + 1)
    if text[index : index + 1] == closing:
        return members, index + 1
    while True:
        if has_keys:
            key, index = _SCANNER.raw_decode(text, index)
            index = _skip(text, index)
            if not isinstance(key, str) or text[index : index + 1] != ":":
                raise ValueError(f"expected a key and a colon at character {index}")
            index = _skip(text, index + 1)
        begin = index
        _, index = _SCANNER.raw_decode(text, begin)
        members.append((key, text[begin:index].encode("utf-8", "surrogatepass")))
        index = _skip(text, index)
        if text[index : index + 1] == closing:
            return members, index + 1
        if text[index : index + 1] != ",":
            raise ValueError(f"expected a comma at character {index}")
        index = _skip(text, index + 1)


def replace_fields(body: bytes, fields: Mapping[str, Raw], new: Mapping[str, bytes]) -> bytes:
    """``body`` with the values of some of its fields replaced; a field that it does not have is
    added at the end.

    Everything between the replaced values stays as it was. A body with repeated keys is written
    anew from its fields, because a reader takes the last one.
    """
    spans = _locate(body, fields)
    if spans is None:
        merged = {**{k: bytes(v) for k, v in fields.items()}, **new}
        return b"{" + b",".join(json.dumps(k).encode() + b":" + v for k, v in merged.items()) + b"}"
    parts: list[bytes] = []
    position = 0
    for key, (begin, end) in spans.items():
        if key in new:
            parts += [body[position:begin], new[key]]
            position = end
    added = [json.dumps(k).encode() + b":" + v for k, v in new.items() if k not in spans]
    if not added:
        return b"".join(parts) + body[position:]
    close = body.rindex(b"}")
    comma = b"," if spans else b""
    return b"".join(parts) + body[position:close] + comma + b",".join(added) + body[close:]


def has_repeated_keys(body: bytes, fields: Mapping[str, Raw]) -> bool:
    return bool(fields) and _locate(body, fields) is None


def _locate(body: bytes, fields: Mapping[str, Raw]) -> dict[str, tuple[int, int]] | None:
    """Begin and end of each field's value in ``body``; None if they do not follow one another as
    expected.
    """
    spans: dict[str, tuple[int, int]] = {}
    index = 0
    for key, value in fields.items():
        found = _KEY.match(body, index)
        if (
            found is None
            or json.loads(found[1]) != key
            or not _stands_at(body, found.end(), memoryview(value))
        ):
            return None
        index = found.end() + len(value)
        spans[key] = (found.end(), index)
    return spans if not spans or _CLOSE.match(body, index) else None


def _stands_at(body: bytes, start: int, value: memoryview) -> bool:
    return all(
        body.startswith(bytes(value[at : at + COMPARED_AT_ONCE]), start + at)
        for at in range(0, len(value), COMPARED_AT_ONCE)
    )


def read_value(raw: Raw) -> object:
    """One slice as Python values; numbers keep their size. None if it cannot be read at all."""
    try:
        return msgspec.json.decode(raw)
    except (ValueError, RecursionError):  # msgspec.DecodeError, UnicodeDecodeError
        try:
            return json.loads(bytes(raw).decode("utf-8", "surrogatepass"))
        except (ValueError, RecursionError):
            return None


def read_as(decoder: msgspec.json.Decoder[T], raw: Raw, otherwise: T) -> T:
    """What of a slice a decoder knows; what it cannot read is the upstream's to judge."""
    try:
        return decoder.decode(raw)
    except (ValueError, RecursionError):
        return otherwise


def write_value(value: object) -> bytes:
    try:
        return msgspec.json.encode(value)
    except (msgspec.EncodeError, UnicodeEncodeError, RecursionError, TypeError, ValueError):
        return json.dumps(value, separators=(",", ":")).encode()


MAX_HELD = 4 * 1024 * 1024
MAX_OF_A_LINE = 64 * 1024
DONE = b"[DONE]"


class ServerSentEvent(msgspec.Struct, frozen=True):
    data: bytes
    name: bytes = b""


def unnamed_event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"


def named_event(value: Mapping[str, Any]) -> bytes:
    """An event with the name of its type, as Responses and Messages have them."""
    return (
        b"event: "
        + str(value.get("type", "")).encode()
        + b"\ndata: "
        + write_value(value)
        + b"\n\n"
    )


_NAME = re.compile(rb"(?:\A|(?<=[\r\n]))event:[^\r\n]*(?:\r\n|[\r\n])\Z")
_ONE_EVENT = re.compile(rb"(?:event:([^\r\n]*)\n)?data: ?([^\r\n]*)\n\n")


@dataclass(slots=True)
class Decoder:
    """Feed it chunks as they arrive; it gives the events that are complete.

    An event above ``MAX_HELD`` bytes is given up (``overrun`` is set): the stream itself is never
    held back for the decoder's sake.
    """

    overrun: bool = False
    _line: bytearray = field(default_factory=bytearray)
    _data: list[bytes] = field(default_factory=list)
    _name: bytes = b""
    _after_cr: bool = False

    def feed(self, chunk: bytes) -> list[ServerSentEvent]:
        is_idle = not (self._line or self._data or self._name or self._after_cr)
        if is_idle and (alone := _ONE_EVENT.fullmatch(chunk)) is not None:
            name, data = alone.groups(b"")
            return [ServerSentEvent(data, name.strip())]
        if self._after_cr and chunk[:1] == b"\n":
            chunk = chunk[1:]
            self._after_cr = False
        if not chunk:
            return []
        self._after_cr = chunk.endswith(b"\r")
        text = chunk.replace(b"\r\n", b"\n").replace(b"\r", b"\n") if b"\r" in chunk else chunk
        *lines, rest = text.split(b"\n")
        events: list[ServerSentEvent] = []
        for line in lines:
            if self._line:
                self._line += line
                line = bytes(self._line)
                self._line.clear()
            self._take(line, events)
        self._line += rest
        if len(self._line) > MAX_HELD:
            self._line.clear()
            self.overrun = True
        return events

    def end(self) -> list[ServerSentEvent]:
        """The event that the stream ended in without a blank line; browsers drop it, clients of
        models do not.
        """
        return self.feed(b"\n\n")

    @property
    def in_event(self) -> bool:
        return bool(self._line or self._data or self._name)

    def _take(self, line: bytes, events: list[ServerSentEvent]) -> None:
        if not line:
            if self._data:
                events.append(ServerSentEvent(b"\n".join(self._data), self._name))
            self._data = []
            self._name = b""
            return
        if line.startswith(b"data:"):
            self._data.append(line[6:] if line[5:6] == b" " else line[5:])
        elif line.startswith(b"event:"):
            self._name = line[6:].strip()


@dataclass(slots=True)
class Lines:
    """Feed it chunks as they arrive; it gives the same bytes, cut between lines where a line is not
    too long for that.

    After half a line, or a name without its data, no client would see the event that reports an
    error.
    """

    rest: bytes = b""

    def whole(self, chunk: bytes) -> bytes:
        if not self.rest and chunk.endswith(b"\n\n"):
            return chunk
        data = self.rest + chunk
        end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        if len(data) - end > MAX_OF_A_LINE:
            end = len(data)
        elif (name := _NAME.search(data, 0, end)) is not None:
            end = name.start()
        self.rest = data[end:]
        return data[:end]


class EventFrame(msgspec.Struct, frozen=True):
    raw: bytes
    events: tuple[ServerSentEvent, ...]


_BLANK_LINE = re.compile(rb"(?:\r\n|\n|\r(?!\n))(?:\r\n|\n|\r(?!\n))")


@dataclass(slots=True)
class Frames:
    """Feed it chunks as they arrive; it gives the same bytes, cut between events.

    The bytes of an event above ``MAX_HELD`` go on without having been read.
    """

    _held: bytearray = field(default_factory=bytearray)
    _decoder: Decoder = field(default_factory=Decoder)

    def feed(self, chunk: bytes) -> list[EventFrame]:
        self._held += chunk
        frames: list[EventFrame] = []
        start = 0
        for match in _BLANK_LINE.finditer(self._held):
            frames.append(self._frame(bytes(self._held[start : match.end()])))
            start = match.end()
        del self._held[:start]
        if len(self._held) > MAX_HELD:
            frames.append(self.rest())
        return frames

    def rest(self) -> EventFrame:
        raw = bytes(self._held)
        self._held.clear()
        return self._frame(raw)

    def _frame(self, raw: bytes) -> EventFrame:
        return EventFrame(raw, tuple(self._decoder.feed(raw)))
