"""Each rule of ``/v1/responses`` and ``/v1/messages``, with a request that breaks it and the provider's words."""

from typing import Any

import pytest

from tests import violations

pytestmark = pytest.mark.slow

ASK = {"type": "message", "role": "user", "content": "go"}
CALL = {"type": "function_call", "call_id": "call_1", "name": "f", "arguments": "{}"}
DONE = {"type": "function_call_output", "call_id": "call_1", "output": ""}
PATCH = {"type": "custom_tool_call", "call_id": "call_2", "name": "p", "input": "x"}
PATCHED = {"type": "custom_tool_call_output", "call_id": "call_2", "output": "ok"}
SHELL = {
    "type": "local_shell_call",
    "id": "sh_1",
    "call_id": "call_3",
    "action": {"type": "exec"},
    "status": "completed",
}
RUN = {"type": "local_shell_call_output", "id": "call_3", "output": "{}"}
THOUGHT = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAAAAx"}
SAID = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "ok", "annotations": []}]}
F = {"type": "function", "name": "f", "parameters": {}}


def response(*items: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"model": "m", "input": list(items), **more}


ACCEPTED_RESPONSES = {
    "a string": {"model": "m", "input": "go"},
    "outputs in any order and far off": response(ASK, THOUGHT, CALL, PATCH, ASK, PATCHED, SAID, DONE),
    "several users and systems": response(
        ASK, ASK, {"role": "developer", "content": "d"}, SAID, {"role": "system", "content": "s"}
    ),
    "a local shell call, answered under its id": response(ASK, SHELL, RUN),
    "a chain's calls answered": response(DONE, previous_response_id="resp_1"),
    "references": response(ASK, {"type": "item_reference", "id": "rs_1"}, {"id": "msg_1"}, CALL, DONE),
    "an image as output": response(ASK, CALL, {**DONE, "output": [{"type": "input_image", "image_url": "data:x"}]}),
    "a hosted call": response(ASK, THOUGHT, {"type": "web_search_call", "id": "ws_1", "status": "completed"}, SAID),
    "a compaction anywhere": response(ASK, {"type": "compaction", "encrypted_content": "gAAAAAx"}, ASK),
    "a trigger at the end": response(ASK, {"type": "compaction_trigger"}),
    "hosted tools and namespaces": response(
        ASK, tools=[F, {"type": "web_search"}, {"type": "namespace", "name": "n", "tools": [F]}]
    ),
}

REFUSED_RESPONSES: dict[str, tuple[dict[str, Any], str, str | None]] = {
    "no model": ({"input": "x"}, "Missing required parameter: 'model'.", "model"),
    "no input": ({"model": "m"}, 'One of "input" or "previous_response_id"', "input"),
    "input of the wrong type": ({"model": "m", "input": 3}, "Invalid type for 'input'", "input"),
    "an unknown item": (response({"type": "thing"}), "Invalid value: 'thing'. Supported values are: ", "input[0].type"),
    "an unknown role": (
        response({"role": "tool", "content": "x"}),
        "Invalid value: 'tool'. Supported values are: 'assistant', 'system', 'developer', and 'user'.",
        "input[0].role",
    ),
    "a part of the other side": (
        response(ASK, {"role": "assistant", "content": [{"type": "input_text", "text": "x"}]}),
        "Invalid value: 'input_text'. Supported values are: 'output_text' and 'refusal'.",
        "input[1].content[0].type",
    ),
    "an unknown key of an item": (response({**ASK, "weir": {}}), "Unknown parameter: 'input[0].weir'.", "input[0].weir"),
    "an unknown key of a part": (
        response({"role": "user", "content": [{"type": "input_text", "text": "x", "weir": 1}]}),
        "Unknown parameter: 'input[0].content[0].weir'.",
        "input[0].content[0].weir",
    ),
    "an unknown key": (response(ASK, weir=1), "Unknown parameter: 'weir'.", "weir"),
    "a call without output": (response(ASK, CALL), "No tool output found for function call call_1.", "input"),
    "a custom call without output": (response(ASK, PATCH), "No tool output found for custom tool call call_2.", "input"),
    "an output without call": (
        response(ASK, DONE),
        "No tool call found for function call output with call_id call_1.",
        "input",
    ),
    "an output of another kind": (
        response(ASK, CALL, {**PATCHED, "call_id": "call_1"}),
        "No tool call found for custom tool call output with call_id call_1.",
        "input",
    ),
    "an output before its call": (response(ASK, DONE, CALL), "No tool call found for function call output", "input"),
    "a chain's output to a new call": (response(CALL, previous_response_id="r"), "No tool output found", "input"),
    "reasoning at the end": (
        response(ASK, THOUGHT),
        "Item 'rs_1' of type 'reasoning' was provided without its required following item.",
        "input",
    ),
    "reasoning before a user": (response(ASK, THOUGHT, ASK), "provided without its required following item", "input"),
    "reasoning without a summary": (
        response(ASK, {"type": "reasoning", "id": "rs_1", "encrypted_content": "x"}, SAID),
        "Missing required parameter: 'input[1].summary'.",
        "input[1].summary",
    ),
    "reasoning with content": (
        response(ASK, {**THOUGHT, "content": [{"type": "reasoning_text", "text": "x"}]}, SAID),
        "Invalid 'input[1].content': array too long. Expected an array with maximum length 0, but got an array with length 1 instead.",
        "input[1].content",
    ),
    "sealed content that is no text": (
        response(ASK, {**THOUGHT, "encrypted_content": {}}, SAID),
        "Invalid type for 'input[1].encrypted_content'",
        "input[1].encrypted_content",
    ),
    "bare reasoning where nothing is stored": (
        response(ASK, {"type": "reasoning", "id": "rs_1", "summary": []}, SAID, store=False),
        "Item with id 'rs_1' not found. Items are not persisted when `store` is set to false. Try again with `store` set to true, or remove this item from your input.",
        "input",
    ),
    "a reference where nothing is stored": (
        response(ASK, {"type": "item_reference", "id": "msg_1"}, store=False),
        "Item with id 'msg_1' not found.",
        "input",
    ),
    "an id of another kind": (
        response(ASK, {**CALL, "id": "call_1"}, DONE),
        "Invalid 'input[1].id': 'call_1'. Expected an ID that begins with 'fc'.",
        "input[1].id",
    ),
    "a long id": (
        response(ASK, {**CALL, "id": "fc_" + "x" * 62}, DONE),
        "Invalid 'input[1].id': string too long. Expected a string with maximum length 64, but got a string with length 65 instead.",
        "input[1].id",
    ),
    "an id twice": (response({**SAID, "id": "msg_1"}, {**SAID, "id": "msg_1"}), "Duplicate item found with id msg_1.", "input"),
    "a trigger in the middle": (response({"type": "compaction_trigger"}, ASK), "compaction_trigger", "input"),
    "a chain and a conversation": (
        response(ASK, previous_response_id="resp_1", conversation="conv_1"),
        "Mutually exclusive parameters",
        "previous_response_id",
    ),
    "a tool in chat's form": (
        response(ASK, tools=[{"type": "function", "function": {"name": "f"}}]),
        "Missing required parameter: 'tools[0].name'.",
        "tools[0].name",
    ),
    "an unknown tool": (response(ASK, tools=[{"type": "x"}]), "Invalid value: 'x'. Supported values are:", "tools[0].type"),
    "too many tools": (
        response(ASK, tools=[{**F, "name": f"f{n}"} for n in range(129)]),
        "Invalid 'tools': array too long. Expected an array with maximum length 128, but got an array with length 129 instead.",
        "tools",
    ),
    "a bare member of a namespace": (
        response(ASK, tools=[{"type": "namespace", "name": "n", "tools": [{"type": "function"}]}]),
        "Missing required parameter: 'tools[0].tools[0].name'.",
        "tools[0].tools[0].name",
    ),
    "a choice that is no tool": (
        response(ASK, tools=[F], tool_choice={"type": "function", "name": "g"}),
        "Tool choice 'g' not found in 'tools' parameter.",
        "tool_choice",
    ),
    "too small an answer": (
        response(ASK, max_output_tokens=8),
        "Invalid 'max_output_tokens': integer below minimum value. Expected a value >= 16, but got 8 instead.",
        "max_output_tokens",
    ),
}  # fmt: skip

HELLO = {"role": "user", "content": "hi"}
USE = {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {}}
OTHER = {**USE, "id": "toolu_2"}
GOT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "ok"}
GOT_OTHER = {**GOT, "tool_use_id": "toolu_2"}
TEXT = {"type": "text", "text": "hm"}
THINKING = {"type": "thinking", "thinking": "", "signature": "s"}
SEARCH = {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {}}
FOUND = {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_1", "content": []}
MARK = {"cache_control": {"type": "ephemeral"}}
TOOL = {"name": "f", "input_schema": {"type": "object"}}
ENABLED = {"type": "enabled", "budget_tokens": 1024}


def user(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def model(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def message(*messages: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"model": "m", "max_tokens": 4000, "messages": list(messages), **more}


SYSTEM = {"role": "system", "content": "now this"}
ACCEPTED_MESSAGES = {
    "a string": message(HELLO),
    "the same role again": message(HELLO, HELLO, model(TEXT), model(TEXT), HELLO),
    "results over two messages": message(HELLO, model(USE, OTHER), user(GOT_OTHER), user(GOT, TEXT)),
    "a system message behind a user's": message(HELLO, SYSTEM, SYSTEM, model(TEXT), HELLO, SYSTEM),
    "a server's tool": message(HELLO, model(SEARCH, FOUND, TEXT), HELLO),
    "a server's tool that goes on": message(HELLO, model(SEARCH)),
    "a server's tool around a client's": message(HELLO, model(SEARCH, USE), user(GOT), model(FOUND, TEXT), HELLO),
    "thinking first": message(HELLO, model(THINKING, USE), user(GOT), thinking=ENABLED),
    "older turns without thinking": message(HELLO, model(USE), user(GOT), model(TEXT), HELLO, thinking=ENABLED),
    "adaptive thinking without any": message(HELLO, model(USE), user(GOT), thinking={"type": "adaptive"}),
    "a prefill": message(HELLO, {"role": "assistant", "content": "So"}),
    "four markers": message(user({**TEXT, **MARK}), system=[{**TEXT, **MARK}] * 2, tools=[{**TOOL, **MARK}]),
    "a summary first": message(model({"type": "compaction", "content": "s", "signature": "x"}), HELLO),
    "a summary of the server's own": message(HELLO, model({"type": "compaction", "content": "s"}, TEXT), HELLO),
    "a thread that goes on": message(user(GOT), thread={"type": "continue", "previous_message_id": "msg_1"}),
    "Claude Code's clearing": message(
        HELLO, thinking={"type": "adaptive"}, context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    ),
}  # fmt: skip
REFUSED_MESSAGES: dict[str, tuple[dict[str, Any], str]] = {
    "no limit": ({"model": "m", "messages": [HELLO]}, "max_tokens: Field required"),
    "no message": (message(), "messages: at least one message is required"),
    "an unknown key": (message(HELLO, weir=1), "weir: Extra inputs are not permitted"),
    "an unknown key of a message": (message({**HELLO, "weir": {}}), "messages.0.weir: Extra inputs are not permitted"),
    "an unknown key of a block": (message(user({**TEXT, "weir": 1})), "messages.0.content.0.text.weir: Extra inputs are not permitted"),
    "a marker on thinking": (
        message(HELLO, model({**THINKING, **MARK}, TEXT), HELLO),
        "messages.1.content.0.thinking.cache_control: Extra inputs are not permitted",
    ),
    "a missing field": (message(user({"type": "image"})), "messages.0.content.0.image.source: Field required"),
    "an unknown block": (message(user({"type": "x"})), "messages.0.content.0: Input tag 'x' found using 'type' does not match"),
    "an unknown role": (message({"role": "tool", "content": "x"}), 'messages: Unexpected role "tool".'),
    "a call of the user's": (message(user(USE)), "messages.0.content.0: `tool_use` blocks can only be in `assistant` messages"),
    "a result of the model's": (message(HELLO, model(GOT)), "`tool_result` blocks can only be in `user` messages"),
    "a call without result": (
        message(HELLO, model(TEXT, USE), HELLO),
        "messages.1: `tool_use` ids were found without `tool_result` blocks immediately after: toolu_1. Each `tool_use` block must have a corresponding `tool_result` block in the next message.",
    ),
    "a call at the end": (message(HELLO, model(USE)), "`tool_use` ids were found without `tool_result` blocks"),
    "one of two calls without result": (message(HELLO, model(USE, OTHER), user(GOT)), "immediately after: toolu_2."),
    "a result behind text": (message(HELLO, model(USE), user(TEXT, GOT)), "messages.1: `tool_use` ids were found without"),
    "a result without call": (
        message(HELLO, model(TEXT), user(GOT)),
        "messages.2.content.0: unexpected `tool_use_id` found in `tool_result` blocks: toolu_1. Each `tool_result` block must have a corresponding `tool_use` block in the previous message.",
    ),
    "two results": (message(HELLO, model(USE), user(GOT, GOT)), "each tool_use must have a single result."),
    "a call's id twice": (message(HELLO, model(USE), user(GOT), model(USE), user(GOT)), "`tool_use` ids must be unique"),
    "a server's call without result": (
        message(HELLO, model(SEARCH, TEXT), HELLO, model(TEXT), HELLO),
        "messages.1.content.0: `web_search` tool use with id `srvtoolu_1` was found without a corresponding `web_search_tool_result` block",
    ),
    "a server's result without call": (message(HELLO, model(FOUND), HELLO), "unexpected `tool_use_id` found in `web_search_tool_result` blocks"),
    "an assistant first": (message(model(TEXT), HELLO), 'messages: first message must use the "user" role'),
    "a system message first": (message(SYSTEM, HELLO), 'messages: Unexpected role "system"'),
    "a system message behind the model's": (message(HELLO, model(TEXT), SYSTEM), "messages.2: `system` messages must follow a `user` message"),
    "a system message before a user's": (message(HELLO, SYSTEM, HELLO), "messages.1: `system` messages must follow a `user` message"),
    "no content": (
        message({"role": "user", "content": []}, HELLO),
        "messages.0: all messages must have non-empty content except for the optional final assistant message",
    ),
    "empty text": (message(user({"type": "text", "text": ""})), "messages: text content blocks must be non-empty"),
    "blank text": (message(user({"type": "text", "text": " \n"})), "messages: text content blocks must contain non-whitespace text"),
    "a marker on empty text": (message(user({"type": "text", "text": "", **MARK})), "cache_control cannot be set for empty text blocks"),
    "empty text in a result": (
        message(HELLO, model(USE), user({**GOT, "content": [{"type": "text", "text": ""}]})),
        "text content blocks must be non-empty",
    ),
    "an open loop without thinking": (
        message(HELLO, model(USE), user(GOT), thinking=ENABLED),
        "messages.1.content.0.type: Expected `thinking` or `redacted_thinking`, but found `tool_use`. When `thinking` is enabled, a final `assistant` message must start with a thinking block",
    ),
    "a prefill with thinking": (
        message(HELLO, model(TEXT), thinking=ENABLED),
        "This model does not support assistant message prefill.",
    ),
    "a blank at the end": (
        message(HELLO, {"role": "assistant", "content": "So "}),
        "messages: final assistant content cannot end with trailing whitespace",
    ),
    "a budget above the limit": (message(HELLO, max_tokens=1024, thinking=ENABLED), "`max_tokens` must be greater than `thinking.budget_tokens`."),
    "too small a budget": (message(HELLO, thinking={"type": "enabled", "budget_tokens": 99}), "thinking.enabled.budget_tokens: Input should be"),
    "five markers": (
        message(user({**TEXT, **MARK}), system=[{**TEXT, **MARK}] * 2, tools=[{**TOOL, **MARK}], **MARK),
        "A maximum of 4 blocks with cache_control may be provided. Found 5.",
    ),
    "a long life behind a short one": (
        message(user({**TEXT, "cache_control": {"type": "ephemeral", "ttl": "1h"}}), system=[{**TEXT, **MARK}]),
        "a ttl='1h' cache_control block must not come after a ttl='5m' cache_control block",
    ),
    "clearing of thinking that is off": (
        message(HELLO, context_management={"edits": [{"type": "clear_thinking_20251015"}]}),
        "`clear_thinking_20251015` strategy requires `thinking` to be enabled",
    ),
    "an unknown edit": (message(HELLO, context_management={"edits": [{"type": "x"}]}), "context_management.edits.0: Input tag 'x'"),
    "an early compaction": (
        message(HELLO, context_management={"edits": [{"type": "compact_20260112", "trigger": {"type": "input_tokens", "value": 9}}]}),
        "context_management.edits.0.compact_20260112.trigger.value: Input should be greater than or equal to 50000",
    ),
    "two names of one tool": (message(HELLO, tools=[TOOL, TOOL]), "tools: Tool names must be unique."),
    "a tool without schema": (message(HELLO, tools=[{"name": "f"}]), "tools.0.custom.input_schema: Field required"),
    "a choice with thinking": (
        message(HELLO, tools=[TOOL], tool_choice={"type": "any"}, thinking=ENABLED),
        "Thinking may not be enabled when tool_choice forces tool use.",
    ),
    "a choice that is no tool": (message(HELLO, tools=[TOOL], tool_choice={"type": "tool", "name": "g"}), "Tool 'g' not found in provided tools"),
    "two summaries": (
        message(user(*[{"type": "compaction", "content": "s", "signature": "x"}] * 2, TEXT)),
        "more than one `compaction` block",
    ),
    "a summary behind others": (
        message(HELLO, model({"type": "compaction", "content": "s", "signature": "x"}), HELLO),
        "messages.1.content.0: the `compaction` block must be the first block of the conversation.",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ACCEPTED_RESPONSES)
def test_a_legal_response_request_has_no_violation(name):
    assert violations.of_responses(ACCEPTED_RESPONSES[name]) == []


@pytest.mark.parametrize("name", REFUSED_RESPONSES)
def test_a_broken_rule_of_responses_is_named_in_openais_words(name):
    body, words, param = REFUSED_RESPONSES[name]
    found = violations.of_responses(body)
    assert any(words in problem.message and problem.param == param for problem in found), found


def test_items_that_were_made_together_are_told_from_the_whole_history():
    thoughts = [{**THOUGHT, "id": f"rs_{n}"} for n in (1, 2)]
    calls = [{**CALL, "id": f"fc_{n}", "call_id": f"call_{n}"} for n in (1, 2)]
    results = [{**DONE, "call_id": f"call_{n}"} for n in (1, 2)]
    whole = [ASK, thoughts[0], calls[0], results[0], thoughts[1], calls[1], results[1]]
    reasons = violations.reasons_of(whole)
    assert reasons == {"rs_1": "rs_1", "fc_1": "rs_1", "rs_2": "rs_2", "fc_2": "rs_2"}
    assert violations.of_responses(response(*whole), reasons=reasons) == []
    (bare,) = violations.of_responses(response(ASK, calls[0], results[0]), reasons=reasons)
    assert (
        bare.message
        == "Item 'fc_1' of type 'function_call' was provided without its required 'reasoning' item: 'rs_1'."
    )
    left = violations.of_responses(response(ASK, *thoughts, calls[1], results[1]), reasons=reasons)
    assert [problem.message for problem in left] == [
        "Item 'rs_1' of type 'reasoning' was provided without its required following item."
    ]


def test_vllm_takes_more_fields_and_plain_reasoning():
    body, _, _ = REFUSED_RESPONSES["reasoning with content"]
    assert violations.of_responses({**body, "top_k": 3}, open_server=True) == []


@pytest.mark.parametrize("name", ACCEPTED_MESSAGES)
def test_a_legal_message_request_has_no_violation(name):
    assert violations.of_messages(ACCEPTED_MESSAGES[name]) == []


def test_what_is_only_counted_needs_no_limit_and_may_have_none():
    assert violations.of_messages({"model": "m", "messages": [HELLO]}, counting=True) == []
    (problem,) = violations.of_messages(message(HELLO), counting=True)
    assert problem.message == "max_tokens: Extra inputs are not permitted"


@pytest.mark.parametrize("name", REFUSED_MESSAGES)
def test_a_broken_rule_of_messages_is_named_in_anthropics_words(name):
    body, words = REFUSED_MESSAGES[name]
    found = violations.of_messages(body)
    assert any(words in problem.message for problem in found), found
