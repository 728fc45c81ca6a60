"""What is stored, packed: bodies and long texts as one zstd frame, in which a text that stands in its message is stored
once; short texts that Weir wrote deflated against the words that stand in most of them. Below are the kinds of columns
that hold it.
"""

import json
import re
import struct
import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import msgspec
import sqlalchemy as sa
import zstandard

Bind = Callable[[Any], Any]
HEX = re.compile(r"(?:[0-9a-f]{2})+").fullmatch
MAX_SIZE = 1 << 30  # what a frame may say that it holds; a damaged one may say anything
WITHOUT_WORDS = 8 << 10
SIZE = 4
MESSAGE_PARTS = 3
PACKED_WORDS = b"\1"
FRAME = b"\x28\xb5\x2f\xfd"  # what every frame begins with: RFC 8878, section 3.1.1
# What is stored was packed with exactly this: another one needs another mark before what it packs.
WORDS = (
    b'"recall":[{"tool":"kind":"query":"condensed":{"window_id":"summary_tokens":"pruned":["ending":"length","caps":'
    b'"summarizer":{"calls":1,"shared":0,"kept":0,"asked":1,"cached":0,"answered":1,"seconds":0.0,"dollars":0.0'
    b'"fidelity":{"score":"coverage":"source":"client_estimated","cold":true,"cost":0.0,"cost_saved":0.0,'
    b'{"kind":"spike","tokens":{"kind":"burn_rate","share":{"kind":"budget_warning","bucket":"memory","tools":1,'
    b'{"kind":"zone_change","old":"red","new":"green"},{"kind":"zone_change","old":"orange","new":"red"},'
    b'{"kind":"zone_change","old":"green","new":"yellow"},{"kind":"zone_change","old":"yellow","new":"orange"}],'
    b'"layers":[{"layer":"summarize","scope":"total","tokens_before":1,{"layer":"ingest_cap","scope":"total",'
    b'"tokens_before":1,"tokens_after":1,"units":0,"kept":false,"rung":false,"reason":null,"ref":null},{"layer":"dedupe",'
    b'"scope":"total","tokens_before":1,"tokens_after":1,"units":0,"kept":false,"rung":false,"reason":null,"ref":null},'
    b'{"layer":"evict","scope":"total","tokens_before":1,"tokens_after":1,"units":1,"kept":true,"rung":false,'
    b'"reason":null,"ref":null}],"prefix_changed":"proxy"}'
    b'{"buckets":{"system":1,"history":1,"tool_outputs":1},"base":1,"source":"model_reported",'
    b'"events":[{"kind":"context.status","percent":1,"used":1,"limit":1,"tokens":1},{"kind":"tool_bloat","share":0.9,'
    b'"limit":0.3},{"kind":"eviction_candidates","count":1,"tokens":1,"largest":"1: "}],"tools":{"read_file":[1,'
    b'"hit_ratio":0.9'
    b'{"content":"","messages":1,"reason":"compaction","size":1,"version":1,"window":1}{"action":"evaluate","events":['
    b'{"kind":"zone_change","new":"yellow","old":"green"}],"messages":1,"policy":"balanced","pressure":0.'
    b'{"category":"degradation","level":"warning","threshold":0.3,"value":0.9,"kind":"tool_bloat","opened":true'
    b'{"action":"evict_and_compress","compression_strategy":"evict","count":1,"freed":1,"kinds":{"evict":1},"layers":'
    b'{"evict":1},"messages":1,"new_window_id":null,"placeholders":1,"policy":"balanced","refs":["","],"remaining":1,'
    b'"rows":"","scorers":[],"tokens_after":1,"tokens_before":1,"utilization_after":0.1,"utilization_before":0.9,"version":1}'
    b"[weir: message removed. [weir: result of read_file( removed: . Archived as "
)
MESSAGES = zstandard.ZstdCompressionDict(
    b'{"role":"assistant","content":"{"role":"user","content":[{"type":"text","text":"{"role":"assistant","content":null,'
    b'"tool_calls":[{"id":"call_","type":"function","function":{"name":"","arguments":"{"role":"tool","content":"'
    b'{"role":"tool","tool_call_id":"call_","content":"',
    dict_type=zstandard.DICT_TYPE_RAWCONTENT,
)
"""What most messages begin with. What was packed without it is read all the same, with another one nothing is."""


_ESCAPES = json.JSONEncoder(ensure_ascii=False)  # json.dumps makes one for each text


class Damaged(ValueError): ...


@lru_cache(maxsize=64)  # making one costs ten times what packing a message does, and none is for two threads at once
def _compressor(level: int, words: zstandard.ZstdCompressionDict | None, _thread: int) -> zstandard.ZstdCompressor:
    return zstandard.ZstdCompressor(level=level, dict_data=words)


def pack(*parts: bytes, level: int = 6) -> bytes:
    """One frame; a long one without the words: with them zstd takes tables of its size, twice the time and room."""
    said = joined(parts)
    words = MESSAGES if len(said) < WITHOUT_WORDS else None
    return _compressor(level, words, threading.get_ident()).compress(said)


def unpack(packed: bytes, *, parts: int) -> list[bytes]:
    """So many parts of what :func:`pack` made. Raises :class:`Damaged`."""
    return parted(_decompressed(packed, MESSAGES), parts)


def pack_named(given: Mapping[str, Sequence[bytes]], *, level: int = 6) -> bytes:
    parts = [part for each in given.values() for part in each]
    return pack(msgspec.json.encode(list(given)), joined(parts), level=level)


def unpack_named(packed: bytes, *, parts: int) -> dict[str, list[bytes]]:
    told, joined = unpack(packed, parts=2)
    try:
        refs = msgspec.json.decode(told)
        found = parted(joined, parts * len(refs))
        return {str(ref): found[parts * n : parts * (n + 1)] for n, ref in enumerate(refs)}
    except (ValueError, TypeError):
        raise Damaged("the refs are broken") from None


def joined(parts: Sequence[bytes]) -> bytes:
    return b"".join([struct.pack(f">{len(parts)}I", *map(len, parts)), *parts])


def parted(whole: bytes, parts: int) -> list[bytes]:
    found, start = list[bytes](), SIZE * parts
    if len(whole) < start:
        raise Damaged("the sizes are broken")
    for size in struct.unpack_from(f">{parts}I", whole):
        found.append(whole[start : start + size])
        start += size
    return found


def _decompressed(packed: bytes, words: zstandard.ZstdCompressionDict) -> bytes:
    try:
        if not 0 <= zstandard.frame_content_size(packed) <= MAX_SIZE:
            raise Damaged("the frame does not say its size")
        return zstandard.ZstdDecompressor(dict_data=words).decompress(packed)
    except zstandard.ZstdError:
        raise Damaged("the frame is broken") from None


def exact_bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def pack_words(text: str) -> bytes:
    packer = zlib.compressobj(9, zlib.DEFLATED, -15, zlib.DEF_MEM_LEVEL, zlib.Z_DEFAULT_STRATEGY, WORDS)
    return PACKED_WORDS + packer.compress(exact_bytes(text)) + packer.flush()


def unpack_words(packed: bytes) -> str:
    if not packed.startswith(PACKED_WORDS):
        return _text(packed)
    try:
        return _text(zlib.decompressobj(-15, WORDS).decompress(packed[len(PACKED_WORDS) :], MAX_SIZE))
    except zlib.error:
        raise Damaged("the words are broken") from None


def pack_text(text: str, *, like: str | None = None) -> bytes:
    """A text as one frame; with another one that it is ``like`` only what it has not from there."""
    if like is None:
        return pack(exact_bytes(text))
    return zstandard.ZstdCompressor(level=6, dict_data=_words(like)).compress(exact_bytes(text))


def unpack_text(packed: bytes, *, like: str | None = None) -> str:
    return _text(unpack(packed, parts=1)[0] if like is None else _decompressed(packed, _words(like)))


def _words(text: str) -> zstandard.ZstdCompressionDict:
    said = exact_bytes(text)
    return zstandard.ZstdCompressionDict(said, dict_type=zstandard.DICT_TYPE_RAWCONTENT)


def pack_message(body: bytes, text: str) -> bytes:
    """A message's JSON and its text as one frame; the text once where it stands in the JSON as it is."""
    return pack(*_message_parts(body, text))


def pack_messages(given: Mapping[str, tuple[bytes, str]]) -> bytes:
    """Several as one frame: level 6 would take four times as long and save 2 to 7 % of it."""
    return pack_named({ref: _message_parts(body, text) for ref, (body, text) in given.items()}, level=3)


def unpack_messages(packed: bytes) -> dict[str, tuple[bytes, str]]:
    return {ref: message_in(parts) for ref, parts in unpack_named(packed, parts=MESSAGE_PARTS).items()}


def _message_parts(body: bytes, text: str) -> tuple[bytes, bytes, bytes]:
    said = exact_bytes(text)
    inside = _escaped(text)
    head, found, tail = body.partition(inside) if inside else (body, b"", b"")
    return head, tail if found else b"", said


def message_in(parts: Sequence[bytes]) -> tuple[bytes, str]:
    head, tail, _ = parts
    text = text_in(parts)
    return (head + _escaped(text) + tail if tail else head), text


def text_in(parts: Sequence[bytes]) -> str:
    return _text(parts[2])


def _escaped(text: str) -> bytes:
    return exact_bytes(_ESCAPES.encode(text)[1:-1])


def _text(said: bytes) -> str:
    try:
        return said.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        raise Damaged("the text is broken") from None


def plain_text(value: str) -> str:
    if value.isascii() and "\0" not in value:
        return value
    return value.encode("utf-8", "replace").decode().replace("\0", "\ufffd")


class StoredText(sa.types.TypeDecorator[str]):
    """Text that is stored as ``write`` makes it, and shown as ``read`` reads that; text that is no bytes as it is."""

    impl: Any = sa.Text
    cache_ok = True

    def __init__(self, write: Bind = plain_text, read: Bind | None = None) -> None:
        super().__init__()
        self.write = write
        self.read = read

    def binding(self, dialect: sa.Dialect) -> Bind | None:  # noqa: ARG002 - those of ids differ
        return self.write

    def process_bind_param(self, value: Any, dialect: sa.Dialect) -> Any:
        bind = None if value is None else self.binding(dialect)
        return value if bind is None else bind(value)

    def process_result_value(self, value: Any, dialect: sa.Dialect) -> Any:  # noqa: ARG002 - signature
        return self.read(value) if isinstance(value, bytes) and self.read is not None else value


class StoredBytes(StoredText):
    impl = sa.LargeBinary
    cache_ok = True


class StoredTuple(StoredText):
    cache_ok = True

    def __init__(self) -> None:
        super().__init__(json.dumps)

    def process_result_value(self, value: Any, dialect: sa.Dialect) -> Any:  # noqa: ARG002 - signature
        return tuple(json.loads(value))


class Id(StoredText):
    """An id of Weir's own: ``prefix`` and hex digits. SQLite keeps the bytes alone, and any other text as it is."""

    cache_ok = True

    def __init__(self, prefix: str = "") -> None:
        super().__init__(partial(_bytes_of, prefix), self.shown)
        self.prefix = prefix

    def binding(self, dialect: sa.Dialect) -> Bind | None:
        return self.write if dialect.name == "sqlite" else None

    def shown(self, stored: object) -> Any:
        return self.prefix + stored.hex() if isinstance(stored, bytes) else stored


@lru_cache(maxsize=4_096)  # one batch has the same few many times
def _bytes_of(prefix: str, value: str) -> str | bytes:
    digits = value[len(prefix) :]
    return bytes.fromhex(digits) if digits and value.startswith(prefix) and HEX(digits) else value


def _unpacked(value: bytes) -> str:
    try:
        return unpack_text(value) if value.startswith(FRAME) else _text(value)
    except Damaged:
        return value.decode(errors="replace")


def _in_words(value: bytes) -> str:
    try:
        return unpack_words(value)
    except Damaged:
        return value.decode(errors="replace")


PLAIN, EXACT, LISTED = StoredText(), StoredBytes(exact_bytes, _text), StoredTuple()
LONG, PACKED = StoredBytes(pack_text, _unpacked), StoredBytes(pack_words, _in_words)
TENANT, CONVERSATION, BRANCH, REQUEST = Id(), Id("conv-"), Id("br-"), Id("req_")
