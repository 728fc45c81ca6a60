"""The JSON types of what the endpoints read, checked before anything looks inside.

A shape is a type, a list of one shape (an array of it), a mapping (an object with these fields, others are
free), or a tuple of alternatives. Null and absent pass everywhere but as an item of an array.
"""

from collections.abc import Mapping
from typing import Any

from proxy.simulator.dialects import Problem, Rejected
from proxy.simulator.settings import Request

Shape = Any

NAMED = {"name": str}
SCHEMA = {"properties": {}, "required": [str], "enum": [object]}
FUNCTION = {"name": str, "arguments": str, "input": str, "parameters": SCHEMA}
CALL = {"id": str, "type": str, "function": FUNCTION, "custom": FUNCTION}
PART = {
    "type": str,
    "text": str,
    "image_url": {"url": str, "detail": str},
    "tool_use_id": str,
    "id": str,
    "name": str,
    "input": {},
    "content": (str, [{}]),
}
MESSAGE = {
    "role": str,
    "content": (str, [PART]),
    "name": str,
    "tool_calls": [CALL],
    "tool_call_id": str,
    "function_call": FUNCTION,
}
TOOL = {"type": str, "name": str, "function": FUNCTION, "custom": FUNCTION, "input_schema": SCHEMA}
REQUEST = {
    "model": str,
    "messages": [MESSAGE],
    "system": (str, [PART]),
    "max_tokens": int,
    "max_completion_tokens": int,
    "n": int,
    "stream": bool,
    "stream_options": {"include_usage": bool},
    "tools": [TOOL],
    "functions": [FUNCTION],
    "tool_choice": (str, {"type": str, "name": str, "function": NAMED, "custom": NAMED}),
    "response_format": {"type": str, "json_schema": {"schema": SCHEMA}},
    "thinking": {"type": str, "budget_tokens": int},
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


def check_shapes(request: Request) -> None:
    """Raise :class:`Rejected` for the first value whose JSON type is wrong, in OpenAI's words."""
    for name, shape in REQUEST.items():
        _check(request.get(name), shape, name)


def _check(value: Any, shape: Shape, path: str, *, item: bool = False) -> None:
    if value is None and not item:
        return
    options = shape if isinstance(shape, tuple) else (shape,)
    found = next((option for option in options if _fits(value, option)), None)
    if found is None:
        wanted = " or ".join(_wanted(option) for option in options)
        wanted = f"one of {wanted}" if len(options) > 1 else wanted
        text = f"Invalid type for '{path}': expected {wanted}, but got {_NAMES[type(value)]} instead."
        raise Rejected(Problem(message=text, param=path, code="invalid_type"))
    if isinstance(found, list):
        for index, item in enumerate(value):
            _check(item, found[0], f"{path}[{index}]", item=True)
    elif isinstance(found, Mapping):
        for name, inner in found.items():
            _check(value.get(name), inner, f"{path}.{name}")


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
