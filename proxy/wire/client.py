"""What a client calls its conversation, if anything, and the standard fields by which it says what may be edited.

Names are those of the conventions that are in use, in order. A name only labels. It never selects state by itself:
several clients send one id for their title request, main loop and compaction, and most send none.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import unquote

from policies.settings import ClientEdits
from proxy.wire.raw import Raw, read_value

OWN_HEADER = b"x-weir-conversation"
RESUME_HEADER = b"x-weir-resume"
PARENT_HEADER = b"x-weir-parent"
MEMORY_HEADER = b"x-weir-memory"
_VALID = re.compile(r"[\x21-\x7e]{1,256}")
_SESSION_HEADER = re.compile(rb"x-[a-z0-9-]{1,64}-session-id")
_NOT_A_SESSION = frozenset({b"x-parent-session-id"})
_CODEX = re.compile(r"codex[_-]", re.IGNORECASE)
_NAMING = (
    OWN_HEADER,
    b"x-conversation-id",
    b"x-session-id",
    b"x-litellm-session-id",
    b"helicone-session-id",
    b"x-claude-code-session-id",
    b"x-opencode-session",
)
_NAMING_ONLY = frozenset(_NAMING)
_METADATA_KEYS = ("conversation_id", "session_id", "thread_id", "chat_id")
_BAGGAGE_KEYS = ("gen_ai.conversation.id", "session.id")


def name_from(
    headers: Sequence[tuple[bytes, bytes]], fields: Mapping[str, Raw], *, baggage: bool = False
) -> str | None:
    """The client's name for the conversation, None if it sends none that is valid; ``baggage`` may hold one."""
    sent = dict(headers)
    for name in _NAMING if not _NAMING_ONLY.isdisjoint(sent) else ():
        if name in sent and (found := _valid(sent[name])):
            return found
    for name, value in headers if b"-session-id" in b" ".join(sent) else ():
        if _SESSION_HEADER.fullmatch(name) and name not in _NOT_A_SESSION and (found := _valid(value)):
            return found
    found = _from_body(fields) or _from_codex(sent)
    return found or (_from_baggage(sent.get(b"baggage", b"")) if baggage else None)


def conversation_in(headers: Sequence[tuple[bytes, bytes]], header: bytes) -> str | None:
    return next((_valid(value) for name, value in headers if name == header), None)


def _valid(value: object) -> str | None:
    text = value.decode("latin-1").strip() if isinstance(value, bytes) else value
    return text if isinstance(text, str) and _VALID.fullmatch(text) else None


def _from_body(fields: Mapping[str, Raw]) -> str | None:
    for key in ("session_id", "conversation", "litellm_session_id"):
        if key in fields:
            value = read_value(fields[key])
            found = _valid(value.get("id") if isinstance(value, dict) else value)
            if found:
                return found
    metadata = read_value(fields["metadata"]) if "metadata" in fields else None
    if not isinstance(metadata, dict):
        return None
    for key in _METADATA_KEYS:
        if found := _valid(metadata.get(key)):
            return found
    return _from_user_id(metadata.get("user_id"))


def _from_user_id(user_id: object) -> str | None:
    if not isinstance(user_id, str):
        return None
    _, found, session = user_id.rpartition("_session_")
    if found:
        return _valid(session)
    try:
        value = json.loads(user_id)
    except (ValueError, RecursionError):
        return None
    return _valid(value.get("session_id")) if isinstance(value, dict) else None


def _from_codex(sent: Mapping[bytes, bytes]) -> str | None:
    if _CODEX.match(sent.get(b"user-agent", b"").decode("latin-1")):
        for name in (b"session-id", b"thread-id", b"session_id", b"conversation_id"):
            if name in sent and (found := _valid(sent[name])):
                return found
    return _valid(sent[b"x-session-affinity"]) if b"x-session-affinity" in sent else None


def _from_baggage(baggage: bytes) -> str | None:
    if not baggage:
        return None
    entries = dict(e.split("=", 1) for e in baggage[:8192].decode("latin-1").split(",") if "=" in e)
    members = {k.strip(): unquote(v.split(";", 1)[0].strip()) for k, v in entries.items()}
    return next((found for key in _BAGGAGE_KEYS if (found := _valid(members.get(key)))), None)


EDITS = "context_management"
RESULTS, THINKING, COMPACT = "clear_tool_uses_20250919", "clear_thinking_20251015", "compact_20260112"
COMPACTION = "compaction"
RESULTS_AT, COMPACT_AT, KEPT = 100_000, 150_000, 3  # what Anthropic does where the client leaves them out


def wants_no_editing(fields: Mapping[str, Raw]) -> bool:
    """Whether the request forbids editing: ``truncation: "disabled"`` (OpenAI), or OpenRouter's plugin or
    transforms switched off."""
    if "truncation" in fields and read_value(fields["truncation"]) == "disabled":
        return True
    if "transforms" in fields and read_value(fields["transforms"]) == []:
        return True
    plugins = read_value(fields["plugins"]) if "plugins" in fields else None
    return isinstance(plugins, list) and any(
        isinstance(p, dict) and p.get("id") == "context-compression" and p.get("enabled") is False for p in plugins
    )


def may_be_truncated(fields: Mapping[str, Raw]) -> bool:
    return bytes(fields.get("truncation", b"")) == b'"auto"'


def client_edits(fields: Mapping[str, Raw]) -> ClientEdits | None:
    """What the client asks to have taken out of its request by Anthropic's ``context_management``.

    None where it asks for nothing, or for something that is not known here: that is the upstream's to judge.
    """
    asked = read_value(fields[EDITS]) if EDITS in fields else None
    if isinstance(asked, list):
        return _of_responses(asked)
    edits = asked.get("edits") if isinstance(asked, dict) else None
    if not isinstance(edits, list) or not edits:
        return None
    values: dict[str, Any] = {}
    for edit in edits:
        read = _EDITS.get(str(edit.get("type"))) if isinstance(edit, dict) else None
        if read is None:
            return None
        values |= read(edit)
    return ClientEdits(**values)


def _of_responses(asked: list[Any]) -> ClientEdits | None:
    sizes = [
        each.get("compact_threshold") for each in asked if isinstance(each, dict) and each.get("type") == COMPACTION
    ]
    size = sizes[0] if len(sizes) == len(asked) == 1 else None
    return ClientEdits(compact_at=size) if isinstance(size, int) and not isinstance(size, bool) and size > 0 else None


def _results(edit: Mapping[str, Any]) -> dict[str, Any]:
    trigger, excluded = edit.get("trigger"), edit.get("exclude_tools")
    by_uses = isinstance(trigger, dict) and trigger.get("type") == "tool_uses"
    return {
        "results_over" if by_uses else "results_at": _number(trigger, RESULTS_AT),
        "keep": _number(edit.get("keep"), KEPT),
        "at_least": _number(edit.get("clear_at_least"), 0),
        "exclude": frozenset(str(name) for name in excluded) if isinstance(excluded, list) else frozenset(),
    }


def _thinking(edit: Mapping[str, Any]) -> dict[str, Any]:
    return {"thinking": None if edit.get("keep") == "all" else _number(edit.get("keep"), 1)}


def _compact(edit: Mapping[str, Any]) -> dict[str, Any]:
    pauses = edit.get("pause_after_compaction") is True
    return {"compact_at": _number(edit.get("trigger"), COMPACT_AT), "pauses": pauses}


_EDITS = {RESULTS: _results, THINKING: _thinking, COMPACT: _compact}


def _number(value: object, default: int) -> int:
    number = value.get("value") if isinstance(value, dict) else None
    return number if isinstance(number, int) and not isinstance(number, bool) and number >= 0 else default
