"""A chat completions request: the client's bytes, and what planning needs to know of them.

Messages are taken as raw slices. A slice leads through an in-memory cache to its digest, tokens and marks, so
that only messages never seen before are parsed, canonicalised and counted.
"""

import contextlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, overload

import msgspec

from policies import Body, EditKind, Message, Piece, ToolCall
from proxy.errors import InvalidRequest
from proxy.wire.markers import content_with, marked_message, marker_for_summary, marker_within
from proxy.wire.parts import attached, reasoning_of, without_media, without_reasoning
from proxy.wire.raw import Raw, read_value, replace_fields, split_array, split_object, write_value

DIGEST_SIZE = 16
MARK = "weir"
TOOL_FIELDS = ("tools", "functions")
KEEP_WORD = "DO_NOT_EVICT"

_CANONICAL = msgspec.json.Encoder(order="sorted")
WORD_ROLES = frozenset({"system", "developer", "user", "assistant"})

# What real clients change between two sends of the same message.
NOT_SEMANTIC = frozenset(
    {
        "cache_control",
        "index",
        "id",
        "item_id",
        "call_id",
        "tool_call_id",
        "status",
        "annotations",
        "parsed",
        "parsed_arguments",
        "audio",
        "provider_specific_fields",
        "extra_content",
        "prompt_cache_breakpoint",
        "reasoning",
        "reasoning_content",
        "reasoning_details",
        "thinking_blocks",
        MARK,
    }
)


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """One request as it came: ``fields`` are raw slices of ``body``, ``messages`` raw slices of that field.

    ``messages`` is None where the request has no array there; such a request is relayed untouched.
    """

    body: bytes
    fields: Mapping[str, Raw]
    messages: "MessageArray | None"
    model: str
    stream: bool
    max_tokens: int | None

    def value(self, name: str) -> Any:
        """One field as Python values, None if it is absent."""
        raw = self.fields.get(name)
        return None if raw is None else read_value(raw)


def parse_chat(body: bytes) -> ChatRequest:
    """The request in ``body``. Raises InvalidJSON or InvalidRequest."""
    fields = split_object(body)
    model = read_value(fields["model"]) if "model" in fields else None
    if model is not None and not isinstance(model, str):
        raise InvalidRequest("model must be a string.", param="model")
    raw = fields.get("messages")
    return ChatRequest(
        body=body,
        fields=fields,
        messages=MessageArray(raw) if raw is not None and bytes(memoryview(raw)[:1]) == b"[" else None,
        model=model or "",
        stream="stream" in fields and read_value(fields["stream"]) is True,
        max_tokens=_output_limit(fields),
    )


class MessageArray(Sequence[Raw]):
    """The elements of ``messages`` as slices, split when they are first needed: most were seen before."""

    def __init__(self, raw: Raw) -> None:
        self.raw = memoryview(raw)
        self._items: Sequence[Raw] | None = None

    def __len__(self) -> int:
        return len(self._split())

    def __bool__(self) -> bool:
        return len(self.raw) > len(b"[  ]") or len(self) > 0

    @overload
    def __getitem__(self, index: int) -> Raw: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Raw]: ...
    def __getitem__(self, index: int | slice) -> Raw | Sequence[Raw]:
        return self._split()[index]

    def after(self, size: int) -> Sequence[Raw]:
        """The elements that follow the first ``size`` bytes, which end with an element."""
        rest = bytes(self.raw[size:]).lstrip()
        return split_array(b"[" + rest[1:]) or () if rest[:1] == b"," else ()

    def _split(self) -> Sequence[Raw]:
        if self._items is None:
            self._items = split_array(bytes(self.raw)) or ()
        return self._items


def _output_limit(fields: Mapping[str, Raw]) -> int | None:
    """The client's ``max_completion_tokens`` or ``max_tokens`` where it is a sensible number."""
    for name in ("max_completion_tokens", "max_tokens"):
        value = read_value(fields[name]) if name in fields else None
        if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**31:
            return value
    return None


def rewritten(
    request: ChatRequest,
    *,
    messages: Sequence[Raw] | None,
    pruned: Collection[str],
    head: int = 0,
    marker: Mapping[str, Any] = {},
) -> bytes:
    """The body without the definitions of tools of these names; other ``messages``, unless None keeps their bytes.

    A ``marker`` stands behind tools and the ``head`` messages of the system.
    """
    new = _without_tools(request, pruned) if pruned else {}
    if marker:
        whole = list(messages if messages is not None else request.messages or ())
        if head and (marked := marked_message(whole[head - 1], marker)) is not None:
            messages = [*whole[: head - 1], marked, *whole[head:]]
        elif defined := split_array(new.get("tools", request.fields.get("tools", b"[]"))):
            last = read_value(defined[-1])
            if isinstance(last, dict):
                new["tools"] = _array([*defined[:-1], write_value({**last, **marker})])
    if messages is not None:
        new["messages"] = _array(messages)
    return replace_fields(request.body, request.fields, new) if new else request.body


def without_field(request: ChatRequest, name: str) -> ChatRequest:
    """The request without one of its fields; the values of the others keep their bytes."""
    kept = {key: bytes(raw) for key, raw in request.fields.items() if key != name}
    return parse_chat(b"{" + b",".join(write_value(key) + b":" + raw for key, raw in kept.items()) + b"}")


def _array(items: Sequence[Raw]) -> bytes:
    return b"[" + b",".join(items) + b"]"


def _without_tools(request: ChatRequest, pruned: Collection[str]) -> dict[str, bytes]:
    """The fields with definitions, less the pruned ones; an upstream refuses an empty list, so one always stays."""
    new: dict[str, bytes] = {}
    for field in TOOL_FIELDS:
        items = _definitions(request, field)
        kept = [raw for raw in items if tool_name(read_value(raw)) not in pruned]
        if len(kept) < len(items):
            new[field] = _array(kept or items[:1])
    return new


def _definitions(request: ChatRequest, field: str) -> Sequence[Raw]:
    raw = request.fields.get(field)
    return () if raw is None else split_array(raw) or ()


def tool_name(definition: object) -> str:
    """The name that calls of a tool use; empty for what is no definition of a function or custom tool."""
    name = _described(definition).get("name")
    return name if isinstance(name, str) else ""


def tool_description(definition: object) -> str:
    """What a definition says of its tool; empty where it says nothing."""
    text = _described(definition).get("description")
    return text if isinstance(text, str) else ""


def _described(definition: object) -> Mapping[str, Any]:
    """The object that holds name and description: the definition's own, or the one inside it."""
    if not isinstance(definition, dict):
        return {}
    inner = definition.get("function") or definition.get("custom")
    return inner if isinstance(inner, dict) else definition


def tool_definitions(request: ChatRequest) -> dict[str, list[Raw]]:
    """The definitions of tools and legacy functions as the client sent them, by name."""
    found: dict[str, list[Raw]] = {}
    for field in TOOL_FIELDS:
        for raw in _definitions(request, field):
            if name := tool_name(read_value(raw)):
                found.setdefault(name, []).append(raw)
    return found


def chosen_tools(request: ChatRequest) -> frozenset[str]:
    """Every name in ``tool_choice`` and ``function_call``: the one asked for, or those that are allowed."""
    waiting: list[Any] = [request.value(field) for field in ("tool_choice", "function_call") if field in request.fields]
    found = set[str]()
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            found.add(value)
        elif isinstance(value, dict):
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value
    return frozenset(found)


def with_fields(body: bytes, **values: object) -> bytes:
    """``body`` with other values for some scalar fields, everything else byte for byte."""
    return replace_fields(body, split_object(body), {k: write_value(v) for k, v in values.items()})


def read_message(raw: Raw) -> Mapping[str, Any]:
    """One message as a dict; empty if it is no object."""
    value = read_value(raw)
    return value if isinstance(value, dict) else {}


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
        answers=_text_or_none(value.get("tool_call_id")),
        keep=_keep(value, role, content),
        media=sum(not _is_text(p) for p in content) if isinstance(content, list) else 0,
    )
    return message, MARK in value


def _call_ids(value: Mapping[str, Any]) -> list[str]:
    calls = value.get("tool_calls")
    ids = [str(c.get("id", "")) for c in calls if isinstance(c, dict)] if isinstance(calls, list) else []
    legacy = value.get("function_call")
    return [*ids, f"function:{legacy.get('name', '')}"] if isinstance(legacy, dict) else ids


def _text_or_none(value: object) -> str | None:
    return value if isinstance(value, str) else None


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
    """A value as JSON with sorted keys, the same bytes for the same value."""
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


def render(
    pieces: Sequence[Piece], messages: Sequence[Raw], marked: frozenset[int], *, role: str = "user"
) -> list[Raw]:
    """The raw slices of a planned array: the client's own bytes wherever a message was not replaced.

    ``marked`` are the indices of messages with Weir's own mark, which is taken out. Cache markers stay on what
    replaces their block. A summary is a message of ``role`` user or system; with ``system_append`` it is added to the
    first system message, and is a user's where there is none.
    """
    rendered = [
        b"" if piece.index is None else _render(piece, messages[piece.index], marked=piece.index in marked)
        for piece in pieces
    ]
    own = [n for n, piece in enumerate(pieces) if piece.index is None]
    for n in own:
        markers = marker_for_summary(pieces, messages) if pieces[n].is_summary else {}
        rendered[n] = _render_own(pieces[n], markers, role=role if pieces[n].is_summary else "user")
    if own and role == "system_append":
        return _appended(pieces, rendered)
    return rendered


def _render_own(piece: Piece, markers: Mapping[str, Any], *, role: str) -> Raw:
    role = "system" if role == "system" else "user"
    return write_value({"role": role, "content": content_with(piece.text or "", markers)})


def _appended(pieces: Sequence[Piece], rendered: list[Raw]) -> list[Raw]:
    """The array with its summary as the last part of the first system message; as it is where there is none."""
    value = dict(read_message(rendered[0]))
    place = next((n for n, piece in enumerate(pieces) if piece.is_summary), None)
    if value.get("role") not in ("system", "developer") or place is None:
        return rendered
    content, text = value.get("content"), pieces[place].text or ""
    if isinstance(content, list):
        value["content"] = [*content, {"type": "text", "text": text}]
    else:
        value["content"] = f"{content or ''}\n\n{text}"
    return [write_value(value), *(raw for n, raw in enumerate(rendered[1:], 1) if n != place)]


def _render(piece: Piece, raw: Raw, *, marked: bool) -> Raw:
    if piece.text is None:
        return unmarked(raw) if marked else raw
    value = dict(read_message(raw))
    value.pop(MARK, None)
    if piece.kind is EditKind.REASONING:
        value = without_reasoning(value)
    elif piece.kind is EditKind.MEDIA:
        value = without_media(value, piece.text.split("\n"))
    else:
        value["content"] = content_with(piece.text, marker_within(value))
    return write_value(value)


def unmarked(raw: Raw) -> bytes:
    """A message without Weir's own mark."""
    return write_value({k: v for k, v in read_message(raw).items() if k != MARK})
