"""Client JSON to values, with its bytes kept; which codec reads what."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from proxy.wire.anthropic import MESSAGES
from proxy.wire.chat import dicts_in
from proxy.wire.codec import CHAT, Codec, objects_in
from proxy.wire.raw import Raw, split_array
from proxy.wire.responses import RESPONSES

CODECS: Mapping[str, Codec] = MappingProxyType(
    {codec.name: codec for codec in (CHAT, RESPONSES, MESSAGES)}
)
"""By what the endpoint's path begins with."""
_OF_MESSAGES = frozenset({"tool_use", "tool_result", "thinking", "redacted_thinking"})


def view_of_stored(raw: Raw) -> Mapping[str, Any]:
    data = bytes(raw)
    if data[:1] == b"[":
        data = b",".join(split_array(data) or ())
    elements = objects_in(data)
    if not elements:
        return {}
    if elements[0].get("type") is not None:
        return RESPONSES.view(data)
    if len(elements) > 1 or any(
        block.get("type") in _OF_MESSAGES for block in dicts_in(elements[0].get("content"))
    ):
        return MESSAGES.view(data)
    return CHAT.view(data)
