"""Anthropic's Messages: ``POST /v1/messages``.

Segments are: one assistant message (adjacent ones together); each ``tool_result`` block of a user
message, as role ``tool``; what else is in such a message, as role ``user``; every other message as
it is. The top-level ``system`` precedes them. What Weir adds to a user's turn becomes a block of
it, because strict hosts refuse two user messages after one another; results come first in their
turn, and a ``system`` message between others follows a user's and precedes an assistant's
(platform.claude.com, "Handle tool calls", "Mid-conversation system messages").

Thinking, redacted thinking, signatures and what the provider's own tools left are never changed and
never read.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import msgspec

from policies.effects import Summarize
from policies.ledger import EditKind
from proxy.errors import ContextLengthExceeded, ProxyError
from proxy.wire.chat import (
    MARK,
    SEALED,
    THINKING_TYPES,
    marked_message,
    marker_within,
    reply_of,
    without_media,
)
from proxy.wire.codec import (
    ERROR,
    NAMING_WORDS,
    SEAL,
    ClientRequest,
    Codec,
    Compacted,
    GivenAnswer,
    LimitField,
    RawSegment,
    SystemField,
    array_of,
    first_object,
    like,
    message_of,
    objects_in,
    raw_blocks,
    run_as_json,
    with_content,
)
from proxy.wire.compactions import MessagesCompactions
from proxy.wire.raw import (
    DONE,
    Decoder,
    Raw,
    is_object,
    named_event,
    read_as,
    read_value,
    replace_fields,
    split_array,
    split_object,
    write_value,
)

SIGNATURE_CHARS = 16 / 3
SEALED_CHARS = 4.0
"""Characters of a signature, and of sealed data, for a token: what was thought is about three
quarters as long.
"""
GONE = (
    "(Earlier messages of this conversation were removed here to fit the model's context window.)"
)
_FINISH = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "pause_turn": "stop",
    "tool_use": "tool_calls",
}
REFUSALS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}
_ERRORS = REFUSALS | {503: "overloaded_error", 504: "timeout_error"}
"""Types of errors by their status (docs.anthropic.com, "Errors"); those not listed there go by
their hundred.
"""


class _Shape(msgspec.Struct):
    role: str = ""
    content: msgspec.Raw = msgspec.Raw(b"null")


class _Block(msgspec.Struct):
    type: str = ""


_SHAPE = msgspec.json.Decoder(_Shape)
_SHAPES = msgspec.json.Decoder(list[_Shape])
_WALL = re.compile(rb'"compaction"')
_BLOCK = msgspec.json.Decoder(_Block)
_BLOCKS = msgspec.json.Decoder(list[_Block])


class TurnPart(RawSegment):
    """Some blocks of a user message, as a message of its own; ``whole`` is the message that they
    came in.

    It is part number ``place`` of ``parts``; ``whole`` is empty for what Weir adds.
    """

    whole: bytes = b""
    place: int = 0
    parts: int = 0


WITH_IDS = frozenset({"container", "thread", "mcp_servers"})
"""Fields of a request whose answer names something that the provider keeps."""
DROPS_UNBOUND = b"thinking-binding-controls-2026-08-01"


class MessagesCodec(Codec):
    name = "messages"
    compactions = MessagesCompactions()
    binds_thinking = True
    has_recall_tool = False
    has_translated_edits = False
    is_element_a_message = False
    path = "/messages"
    array = "messages"
    providers = frozenset({"anthropic"})
    system = "system"
    link = "thread"
    unlinked = b'{"type":"create"}'
    created_with = ("system", "tools")
    limits = ("max_tokens",)
    tool_fields = ("tools",)
    schema = "output_config"
    headers = ((b"anthropic-version", b"2023-06-01"),)
    words = (_WALL, SEAL, *NAMING_WORDS)
    wall = _WALL
    joins = True

    def least_output(self, request: ClientRequest) -> int:
        """More than the thinking may take: fewer are refused."""
        thinking = request.value("thinking")
        budget = thinking.get("budget_tokens") if isinstance(thinking, dict) else None
        return budget + 1 if isinstance(budget, int) and thinking.get("type") == "enabled" else 0

    def is_aside(self, fields: Mapping[str, Raw]) -> bool:
        return bytes(fields.get("compaction", b"null")) != b"null"

    def parent(self, fields: Mapping[str, Raw]) -> str | None:
        thread = read_value(fields.get("thread", b"null"))
        value = thread.get("previous_message_id") if isinstance(thread, dict) else None
        return value if isinstance(value, str) and value else None

    def is_kept(self, fields: Mapping[str, Raw]) -> bool:
        return bytes(fields.get("thread", b"null")) != b"null"

    def answer(self, body: bytes) -> GivenAnswer | None:
        if not is_object(body):
            return _streamed(body)
        whole = split_object(body)
        identity = read_value(whole.get("id", b"null"))
        if not isinstance(identity, str) or bytes(whole.get("type", b"")) != b'"message"':
            return None
        return _given(
            identity, bytes(whole.get("content", b"[]")), read_value(whole.get("usage", b"null"))
        )

    def schema_of(self, request: ClientRequest) -> Any:
        asked = request.value("output_config")
        schema = asked.get("format") if isinstance(asked, dict) else None
        return {"json_schema": schema} if isinstance(schema, dict) else None

    def segments(self, elements: Sequence[Raw]) -> Sequence[Raw]:
        wall = 1 + max((n for n, raw in enumerate(elements) if _is_wall(raw)), default=-1)
        found: list[Raw] = [Compacted(raw) for raw in elements[:wall]]
        for is_reply, group in groupby(
            map(_shaped, elements[wall:]), key=lambda each: each[1].role == "assistant"
        ):
            if is_reply:
                found.append(b",".join(raw for raw, _ in group))
            else:
                for raw, shape in group:
                    found += _parts_of(raw, shape)
        return found

    def view(self, raw: Raw) -> Mapping[str, Any]:
        if isinstance(raw, Compacted):
            return {"role": "system", "content": None}
        messages = objects_in(raw)
        if not messages:
            return {}
        blocks = [block for message in messages for block in _blocks_of(message.get("content"))]
        marks = [
            found for each in (*messages, *blocks) if isinstance(found := each.get(MARK), dict)
        ]
        mark = {MARK: marks[0]} if marks else {}
        role = messages[0].get("role")
        if role == "assistant":
            return {**_reply(blocks), **mark}
        if len(blocks) == 1 and blocks[0].get("type") == "tool_result":
            return {**_result(blocks[0]), **mark}
        content = messages[0].get("content")
        return {"role": role, "content": content if isinstance(content, str) else blocks, **mark}

    def edited(self, raw: Raw, kind: EditKind | None, text: str) -> Raw:
        bare = self.unmarked(raw)
        if isinstance(raw, TurnPart | SystemField) or not _is_reply(raw):
            value = first_object(bare)
            content = value.get("content")
            first = (
                content[0]
                if isinstance(content, list) and content and isinstance(content[0], dict)
                else {}
            )
            if isinstance(raw, TurnPart) and first.get("type") == "tool_result":
                value["content"] = [_other_result(first, kind, text)]
            elif kind is EditKind.MEDIA:
                value = without_media(value, text.split("\n"))
            else:
                value["content"] = [
                    {"type": "text", "text": text or GONE, **marker_within(content)}
                ]
            return like(raw, write_value(value))
        elements = objects_in(bare)
        for element in elements:
            element["content"] = _other_reply(_blocks_of(element.get("content")), kind, text)
            text = ""
        return b",".join(write_value(each) for each in elements if each["content"])

    def bare(self, element: Mapping[str, Any]) -> Mapping[str, Any]:
        bare = super().bare(element)
        if isinstance(blocks := bare.get("content"), list):
            blocks = [
                super(MessagesCodec, self).bare(each) if isinstance(each, dict) else each
                for each in blocks
            ]
            bare = {**bare, "content": blocks}
        return bare

    def gives_ids(self, fields: Mapping[str, Raw]) -> bool:
        runs_code = b'"code_' in bytes(fields.get("tools", b""))
        return runs_code or not fields.keys().isdisjoint(WITH_IDS)

    def with_unbound_dropped(self, body: bytes) -> tuple[bytes, tuple[bytes, ...]]:
        fields = split_object(body)
        thinking = read_value(fields["thinking"])
        said = thinking if isinstance(thinking, dict) else {}
        binding = {"block_binding": {"prefix_mismatch_behavior": "drop_block"}}
        asked = write_value({**said, **binding})
        return replace_fields(body, fields, {"thinking": asked}), (DROPS_UNBOUND,)

    def own(self, text: str, markers: Mapping[str, Any], *, role: str) -> Raw:
        return TurnPart(
            message_of("user", write_value([{"type": "text", "text": text or GONE, **markers}]))
        )

    def extended(self, raw: Raw, text: str) -> Raw:
        value = first_object(raw)
        value["content"] = [*_blocks_of(value.get("content")), {"type": "text", "text": text}]
        return SystemField(write_value(value))

    def joined(self, before: Raw, after: Raw) -> Raw | None:
        """Never: parts of one turn are always joined."""
        return None

    def marked(self, raw: Raw, marker: Mapping[str, Any]) -> Raw | None:
        marked = marked_message(raw, marker) if isinstance(raw, SystemField) else None
        return None if marked is None else SystemField(marked)

    def elements(self, request: ClientRequest, segments: Sequence[Raw]) -> Sequence[Raw]:
        """The messages that these segments make, each part in its turn.

        Turns that are as they came keep their bytes.
        """
        places = {id(raw): n for n, raw in enumerate(request.messages or ())}
        written: list[Raw] = []
        for is_reply, group in groupby(segments, key=_is_reply):
            turn = list(group)
            if is_reply and not written and not isinstance(turn[0], Compacted):
                written.append(message_of("user", write_value(GONE)))
            written += turn if is_reply else _turn(turn, places)
        return [raw for raw in written if raw]

    def stored(self, raw: Raw) -> bytes:
        return run_as_json(raw)

    def question(self, effect: Summarize, limit: LimitField) -> dict[str, object]:
        asked: dict[str, object] = {
            "max_tokens": effect.max_tokens,
            "system": effect.system,
            "messages": [{"role": "user", "content": effect.prompt}],
        }
        if effect.schema:
            asked["output_config"] = {
                "format": {"type": "json_schema", "schema": dict(effect.schema)}
            }
        return asked

    def completion(self, value: Any) -> Any:
        if not isinstance(value, dict) or value.get("type") != "message":
            return value
        message = {k: v for k, v in _reply(_blocks_of(value.get("content"))).items() if k != SEALED}
        reason = value.get("stop_reason")
        choice = {"index": 0, "message": message, "finish_reason": _FINISH.get(str(reason), reason)}
        named = {name: value[name] for name in ("id", "model") if name in value}
        return {**named, "choices": [choice], "usage": _usage(value.get("usage"))}

    def matters(self, name: bytes, data: bytes) -> bool:
        return ERROR in name or b"message_delta" in name or b"message_stop" in name

    def chunk(self, value: Any) -> Any:
        kind = value.get("type") if isinstance(value, dict) else None
        if kind == "message_start":
            message = value.get("message")
            message = message if isinstance(message, dict) else {}
            named = {name: message[name] for name in ("id", "model") if name in message}
            return {**named, "usage": _usage(message.get("usage"))}
        if kind == "message_delta":
            delta = value.get("delta")
            reason = delta.get("stop_reason") if isinstance(delta, dict) else None
            choice = {"index": 0, "finish_reason": _FINISH.get(str(reason), reason)}
            return {"choices": [choice], "usage": _usage(value.get("usage"))}
        if kind == "content_block_start":
            return _delta(_started(value))
        if kind == "content_block_delta":
            return _delta(_added(value))
        if kind == "message_stop":
            return DONE
        return value if kind in (None, "error") else {}

    def error_body(self, error: ProxyError) -> bytes:
        """An error in Anthropic's shape; what does not fit in the words after which Claude Code
        compacts.
        """
        message = error.message
        if isinstance(error, ContextLengthExceeded) and error.weir is not None:
            buckets, window, reserve = (
                error.weir.get(name) for name in ("buckets", "window", "reserve")
            )
            if (
                isinstance(buckets, Mapping)
                and isinstance(window, int)
                and isinstance(reserve, int)
            ):
                used = error.weir.get("used", sum(buckets.values()))
                most = error.weir.get("cap", window - reserve)
                message = f"prompt is too long: {used} tokens > {most} maximum. {message}"
        return write_value(_error(error, message))

    def error_event(self, error: ProxyError, answer: str | None = None) -> bytes:
        return b"\n\n" + named_event(_error(error, error.message))


def _error(error: ProxyError, message: str) -> dict[str, object]:
    weir = {**(error.weir or {}), "code": error.code}
    kind = _ERRORS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    told = {"type": kind, "message": message, "weir": weir}
    if error.param == "thread":  # at this the SDKs send the whole history, from then on
        told["details"] = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    return {"type": "error", "error": told}


def _shaped(raw: Raw) -> tuple[Raw, _Shape]:
    return raw, read_as(_SHAPE, raw, _Shape())


def _parts_of(raw: Raw, shape: _Shape) -> Iterator[Raw]:
    content = bytes(shape.content)
    has_blocks = content[:1] == b"[" and shape.role == "user"
    kinds = [each.type for each in read_as(_BLOCKS, content, [])] if has_blocks else []
    results = sum(kind == "tool_result" for kind in kinds)
    if not results:
        yield raw
        return
    blocks = split_array(content) or ()
    whole = bytes(raw)
    groups = [[block] for block, kind in zip(blocks, kinds, strict=True) if kind == "tool_result"]
    if others := [
        block for block, kind in zip(blocks, kinds, strict=True) if kind != "tool_result"
    ]:
        groups.append(others)
    for place, group in enumerate(groups):
        yield TurnPart.of(
            message_of("user", array_of(group)), whole=whole, place=place, parts=len(groups)
        )


def _is_reply(raw: Raw) -> bool:
    return not isinstance(raw, TurnPart) and _role(raw) == "assistant"


def _role(raw: Raw) -> str:
    shapes = read_as(_SHAPES, b"[" + raw + b"]", [])
    return shapes[0].role if shapes else ""


def _is_wall(raw: Raw) -> bool:
    if _WALL.search(raw) is None:
        return False
    return any(
        block.get("type") == "compaction" for block in _blocks_of(first_object(raw).get("content"))
    )


def _blocks_of(content: object) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    return (
        [block for block in content if isinstance(block, dict)] if isinstance(content, list) else []
    )


def _reply(blocks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    texts = []
    others = []
    calls = []
    thoughts = []
    sealed = 0.0
    for block in blocks:
        kind = block.get("type")
        if kind == "text":
            # SDKs send ``"citations": null`` or not
            texts.append({k: v for k, v in block.items() if v is not None})
        elif kind == "tool_use":
            function = {
                "name": block.get("name"),
                "arguments": json.dumps(block.get("input"), ensure_ascii=False),
            }
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind in THINKING_TYPES:
            thought = block.get("thinking")
            thoughts.append(thought if isinstance(thought, str) else "")
            sealed += 1 + len(str(block.get("data") or "")) / SEALED_CHARS
            sealed += 0 if thought else len(str(block.get("signature") or "")) / SIGNATURE_CHARS
        else:
            others.append(block)
    content: object = [*texts, *others]
    if len(texts) == 1 and not others:
        content = texts[0].get("text")
    return reply_of(content or None, calls, thoughts, sealed)


def _result(block: Mapping[str, Any]) -> dict[str, Any]:
    content = block.get("content")
    message = {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": content or ""}
    return message | ({"is_error": True} if block.get("is_error") else {})


def _other_result(block: Mapping[str, Any], kind: EditKind | None, text: str) -> dict[str, Any]:
    if kind is EditKind.MEDIA:
        return without_media(block, text.split("\n"))
    inner = marker_within(block.get("content"))
    said = [{"type": "text", "text": text or GONE, **inner}] if inner else text or GONE
    return {**block, "content": said}


def _other_reply(
    blocks: Sequence[dict[str, Any]], kind: EditKind | None, text: str
) -> list[dict[str, Any]]:
    if kind in (EditKind.REASONING, EditKind.UNBOUND):
        return [block for block in blocks if block.get("type") not in THINKING_TYPES]
    texts = [n for n, block in enumerate(blocks) if block.get("type") == "text"]
    if not texts:
        return [*blocks, {"type": "text", "text": text}] if text and not blocks else list(blocks)
    said = {"type": "text", "text": text or GONE, **marker_within([blocks[n] for n in texts])}
    kept = [
        said if n == texts[0] else block
        for n, block in enumerate(blocks)
        if n == texts[0] or n not in texts
    ]
    return [block for block in kept if block.get("type") not in THINKING_TYPES]


def _turn(segments: Sequence[Raw], places: Mapping[int, int]) -> list[Raw]:
    """The messages between two of an assistant's; ``places`` are those of the client's segments by
    their identity.

    As they came where nothing is changed in them. Else one user message has all blocks, results
    first, and system messages follow it.
    """
    if _is_as_it_came(segments, places):
        whole = [raw.whole if isinstance(raw, TurnPart) else raw for raw in segments]
        return [raw for n, raw in enumerate(whole) if n == 0 or raw is not whole[n - 1]]
    systems = [raw for raw in segments if not isinstance(raw, TurnPart) and _role(raw) != "user"]
    said = [raw for raw in segments if isinstance(raw, TurnPart) or _role(raw) == "user"]
    if len(said) == 1 and not isinstance(said[0], TurnPart):
        return [said[0], *systems]
    blocks = [block for raw in said for block in raw_blocks(raw)]
    if len(blocks) > 1:
        blocks.sort(key=lambda block: read_as(_BLOCK, block, _Block()).type != "tool_result")
    content = array_of(blocks) if blocks else write_value(GONE)
    client = [raw.whole if isinstance(raw, TurnPart) else bytes(raw) for raw in said]
    first = next(filter(None, client), message_of("user", b'""'))
    return [with_content(first, content), *systems]


def _is_as_it_came(segments: Sequence[Raw], places: Mapping[int, int]) -> bool:
    at = places.get(id(segments[0]))
    if at is None or any(places.get(id(raw)) != at + n for n, raw in enumerate(segments)):
        return False
    first = segments[0]
    last = segments[-1]
    begins = not isinstance(first, TurnPart) or first.place == 0
    return begins and (not isinstance(last, TurnPart) or last.place == last.parts - 1)


def _usage(said: object) -> object:
    """A usage object whose context is that of the last call of the model, where it lists
    several.
    """
    rounds = said.get("iterations") if isinstance(said, dict) else None
    messages = (
        [each for each in rounds if isinstance(each, dict) and each.get("type") == "message"]
        if rounds
        else []
    )
    if not isinstance(said, dict) or not messages:
        return said
    asked = {k: v for k, v in messages[-1].items() if "input" in k}
    return {**said, **asked}


def _delta(delta: Mapping[str, Any]) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta}]}


def _started(event: Mapping[str, Any]) -> dict[str, Any]:
    block = event.get("content_block")
    if not isinstance(block, dict):
        return {}
    if block.get("type") == "tool_use":
        function = {"name": block.get("name"), "arguments": ""}
        return {
            "tool_calls": [
                {"index": event.get("index"), "id": block.get("id"), "function": function}
            ]
        }
    return {"content": block["text"]} if block.get("text") else {"begun": block.get("type")}


def _added(event: Mapping[str, Any]) -> dict[str, Any]:
    delta = event.get("delta")
    if not isinstance(delta, dict):
        return {}
    if delta.get("type") == "input_json_delta":
        return {
            "tool_calls": [
                {"index": event.get("index"), "function": {"arguments": delta.get("partial_json")}}
            ]
        }
    if delta.get("type") == "thinking_delta":
        return {"reasoning_content": delta.get("thinking")}
    return {"content": delta["text"]} if delta.get("type") == "text_delta" else {}


def _given(identity: str, content: bytes, usage: object) -> GivenAnswer:
    return GivenAnswer(
        id=identity,
        elements=b'{"role":"assistant","content":' + content + b"}",
        usage=_usage(usage),
    )


def _streamed(stream: bytes) -> GivenAnswer | None:
    identity = None
    usage = dict[str, Any]()
    blocks = list[dict[str, Any]]()
    for event in Decoder().feed(stream + b"\n\n"):
        value = read_value(event.data)
        kind, value = (value.get("type"), value) if isinstance(value, dict) else (None, {})
        if kind == "message_start":
            identity = value["message"].get("id")
            usage = dict(value["message"].get("usage") or {})
        elif kind == "content_block_start":
            blocks.append(dict(value["content_block"]))
        elif kind == "content_block_delta" and blocks:
            grow(blocks[-1], value["delta"])
        elif kind == "content_block_stop" and blocks and not close(blocks[-1]):
            return None
        elif kind == "message_delta":
            usage |= {
                name: said for name, said in (value.get("usage") or {}).items() if said is not None
            }
        elif kind == "message_stop" and isinstance(identity, str):
            return _given(identity, write_value(blocks), usage)
    return None


def grow(block: dict[str, Any], delta: Mapping[str, Any]) -> None:
    """Add what a stream says next of a block; arguments of a call stay text until :func:`close`
    reads them.
    """
    for name, more in delta.items():
        if name == "citation":
            block["citations"] = [*(block.get("citations") or ()), more]
        elif isinstance(more, str) and name != "type":
            block[name] = (block.get(name) or "") + more


def close(block: dict[str, Any]) -> bool:
    """Whether the block is whole: not where the arguments of its call are no JSON, which then are
    left out.
    """
    if (told := block.pop("partial_json", None)) is None:
        return True
    block["input"] = read_value(told.encode("utf-8", "surrogatepass") or b"{}")
    if block["input"] is None:
        del block["input"]
    return "input" in block


MESSAGES = MessagesCodec()
