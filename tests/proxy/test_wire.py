"""Client JSON and back: what is not managed keeps its bytes, and what clients change between turns does not count."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.ledger import PlannedMessage
from proxy.conversation.thread import name_from
from proxy.errors import InvalidJSON, InvalidRequest
from proxy.exchange.asked import wants_no_editing
from proxy.wire import raw
from proxy.wire.chat import body_of, digest_of, message_of
from proxy.wire.codec import CHAT, parse_chat, with_fields
from proxy.wire.raw import read_value, replace_fields, split_array, split_object, write_value
from proxy.wire.render import render, rewritten

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

DIFFERENT = [
    ({"role": "user", "content": "hi"}, {"role": "user", "content": "hi "}),
    ({"role": "user", "content": "hi"}, {"role": "assistant", "content": "hi"}),
    ({"role": "user", "content": "hi", "name": "ann"}, {"role": "user", "content": "hi", "name": "bob"}),
    (
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "user", "content": [{"type": "text", "text": "ab"}]},
    ),
    (
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "weather", "arguments": "{}"}}]},
    ),
    (
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:a"}}]},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:b"}}]},
    ),
]


@pytest.mark.requirement("P1", "A0.42")
@pytest.mark.parametrize(("one", "other"), SAME)
def test_what_real_clients_change_between_turns_does_not_change_the_digest(one: Any, other: Any) -> None:
    assert digest_of(one) == digest_of(other)


@pytest.mark.requirement("P1")
@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_what_a_message_says_changes_the_digest(one: Any, other: Any) -> None:
    assert digest_of(one) != digest_of(other)


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


@pytest.mark.requirement("P11")
def test_content_forms_are_read() -> None:
    assert body_of({"content": "a"}).text == "a"
    assert body_of({"content": [{"type": "text", "text": "a"}, {"type": "image_url"}, "b"]}).text == "a\nb"
    assert body_of({"content": [{"type": "image_url"}]}).media == 1
    assert body_of({"content": [{"type": "refusal", "refusal": "no"}]}).text == "no"
    legacy = body_of({"content": None, "function_call": {"name": "f", "arguments": "{}"}})
    assert (legacy.calls[0].name, legacy.calls[0].arguments) == ("f", "{}")
    custom = body_of({"tool_calls": [{"id": "1", "type": "custom", "custom": {"name": "sql", "input": "select 1"}}]})
    assert (custom.calls[0].name, custom.calls[0].arguments) == ("sql", "select 1")


@pytest.mark.requirement("P4")
def test_a_replaced_field_leaves_every_other_byte_alone() -> None:
    body = b'{ "a" : 1.50 ,\n "messages":[ 1 ] , "z": {"k": [1e3, null]}, "n":1180591620717411303424 }'
    fields = split_object(body)
    assert replace_fields(body, fields, {"messages": b"[2]"}) == body.replace(b"[ 1 ]", b"[2]")
    assert with_fields(b'{"max_tokens": 9, "x": 1.0}', max_tokens=3) == b'{"max_tokens": 3, "x": 1.0}'
    assert json.loads(with_fields(b'{"x": 1}', max_tokens=3)) == {"x": 1, "max_tokens": 3}
    assert json.loads(with_fields(b"{}", max_tokens=3)) == {"max_tokens": 3}


@pytest.mark.parametrize("at_once", [1, 3, 8])
def test_long_values_are_found_again_in_parts(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(raw, "COMPARED_AT_ONCE", at_once)
    body = b'{"messages": [1, 2, 3, 4], "x": 1}'
    assert replace_fields(body, split_object(body), {"x": b"2"}) == body.replace(b'"x": 1', b'"x": 2')
    twice = b'{"messages": [1, 2, 3, 4], "messages": [1, 2, 3, 5], "x": 1}'
    assert json.loads(replace_fields(twice, split_object(twice), {"x": b"2"})) == {"messages": [1, 2, 3, 5], "x": 2}


def test_of_a_repeated_field_the_last_one_counts_and_is_replaced() -> None:
    body = b'{"messages":[1],"messages":[2],"x":1}'
    assert json.loads(replace_fields(body, split_object(body), {"messages": b"[3]"})) == {"messages": [3], "x": 1}


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


def test_kept_messages_are_the_clients_bytes_and_replaced_ones_keep_their_ids() -> None:
    body = (
        b'{"messages":[{ "role":"user","content":"a" },{"role":"tool","tool_call_id":"x","content":[{"type":"text","text":"long"}]},'
        b'{"role":"user","content":"b","weir":{"keep":true}}]}'
    )
    request = parse_chat(body)
    assert request.messages is not None
    pieces = [
        PlannedMessage(0, 1),
        PlannedMessage(None, 1, "summary"),
        PlannedMessage(1, 1, "short"),
        PlannedMessage(2, 1),
    ]
    written = rewritten(request, messages=render(pieces, request.messages, frozenset({2})), pruned=())
    assert b'[{ "role":"user","content":"a" },' in written
    assert json.loads(written)["messages"] == [
        {"role": "user", "content": "a"},
        {"role": "user", "content": "summary"},
        {"role": "tool", "tool_call_id": "x", "content": "short"},
        {"role": "user", "content": "b"},
    ]


@pytest.mark.requirement("P1")
@pytest.mark.parametrize(
    ("headers", "body", "name"),
    [
        ([(b"x-weir-conversation", b"mine"), (b"x-session-id", b"other")], {}, "mine"),
        ([(b"x-session-id", b"s-1")], {"session_id": "body"}, "s-1"),
        ([(b"x-acme-session-id", b"acme-1")], {}, "acme-1"),
        ([(b"x-parent-session-id", b"parent")], {}, None),
        ([(b"x-claude-code-session-id", b"cc")], {}, "cc"),
        ([], {"session_id": "router"}, "router"),
        ([], {"conversation": {"id": "conv_1"}}, "conv_1"),
        ([], {"metadata": {"thread_id": "t-9"}}, "t-9"),
        ([], {"metadata": {"user_id": "user_a_account_b_session_c-d"}}, "c-d"),
        ([], {"metadata": {"user_id": '{"session_id": "json-1"}'}}, "json-1"),
        ([(b"session-id", b"cx")], {}, None),
        ([(b"session-id", b"cx"), (b"user-agent", b"codex_cli_rs/0.1")], {}, "cx"),
        ([(b"baggage", b"k=v,session.id=bag%2F1;p")], {}, "bag/1"),
        ([], {"user": "u", "prompt_cache_key": "k", "safety_identifier": "s"}, None),
        ([(b"x-session-id", b"with blank ")], {}, None),
        ([(b"x-session-id", b"x" * 300)], {}, None),
    ],
)
def test_names_are_found_by_the_conventions_in_use(headers: Any, body: dict[str, Any], name: str | None) -> None:
    fields = split_object(json.dumps(body).encode())
    assert name_from(headers, fields, baggage=True) == name
    assert name_from(headers, fields) == (None if headers and headers[0][0] == b"baggage" else name)


@pytest.mark.parametrize(
    ("body", "forbidden"),
    [
        ({"truncation": "disabled"}, False),
        ({"truncation": "auto"}, False),
        ({"transforms": []}, True),
        ({"transforms": ["middle-out"]}, False),
        ({"plugins": [{"id": "context-compression", "enabled": False}]}, True),
        ({"plugins": [{"id": "context-compression"}]}, False),
        ({"plugins": "odd", "transforms": 3}, False),
        ({}, False),
    ],
)
def test_standard_knobs_say_whether_a_request_may_be_edited(body: dict[str, Any], forbidden: bool) -> None:
    assert wants_no_editing(split_object(json.dumps(body).encode())) is forbidden
