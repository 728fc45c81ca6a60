"""The window: tokens of a request by pieces, whether prompt and answer fit, and the cache of prefixes."""

import base64
import binascii
import json
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

Request = Mapping[str, Any]
Count = Callable[[str], int]

PRIMING = 3
PER_MESSAGE = 4  # three for the frame, one for the role
PER_CALL = 8
AUDIO_OR_FILE = 256
IMAGE_LOW, IMAGE_AUTO, IMAGE_HIGH = 85, 765, 1105
PIECES_KEPT = 50_000
IGNORED_KEYS = frozenset({"cache_control", "prompt_cache_breakpoint"})
_dumps = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode


@dataclass(frozen=True, slots=True)
class PromptPart:
    """A part of the request that is counted and cached as one: ``tools``, ``system`` or a message."""

    kind: str
    value: Any


def tool_pieces(request: Request) -> list[PromptPart]:
    """What is read before the messages: tool definitions and the schema of the answer."""
    pieces = [PromptPart("tools", request[name]) for name in ("tools", "functions") if request.get(name)]
    form = request.get("response_format")
    if isinstance(form, dict) and form.get("json_schema"):
        pieces.append(PromptPart("tools", form["json_schema"]))
    return pieces


@dataclass(frozen=True, slots=True)
class CountedPrompt:
    """The pieces of a request in the order in which a provider reads them, with digest and tokens each."""

    digests: tuple[bytes, ...]
    tokens: tuple[int, ...]
    tools: int
    breakpoint: int

    @property
    def total(self) -> int:
        """Tokens of the whole prompt, the priming of the answer included."""
        return sum(self.tokens) + PRIMING


def _canonical(value: Any) -> tuple[bytes, bool]:
    """Compact JSON with sorted keys and without cache markers, equal for equal content; and if one was there."""
    text = _dumps(value)
    marked = '"cache_control"' in text or '"prompt_cache_breakpoint"' in text
    return (_dumps(_unmarked(value)) if marked else text).encode("utf-8", "surrogatepass"), marked


def _unmarked(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _unmarked(item) for key, item in value.items() if key not in IGNORED_KEYS}
    if isinstance(value, list):
        return [_unmarked(item) for item in value]
    return value


class PromptCounter:
    """Measures requests; a piece that was measured before costs one digest."""

    def __init__(self, count: Count) -> None:
        self.count = count
        self._known: dict[bytes, int] = {}

    def measure(self, pieces: Iterable[PromptPart]) -> CountedPrompt:
        """The pieces with their digests and tokens; ``breakpoint`` counts pieces up to the last cache marker."""
        digests: list[bytes] = []
        tokens: list[int] = []
        tools = marked = 0
        for index, piece in enumerate(pieces, start=1):
            data, is_marked = _canonical(piece.value)
            digest = blake2b(data, digest_size=16, person=piece.kind.encode()[:16]).digest()
            size = self._known.get(digest)
            if size is None:
                size = self._tokens(piece, data)
                if len(self._known) >= PIECES_KEPT:
                    self._known.clear()
                self._known[digest] = size
            if piece.kind == "tools":
                tools += size
            if is_marked:
                marked = index
            digests.append(digest)
            tokens.append(size)
        return CountedPrompt(tuple(digests), tuple(tokens), tools, marked)

    def _tokens(self, piece: PromptPart, data: bytes) -> int:
        if piece.kind == "message":
            return _message_tokens(piece.value, self.count)
        if piece.kind == "system":
            return PER_MESSAGE + _content_tokens(piece.value, self.count)
        return self.count(data.decode("utf-8", "surrogatepass"))


def _message_tokens(message: Request, count: Count) -> int:
    """Tokens of one message: 3, its role, its content, its calls (8 each besides their text), 1 for a name."""
    total = PER_MESSAGE + _content_tokens(message.get("content"), count)
    calls = [
        *(message.get("tool_calls") or ()),
        *([{"function": message["function_call"]}] if message.get("function_call") else ()),
    ]
    for call in calls:
        function = call.get("function") or call.get("custom") or {}
        arguments = function.get("arguments") or function.get("input") or ""
        total += count(str(function.get("name", ""))) + count(str(arguments)) + PER_CALL
    if message.get("refusal"):
        total += count(str(message["refusal"]))
    return total + (1 if message.get("name") else 0)


def _content_tokens(content: Any, count: Count) -> int:
    if isinstance(content, str):
        return count(content) if content else 0
    if isinstance(content, list):
        return sum(_part_tokens(part, count) for part in content if isinstance(part, dict))
    return 0


def _part_tokens(part: Request, count: Count) -> int:
    match part.get("type"):
        case "text" | "refusal" | "thinking":
            return count(str(part.get("text") or part.get("refusal") or part.get("thinking") or ""))
        case "image_url":
            image = part.get("image_url")
            return image_tokens(image) if isinstance(image, dict) else IMAGE_AUTO
        case "image":
            return IMAGE_AUTO
        case "tool_use":
            return count(str(part.get("name", ""))) + count(json.dumps(part.get("input"))) + PER_CALL
        case "tool_result":
            return 4 + _content_tokens(part.get("content"), count)
        case _:
            return AUDIO_OR_FILE


def image_tokens(image: Request) -> int:
    """85 for detail ``low``, else 85 + 170 a tile of a PNG data URL, else 765 (auto) or 1105 (high), at most 1105.

    The tiles are those of OpenAI's vision guide for the gpt-4o family: fit into 2048 px, short side to 768 px.
    """
    detail = image.get("detail", "auto")
    if detail == "low":
        return IMAGE_LOW
    size = _png_size(str(image.get("url", "")))
    if size is None:
        return IMAGE_HIGH if detail == "high" else IMAGE_AUTO
    width, height = size
    scale = min(1.0, 2048 / max(width, height))
    scale *= min(1.0, 768 / (min(width, height) * scale))
    tiles = math.ceil(width * scale / 512) * math.ceil(height * scale / 512)
    return min(IMAGE_HIGH, IMAGE_LOW + 170 * tiles)


def _png_size(url: str) -> tuple[int, int] | None:
    prefix = "data:image/png;base64,"
    if not url.startswith(prefix):
        return None
    try:
        head = base64.b64decode(url[len(prefix) : len(prefix) + 32])
    except binascii.Error:
        return None
    width, height = int.from_bytes(head[16:20], "big"), int.from_bytes(head[20:24], "big")
    return (width, height) if width and height else None


def overflows(prompt: CountedPrompt, *, window: int, asked: int | None) -> bool:
    """Whether it is too long for a server that reserves what was asked for (one token where nothing was)."""
    return prompt.total + max(asked or 1, 1) > window


class PrefixCache:
    """Remembers the piece prefixes of past requests by credential and model, least recently used out first."""

    def __init__(self, *, entries: int, minimum: int = 0) -> None:
        self._entries = entries
        self._minimum = minimum
        self._seen: OrderedDict[bytes, None] = OrderedDict()

    def cached_tokens(self, prompt: CountedPrompt, *, credential: str, model: str) -> int:
        """Tokens of the longest leading run of pieces that an earlier request of the same owner began with."""
        tokens = 0
        for key, size in zip(_chain(prompt, credential, model), prompt.tokens, strict=True):
            if key not in self._seen:
                break
            tokens += size
        return tokens if tokens >= self._minimum else 0

    def remember(self, prompt: CountedPrompt, *, credential: str, model: str) -> None:
        """Make every prefix of ``prompt`` a hit for later requests."""
        for key in _chain(prompt, credential, model):
            self._seen[key] = None
            self._seen.move_to_end(key)
        while len(self._seen) > self._entries:
            self._seen.popitem(last=False)

    def clear(self) -> None:
        """Forget everything, as a provider does after some idle minutes."""
        self._seen.clear()


def _chain(prompt: CountedPrompt, credential: str, model: str) -> Iterator[bytes]:
    key = blake2b(f"{credential}\n{model}".encode("utf-8", "surrogatepass"), digest_size=16).digest()
    for digest in prompt.digests:
        key = blake2b(key + digest, digest_size=16).digest()
        yield key
