"""What a client calls its conversation, if anything: the conventions that are in use, in order.

A name only labels. It never selects state by itself: several clients send one id for their title request,
main loop and compaction, and most send none.
"""

import json
import re
from collections.abc import Mapping, Sequence
from urllib.parse import unquote

from proxy.wire.raw import Raw, read_value

OWN_HEADER = b"x-weir-conversation"
RESUME_HEADER = b"x-weir-resume"
PARENT_HEADER = b"x-weir-parent"
MEMORY_HEADER = b"x-weir-memory"
_VALID = re.compile(r"[\x21-\x7e]{1,256}")
_SESSION_HEADER = re.compile(rb"x-[a-z0-9-]{1,64}-session-id")
_NOT_A_SESSION = frozenset({b"x-parent-session-id"})
_CODEX = re.compile(r"codex[_-]", re.IGNORECASE)
_KNOWN_HEADERS = (
    b"x-conversation-id",
    b"x-session-id",
    b"x-litellm-session-id",
    b"helicone-session-id",
    b"x-claude-code-session-id",
    b"x-opencode-session",
)
_METADATA_KEYS = ("conversation_id", "session_id", "thread_id", "chat_id")
_BAGGAGE_KEYS = ("gen_ai.conversation.id", "session.id")


def name_from(
    headers: Sequence[tuple[bytes, bytes]], fields: Mapping[str, Raw], *, baggage: bool = False
) -> str | None:
    """The client's name for the conversation, None if it sends none that is valid; ``baggage`` may hold one."""
    sent = dict(headers)
    for name in (OWN_HEADER, *_KNOWN_HEADERS):
        if name in sent and (found := _valid(sent[name])):
            return found
    for name, value in headers:
        if (
            name.endswith(b"-session-id")
            and _SESSION_HEADER.fullmatch(name)
            and name not in _NOT_A_SESSION
            and (found := _valid(value))
        ):
            return found
    found = _from_body(fields) or _from_codex(sent)
    return found or (_from_baggage(sent.get(b"baggage", b"")) if baggage else None)


def conversation_in(headers: Sequence[tuple[bytes, bytes]], header: bytes) -> str | None:
    """The conversation that one of Weir's own headers names, None if it is absent or no valid name."""
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
    """The session in Anthropic's ``metadata.user_id`` as Claude Code writes it: a suffix, or JSON."""
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
    """Codex sends unprefixed names; they count only with its user agent."""
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
