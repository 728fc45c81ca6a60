"""Messages of chat completions: what the planner sees of one, and what is taken out of one whose text stays.

A message is known by its digest, so that only messages never seen before are parsed, canonicalised and counted.
"""

import contextlib
import json
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

import msgspec

from policies import Body, Message, ToolCall
from policies.media import AUDIO_TYPES, FILE_TYPES, IMAGE_TYPES, VIDEO_TYPES, is_media, named_file
from proxy.wire.chat.markers import markers_of
from proxy.wire.raw import Raw, read_value, write_value

DIGEST_SIZE = 16
MARK = "weir"
KEEP_WORD = "DO_NOT_EVICT"
WORD_ROLES = frozenset({"system", "developer", "user", "assistant"})
THINKING_TYPES = frozenset({"thinking", "redacted_thinking"})
REASONING_KEYS = ("reasoning_content", "reasoning")
MAX_NAME_LEN = 80
_CANONICAL = msgspec.json.Encoder(order="sorted")

# What real clients change between two sends of the same message.
NOT_SEMANTIC = frozenset(
    {
        *("cache_control", "prompt_cache_breakpoint", "index", "id", "item_id", "call_id", "tool_call_id", "status"),
        *("annotations", "parsed", "parsed_arguments", "audio", "provider_specific_fields", "extra_content"),
        *("reasoning", "reasoning_content", "reasoning_details", "thinking_blocks", MARK),
    }
)


def read_message(raw: Raw) -> Mapping[str, Any]:
    """One message as a dict; empty if it is no object."""
    value = read_value(raw)
    return value if isinstance(value, dict) else {}


def unmarked(raw: Raw) -> bytes:
    """A message without Weir's own mark."""
    return write_value({k: v for k, v in read_message(raw).items() if k != MARK})


def message_of(value: Mapping[str, Any], tokens: int) -> tuple[Message, bool]:
    """The planner's view of a message, and whether it carries Weir's own mark, which has to be stripped."""
    role = value.get("role")
    role = role if isinstance(role, str) else ""
    content = value.get("content")
    message = Message(
        role=role,
        digest=digest_of(value),
        tokens=tokens,
        call_ids=tuple(_call_ids(value)),
        answers=answers if isinstance(answers := value.get("tool_call_id"), str) else None,
        keep=_keep(value, role, content),
        media=sum(not _is_text(p) for p in content) if isinstance(content, list) else 0,
    )
    return message, MARK in value


def _call_ids(value: Mapping[str, Any]) -> list[str]:
    calls = value.get("tool_calls")
    ids = [str(c.get("id", "")) for c in calls if isinstance(c, dict)] if isinstance(calls, list) else []
    legacy = value.get("function_call")
    return [*ids, f"function:{legacy.get('name', '')}"] if isinstance(legacy, dict) else ids


def _is_text(part: object) -> bool:
    return isinstance(part, str) or (isinstance(part, dict) and part.get("type") in ("text", "refusal"))


def _keep(value: Mapping[str, Any], role: str, content: object) -> bool | None:
    mark = value.get(MARK)
    if isinstance(mark, dict) and isinstance(mark.get("keep"), bool):
        return bool(mark["keep"])
    if role in WORD_ROLES and KEEP_WORD in _text(content):
        return True
    return None


def _text(content: object) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return ""
    texts = (
        p if isinstance(p, str) else p.get("text") or p.get("refusal") for p in content if isinstance(p, str | dict)
    )
    return "\n".join(t for t in texts if isinstance(t, str))


def body_of(value: Mapping[str, Any]) -> Body:
    """What a message says."""
    listed = value.get("tool_calls")
    calls = [_tool_call(c) for c in listed if isinstance(c, dict)] if isinstance(listed, list) else []
    legacy = value.get("function_call")
    if isinstance(legacy, dict):
        name = str(legacy.get("name", ""))
        calls.append(ToolCall(f"function:{name}", name, str(legacy.get("arguments", ""))))
    content = value.get("content")
    speaker = value.get("name")
    return Body(
        text=_text(content),
        calls=tuple(calls),
        reasoning=reasoning_of(value),
        media=sum(not _is_text(p) for p in content) if isinstance(content, list) else 0,
        name=speaker if isinstance(speaker, str) else "",
        attached=attached(value),
    )


def _tool_call(call: Mapping[str, Any]) -> ToolCall:
    inner = call.get("function") or call.get("custom")
    inner = inner if isinstance(inner, dict) else {}
    arguments = inner.get("arguments", inner.get("input", ""))
    return ToolCall(
        str(call.get("id", "")),
        str(inner.get("name", "")),
        arguments if isinstance(arguments, str) else json.dumps(arguments),
    )


def digest_of(value: Mapping[str, Any]) -> bytes:
    """Canonical BLAKE2b digest of a message, 16 bytes.

    A string equals a single text part; null, "" and absent are one; keys that clients change between turns do
    not count; arguments of tool calls are compared as JSON where they parse.
    """
    canonical = {
        k: _canonical(v) for k, v in value.items() if k not in NOT_SEMANTIC and k not in ("content", "tool_calls")
    }
    content = _canonical_content(value.get("content"))
    calls = value.get("tool_calls")
    if content:
        canonical["content"] = content
    if isinstance(calls, list) and calls:
        canonical["tool_calls"] = [_canonical_call(c) for c in calls]
    canonical = {k: v for k, v in canonical.items() if v not in (None, "", [], {})}
    return blake2b(_sorted(canonical), digest_size=DIGEST_SIZE).digest()


def _sorted(value: object) -> bytes:
    try:
        return _CANONICAL.encode(value)
    except (ValueError, TypeError, RecursionError):  # a lone surrogate, a number of many digits
        return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


def _canonical(value: object) -> object:
    if isinstance(value, dict):
        return {k: _canonical(v) for k, v in value.items() if k not in NOT_SEMANTIC}
    if isinstance(value, list):
        return [_canonical(v) for v in value]
    return value


def _canonical_content(content: object) -> object:
    if isinstance(content, list):
        if len(content) == 1 and _is_text(content[0]):
            return _text(content)
        return [_canonical(p) for p in content]
    return content or ""


def _canonical_call(call: object) -> object:
    if not isinstance(call, dict):
        return call
    inner = call.get("function") or call.get("custom")
    if not isinstance(inner, dict):
        return _canonical(call)
    arguments = inner.get("arguments", inner.get("input"))
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):
            arguments = json.loads(arguments)
    return [inner.get("name"), arguments]


def reasoning_of(value: Mapping[str, Any]) -> str:
    """The thinking that :func:`without_reasoning` would take out, as far as it is text.

    Nothing where the message carries ``reasoning_details``: OpenRouter wants those back unmodified, and they say the
    same again.
    """
    if value.get("reasoning_details"):
        return ""
    named = next((v for key in REASONING_KEYS if isinstance(v := value.get(key), str) and v), "")
    thoughts = [p.get("thinking") for p in _parts(value) if p.get("type") in THINKING_TYPES]
    return "\n".join(text for text in (named, *thoughts) if isinstance(text, str) and text)


def without_reasoning(value: Mapping[str, Any]) -> dict[str, Any]:
    """The message without its thinking.

    The key stays with an empty string, because DeepSeek and Kimi refuse an assistant message without it; parts of
    type ``thinking`` go, unless nothing would be left of the content.
    """
    new = dict(value)
    if new.get("reasoning_details"):
        return new
    for key in REASONING_KEYS:
        if isinstance(new.get(key), str):
            new[key] = ""
    content = new.get("content")
    if isinstance(content, list):
        kept = [p for p in content if not (isinstance(p, dict) and p.get("type") in THINKING_TYPES)]
        if len(kept) < len(content) and (kept or new.get("tool_calls")):
            new["content"] = kept or None
    new.pop("thinking_blocks", None)
    return new


def without_media(value: Mapping[str, Any], lines: Sequence[str]) -> dict[str, Any]:
    """The message with a text part for each image, audio, video or file: its line, the last line for what has none.

    A cache marker on such a part stays on the text that takes its place.
    """
    new, left = dict(value), list(lines) or [""]
    content = new.get("content")
    if isinstance(content, list):
        new["content"] = [
            {"type": "text", "text": left.pop(0) if len(left) > 1 else left[0], **markers_of(part)}
            if _is_media(part)
            else part
            for part in content
        ]
    return new


def attached(value: Mapping[str, Any]) -> tuple[str, ...]:
    """What each image, audio, video or file of a message is: its kind, and its type, name or address where known."""
    return tuple(_named(part) for part in _parts(value) if _is_media(part))


def named_files(value: Mapping[str, Any]) -> list[str]:
    """The ids and addresses of a message's files whose content is elsewhere."""
    return [name for part in _parts(value) if (name := named_file(part))]


def _parts(value: Mapping[str, Any]) -> list[dict[str, Any]]:
    content = value.get("content")
    return [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []


def _is_media(part: object) -> bool:
    return isinstance(part, dict) and is_media(part)


def _named(part: Mapping[str, Any]) -> str:
    form = part.get("type")
    kinds = ((IMAGE_TYPES, "image"), (AUDIO_TYPES, "audio"), (VIDEO_TYPES, "video"), (FILE_TYPES, "file"))
    kind = next((name for types, name in kinds if form in types), "file")
    detail = _detail(part)
    return f"{kind} {detail}" if detail else kind


def _detail(part: Mapping[str, Any]) -> str:
    """A file's name, an address without its query, the type of a data URL, a format; empty where nothing says it."""
    inner = part.get(str(part.get("type")))
    for holder in (inner, part.get("source"), part):
        if isinstance(holder, str):
            holder = {"url": holder}
        if not isinstance(holder, Mapping):
            continue
        for key in ("filename", "title", "url", "image_url", "media_type", "format", "file_id"):
            said = holder.get(key)
            if isinstance(said, str) and said:
                said = said[5:].split(";")[0].split(",")[0] if said[:5] == "data:" else said.split("?")[0]
                return " ".join(said[:MAX_NAME_LEN].split()).replace("[", "(").replace("]", ")")
    return ""
