"""Incremental decoding of server-sent events (WHATWG HTML, section 9.2): bytes in, events out. Pure.

Lines end at LF, CR LF or CR and nowhere else: U+2028 inside JSON is no line end. Decoding happens on whole
lines, so a multi-byte character split between two chunks is no error.
"""

import re
from dataclasses import dataclass, field

MAX_HELD = 4 * 1024 * 1024
MAX_OF_A_LINE = 64 * 1024
DONE = b"[DONE]"


@dataclass(frozen=True, slots=True)
class ServerSentEvent:
    """One event: ``data`` lines joined by LF, and the event's name ("" for the default)."""

    data: bytes
    name: bytes = b""


@dataclass(slots=True)
class Decoder:
    """Feed it chunks as they arrive; it gives the events that are complete.

    An event above ``MAX_HELD`` bytes is given up (``overrun`` is set): the stream itself is never held back
    for the decoder's sake.
    """

    overrun: bool = False
    _line: bytearray = field(default_factory=bytearray)
    _data: list[bytes] = field(default_factory=list)
    _name: bytes = b""
    _after_cr: bool = False

    def feed(self, chunk: bytes) -> list[ServerSentEvent]:
        """The events that ``chunk`` completes, in order."""
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
        """The event that the stream ended in without a blank line; browsers drop it, clients of models do not."""
        return self.feed(b"\n\n")

    @property
    def in_event(self) -> bool:
        """Whether an event has begun that is not all here."""
        return bool(self._line or self._data or self._name)

    def _take(self, line: bytes, events: list[ServerSentEvent]) -> None:
        if not line:
            if self._data:
                events.append(ServerSentEvent(b"\n".join(self._data), self._name))
            self._data, self._name = [], b""
            return
        if line.startswith(b"data:"):
            self._data.append(line[6:] if line[5:6] == b" " else line[5:])
        elif line.startswith(b"event:"):
            self._name = line[6:].strip()


@dataclass(slots=True)
class Lines:
    """Feed it chunks as they arrive; it gives the same bytes, cut between lines where a line is not too long for that.

    Behind half a line no client would see the event that tells it of an error.
    """

    rest: bytes = b""

    def whole(self, chunk: bytes) -> bytes:
        """What may go on now."""
        if not self.rest and chunk.endswith(b"\n"):
            return chunk
        data = self.rest + chunk
        end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        if len(data) - end > MAX_OF_A_LINE:
            end = len(data)
        self.rest = data[end:]
        return data[:end]


@dataclass(frozen=True, slots=True)
class EventFrame:
    """Some bytes of a stream that end with an event, and the events in them (none for a comment)."""

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
        """The frames that ``chunk`` completes, in order."""
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
        """What is left at the end of the stream."""
        raw = bytes(self._held)
        self._held.clear()
        return self._frame(raw)

    def _frame(self, raw: bytes) -> EventFrame:
        return EventFrame(raw, tuple(self._decoder.feed(raw)))
