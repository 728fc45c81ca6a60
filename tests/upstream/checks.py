"""The engine of every endpoint's rules: they tell problems, of which the first is refused, in OpenAI's words.

JSON types come first, before anything looks inside. A shape is a type, a list of one shape (an array of it), a mapping
(an object with these fields, others are free), or a tuple of alternatives; null and absent pass everywhere but as an
item of an array.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.upstream.window import Problem, Request

Shape = Any

TABLES = json.loads((Path(__file__).parent / "keys.json").read_text(encoding="utf-8"))

MAX_TOOLS = 128

_NAMES: Mapping[type, str] = {
    bool: "a boolean",
    int: "an integer",
    float: "a decimal",
    str: "a string",
    list: "an array",
    dict: "an object",
    type(None): "null",
}


def missing(path: str) -> Problem:
    return Problem(f"Missing required parameter: '{path}'.", path, "missing_required_parameter")


def too_long(path: str, kind: str, maximum: int, length: int) -> Problem:
    article = "an" if kind == "array" else "a"
    text = f"Expected {article} {kind} with maximum length {maximum}, but got {article} {kind} with length {length}"
    return Problem(f"Invalid '{path}': {kind} too long. {text} instead.", path, f"{kind}_above_max_length")


def too_small(path: str, minimum: int, value: int) -> Problem:
    text = f"Invalid '{path}': integer below minimum value. Expected a value >= {minimum}, but got {value} instead."
    return Problem(text, path, "integer_below_min_value")


def above_cap(name: str, asked: int, most: int, what: str) -> Problem:
    text = f"{name} is too large: {asked}. This model supports at most {most} {what} tokens, whereas you provided"
    return Problem(f"{text} {asked}.", name, "invalid_value")


def empty(path: str, kind: str = "array") -> Problem:
    article = "an" if kind == "array" else "a"
    text = f"Expected {article} {kind} with minimum length 1, but got an empty {kind} instead."
    return Problem(f"Invalid '{path}': empty {kind}. {text}", path, f"empty_{kind}")


def unknown(path: str) -> Problem:
    return Problem(f"Unknown parameter: '{path}'.", path, "unknown_parameter")


def not_one_of(values: Sequence[str], value: object, path: str) -> Problem:
    names = [f"'{name}'" for name in values]
    listed = f"{', '.join(names[:-1])}, and {names[-1]}" if len(names) > 2 else " and ".join(names)
    return Problem(f"Invalid value: '{value}'. Supported values are: {listed}.", path, "invalid_value")


def misshapen(request: Request, shapes: Mapping[str, Shape], path: str = "") -> Iterator[Problem]:
    """The values whose JSON type is wrong, in OpenAI's words."""
    for name, shape in shapes.items():
        yield from _misshapen(request.get(name), shape, f"{path}{name}")


def refuse_first(problems: Iterable[Problem]) -> None:
    """Raise the first problem, which is what an API names; those behind it are not looked for."""
    for problem in problems:
        raise problem


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
        yield Problem(text, path, "invalid_type")
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
