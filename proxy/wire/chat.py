"""A chat message as it is read: what planning has to know of it, its digest, its cache markers.

Anthropic's ``cache_control`` and OpenAI's ``prompt_cache_breakpoint`` are on parts of a message's
content. Anthropic takes four in a request at most, and none that lives an hour after one that lives
five minutes (its page on prompt caching). So there are never more than the client sent, unless the
policy adds one:

* content that is replaced keeps its last marker;
* the marker of a message that a summary covers goes to the summary, if the order of lifetimes
  allows it there;
* with what is dropped without a summary its marker goes too.
"""

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from typing import Any

import msgspec

from policies.ledger import PlannedMessage
from policies.lines import in_one_line
from policies.messages import RESULT_ROLES, Body, Message, ToolCall
from policies.tokens import AUDIO_TYPES, FILE_TYPES, IMAGE_TYPES, VIDEO_TYPES, is_media, named_file
from proxy.wire.raw import Raw, read_value, write_value

MARKERS = ("cache_control", "prompt_cache_breakpoint")
_WORDS = tuple(f'"{name}"'.encode() for name in MARKERS)
HOUR = 3_600
MINUTES = 300


def dicts_in(items: object) -> list[dict[str, Any]]:
    """The objects of what may be a list."""
    return [each for each in items if isinstance(each, dict)] if isinstance(items, list) else []


def markers_of(block: Mapping[str, Any]) -> dict[str, Any]:
    return {name: block[name] for name in MARKERS if block.get(name) is not None}


def marker_within(content: object) -> dict[str, Any]:
    return next((found for part in reversed(dicts_in(content)) if (found := markers_of(part))), {})


def content_with(text: str, markers: Mapping[str, Any]) -> str | list[dict[str, Any]]:
    """``text`` as a message's content: one part that carries the markers, a string where there are
    none.

    Empty text stays a string: Anthropic refuses an empty block, with a marker above all.
    """
    return [{"type": "text", "text": text, **markers}] if text and markers else text


def marker_for_summary(pieces: Sequence[PlannedMessage], messages: Sequence[Raw]) -> dict[str, Any]:
    """The markers that a summary takes over: those of the last marked message that is not in the
    array any more.

    Empty if there is no summary or no such message, or if a marker that lives an hour would follow
    one that lives five minutes.
    """
    place = next((n for n, piece in enumerate(pieces) if piece.is_summary), None)
    if place is None:
        return {}
    kept = {piece.index for piece in pieces}
    gone = [messages[index] for index in range(len(messages) - 1, -1, -1) if index not in kept]
    # one search in all of it takes a fraction of the time of one in each
    if not _has_words(b"".join(gone)):
        return {}
    found = next((all_of[-1] for raw in gone if (all_of := _all_markers(raw))), None)
    if found is None:
        return {}
    mine = _lifetime(found)
    before, after = (
        [
            _lifetime(each)
            for piece in side
            if piece.index is not None
            for each in _all_markers(messages[piece.index])
        ]
        for side in (pieces[:place], pieces[place:])
    )
    return found if min(before, default=HOUR) >= mine >= max(after, default=MINUTES) else {}


def _all_markers(raw: Raw) -> list[dict[str, Any]]:
    if not _has_words(bytes(raw)):
        return []
    elements = read_value(b"[" + raw + b"]")
    blocks = (
        (block for value in elements for block in _blocks(value))
        if isinstance(elements, list)
        else ()
    )
    return [found for block in blocks if (found := markers_of(block))]


def _has_words(data: bytes) -> bool:
    """Whether a marker's name is in these bytes at all; CPython searches from the end in half the
    time.
    """
    return any(data.rfind(word) >= 0 for word in _WORDS)


def _blocks(value: object) -> Sequence[Mapping[str, Any]]:
    return (*dicts_in(value.get("content")), value) if isinstance(value, dict) else ()


def _lifetime(markers: Mapping[str, Any]) -> int:
    control = markers.get("cache_control")
    return HOUR if isinstance(control, dict) and control.get("ttl") == "1h" else MINUTES


def breakpoint_for(lifetime: str, body: bytes) -> dict[str, Any]:
    if lifetime == "off" or _has_words(body):
        return {}
    return {"cache_control": {"type": "ephemeral"} | ({"ttl": "1h"} if lifetime == "1h" else {})}


def marked_message(raw: Raw, marker: Mapping[str, Any]) -> bytes | None:
    value = read_value(raw)
    content = value.get("content") if isinstance(value, dict) else None
    if not isinstance(value, dict) or not content:
        return None
    if isinstance(content, str):
        return write_value(value | {"content": content_with(content, marker)})
    last = content[-1] if isinstance(content, list) else None
    if not isinstance(last, dict) or not last.get("text"):
        return None
    return write_value(value | {"content": [*content[:-1], {**last, **marker}]})


DIGEST_SIZE = 16
HELD = 2_047
MARK = "weir"
SEALED = "sealed_tokens"
"""Where the view of a message says what a part of it costs that only the provider can read."""
KEEP_WORD = "DO_NOT_EVICT"
WORD_ROLES = frozenset({"system", "developer", "user", "assistant"})
THINKING_TYPES = frozenset({"thinking", "redacted_thinking"})
REASONING_KEYS = ("reasoning_content", "reasoning")
MAX_NAME_LEN = 80
PLAIN = frozenset({"role", "content", "tool_call_id"})
OWN_TYPES = frozenset({"text", "input_text", "output_text", "refusal"})
"""Parts that hold a speaker's own words."""
_CANONICAL = msgspec.json.Encoder(order="sorted")

# What real clients change between two sends of the same message.
NOT_SEMANTIC = frozenset(
    {
        *(
            "cache_control",
            "prompt_cache_breakpoint",
            "index",
            "id",
            "item_id",
            "call_id",
            "tool_call_id",
            "status",
        ),
        *(
            "annotations",
            "parsed",
            "parsed_arguments",
            "audio",
            "provider_specific_fields",
            "extra_content",
        ),
        *("reasoning", "reasoning_content", "reasoning_details", "thinking_blocks", MARK, SEALED),
    }
)


def read_message(raw: Raw) -> Mapping[str, Any]:
    value = read_value(raw)
    return value if isinstance(value, dict) else {}


def read_messages(raws: Sequence[Raw]) -> Sequence[Mapping[str, Any]]:
    """Messages read at once, as each is by itself where that fails: what one says must not depend
    on its neighbours.
    """
    try:
        values = msgspec.json.decode(b"[" + b",".join(raws) + b"]")
    except (ValueError, RecursionError):
        return [read_message(raw) for raw in raws]
    return [value if type(value) is dict else {} for value in values]


def message_of(value: Mapping[str, Any], tokens: int) -> Message:
    role = value.get("role")
    content = value.get("content")
    answers = value.get("tool_call_id")
    answers = answers if isinstance(answers, str) else None
    if content and role and type(content) is type(role) is str and value.keys() <= PLAIN:
        keep = True if role in WORD_ROLES and KEEP_WORD in content else None
        digest = _hashed({"role": role, "content": content})
        return Message(role=role, digest=digest, tokens=tokens, answers=answers, keep=keep)
    role = role if isinstance(role, str) else ""
    return Message(
        role=role,
        digest=digest_of(value),
        tokens=tokens,
        call_ids=tuple(_call_ids(value))
        if "tool_calls" in value or "function_call" in value
        else (),
        answers=answers,
        keep=_keep(value, role, content),
        media=_media_in(content),
        thought=_thought(value, tokens) if SEALED in value else 0,
    )


def _thought(value: Mapping[str, Any], tokens: int) -> int:
    return max(
        1, min(tokens - 1, int(value[SEALED]) + len(str(value.get("reasoning_content") or "")) // 4)
    )


def _call_ids(value: Mapping[str, Any]) -> list[str]:
    ids = [str(call.get("id", "")) for call in dicts_in(value.get("tool_calls"))]
    legacy = value.get("function_call")
    return [*ids, f"function:{legacy.get('name', '')}"] if isinstance(legacy, dict) else ids


def _is_text(part: object) -> bool:
    return isinstance(part, str) or (
        isinstance(part, dict) and part.get("type") in ("text", "refusal")
    )


def _keep(value: Mapping[str, Any], role: str, content: object) -> bool | None:
    mark = value.get(MARK)
    if isinstance(mark, dict) and isinstance(mark.get("keep"), bool):
        return bool(mark["keep"])
    return True if role in WORD_ROLES and KEEP_WORD in _text(content, is_own) else None


def is_own(part: object) -> bool:
    """Whether a part of a content is its speaker's own words; an unknown part is data."""
    return isinstance(part, str) or (isinstance(part, dict) and part.get("type") in OWN_TYPES)


def _is_data(part: object) -> bool:
    return not is_own(part)


def _text(content: object, of: Callable[[object], bool] | None = None) -> str:
    if isinstance(content, str):
        return content if of is not _is_data else ""
    if not isinstance(content, list):
        return ""
    parts = (p for p in content if isinstance(p, str | dict) and (of is None or of(p)))
    texts = (p if isinstance(p, str) else _said(p) for p in parts)
    return "\n".join(t for t in texts if isinstance(t, str))


def _media_in(content: object) -> int:
    parts = content if isinstance(content, list) else ()
    return sum(not (_is_text(part) or (isinstance(part, dict) and _said(part))) for part in parts)


def _said(part: Mapping[str, Any]) -> object:
    """What a part says; a ``search_result`` of Anthropic's, and a ``document`` that came as text,
    say it further in.
    """
    kind = part.get("type")
    source = part.get("source")
    if kind == "search_result":
        source = part
    elif (
        kind != "document"
        or not isinstance(source, Mapping)
        or source.get("type") not in ("text", "content")
    ):
        return part.get("text") or part.get("refusal")
    said = (part.get("title"), source.get("data"), _text(source.get("content")))
    return "\n".join(text for text in said if isinstance(text, str) and text)


def body_of(value: Mapping[str, Any]) -> Body:
    calls = [*map(_tool_call, dicts_in(value.get("tool_calls")))]
    legacy = value.get("function_call")
    if isinstance(legacy, dict):
        name = str(legacy.get("name", ""))
        calls.append(ToolCall(f"function:{name}", name, str(legacy.get("arguments", ""))))
    content = value.get("content")
    speaker = value.get("name")
    is_result = value.get("role") in RESULT_ROLES
    return Body(
        text=_text(content, None if is_result else is_own),
        calls=tuple(calls),
        reasoning=reasoning_of(value),
        media=_media_in(content),
        name=speaker if isinstance(speaker, str) else "",
        attached=attached(value),
        data="" if is_result else _text(content, _is_data),
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

    A string equals a single text part; null, "" and absent are one; keys that clients change
    between turns do not count; arguments of tool calls are compared as JSON where they parse.
    """
    canonical: dict[str, object] = {}
    for name, said in value.items():
        if name == "tool_calls":
            said = [_canonical_call(call) for call in said] if isinstance(said, list) else None
        elif name in NOT_SEMANTIC:
            continue
        elif not isinstance(said, str):
            said = _canonical_content(said) if name == "content" else _canonical(said)
        if said or (isinstance(said, int | float) and name != "content"):
            canonical[name] = said
    return _hashed(canonical)


def _hashed(value: object) -> bytes:
    try:
        data = _CANONICAL.encode(value)
    except (ValueError, TypeError, RecursionError):  # a lone surrogate, a number of many digits
        data = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()
    digest = blake2b(data[:HELD], digest_size=DIGEST_SIZE)
    # with more at once hashlib lets go of the interpreter, and waits for it
    for start in range(HELD, len(data), HELD):
        digest.update(data[start : start + HELD])
    return digest.digest()


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
        try:
            arguments = msgspec.json.decode(arguments)
        except (ValueError, RecursionError):  # NaN, or half of a character
            with contextlib.suppress(ValueError, RecursionError):
                arguments = json.loads(arguments)
    return [inner.get("name"), arguments]


def reasoning_of(value: Mapping[str, Any]) -> str:
    """The thinking that :func:`without_reasoning` would take out, as far as it is text.

    Nothing where the message carries ``reasoning_details``: OpenRouter wants those back unmodified,
    and they say the same again.
    """
    if value.get("reasoning_details"):
        return ""
    named = next((v for key in REASONING_KEYS if isinstance(v := value.get(key), str) and v), "")
    thoughts = [
        p.get("thinking") for p in dicts_in(value.get("content")) if p.get("type") in THINKING_TYPES
    ]
    return "\n".join(text for text in (named, *thoughts) if isinstance(text, str) and text)


def without_reasoning(value: Mapping[str, Any]) -> dict[str, Any]:
    """The message without its thinking.

    The key stays with an empty string, because DeepSeek and Kimi refuse an assistant message
    without it; parts of type ``thinking`` go, unless nothing would be left of the content.
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
    """The message with a text part for each image, audio, video or file: its line, the last line
    for what has none.

    A cache marker on such a part stays on the text that takes its place.
    """
    return (
        {**value, "content": with_lines(value["content"], lines, _is_media)}
        if "content" in value
        else dict(value)
    )


def with_lines(
    content: object,
    lines: Sequence[str],
    is_media: Callable[[object], bool],
    text_type: str = "text",
) -> object:
    """Content with a line of text in place of each part that is media."""
    left = list(lines) or [""]
    if not isinstance(content, list):
        return content
    return [
        {"type": text_type, "text": left.pop(0) if len(left) > 1 else left[0], **markers_of(part)}
        if is_media(part)
        else part
        for part in content
    ]


def reply_of(
    content: object, calls: Sequence[Any], thoughts: Sequence[str], sealed: float
) -> dict[str, Any]:
    """An assistant's message; ``sealed`` tokens of it only the provider can read."""
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if calls:
        message["tool_calls"] = calls
    if any(thoughts):
        message["reasoning_content"] = "\n".join(filter(None, thoughts))
    if sealed:
        message[SEALED] = int(sealed)
    return message


def attached(value: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(map(_named, media_in(value)))


def media_in(value: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The parts of a message's content that are images, recordings or files."""
    return [part for part in dicts_in(value.get("content")) if is_media(part)]


def named_files(value: Mapping[str, Any]) -> list[str]:
    return [name for part in dicts_in(value.get("content")) if (name := named_file(part))]


def _is_media(part: object) -> bool:
    return isinstance(part, dict) and is_media(part)


def _named(part: Mapping[str, Any]) -> str:
    form = part.get("type")
    kinds = (
        (IMAGE_TYPES, "image"),
        (AUDIO_TYPES, "audio"),
        (VIDEO_TYPES, "video"),
        (FILE_TYPES, "file"),
    )
    kind = next((name for types, name in kinds if form in types), "file")
    detail = _detail(part)
    return f"{kind} {detail}" if detail else kind


def _detail(part: Mapping[str, Any]) -> str:
    inner = part.get(str(part.get("type")))
    for holder in (inner, part.get("source"), part):
        if isinstance(holder, str):
            holder = {"url": holder}
        if not isinstance(holder, Mapping):
            continue
        for key in ("filename", "title", "url", "image_url", "media_type", "format", "file_id"):
            said = holder.get(key)
            if isinstance(said, str) and said:
                said = (
                    said[5:].split(";")[0].split(",")[0]
                    if said[:5] == "data:"
                    else said.split("?")[0]
                )
                return in_one_line(" ".join(said[:MAX_NAME_LEN].split()))
    return ""
