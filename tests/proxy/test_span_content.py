"""Messages in spans: the conventions' shape, valid JSON whatever comes, bounded, without credentials."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.stream import choices_of
from proxy.telemetry.content import MAX_BYTES, request_content, response_content
from proxy.wire.anthropic import MESSAGES
from proxy.wire.responses import RESPONSES
from tests.profile import tried

IN_WORDS = {"input.value", "output.value"}
KEY = "sk-canary0123456789abcdef"
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


@pytest.mark.requirement("P15", "S.16")
def test_whole_messages_are_missing_from_the_middle_and_the_rest_stays_valid() -> None:
    messages = [{"role": "user", "content": f"message {number} " + "ä" * 400} for number in range(100)]
    found = asked(messages)
    said = [message["parts"][0]["content"].split()[1] for message in found["gen_ai.input.messages"]]
    half = len(said) // 2
    assert said == [str(n) for n in (*range(half), *range(100 - len(said) + half, 100))]
    assert found["weir.content.dropped"] == 100 - len(said) > 0
    assert (
        len(json.dumps(found["gen_ai.input.messages"], ensure_ascii=False, separators=(",", ":")).encode()) <= MAX_BYTES
    )


@pytest.mark.requirement("P15", "S.16")
def test_one_message_that_is_too_long_loses_its_end_and_a_key_where_it_is_cut_does_not_show() -> None:
    (message,) = asked([{"role": "user", "content": "begin " + "x" * 100_000}])["gen_ai.input.messages"]
    text = message["parts"][0]["content"]
    assert text.startswith("begin xxx")
    assert text.endswith("…")
    for at in range(2030, 2060, 3):
        shown = request_content(
            msgspec.json.encode({"messages": [{"role": "user", "content": "y" * at + " " + KEY + "z" * 20_000}]})
        )
        assert "canary" not in repr(shown)


@settings(max_examples=tried(25, 200), deadline=None)
@given(messages=st.lists(JSON, max_size=6), tools=st.lists(JSON, max_size=3))
def test_whatever_is_asked_the_attributes_are_valid_json_of_bounded_size(messages: Any, tools: Any) -> None:
    for value in request_content(msgspec.json.encode({"messages": messages, "tools": tools})).values():
        if isinstance(value, str):
            assert isinstance(json.loads(value), list)
            assert len(value.encode()) <= MAX_BYTES
    for name, value in response_content(messages).items():
        assert isinstance(value if name in IN_WORDS else json.loads(str(value)), str if name in IN_WORDS else list)


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'"x"', b'{"messages": 1}', b"\xff", b"[" * 5000])
def test_what_is_no_request_has_no_content(body: bytes) -> None:
    assert request_content(body) == {}


def stream(*deltas: dict[str, Any]) -> bytes:
    return (
        b"".join(b"data: " + msgspec.json.encode({"choices": [delta]}) + b"\n\n" for delta in deltas)
        + b"data: [DONE]\n\n"
    )


def test_a_stream_is_put_together_as_the_whole_answer_would_have_been() -> None:
    def call(index: int, **said: str) -> dict[str, Any]:
        given = {"id": said.pop("id")} if "id" in said else {}
        return {"index": 0, "delta": {"tool_calls": [{"index": index, **given, "function": said}]}}

    data = stream(
        {"index": 0, "delta": {"role": "assistant", "content": ""}},
        {"index": 0, "delta": {"content": "Hel"}},
        {"index": 0, "delta": {"content": "lo"}},
        call(0, id="c1", name="read", arguments=""),
        call(0, arguments='{"a":'),
        call(0, arguments="1}"),
        call(9, arguments="nonsense"),
        {"index": 0, "delta": {}, "finish_reason": "tool_calls"},
    )
    (choice,) = choices_of(b": hello\n\ndata: not json\n\n" + data)
    (message,) = json.loads(str(response_content([choice])["gen_ai.output.messages"]))
    assert message == {
        "role": "assistant",
        "parts": [
            {"type": "text", "content": "Hello"},
            {"type": "tool_call", "id": "c1", "name": "read", "arguments": '{"a":1}'},
        ],
        "finish_reason": "tool_calls",
    }


def test_calls_of_every_endpoint_are_put_together_though_their_numbers_have_gaps() -> None:
    def call(number: int, name: str) -> list[dict[str, Any]]:
        item = {"type": "function_call", "call_id": f"c{number}", "name": name}
        block = {"type": "tool_use", "id": f"c{number}", "name": name, "input": {}}
        delta = {"type": "input_json_delta", "partial_json": '{"n":1}'}
        return {
            "responses": [
                {"type": "response.output_item.added", "output_index": number, "item": item},
                {"type": "response.function_call_arguments.delta", "output_index": number, "delta": '{"n":1}'},
            ],
            "messages": [
                {"type": "content_block_start", "index": number, "content_block": block},
                {"type": "content_block_delta", "index": number, "delta": delta},
            ],
        }[codec.name]

    for codec in (RESPONSES, MESSAGES):
        events = [*call(1, "read"), *call(3, "list")]
        begun = {
            "responses": {"type": "response.output_item.added", "output_index": 0, "item": {"type": "reasoning"}},
            "messages": {"type": "content_block_start", "index": 0, "content_block": {"type": "thinking"}},
        }[codec.name]
        data = b"".join(b"data: " + msgspec.json.encode(event) + b"\n\n" for event in (begun, *events))
        (choice,) = choices_of(data, codec)
        assert choice["message"] == {
            "role": "assistant",
            "tool_calls": [
                {"id": "c1", "function": {"name": "read", "arguments": '{"n":1}'}},
                {"id": "c3", "function": {"name": "list", "arguments": '{"n":1}'}},
            ],
        }


@settings(max_examples=tried(25, 100), deadline=None)
@given(deltas=st.lists(JSON, max_size=5))
def test_whatever_is_streamed_is_read_without_an_error(deltas: Any) -> None:
    choices = choices_of(stream(*({"index": 0, "delta": each} for each in deltas), *deltas))
    assert isinstance(json.loads(str(response_content(choices).get("gen_ai.output.messages", "[]"))), list)
