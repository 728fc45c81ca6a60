"""Counting tokens of text and media, and shortening a text to so many.

Image formulas are the providers' own (OpenAI vision guide, Anthropic vision guide, Gemini media
resolution). Nothing is ever fetched: what only has an address costs what a typical one costs, and a
file that is only named counts nothing. Documents and video are estimated too small rather than too
large: an estimate that is too large would refuse a request that the upstream takes.

:func:`shorten` and :func:`clip` keep the beginning of a text, :func:`clip_middle` both ends of one
that has to fit, :func:`clip_growing` those of one that is sent again with more appended, and
:func:`cap_text` is for a tool result above its cap, where a line of JSON says where the archive's
text goes on: ``next_cursor`` is the byte of its UTF-8 form at which the shown beginning ends::

    {"truncated": true, "ref": "0123456789ab.txt", "next_cursor": 4938}
"""

import base64
import json
import math
import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import accumulate
from types import MappingProxyType
from typing import Any, Literal, Protocol

_LOOSE = " \n,;:-\u2013\u2014([…"
HEAD_SHARE = 0.6
MIN_KEPT = 16
MIN_SIDES = 64
REF_BYTES = 6
NOTE_TOKENS = 40
"""Maximum tokens of a note on what was left out, with its line breaks."""
PARTS_OF_A_BATCH = 8
"""A batch of what is cut out of a growing text ends where so many of its parts, at a token a
letter, are full.
"""
TEXT_OF = ".txt"

Method = Literal["middle_out", "head", "tail"]
HEAD_SHARES: Mapping[Method, float] = MappingProxyType(
    {"middle_out": 0.5, "head": 1.0, "tail": 0.0}
)


class TokenCounter(Protocol):
    """Counts text. Implementations are pure from the caller's view and never raise for any
    ``str``.
    """

    def count(self, text: str) -> int: ...


@dataclass(frozen=True, slots=True)
class CharCounter:
    numerator: int
    denominator: int

    def count(self, text: str) -> int:
        return len(text) * self.numerator // self.denominator


CHARS4 = CharCounter(1, 4)
CHARS2_5 = CharCounter(2, 5)
HEURISTICS: Mapping[str, CharCounter] = MappingProxyType({"chars4": CHARS4, "chars2.5": CHARS2_5})


def clip_middle(text: str, max_tokens: int, *, counter: TokenCounter, ref: str) -> str:
    total = counter.count(text)
    if total <= max_tokens:
        return text
    # the note's two line breaks
    kept = max(0, max_tokens - counter.count(left_out(total, ref)) - 2)
    while kept >= MIN_KEPT:
        clipped = _cut(text, kept / total, total - kept, ref)
        size = counter.count(clipped)
        if size <= max_tokens:
            return clipped
        kept = min(kept - 1, int(kept * max_tokens / size * 0.98))
    return left_out(total, ref)


def clip_growing(text: str, max_tokens: int, *, batch: float, counter: TokenCounter) -> str:
    """Both ends of a text within ``max_tokens``, so that the same text with more appended begins
    with what is shown.

    Where the middle begins and ends is measured from the text's start, and it grows by ``batch``, a
    share of the end's room, at a time: until the end is full again nothing is changed before what
    is new. The note names the middle by its own hash (:func:`middle_of`).
    """
    kept = max_tokens - NOTE_TOKENS
    head = int(kept * HEAD_SHARE)
    tail = kept - head
    page = max(MIN_KEPT, int(batch * tail))
    size = max(MIN_KEPT, page // PARTS_OF_A_BATCH)
    parts = [counter.count(text[at : at + size]) for at in range(0, len(text), size)]
    first = bisect_right(list(accumulate(parts)), head)
    left = sum(parts[first:])
    start = first
    removed = 0
    paged = 0
    for place, tokens in enumerate((*parts[first:], 0), start=first):
        if paged and (paged + tokens > page or place == len(parts)):
            removed += paged
            start = place
            paged = 0
            middle = text[first * size : start * size]
            shown = (
                f"{text[: first * size]}\n{left_out(removed, _ref(middle))}\n{text[start * size :]}"
            )
            if left - removed <= tail and counter.count(shown) <= max_tokens:
                return shown
        paged += tokens
    return left_out(sum(parts), _ref(text))


def middle_of(text: str, shown: str) -> tuple[str, str] | None:
    """What :func:`clip_growing` left out of ``text``, under the name that ``shown`` has for it."""
    for note in _GROWING.finditer(shown):
        begins = shown[: note.start()]
        ends = shown[note.end() :]
        middle = text[len(begins) : len(text) - len(ends)]
        if _ref(middle) == note["ref"] and text == f"{begins}{middle}{ends}":
            return note["ref"], middle
    return None


def _ref(middle: str) -> str:
    return blake2b(middle.encode("utf-8", "surrogatepass"), digest_size=REF_BYTES).hexdigest()


def shorten(text: str, longest: int) -> str:
    """``text`` in at most so many characters, cut between words.

    Of one word that is longer, a path keeps its last parts and anything else its two ends, the cut
    marked.
    """
    if len(text) <= longest:
        return text
    at = _edge(text, longest - 1)
    if at > longest // 3:
        return f"{text[:at].rstrip(_LOOSE)}…"
    part = text.find("/", len(text) - longest + 1)
    if 0 < part < len(text) - 1:
        return f"…{text[part:]}"
    head = (longest - 1) * 2 // 3
    return f"{text[:head]}…{text[len(text) - (longest - 1 - head) :]}"


def clip(text: str, *, max_tokens: int, counter: TokenCounter) -> str:
    if max_tokens <= 0:
        return ""
    if len(text) <= max_tokens * 16 and counter.count(text) <= max_tokens:
        return text
    low = 0
    high = min(len(text), max_tokens * 16)
    while low < high:
        middle = (low + high + 1) // 2
        if counter.count(_ended(text, middle)) <= max_tokens:
            low = middle
        else:
            high = middle - 1
    return _ended(text, low)


def _edge(text: str, at: int) -> int:
    if at >= len(text) or text[at].isspace():
        return min(at, len(text))
    return max(text.rfind(" ", 0, at), text.rfind("\n", 0, at), 0)


def _ended(text: str, at: int) -> str:
    kept = text[: _edge(text, at)].rstrip(_LOOSE)
    return f"{kept}…" if kept else ""


def cap_text(
    text: str,
    max_tokens: int,
    *,
    counter: TokenCounter,
    ref: str,
    method: Method = "middle_out",
    whole: bool = True,
) -> str:
    """``text`` within ``max_tokens``, never longer than it was.

    Two sides around the JSON line, else the beginning with the line, else the beginning alone.
    ``whole`` is False where the archive holds another text, so that reading on starts at its
    beginning.
    """
    total = counter.count(text)
    if total <= max_tokens:
        return text
    for share, smallest in ((HEAD_SHARES[method], MIN_SIDES), (1.0, MIN_KEPT)):
        kept = int(len(text) * max_tokens / total)
        while kept >= smallest:
            begins = int(kept * share)
            head = text[:begins]
            tail = text[len(text) - kept + begins :]
            line = cut_line(ref, len(head.encode("utf-8", "surrogatepass")) if whole else 0)
            shown = "\n".join(part for part in (head, line, tail) if part)
            size = counter.count(shown)
            if size <= max_tokens and len(shown) < len(text):
                return shown
            kept = min(kept - 1 - max(0, len(shown) - len(text)), int(kept * max_tokens / size))
    return _bare(text, int(len(text) * max_tokens / total), max_tokens, counter)


def _bare(text: str, kept: int, max_tokens: int, counter: TokenCounter) -> str:
    """The beginning alone, of one character at the least: an upstream may refuse an empty
    result.
    """
    while kept > 1 and counter.count(text[:kept]) > max_tokens:
        kept -= 1 + kept // 20
    return text[: max(1, kept)]


def cut_line(ref: str, cursor: int) -> str:
    return json.dumps({"truncated": True, "ref": ref + TEXT_OF, "next_cursor": cursor})


def _cut(text: str, share: float, removed: int, ref: str) -> str:
    keep = max(2, int(len(text) * share))
    head = int(keep * HEAD_SHARE)
    return f"{text[:head]}\n{left_out(removed, ref)}\n{text[len(text) - (keep - head) :]}"


def left_out(removed: int, ref: str) -> str:
    return f"[weir: about {removed} tokens left out here; archived as {ref}]"


_GROWING = re.compile(
    r"\n?\[weir: about \d+ tokens left out here; archived as (?P<ref>[0-9a-f]{12})\]\n?"
)


Size = tuple[int, int]

IMAGE_TYPES = frozenset({"image_url", "input_image", "image"})
AUDIO_TYPES = frozenset({"input_audio", "audio_url", "audio"})
VIDEO_TYPES = frozenset({"video_url", "input_video", "video"})
FILE_TYPES = frozenset({"file", "input_file", "document"})
MEDIA_TYPES = IMAGE_TYPES | AUDIO_TYPES | VIDEO_TYPES | FILE_TYPES

UNKNOWN_IMAGE = 1105
UNKNOWN_CLAUDE = 1568
UNKNOWN_GEMINI = 1120
UNKNOWN_SECONDS = 10.0
BYTES_PER_SECOND = {"mp3": 16_000.0, "pcm16": 48_000.0, "wav": 48_000.0, "video": 125_000.0}
SECONDS_MAX = 4 * 3_600.0
VIDEO_PER_SECOND = 300
VIDEO_MAX = 60_000
PAGE_TEXT = 1_500
PAGE_BYTES = 100_000
PAGES_MAX = 40
FILE_TEXT_MAX = 100_000

_HEADERS = (4_096, 349_528)
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_STANDALONE = frozenset({0x01, *range(0xD0, 0xDA)})


class ImageRule(Protocol):
    def tokens(self, size: Size | None, detail: str) -> int: ...


@dataclass(frozen=True, slots=True)
class Tiles:
    """OpenAI's tile family: fit into 2048 x 2048, short side to 768, then tiles of 512 (vision
    guide).
    """

    base: int
    tile: int

    def tokens(self, size: Size | None, detail: str) -> int:
        if detail == "low":
            return self.base
        if size is None:
            return self.base + 6 * self.tile
        width, height = _scaled(size, 2_048 / max(size))
        width, height = _scaled((width, height), 768 / min(width, height))
        return self.base + self.tile * _cells(width, 512) * _cells(height, 512)


@dataclass(frozen=True, slots=True)
class Patches:
    """OpenAI: patches of 32 x 32 after fitting a budget of patches and a longest edge, by detail
    (else ``auto``).
    """

    multiplier: float = 1.0
    limits: Mapping[str, tuple[int, int]] = field(default_factory=lambda: {"auto": (1_536, 2_048)})

    def tokens(self, size: Size | None, detail: str) -> int:
        budget, edge = (
            (256, 512) if detail == "low" else self.limits.get(detail, self.limits["auto"])
        )
        count = min(UNKNOWN_IMAGE, budget) if size is None else self._patches(size, budget, edge)
        return math.ceil(round(count * self.multiplier, 6))

    @staticmethod
    def _patches(size: Size, budget: int, edge: int) -> int:
        width, height = size
        count = _cells(width, 32) * _cells(height, 32)
        if count <= budget and max(size) <= edge:
            return count
        ratio = min(1.0, edge / max(size), math.sqrt(32 * 32 * budget / (width * height)))
        ratio *= min(
            max(1, math.floor(side)) / side for side in (width * ratio / 32, height * ratio / 32)
        )
        return min(budget, _cells(width * ratio, 32) * _cells(height * ratio, 32))


@dataclass(frozen=True, slots=True)
class Visual:
    """Anthropic: patches of 28 x 28 after the largest downscale that meets an edge and a token
    limit.
    """

    edge: int
    limit: int

    def tokens(self, size: Size | None, detail: str) -> int:  # noqa: ARG002 - the provider has no detail
        if size is None:
            return UNKNOWN_CLAUDE
        longer = range(2, min(self.edge, max(size)) + 1)
        return self._at(
            size, 1 + bisect_right(longer, self.limit, key=lambda long: self._at(size, long))
        )

    @staticmethod
    def _at(size: Size, long: int) -> int:
        short = max(1, round(long * min(size) / max(size)))
        return math.ceil(long / 28) * math.ceil(short / 28)


@dataclass(frozen=True, slots=True)
class Crops:
    """Gemini 2: 258 up to 384 pixels a side, else 258 for each crop of 256 to 768 pixels."""

    def tokens(self, size: Size | None, detail: str) -> int:  # noqa: ARG002 - the provider has no detail
        if size is None:
            return UNKNOWN_GEMINI
        if max(size) <= 384:
            return 258
        width, height = _scaled(size, 3_072 / max(size))
        unit = min(768.0, max(256.0, math.floor(min(width, height) / 1.5)))
        return 258 * _cells(width, unit) * _cells(height, unit)


@dataclass(frozen=True, slots=True)
class Flat:
    price: int
    details: Mapping[str, int] = field(default_factory=dict)

    def tokens(self, size: Size | None, detail: str) -> int:  # noqa: ARG002 - flat
        return self.details.get(detail, self.price)


@dataclass(frozen=True, slots=True)
class Area:
    """Models whose formula is unknown: a token for 750 square pixels, 85 to 4784."""

    def tokens(self, size: Size | None, detail: str) -> int:  # noqa: ARG002 - unknown to us
        return UNKNOWN_IMAGE if size is None else min(4_784, max(85, -(-size[0] * size[1] // 750)))


_STANDARD = (2_500, 2_048)
_LARGE = (10_000, 6_000)
_UNSCALED = (30_000, 65_535)

IMAGE_RULES: tuple[tuple[re.Pattern[str], ImageRule], ...] = tuple(
    (re.compile(pattern), rule)
    for pattern, rule in (
        (r"^gpt-4o-mini", Tiles(2_833, 5_667)),
        (r"^gpt-(?:4\.1|[5-9])[\d.]*-mini", Patches(1.62)),
        (r"^gpt-(?:4\.1|[5-9])[\d.]*-nano", Patches(2.46)),
        (r"^o4-mini", Patches(1.72)),
        (r"^codex|^gpt-5.*-codex", Patches()),
        (r"^gpt-5\.[23](?!\d)", Patches()),
        (r"^gpt-5\.4(?!\d)", Patches(limits={"auto": _STANDARD, "original": _LARGE})),
        (r"^gpt-5\.5(?!\d)", Patches(limits={"auto": _LARGE, "high": _STANDARD})),
        (
            r"^gpt-5\.[6-9]|^gpt-5\.\d\d|^gpt-[6-9]",
            Patches(limits={"auto": _UNSCALED, "high": _STANDARD}),
        ),
        (r"^gpt-5", Tiles(70, 140)),
        (r"^gpt-|^chatgpt-", Tiles(85, 170)),
        (r"^o[134](?![a-z0-9])", Tiles(75, 150)),
        (r"^computer-use", Tiles(65, 129)),
        (r"gemini-1|gemini-pro-vision", Flat(258)),
        (r"gemini-2", Crops()),
        (r"gemini", Flat(UNKNOWN_GEMINI, {"low": 280, "medium": 560, "ultra_high": 2_240})),
    )
)
_CLAUDE = re.compile(r"claude(?:-[a-z]+)*(?:-(\d{1,2})(?!\d)(?:[.-](\d{1,2})(?!\d))?)?")


def bare_name(model: str) -> str:
    return model.lower().rsplit("/", 1)[-1].removeprefix("ft:")


def image_rule(model: str) -> ImageRule:
    name = bare_name(model)
    claude = _CLAUDE.search(name)
    if claude is not None:
        version = (int(claude[1] or 0), int(claude[2] or 0))
        return Visual(2_576, 4_784) if version >= (4, 7) else Visual(1_568, 1_568)
    return next((rule for pattern, rule in IMAGE_RULES if pattern.search(name)), Area())


def image_size(header: bytes) -> Size | None:
    size: Size | None = None
    if header.startswith(b"\x89PNG\r\n\x1a\n") and len(header) >= 24:
        size = int.from_bytes(header[16:20]), int.from_bytes(header[20:24])
    elif header.startswith((b"GIF87a", b"GIF89a")) and len(header) >= 10:
        size = int.from_bytes(header[6:8], "little"), int.from_bytes(header[8:10], "little")
    elif header.startswith(b"\xff\xd8"):
        size = _jpeg_size(header)
    elif header.startswith(b"RIFF") and header[8:12] == b"WEBP" and len(header) >= 30:
        size = _webp_size(header)
    return size if size is not None and min(size) > 0 else None


def part_tokens(part: Mapping[str, Any], *, model: str, image_tokens: int | None = None) -> int:
    """0 for a type that is no media; ``image_tokens`` is a policy's flat price instead of the
    provider's formula.
    """
    kind = part.get("type")
    if not isinstance(kind, str):
        return 0
    if kind in IMAGE_TYPES:
        return _image(part, model) if image_tokens is None else image_tokens
    if kind in AUDIO_TYPES:
        return _audio(part, model)
    if kind in VIDEO_TYPES:
        return _video(part)
    return _file(part, model) if kind in FILE_TYPES else 0


def is_media(part: Mapping[str, Any]) -> bool:
    """A document whose source is text is text."""
    kind = part.get("type")
    source = part.get("source")
    if (
        kind == "document"
        and isinstance(source, Mapping)
        and source.get("type") in ("text", "content")
    ):
        return False
    return isinstance(kind, str) and kind in MEDIA_TYPES


def named_file(part: Mapping[str, Any]) -> str:
    if part.get("type") not in FILE_TYPES or not is_media(part) or _file(part, ""):
        return ""
    for holder in (part.get("file"), part.get("source"), part):
        if isinstance(holder, Mapping):
            for key in ("file_id", "url", "file_url"):
                if isinstance(name := holder.get(key), str) and name:
                    return name
    return ""


def _held(
    part: Mapping[str, Any], keys: Sequence[str], inner: Sequence[str]
) -> tuple[Mapping[str, Any], object]:
    """The object under the first of ``keys``, and the address or base64 in it or in its place."""
    value = next((found for key in keys if (found := part.get(key))), None)
    if not isinstance(value, Mapping):
        return {}, value
    return value, next((found for key in inner if (found := value.get(key))), None)


def _image(part: Mapping[str, Any], model: str) -> int:
    image, value = _held(part, ("image_url", "source", "image"), ("url", "data"))
    detail = image.get("detail", part.get("detail"))
    data = _base64(value)
    size = _decoded_size(data) if data else None
    return image_rule(model).tokens(size, detail if isinstance(detail, str) else "auto")


def image_extent(part: Mapping[str, Any]) -> tuple[int, int]:
    """The longer side of an image in pixels, and the length of its base64; 0 for what is
    not known.
    """
    if part.get("type") not in IMAGE_TYPES:
        return 0, 0
    data = _base64(_held(part, ("image_url", "source", "image"), ("url", "data"))[1])
    size = _decoded_size(data) if data else None
    return 0 if size is None else max(size), len(data)


def _decoded_size(data: str) -> Size | None:
    for limit in _HEADERS:
        size = image_size(_decode(data[:limit]))
        if size is not None or len(data) <= limit:
            return size
    return None


def _audio(part: Mapping[str, Any], model: str) -> int:
    audio, value = _held(part, ("input_audio", "audio_url", "audio"), ("data", "url"))
    form = audio.get("format")
    data = _base64(value)
    known = form if isinstance(form, str) else "mp3"
    seconds = _seconds(data, known) if data else UNKNOWN_SECONDS
    return math.ceil(seconds * _audio_rate(model))


def _audio_rate(model: str) -> float:
    """Tokens of a second."""
    name = bare_name(model)
    if "gemini" in name:
        return 32.0
    return 25.0 if "qwen" in name else 10.0


def _seconds(data: str, form: str) -> float:
    head = _decode(data[:64])
    rate = BYTES_PER_SECOND.get(form.lower(), BYTES_PER_SECOND["mp3"])
    if head.startswith(b"RIFF") and head[8:16] == b"WAVEfmt " and len(head) >= 32:
        rate = float(int.from_bytes(head[28:32], "little")) or rate
    return min(SECONDS_MAX, _byte_length(data) / rate)


def _video(part: Mapping[str, Any]) -> int:
    data = _base64(_held(part, ("video_url", "video", "source"), ("url", "data"))[1])
    seconds = _byte_length(data) / BYTES_PER_SECOND["video"] if data else UNKNOWN_SECONDS
    return min(VIDEO_MAX, max(VIDEO_PER_SECOND, math.ceil(seconds * VIDEO_PER_SECOND)))


def _file(part: Mapping[str, Any], model: str) -> int:
    _, value = _held(part, ("file", "source", "file_data"), ("file_data", "data", "url"))
    data = _base64(value)
    if not data:
        return 0
    if isinstance(value, str) and value.startswith("data:text/"):
        return min(FILE_TEXT_MAX, _byte_length(data) * 2 // 5)
    pages = math.ceil(_byte_length(data) / PAGE_BYTES)
    image = min(UNKNOWN_CLAUDE, image_rule(model).tokens(None, "auto"))
    return min(PAGES_MAX, max(1, pages)) * (PAGE_TEXT + image)


def _base64(value: object) -> str:
    """The payload of a ``data:`` URL or of a bare string; empty for an address."""
    if not isinstance(value, str):
        return ""
    if value[:5].lower() == "data:":
        comma = value.find(",", 0, 1_024)
        return value[comma + 1 :] if comma > 0 else ""
    return "" if "://" in value[:32] else value


def _byte_length(data: str) -> int:
    return len(data) * 3 // 4


def _decode(data: str) -> bytes:
    plain = "".join(data.split()).replace("-", "+").replace("_", "/").rstrip("=")
    try:
        return base64.b64decode(plain[: len(plain) // 4 * 4])
    except ValueError:
        return b""


def _jpeg_size(header: bytes) -> Size | None:
    """In the first start-of-frame segment (ITU T.81, B.2.2)."""
    at = 2
    while at + 9 <= len(header) and header[at] == 0xFF:
        marker = header[at + 1]
        if marker in _FRAMES:
            return int.from_bytes(header[at + 7 : at + 9]), int.from_bytes(header[at + 5 : at + 7])
        if marker == 0xFF:
            at += 1
        elif marker in _STANDALONE:
            at += 2
        else:
            at += 2 + max(2, int.from_bytes(header[at + 2 : at + 4]))
    return None


def _webp_size(header: bytes) -> Size | None:
    """Lossy VP8 (RFC 6386, 9.1), lossless VP8L or extended VP8X (WebP container)."""
    form = header[12:16]
    if form == b"VP8 " and header[23:26] == b"\x9d\x01\x2a":
        return (
            int.from_bytes(header[26:28], "little") & 0x3FFF,
            int.from_bytes(header[28:30], "little") & 0x3FFF,
        )
    if form == b"VP8L" and header[20] == 0x2F:
        bits = int.from_bytes(header[21:25], "little")
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    if form == b"VP8X":
        return (
            int.from_bytes(header[24:27], "little") + 1,
            int.from_bytes(header[27:30], "little") + 1,
        )
    return None


def _scaled(size: tuple[float, float], ratio: float) -> tuple[float, float]:
    return (size[0] * ratio, size[1] * ratio) if ratio < 1 else size


def _cells(length: float, cell: float) -> int:
    return max(1, math.ceil(round(length / cell, 6)))
