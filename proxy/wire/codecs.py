"""Which codec reads what."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from proxy.wire.anthropic import MESSAGES
from proxy.wire.codec import CHAT, Codec
from proxy.wire.raw import Raw, read_value, split_array
from proxy.wire.responses import RESPONSES

_BY_PATH: Mapping[str, Codec] = MappingProxyType(
    {path: codec for codec in (CHAT, RESPONSES, MESSAGES) for path in (codec.path, f"/{codec.name}")}
)
_OF_MESSAGES = frozenset({"tool_use", "tool_result", "thinking", "redacted_thinking"})


def codec_of(path: str) -> Codec:
    return _BY_PATH.get(path) or _BY_PATH[f"/{path.split('/')[1]}"]


def view_of_stored(raw: Raw) -> Mapping[str, Any]:
    data = bytes(raw)
    if data[:1] == b"[":
        data = b",".join(split_array(data) or ())
    elements = read_value(b"[" + data + b"]")
    first = elements[0] if isinstance(elements, list) and elements else None
    if not isinstance(first, dict):
        return {}
    if first.get("type") is not None:
        return RESPONSES.view(data)
    content = first.get("content")
    blocks = [block for block in content if isinstance(block, dict)] if isinstance(content, list) else []
    if any(block.get("type") in _OF_MESSAGES for block in blocks) or (isinstance(elements, list) and len(elements) > 1):
        return MESSAGES.view(data)
    return CHAT.view(data)
