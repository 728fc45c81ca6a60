"""An answer put together from its body or its stream, as the elements that it adds to the history."""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from proxy.wire.raw import Decoder, Raw, read_value, split_array, split_object, write_value

_KEPT = frozenset({"response.completed", "response.incomplete"})


class GivenAnswer(NamedTuple):
    """A whole answer: the ``elements`` that it adds to the array, with commas between, and its ``usage`` object."""

    id: str
    elements: bytes
    usage: object = None


def response_in(body: bytes) -> GivenAnswer | None:
    whole: Mapping[str, Raw] = split_object(body) if _is_object(body) else _last_response(body)
    identity = read_value(whole.get("id", b"null"))
    if not isinstance(identity, str) or read_value(whole.get("status", b"null")) not in ("completed", "incomplete"):
        return None
    output = split_array(whole.get("output", b"[]")) or _items_done(body)
    return GivenAnswer(id=identity, elements=b",".join(output), usage=read_value(whole.get("usage", b"null")))


def begun_as(body: bytes) -> str | None:
    first = None if _is_object(body) else next(iter(Decoder().feed(body[: body.find(b"\n\n") + 2])), None)
    event = read_value(first.data) if first is not None else None
    response = event.get("response") if isinstance(event, dict) else None
    name = response.get("id") if isinstance(response, dict) else None
    return name if isinstance(name, str) else None


def _is_object(body: bytes) -> bool:
    return body.lstrip()[:1] == b"{"


def _last_response(stream: bytes) -> Mapping[str, Raw]:
    start = stream.rfind(b"\ndata:", 0, stream.rfind(b'"response"') + 1)
    events = Decoder().feed(stream[start + 1 :] + b"\n\n") if start >= 0 else []
    last = split_object(events[0].data) if events and events[0].data[:1] == b"{" else {}
    is_kept = read_value(last.get("type", b"null")) in _KEPT
    return split_object(bytes(last.get("response", b"{}"))) if is_kept else {}


def _items_done(stream: bytes) -> list[Raw]:
    if _is_object(stream):
        return []
    events = (event for event in Decoder().feed(stream) if event.name == b"response.output_item.done")
    return [item for event in events if (item := split_object(event.data).get("item")) is not None]


def message_in(body: bytes) -> GivenAnswer | None:
    if not _is_object(body):
        return _streamed(body)
    whole = split_object(body)
    identity = read_value(whole.get("id", b"null"))
    if not isinstance(identity, str) or bytes(whole.get("type", b"")) != b'"message"':
        return None
    return _message(identity, bytes(whole.get("content", b"[]")), read_value(whole.get("usage", b"null")))


def _message(identity: str, content: bytes, usage: object) -> GivenAnswer:
    return GivenAnswer(id=identity, elements=b'{"role":"assistant","content":' + content + b"}", usage=usage)


def _streamed(stream: bytes) -> GivenAnswer | None:
    identity, usage, blocks, parts = None, dict[str, Any](), list[dict[str, Any]](), list[str]()
    for event in Decoder().feed(stream + b"\n\n"):
        value = read_value(event.data)
        kind, value = (value.get("type"), value) if isinstance(value, dict) else (None, {})
        if kind == "message_start":
            identity, usage = value["message"].get("id"), dict(value["message"].get("usage") or {})
        elif kind == "content_block_start":
            blocks.append(dict(value["content_block"]))
            parts.clear()
        elif kind == "content_block_delta" and blocks:
            _add(blocks[-1], value["delta"], parts)
        elif kind == "content_block_stop" and parts:
            blocks[-1]["input"] = json.loads("".join(parts))
            parts.clear()
        elif kind == "message_delta":
            usage |= {name: said for name, said in (value.get("usage") or {}).items() if said is not None}
        elif kind == "message_stop" and isinstance(identity, str):
            return _message(identity, write_value(blocks), usage)
    return None


def _add(block: dict[str, Any], delta: Mapping[str, Any], parts: list[str]) -> None:
    for name, more in delta.items():
        if name == "partial_json":
            parts.append(more)
        elif name == "citation":
            block["citations"] = [*(block.get("citations") or ()), more]
        elif isinstance(more, str) and name != "type":
            block[name] = (block.get(name) or "") + more
