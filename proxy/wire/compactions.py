"""Compactions on the wire: how a client requests one, how the provider is asked, and what is
returned.

A compaction of Weir's is an item (Responses) or a block (Messages) with a sealed text. On the way
up a message with that text takes its place.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from policies.settings import ClientEdits
from policies.summary.material import inside
from proxy.wire.codec import (
    OWN,
    Compactions,
    Made,
    Unseal,
    array_of,
    first_object,
    message_of,
    raw_blocks,
    with_content,
)
from proxy.wire.raw import Raw, named_event, read_value, split_array, write_value

COMPACTION = "compaction"
EDITS = "context_management"
SAID = frozenset({"user", "system", "developer"})
DECLARES = frozenset({"additional_tools", "configuration_update"})
RESULTS = "clear_tool_uses_20250919"
THINKING = "clear_thinking_20251015"
COMPACT = "compact_20260112"
# what Anthropic does where the client leaves them out
RESULTS_AT = 100_000
COMPACT_AT = 150_000
KEPT = 3
COMPACTS = b"compact-2026-01-12"
LEAST_TRIGGER = 50_000  # tokens (platform.claude.com, "Compaction")


def client_edits(fields: Mapping[str, Raw]) -> ClientEdits | None:
    """What the client wants removed from its request by Anthropic's ``context_management``.

    None where it requests nothing, or something unknown here: that is the upstream's to judge.
    """
    field = read_value(fields[EDITS]) if EDITS in fields else None
    if isinstance(field, list):
        return _of_responses(field)
    edits = field.get("edits") if isinstance(field, dict) else None
    if not isinstance(edits, list) or not edits:
        return None
    values: dict[str, Any] = {}
    for edit in edits:
        read = _EDITS.get(str(edit.get("type"))) if isinstance(edit, dict) else None
        if read is None:
            return None
        values |= read(edit)
    return ClientEdits(**values)


def _of_responses(field: list[Any]) -> ClientEdits | None:
    sizes = [
        each.get("compact_threshold")
        for each in field
        if isinstance(each, dict) and each.get("type") == COMPACTION
    ]
    size = sizes[0] if len(sizes) == len(field) == 1 else None
    return (
        ClientEdits(compact_at=size)
        if isinstance(size, int) and not isinstance(size, bool) and size > 0
        else None
    )


def _results(edit: Mapping[str, Any]) -> dict[str, Any]:
    trigger = edit.get("trigger")
    excluded = edit.get("exclude_tools")
    by_uses = isinstance(trigger, dict) and trigger.get("type") == "tool_uses"
    return {
        "results_over" if by_uses else "results_at": _number(trigger, RESULTS_AT),
        "keep": _number(edit.get("keep"), KEPT),
        "at_least": _number(edit.get("clear_at_least"), 0),
        "exclude": (
            frozenset(str(name) for name in excluded) if isinstance(excluded, list) else frozenset()
        ),
    }


def _thinking(edit: Mapping[str, Any]) -> dict[str, Any]:
    return {"thinking": None if edit.get("keep") == "all" else _number(edit.get("keep"), 1)}


def _compact(edit: Mapping[str, Any]) -> dict[str, Any]:
    pauses = edit.get("pause_after_compaction") is True
    return {"compact_at": _number(edit.get("trigger"), COMPACT_AT), "pauses": pauses}


_EDITS = {RESULTS: _results, THINKING: _thinking, COMPACT: _compact}


def _number(value: object, default: int) -> int:
    number = value.get("value") if isinstance(value, dict) else None
    return (
        number
        if isinstance(number, int) and not isinstance(number, bool) and number >= 0
        else default
    )


class ResponsesCompactions(Compactions):
    """Items of Responses."""

    def request(self, _: Mapping[str, Raw], trigger: int) -> tuple[object, tuple[bytes, ...]]:
        return [{"type": COMPACTION, "compact_threshold": trigger}], ()

    def opened(self, elements: Sequence[Raw], unseal: Unseal) -> Sequence[Raw] | None:
        """Before a compaction only items that are not the model's, and declarations, are read."""
        for at in range(len(elements) - 1, -1, -1):
            text = (
                _text_of(first_object(elements[at]), unseal) if OWN in bytes(elements[at]) else None
            )
            if text is not None:
                said = [raw for raw in elements[:at] if _stays(first_object(raw))]
                return [*said, _user_item(text), *elements[at + 1 :]]
        return None

    def answer(self, made: Made) -> bytes:
        events = self._events(made)
        if not made.request.stream:
            return write_value(events[-1]["response"])
        numbered = [{**event, "sequence_number": n} for n, event in enumerate(events)]
        return b"".join(map(named_event, numbered))

    @staticmethod
    def _events(made: Made) -> list[dict[str, Any]]:
        request = made.request
        item = _item(made)
        head = {
            "id": f"resp_{made.name}",
            "object": "response",
            "created_at": made.at,
            "model": request.model,
        }
        said = {
            "tools": [],
            "tool_choice": "auto",
            "parallel_tool_calls": True,
            "store": False,
            "error": None,
        }
        begun = {**head, **said, "status": "in_progress", "output": [], "usage": None}
        whole = {**begun, "status": "completed", "output": [item], "usage": _usage(made)}
        return [
            {"type": "response.created", "response": begun},
            {"type": "response.in_progress", "response": begun},
            {"type": "response.output_item.added", "output_index": 0, "item": item},
            {"type": "response.output_item.done", "output_index": 0, "item": item},
            {"type": "response.completed", "response": whole},
        ]


class MessagesCompactions(Compactions):
    """Blocks of Messages. Only Anthropic makes them."""

    least = LEAST_TRIGGER
    are_ignored_elsewhere = True

    def request(self, fields: Mapping[str, Raw], trigger: int) -> tuple[object, tuple[bytes, ...]]:
        said = read_value(fields[EDITS]) if EDITS in fields else None
        before = said if isinstance(said, dict) else {}
        added = {"type": COMPACT, "trigger": {"type": "input_tokens", "value": trigger}}
        return {**before, "edits": [*before.get("edits", ()), added]}, (COMPACTS,)

    def opened(self, elements: Sequence[Raw], unseal: Unseal) -> Sequence[Raw] | None:
        """Before a compaction nothing is read; its text begins a turn of the user's."""
        for at in range(len(elements) - 1, -1, -1):
            raw = elements[at]
            blocks = raw_blocks(raw) if OWN in bytes(raw) else ()
            for place in range(len(blocks) - 1, -1, -1):
                text = _text_of(read_value(blocks[place]), unseal)
                if text is None:
                    continue
                own = write_value({"type": "text", "text": text})
                rest = blocks[place + 1 :]
                later = elements[at + 1 :]
                if rest and first_object(raw).get("role") == "user":
                    return [with_content(raw, array_of([own, *rest])), *later]
                if rest:
                    return [
                        message_of("user", array_of([own])),
                        with_content(raw, array_of(rest)),
                        *later,
                    ]
                if later and first_object(later[0]).get("role") == "user":
                    return [
                        with_content(later[0], array_of([own, *raw_blocks(later[0])])),
                        *later[1:],
                    ]
                return [message_of("user", array_of([own])), *later]
        return None

    def answer(self, made: Made) -> bytes:
        events = self._events(made)
        whole = events[0]["message"]
        if not made.request.stream:
            return write_value(whole)
        begun = {**whole, "content": [], "stop_reason": None}
        return b"".join(
            map(named_event, [{"type": "message_start", "message": begun}, *events[1:]])
        )

    @staticmethod
    def _events(made: Made) -> list[dict[str, Any]]:
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
            {
                "type": "content_block_start",
                "index": 0,
                "content_block": {"type": COMPACTION, **dict.fromkeys(said)},
            },
            {
                "type": "content_block_delta",
                "index": 0,
                "delta": {"type": "compaction_delta", **said},
            },
            {"type": "content_block_stop", "index": 0},
            {
                "type": "message_delta",
                "delta": {"stop_reason": COMPACTION, "stop_sequence": None},
                "usage": usage,
            },
            {"type": "message_stop"},
        ]


def _text_of(block: object, unseal: Unseal) -> str | None:
    sealed = (
        block.get("encrypted_content")
        if isinstance(block, dict) and block.get("type") == COMPACTION
        else None
    )
    return unseal(sealed) if isinstance(sealed, str) and sealed.startswith(OWN.decode()) else None


def _stays(item: Mapping[str, Any]) -> bool:
    kind = item.get("type", "message")
    return kind in DECLARES or (kind == "message" and item.get("role") in SAID)


def _user_item(text: str) -> bytes:
    part = {"type": "input_text", "text": text}
    return write_value({"type": "message", "role": "user", "content": [part]})


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
