"""``POST /v1/chat/completions``: what OpenAI refuses, and answers whole and as a stream, vLLM's and llama.cpp's too.

Calls and results are paired by position: the results of an assistant message follow it at once, in any order, one for
each call.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tests.upstream.checks import (
    MAX_TOOLS,
    above_cap,
    empty,
    misshapen,
    missing,
    not_one_of,
    refuse_first,
    too_long,
    too_small,
    unknown,
)
from tests.upstream.delivery import SimulatedCall, compact
from tests.upstream.model import AdmittedRequest, Completion, Sender, SimulatorSettings, Surface
from tests.upstream.window import Dialect, Problem, PromptPart, Request, tool_pieces

DONE = b"data: [DONE]\n\n"
NAMED = {"name": str}
SCHEMA = {"properties": {}, "required": [str], "enum": [object]}
FUNCTION = {"name": str, "arguments": str, "input": str, "parameters": SCHEMA}
CALL = {"id": str, "type": str, "function": FUNCTION, "custom": FUNCTION}
PART = {"type": str, "text": str, "image_url": {"url": str, "detail": str}}
MESSAGE = {
    "role": str,
    "content": (str, [PART]),
    "name": str,
    "tool_calls": [CALL],
    "tool_call_id": str,
    "function_call": FUNCTION,
}
TOOL = {"type": str, "name": str, "function": FUNCTION, "custom": FUNCTION}
REQUEST = {
    "model": str,
    "messages": [MESSAGE],
    "max_tokens": int,
    "max_completion_tokens": int,
    "n": int,
    "stream": bool,
    "stream_options": {"include_usage": bool},
    "tools": [TOOL],
    "functions": [FUNCTION],
    "tool_choice": (str, {"type": str, "name": str, "function": NAMED, "custom": NAMED}),
    "response_format": {"type": str, "json_schema": {"schema": SCHEMA}},
}

ROLES = ("system", "assistant", "user", "function", "tool", "developer")
TOOL_KINDS = ("function", "custom")
TEXT_PARTS = ("text",)
PARTS: Mapping[str, tuple[str, ...]] = {
    "user": ("text", "image_url", "input_audio", "file"),
    "assistant": ("text", "refusal"),
}
MEDIA_PARTS = frozenset({"image_url", "input_audio", "file"})
MAX_TEXT = 10_485_760


def check_chat(request: Request, settings: SimulatorSettings) -> Iterator[Problem]:
    yield from misshapen(request, REQUEST)
    yield from _check_envelope(request)
    yield from _check_output(request, settings)
    if settings.strict:
        yield from _check_tools(request)
        messages = request["messages"]
        for index, message in enumerate(messages):
            yield from _check_message(index, message)
        yield from _check_pairs(messages)
        yield from _check_last(request)


def _check_envelope(request: Request) -> Iterator[Problem]:
    if not request.get("model"):
        yield Problem("you must provide a model parameter")
    messages = request.get("messages")
    if messages is None:
        yield missing("messages")
    if not messages:
        yield empty("messages")
    if request.get("stream_options") is not None and not request.get("stream"):
        text = "The 'stream_options' parameter is only allowed when 'stream' is enabled."
        yield Problem(text, "stream_options")


def _check_output(request: Request, settings: SimulatorSettings) -> Iterator[Problem]:
    for name in ("max_completion_tokens", "max_tokens"):
        value = request.get(name)
        if value is None:
            continue
        if value < 1:
            yield too_small(name, 1, value)
        if settings.max_output is not None and value > settings.max_output:
            yield above_cap(name, value, settings.max_output, "completion")


def _check_tools(request: Request) -> Iterator[Problem]:
    tools = request.get("tools")
    if tools is None:
        for name in ("tool_choice", "parallel_tool_calls"):
            if request.get(name) not in (None, "none"):
                text = f"Invalid value for '{name}': '{name}' is only allowed when 'tools' are specified."
                yield Problem(text, name)
        return
    if not tools:
        yield empty("tools")
    if len(tools) > MAX_TOOLS:
        yield too_long("tools", "array", MAX_TOOLS, len(tools))
    for index, tool in enumerate(tools):
        if tool.get("type") not in TOOL_KINDS:
            yield not_one_of(TOOL_KINDS, tool.get("type"), f"tools[{index}].type")
        elif not (tool.get(tool["type"]) or {}).get("name"):
            yield missing(f"tools[{index}].{tool['type']}.name")
    names = [(tool.get(str(tool.get("type"))) or {}).get("name") for tool in tools]
    choice = request.get("tool_choice")
    if isinstance(choice, dict) and choice.get("type") in TOOL_KINDS:
        wanted = (choice.get(choice["type"]) or {}).get("name")
        if wanted not in names:
            text = f"Tool choice '{wanted}' not found in 'tools' parameter."
            yield Problem(text, "tool_choice")


def _check_message(index: int, message: Request) -> Iterator[Problem]:
    path = f"messages[{index}]"
    role = message.get("role")
    if not isinstance(role, str):
        yield missing(f"{path}.role")
        return
    if role not in ROLES:
        yield not_one_of(ROLES, role, f"{path}.role")
    if "weir" in message:
        yield unknown(f"{path}.weir")
    if role == "assistant":
        yield from _check_calls(path, message)
    yield from _check_content(index, role, message)


def _check_content(index: int, role: str, message: Request) -> Iterator[Problem]:
    path, content = f"messages[{index}].content", message.get("content")
    speaks = role == "assistant" and any(
        message.get(key) for key in ("tool_calls", "function_call", "refusal", "audio")
    )
    if content is None:
        if not speaks:
            text = "Invalid value for 'content': expected a string, got null."
            yield Problem(text, f"messages.[{index}].content")
        return
    if isinstance(content, str):
        if len(content) > MAX_TEXT:
            yield too_long(path, "string", MAX_TEXT, len(content))
        if not content and not speaks and role not in {"tool", "function"}:
            yield empty(path, "string")
        return
    if not content and not speaks:
        yield empty(path)
    for at, part in enumerate(content):
        yield from _check_part(f"{path}[{at}]", index, role, part)


def _check_part(path: str, index: int, role: str, part: Any) -> Iterator[Problem]:
    allowed = PARTS.get(role, TEXT_PARTS)
    kind = part.get("type")
    if kind in MEDIA_PARTS and kind not in allowed:
        text = (
            f"Invalid 'messages[{index}]'. Image URLs are only allowed for messages with role 'user', but this "
            f"message with role '{role}' contains an image URL."
        )
        yield Problem(text, f"messages[{index}]", "invalid_value")
    if kind not in allowed:
        yield not_one_of(allowed, kind, f"{path}.type")
    if kind == "text" and not isinstance(part.get("text"), str):
        yield missing(f"{path}.text")
    if kind == "text" and not part["text"] and role not in {"tool", "function"}:
        yield empty(f"{path}.text", "string")


def _check_calls(path: str, message: Request) -> Iterator[Problem]:
    calls = message.get("tool_calls")
    if calls is None:
        return
    if not calls:
        yield empty(f"{path}.tool_calls")
    for at, call in enumerate(calls):
        where = f"{path}.tool_calls[{at}]"
        if not isinstance(call.get("id"), str) or not call["id"]:
            yield missing(f"{where}.id")
        kind = call.get("type", "function")
        if kind not in TOOL_KINDS:
            yield not_one_of(TOOL_KINDS, kind, f"{where}.type")
        fields = ("name", "arguments") if kind == "function" else ("name", "input")
        for name in fields:
            value = (call.get(kind) or {}).get(name)
            if not isinstance(value, str):
                yield missing(f"{where}.{kind}.{name}")


def _check_pairs(messages: Sequence[Request]) -> Iterator[Problem]:
    open_at, waiting, answered = 0, list[str](), dict[str, int]()
    for index, message in enumerate(messages):
        if message["role"] == "tool":
            yield from _check_result(index, message, waiting, answered)
            continue
        if waiting:
            yield _unanswered(open_at, waiting)
        calls = message.get("tool_calls") or () if message["role"] == "assistant" else ()
        open_at, waiting, answered = index, [call["id"] for call in calls], {}
    if waiting:
        yield _unanswered(open_at, waiting)


def _check_result(index: int, message: Request, waiting: list[str], answered: dict[str, int]) -> Iterator[Problem]:
    given = message.get("tool_call_id")
    where = f"messages.[{index}].tool_call_id"
    if not waiting and not answered:
        text = (
            "Invalid parameter: messages with role 'tool' must be a response to a preceeding message with 'tool_calls'."
        )
        yield Problem(text, f"messages.[{index}].role")
    if not given:
        text = "Missing parameter 'tool_call_id': messages with role 'tool' must have a 'tool_call_id'."
        yield Problem(text, where)
    if given in waiting:
        waiting.remove(given)
        answered[given] = index
        return
    if given in answered:
        text = (
            f"Invalid parameter: Duplicate value for 'tool_call_id' of '{given}', in messages[{answered[given]}] and "
            f"messages[{index}]."
        )
        yield Problem(text, where)
    yield Problem(
        f"Invalid parameter: 'tool_call_id' of '{given}' not found in 'tool_calls' of previous message.", where
    )


def _unanswered(index: int, ids: Sequence[str]) -> Problem:
    text = (
        "An assistant message with 'tool_calls' must be followed by tool messages responding to each 'tool_call_id'. "
        f"The following tool_call_ids did not have response messages: {', '.join(ids)}"
    )
    return Problem(text, f"messages.[{index}].role")


def _check_last(request: Request) -> Iterator[Problem]:
    last = request["messages"][-1]
    marked = last.get("prefix") or request.get("continue_final_message")
    if last["role"] == "assistant" and not marked:
        text = "Expected last role User or Tool (or Assistant with prefix True) for serving but got assistant"
        yield Problem(text, f"messages.[{len(request['messages']) - 1}].role")


def _choices(outcome: Completion) -> range:
    n = outcome.request.get("n")
    return range(n if isinstance(n, int) and n > 0 else 1)


def _chat_usage(outcome: Completion) -> Mapping[str, Any]:
    completion = outcome.spoken.tokens * len(_choices(outcome))
    return {
        "prompt_tokens": outcome.prompt,
        "completion_tokens": completion,
        "total_tokens": outcome.prompt + completion,
        "prompt_tokens_details": {"cached_tokens": outcome.cached, "audio_tokens": 0},
        "completion_tokens_details": {
            "reasoning_tokens": 0,
            "audio_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }


def _extras(outcome: Completion) -> Mapping[str, Any]:
    if outcome.dialect is Dialect.LLAMACPP:
        timings = {"cache_n": outcome.cached, "prompt_n": outcome.prompt - outcome.cached}
        return {"timings": {**timings, "predicted_n": outcome.spoken.tokens}}
    return {"service_tier": "default"} if outcome.dialect is Dialect.OPENAI else {}


def _call_id(outcome: Completion, call: SimulatedCall, index: int) -> str:
    return call.id or f"call_{outcome.id[-16:]}{index}"


def _tool_calls(outcome: Completion) -> list[Mapping[str, Any]]:
    return [
        {
            "id": _call_id(outcome, call, index),
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for index, call in enumerate(outcome.spoken.calls)
    ]


def _message(outcome: Completion) -> Mapping[str, Any]:
    spoken = outcome.spoken
    message: dict[str, Any] = {"role": "assistant", "content": spoken.text or (None if spoken.calls else "")}
    if outcome.dialect is Dialect.OPENAI:
        message |= {"refusal": None, "annotations": []}
    if spoken.reasoning:
        message["reasoning_content"] = spoken.reasoning
    if spoken.calls:
        message["tool_calls"] = _tool_calls(outcome)
    return message


def _deltas(outcome: Completion) -> Iterator[tuple[Mapping[str, Any], str | None]]:
    spoken = outcome.spoken
    yield {"role": "assistant", "content": None if spoken.calls and not spoken.text else ""}, None
    if spoken.reasoning:
        yield {"reasoning_content": spoken.reasoning}, None
    for piece in spoken.pieces:
        yield {"content": piece}, None
    for index, call in enumerate(spoken.calls):
        function: dict[str, str] = {"name": call.name, "arguments": ""}
        first = {"index": index, "id": _call_id(outcome, call, index), "type": "function", "function": function}
        yield {"tool_calls": [first]}, None
        middle = len(call.arguments) // 2
        for part in (call.arguments[:middle], call.arguments[middle:]):
            if part:
                yield {"tool_calls": [{"index": index, "function": {"arguments": part}}]}, None
    yield {}, spoken.finish


class SimulatedChat(Surface):
    prefix = "chatcmpl-"

    def admit(self, request: Request, sender: Sender) -> AdmittedRequest:
        refuse_first(check_chat(request, self.settings))
        return AdmittedRequest(request=request, sender=sender)

    def pieces(self, request: Request) -> list[PromptPart]:
        return [*tool_pieces(request), *(PromptPart("message", message) for message in request["messages"])]

    def body(self, outcome: Completion) -> Mapping[str, Any]:
        return {
            "id": outcome.id,
            "object": "chat.completion",
            "created": outcome.created,
            "model": outcome.model,
            "choices": [
                {"index": index, "message": _message(outcome), "logprobs": None, "finish_reason": outcome.spoken.finish}
                for index in _choices(outcome)
            ],
            "usage": _chat_usage(outcome),
            "system_fingerprint": "fp_simulator",
            **_extras(outcome),
        }

    def events(self, outcome: Completion) -> tuple[bytes, ...]:
        options = outcome.request.get("stream_options") or {}
        wants_usage = bool(options.get("include_usage"))
        head = {
            "id": outcome.id,
            "object": "chat.completion.chunk",
            "created": outcome.created,
            "model": outcome.model,
            "system_fingerprint": "fp_simulator",
        }
        tail = {"usage": None} if wants_usage else {}
        events = [
            {**head, "choices": [{"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}], **tail}
            for index in _choices(outcome)
            for delta, finish in _deltas(outcome)
        ]
        if wants_usage:
            events.append({**head, "choices": [], "usage": _chat_usage(outcome), **_extras(outcome)})
        return (*(b"data: " + compact(event) + b"\n\n" for event in events), DONE)
