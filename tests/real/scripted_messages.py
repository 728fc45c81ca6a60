"""The scripted model as ``POST /v1/messages``: signed thinking, threads, cache markers, and the rules of these."""

import json
import secrets
from collections.abc import Iterator, Sequence
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

THINKING = ("thinking", "redacted_thinking")
KEYS = {
    "text": {"type", "text", "cache_control", "citations"},
    "tool_use": {"type", "id", "name", "input", "cache_control", "caller"},
    "tool_result": {"type", "tool_use_id", "content", "is_error", "cache_control"},
    "thinking": {"type", "thinking", "signature"},
}


@dataclass(slots=True)
class Messages:
    """The endpoint, with what it signed and what threads it holds."""

    script: Script
    signed: dict[str, str] = field(default_factory=dict)
    threads: dict[str, Json] = field(default_factory=dict)

    async def count(self, asked: Asked) -> tuple[int, Json | list[bytes]]:
        """``/messages/count_tokens``."""
        return 200, {"input_tokens": _size(asked.body, asked.body.get("messages") or [])}

    async def create(self, asked: Asked) -> tuple[int, Json | list[bytes]]:
        """An answer, whole or as a stream, or an error."""
        try:
            body = self._whole(asked.body)
            messages = body["messages"]
            self._judge(body, messages)
            tools = [tool for tool in body.get("tools") or () if isinstance(tool, dict)]
            choice = (body.get("tool_choice") or {}).get("type")
            said = _texts(messages)
            asked.main = bool(tools) and choice != "none" and SIDE.search(said[-1]) is None
            asked.tokens = _size(body, messages)
            if asked.tokens > self.script.window:
                raise TooLong(
                    f"prompt is too long: {asked.tokens} tokens > {self.script.window} maximum",
                    in_stream=bool(body.get("stream")) and next(self.script.overflows),
                )
        except Refused as refused:
            return self._refuse(asked, refused)
        turn = self.script.turn(said, tools, called=asked.main)
        asked.step = self.script.done
        if not asked.main:
            schema = ((body.get("output_config") or {}).get("format") or {}).get("schema")
            turn = Turn(text=json.dumps(by_schema(schema)) if schema else NOTES)
        answer = self._made(asked, body, turn)
        return 200, _stream(answer) if body.get("stream") else answer

    def _refuse(self, asked: Asked, refused: Refused) -> tuple[int, Json | list[bytes]]:
        asked.overflow = isinstance(refused, TooLong)
        asked.refused = refused.message if refused.broken else ""
        kind = "not_found_error" if refused.status == 404 else "invalid_request_error"
        error: Json = {"type": kind, "message": refused.message}
        if refused.code:
            error["details"] = {"error_code": refused.code}
        if isinstance(refused, TooLong) and refused.in_stream:
            return 200, [event("error", error=error)]
        return refused.status, {"type": "error", "error": error, "request_id": "req_1"}

    def _whole(self, body: Json) -> Json:
        """The request with what its thread holds."""
        thread = body.get("thread")
        if not thread or thread.get("type") == "create":
            return body
        before = self.threads.get(str(thread.get("previous_message_id")))
        if before is None:
            raise Refused("The thread was not found.", status=404, code="thread_not_found", broken=False)
        return {**before, **body, "messages": [*before["messages"], *body["messages"]]}

    def _judge(self, body: Json, messages: Sequence[Json]) -> None:
        if not messages or messages[0].get("role") != "user":
            raise Refused('messages: first message must use the "user" role')
        if any(message.get("weir") is not None for message in messages):
            raise Refused("messages.0.weir: Extra inputs are not permitted")
        _judge_markers(body, messages)
        _judge_systems(messages)
        thinks = (body.get("thinking") or {}).get("type")
        if thinks == "enabled" and body["max_tokens"] <= body["thinking"]["budget_tokens"]:
            raise Refused("`max_tokens` must be greater than `thinking.budget_tokens`.")
        turns = _merged([message for message in messages if message.get("role") != "system"])
        ids = [block["id"] for _, blocks in turns for block in blocks if block["type"] == "tool_use"]
        if len(ids) != len(set(ids)):
            raise Refused("`tool_use` ids must be unique")
        open_calls: list[str] = []
        for n, (role, blocks) in enumerate(turns):
            self._judge_blocks(n, role, blocks)
            open_calls = _judge_pairs(n, role, blocks, open_calls)
        if open_calls:
            raise Refused(f"`tool_use` ids were found without `tool_result` blocks immediately after: {open_calls}")
        replies = [blocks for role, blocks in turns if role == "assistant"]
        last = turns[-1][1]
        is_open = replies and any(block["type"] == "tool_result" for block in last)
        if thinks == "enabled" and is_open and replies[-1][0]["type"] not in THINKING:
            raise Refused(f"Expected `thinking` or `redacted_thinking`, but found `{replies[-1][0]['type']}`.")

    def _judge_blocks(self, n: int, role: str, blocks: Sequence[Json]) -> None:
        if not blocks:
            raise Refused(f"messages.{n}: all messages must have non-empty content")
        for m, block in enumerate(blocks):
            kind = block["type"]
            if unknown := set(block) - KEYS.get(kind, set(block)):
                raise Refused(f"messages.{n}.content.{m}.{unknown.pop()}: Extra inputs are not permitted")
            if kind == "text" and not str(block.get("text", "")).strip():
                raise Refused("messages: text content blocks must be non-empty")
            if kind in ("tool_use", *THINKING) and role != "assistant":
                raise Refused(f"messages.{n}.content.{m}: `{kind}` blocks can only be in assistant messages")
            if kind == "tool_result" and role != "user":
                raise Refused(f"messages.{n}.content.{m}: `tool_result` blocks can only be in user messages")
            if kind == "thinking" and self.signed.get(block.get("signature", "")) != block["thinking"]:
                raise Refused(f"messages.{n}.content.{m}: Invalid `signature` in `thinking` block")

    def _made(self, asked: Asked, body: Json, turn: Turn) -> Json:
        content: list[Json] = []
        if turn.thought and (body.get("thinking") or {}).get("type") in ("enabled", "adaptive"):
            signature = secrets.token_urlsafe(150)
            self.signed[signature] = turn.thought
            content.append({"type": "thinking", "thinking": turn.thought, "signature": signature})
        if turn.text:
            content.append({"type": "text", "text": turn.text})
        for call in turn.calls:
            named = {"id": f"toolu_{secrets.token_hex(12)}", "name": call.name}
            content.append({"type": "tool_use", **named, "input": call.arguments})
        read = asked.tokens // 2
        identity = f"msg_{secrets.token_hex(12)}"
        if body.get("thread"):
            kept = {name: body[name] for name in ("system", "tools") if name in body}
            self.threads[identity] = {
                **kept,
                "messages": [*body["messages"], {"role": "assistant", "content": content}],
            }
        usage = {
            "input_tokens": asked.tokens - read,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": read,
            "output_tokens": tokens_of(content),
        }
        return {
            "id": identity,
            "type": "message",
            "role": "assistant",
            "model": body.get("model"),
            "content": content,
            "stop_reason": "tool_use" if turn.calls else "end_turn",
            "stop_sequence": None,
            "usage": usage,
        }


def _size(body: Json, messages: Sequence[Json]) -> int:
    return tokens_of([body.get("system"), body.get("tools"), messages, body.get("output_config")])


def _blocks(content: Any) -> list[Json]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content or ())


def _merged(messages: Sequence[Json]) -> list[tuple[str, list[Json]]]:
    """The turns: messages of one role after one another are one."""
    turns: list[tuple[str, list[Json]]] = []
    for n, message in enumerate(messages):
        if message.get("role") not in ("user", "assistant"):
            raise Refused(f"messages.{n}.role: Input should be 'user' or 'assistant'")
        blocks = _blocks(message.get("content"))
        if not blocks:
            raise Refused(f"messages.{n}: all messages must have non-empty content")
        if turns and turns[-1][0] == message["role"]:
            turns[-1][1].extend(blocks)
        else:
            turns.append((message["role"], list(blocks)))
    return turns


def _judge_pairs(n: int, role: str, blocks: Sequence[Json], open_calls: list[str]) -> list[str]:
    """The calls that are open after a turn."""
    results = [block["tool_use_id"] for block in blocks if block["type"] == "tool_result"]
    if role == "user":
        if any(block["type"] == "tool_result" for block in blocks[len(results) :]):
            raise Refused(f"messages.{n}: `tool_result` blocks must come first in the content")
        if set(results) - set(open_calls):
            raise Refused(f"messages.{n}: unexpected `tool_use_id` found in `tool_result` blocks")
        if len(results) != len(set(results)):
            raise Refused("each tool_use must have a single result.")
        if set(open_calls) - set(results):
            raise Refused(f"messages.{n}: `tool_use` ids were found without `tool_result` blocks immediately after")
        return []
    return [block["id"] for block in blocks if block["type"] == "tool_use"]


def _judge_markers(body: Json, messages: Sequence[Json]) -> None:
    def walk(value: Any) -> Iterator[Any]:
        if isinstance(value, dict):
            if value.get("cache_control"):
                yield value
            for each in value.values():
                yield from walk(each)
        elif isinstance(value, list):
            for each in value:
                yield from walk(each)

    marked = [*walk(body.get("tools")), *walk(body.get("system")), *walk(messages)]
    found = len(marked) + bool(body.get("cache_control"))
    if found > 4:
        raise Refused(f"A maximum of 4 blocks with cache_control may be provided. Found {found}.")
    if any(block.get("type") in THINKING for block in marked):
        raise Refused("cache_control cannot be set for thinking blocks")


def _judge_systems(messages: Sequence[Json]) -> None:
    """A message of the system between others: behind a user's, and not directly before another."""
    for n, message in enumerate(messages):
        if message.get("role") != "system":
            continue
        before = messages[n - 1].get("role") if n else None
        after = messages[n + 1].get("role") if n + 1 < len(messages) else None
        if before not in ("user", "system") or after == "user":
            raise Refused(f"messages.{n}: a system message must follow a user message and precede an assistant's")


def _texts(messages: Sequence[Json]) -> list[str]:
    """What users and tools said, in order."""
    found = []
    for message in messages:
        if message.get("role") != "user":
            continue
        for block in _blocks(message.get("content")):
            if block["type"] == "tool_result":
                found.append("\n".join(str(each.get("text", "")) for each in _blocks(block.get("content"))))
            elif block["type"] == "text":
                found.append(block["text"])
    return found


def _stream(answer: Json) -> list[bytes]:
    usage = answer["usage"]
    empty = {"content": [], "stop_reason": None, "usage": {**usage, "output_tokens": 1}}
    events = [event("message_start", message={**answer, **empty}), event("ping")]
    for index, block in enumerate(answer["content"]):
        kind, deltas = block["type"], []
        if kind == "text":
            start = {"type": "text", "text": ""}
            deltas = [{"type": "text_delta", "text": piece} for piece in pieces_of(block["text"])]
        elif kind == "thinking":
            start = {"type": "thinking", "thinking": "", "signature": ""}
            deltas = [{"type": "thinking_delta", "thinking": piece} for piece in pieces_of(block["thinking"])]
            deltas.append({"type": "signature_delta", "signature": block["signature"]})
        else:
            start = {**block, "input": {}}
            written = json.dumps(block["input"])
            deltas = [{"type": "input_json_delta", "partial_json": piece} for piece in pieces_of(written)]
        events.append(event("content_block_start", index=index, content_block=start))
        events += [event("content_block_delta", index=index, delta=delta) for delta in deltas]
        events.append(event("content_block_stop", index=index))
    ended = {"stop_reason": answer["stop_reason"], "stop_sequence": None}
    events.append(event("message_delta", delta=ended, usage={"output_tokens": usage["output_tokens"]}))
    events.append(event("message_stop"))
    return events
