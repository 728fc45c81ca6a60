"""What the simulated model says: a script, or a short text that depends on the request and the seed alone."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from proxy.simulator.window import PER_CALL, Count, Request

_PIECE = re.compile(r"\s*\S+\s*$|\s*\S+")
MAX_DEPTH = 6


@dataclass(frozen=True, slots=True)
class SimulatedCall:
    """One tool call of an answer; ``arguments`` is JSON text, ``id`` None stands for a generated one."""

    name: str
    arguments: str = "{}"
    id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedAnswer:
    """What the model says; ``finish`` overrides the finish reason in OpenAI's words, ``endless`` every limit."""

    text: str = ""
    calls: tuple[SimulatedCall, ...] = ()
    reasoning: str = ""
    finish: str | None = None
    endless: bool = False


Script = Callable[[Request], SimulatedAnswer | str]


@dataclass(frozen=True, slots=True)
class Spoken:
    """An answer that fits its limit: the pieces of its text as they are streamed, its calls and its cost."""

    pieces: tuple[str, ...]
    calls: tuple[SimulatedCall, ...]
    reasoning: str
    finish: str
    tokens: int

    @property
    def text(self) -> str:
        """The whole text."""
        return "".join(self.pieces)


def default_answer(request: Request, seed: int) -> SimulatedAnswer:
    """A call of the tool that the request demands, else a sentence or JSON in the form it asks for."""
    forced = _forced_tool(request)
    if forced is not None:
        name, schema = forced
        return SimulatedAnswer(calls=(SimulatedCall(name, json.dumps(_sample(schema, seed=seed))),))
    return SimulatedAnswer(text=_default_text(request, seed))


def asked_tokens(request: Request) -> int | None:
    """``max_completion_tokens``, else ``max_tokens``, else None."""
    for name in ("max_completion_tokens", "max_tokens"):
        value = request.get(name)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return None


def speak(answer: SimulatedAnswer, *, limit: int | None, count: Count) -> Spoken:
    """The answer cut to ``limit`` tokens; a call that does not fit is not made."""
    limit = None if answer.endless else limit
    calls, finish = answer.calls, answer.finish
    spent = sum(count(call.name) + count(call.arguments) + PER_CALL for call in calls)
    spent += count(answer.reasoning) if answer.reasoning else 0
    if limit is not None and spent > limit:
        calls, spent, finish = (), limit, finish or "length"
    pieces = tuple(match.group() for match in _PIECE.finditer(answer.text))
    room = None if limit is None else limit - spent
    kept = len(pieces) if room is None or count(answer.text) <= room else _fitting(pieces, room, count)
    if kept < len(pieces):
        finish = finish or "length"
    text = "".join(pieces[:kept])
    spent += count(text) if text else 0
    return Spoken(pieces[:kept], calls, answer.reasoning, finish or ("tool_calls" if calls else "stop"), spent)


def _fitting(pieces: tuple[str, ...], room: int, count: Count) -> int:
    low, high = 0, len(pieces)
    while low < high:
        middle = (low + high + 1) // 2
        if count("".join(pieces[:middle])) <= room:
            low = middle
        else:
            high = middle - 1
    return low


def _forced_tool(request: Request) -> tuple[str, Any] | None:
    tools = [tool.get("function") or tool.get("custom") or tool for tool in request.get("tools") or ()]
    choice = request.get("tool_choice")
    if not tools or choice in (None, "auto", "none"):
        return None
    wanted = None
    if isinstance(choice, dict):
        if choice.get("type") in {"auto", "none"}:
            return None
        wanted = choice.get("name") or (choice.get("function") or choice.get("custom") or {}).get("name")
    tool = next((tool for tool in tools if wanted in (None, tool.get("name"))), None)
    if tool is None:
        return None
    return str(tool.get("name")), tool.get("parameters") or tool.get("input_schema") or {}


def _sample(schema: Any, *, seed: int = 0, depth: int = 0) -> Any:
    """A value that satisfies a plain JSON schema: required properties, first of an enum, shortest array."""
    if not isinstance(schema, Mapping) or depth > MAX_DEPTH:
        return "value"
    if schema.get("enum"):
        return schema["enum"][seed % len(schema["enum"])]
    kind = schema.get("type")
    kind = kind[0] if isinstance(kind, list) and kind else kind
    match kind:
        case "object" | None:
            properties = schema.get("properties") or {}
            names = schema.get("required") or list(properties)
            return {name: _sample(properties.get(name), seed=seed, depth=depth + 1) for name in names}
        case "array":
            return [_sample(schema.get("items"), seed=seed, depth=depth + 1)] if schema.get("minItems") else []
        case "integer" | "number":
            return schema.get("minimum", 1 + seed)
        case "boolean":
            return True
        case "null":
            return None
        case _:
            return "value"


def _default_text(request: Request, seed: int) -> str:
    form = request.get("response_format")
    if isinstance(form, dict) and form.get("type") == "json_schema":
        return json.dumps(_sample((form.get("json_schema") or {}).get("schema"), seed=seed))
    messages = request["messages"]
    said = json.dumps(messages[-1], sort_keys=True).encode()
    mark = blake2b(said, digest_size=4, key=str(seed).encode()).hexdigest()
    if isinstance(form, dict) and form.get("type") == "json_object":
        return json.dumps({"answer": mark, "messages": len(messages)})
    return f"Understood. This is answer {mark} to message {len(messages)} of our conversation; I go on from there."
