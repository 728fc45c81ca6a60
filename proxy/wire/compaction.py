"""Compactions of Weir's own: an item, or a block, that stands for a history, for upstreams that make none.

What it stands for is sealed in it, so it holds as long as its client has it, in every process, whatever is stored.
On the way up a message with that text takes its place: no upstream could read it.
"""

import base64
import hmac
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from policies.summary.material import inside
from proxy.errors import InvalidRequest
from proxy.wire.anthropic import raw_blocks, with_content
from proxy.wire.codec import OWN, ClientRequest, array_of, first_object, message_of
from proxy.wire.raw import Raw, read_value, replace_fields, split_array, write_value
from proxy.wire.responses import RESPONSES

COMPACTION = "compaction"
MAX_TEXT = 4 * 2**20
SAID = frozenset({"user", "system", "developer"})
DECLARES = frozenset({"additional_tools", "configuration_update"})

Unseal = Callable[[str], str]


def seal(text: str, *, tenant: str, secret: bytes) -> str:
    data = text.encode("utf-8", "replace")
    return OWN.decode() + _mark(data, tenant, secret) + ":" + base64.urlsafe_b64encode(zlib.compress(data)).decode()


def unseal(sealed: str, *, tenant: str, secret: bytes) -> str:
    """The text again. Raises InvalidRequest where it is another tenant's, or not as it was given."""
    mark, _, packed = sealed.removeprefix(OWN.decode()).partition(":")
    try:
        data = zlib.decompressobj().decompress(base64.urlsafe_b64decode(packed.encode()), MAX_TEXT)
    except (ValueError, zlib.error):
        data = b""
    if not hmac.compare_digest(mark.encode(), _mark(data, tenant, secret).encode()):
        raise InvalidRequest(
            "This compaction was made for another key, or was changed since: it can only be sent back as it was "
            "given, with the key that it was given to. Send the history that it stands for.",
            param="encrypted_content",
        )
    return data.decode()


def _mark(data: bytes, tenant: str, secret: bytes) -> str:
    return hmac.digest(secret, tenant.encode() + b"\0" + data, "sha256").hex()[:32]


def opened(request: ClientRequest, unseal: Unseal) -> ClientRequest:
    codec = request.codec
    elements = split_array(request.fields.get(codec.array, b"[]")) or ()
    place = _items if codec is RESPONSES else _messages
    new = place(elements, unseal)
    if new is None:
        return request
    return codec.parse(replace_fields(request.body, request.fields, {codec.array: array_of(new)}))


def _text_of(block: object, unseal: Unseal) -> str | None:
    sealed = block.get("encrypted_content") if isinstance(block, dict) and block.get("type") == COMPACTION else None
    return unseal(sealed) if isinstance(sealed, str) and sealed.startswith(OWN.decode()) else None


def _items(elements: Sequence[Raw], unseal: Unseal) -> Sequence[Raw] | None:
    """Before a compaction only what others than the model said, and what they declared, is read."""
    for at in range(len(elements) - 1, -1, -1):
        text = _text_of(first_object(elements[at]), unseal) if OWN in bytes(elements[at]) else None
        if text is not None:
            said = [raw for raw in elements[:at] if _stays(first_object(raw))]
            return [*said, RESPONSES.own(text, {}, role="user"), *elements[at + 1 :]]
    return None


def _stays(item: Mapping[str, Any]) -> bool:
    kind = item.get("type", "message")
    return kind in DECLARES or (kind == "message" and item.get("role") in SAID)


def _messages(elements: Sequence[Raw], unseal: Unseal) -> Sequence[Raw] | None:
    """Before a compaction nothing is read; its text begins a turn of the user's."""
    for at in range(len(elements) - 1, -1, -1):
        raw = elements[at]
        blocks = raw_blocks(raw) if OWN in bytes(raw) else ()
        for place in range(len(blocks) - 1, -1, -1):
            text = _text_of(read_value(blocks[place]), unseal)
            if text is None:
                continue
            own, rest, later = write_value({"type": "text", "text": text}), blocks[place + 1 :], elements[at + 1 :]
            if rest and first_object(raw).get("role") == "user":
                return [with_content(raw, array_of([own, *rest])), *later]
            if rest:
                return [message_of("user", array_of([own])), with_content(raw, array_of(rest)), *later]
            if later and first_object(later[0]).get("role") == "user":
                return [with_content(later[0], array_of([own, *raw_blocks(later[0])])), *later[1:]]
            return [message_of("user", array_of([own])), *later]
    return None


class Made(NamedTuple):
    """A compaction to be given: ``before`` and ``after`` are tokens of the history and of the text, ``at`` is s."""

    request: ClientRequest
    text: str
    sealed: str
    before: int
    after: int
    at: int
    name: str


def as_compacted(made: Made) -> bytes:
    elements = split_array(made.request.fields.get("input", b"[]"))
    if elements is None:
        elements = (message_of("user", bytes(made.request.fields["input"])),)
    kept = [_as_given(item) for item in map(first_object, elements) if _stays(item)]
    kept = [item for item in kept if inside(_first_text(item)) is None]
    named = {"id": f"resp_{made.name}", "object": "response.compaction", "created_at": made.at}
    return write_value({**named, "output": [*kept, _item(made)], "usage": _usage(made)})


def _as_given(item: Mapping[str, Any]) -> dict[str, Any]:
    content = item.get("content")
    if item.get("type", "message") != "message":
        return dict(item)
    parts = [{"type": "input_text", "text": content}] if isinstance(content, str) else content
    return {"status": "completed", **item, "type": "message", "content": parts}


def _first_text(item: Mapping[str, Any]) -> str:
    content = item.get("content")
    first = content[0] if isinstance(content, list) and content else None
    return str(first.get("text") or "") if isinstance(first, dict) else ""


def _item(made: Made) -> dict[str, object]:
    return {"type": COMPACTION, "id": f"cmp_{made.name}", "encrypted_content": made.sealed}


def _usage(made: Made) -> dict[str, object]:
    return {
        "input_tokens": made.before,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": made.after,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": made.before + made.after,
    }


def as_answer(made: Made) -> bytes:
    events = _response(made) if made.request.codec is RESPONSES else _message(made)
    if not made.request.stream:
        whole = events[-1]["response"] if made.request.codec is RESPONSES else events[0]["message"]
        return write_value(whole)
    if made.request.codec is RESPONSES:
        events = [{**event, "sequence_number": n} for n, event in enumerate(events)]
    else:
        begun = {**events[0]["message"], "content": [], "stop_reason": None}
        events = [{"type": "message_start", "message": begun}, *events[1:]]
    return b"".join(b"event: %b\ndata: %b\n\n" % (str(e["type"]).encode(), write_value(e)) for e in events)


def _response(made: Made) -> list[dict[str, Any]]:
    request, item = made.request, _item(made)
    head = {"id": f"resp_{made.name}", "object": "response", "created_at": made.at, "model": request.model}
    said = {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True, "store": False, "error": None}
    begun = {**head, **said, "status": "in_progress", "output": [], "usage": None}
    whole = {**begun, "status": "completed", "output": [item], "usage": _usage(made)}
    return [
        {"type": "response.created", "response": begun},
        {"type": "response.in_progress", "response": begun},
        {"type": "response.output_item.added", "output_index": 0, "item": item},
        {"type": "response.output_item.done", "output_index": 0, "item": item},
        {"type": "response.completed", "response": whole},
    ]


def _message(made: Made) -> list[dict[str, Any]]:
    said = {"content": made.text, "encrypted_content": made.sealed}
    usage = {"input_tokens": made.before, "output_tokens": made.after}
    whole = {
        "id": f"msg_{made.name}",
        "type": "message",
        "role": "assistant",
        "model": made.request.model,
        "content": [{"type": COMPACTION, **said}],
        "stop_reason": COMPACTION,
        "stop_sequence": None,
        "usage": usage,
    }
    return [
        {"type": "message_start", "message": whole},
        {"type": "content_block_start", "index": 0, "content_block": {"type": COMPACTION, **dict.fromkeys(said)}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "compaction_delta", **said}},
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": {"stop_reason": COMPACTION, "stop_sequence": None}, "usage": usage},
        {"type": "message_stop"},
    ]
