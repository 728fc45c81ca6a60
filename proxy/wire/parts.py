"""What is taken out of a message whose text stays: thinking that nobody reads any more, pictures and files."""

from collections.abc import Mapping, Sequence
from typing import Any

from policies.media import AUDIO_TYPES, FILE_TYPES, IMAGE_TYPES, VIDEO_TYPES, is_media, named_file
from proxy.wire.markers import markers_of

THINKING_TYPES = frozenset({"thinking", "redacted_thinking"})
REASONING_KEYS = ("reasoning_content", "reasoning")
LONGEST_NAME = 80


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
                return " ".join(said[:LONGEST_NAME].split()).replace("[", "(").replace("]", ")")
    return ""
