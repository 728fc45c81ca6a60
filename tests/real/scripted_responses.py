"""The scripted model as ``POST /v1/responses``: stored answers, references, sealed reasoning, and the rules of these."""

import itertools
import json
import secrets
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.real.scripted import (
    NOTES,
    SIDE,
    Asked,
    Json,
    Refused,
    Script,
    TooLong,
    Turn,
    by_schema,
    event,
    pieces_of,
    tokens_of,
)

PREFIXES = {"reasoning": "rs_", "message": "msg_", "function_call": "fc_", "custom_tool_call": "ctc_"}
CALLS = {"function_call": "function_call_output", "custom_tool_call": "custom_tool_call_output"}
OUTPUTS = {output: call for call, output in CALLS.items()}
PARTS = {"user": "input_", "system": "input_", "developer": "input_", "assistant": "output_"}
KEYS = {
    "message": {"type", "role", "content", "id", "status", "phase", "internal_chat_message_metadata_passthrough"},
    "reasoning": {
        *("type", "id", "summary", "content", "encrypted_content", "status"),
        "internal_chat_message_metadata_passthrough",
    },
    "function_call": {
        *("type", "id", "call_id", "name", "arguments", "status", "namespace", "caller"),
        "internal_chat_message_metadata_passthrough",
    },
    "function_call_output": {
        *("type", "id", "call_id", "output", "status", "name", "namespace", "caller"),
        "internal_chat_message_metadata_passthrough",
    },
    "custom_tool_call": {
        *("type", "id", "call_id", "name", "input", "status", "namespace", "caller"),
        "internal_chat_message_metadata_passthrough",
    },
    "custom_tool_call_output": {
        *("type", "id", "call_id", "output", "status", "name", "namespace", "caller"),
        "internal_chat_message_metadata_passthrough",
    },
    "item_reference": {"type", "id"},
}


@dataclass(slots=True)
class Responses:
    """The endpoint, with what it has stored."""

    script: Script
    answers: dict[str, list[Json]] = field(default_factory=dict)
    items: dict[str, Json] = field(default_factory=dict)
    sealed: dict[str, str] = field(default_factory=dict)
    made_with: dict[str, str] = field(default_factory=dict)

    async def count(self, asked: Asked) -> tuple[int, Json | list[bytes]]:
        """``/responses/input_tokens``."""
        return 200, {"object": "response.input_tokens", "input_tokens": tokens_of(asked.body)}

    async def create(self, asked: Asked) -> tuple[int, Json | list[bytes]]:
        """An answer, whole or as a stream, or an error."""
        body = asked.body
        try:
            history = self._history(body)
            self._judge(history, stored=body.get("store") is not False)
            tools = [*(body.get("tools") or ())]
            for item in history:
                tools += item["tools"] if item.get("type") == "additional_tools" else ()
            said = _texts(history)
            asked.main = bool(tools) and body.get("tool_choice") != "none" and SIDE.search(said[-1]) is None
            asked.tokens = tokens_of([body.get("instructions"), body.get("tools"), history, body.get("text")])
            if asked.tokens > self.script.window:
                raise TooLong(
                    "Your input exceeds the context window of this model. Please adjust your input and try again.",
                    code="context_length_exceeded",
                    in_stream=bool(body.get("stream")) and next(self.script.overflows),
                )
        except Refused as refused:
            return self._refuse(asked, refused)
        turn = self.script.turn(said, tools, called=asked.main)
        asked.step = self.script.done
        schema = (body.get("text") or {}).get("format") or {}
        if not asked.main:
            turn = Turn(text=json.dumps(by_schema(schema["schema"])) if "schema" in schema else NOTES)
        answer = self._made(asked, turn, history)
        return 200, _stream(answer) if body.get("stream") else answer

    def _refuse(self, asked: Asked, refused: Refused) -> tuple[int, Json | list[bytes]]:
        asked.overflow = not refused.broken
        asked.refused = refused.message if refused.broken else ""
        told = {"message": refused.message, "type": "invalid_request_error", "param": "input", "code": refused.code}
        if isinstance(refused, TooLong) and refused.in_stream:
            response = {**_response(asked.body), "status": "in_progress"}
            failed = {**response, "status": "failed", "error": {"code": refused.code, "message": refused.message}}
            return 200, [
                event("response.created", sequence_number=0, response=response),
                event("response.in_progress", sequence_number=1, response=response),
                event("response.failed", sequence_number=2, response=failed),
            ]
        return refused.status, {"error": told}

    def _history(self, body: Json) -> list[Json]:
        """All that the model would read, references as what they stand for."""
        given = body.get("input")
        items = [{"type": "message", "role": "user", "content": given}] if isinstance(given, str) else given
        if not isinstance(items, list):
            raise Refused("Invalid type for 'input'.")
        before: list[Json] = []
        if body.get("previous_response_id"):
            if body["previous_response_id"] not in self.answers:
                raise Refused(
                    f"Previous response with id '{body['previous_response_id']}' not found.",
                    code="previous_response_not_found",
                    broken=False,
                )
            before = self.answers[body["previous_response_id"]]
        found = []
        for item in items:
            if item.get("type") != "item_reference":
                found.append(item)
            elif item["id"] in self.items:
                found.append(self.items[item["id"]])
            else:
                raise Refused(f"Item with id '{item['id']}' not found.", status=404)
        return [*before, *found]

    def _judge(self, history: Sequence[Json], *, stored: bool) -> None:
        calls = Counter(item["call_id"] for item in history if item.get("type") in CALLS)
        outputs = Counter(item["call_id"] for item in history if item.get("type") in OUTPUTS)
        seen: set[str] = set()
        for n, item in enumerate(history):
            kind = item.get("type", "message")
            if kind.startswith("compaction"):
                raise Refused(f"Invalid value: '{kind}'. Supported values are: {', '.join(KEYS)}.", broken=False)
            if unknown := set(item) - KEYS.get(kind, set(item)):
                raise Refused(f"Unknown parameter: 'input[{n}].{unknown.pop()}'.")
            if kind in CALLS:
                seen.add(item["call_id"])
                if not outputs[item["call_id"]]:
                    raise Refused(f"No tool output found for function call {item['call_id']}.")
            elif kind in OUTPUTS and item["call_id"] not in seen:
                raise Refused(f"No tool call found for function call output with call_id {item['call_id']}.")
            elif kind == "message":
                _judge_message(n, item)
            elif kind == "reasoning":
                self._judge_reasoning(n, item, history[n + 1 :], stored=stored)
            self._judge_id(n, item, kind)
        if twice := [one for one, count in (calls + Counter()).items() if count > 1 or outputs[one] > 1]:
            raise Refused(f"Duplicate item found with call_id {twice[0]}")
        ids = Counter(item["id"] for item in history if item.get("id"))
        if again := [one for one, count in ids.items() if count > 1]:
            raise Refused(f"Duplicate item found with id {again[0]}.")
        self._judge_groups(history)

    def _judge_id(self, n: int, item: Json, kind: str) -> None:
        prefix, identity = PREFIXES.get(kind), item.get("id")
        if prefix and isinstance(identity, str) and not identity.startswith(prefix):
            raise Refused(f"Invalid 'input[{n}].id': '{identity}'. Expected an ID that begins with '{prefix[:-1]}'.")

    def _judge_reasoning(self, n: int, item: Json, rest: Sequence[Json], *, stored: bool) -> None:
        if "summary" not in item:
            raise Refused(f"Missing required parameter: 'input[{n}].summary'.")
        if item.get("content"):
            raise Refused(f"Invalid 'input[{n}].content': array too long.")
        if not rest or rest[0].get("type", "message") not in ("message", *CALLS) or rest[0].get("role") == "user":
            raise Refused(
                f"Item '{item.get('id')}' of type 'reasoning' was provided without its required following item."
            )
        if (given := item.get("encrypted_content")) is not None:
            if self.sealed.get(str(given)) != item.get("id", self.sealed.get(str(given))):
                raise Refused("The encrypted content could not be verified.", code="invalid_encrypted_content")
        elif item.get("id") not in self.items:
            raise Refused(f"Item with id '{item.get('id')}' not found.", status=404)

    def _judge_groups(self, history: Sequence[Json]) -> None:
        """What was made with reasoning, and is named by its id, needs it."""
        present = {item.get("id") for item in history if item.get("type") == "reasoning"}
        for item in history:
            needed = self.made_with.get(str(item.get("id")))
            if item.get("type") != "reasoning" and needed and needed not in present:
                raise Refused(
                    f"Item '{item['id']}' of type '{item.get('type')}' was provided without its required "
                    f"'reasoning' item: '{needed}'."
                )

    def _made(self, asked: Asked, turn: Turn, history: Sequence[Json]) -> Json:
        body, key = asked.body, secrets.token_hex(12)
        output: list[Json] = []
        if turn.thought:
            item: Json = {"type": "reasoning", "id": f"rs_{key}", "summary": []}
            if "reasoning.encrypted_content" in (body.get("include") or ()):
                item["encrypted_content"] = f"gAAAAA{secrets.token_urlsafe(180)}"
                self.sealed[item["encrypted_content"]] = item["id"]
            output.append(item)
        if turn.text:
            part = {"type": "output_text", "text": turn.text, "annotations": [], "logprobs": []}
            message = {"type": "message", "id": f"msg_{key}", "status": "completed", "role": "assistant"}
            output.append({**message, "content": [part]})
        for n, call in enumerate(turn.calls):
            named = {"call_id": f"call_{key}{n}", "status": "completed", "name": call.name}
            if call.namespace:
                named["namespace"] = call.namespace
            if isinstance(call.arguments, str):
                output.append({"type": "custom_tool_call", "id": f"ctc_{key}{n}", **named, "input": call.arguments})
            else:
                arguments = json.dumps(call.arguments)
                output.append({"type": "function_call", "id": f"fc_{key}{n}", **named, "arguments": arguments})
        if body.get("store") is not False and self.script.stateful:
            self.items |= {item["id"]: item for item in output}
        answer = _response(body)
        self.answers[answer["id"]] = [*history, *output] if body.get("store") is not False else []
        if turn.thought:
            self.made_with |= {item["id"]: f"rs_{key}" for item in output if item["type"] != "reasoning"}
        size = tokens_of(output)
        details = {"reasoning_tokens": 20 if turn.thought else 0}
        usage = {
            "input_tokens": asked.tokens,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": size + details["reasoning_tokens"],
            "output_tokens_details": details,
            "total_tokens": asked.tokens + size + details["reasoning_tokens"],
        }
        return {**answer, "status": "completed", "output": output, "usage": usage}


def _judge_message(n: int, item: Json) -> None:
    role = item.get("role")
    if role not in PARTS:
        raise Refused(f"Invalid value: '{role}'. Supported values are: 'assistant', 'system', 'developer', and 'user'.")
    content = item.get("content")
    for part in content if isinstance(content, list) else ():
        kind = part.get("type", "")
        if not (kind.startswith(PARTS[role]) or (role == "assistant" and kind == "refusal")):
            raise Refused(f"Invalid value: '{kind}' in 'input[{n}].content'.")


def _response(body: Json) -> Json:
    asked = {
        name: body.get(name) for name in ("instructions", "metadata", "previous_response_id", "temperature", "top_p")
    }
    return {
        **asked,
        "id": f"resp_{secrets.token_hex(12)}",
        "object": "response",
        "created_at": 1_790_000_000,
        "model": body.get("model"),
        "output": [],
        "error": None,
        "incomplete_details": None,
        "parallel_tool_calls": True,
        "tool_choice": body.get("tool_choice", "auto"),
        "tools": body.get("tools") or [],
        "text": body.get("text") or {"format": {"type": "text"}},
        "truncation": "disabled",
        "store": body.get("store", True),
        "usage": None,
    }


def _texts(history: Sequence[Json]) -> list[str]:
    """What users and tools said, in order."""
    found = []
    for item in history:
        if item.get("type") in OUTPUTS:
            found.append(_text(item.get("output")))
        elif item.get("type", "message") == "message" and item.get("role") == "user":
            found.append(_text(item.get("content")))
    return found


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "\n".join(str(part.get("text", "")) for part in content)
    return str(content)


def _stream(answer: Json) -> list[bytes]:
    number = itertools.count()
    started = {**answer, "status": "in_progress", "output": [], "usage": None}
    events = [
        event("response.created", sequence_number=next(number), response=started),
        event("response.in_progress", sequence_number=next(number), response=started),
    ]

    def say(kind: str, **value: Any) -> None:
        events.append(event(kind, sequence_number=next(number), **value))

    for index, item in enumerate(answer["output"]):
        at = {"item_id": item["id"], "output_index": index}
        say("response.output_item.added", output_index=index, item=_empty(item))
        if item["type"] == "message":
            part, text = {"type": "output_text", "text": "", "annotations": []}, item["content"][0]["text"]
            say("response.content_part.added", **at, content_index=0, part=part)
            for piece in pieces_of(text):
                say("response.output_text.delta", **at, content_index=0, delta=piece, logprobs=[])
            say("response.output_text.done", **at, content_index=0, text=text, logprobs=[])
            say("response.content_part.done", **at, content_index=0, part=item["content"][0])
        elif item["type"] == "function_call":
            for piece in pieces_of(item["arguments"]):
                say("response.function_call_arguments.delta", **at, delta=piece)
            say("response.function_call_arguments.done", **at, name=item["name"], arguments=item["arguments"])
        elif item["type"] == "custom_tool_call":
            for piece in pieces_of(item["input"]):
                say("response.custom_tool_call_input.delta", **at, delta=piece)
            say("response.custom_tool_call_input.done", **at, input=item["input"])
        say("response.output_item.done", output_index=index, item=item)
    say("response.completed", response=answer)
    return events


def _empty(item: Json) -> Json:
    bare = {
        "message": {"content": [], "status": "in_progress"},
        "function_call": {"arguments": ""},
        "custom_tool_call": {"input": ""},
    }
    return {**item, **bare.get(item["type"], {})}
