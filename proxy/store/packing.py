"""What is stored compressed, as frames of zstd, and the types of the columns that hold it."""

import json
import re
import threading
from functools import lru_cache
from typing import Any, TypeVar

import msgspec
import sqlalchemy as sa
import zstandard

T = TypeVar("T")
HEX = re.compile(r"(?:[0-9a-f]{2})+").fullmatch
MAX_SIZE = 1 << 30  # the largest size that a frame may state; a damaged one may state anything
WITHOUT_WORDS = 8 << 10
LEVEL = 6
# What is stored was compressed with exactly this.
WORDS = zstandard.ZstdCompressionDict(
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
    b'"limit":0.3},{"kind":"eviction_candidates","count":1,"tokens":1,"largest":"1:'
    b' "}],"tools":{"read_file":[1,'
    b'"hit_ratio":0.9'
    b'{"content":"","messages":1,"reason":"compaction","size":1,"version":1,"window":1}{"action":"evaluate","events":['
    b'{"kind":"zone_change","new":"yellow","old":"green"}],"messages":1,"policy":"balanced","pressure":0.'
    b'{"category":"degradation","level":"warning","threshold":0.3,"value":0.9,"kind":"tool_bloat","opened":true'
    b'{"action":"evict_and_compress","compression_strategy":"evict","count":1,"freed":1,"kinds":{"evict":1},"layers":'
    b'{"evict":1},"messages":1,"new_window_id":null,"placeholders":1,"policy":"balanced","refs":["","],"remaining":1,'
    b'"rows":"","scorers":[],"tokens_after":1,"tokens_before":1,"utilization_after":0.1,"utilization_before":0.9,"version":1}'
    b"[weir: message removed. [weir: result of read_file( removed: . Archived as "
    b'{"role":"assistant","content":"{"role":"user","content":[{"type":"text","text":"{"role":"assistant","content":null,'
    b'"tool_calls":[{"id":"call_","type":"function","function":{"name":"","arguments":"{"role":"tool","content":"'
    b'{"role":"tool","tool_call_id":"call_","content":"',
    dict_type=zstandard.DICT_TYPE_RAWCONTENT,
)
"""What most details, facts, placeholders and messages consist of."""
_ESCAPES = json.JSONEncoder(ensure_ascii=False)  # json.dumps makes one for each text
Packed = tuple[bytes, bytes, bytes]
"""A message's JSON before and after its text, and its text, which is stored once where the JSON
contains it literally.
"""


class Damaged(ValueError): ...


# creating one costs ten times as much as a message, and none may be used by two threads at once
@lru_cache(maxsize=64)
def _compressor(
    level: int, words: zstandard.ZstdCompressionDict | None, _thread: int
) -> zstandard.ZstdCompressor:
    return zstandard.ZstdCompressor(level=level, dict_data=words)


@lru_cache(maxsize=64)
def _decompressor(_thread: int) -> zstandard.ZstdDecompressor:
    return zstandard.ZstdDecompressor(dict_data=WORDS)


def compress(said: bytes, *, level: int = LEVEL) -> bytes:
    """One frame; a long one without the words: with them zstd takes tables of its size, twice the
    time and room.
    """
    words = WORDS if len(said) < WITHOUT_WORDS else None
    return _compressor(level, words, threading.get_ident()).compress(said)


def decompress(frame: bytes, words: zstandard.ZstdCompressionDict | None = None) -> bytes:
    """What was compressed, with these words in place of the usual ones. Raises :class:`Damaged`."""
    try:
        if not 0 <= zstandard.frame_content_size(frame) <= MAX_SIZE:
            raise Damaged("the frame does not say its size")
        own = (
            _decompressor(threading.get_ident())
            if words is None
            else zstandard.ZstdDecompressor(dict_data=words)
        )
        return own.decompress(frame)
    except zstandard.ZstdError:
        raise Damaged("the frame is broken") from None


def pack(value: object, *, level: int = LEVEL) -> bytes:
    """Plain data as one frame of MessagePack."""
    return compress(msgspec.msgpack.encode(value), level=level)


def unpack(frame: bytes, kind: type[T]) -> T:
    """The value that was packed. Raises :class:`Damaged`."""
    try:
        return msgspec.msgpack.decode(decompress(frame), type=kind)
    except msgspec.DecodeError:
        raise Damaged("the frame holds something else") from None


def pack_text(text: str, *, like: str | None = None) -> bytes:
    """A text as one frame; with another one that it is ``like`` only what it has not from there."""
    if like is None:
        return compress(exact_bytes(text))
    return zstandard.ZstdCompressor(level=LEVEL, dict_data=_words(like)).compress(exact_bytes(text))


def unpack_text(frame: bytes, *, like: str | None = None) -> str:
    return exact_text(decompress(frame) if like is None else decompress(frame, _words(like)))


def pack_message(body: bytes, text: str) -> Packed:
    said = exact_bytes(text)
    inside = _escaped(text)
    head, found, tail = body.partition(inside) if inside else (body, b"", b"")
    return head, tail if found else b"", said


def unpack_message(packed: Packed) -> tuple[bytes, str]:
    head, tail, said = packed
    text = exact_text(said)
    return (head + _escaped(text) + tail if tail else head), text


def exact_bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def exact_text(said: bytes) -> str:
    try:
        return said.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        raise Damaged("the text is broken") from None


def plain_text(value: str) -> str:
    if value.isascii() and "\0" not in value:
        return value
    return value.encode("utf-8", "replace").decode().replace("\0", "\ufffd")


def _words(text: str) -> zstandard.ZstdCompressionDict:
    return zstandard.ZstdCompressionDict(
        exact_bytes(text), dict_type=zstandard.DICT_TYPE_RAWCONTENT
    )


def _escaped(text: str) -> bytes:
    return exact_bytes(_ESCAPES.encode(text)[1:-1])


class Plain(sa.types.TypeDecorator[str]):
    """Text without what neither database takes: lone surrogates and NUL."""

    impl: Any = sa.Text
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: sa.Dialect) -> Any:  # noqa: ARG002 - signature
        return None if value is None else plain_text(value)


class Listed(sa.types.TypeDecorator[tuple[Any, ...]]):
    impl = sa.Text
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: sa.Dialect) -> Any:  # noqa: ARG002 - signature
        return None if value is None else json.dumps(value)

    def process_result_value(self, value: Any, dialect: sa.Dialect) -> Any:  # noqa: ARG002 - signature
        return None if value is None else tuple(json.loads(value))


class Exact(sa.types.TypeDecorator[str]):
    """Any text, as bytes."""

    impl = sa.LargeBinary
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: sa.Dialect) -> Any:  # noqa: ARG002 - signature
        return None if value is None else exact_bytes(value)

    def process_result_value(self, value: Any, dialect: sa.Dialect) -> Any:  # noqa: ARG002 - signature
        return exact_text(value) if isinstance(value, bytes) else value


class Compressed(Exact):
    """Any text, compressed; what is damaged is shown as it is."""

    cache_ok = True

    def process_bind_param(self, value: Any, dialect: sa.Dialect) -> Any:  # noqa: ARG002 - signature
        return None if value is None else pack_text(value)

    def process_result_value(self, value: Any, dialect: sa.Dialect) -> Any:  # noqa: ARG002 - signature
        try:
            return unpack_text(value) if isinstance(value, bytes) else value
        except Damaged:
            return value.decode(errors="replace")


class Id(sa.Text):
    """An id of Weir's own: ``prefix`` and hex digits. SQLite keeps the bytes alone, and any other
    text as it is.

    PostgreSQL's dialect has a type in its place, which converts nothing.
    """

    def __init__(self, prefix: str = "") -> None:
        super().__init__()
        self.prefix = prefix
        self.packed = lru_cache(maxsize=1024)(self._packed)  # each is in many rows of a batch

    def bind_processor(self, dialect: sa.Dialect) -> Any:  # noqa: ARG002 - signature
        return self.packed

    def result_processor(self, dialect: sa.Dialect, coltype: object) -> Any:  # noqa: ARG002 - signature
        return self.shown

    def _packed(self, value: str | None) -> str | bytes | None:
        if value is None or not value.startswith(self.prefix):
            return value
        digits = value[len(self.prefix) :]
        return bytes.fromhex(digits) if HEX(digits) else value

    def shown(self, value: object) -> Any:
        return self.prefix + value.hex() if isinstance(value, bytes) else value


TENANT = Id()
CONVERSATION = Id("conv-")
BRANCH = Id("br-")
REQUEST = Id("req_")
