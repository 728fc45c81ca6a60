"""Request bodies with a ``Content-Encoding``, as they were before: gzip, deflate, zstd, br, in any
order of them.

What a body becomes is bounded while it is read: it may be no larger than a body without an
encoding, and at most a hundred times as large as it came. Both hold after each encoding, so that
none in between is larger either.
"""

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import brotli
import zstandard

from proxy.errors import InvalidRequest, RequestTooLarge, UnsupportedEncoding

MAX_RATIO = 100
ALWAYS_ALLOWED = 256 * 1024
"""Bytes that any body may become: a few hundred that repeat one word are no attack."""
MAX_ENCODINGS = 3
PIECE = 1024 * 1024
READ_AT_ONCE = 64 * 1024
OF_ZSTD_AT_ONCE = 512
"""Bytes given to zstd at once, whose output has no bound: a block of four may become 128 KiB.
"""
ZSTD_WINDOW = 8 * 1024 * 1024
"""Bytes; the most that HTTP allows (RFC 9659)."""
HEADER = b"content-encoding"
IDENTITY = b"identity"


class Reader(Protocol):
    """Of one encoding: takes at most ``at_once`` bytes in one call, and knows when it has come to
    the end.
    """

    at_once: int

    @property
    def ended(self) -> bool: ...

    def read(self, data: bytes) -> Iterator[bytes]: ...


class _Inflate:
    at_once = READ_AT_ONCE

    def __init__(self, wbits: int | None) -> None:
        self._reader = None if wbits is None else zlib.decompressobj(wbits)

    @property
    def ended(self) -> bool:
        return self._reader is not None and self._reader.eof and not self._reader.unused_data

    def read(self, data: bytes) -> Iterator[bytes]:
        if self._reader is None:
            self._reader = zlib.decompressobj(
                zlib.MAX_WBITS if _has_zlib_header(data) else -zlib.MAX_WBITS
            )
        while not self._reader.eof:
            piece = self._reader.decompress(data, PIECE)
            yield piece
            data = self._reader.unconsumed_tail
            if not data and len(piece) < PIECE:  # else there may be more that had no room
                break


def _has_zlib_header(data: bytes) -> bool:
    """``deflate`` is zlib's format (RFC 9110 8.4.1.2), and some send it without its header."""
    return (
        len(data) > 1
        and data[0] & 15 == zlib.DEFLATED
        and int.from_bytes(data[:2], "big") % 31 == 0
    )


class _Zstd:
    at_once = OF_ZSTD_AT_ONCE

    def __init__(self) -> None:
        self._reader = zstandard.ZstdDecompressor(max_window_size=ZSTD_WINDOW).decompressobj()

    @property
    def ended(self) -> bool:
        return self._reader.eof and not self._reader.unused_data

    def read(self, data: bytes) -> Iterator[bytes]:
        yield self._reader.decompress(data)


class _Brotli:
    at_once = READ_AT_ONCE

    def __init__(self) -> None:
        self._reader = brotli.Decompressor()

    @property
    def ended(self) -> bool:
        return bool(self._reader.is_finished())

    def read(self, data: bytes) -> Iterator[bytes]:
        while not self._reader.is_finished():
            piece = self._reader.process(data, output_buffer_limit=PIECE)
            yield piece
            data = b""
            if not piece and self._reader.can_accept_more_data():
                break


_READERS: Mapping[bytes, Callable[[], Reader]] = {
    b"gzip": lambda: _Inflate(16 + zlib.MAX_WBITS),
    b"deflate": lambda: _Inflate(None),
    b"zstd": _Zstd,
    b"br": _Brotli,
}
_BROKEN = (zlib.error, zstandard.ZstdError, brotli.error)


def encodings_in(headers: Iterable[tuple[bytes, bytes]]) -> tuple[bytes, ...] | None:
    """The encodings in the order in which they were applied; None where no header speaks of any.

    Raises UnsupportedEncoding for one that cannot be read, and for more than three.
    """
    values = [value for name, value in headers if name == HEADER]
    if not values:
        return None
    names = (name.strip().lower().removeprefix(b"x-") for name in b",".join(values).split(b","))
    found = tuple(name for name in names if name not in (b"", IDENTITY))
    if len(found) > MAX_ENCODINGS or not all(name in _READERS for name in found):
        known = ", ".join(name.decode() for name in _READERS)
        raise UnsupportedEncoding(
            f"The request body's Content-Encoding can be {known}, at most three of them."
        )
    return found


def decoded(body: bytes, encodings: Iterable[bytes], *, limit: int) -> Iterator[bytes]:
    """The body without its encodings, in pieces of about 1 MiB.

    Raises RequestTooLarge once it has more than ``limit`` bytes or grows too much, InvalidRequest
    where it is broken.
    """
    pieces: Iterator[bytes] = iter((body,))
    for name in reversed(tuple(encodings)):
        pieces = _bounded(_read(pieces, _READERS[name]()), len(body), limit)
    return _gathered(pieces)


class Unpacker:
    """An answer without its encodings, as it goes by: nothing after what is broken, unknown or more
    than ``most``.
    """

    def __init__(self, encodings: Iterable[bytes], *, most: int) -> None:
        readers = [_READERS.get(name) for name in reversed(tuple(encodings))]
        self._readers = [make() for make in readers if make is not None]
        self._left = most if len(self._readers) == len(readers) <= MAX_ENCODINGS else 0

    def feed(self, chunk: bytes) -> bytes:
        """What has come of ``chunk``."""
        if self._left <= 0:
            return b""
        pieces: Iterator[bytes] = iter((chunk,))
        for reader in self._readers:
            pieces = _fed(pieces, reader)
        found = bytearray()
        try:
            for piece in pieces:
                found += piece
                self._left -= len(piece)
                if self._left <= 0:
                    break
        except _BROKEN:
            self._left = 0
        return bytes(found)


def encodings_of(headers: Sequence[tuple[bytes, bytes]]) -> tuple[bytes, ...]:
    """The encodings of an answer, known or not, in the order in which they were applied; names are
    lower case.
    """
    if HEADER not in dict(headers):
        return ()
    values = [value for name, value in headers if name == HEADER]
    names = (name.strip().lower().removeprefix(b"x-") for name in b",".join(values).split(b","))
    return tuple(name for name in names if name not in (b"", IDENTITY))


def _fed(pieces: Iterable[bytes], reader: Reader) -> Iterator[bytes]:
    for piece in pieces:
        for start in range(0, len(piece), reader.at_once):
            if not reader.ended:
                yield from reader.read(piece[start : start + reader.at_once])


def _read(pieces: Iterable[bytes], reader: Reader) -> Iterator[bytes]:
    try:
        for piece in pieces:
            for start in range(0, len(piece), reader.at_once):
                if reader.ended:
                    raise _is_broken()
                yield from reader.read(piece[start : start + reader.at_once])
    except _BROKEN:
        raise _is_broken() from None
    if not reader.ended:
        raise _is_broken()


def _is_broken() -> InvalidRequest:
    return InvalidRequest(
        "The request body is not what its Content-Encoding says, or it is cut off."
    )


def _bounded(pieces: Iterable[bytes], came: int, limit: int) -> Iterator[bytes]:
    most = max(ALWAYS_ALLOWED, MAX_RATIO * came)
    size = 0
    for piece in pieces:
        size += len(piece)
        if size > limit:
            raise RequestTooLarge.of_body(limit)
        if size > most:
            raise RequestTooLarge(
                f"The request's body grows to more than {MAX_RATIO} times its size when it is read."
            )
        yield piece


def _gathered(pieces: Iterable[bytes]) -> Iterator[bytes]:
    held = bytearray()
    for piece in pieces:
        held += piece
        if len(held) >= PIECE:
            yield bytes(held)
            held.clear()
    yield bytes(held)
