"""What a relayed answer says that it used, read as it goes by: nothing of it is held but the end of what came last.

Three spellings are known: OpenAI's chat, completions and embeddings, its Responses, and Anthropic's Messages. A stream
says it in several events; the greatest numbers count.
"""

import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace

import msgspec

from proxy.tap import Usage

_SAID = re.compile(rb'"usage"\s{0,8}:\s{0,8}(\{[^{}]{0,2000}(?:\{[^{}]{0,1000}\}[^{}]{0,2000}){0,12}\})')
_WORD = b'"usage"'
_LONGEST = 8192
_KINDS = (b"application/json", b"text/event-stream")
_PACKED = frozenset({b"gzip", b"x-gzip", b"deflate"})
_MOST_UNPACKED = 64 * 1024 * 1024
_AT_ONCE = 256 * 1024


class Reported:
    """A reader of one answer's usage; ``usage`` stays None where the answer is of another kind or says nothing."""

    def __init__(self, headers: Sequence[tuple[bytes, bytes]]) -> None:
        named = {name.lower(): value.strip().lower() for name, value in headers}
        encoding = named.get(b"content-encoding", b"identity")
        self._is_read = named.get(b"content-type", b"").startswith(_KINDS) and encoding in {b"identity", *_PACKED}
        self._unpacker = zlib.decompressobj(wbits=47) if encoding in _PACKED else None
        self._left = _MOST_UNPACKED
        self._tail = b""
        self.usage: Usage | None = None

    def feed(self, chunk: bytes) -> None:
        """Take note of bytes that are on their way to the client."""
        if not self._is_read:
            return
        if self._unpacker is None:
            self._look(chunk)
            return
        try:
            while chunk and self._is_read:
                text = self._unpacker.decompress(chunk, _AT_ONCE)
                chunk = self._unpacker.unconsumed_tail
                self._left -= len(text)
                self._is_read = self._left > 0
                self._look(text)
        except zlib.error:
            self._is_read = False

    def _look(self, chunk: bytes) -> None:
        text = self._tail + chunk
        end = 0
        for found in _SAID.finditer(text):
            self._read(found.group(1))
            end = found.end()
        begun = text.rfind(_WORD, end)
        is_open = begun >= 0 and len(text) - begun < _LONGEST
        self._tail = text[begun if is_open else max(end, len(text) - len(_WORD)) :]

    def _read(self, raw: bytes) -> None:
        try:
            said = msgspec.json.decode(raw)
        except (ValueError, RecursionError):
            return
        usage = _usage_in(said)
        before = self.usage or Usage()
        merged = {name: _greater(getattr(before, name), getattr(usage, name)) for name in Usage.__slots__}
        self.usage = replace(before, **merged) if any(value is not None for value in merged.values()) else self.usage


def _usage_in(said: Mapping[str, object]) -> Usage:
    prompt = _count(said, "prompt_tokens", "input_tokens")
    details = said.get("prompt_tokens_details", said.get("input_tokens_details"))
    cached = _count(details, "cached_tokens") if isinstance(details, dict) else None
    read, written = _count(said, "cache_read_input_tokens"), _count(said, "cache_creation_input_tokens")
    if prompt is not None:
        prompt += (read or 0) + (written or 0)  # Anthropic's input_tokens leave out what the cache gave and took
    return Usage(
        prompt=prompt,
        completion=_count(said, "completion_tokens", "output_tokens"),
        cached=cached if read is None else read,
        written=written,
    )


def _count(said: Mapping[str, object], *names: str) -> int | None:
    found = (said.get(name) for name in names)
    return next((v for v in found if isinstance(v, int) and not isinstance(v, bool) and 0 <= v < 2**53), None)


def _greater(one: int | None, other: int | None) -> int | None:
    return max((each for each in (one, other) if each is not None), default=None)
