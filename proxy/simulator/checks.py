"""What the endpoints check before they look at the window, in OpenAI's words.

First the JSON types, before anything looks inside. A shape is a type, a list of one shape (an array of it), a mapping
(an object with these fields, others are free), or a tuple of alternatives; null and absent pass everywhere but as an
item of an array. Then the array from front to back: the first thing that is wrong is what the error names. Calls and
results are paired by position: the results of an assistant message follow it at once, in any order, one for each call.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
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


def refuse(message: str, param: str | None = None, code: str | None = None) -> Problem:
    return Problem(message=message, param=param, code=code)


def reject(message: str, param: str | None = None, code: str | None = None) -> Rejected:
    return Rejected(refuse(message, param, code))


def missing(path: str) -> Problem:
    return refuse(f"Missing required parameter: '{path}'.", path, "missing_required_parameter")


def too_long(path: str, kind: str, maximum: int, length: int) -> Problem:
    article = "an" if kind == "array" else "a"
    text = f"Expected {article} {kind} with maximum length {maximum}, but got {article} {kind} with length {length}"
    return refuse(f"Invalid '{path}': {kind} too long. {text} instead.", path, f"{kind}_above_max_length")


def too_small(path: str, minimum: int, value: int) -> Problem:
    text = f"Invalid '{path}': integer below minimum value. Expected a value >= {minimum}, but got {value} instead."
    return refuse(text, path, "integer_below_min_value")


def unknown(path: str) -> Problem:
    return refuse(f"Unknown parameter: '{path}'.", path, "unknown_parameter")


def not_one_of(values: Sequence[str], value: object, path: str) -> Problem:
    names = [f"'{name}'" for name in values]
    listed = f"{', '.join(names[:-1])}, and {names[-1]}" if len(names) > 2 else " and ".join(names)
    return refuse(f"Invalid value: '{value}'. Supported values are: {listed}.", path, "invalid_value")


def misshapen(request: Request, shapes: Mapping[str, Shape] = REQUEST, path: str = "") -> Iterator[Problem]:
    """The values whose JSON type is wrong, in OpenAI's words."""
    for name, shape in shapes.items():
        yield from _misshapen(request.get(name), shape, f"{path}{name}")


def refuse_first(problems: Iterable[Problem]) -> None:
    """Raise :class:`Rejected` for the first problem, which is what an API names; those behind it are not looked for."""
    for problem in problems:
        raise Rejected(problem)


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


def _misshapen(value: Any, shape: Shape, path: str, *, item: bool = False) -> Iterator[Problem]:
    if value is None and not item:
        return
    options = shape if isinstance(shape, tuple) else (shape,)
    found = next((option for option in options if _fits(value, option)), None)
    if found is None:
        wanted = " or ".join(_wanted(option) for option in options)
        wanted = f"one of {wanted}" if len(options) > 1 else wanted
        text = f"Invalid type for '{path}': expected {wanted}, but got {_NAMES[type(value)]} instead."
        yield refuse(text, path, "invalid_type")
    elif isinstance(found, list):
        for index, each in enumerate(value):
            yield from _misshapen(each, found[0], f"{path}[{index}]", item=True)
    elif isinstance(found, Mapping):
        yield from misshapen(value, found, f"{path}.")


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


def check_chat(request: Request, settings: SimulatorSettings) -> Iterator[Problem]:
    yield from misshapen(request)
    yield from _check_envelope(request)
    yield from _check_output(request, settings)
    if settings.strict:
        yield from _check_tools(request)
        messages = request["messages"]
        for index, message in enumerate(messages):
            yield from _check_message(index, message)
        yield from _check_pairs(messages)
        yield from _check_last(request, settings)


def _check_envelope(request: Request) -> Iterator[Problem]:
    if not request.get("model"):
        yield refuse("you must provide a model parameter")
    messages = request.get("messages")
    if messages is None:
        yield missing("messages")
    if not messages:
        yield empty_array("messages")
    if request.get("stream_options") is not None and not request.get("stream"):
        text = "The 'stream_options' parameter is only allowed when 'stream' is enabled."
        yield refuse(text, "stream_options")


def empty_array(path: str) -> Problem:
    text = f"Invalid '{path}': empty array. Expected an array with minimum length 1, but got an empty array instead."
    return refuse(text, path, "empty_array")


def _check_output(request: Request, settings: SimulatorSettings) -> Iterator[Problem]:
    for name in ("max_completion_tokens", "max_tokens"):
        value = request.get(name)
        if value is None:
            continue
        if value < 1:
            yield too_small(name, 1, value)
        if settings.max_output is not None and value > settings.max_output:
            text = (
                f"{name} is too large: {value}. This model supports at most {settings.max_output} completion tokens, "
                f"whereas you provided {value}."
            )
            yield refuse(text, name, "invalid_value")


def _check_tools(request: Request) -> Iterator[Problem]:
    tools = request.get("tools")
    if tools is None:
        for name in ("tool_choice", "parallel_tool_calls"):
            if request.get(name) not in (None, "none"):
                text = f"Invalid value for '{name}': '{name}' is only allowed when 'tools' are specified."
                yield refuse(text, name)
        return
    if not tools:
        yield empty_array("tools")
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
            yield refuse(text, "tool_choice")


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
            yield refuse(text, f"messages.[{index}].content")
        return
    if isinstance(content, str):
        if len(content) > MAX_TEXT:
            yield too_long(path, "string", MAX_TEXT, len(content))
        if not content and not speaks and role not in {"tool", "function"}:
            yield _empty_string(path)
        return
    if not content and not speaks:
        yield empty_array(path)
    for at, part in enumerate(content):
        yield from _check_part(f"{path}[{at}]", index, role, part)


def _empty_string(path: str) -> Problem:
    text = f"Invalid '{path}': empty string. Expected a string with minimum length 1, but got an empty string instead."
    return refuse(text, path, "empty_string")


def _check_part(path: str, index: int, role: str, part: Any) -> Iterator[Problem]:
    allowed = PARTS.get(role, TEXT_PARTS)
    kind = part.get("type")
    if kind in MEDIA_PARTS and kind not in allowed:
        text = (
            f"Invalid 'messages[{index}]'. Image URLs are only allowed for messages with role 'user', but this "
            f"message with role '{role}' contains an image URL."
        )
        yield refuse(text, f"messages[{index}]", "invalid_value")
    if kind not in allowed:
        yield not_one_of(allowed, kind, f"{path}.type")
    if kind == "text" and not isinstance(part.get("text"), str):
        yield missing(f"{path}.text")
    if kind == "text" and not part["text"] and role not in {"tool", "function"}:
        yield _empty_string(f"{path}.text")


def _check_calls(path: str, message: Request) -> Iterator[Problem]:
    calls = message.get("tool_calls")
    if calls is None:
        return
    if not calls:
        yield empty_array(f"{path}.tool_calls")
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
        yield refuse(text, f"messages.[{index}].role")
    if not given:
        text = "Missing parameter 'tool_call_id': messages with role 'tool' must have a 'tool_call_id'."
        yield refuse(text, where)
    if given in waiting:
        waiting.remove(given)
        answered[given] = index
        return
    if given in answered:
        text = (
            f"Invalid parameter: Duplicate value for 'tool_call_id' of '{given}', in messages[{answered[given]}] and "
            f"messages[{index}]."
        )
        yield refuse(text, where)
    yield refuse(
        f"Invalid parameter: 'tool_call_id' of '{given}' not found in 'tool_calls' of previous message.", where
    )


def _unanswered(index: int, ids: Sequence[str]) -> Problem:
    text = (
        "An assistant message with 'tool_calls' must be followed by tool messages responding to each 'tool_call_id'. "
        f"The following tool_call_ids did not have response messages: {', '.join(ids)}"
    )
    return refuse(text, f"messages.[{index}].role")


def _check_last(request: Request, settings: SimulatorSettings) -> Iterator[Problem]:
    last = request["messages"][-1]
    marked = last.get("prefix") or request.get("continue_final_message") or settings.allow_prefill
    if last["role"] == "assistant" and not marked:
        text = "Expected last role User or Tool (or Assistant with prefix True) for serving but got assistant"
        yield refuse(text, f"messages.[{len(request['messages']) - 1}].role")
