"""The streams of three APIs in pieces, so that one can be broken anywhere: what is said, a tool
call, each ending.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from proxy.errors import UpstreamUnreachable

TODAY = "Upstream 'default' broke off its answer."
USED = {"prompt_tokens": 100, "completion_tokens": 9, "total_tokens": 109}


@dataclass(frozen=True, slots=True)
class Ending:
    """How a stream ends: bytes behind its last event, and whether it is ended, cut or reset."""

    rest: bytes = b""
    how: str = "cut"


CUTS: Mapping[str, Ending] = {
    "cut": Ending(),
    "reset": Ending(how="reset"),
    "ended": Ending(how="end"),
}


def told(message: str, kind: str, code: object, **more: object) -> bytes:
    """An error as an event of a stream."""
    error = {"message": message, "type": kind, "param": None, "code": code, **more}
    return b"\n\ndata: " + json.dumps({"error": error}).encode() + b"\n\n"


def chunk(text: str | None = None, *, finish: str | None = None, **delta: object) -> bytes:
    """A chunk of a completion as an event."""
    said = {**({} if text is None else {"content": text}), **delta}
    choice = {"index": 0, "delta": said, "finish_reason": finish}
    return _chunk([choice])


def _chunk(choices: Sequence[object], **more: object) -> bytes:
    value = {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "sim",
        "choices": choices,
    }
    return b"data: " + json.dumps({**value, **more}).encode() + b"\n\n"


def named(kind: str, **more: object) -> bytes:
    """An event with a name, as in the streams of responses and of messages."""
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), json.dumps({"type": kind, **more}).encode())


class Chat:
    """``/v1/chat/completions``."""

    route = "/chat/completions"
    endings: Mapping[str, Ending] = {
        "Weir's": Ending(UpstreamUnreachable(TODAY).event()),
        "Weir's, ended": Ending(UpstreamUnreachable(TODAY).event(), "end"),
        "other words": Ending(told(TODAY, "api_connection_error", "upstream_unreachable")),
        **CUTS,
        "marker alone": Ending(b"data: [DONE]\n\n", "end"),
        "finish error": Ending(chunk(finish="error"), "end"),
    }

    def tools(self, asked: Mapping[str, Any]) -> list[tuple[str, Any]]:
        """Name and parameters of each tool of a request."""
        return [
            (t["function"]["name"], t["function"].get("parameters"))
            for t in asked.get("tools") or ()
        ]

    def half(self, texts: Sequence[str]) -> list[bytes]:
        """An answer without its end; no texts: up to its first word."""
        return [chunk("", role="assistant"), *map(chunk, texts)]

    def call(self, name: str, arguments: Sequence[str], *, whole: bool) -> list[bytes]:
        """A tool call whose arguments come in pieces; whole or not looks the same before the
        answer's end.
        """
        function = {"id": "call_1", "type": "function", "function": {"name": name, "arguments": ""}}
        first = chunk(role="assistant", tool_calls=[{"index": 0, **function}])
        return [
            first,
            *(chunk(tool_calls=[{"index": 0, "function": {"arguments": a}}]) for a in arguments),
        ]

    def whole(self, text: str) -> list[bytes]:
        """A stream with its proper end."""
        return [chunk(text), chunk(finish="stop"), _chunk([], usage=USED), b"data: [DONE]\n\n"]

    def plain(self, text: str) -> object:
        """The body of an answer that is no stream."""
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": text},
            "finish_reason": "stop",
        }
        value = {
            "id": "c",
            "object": "chat.completion",
            "created": 1,
            "model": "sim",
            "choices": [choice],
        }
        return {**value, "usage": USED}


def _response(status: str, *output: object, **more: object) -> dict[str, object]:
    usage = {
        "input_tokens": 100,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": 9,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 109,
    }
    value = {
        "id": "resp_1",
        "object": "response",
        "created_at": 1,
        "model": "sim",
        "status": status,
    }
    return {**value, "output": output, "usage": usage if status == "completed" else None, **more}


def _failed(code: str) -> bytes:
    return named(
        "response.failed", response=_response("failed", error={"code": code, "message": TODAY})
    )


CREATED = named("response.created", response=_response("in_progress"))


class Responses:
    """``/v1/responses``."""

    route = "/responses"
    endings: Mapping[str, Ending] = {
        **CUTS,
        "failed server_error": Ending(_failed("server_error")),
        "failed overloaded": Ending(_failed("server_is_overloaded")),
        "error event": Ending(named("error", code="server_error", message=TODAY, param=None)),
    }

    def tools(self, asked: Mapping[str, Any]) -> list[tuple[str, Any]]:
        """Name and parameters of each function of a request."""
        return [
            (t["name"], t.get("parameters"))
            for t in asked.get("tools") or ()
            if t.get("type") == "function"
        ]

    def half(self, texts: Sequence[str]) -> list[bytes]:
        """An answer without its end; no texts: up to its first word."""
        part = {"type": "output_text", "text": "", "annotations": []}
        place = {"output_index": 0, "content_index": 0}
        begin = [
            named("response.output_item.added", output_index=0, item=self._message("in_progress")),
            named("response.content_part.added", item_id="msg_1", **place, part=part),
        ]
        said = [
            named("response.output_text.delta", item_id="msg_1", **place, delta=text)
            for text in texts
        ]
        return [CREATED, *(begin if texts else ()), *said]

    def call(self, name: str, arguments: Sequence[str], *, whole: bool) -> list[bytes]:
        """A tool call whose arguments come in pieces, with its own end if it is whole; the answer's
        is missing.
        """
        item = {
            "type": "function_call",
            "id": "fc_1",
            "call_id": "call_1",
            "name": name,
            "arguments": "",
        }
        done = {**item, "arguments": "".join(arguments), "status": "completed"}
        kind = "response.function_call_arguments.delta"
        place = {"item_id": "fc_1", "output_index": 0}
        return [
            CREATED,
            named(
                "response.output_item.added", output_index=0, item={**item, "status": "in_progress"}
            ),
            *(named(kind, **place, delta=each) for each in arguments),
            *([named("response.output_item.done", output_index=0, item=done)] if whole else ()),
        ]

    def whole(self, text: str) -> list[bytes]:
        """A stream with its proper end."""
        done = self._message("completed", text)
        return [
            *self.half([text]),
            named("response.output_item.done", output_index=0, item=done),
            named("response.completed", response=_response("completed", done)),
        ]

    def plain(self, text: str) -> object:
        """The body of an answer that is no stream."""
        return _response("completed", self._message("completed", text))

    def _message(self, status: str, text: str = "") -> dict[str, object]:
        content = [{"type": "output_text", "text": text, "annotations": []}] if text else []
        return {
            "type": "message",
            "id": "msg_1",
            "status": status,
            "role": "assistant",
            "content": content,
        }


def _refused(kind: str) -> bytes:
    return named("error", error={"type": kind, "message": TODAY})


class Messages:
    """``/v1/messages``."""

    route = "/messages"
    endings: Mapping[str, Ending] = {
        **CUTS,
        "overloaded_error": Ending(_refused("overloaded_error")),
        "api_error": Ending(_refused("api_error")),
    }

    def tools(self, asked: Mapping[str, Any]) -> list[tuple[str, Any]]:
        """Name and parameters of each tool of a request."""
        return [(t["name"], t.get("input_schema")) for t in asked.get("tools") or ()]

    def half(self, texts: Sequence[str]) -> list[bytes]:
        """An answer without its end; no texts: up to its first word."""
        said = [self._delta(type="text_delta", text=text) for text in texts]
        return self._begin(type="text", text="") + said if texts else self._begin()

    def call(self, name: str, arguments: Sequence[str], *, whole: bool) -> list[bytes]:
        """A tool call whose arguments come in pieces, with its own end if it is whole; the answer's
        is missing.
        """
        block = self._begin(type="tool_use", id="toolu_1", name=name, input={})
        said = [self._delta(type="input_json_delta", partial_json=each) for each in arguments]
        return [*block, *said, *([named("content_block_stop", index=0)] if whole else ())]

    def whole(self, text: str) -> list[bytes]:
        """A stream with its proper end."""
        return [
            *self.half([text]),
            named("content_block_stop", index=0),
            named("message_delta", delta={"stop_reason": "end_turn"}, usage={"output_tokens": 9}),
            named("message_stop"),
        ]

    def plain(self, text: str) -> object:
        """The body of an answer that is no stream."""
        return self._message("end_turn", {"type": "text", "text": text})

    def _begin(self, **block: object) -> list[bytes]:
        start = named("message_start", message=self._message(None))
        return (
            [start, named("content_block_start", index=0, content_block=block)]
            if block
            else [start]
        )

    def _delta(self, **delta: object) -> bytes:
        return named("content_block_delta", index=0, delta=delta)

    def _message(self, reason: str | None, *content: object) -> dict[str, object]:
        value = {
            "id": "msg_1",
            "type": "message",
            "role": "assistant",
            "model": "sim",
            "content": content,
        }
        return {**value, "stop_reason": reason, "usage": {"input_tokens": 100, "output_tokens": 9}}


SURFACES: Mapping[str, Chat | Responses | Messages] = {
    "chat": Chat(),
    "responses": Responses(),
    "messages": Messages(),
}
COMMANDS = ("command", "cmd", "commands")
COMMAND = "touch ran; echo the rest of it"


def call_of(tools: Sequence[tuple[str, Any]], *, whole: bool) -> tuple[str, list[str]] | None:
    """A call of the first tool that runs a command; if it is not whole, it ends in the middle of
    that command.
    """
    for name, schema in tools:
        known: dict[str, Any] = (schema or {}).get("properties", {})
        key = next((each for each in COMMANDS if each in known), None)
        if key is None:
            continue
        types = {"boolean": False, "integer": 1, "number": 1, "array": []}
        others = {
            n: types.get(known.get(n, {}).get("type"), "x")
            for n in schema.get("required", ())
            if n != key
        }
        listed = "array" in json.dumps(known[key])
        text = json.dumps({**others, key: [COMMAND] if listed else COMMAND})
        said = text if whole else text[: text.index(" of it")]
        return name, [said[:10], said[10:20], said[20:]]
    return None
