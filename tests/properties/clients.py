"""What the clients of a script send: one history, written for each of the three endpoints."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tests.properties.scripts import CHAT, MESSAGES, RESPONSES, Begin

PATHS = {CHAT: "/v1/chat/completions", RESPONSES: "/v1/responses", MESSAGES: "/v1/messages"}
LEAST_ANSWER = 16
"""Tokens of an answer that every endpoint takes."""
NEEDED_ANSWER = 512
"""``max_tokens`` on Messages, where it cannot be absent."""
TOOL = "read_file"
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
DESCRIPTION = "Read a file of the project."
JSON = dict[str, Any]


@dataclass(frozen=True)
class Line:
    """One thing said: by ``user`` or ``assistant``, or a ``call`` of a tool, or its ``result``, or a ``note``."""

    role: str
    text: str
    number: int = 0


@dataclass
class Client:
    """A client with its own history, which it resends with every request."""

    begin: Begin
    number: int
    model: int
    system: str
    lines: list[Line] = field(default_factory=list)
    distance: int | None = None
    name: str | None = None

    @property
    def endpoint(self) -> str:
        return self.begin.endpoint

    def forked(self, number: int, name: str | None) -> "Client":
        return replace(self, number=number, name=name, lines=list(self.lines))

    def rewind(self, turns: int) -> None:
        """Take back what was said from the last ``turns`` turns on; the task stays."""
        starts = [at for at, line in enumerate(self.lines) if line.role in ("user", "call")][1:]
        if starts:
            del self.lines[starts[max(0, len(starts) - turns)] :]

    def sent(self, question: str | None = None) -> list[Line]:
        """All that is said in the next request, with a question that is not kept, and the note in its place."""
        lines = [*self.lines, *([Line("user", question)] if question is not None else [])]
        if self.distance is None:
            return lines
        at = max(1, len(lines) - self.distance)
        while at < len(lines) and lines[at].role == "result":
            at -= 1
        note = f"Note {self.number}: write in short sentences, and never forget the lighthouse."
        return [*lines[:at], Line("note", note), *lines[at:]]

    def least(self, question: str | None = None) -> "Client":
        """The same client with nothing but its task, its newest user text and what no model has read."""
        lines = self.sent(question)
        users = [line for line in lines if line.role == "user"]
        unread = lines[-2:] if lines[-1].role == "result" else []
        kept = [users[0], *(users[-1:] if len(users) > 1 else []), *unread]
        return replace(self, lines=kept, distance=None)

    def body(self, model: str, window: int, *, question: str | None = None) -> bytes:
        """The request, byte for byte."""
        lines = self.sent(question)
        made = {CHAT: self._chat, RESPONSES: self._responses, MESSAGES: self._messages}[self.endpoint](lines)
        named = {CHAT: "max_tokens", RESPONSES: "max_output_tokens", MESSAGES: "max_tokens"}[self.endpoint]
        answer = self.begin.answer
        if answer is not None:
            made[named] = max(LEAST_ANSWER, round(answer * window))
        elif self.endpoint == MESSAGES:
            made[named] = NEEDED_ANSWER
        if self.begin.stream:
            made["stream"] = True
        if self.begin.stream and self.endpoint == CHAT:
            made["stream_options"] = {"include_usage": True}
        return json.dumps({"model": model, **made}, ensure_ascii=self.number % 2 == 0).encode()

    def _chat(self, lines: Sequence[Line]) -> JSON:
        system = [{"role": "system", "content": self.system}] if self.system else []
        function = {"name": TOOL, "description": DESCRIPTION, "parameters": SCHEMA}
        return {
            "messages": [*system, *map(_chat_message, lines)],
            "tools": [{"type": "function", "function": function}],
        }

    def _responses(self, lines: Sequence[Line]) -> JSON:
        tool = {"type": "function", "name": TOOL, "description": DESCRIPTION, "parameters": SCHEMA, "strict": False}
        system = {"instructions": self.system} if self.system else {}
        return {**system, "input": [*map(_item, lines)], "tools": [tool], "store": False}

    def _messages(self, lines: Sequence[Line]) -> JSON:
        tool = {"name": TOOL, "description": DESCRIPTION, "input_schema": SCHEMA}
        system = {"system": self.system} if self.system else {}
        return {**system, "messages": [*map(_block_message, lines)], "tools": [tool]}


def _arguments(line: Line) -> JSON:
    return {"path": f"src/module_{line.number}.py"}


def _chat_message(line: Line) -> JSON:
    match line.role:
        case "call":
            function = {"name": TOOL, "arguments": json.dumps(_arguments(line))}
            call = {"id": f"call_{line.number}", "type": "function", "function": function}
            return {"role": "assistant", "content": None, "tool_calls": [call]}
        case "result":
            return {"role": "tool", "tool_call_id": f"call_{line.number}", "content": line.text}
        case "note":
            return {"role": "system", "content": line.text}
        case role:
            return {"role": role, "content": line.text}


def _item(line: Line) -> JSON:
    named = {"call_id": f"call_{line.number}"}
    match line.role:
        case "call":
            return {"type": "function_call", **named, "name": TOOL, "arguments": json.dumps(_arguments(line))}
        case "result":
            return {"type": "function_call_output", **named, "output": line.text}
        case "note":
            return {"role": "developer", "content": line.text}
        case role:
            return {"role": role, "content": line.text}


def _block_message(line: Line) -> JSON:
    named = f"call_{line.number}"
    match line.role:
        case "call":
            call = {"type": "tool_use", "id": named, "name": TOOL, "input": _arguments(line)}
            return {"role": "assistant", "content": [call]}
        case "result":
            result = {"type": "tool_result", "tool_use_id": named, "content": line.text}
            return {"role": "user", "content": [result]}
        case "note":
            return {"role": "user", "content": line.text}
        case role:
            return {"role": role, "content": line.text}


def array_of(body: bytes) -> list[Any]:
    """The messages or items of a request as it was received."""
    value = json.loads(body)
    found = value.get("messages", value.get("input", []))
    return list(found) if isinstance(found, list) else [found]


def texts_of(value: object) -> Iterator[str]:
    """Every text in a JSON value, in order."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for each in value:
            yield from texts_of(each)
    elif isinstance(value, dict):
        for each in value.values():
            yield from texts_of(each)
