"""Bodies and texts as they are stored: one zstd frame, in which a text that stands in its message is stored once."""

import json

import zstandard

MOST = 1 << 30  # what a frame may say that it holds; a damaged one may say anything
SIZE = 4


class Damaged(ValueError):
    """What is stored cannot be read."""


def pack(*parts: bytes) -> bytes:
    """The parts as one frame."""
    sizes = b"".join(len(part).to_bytes(SIZE, "big") for part in parts)
    return zstandard.ZstdCompressor(level=6).compress(sizes + b"".join(parts))


def unpack(packed: bytes, *, parts: int) -> list[bytes]:
    """So many parts of what :func:`pack` made. Raises :class:`Damaged`."""
    try:
        if not 0 <= zstandard.frame_content_size(packed) <= MOST:
            raise Damaged("the frame does not say its size")
        whole = zstandard.ZstdDecompressor().decompress(packed)
    except zstandard.ZstdError:
        raise Damaged("the frame is broken") from None
    found, start = list[bytes](), SIZE * parts
    for number in range(parts):
        size = int.from_bytes(whole[SIZE * number : SIZE * (number + 1)], "big")
        found.append(whole[start : start + size])
        start += size
    return found


def pack_text(text: str) -> bytes:
    """A text as one frame, whatever code points it has."""
    return pack(text.encode("utf-8", "surrogatepass"))


def unpack_text(packed: bytes) -> str:
    """What :func:`pack_text` made. Raises :class:`Damaged`."""
    return _text(unpack(packed, parts=1)[0])


def pack_message(body: bytes, text: str) -> bytes:
    """A message's JSON and its text as one frame; the text once where it stands in the JSON as it is."""
    said = text.encode("utf-8", "surrogatepass")
    inside = _escaped(text)
    head, found, tail = body.partition(inside) if inside else (body, b"", b"")
    return pack(head, tail if found else b"", said)


def unpack_message(packed: bytes) -> tuple[bytes, str]:
    """What :func:`pack_message` was given. Raises :class:`Damaged`."""
    head, tail, said = unpack(packed, parts=3)
    text = _text(said)
    return (head + _escaped(text) + tail if tail else head), text


def _escaped(text: str) -> bytes:
    """The text as it stands in JSON between quotes, as most clients write it."""
    return json.dumps(text, ensure_ascii=False)[1:-1].encode("utf-8", "surrogatepass")


def _text(said: bytes) -> str:
    try:
        return said.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        raise Damaged("the text is broken") from None
