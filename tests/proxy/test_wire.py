"""Client JSON and back: what is not managed keeps its bytes, and what clients change between turns does not count."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.errors import InvalidJSON, InvalidRequest
from proxy.wire.chat import digest_of, message_of
from proxy.wire.codec import CHAT, with_fields
from proxy.wire.raw import read_value, replace_fields, split_array, split_object, write_value

CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city": "Lisbon", "days": 2}'},
}

SAME = [
    ({"role": "user", "content": "hi"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}),
    (
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]},
    ),
    (
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
    ),
    ({"role": "assistant", "content": None, "tool_calls": [CALL]}, {"role": "assistant", "tool_calls": [CALL]}),
    (
        {"role": "assistant", "tool_calls": [CALL]},
        {
            "role": "assistant",
            "tool_calls": [
                {
                    "id": "other",
                    "index": 0,
                    "type": "function",
                    "function": {"name": "weather", "arguments": '{"days":2,"city":"Lisbon"}', "parsed_arguments": {}},
                }
            ],
        },
    ),
    (
        {"role": "assistant", "content": "ok"},
        {
            "role": "assistant",
            "content": "ok",
            "refusal": None,
            "annotations": [],
            "audio": None,
            "function_call": None,
            "tool_calls": None,
            "provider_specific_fields": {"x": 1},
            "parsed": None,
            "reasoning_content": "hm",
            "id": "msg_1",
        },
    ),
    (
        {"role": "tool", "tool_call_id": "a", "content": "18 C"},
        {"role": "tool", "tool_call_id": "b", "content": "18 C"},
    ),
    ({"role": "user", "content": "hi"}, {"role": "user", "content": "hi", "weir": {"keep": True}}),
]


@pytest.mark.requirement("P1", "A0.42")
@pytest.mark.parametrize(("one", "other"), SAME)
def test_what_real_clients_change_between_turns_does_not_change_the_digest(one: Any, other: Any) -> None:
    assert digest_of(one) == digest_of(other)


@pytest.mark.requirement("A0.34")
def test_marks_count_in_text_and_never_in_tool_results() -> None:
    def keep(value: dict[str, Any]) -> bool | None:
        return message_of(value, 1).keep

    assert keep({"role": "user", "content": "DO_NOT_EVICT this"}) is True
    assert keep({"role": "tool", "content": "DO_NOT_EVICT this"}) is None
    assert keep({"role": "tool", "content": "x", "weir": {"keep": True}}) is True
    assert keep({"role": "user", "content": "DO_NOT_EVICT", "weir": {"keep": False}}) is False
    raws = [b'{"role":"user","content":"x","weir":{}}', rb'{"role":"user","content":"of \"weir\""}', b'{"name":"weir"}']
    assert CHAT.own_marks(raws) == {0}


@pytest.mark.requirement("P4")
def test_a_replaced_field_leaves_every_other_byte_alone() -> None:
    body = b'{ "a" : 1.50 ,\n "messages":[ 1 ] , "z": {"k": [1e3, null]}, "n":1180591620717411303424 }'
    fields = split_object(body)
    assert replace_fields(body, fields, {"messages": b"[2]"}) == body.replace(b"[ 1 ]", b"[2]")
    assert with_fields(b'{"max_tokens": 9, "x": 1.0}', max_tokens=3) == b'{"max_tokens": 3, "x": 1.0}'
    assert json.loads(with_fields(b'{"x": 1}', max_tokens=3)) == {"x": 1, "max_tokens": 3}
    assert json.loads(with_fields(b"{}", max_tokens=3)) == {"max_tokens": 3}


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(st.text(max_size=8), json_values, max_size=6), st.booleans(), st.sampled_from([None, 1]))
def test_any_object_is_split_and_put_together_again(
    value: dict[str, Any], ascii_only: bool, indent: int | None
) -> None:
    body = json.dumps(value, ensure_ascii=ascii_only, indent=indent).encode("utf-8", "surrogatepass")
    fields = split_object(body)
    assert {k: read_value(v) for k, v in fields.items()} == value
    assert replace_fields(body, fields, {k: bytes(v) for k, v in fields.items()}) == body


@given(st.binary(max_size=80))
def test_any_bytes_are_an_object_or_refused(body: bytes) -> None:
    try:
        split_object(body)
    except (InvalidJSON, InvalidRequest):
        return
    assert isinstance(json.loads(body), dict)


def test_arrays_are_split_with_lone_surrogates_in_them() -> None:
    raws = split_array(b'[{"a":"\\ud800"}, {"b":1} ]')
    assert raws is not None
    assert [bytes(r) for r in raws] == [b'{"a":"\\ud800"}', b'{"b":1}']
    assert split_array(b'{"no":1}') is None


def test_numbers_keep_their_size_when_a_message_is_written_anew() -> None:
    assert write_value(read_value(b'{"n":1180591620717411303424,"f":1.5}')) == b'{"n":1180591620717411303424,"f":1.5}'
