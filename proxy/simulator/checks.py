"""What the endpoints check before they look at the window, in OpenAI's words.

First the JSON types, before anything looks inside. A shape is a type, a list of one shape (an array of it), a mapping
(an object with these fields, others are free), or a tuple of alternatives; null and absent pass everywhere but as an
item of an array. Then the array from front to back: the first thing that is wrong is what the error names. Calls and
results are paired by position: the results of an assistant message follow it at once, in any order, one for each call.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from proxy.simulator.model import SimulatorSettings
from proxy.simulator.window import Problem, Rejected, Request

Shape = Any

TABLES = json.loads((Path(__file__).parent / "keys.json").read_text(encoding="utf-8"))

NAMED = {"name": str}
SCHEMA = {"properties": {}, "required": [str], "enum": [object]}
FUNCTION = {"name": str, "arguments": str, "input": str, "parameters": SCHEMA}
CALL = {"id": str, "type": str, "function": FUNCTION, "custom": FUNCTION}
PART = {
    "type": str,
    "text": str,
    "image_url": {"url": str, "detail": str},
}
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

_NAMES: Mapping[type, str] = {
    bool: "a boolean",
    int: "an integer",
    float: "a decimal",
    str: "a string",
    list: "an array",
    dict: "an object",
    type(None): "null",
}


ROLES = ("system", "assistant", "user", "function", "tool", "developer")
TOOL_KINDS = ("function", "custom")
TEXT_PARTS = ("text",)
PARTS: Mapping[str, tuple[str, ...]] = {
    "user": ("text", "image_url", "input_audio", "file"),
    "assistant": ("text", "refusal"),
}
MEDIA_PARTS = frozenset({"image_url", "input_audio", "file"})
MAX_TOOLS = 128
MAX_TEXT = 10_485_760


def reject(message: str, param: str | None = None, code: str | None = None) -> Rejected:
    return Rejected(Problem(message=message, param=param, code=code))


def missing(path: str) -> Rejected:
    return reject(f"Missing required parameter: '{path}'.", path, "missing_required_parameter")


def too_long(path: str, kind: str, maximum: int, length: int) -> Rejected:
    article = "an" if kind == "array" else "a"
    text = f"Expected {article} {kind} with maximum length {maximum}, but got {article} {kind} with length {length}"
    return reject(f"Invalid '{path}': {kind} too long. {text} instead.", path, f"{kind}_above_max_length")


def too_small(path: str, minimum: int, value: int) -> Rejected:
    text = f"Invalid '{path}': integer below minimum value. Expected a value >= {minimum}, but got {value} instead."
    return reject(text, path, "integer_below_min_value")


def unknown(path: str) -> Rejected:
    return reject(f"Unknown parameter: '{path}'.", path, "unknown_parameter")


def not_one_of(values: Sequence[str], value: object, path: str) -> Rejected:
    names = [f"'{name}'" for name in values]
    listed = f"{', '.join(names[:-1])}, and {names[-1]}" if len(names) > 2 else " and ".join(names)
    return reject(f"Invalid value: '{value}'. Supported values are: {listed}.", path, "invalid_value")


def check_shapes(request: Request, shapes: Mapping[str, Shape] = REQUEST, path: str = "") -> None:
    for name, shape in shapes.items():
        _check_shape(request.get(name), shape, f"{path}{name}")


@dataclass(frozen=True, slots=True)
class Keys:
    needed: tuple[str, ...]
    known: frozenset[str]


def keys_of(section: str) -> Mapping[str, Keys]:
    kinds: dict[str, Keys] = {}
    for kind, line in TABLES[section].items():
        needed, _, optional = line.partition("|")
        kinds[kind] = Keys(tuple(needed.split()), frozenset([*needed.split(), *optional.split(), "type"]))
    return kinds


def _check_shape(value: Any, shape: Shape, path: str, *, item: bool = False) -> None:
    if value is None and not item:
        return
    options = shape if isinstance(shape, tuple) else (shape,)
    found = next((option for option in options if _fits(value, option)), None)
    if found is None:
        wanted = " or ".join(_wanted(option) for option in options)
        wanted = f"one of {wanted}" if len(options) > 1 else wanted
        text = f"Invalid type for '{path}': expected {wanted}, but got {_NAMES[type(value)]} instead."
        raise reject(text, path, "invalid_type")
    if isinstance(found, list):
        for index, item in enumerate(value):
            _check_shape(item, found[0], f"{path}[{index}]", item=True)
    elif isinstance(found, Mapping):
        for name, inner in found.items():
            _check_shape(value.get(name), inner, f"{path}.{name}")


def _fits(value: Any, shape: Shape) -> bool:
    if isinstance(shape, list):
        return isinstance(value, list)
    if isinstance(shape, Mapping):
        return isinstance(value, dict)
    if shape is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, shape)


def _wanted(shape: Shape) -> str:
    if isinstance(shape, list):
        return "array of objects" if isinstance(shape[0], Mapping) else "array"
    return "an object" if isinstance(shape, Mapping) else _NAMES[shape]


def check_chat(request: Request, settings: SimulatorSettings) -> None:
    check_shapes(request)
    _check_envelope(request)
    _check_output(request, settings)
    if settings.strict:
        _check_tools(request)
        messages = request["messages"]
        for index, message in enumerate(messages):
            _check_message(index, message)
        _check_pairs(messages)
        _check_last(request, settings)


def _check_envelope(request: Request) -> None:
    if not request.get("model"):
        raise reject("you must provide a model parameter")
    messages = request.get("messages")
    if messages is None:
        raise missing("messages")
    if not messages:
        raise empty_array("messages")
    if request.get("stream_options") is not None and not request.get("stream"):
        text = "The 'stream_options' parameter is only allowed when 'stream' is enabled."
        raise reject(text, "stream_options")


def empty_array(path: str) -> Rejected:
    text = f"Invalid '{path}': empty array. Expected an array with minimum length 1, but got an empty array instead."
    return reject(text, path, "empty_array")


def _check_output(request: Request, settings: SimulatorSettings) -> None:
    for name in ("max_completion_tokens", "max_tokens"):
        value = request.get(name)
        if value is None:
            continue
        if value < 1:
            raise too_small(name, 1, value)
        if settings.max_output is not None and value > settings.max_output:
            text = (
                f"{name} is too large: {value}. This model supports at most {settings.max_output} completion tokens, "
                f"whereas you provided {value}."
            )
            raise reject(text, name, "invalid_value")


def _check_tools(request: Request) -> None:
    tools = request.get("tools")
    if tools is None:
        for name in ("tool_choice", "parallel_tool_calls"):
            if request.get(name) not in (None, "none"):
                text = f"Invalid value for '{name}': '{name}' is only allowed when 'tools' are specified."
                raise reject(text, name)
        return
    if not tools:
        raise empty_array("tools")
    if len(tools) > MAX_TOOLS:
        raise too_long("tools", "array", MAX_TOOLS, len(tools))
    names = [_tool_name(index, tool) for index, tool in enumerate(tools)]
    choice = request.get("tool_choice")
    if isinstance(choice, dict) and choice.get("type") in TOOL_KINDS:
        wanted = (choice.get(choice["type"]) or {}).get("name")
        if wanted not in names:
            text = f"Tool choice '{wanted}' not found in 'tools' parameter."
            raise reject(text, "tool_choice")


def _tool_name(index: int, tool: Any) -> str:
    kind = tool.get("type")
    if kind not in TOOL_KINDS:
        raise not_one_of(TOOL_KINDS, kind, f"tools[{index}].type")
    name = (tool.get(kind) or {}).get("name")
    if not name:
        raise missing(f"tools[{index}].{kind}.name")
    return str(name)


def _check_message(index: int, message: Request) -> None:
    path = f"messages[{index}]"
    role = message.get("role")
    if role is None:
        raise missing(f"{path}.role")
    if role not in ROLES:
        raise not_one_of(ROLES, role, f"{path}.role")
    if "weir" in message:
        raise unknown(f"{path}.weir")
    if role == "assistant":
        _check_calls(path, message)
    _check_content(index, role, message)


def _check_content(index: int, role: str, message: Request) -> None:
    path, content = f"messages[{index}].content", message.get("content")
    speaks = role == "assistant" and any(
        message.get(key) for key in ("tool_calls", "function_call", "refusal", "audio")
    )
    if content is None:
        if speaks:
            return
        text = "Invalid value for 'content': expected a string, got null."
        raise reject(text, f"messages.[{index}].content")
    if isinstance(content, str):
        if len(content) > MAX_TEXT:
            raise too_long(path, "string", MAX_TEXT, len(content))
        if not content and not speaks and role not in {"tool", "function"}:
            raise _empty_string(path)
        return
    if not content and not speaks:
        raise empty_array(path)
    for at, part in enumerate(content):
        _check_part(f"{path}[{at}]", index, role, part)


def _empty_string(path: str) -> Rejected:
    text = f"Invalid '{path}': empty string. Expected a string with minimum length 1, but got an empty string instead."
    return reject(text, path, "empty_string")


def _check_part(path: str, index: int, role: str, part: Any) -> None:
    allowed = PARTS.get(role, TEXT_PARTS)
    kind = part.get("type")
    if kind in MEDIA_PARTS and kind not in allowed:
        text = (
            f"Invalid 'messages[{index}]'. Image URLs are only allowed for messages with role 'user', but this "
            f"message with role '{role}' contains an image URL."
        )
        raise reject(text, f"messages[{index}]", "invalid_value")
    if kind not in allowed:
        raise not_one_of(allowed, kind, f"{path}.type")
    if kind == "text" and not isinstance(part.get("text"), str):
        raise missing(f"{path}.text")
    if kind == "text" and not part["text"] and role not in {"tool", "function"}:
        raise _empty_string(f"{path}.text")


def _check_calls(path: str, message: Request) -> None:
    calls = message.get("tool_calls")
    if calls is None:
        return
    if not calls:
        raise empty_array(f"{path}.tool_calls")
    for at, call in enumerate(calls):
        where = f"{path}.tool_calls[{at}]"
        if not isinstance(call.get("id"), str) or not call["id"]:
            raise missing(f"{where}.id")
        kind = call.get("type", "function")
        if kind not in TOOL_KINDS:
            raise not_one_of(TOOL_KINDS, kind, f"{where}.type")
        fields = ("name", "arguments") if kind == "function" else ("name", "input")
        for name in fields:
            value = (call.get(kind) or {}).get(name)
            if not isinstance(value, str):
                raise missing(f"{where}.{kind}.{name}")


def _check_pairs(messages: Sequence[Request]) -> None:
    open_at, waiting, answered = 0, list[str](), dict[str, int]()
    for index, message in enumerate(messages):
        if message["role"] == "tool":
            _check_result(index, message, waiting, answered)
            continue
        if waiting:
            raise _unanswered(open_at, waiting)
        calls = message.get("tool_calls") or () if message["role"] == "assistant" else ()
        open_at, waiting, answered = index, [call["id"] for call in calls], {}
    if waiting:
        raise _unanswered(open_at, waiting)


def _check_result(index: int, message: Request, waiting: list[str], answered: dict[str, int]) -> None:
    given = message.get("tool_call_id")
    where = f"messages.[{index}].tool_call_id"
    if not waiting and not answered:
        text = (
            "Invalid parameter: messages with role 'tool' must be a response to a preceeding message with 'tool_calls'."
        )
        raise reject(text, f"messages.[{index}].role")
    if not given:
        text = "Missing parameter 'tool_call_id': messages with role 'tool' must have a 'tool_call_id'."
        raise reject(text, where)
    if given in waiting:
        waiting.remove(given)
        answered[given] = index
        return
    if given in answered:
        text = (
            f"Invalid parameter: Duplicate value for 'tool_call_id' of '{given}', in messages[{answered[given]}] and "
            f"messages[{index}]."
        )
        raise reject(text, where)
    raise reject(
        f"Invalid parameter: 'tool_call_id' of '{given}' not found in 'tool_calls' of previous message.", where
    )


def _unanswered(index: int, ids: Sequence[str]) -> Rejected:
    text = (
        "An assistant message with 'tool_calls' must be followed by tool messages responding to each 'tool_call_id'. "
        f"The following tool_call_ids did not have response messages: {', '.join(ids)}"
    )
    return reject(text, f"messages.[{index}].role")


def _check_last(request: Request, settings: SimulatorSettings) -> None:
    last = request["messages"][-1]
    marked = last.get("prefix") or request.get("continue_final_message") or settings.allow_prefill
    if last["role"] == "assistant" and not marked:
        text = "Expected last role User or Tool (or Assistant with prefix True) for serving but got assistant"
        raise reject(text, f"messages.[{len(request['messages']) - 1}].role")
