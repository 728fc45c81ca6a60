import base64
import struct
from collections.abc import Iterator
from typing import Any

import pytest

from proxy.wire.counting import TextCounter, Tokenizer, count_message, count_tools, message_texts

MODEL = "gpt-4o"
TRACK = {
    "type": "function",
    "function": {
        "name": "track_parcel",
        "description": "Find a parcel by its number.",
        "parameters": {
            "type": "object",
            "properties": {
                "number": {"type": "string", "description": "The parcel's number, e.g. 4711."},
                "unit": {"type": "string", "description": "Unit of the weight", "enum": ["kilogram", "pound"]},
            },
            "required": ["number"],
        },
    },
}


@pytest.fixture(scope="module")
def counter() -> Iterator[TextCounter]:
    tokenizer = Tokenizer()
    yield tokenizer.counter(MODEL)
    tokenizer.close()


def image(size: int) -> str:
    """Base64 of a PNG header of 1024 x 1024 pixels and `size` more bytes."""
    return base64.b64encode(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + struct.pack(">II", 1024, 1024) + bytes(size)).decode()


def test_a_conversation_counts_by_openais_formula(counter: TextCounter) -> None:
    messages = [
        {"role": "system", "content": "You route parcels. Answer briefly."},
        {"role": "system", "name": "dispatcher", "content": "Where is parcel 4711?"},
        {"role": "user", "content": "It's late; the customer can't wait any longer."},
    ]
    keyed = [text for message in messages for text in message.values()]
    formula = 3 + 3 * len(messages) + sum(map(counter.count, keyed)) + 1
    assert sum(count_message(m, counter, model=MODEL) for m in messages) + 3 == formula


@pytest.mark.parametrize(("model", "init"), [("gpt-4o", 7), ("gpt-5-mini", 7), ("gpt-4", 10), ("gpt-3.5-turbo", 10)])
def test_tool_definitions_count_by_openais_formula(counter: TextCounter, model: str, init: int) -> None:
    lines = [
        "track_parcel:Find a parcel by its number",
        "number:string:The parcel's number, e.g. 4711",
        "unit:string:Unit of the weight",
        "kilogram",
        "pound",
    ]
    one = init + 3 + 2 * 3 + (-3 + 2 * 3) + sum(map(counter.count, lines))
    assert count_tools([TRACK], None, None, counter, model=model) == one + 12
    assert count_tools([TRACK, TRACK], None, None, counter, model=model) == 2 * one + 12


@pytest.mark.requirement("A2.16")
@pytest.mark.parametrize(
    ("extra", "tokens"),
    [
        ({"content": "hello world"}, 2),
        ({"content": [{"type": "text", "text": "hello world"}]}, 2),
        ({"content": [{"type": "text", "text": "hello"}, {"type": "text", "text": "hello"}]}, 2),
        ({"content": [{"type": "refusal", "refusal": "hello world"}]}, 2),
        ({"content": ["hello world"]}, 2),
        ({"refusal": "hello world"}, 2),
        ({"name": "alice"}, 2),
        ({"reasoning_content": "hello world"}, 2),
        ({"reasoning": "hello world"}, 2),
        ({"reasoning": "hello world", "reasoning_content": "hello world"}, 2),
        ({"reasoning_details": [{"type": "reasoning.text", "text": "hello world"}]}, 2),
        ({"reasoning": "hello world", "reasoning_details": [{"text": "hello world"}]}, 2),
        ({"tool_calls": [{"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]}, 10),
        ({"tool_calls": [{"id": "call_1", "type": "custom", "custom": {"name": "f", "input": "hello world"}}]}, 11),
        ({"tool_calls": [{"id": "call_1", "type": "function", "function": {"name": "f"}}] * 2}, 18),
        ({"function_call": {"name": "f", "arguments": "{}"}}, 10),
        ({"content": [{"type": "tool_use", "id": "x", "name": "f", "input": {}}]}, 9),
        ({"content": [{"type": "tool_result", "tool_use_id": "x", "content": "hello world"}]}, 2),
        ({"audio": {"id": "audio_1", "transcript": "hello world"}}, 2),
        ({"audio": {"id": "audio_1"}}, 100),
        ({"content": [{"type": "image_url", "image_url": {"url": "http://x/y.png", "detail": "low"}}]}, 85),
    ],
)
def test_each_part_of_a_message_costs_something(counter: TextCounter, extra: dict[str, Any], tokens: int) -> None:
    bare = {"role": "assistant", "content": None}
    assert count_message(bare, counter, model=MODEL) == 4
    assert count_message({**bare, **extra}, counter, model=MODEL) == 4 + tokens


@pytest.mark.requirement("A2.18")
@pytest.mark.parametrize("size", [45_000, 1_500_000])
def test_base64_is_never_counted_as_text(counter: TextCounter, size: int) -> None:
    data = image(size)
    url = "data:image/png;base64," + data
    for part, tokens in (
        ({"type": "image_url", "image_url": {"url": url}}, 765),
        ({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}, 765),
        ({"type": "tool_result", "content": [{"type": "image", "source": {"type": "base64", "data": data}}]}, 765),
        ({"type": "unheard_of", "payload": {"a": [url], "b": data}}, 24),
    ):
        assert count_message({"role": "user", "content": [part]}, counter, model=MODEL) == pytest.approx(
            4 + tokens, abs=10
        )
        flat = message_texts({"role": "user", "content": [part]}, model=MODEL, image_tokens=1_000).count(counter)
        assert flat == (pytest.approx(28, abs=10) if part["type"] == "unheard_of" else 1_004)


@pytest.mark.requirement("A2.17")
@pytest.mark.parametrize("model", ["gpt-4o", "llama-3"])
def test_legacy_functions_and_a_response_schema_are_counted(counter: TextCounter, model: str) -> None:
    function = TRACK["function"]
    legacy = count_tools(None, [function], None, counter, model=model)
    schema = {"type": "json_schema", "json_schema": {"name": "answer", "schema": {"type": "object"}}}
    assert legacy > 40
    assert count_tools(None, [function], schema, counter, model=model) > legacy + 10
