"""The codec of chat completions: client JSON to requests, messages, texts that count, and back to bytes."""

from proxy.wire.chat.counting import (
    count_message,
    count_messages,
    count_tools,
    is_blob,
    json_text,
    tool_texts,
)
from proxy.wire.chat.markers import breakpoint_for, content_with, marker_for_summary, marker_within
from proxy.wire.chat.messages import body_of, digest_of, message_of, named_files, read_message, unmarked
from proxy.wire.chat.render import render
from proxy.wire.chat.request import (
    TOOL_FIELDS,
    ChatRequest,
    MessageArray,
    chosen_tools,
    parse_chat,
    rewritten,
    tool_definitions,
    tool_description,
    with_fields,
    without_field,
)
from proxy.wire.chat.summaries import (
    PLAIN,
    REASONING,
    REASONING_ROOM,
    Form,
    forces_a_call,
    own_body,
    standing_body,
)

__all__ = [
    "PLAIN",
    "REASONING",
    "REASONING_ROOM",
    "TOOL_FIELDS",
    "ChatRequest",
    "Form",
    "MessageArray",
    "body_of",
    "breakpoint_for",
    "chosen_tools",
    "content_with",
    "count_message",
    "count_messages",
    "count_tools",
    "digest_of",
    "forces_a_call",
    "is_blob",
    "json_text",
    "marker_for_summary",
    "marker_within",
    "message_of",
    "named_files",
    "own_body",
    "parse_chat",
    "read_message",
    "render",
    "rewritten",
    "standing_body",
    "tool_definitions",
    "tool_description",
    "tool_texts",
    "unmarked",
    "with_fields",
    "without_field",
]
