"""OpenAI's Responses: ``POST /v1/responses``.

Segments are: a run of what the model made (reasoning, messages, calls), as role ``assistant``; one
output of a call, as role ``tool``; one message of the user, the system or the developer.
``instructions`` precede them. Ids, names, arguments and what is encrypted are never changed. A run
with ids but without reasoning, after outputs of a run that has it, may share that reasoning: where
it goes without it, it goes without its ids, which nothing else needs ("was provided without its
required 'reasoning' item").
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from policies.effects import Summarize
from policies.ledger import EditKind
from proxy.errors import ContextLengthExceeded, ProxyError
from proxy.wire.chat import MARK, SEALED, dicts_in, is_own, marker_within, reply_of, with_lines
from proxy.wire.codec import (
    ERROR,
    NAMING_WORDS,
    SCHEMA_NAME,
    SEAL,
    ClientRequest,
    Codec,
    Compacted,
    GivenAnswer,
    LimitField,
    NamingRun,
    RawSegment,
    first_object,
    like,
    message_of,
    object_of,
    objects_in,
    run_as_json,
)
from proxy.wire.compactions import ResponsesCompactions
from proxy.wire.raw import (
    Decoder,
    Raw,
    elements_of,
    is_object,
    named_event,
    read_value,
    split_array,
    split_object,
    write_value,
)

SEALED_CHARS = 5.0
"""Characters of ``encrypted_content`` for a token; a guess that the reported usage corrects."""
GONE = "(removed to fit the model's context window)"
_ROLES = frozenset({"user", "system", "developer"})
_ANSWERED = (
    *(
        "function_call",
        "custom_tool_call",
        "local_shell_call",
        "shell_call",
        "apply_patch_call",
        "computer_call",
    ),
    "program",
)
"""Calls whose outputs are called after them."""
_OUTPUTS = frozenset(
    {*(f"{call}_output" for call in _ANSWERED), "tool_search_output", "mcp_approval_response"}
)
CALLS = frozenset({*_ANSWERED, "tool_search_call", "mcp_approval_request"})
_WALLS = frozenset({"compaction", "compaction_summary"})
_FIXED = frozenset({"additional_tools", "configuration_update", "compaction_trigger"})
_UNCHANGED = frozenset(
    {
        "computer_call_output",
        "tool_search_output",
        "mcp_approval_response",
        "apply_patch_call_output",
    }
)
_NEEDS_NO_ID = frozenset(
    {"message", "function_call", "custom_tool_call", "shell_call", "apply_patch_call"}
)
NAMELESS = "reasoning"
_PART_TYPES = {"input_text": "text", "output_text": "text"}
_ENDS = {"max_output_tokens": "length"}
_LAST = frozenset({b"response.completed", b"response.incomplete", b"response.failed"})
_GIVEN = frozenset({"response.completed", "response.incomplete"})
_LAST_TYPE = re.compile(rb'"type"\s*:\s*"(?:error|response\.(?:completed|incomplete|failed))"')
_WALL = re.compile(rb'"compaction')
_THOUGHT = re.compile(rb'"reasoning"')
_REFERENCE = re.compile(rb'"item_reference"')
_BARE = re.compile(
    rb'\{\s*(?:"type"\s*:\s*null\s*,\s*)?"id"\s*:\s*"[^"\\]*"\s*(?:,\s*"type"\s*:\s*null\s*)?\}'
)
"""Each is searched separately: ``re`` optimises a literal prefix of one pattern, and not that of
alternatives.
"""


class _Item(msgspec.Struct):
    type: str = "message"
    role: str = ""
    id: str = ""


_ITEM = msgspec.json.Decoder(_Item)


class JoinedRun(NamingRun):
    """A run that was made with the reasoning of this id, which is in an earlier run."""

    reasoning: str = ""


class Fixed(RawSegment):
    """An item that declares tools or settings: it stays where it is."""


class ResponsesCodec(Codec):
    name = "responses"
    compactions = ResponsesCompactions()
    has_recall_tool = False
    has_translated_edits = False
    is_element_a_message = False
    path = "/responses"
    array = "input"
    providers = frozenset({"openai", "azure.ai.openai", "azure.ai.inference"})
    system = "instructions"
    link = "previous_response_id"
    ends_with_reason = True
    limits = ("max_output_tokens",)
    tool_fields = ("tools",)
    schema = "text"
    text_type = "input_text"
    words = (_WALL, _REFERENCE, _BARE, _THOUGHT, SEAL, *NAMING_WORDS)
    wall = _WALL
    joins = True
    words_of_element = ("type", "role")

    def is_held_elsewhere(self, fields: Mapping[str, Raw]) -> bool:
        if bytes(fields.get("conversation", b"null")) != b"null":
            return True
        cache = read_value(fields.get("prompt_cache_options", b"null"))
        warms = isinstance(cache, dict) and cache.get("prewarm") is True
        return warms or bytes(fields.get("background", b"")) == b"true"

    def is_aside(self, fields: Mapping[str, Raw]) -> bool:
        return b'"compaction_trigger"' in bytes(memoryview(fields.get("input", b""))[-256:])

    def parent(self, fields: Mapping[str, Raw]) -> str | None:
        value = read_value(fields.get("previous_response_id", b"null"))
        return value if isinstance(value, str) and value else None

    def is_kept(self, fields: Mapping[str, Raw]) -> bool:
        """Whether the provider stores the answer, which it does unless the request opts out."""
        return bytes(fields.get("store", b"")) != b"false"

    def added(self, fields: Mapping[str, Raw]) -> bytes:
        said = bytes(fields.get("input", b"[]")).strip()
        return message_of("user", said) if said[:1] == b'"' else super().added(fields)

    def answer(self, body: bytes) -> GivenAnswer | None:
        whole: Mapping[str, Raw] = split_object(body) if is_object(body) else _whole_in(body)
        identity = read_value(whole.get("id", b"null"))
        if not isinstance(identity, str) or read_value(whole.get("status", b"null")) not in (
            "completed",
            "incomplete",
        ):
            return None
        output = split_array(whole.get("output", b"[]")) or _items_done(body)
        return GivenAnswer(
            id=identity, elements=b",".join(output), usage=read_value(whole.get("usage", b"null"))
        )

    def named(self, elements: bytes, reasoned: int) -> Mapping[str, Raw]:
        items = [(_read(raw), raw) for raw in elements_of(elements)]
        hidden = [
            raw
            for item, raw in items
            if item.type == "reasoning" and b'"encrypted_content":"' not in bytes(raw)
        ]
        share = b',"%b":%d}' % (SEALED.encode(), reasoned // max(1, len(hidden)))
        return {
            item.id: bytes(raw)[:-1] + share if raw in hidden else raw
            for item, raw in items
            if item.id
        }

    def names(self, request: ClientRequest) -> Mapping[str, bool]:
        array = request.messages
        naming = (_REFERENCE, _BARE, *((_THOUGHT,) if self.is_kept(request.fields) else ()))
        if array is None or not any(map(array.mentions, naming)):
            return {}
        found = [(_read(raw), raw) for raw in split_array(array.raw) or ()]
        return {
            item.id: item.type != "reasoning"
            for item, raw in found
            if item.id and _is_named_only(item, raw)
        }

    def resolved(self, raw: Raw, known: Mapping[str, Raw]) -> Raw:
        """A run whose references are read as the items that they name; it is written as it came."""
        elements = elements_of(raw)
        items = [(_read(each), each) for each in elements]
        if not any(item.id in known and _is_named_only(item, each) for item, each in items):
            return raw
        meant = [
            known.get(item.id, each) if _is_named_only(item, each) else each for item, each in items
        ]
        run = raw.like(bytes(raw)) if isinstance(raw, JoinedRun) else NamingRun(raw)
        run.meant = b",".join(meant)
        return run

    def schema_of(self, request: ClientRequest) -> Any:
        asked = request.value("text")
        schema = asked.get("format") if isinstance(asked, dict) else None
        return (
            {"json_schema": schema}
            if isinstance(schema, dict) and schema.get("type") == "json_schema"
            else None
        )

    def segments(self, elements: Sequence[Raw]) -> Sequence[Raw]:
        items = [_read(raw) for raw in elements]
        wall = 1 + max((n for n, item in enumerate(items) if item.type in _WALLS), default=-1)
        found: list[Raw] = [Compacted(raw) for raw in elements[:wall]]
        run: list[Raw] = []
        kinds: list[_Item] = []
        thought = ""  # the reasoning that a run of calls and outputs began with

        def end_run() -> None:
            nonlocal thought
            if run:
                own = next((item.id or NAMELESS for item in kinds if _is_reasoning(item)), "")
                joined = thought and not own and any(item.id for item in kinds)
                found.append(
                    JoinedRun.of(b",".join(run), reasoning=thought) if joined else b",".join(run)
                )
                thought = own or thought
                run.clear()
                kinds.clear()

        for raw, item in zip(elements[wall:], items[wall:], strict=True):
            if (
                item.type in _OUTPUTS
                or item.type in _FIXED
                or (item.type == "message" and item.role in _ROLES)
            ):
                end_run()
                thought = thought if item.type in _OUTPUTS else ""
                found.append(Fixed(raw) if item.type in _FIXED else raw)
            else:
                run.append(raw)
                kinds.append(item)
        end_run()
        return found

    def view(self, raw: Raw) -> Mapping[str, Any]:
        if isinstance(raw, Compacted | Fixed):
            return {
                "role": "system",
                "content": None if isinstance(raw, Compacted) else json.dumps(first_object(raw)),
            }
        items = objects_in(_meant(raw))
        if not items:
            return {}
        marks = [found for item in items if isinstance(found := item.get(MARK), dict)]
        mark = {MARK: marks[0]} if marks else {}
        first = items[0]
        kind = first.get("type", "message")
        if kind in _OUTPUTS:
            return {**_output(first), **mark}
        if kind == "message" and first.get("role") in _ROLES:
            return {"role": first["role"], "content": _content(first.get("content")), **mark}
        return {**_run(items), **mark}

    def edited(self, raw: Raw, kind: EditKind | None, text: str) -> Raw:
        items = objects_in(self.unmarked(raw))
        first = items[0] if items else {}
        if kind is EditKind.UNBOUND:
            return _without_reasoning(self.unmarked(raw))
        if first.get("type") in _UNCHANGED or kind is EditKind.REASONING:
            return self.unmarked(raw)
        if first.get("type") in _OUTPUTS:
            items[0] = _other_output(first, kind, text)
        elif first.get("type", "message") == "message" and first.get("role") in _ROLES:
            if kind is EditKind.MEDIA:
                items[0]["content"] = with_lines(
                    first.get("content"), text.split("\n"), _is_media, "input_text"
                )
            else:
                marker = marker_within(first.get("content"))
                items[0]["content"] = (
                    [{"type": "input_text", "text": text, **marker}] if marker else text
                )
        else:
            items = _other_run(items, text)
        return like(raw, b",".join(map(write_value, items)))

    def gives_ids(self, fields: Mapping[str, Raw]) -> bool:
        return True

    def counted_answer(self, tokens: int) -> bytes:
        return write_value({"object": "response.input_tokens", "input_tokens": tokens})

    def own(self, text: str, markers: Mapping[str, Any], *, role: str) -> Raw:
        part = {"type": "input_text", "text": text, **markers}
        speaker = "developer" if role == "system" else "user"
        return write_value({"type": "message", "role": speaker, "content": [part]})

    def marked(self, raw: Raw, marker: Mapping[str, Any]) -> Raw | None:
        return None

    def elements(self, request: ClientRequest, segments: Sequence[Raw]) -> Sequence[Raw]:
        if any(isinstance(raw, JoinedRun) for raw in segments):
            there = {name for raw in segments for name in _reasoning_in(raw)}
            segments = [
                _without_ids(raw)
                if isinstance(raw, JoinedRun) and raw.reasoning not in there
                else raw
                for raw in segments
            ]
        return [raw for raw in segments if raw]

    def stored(self, raw: Raw) -> bytes:
        return run_as_json(_meant(raw))

    def question(self, effect: Summarize, limit: LimitField) -> dict[str, object]:
        asked: dict[str, object] = {
            "instructions": effect.system,
            "input": effect.prompt,
            "max_output_tokens": effect.max_tokens,
            "store": False,
        }
        if effect.schema:
            form = {
                "type": "json_schema",
                "name": SCHEMA_NAME,
                "strict": True,
                "schema": dict(effect.schema),
            }
            asked["text"] = {"format": form}
        return asked

    def completion(self, value: Any) -> Any:
        if not isinstance(value, dict) or value.get("object") != "response":
            return value
        message = {k: v for k, v in _run(dicts_in(value.get("output"))).items() if k != SEALED}
        choice = {
            "index": 0,
            "message": message,
            "finish_reason": _finish(value, calls="tool_calls" in message),
        }
        named = {name: value[name] for name in ("id", "model", "service_tier") if name in value}
        return {
            **named,
            "choices": [choice],
            "usage": value.get("usage"),
            "error": value.get("error"),
        }

    def matters(self, name: bytes, data: bytes) -> bool:
        if not name:  # not every server names its events
            return _LAST_TYPE.search(data) is not None
        return ERROR in name or any(last in name for last in _LAST)

    def chunk(self, value: Any) -> Any:
        kind = value.get("type") if isinstance(value, dict) else None
        if kind is None or kind == "error":
            return value
        whole = value.get("response")
        if isinstance(whole, dict):
            named = {name: whole[name] for name in ("id", "model", "service_tier") if name in whole}
            if kind in ("response.completed", "response.incomplete", "response.failed"):
                choice = {
                    "index": 0,
                    "finish_reason": _finish(whole, calls=False) or kind.removeprefix("response."),
                }
                return {
                    **named,
                    "choices": [choice],
                    "usage": whole.get("usage"),
                    "error": whole.get("error"),
                }
            return named
        return {"choices": [{"index": 0, "delta": _added(kind, value)}]}

    def error_body(self, error: ProxyError) -> bytes:
        if isinstance(error, ContextLengthExceeded) and error.param == "messages":
            error.param = "input"
        return error.body()

    def error_event(self, error: ProxyError, answer: str | None = None) -> bytes:
        return failed(f"Connection lost, premature close: {error.message}", {"id": answer or ""})


def failed(
    message: str, begun: Mapping[str, Any], output: Sequence[Any] = (), sequence: int = 0
) -> bytes:
    told = {"code": "server_error", "message": message}
    response = {
        "id": "",
        "object": "response",
        **begun,
        "status": "failed",
        "error": told,
        "output": output,
    }
    return b"\n\n" + named_event(
        {"type": "response.failed", "sequence_number": sequence, "response": response}
    )


def _read(raw: Raw) -> _Item:
    try:
        item = _ITEM.decode(raw)
    except (ValueError, RecursionError):  # an id of null, or what the upstream judges
        value = first_object(raw)
        kind, role, identity = (value.get(name) for name in ("type", "role", "id"))
        item = _Item(
            kind if isinstance(kind, str) else "message",
            role if isinstance(role, str) else "",
            identity if isinstance(identity, str) else "",
        )
    return item


def _is_reasoning(item: _Item) -> bool:
    return item.type == "reasoning" or (not item.role and item.id.startswith("rs_"))


def _reasoning_in(raw: Raw) -> list[str]:
    data = bytes(raw)
    if b'"reasoning"' not in data and b'"rs_' not in data:
        return []
    return [item.id or NAMELESS for item in map(_read, elements_of(raw)) if _is_reasoning(item)]


def _without_ids(raw: Raw) -> bytes:
    written: list[Raw] = []
    for item in elements_of(raw):
        fields = split_object(bytes(item))
        if _read(item).type in _NEEDS_NO_ID and "id" in fields:
            item = object_of({name: value for name, value in fields.items() if name != "id"})
        written.append(item)
    return b",".join(written)


def _without_reasoning(raw: Raw) -> bytes:
    items = elements_of(raw)
    return _without_ids(b",".join(item for item in items if not _is_reasoning(_read(item))))


def _meant(raw: Raw) -> Raw:
    return (raw.meant or raw) if isinstance(raw, NamingRun) else raw


def _is_named_only(item: _Item, raw: Raw) -> bool:
    """Whether the provider has to know what an item is; the type of a reference may be left out."""
    if item.type == "reasoning":
        return b'"encrypted_content":"' not in bytes(raw)
    return _is_reference(item)


def _is_reference(item: _Item) -> bool:
    return item.type == "item_reference" or (item.type == "message" and not item.role)


def _content(content: object) -> object:
    if not isinstance(content, list):
        return content
    return [
        {**part, "type": _PART_TYPES[part["type"]]}
        if isinstance(part, dict) and part.get("type") in _PART_TYPES
        else part
        for part in content
    ]


def _kind_of(item: Mapping[str, Any]) -> object:
    kind = item.get("type") or "message"
    return (
        "item_reference" if kind == "message" and item.get("id") and not item.get("role") else kind
    )


def _run(items: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    texts = []
    others = []
    calls = []
    thoughts = []
    sealed = 0.0
    for item in items:
        kind = _kind_of(item)
        if kind == "message":
            content = item.get("content")
            texts += (
                [content]
                if isinstance(content, str)
                else _texts_of(filter(is_own, dicts_in(content)))
            )
            others += [part for part in dicts_in(content) if not is_own(part)]
        elif kind == "reasoning":
            thought = "\n".join(
                _texts_of([*dicts_in(item.get("summary")), *dicts_in(item.get("content"))])
            )
            thoughts.append(thought)
            sealed += len(str(item.get("encrypted_content") or "")) / SEALED_CHARS
            sealed += hidden if isinstance(hidden := item.get(SEALED), int) else 0
        elif kind in CALLS:
            calls.append(_call(item))
        elif kind == "item_reference":
            others.append({"type": kind, "item": item.get("id")})
        else:
            others.append({k: v for k, v in item.items() if k != MARK and v is not None})
    content = (
        [*({"type": "text", "text": text} for text in texts), *others]
        if others
        else "\n".join(texts) or None
    )
    return reply_of(content, calls, thoughts, sealed)


def _texts_of(parts: Iterable[Mapping[str, Any]]) -> list[str]:
    said = (part.get("text") or part.get("refusal") for part in parts)
    return [text for text in said if isinstance(text, str)]


def _call(item: Mapping[str, Any]) -> dict[str, Any]:
    arguments = item.get("arguments", item.get("input"))
    if not isinstance(arguments, str):
        about = {
            k: v
            for k, v in item.items()
            if k in ("action", "actions", "operation", "arguments", "code")
        }
        arguments = json.dumps(about, ensure_ascii=False)
    name = item.get("name") or str(item.get("type", "")).removesuffix("_call")
    return {
        "id": _call_id(item),
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def _call_id(item: Mapping[str, Any]) -> str:
    names = ("call_id", "id", "approval_request_id")
    return next((found for name in names if isinstance(found := item.get(name), str)), "")


def _output(item: Mapping[str, Any]) -> dict[str, Any]:
    output = item.get("output", item.get("tools"))
    if isinstance(output, list) and all(
        isinstance(part, dict) and "stdout" in part for part in output
    ):
        output = "\n".join(
            f"{part.get('stdout') or ''}{part.get('stderr') or ''}" for part in output
        )
    elif isinstance(output, dict):
        output = [output]
    return {"role": "tool", "tool_call_id": _call_id(item), "content": _content(output) or ""}


def _other_output(item: dict[str, Any], kind: EditKind | None, text: str) -> dict[str, Any]:
    output = item.get("output")
    if kind is EditKind.MEDIA:
        return {**item, "output": with_lines(output, text.split("\n"), _is_media, "input_text")}
    if item.get("type") == "shell_call_output" and isinstance(output, list) and output:
        texts = [text or GONE, *([""] * (len(output) - 1))]
        return {
            **item,
            "output": [
                {**part, "stdout": said, "stderr": ""}
                for part, said in zip(output, texts, strict=True)
            ],
        }
    marker = marker_within(output)
    said = text or GONE
    return {**item, "output": [{"type": "input_text", "text": said, **marker}] if marker else said}


def _other_run(items: list[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    """A run with other message texts; one with anything encrypted stays as it came."""
    if any(item.get("encrypted_content") for item in items):
        return items
    found: list[dict[str, Any]] = []
    for item in items:
        if item.get("type", "message") != "message":
            found.append(item)
        elif isinstance(item.get("content"), list):
            said = (part for part in dicts_in(item["content"]) if part.get("type") == "output_text")
            first = next(said, {"type": "output_text", "annotations": []})
            found.append({**item, "content": [{**first, "text": text or GONE, "annotations": []}]})
            text = ""
        else:
            found.append({**item, "content": text or GONE})
            text = ""
    return found


def _is_media(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") not in _PART_TYPES


def _finish(response: Mapping[str, Any], *, calls: bool) -> str | None:
    status = response.get("status")
    details = response.get("incomplete_details")
    if status == "incomplete" and isinstance(details, dict):
        reason = str(details.get("reason") or "incomplete")
        return _ENDS.get(reason, reason)
    if status == "completed":
        output = response.get("output")
        calls = calls or any(isinstance(i, dict) and i.get("type") in CALLS for i in output or ())
        return "tool_calls" if calls else "stop"
    return str(status) if status in ("failed", "cancelled") else None


def _added(kind: str, event: Mapping[str, Any]) -> dict[str, Any]:
    place = event.get("output_index")
    delta = event.get("delta")
    if kind == "response.output_item.added":
        item = event.get("item")
        item = item if isinstance(item, dict) else {}
        if item.get("type") in CALLS:
            function = {
                "name": item.get("name") or item["type"].removesuffix("_call"),
                "arguments": "",
            }
            return {"tool_calls": [{"index": place, "id": _call_id(item), "function": function}]}
        return {"begun": item.get("type")}
    if kind in ("response.function_call_arguments.delta", "response.custom_tool_call_input.delta"):
        return {"tool_calls": [{"index": place, "function": {"arguments": delta}}]}
    if kind in ("response.output_text.delta", "response.refusal.delta"):
        return {"content": delta}
    if kind in ("response.reasoning_summary_text.delta", "response.reasoning_text.delta"):
        return {"reasoning_content": delta}
    return {}


def _whole_in(stream: bytes) -> Mapping[str, Raw]:
    start = stream.rfind(b"\ndata:", 0, stream.rfind(b'"response"') + 1)
    events = Decoder().feed(stream[start + 1 :] + b"\n\n") if start >= 0 else []
    last = split_object(events[0].data) if events and events[0].data[:1] == b"{" else {}
    is_kept = read_value(last.get("type", b"null")) in _GIVEN
    return split_object(bytes(last.get("response", b"{}"))) if is_kept else {}


def _items_done(stream: bytes) -> list[Raw]:
    if is_object(stream):
        return []
    events = (
        event for event in Decoder().feed(stream) if event.name == b"response.output_item.done"
    )
    return [item for event in events if (item := split_object(event.data).get("item")) is not None]


RESPONSES = ResponsesCodec()
