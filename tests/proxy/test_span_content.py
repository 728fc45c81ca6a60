"""Messages in spans: the conventions' shape, valid JSON whatever comes, bounded, without credentials."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.telemetry.content import MAX_BYTES, request_content, response_content
from tests.profile import tried

IN_WORDS = {"input.value", "output.value"}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=12,
)


def asked(messages: Any, **more: Any) -> dict[str, Any]:
    found = request_content(msgspec.json.encode({"messages": messages, **more}))
    return {n: json.loads(v) if isinstance(v, str) and n not in IN_WORDS else v for n, v in found.items()}


@pytest.mark.requirement("P15")
def test_every_kind_of_part_has_the_conventions_shape() -> None:
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    linked = {"type": "image_url", "image_url": {"url": "https://pictures.example/a.png?token=secret"}}
    sound = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "see"}, picture, linked, sound]},
        {"role": "assistant", "reasoning_content": "hm", "content": "yes"},
        {
            "role": "tool",
            "tool_call_id": "c1",
            "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
        },
    ]
    assert asked(messages)["gen_ai.input.messages"] == [
        {
            "role": "user",
            "parts": [
                {"type": "text", "content": "see"},
                {"type": "blob", "modality": "image", "content": ""},
                {"type": "uri", "modality": "image", "uri": "https://pictures.example/a.png"},
                {"type": "blob", "modality": "audio", "content": ""},
            ],
        },
        {"role": "assistant", "parts": [{"type": "reasoning", "content": "hm"}, {"type": "text", "content": "yes"}]},
        {"role": "tool", "parts": [{"type": "tool_call_response", "id": "c1", "response": "a\nb"}]},
    ]


@settings(max_examples=tried(25, 200), deadline=None)
@given(messages=st.lists(JSON, max_size=6), tools=st.lists(JSON, max_size=3))
def test_whatever_is_asked_the_attributes_are_valid_json_of_bounded_size(messages: Any, tools: Any) -> None:
    for value in request_content(msgspec.json.encode({"messages": messages, "tools": tools})).values():
        if isinstance(value, str):
            assert isinstance(json.loads(value), list)
            assert len(value.encode()) <= MAX_BYTES
    for name, value in response_content(messages).items():
        assert isinstance(value if name in IN_WORDS else json.loads(str(value)), str if name in IN_WORDS else list)
