"""A chat completions request: the client's bytes, its fields as raw slices, and its tools."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

from proxy.errors import InvalidRequest
from proxy.wire.chat.markers import marked_message
from proxy.wire.raw import Raw, read_value, replace_fields, split_array, split_object, write_value

TOOL_FIELDS = ("tools", "functions")


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
