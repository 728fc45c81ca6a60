"""Messages as the GenAI conventions write them: a JSON array of roles with parts, bounded, without credentials.

Only where the operator opted in. What is too long loses whole messages from its middle, so that it stays valid JSON;
a single message that is too long loses the end of its texts.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from proxy.redaction import redact
from proxy.telemetry import names
from proxy.telemetry.names import Value

MAX_BYTES: Final = 16 * 1024
MAX_TEXT_LEN: Final = 2 * 1024
MAX_SECRET_LEN: Final = 512
CUT: Final = "…"
_MEDIA: Final = {"image_url": "image", "input_audio": "audio", "video_url": "video", "file": "document"}

Part = dict[str, Any]


def asked_in(body: bytes) -> dict[str, Value]:
    """The attributes that say what a request holds; empty if it cannot be read."""
    try:
        request = msgspec.json.decode(body)
    except (ValueError, RecursionError):
        return {}
    if not isinstance(request, dict):
        return {}
    found: dict[str, Value] = {}
    messages, tools = request.get("messages"), request.get("tools")
    if isinstance(messages, list):
        text, dropped = bounded(messages, _message)
        found[names.INPUT_MESSAGES] = text
        if dropped:
            found[names.CONTENT_DROPPED] = dropped
    if isinstance(tools, list) and tools:
        found[names.TOOL_DEFINITIONS] = bounded(tools, _definition)[0]
    return found


def said_in(choices: Sequence[object]) -> dict[str, Value]:
    """The attribute that says what was answered, from the choices of a completion; empty without any."""
    if not choices:
        return {}
    return {names.OUTPUT_MESSAGES: bounded(choices, _choice)[0]}


def bounded(items: Sequence[object], form: Any, *, most: int = MAX_BYTES) -> tuple[str, int]:
    """A JSON array of at most ``most`` bytes from both ends of ``items``, and how many are missing.

    The newest item is taken first, then the oldest, and so on inwards; ``form`` gives one as the conventions have it.
    """
    room = most - 2
    first: list[str] = []
    last: list[str] = []
    for at, from_end in _inwards(len(items)):
        text = _fitting(form, items[at], room)
        if text is None:
            break
        (last if from_end else first).append(text)
        room -= len(text.encode()) + 1
    kept = [*first, *reversed(last)]
    return f"[{','.join(kept)}]", len(items) - len(kept)


def _inwards(count: int) -> Iterator[tuple[int, bool]]:
    """Every index once, from the end, the beginning, the end and so on, and whether it was taken from the end."""
    low, high = 0, count - 1
    while low <= high:
        yield high, True
        high -= 1
        if low <= high:
            yield low, False
            low += 1


def _fitting(form: Any, item: object, room: int) -> str | None:
    """An item as JSON that fits, with its texts cut where needed; None if it does not even then."""
    for longest in (room, MAX_TEXT_LEN, MAX_TEXT_LEN // 16):
        if longest <= room and len((text := _json(form(item, longest))).encode()) <= room:
            return text
    return None


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _text(value: object, longest: int) -> str:
    """Text without credentials, cut to ``longest`` characters; what is no text is written as JSON first."""
    said = value if isinstance(value, str) else _json(value)
    clean = redact(said[: longest + MAX_SECRET_LEN].encode("utf-8", "replace").decode(), limit=len(said))
    return clean if len(clean) <= longest else clean[: max(0, longest - 1)] + CUT


def _choice(choice: object, longest: int) -> Part:
    value = choice if isinstance(choice, dict) else {}
    message = value.get("message")
    made = _message(message if isinstance(message, dict) else {"content": value.get("text")}, longest)
    reason = value.get("finish_reason")
    return {**made, "role": "assistant", "finish_reason": _text(reason or names.NO_FINISH, 64)}


def _message(message: object, longest: int) -> Part:
    value = message if isinstance(message, dict) else {}
    role = _text(value.get("role") or "user", 32)
    if role == "tool":
        result = {"type": "tool_call_response", "id": _text(value.get("tool_call_id") or "", 128)}
        return {"role": role, "parts": [{**result, "response": _text(_plain(value.get("content")), longest)}]}
    return {"role": role, "parts": list(_parts(value, longest))}


def _plain(content: object) -> object:
    """A list of text parts as one text; anything else as it is."""
    if isinstance(content, list) and all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in content):
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
    """One part of a message; of pictures and the like the kind alone, or the address if it is one."""
    kind = str(part.get("type"))
    if isinstance(part.get("text"), str):
        return {"type": "text", "content": _text(part["text"], longest)}
    if kind not in _MEDIA:
        return {"type": _text(kind, 32)}
    given = part.get(kind)
    address = given.get("url") if isinstance(given, dict) else None
    if isinstance(address, str) and not address.startswith("data:"):
        return {"type": "uri", "modality": _MEDIA[kind], "uri": _text(address.partition("?")[0], longest)}
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
    found: Part = {"type": _text(value.get("type") or "function", 32), "name": _text(own.get("name") or "", 128)}
    if isinstance(own.get("description"), str):
        found["description"] = _text(own["description"], longest)
    if isinstance(own.get("parameters"), dict) and len(shape := _text(own["parameters"], 16 * MAX_BYTES)) <= longest:
        found["parameters"] = _reread(shape)
    return found


def _reread(text: str) -> object:
    """JSON that was freed of credentials, as a value again; as text where that broke it."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def choices_in(body: bytes) -> Sequence[object]:
    """The choices of a whole completion; none if it cannot be read."""
    try:
        value = msgspec.json.decode(body)
    except (ValueError, RecursionError):
        return ()
    choices = value.get("choices") if isinstance(value, dict) else None
    return choices if isinstance(choices, list) else ()
