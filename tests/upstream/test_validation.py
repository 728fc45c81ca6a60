"""What the strict simulator refuses, in OpenAI's words, and what it must let through."""

import copy
import json
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.profile import tried
from tests.upstream import Dialect, Problem, SimulatorSettings, run_simulator
from tests.upstream.chat import SimulatedChat, check_chat
from tests.upstream.checks import refuse_first
from tests.upstream.messages import SimulatedMessages
from tests.upstream.model import Model, RecordedRequest
from tests.upstream.responses import SimulatedResponses

pytestmark = pytest.mark.slow


def call(name: str, at: str = "f") -> dict[str, Any]:
    return {"id": name, "type": "function", "function": {"name": at, "arguments": "{}"}}


def said(text: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def result(name: str, text: str = "ok") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": name, "content": text}


USER = {"role": "user", "content": "hi"}
PAIR = [said(None, tool_calls=[call("a"), call("b")]), result("b"), result("a")]

LEGAL: dict[str, list[dict[str, Any]]] = {
    "one user message": [USER],
    "parallel results in any order": [USER, *PAIR],
    "an empty tool result": [USER, said(None, tool_calls=[call("a")]), result("a", "")],
    "empty text beside calls": [USER, said("", tool_calls=[call("a")]), result("a"), USER],
    "the same id in two turns": [USER, *PAIR, USER, *PAIR],
    "developer and system in the middle": [
        {"role": "developer", "content": "d"},
        USER,
        {"role": "system", "content": "s"},
    ],
    "two users in a row": [USER, USER],
    "text and image parts": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "see"},
                {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}},
            ],
        }
    ],
    "a refusal without content": [USER, said(None, refusal="no"), USER],
    "a legacy function call": [
        USER,
        said(None, function_call={"name": "f", "arguments": "{}"}),
        {"role": "function", "name": "f", "content": "1"},
    ],
    "a marked prefill": [USER, said("Sure, ", prefix=True)],
    "fields from the future": [{**USER, "mood": 1, "provider_data": {"x": []}}],
}

ILLEGAL: dict[str, tuple[list[Any], str, str | None]] = {
    "no messages": ([], "Invalid 'messages': empty array.", "messages"),
    "a message that is text": (
        ["x"],
        "Invalid type for 'messages[0]': expected an object, but got a string instead.",
        "messages[0]",
    ),
    "content of another type": (
        [{"role": "user", "content": 7}],
        "expected one of a string or array of objects, but got an integer instead.",
        "messages[0].content",
    ),
    "an unknown role": (
        [{"role": "bot", "content": "x"}],
        "Invalid value: 'bot'. Supported values are: 'system', 'assistant', 'user', 'function', 'tool', and 'develop",
        "messages[0].role",
    ),
    "no role": ([{"content": "x"}], "Missing required parameter: 'messages[0].role'.", "messages[0].role"),
    "null content": (
        [{"role": "user", "content": None}],
        "Invalid value for 'content': expected a string, got null.",
        "messages.[0].content",
    ),
    "an assistant that says nothing": (
        [USER, said(None), USER],
        "Invalid value for 'content': expected a string, got null.",
        "messages.[1].content",
    ),
    "an empty user text": (
        [{"role": "user", "content": ""}],
        "Invalid 'messages[0].content': empty string.",
        "messages[0].content",
    ),
    "an empty list of parts": (
        [{"role": "user", "content": []}],
        "Invalid 'messages[0].content': empty array.",
        "messages[0].content",
    ),
    "an unknown part": (
        [{"role": "user", "content": [{"type": "hologram"}]}],
        "Invalid value: 'hologram'. Supported values are: 'text', 'image_url', 'input_audio', and 'file'.",
        "messages[0].content[0].type",
    ),
    "an image in a tool result": (
        [
            USER,
            said(None, tool_calls=[call("a")]),
            {**result("a"), "content": [{"type": "image_url", "image_url": {}}]},
        ],
        "Invalid 'messages[2]'. Image URLs are only allowed for messages with role 'user'",
        "messages[2]",
    ),
    "a result without a call": (
        [USER, result("a")],
        "Invalid parameter: messages with role 'tool' must be a response to a preceeding message with 'tool_calls'.",
        "messages.[1].role",
    ),
    "a call without its result": (
        [USER, said(None, tool_calls=[call("a"), call("b")]), result("a"), USER],
        "The following tool_call_ids did not have response messages: b",
        "messages.[1].role",
    ),
    "a call at the very end": (
        [USER, said(None, tool_calls=[call("a")])],
        "The following tool_call_ids did not have response messages: a",
        "messages.[1].role",
    ),
    "a user between call and result": (
        [USER, said(None, tool_calls=[call("a")]), USER, result("a")],
        "An assistant message with 'tool_calls' must be followed by tool messages",
        "messages.[1].role",
    ),
    "a result of another call": (
        [USER, said(None, tool_calls=[call("a")]), result("z"), result("a")],
        "Invalid parameter: 'tool_call_id' of 'z' not found in 'tool_calls' of previous message.",
        "messages.[2].tool_call_id",
    ),
    "a result given twice": (
        [USER, said(None, tool_calls=[call("a")]), result("a"), result("a")],
        "Invalid parameter: Duplicate value for 'tool_call_id' of 'a', in messages[2] and messages[3].",
        "messages.[3].tool_call_id",
    ),
    "a result without an id": (
        [USER, said(None, tool_calls=[call("a")]), {"role": "tool", "content": "x"}],
        "Missing parameter 'tool_call_id': messages with role 'tool' must have a 'tool_call_id'.",
        "messages.[2].tool_call_id",
    ),
    "an empty list of calls": (
        [USER, said("x", tool_calls=[]), USER],
        "Invalid 'messages[1].tool_calls': empty array.",
        "messages[1].tool_calls",
    ),
    "a call without an id": (
        [USER, said(None, tool_calls=[{"type": "function", "function": {"name": "f", "arguments": "{}"}}])],
        "Missing required parameter: 'messages[1].tool_calls[0].id'.",
        "messages[1].tool_calls[0].id",
    ),
    "an unmarked assistant at the end": ([USER, said("Sure")], "Expected last role User or Tool", "messages.[1].role"),
    "a mark of Weir's that was not stripped": (
        [{**USER, "weir": {"keep": True}}],
        "Unknown parameter: 'messages[0].weir'.",
        "messages[0].weir",
    ),
}


def refusal(messages: Any, options: SimulatorSettings | None = None, **more: Any) -> Problem | None:
    try:
        refuse_first(check_chat({"model": "sim", "messages": messages, **more}, options or SimulatorSettings()))
    except Problem as problem:
        return problem
    return None


@pytest.mark.parametrize("name", LEGAL)
def test_a_legal_array_passes(name):
    assert refusal(LEGAL[name]) is None


@pytest.mark.parametrize("name", ILLEGAL)
def test_an_illegal_array_is_refused_with_openais_words_and_param(name):
    messages, text, param = ILLEGAL[name]
    rejected = refusal(messages)
    assert rejected is not None
    assert text in rejected.message
    assert rejected.param == param
    assert rejected.status == 400


def test_fields_that_depend_on_each_other_are_checked_together():
    assert "only allowed when 'tools' are specified" in refusal([USER], tool_choice="auto").message
    assert "only allowed when 'tools' are specified" in refusal([USER], parallel_tool_calls=True).message
    assert "only allowed when 'stream'" in refusal([USER], stream_options={"include_usage": True}).message
    tools = [{"type": "function", "function": {"name": "f"}}]
    choice = {"type": "function", "function": {"name": "g"}}
    assert "Tool choice 'g' not found" in refusal([USER], tools=tools, tool_choice=choice).message
    assert refusal([USER], tools=tools, tool_choice="required") is None
    assert refusal([USER], tools=[]).code == "empty_array"
    assert refusal([USER], tools=tools * 129).code == "array_above_max_length"
    assert refusal([USER], max_tokens=0).code == "integer_below_min_value"
    assert refusal([USER], max_tokens="12").code == "invalid_type"


def test_a_lenient_simulator_takes_what_llama_server_takes():
    lenient = SimulatorSettings(strict=False)
    for messages in ([USER, result("a")], [USER, said("Sure")], [{"role": "bot", "content": "x"}]):
        assert refusal(messages, lenient) is None


def test_a_body_that_is_not_json_is_refused_and_nothing_breaks():
    with run_simulator(SimulatorSettings(), counter=Words()) as running:
        url = f"{running.base_url}/chat/completions"
        for body in (b"{", b"", b"\xff\xfe", b"[" * 100_000, b"[]", b"null"):
            answer = httpx.post(url, content=body)
            assert answer.status_code == 400
            assert answer.json()["error"]["type"] == "invalid_request_error"
        message = json.dumps({"model": "sim", "messages": [{"role": "user", "content": "\ud800 lone"}]})
        assert httpx.post(url, content=message).status_code == 200


WORDS = ["function", "user", "text", "image_url", "tool_use", "tool_result", "required"]
WORDS += [
    "message",
    "reasoning",
    "function_call",
    "function_call_output",
    "thinking",
    "compaction",
    "compaction_trigger",
]
WORDS += ["clear_tool_uses_20250919", "clear_thinking_20251015", "continue", "create", "auto", "adaptive"]
NAMES = ["type", "text", "id", "function", "name", "url", "json_schema", "schema", "include_usage", "content", "input"]
NAMES += ["edits", "trigger", "keep", "value", "cache_control", "format", "tools", "previous_message_id", "summary"]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3) | st.sampled_from(WORDS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=3),
    max_leaves=6,
)
KEYS = ["role", "content", "tool_calls", "tool_call_id", "name", "refusal", "function_call"]
KEYS += ["type", "id", "call_id", "output", "arguments", "summary", "encrypted_content", "thinking", "signature"]
MORE = [
    "context_management",
    "compaction",
    "thread",
    "text",
    "truncation",
    "previous_response_id",
    "conversation",
    "store",
]
MORE += ["tools", "tool_choice", "max_tokens", "stream_options", "response_format", "n", "stream", "thinking", "system"]
ROLES = st.sampled_from(["user", "tool", "assistant", "system"])


class Words:
    def count(self, text: str) -> int:
        return len(text.split())


MODELS = [
    (
        model := Model(SimulatorSettings(strict=strict, dialect=dialect), count=Words().count),
        kind(model.settings, model.counter),
    )
    for strict in (True, False)
    for dialect, kind in (
        (Dialect.OPENAI, SimulatedChat),
        (Dialect.ANTHROPIC, SimulatedMessages),
        (Dialect.OPENAI, SimulatedResponses),
        (Dialect.VLLM, SimulatedResponses),
    )
]


@given(
    st.lists(st.dictionaries(st.sampled_from(KEYS), ROLES | VALUES, max_size=3) | VALUES, max_size=4),
    st.dictionaries(st.sampled_from(MORE), VALUES, max_size=2),
)
@settings(max_examples=tried(25, 200), deadline=None)
def test_no_request_makes_the_simulator_fall_over(messages, more):
    body = json.dumps({"model": "sim", "messages": messages, "input": messages, "max_tokens": 9, **more}).encode()
    for model, surface in MODELS:
        delivery = model.exchange(surface, RecordedRequest(method="POST", path="/", headers=(), body=body, at=0.0))
        assert delivery.status in {200, 400, 404}


@given(st.lists(st.sampled_from(sorted(LEGAL)), min_size=1, max_size=5), st.data())
@settings(max_examples=tried(25, 100), deadline=None)
def test_taking_one_message_out_of_a_tool_exchange_is_always_noticed(names, data):
    messages = [message for name in names for message in copy.deepcopy(LEGAL[name]) if not message.get("prefix")]
    messages += [USER, *copy.deepcopy(PAIR)]
    assert refusal(messages) is None
    victim = data.draw(st.sampled_from([len(messages) - 3, len(messages) - 2, len(messages) - 1]))
    assert refusal(messages[:victim] + messages[victim + 1 :]) is not None
