"""A model that has one step after the other done, and judges what it is sent by the rules that it was written from.

It is no part of Weir and shares nothing with ``weir simulate``: what both accept is accepted for two reasons. A model
that follows a script: as long as the newest result says ``[[step N]]`` it calls the tool with N + 1, two calls at
once in the first answer, until all steps are done. What has no tools, or is told to call none, gets words.
"""

import itertools
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from proxy.server import serve
from tests.functional.harness import COUNTER
from tests.real.drivers.step import SECOND

DONE = "All steps are done. The code word was PLUM-77."
HELLO = "Hello from the model, in a few words."
STEP = re.compile(r"\[\[(?:step (\d+)b?|run|say)\]\]")
SIDE = re.compile(r"\A\s*(?:Now stop and take notes|Write (?:the working )?notes)|TEXT ONLY")
"""What a request ends with that asks for notes on it: Weir's question behind the client's history, and Claude Code's."""
NOTES = "The user has all steps run, one after the other; the code word is PLUM-77. " * 8

Json = dict[str, Any]


class Refused(Exception):
    """What the endpoint answers in place of the model."""

    def __init__(self, message: str, *, status: int = 400, code: str | None = None, broken: bool = True) -> None:
        super().__init__(message)
        self.message, self.status, self.code, self.broken = message, status, code, broken


class TooLong(Refused):
    """The window is full. ``in_stream`` says it inside a stream that has begun."""

    def __init__(self, message: str, *, code: str | None = None, in_stream: bool = False) -> None:
        super().__init__(message, code=code, broken=False)
        self.in_stream = in_stream


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a tool; ``arguments`` are text where the tool takes text."""

    name: str
    arguments: Json | str
    namespace: str = ""


@dataclass(frozen=True, slots=True)
class Turn:
    """What the model does next: calls of a tool with these arguments, or a text."""

    thought: str = ""
    text: str = ""
    calls: Sequence[Call] = ()


@dataclass(slots=True)
class Asked:
    """One request that arrived, and what came of it."""

    path: str
    headers: Mapping[str, str]
    body: Json
    raw: bytes
    main: bool = False
    tokens: int = 0
    status: int = 200
    refused: str = ""
    overflow: bool = False
    step: int = 0

    @property
    def elements(self) -> list[Any]:
        """The history that it sent."""
        history = self.body.get("messages", self.body.get("input"))
        return history if isinstance(history, list) else [history]


@dataclass(slots=True)
class Script:
    """What the model is asked to have done, in a window of so many tokens."""

    window: int
    steps: int
    asked: list[Asked] = field(default_factory=list)
    stateful: bool = True
    overflows: Iterator[bool] = field(default_factory=lambda: itertools.cycle((False, True)))
    done: int = 0

    @property
    def main(self) -> list[Asked]:
        """The requests of the client's own loop that were answered."""
        return [each for each in self.asked if each.main and each.status == 200 and not each.overflow]

    @property
    def refused(self) -> list[str]:
        """What broke a rule."""
        return [each.refused for each in self.asked if each.refused]

    @property
    def overflowed(self) -> int:
        """How many requests did not fit."""
        return sum(each.overflow for each in self.asked)

    def turn(self, said: Sequence[str], tools: Sequence[Json], *, called: bool) -> Turn:
        """The next turn after texts and results in their order; ``tools`` are what may be called."""
        found = _argument(tools)
        if not called or found is None:
            return Turn(text=HELLO)
        marks = [match for text in said for match in STEP.finditer(text)]
        if not marks:
            return Turn(text=HELLO)
        if marks[-1][0] == "[[say]]":
            return Turn(thought="A word is enough.", text=HELLO)
        newest = int(marks[-1][1] or 0)
        self.done = max(self.done, newest)
        if newest >= self.steps:
            return Turn(thought="Nothing is left to do.", text=DONE)
        step = newest + 1
        names = [str(step), SECOND] if step == 1 else [str(step)]
        calls = [found(name) for name in names]
        words = f"Running step {step}." if step % 3 == 0 else ""
        return Turn(thought=f"The next one is step {step}, after {newest} that went well.", text=words, calls=calls)


class Remembering(Script):
    """A script that goes on where it was, whatever a summary has left of its marks."""

    def turn(self, said: Sequence[str], tools: Sequence[Json], *, called: bool) -> Turn:
        """The next turn after the newest step that was seen."""
        seen = max((int(match[1] or 0) for text in said for match in STEP.finditer(text)), default=0)
        said = [*said, f"[[step {self.done}]]"] if self.done > 0 and seen < self.done else said
        return super().turn(said, tools, called=called)


def _argument(tools: Sequence[Json]) -> Callable[[str], Call] | None:
    """How a step is run with one of these tools."""
    command = "python3 step.py "
    known: Mapping[str, Callable[[str], Json | str]] = {
        "run_step": lambda step: {"step": step},
        "exec_command": lambda step: {"cmd": command + step},
        "Bash": lambda step: {"command": command + step, "description": f"Run step {step}"},
        "exec": lambda step: f'text((await tools.exec_command({{cmd: "{command}{step}"}})).output)',
    }
    for tool in tools:
        if tool.get("type") == "namespace":
            if (found := _argument(tool["tools"])) is not None:
                return lambda step: replace(found(step), namespace=tool["name"])
        elif (name := str(tool.get("name"))) in known:
            return lambda step: Call(name, known[name](step))
    return None


def tokens_of(value: object) -> int:
    """How many tokens something takes as JSON, without what is sealed."""
    return COUNTER.count(json.dumps(_readable(value), ensure_ascii=False))


def _readable(value: object) -> object:
    if isinstance(value, dict):
        sealed = ("encrypted_content", "signature", "cache_control", "id", "data")
        return {k: _readable(v) for k, v in value.items() if k not in sealed}
    return [_readable(each) for each in value] if isinstance(value, list) else value


def by_schema(schema: Any) -> Any:
    """A value that a JSON schema allows."""
    if not isinstance(schema, dict):
        return "noted"
    if "enum" in schema:
        return schema["enum"][0]
    kind = schema.get("type")
    kind = kind[0] if isinstance(kind, list) else kind
    fixed = {"integer": 1, "number": 1, "boolean": True, "null": None}
    if kind == "object":
        return {name: by_schema(each) for name, each in schema.get("properties", {}).items()}
    if kind == "array":
        return [by_schema(schema.get("items"))]
    return fixed.get(str(kind), "The user has all steps run; the code word is PLUM-77.")


Grammar = Callable[[Asked], Awaitable[tuple[int, Json | list[bytes]]]]


@dataclass(slots=True)
class Upstream:
    """Serves grammars by their routes."""

    script: Script
    routes: Mapping[str, Grammar]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        raw = b""
        while (message := await receive())["type"] == "http.request":
            raw += message.get("body", b"")
            if not message.get("more_body"):
                break
        status, said = await self._answer(scope, raw)
        stream = isinstance(said, list)
        kind = b"text/event-stream" if stream else b"application/json"
        await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", kind)]})
        pieces = said if isinstance(said, list) else [b"" if scope["method"] == "HEAD" else json.dumps(said).encode()]
        for piece in pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _answer(self, scope: Any, raw: bytes) -> tuple[int, Json | list[bytes]]:
        path = scope["path"]
        if path == "/v1/models":
            return 200, {"object": "list", "data": [{"id": "sim", "object": "model"}]}
        grammar = self.routes.get(path)
        if scope["method"] != "POST" or grammar is None:
            return (200 if path == "/" else 404), {"error": {"message": f"Unknown request URL: {path}", "type": "x"}}
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        asked = Asked(path, headers, json.loads(raw), raw)
        self.script.asked.append(asked)
        status, said = await grammar(asked)
        asked.status = status
        return status, said


@asynccontextmanager
async def scripted(script: Script, endpoint: str) -> AsyncIterator[str]:
    """A server of the script's; gives its base URL. ``endpoint`` is for the likes of it: this one serves both."""
    from tests.real.scripted_messages import Messages
    from tests.real.scripted_responses import Responses

    messages, responses = Messages(script), Responses(script)
    routes = {
        "/v1/messages": messages.create,
        "/v1/messages/count_tokens": messages.count,
        "/v1/responses": responses.create,
        "/v1/responses/input_tokens": responses.count,
    }
    async with serve(Upstream(script, routes)) as server:
        yield f"http://127.0.0.1:{server.port}/v1"


def event(kind: str, **value: Any) -> bytes:
    """One event of a stream."""
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **value}, ensure_ascii=False)}\n\n".encode()


def pieces_of(text: str, size: int = 12) -> list[str]:
    """A text in the pieces that a stream has."""
    return [text[n : n + size] for n in range(0, len(text), size)]
