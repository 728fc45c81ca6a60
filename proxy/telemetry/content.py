"""Messages as attributes of spans, where the operator opted in to them.

They are written as the conventions have it: a JSON array of roles with parts, bounded, without
credentials. What is too long loses whole messages from its middle, so that it stays valid JSON; a
single message that is too long loses the end of its texts.
"""

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from proxy.errors import redact
from proxy.telemetry import names
from proxy.telemetry.names import Value
from proxy.wire.raw import read_value

MAX_BYTES: Final = 16 * 1024
MAX_TEXT_LEN: Final = 2 * 1024
MAX_SECRET_LEN: Final = 512
NO_FINISH: Final = "error"
"""The finish reason that the conventions give an answer without one."""
CUT: Final = "…"
_MEDIA: Final = {
    "image_url": "image",
    "input_audio": "audio",
    "video_url": "video",
    "file": "document",
}

Part = dict[str, Any]


def request_content(body: bytes) -> dict[str, Value]:
    """The attributes of what a request says; of a body that is none, nothing."""
    request = _object(body)
    found: dict[str, Value] = {}
    messages = request.get("messages")
    tools = request.get("tools")
    if isinstance(messages, list):
        text, dropped = bounded(messages, _message)
        found[names.INPUT_MESSAGES] = text
        if dropped:
            found[names.CONTENT_DROPPED] = dropped
        if newest := next(
            (m for m in reversed(messages) if isinstance(m, dict) and m.get("role") == "user"), None
        ):
            found[names.INPUT_VALUE] = _in_words(_message(newest, MAX_TEXT_LEN))
    if isinstance(tools, list) and tools:
        found[names.TOOL_DEFINITIONS] = bounded(tools, _definition)[0]
    return found


def response_content(choices: Sequence[object]) -> dict[str, Value]:
    """The attributes of what the choices of an answer say."""
    if not choices:
        return {}
    first = _in_words(_choice(choices[0], MAX_TEXT_LEN))
    return {names.OUTPUT_MESSAGES: bounded(choices, _choice)[0], names.OUTPUT_VALUE: first}


def _in_words(message: Part) -> str:
    parts = message["parts"]
    said = [part.get("content", "") for part in parts if part["type"] == "text"]
    return "\n".join(
        said or [f"{p['name']}({p['arguments']})" for p in parts if p["type"] == "tool_call"]
    )


def bounded(items: Sequence[object], form: Any) -> tuple[str, int]:
    """A JSON array of at most ``MAX_BYTES`` from both ends of ``items``, and how many are missing.

    The newest item is taken first, then the oldest, and so on inwards; ``form`` gives one as the
    conventions have it.
    """
    room = MAX_BYTES - 2
    first: list[str] = []
    last: list[str] = []
    for step in range(len(items)):
        from_end = step % 2 == 0
        text = _fitting(form, items[-1 - step // 2 if from_end else step // 2], room)
        if text is None:
            break
        (last if from_end else first).append(text)
        room -= len(text.encode()) + 1
    kept = [*first, *reversed(last)]
    return f"[{','.join(kept)}]", len(items) - len(kept)


def _fitting(form: Any, item: object, room: int) -> str | None:
    for longest in (room, MAX_TEXT_LEN, MAX_TEXT_LEN // 16):
        if longest <= room and len((text := _json(form(item, longest))).encode()) <= room:
            return text
    return None


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _text(value: object, longest: int) -> str:
    said = value if isinstance(value, str) else _json(value)
    clean = redact(
        said[: longest + MAX_SECRET_LEN].encode("utf-8", "replace").decode(), limit=len(said)
    )
    return clean if len(clean) <= longest else clean[: max(0, longest - 1)] + CUT


def _choice(choice: object, longest: int) -> Part:
    value = choice if isinstance(choice, dict) else {}
    message = value.get("message")
    made = _message(
        message if isinstance(message, dict) else {"content": value.get("text")}, longest
    )
    reason = value.get("finish_reason")
    return {**made, "role": "assistant", "finish_reason": _text(reason or NO_FINISH, 64)}


def _message(message: object, longest: int) -> Part:
    value = message if isinstance(message, dict) else {}
    role = _text(value.get("role") or "user", 32)
    if role == "tool":
        result = {"type": "tool_call_response", "id": _text(value.get("tool_call_id") or "", 128)}
        return {
            "role": role,
            "parts": [{**result, "response": _text(_plain(value.get("content")), longest)}],
        }
    return {"role": role, "parts": list(_parts(value, longest))}


def _plain(content: object) -> object:
    if isinstance(content, list) and all(
        isinstance(p, dict) and isinstance(p.get("text"), str) for p in content
    ):
        return "\n".join(part["text"] for part in content)
    return "" if content is None else content


def _parts(message: Mapping[str, Any], longest: int) -> Iterator[Part]:
    thought = message.get("reasoning_content") or message.get("reasoning")
    if isinstance(thought, str):
        yield {"type": "reasoning", "content": _text(thought, longest)}
    content = message.get("content") or message.get("refusal")
    if isinstance(content, str):
        yield {"type": "text", "content": _text(content, longest)}
    elif isinstance(content, list):
        yield from (_part(part, longest) for part in content if isinstance(part, dict))
    yield from _calls(message.get("tool_calls"), longest)


def _part(part: Mapping[str, Any], longest: int) -> Part:
    kind = str(part.get("type"))
    if isinstance(part.get("text"), str):
        return {"type": "text", "content": _text(part["text"], longest)}
    if kind not in _MEDIA:
        return {"type": _text(kind, 32)}
    given = part.get(kind)
    address = given.get("url") if isinstance(given, dict) else None
    if isinstance(address, str) and not address.startswith("data:"):
        return {
            "type": "uri",
            "modality": _MEDIA[kind],
            "uri": _text(address.partition("?")[0], longest),
        }
    return {"type": "blob", "modality": _MEDIA[kind], "content": ""}


def _calls(calls: object, longest: int) -> Iterator[Part]:
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict):
            named = {"type": "tool_call", "id": _text(call.get("id") or "", 128)}
            arguments = _text(function.get("arguments") or "", longest)
            yield {**named, "name": _text(function.get("name") or "", 128), "arguments": arguments}


def _definition(tool: object, longest: int) -> Part:
    value = tool if isinstance(tool, dict) else {}
    function = value.get("function")
    own: Mapping[str, Any] = function if isinstance(function, dict) else value
    found: Part = {
        "type": _text(value.get("type") or "function", 32),
        "name": _text(own.get("name") or "", 128),
    }
    if isinstance(own.get("description"), str):
        found["description"] = _text(own["description"], longest)
    if (
        isinstance(own.get("parameters"), dict)
        and len(shape := _text(own["parameters"], 16 * MAX_BYTES)) <= longest
    ):
        found["parameters"] = shape
        with contextlib.suppress(ValueError):
            found["parameters"] = json.loads(shape)
    return found


def response_choices(body: bytes) -> Sequence[object]:
    """The choices of a whole answer."""
    choices = _object(body).get("choices")
    return choices if isinstance(choices, list) else ()


def _object(body: bytes) -> dict[str, Any]:
    value = read_value(body)
    return value if isinstance(value, dict) else {}
